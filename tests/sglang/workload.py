"""Random requests with shared prefixes, as plain data: the same for every scheduler that serves them."""

import random
from dataclasses import dataclass

STEMS = (48, 130, 200, 330)
"""Tokens of the prompts' common beginnings; the longer ones take several chunks."""
LONG = 0.12
"""Share of requests that decode so much that a small device pool runs out of pages, which makes SGLang take requests back."""
WHOLE = "FINISH_LENGTH"


@dataclass(frozen=True)
class Asked:
    """``abort_at``: the request is aborted when it has so many tokens; None: never."""

    rid: str
    tokens: list[int]
    new_tokens: int
    abort_at: int | None


def random_tokens(rng, length):
    return [rng.randrange(3, 500) for _ in range(length)]


def random_requests(count, seed=3):
    """Prompts that share all of a stem, half of it, or all but its end, and go on with some tokens of their own."""
    rng = random.Random(seed)
    stems = [random_tokens(rng, length) for length in STEMS]
    requests = []
    for index in range(count):
        stem = rng.choice(stems)
        tokens = stem[: rng.choice((len(stem), len(stem) // 2, len(stem) - 5))] + random_tokens(rng, rng.randrange(1, 60))
        new_tokens = rng.randrange(50, 90) if rng.random() < LONG else rng.randrange(1, 9)
        abort_at = rng.randrange(0, 3) if rng.random() < 0.1 else None
        requests.append(Asked(f"r{index}", tokens, new_tokens, abort_at))
    return requests


def differing(served, reference):
    """Requests whose tokens are not those of the reference, of aborted ones as far as they went."""
    return [
        rid
        for rid, told in served.items()
        if told["tokens"] != reference[rid]["tokens"][: len(told["tokens"])]
        or (told["reason"] == WHOLE and len(told["tokens"]) != len(reference[rid]["tokens"]))
    ]


def cached(served, other=None):
    """(device tokens, host tokens) that requests had from the cache; with ``other``, of those that were served whole there too."""
    whole = [rid for rid, told in served.items() if told["reason"] == WHOLE and (other is None or other[rid]["reason"] == WHOLE)]
    return tuple(sum(served[rid][tier] for rid in whole) for tier in ("device", "host"))
