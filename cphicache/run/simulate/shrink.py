"""Makes a failing world smaller, greedily, while it fails in the same way. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

from cphicache.run.config import ConfigError
from cphicache.run.simulate.drawn import DrawnWorld
from cphicache.run.simulate.outcome import Outcome

T = TypeVar("T")
MOST_TRIES = 200
"""Worlds that are run in search of a smaller one."""

_PLAIN: tuple[tuple[str, Any], ...] = (
    ("abort_rate", 0.0),
    ("retract_rate", 0.0),
    ("draft_layers", 0),
    ("layers", 1),
    ("kv_replicated", False),
    ("check_ranks", 0),
    ("policy", "write_through"),
    ("eviction_policy", "lru"),
    ("overlap", True),
    ("reclaim_device_valid", False),
    ("max_retries", 0),
    ("max_batch", 1),
    ("arrival", "asap"),
    ("kv_dtype", "bf16"),
    ("index_every", 1),
)
_COPIES = {"kv": "mla", "layout": "layer_first", "backend": "torch", "reference_operators": False}


def shrink(
    world: DrawnWorld, failed: Outcome, run: Callable[[DrawnWorld], Outcome], *, tries: int = MOST_TRIES
) -> tuple[DrawnWorld, Outcome]:
    """The smallest world found that fails like ``failed``, and how it failed. At most ``tries`` worlds are run."""
    smaller = True
    while smaller:
        smaller = False
        for candidate in _smaller(world):
            if tries == 0:
                return world, failed
            tries -= 1
            outcome = run(candidate)
            if outcome.fails_like(failed):
                world, failed, smaller = candidate, outcome, True
                break
    return world, failed


def _smaller(world: DrawnWorld) -> Iterator[DrawnWorld]:
    """Worlds that are one step smaller, big steps first. Only those that can run."""
    for candidate in _steps(world):
        try:
            ranks = candidate.config.cp_size
        except ConfigError:
            continue
        if len(candidate.slowness) == ranks:
            yield candidate


def _fewer(planned: tuple[T, ...]) -> Iterator[tuple[T, ...]]:
    """None of it, then all but one."""
    if planned:
        yield ()
    if len(planned) > 1:
        yield from (planned[:at] + planned[at + 1 :] for at in range(len(planned)))


def _steps(world: DrawnWorld) -> Iterator[DrawnWorld]:
    options = world.options
    requests = options["requests"]
    for fewer in sorted({requests // 2, requests * 3 // 4, requests - 1} - {0, requests}):
        yield world.with_options(requests=fewer)
    if world.lost is not None:
        yield replace(world, lost=None)
    for faults in _fewer(world.faults):
        yield replace(world, faults=faults)
    for actions in _fewer(world.actions):
        yield replace(world, actions=actions)
    for ranks in range(1, options["cp_size"]):
        kept = tuple(fault for fault in world.faults if fault.rank < ranks)
        lost = None if world.lost is None or world.lost.rank >= ranks else world.lost
        yield replace(world.with_options(cp_size=ranks), slowness=world.slowness[:ranks], faults=kept, lost=lost)
    for name, plain in _PLAIN:
        if options[name] != plain:
            yield world.with_options(**{name: plain})
    if any(options[name] != plain for name, plain in _COPIES.items()):
        yield world.with_options(**_COPIES)
    if world.jitter:
        yield replace(world, jitter=0.0)
    if set(world.slowness) != {1.0}:
        yield replace(world, slowness=(1.0,) * len(world.slowness))
    for name in ("device_tokens", "host_tokens", "chunk_tokens"):
        step = options["page_size"] * (1 if name == "chunk_tokens" or options["kv_replicated"] else options["cp_size"])
        for share in (2, 4):
            less = options[name] - max(step, options[name] // share // step * step)
            if 0 < less < options[name]:
                yield world.with_options(**{name: less})
