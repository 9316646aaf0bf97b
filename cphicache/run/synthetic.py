"""A seeded multi-turn workload in the form of a trace, made so that every path of the cache is walked on a small machine.

Arrivals are dealt from shuffled decks, so that each deck holds every kind of arrival whatever the seed. Drawn from
:class:`random.Random` with exact arithmetic only: a seed gives the same trace on every platform.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from random import Random

from cphicache.run.trace import BLOCK_TOKENS, TraceError, TraceRequest

_MEAN_GAP_MS = 50
_PAUSE_GAPS = 25
"""A conversation comes back after a lull of about so many mean gaps."""
_SYSTEM_PROMPT_BLOCKS = (1, 2, 2)
_MAX_CONVERSATION_BLOCKS = 8
_MAX_CONVERSATIONS = 12
_OUTPUT_TOKENS = (16, 256)

_Prompt = tuple[tuple[int, ...], int]
"""What a prompt is made of: its hash ids, and the tokens of its last block."""


def synthetic_trace(requests: int, seed: int) -> list[TraceRequest]:
    """``requests`` unscaled requests, sorted by arrival; a shorter trace of the same seed is the beginning of a longer one.

    Of 1 to 8 blocks of 512 tokens, a few of 10 to 16. Conversations share three system prompts; turn k's hash ids extend those of
    turn k-1; some prompts arrive twice at once, some branch off inside the chain of a request that arrived just before, some
    conversations come back after a pause. Gaps are exponential (mean 50 ms). Raises ValueError for counts below 1, seeds below 0.
    """
    if requests < 1:
        raise ValueError(f"requests {requests} is below 1; give a positive number of requests")
    if seed < 0:
        raise ValueError(f"seed {seed} is negative; give 0 or more")
    workload = _Workload(seed)
    while len(workload.requests) < requests:
        workload.deal()
    return workload.requests[:requests]


def write_trace(path: str | os.PathLike[str], requests: Iterable[TraceRequest]) -> None:
    """Write unscaled requests as Mooncake JSONL, all or nothing: a temporary file in the same folder is renamed to ``path``.

    Raises ValueError for a scaled request (the form has 512-token blocks), :class:`TraceError` when the file cannot be written.
    """
    target = Path(path)
    lines = [_line(request) for request in requests]
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        try:
            temporary.write_text("".join(lines), encoding="utf-8", newline="\n")
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise TraceError(f"{target}: cannot be written ({error.strerror or error}); give a file in a writable folder") from error


def _line(request: TraceRequest) -> str:
    if request.block_size_tokens != BLOCK_TOKENS:
        raise ValueError(f"request {request.index} has blocks of {request.block_size_tokens} tokens; write it before it is scaled")
    fields = {
        "timestamp": request.timestamp_ms,
        "input_length": request.input_length,
        "output_length": request.output_length,
        "hash_ids": request.hash_ids,
    }
    return json.dumps(fields) + "\n"


class _Conversation:
    """A chain of blocks that grows by turns; its head is a system prompt that other conversations begin with as well."""

    __slots__ = ("hash_ids", "last_block_tokens")

    def __init__(self, hash_ids: list[int], last_block_tokens: int) -> None:
        self.hash_ids = hash_ids
        self.last_block_tokens = last_block_tokens


class _Workload:
    """The generator's state: a clock, a counter of fresh hash ids, and the open conversations, least recently used first."""

    def __init__(self, seed: int) -> None:
        self.requests: list[TraceRequest] = []
        self._rng = Random(seed)
        self._clock_ms = 0
        self._next_id = 0
        self._system_prompts = [self._fresh(blocks) for blocks in _SYSTEM_PROMPT_BLOCKS]
        self._conversations: list[_Conversation] = []

    def deal(self) -> None:
        """One deck: every kind of arrival at least once, in shuffled order."""
        deck: list[Callable[[], None]] = [self._start] * 3 + [self._turn] * 6 + [self._twins] * 2 + [self._branch] * 3
        deck += [self._long, self._come_back, self._come_back]
        self._rng.shuffle(deck)
        for arrival in deck:
            self._clock_ms += self._gap_ms(1)
            arrival()

    # -- kinds of arrivals --------------------------------------------------------------------------------------------------
    def _start(self) -> None:
        conversation = _Conversation(list(self._system_prompt()), BLOCK_TOKENS)
        self._conversations.append(conversation)
        del self._conversations[:-_MAX_CONVERSATIONS]
        self._say(conversation)

    def _turn(self) -> None:
        """The next turn of one of the conversations used last; a new one when there is none, or when it is full."""
        self._go_on(max(0, len(self._conversations) - 1 - self._rng.randrange(4)))

    def _come_back(self) -> None:
        """The conversation that was silent longest goes on, after a lull in which the device has had time to evict."""
        self._clock_ms += self._gap_ms(_PAUSE_GAPS)
        self._go_on(0)

    def _twins(self) -> None:
        """The same prompt twice (now and then three times) at once: the later ones bind a duplicate."""
        prompt = self._prompt(2 + self._rng.randrange(4))
        for _ in range(2 + (self._rng.randrange(4) == 0)):
            self._arrive(prompt)

    def _branch(self) -> None:
        """A fresh chain, and prompts that leave it in its middle: one at the same time (its insert meets a pending node), one
        shortly after (its match does)."""
        chain = self._prompt(4 + self._rng.randrange(4))
        self._arrive(chain)
        self._arrive(self._branched(chain))
        self._clock_ms += self._rng.randrange(1, _MEAN_GAP_MS)
        self._arrive(self._branched(chain))

    def _long(self) -> None:
        self._arrive(self._prompt(9 + self._rng.randrange(6)))

    # -- parts ----------------------------------------------------------------------------------------------------------------
    def _go_on(self, place: int) -> None:
        if not self._conversations:
            self._start()
            return
        conversation = self._conversations.pop(place)
        if len(conversation.hash_ids) >= _MAX_CONVERSATION_BLOCKS:
            self._start()
            return
        self._conversations.append(conversation)
        self._say(conversation)

    def _say(self, conversation: _Conversation) -> None:
        """One turn: the rest of the last block is filled, and one or two blocks follow."""
        room = _MAX_CONVERSATION_BLOCKS - len(conversation.hash_ids)
        conversation.hash_ids += self._fresh(min(room, 1 + self._rng.randrange(2)))
        conversation.last_block_tokens = self._last_block_tokens()
        self._arrive((tuple(conversation.hash_ids), conversation.last_block_tokens))

    def _prompt(self, fresh_blocks: int) -> _Prompt:
        return tuple(self._system_prompt() + self._fresh(fresh_blocks)), self._last_block_tokens()

    def _branched(self, chain: _Prompt) -> _Prompt:
        hash_ids, _ = chain
        shared = self._rng.randrange(2, len(hash_ids))
        return hash_ids[:shared] + tuple(self._fresh(1 + self._rng.randrange(2))), self._last_block_tokens()

    def _system_prompt(self) -> list[int]:
        return self._system_prompts[self._rng.randrange(len(self._system_prompts))]

    def _fresh(self, blocks: int) -> list[int]:
        first, self._next_id = self._next_id, self._next_id + blocks
        return list(range(first, self._next_id))

    def _last_block_tokens(self) -> int:
        """A third of the prompts end on a block border, the others anywhere."""
        return BLOCK_TOKENS if self._rng.randrange(3) == 0 else 1 + self._rng.randrange(BLOCK_TOKENS)

    def _arrive(self, arrival: _Prompt) -> None:
        hash_ids, last_block_tokens = arrival
        low, high = _OUTPUT_TOKENS
        self.requests.append(
            TraceRequest(
                index=len(self.requests),
                timestamp_ms=self._clock_ms,
                input_length=(len(hash_ids) - 1) * BLOCK_TOKENS + last_block_tokens,
                output_length=low + self._rng.randrange(high - low + 1),
                hash_ids=hash_ids,
            )
        )

    def _gap_ms(self, mean_gaps: int) -> int:
        """An exponential gap by von Neumann's comparison method: no logarithm, whose last bit differs between platforms."""
        whole = 0
        while True:
            first = smallest = self._rng.random()
            run = 1
            while (draw := self._rng.random()) < smallest:
                smallest = draw
                run += 1
            if run % 2 == 1:
                return int((whole + first) * _MEAN_GAP_MS * mean_gaps)
            whole += 1
