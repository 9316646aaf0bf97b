"""Streams on a virtual clock: a discrete-event simulation whose order of effects follows from one seed and the calls made.

Everything about an item is known when it is submitted, because its stream's earlier items and the events that it waits for were
submitted before it:

    start = max(submission time, end of the stream's previous item, completion of the events waited for)
    end   = start + cost_us * (1 + jitter * tail)

Only its effect, calling ``work``, is put off until the clock gets there. Between two calls of the scheduler thread

    every effect that has run is at a time <= now < every effect that has not,

and new items start at ``now`` or later, so effects run in one global order of time; equal times run in submission order, which
obeys FIFO and events.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite
from typing import NamedTuple

from cphicache.transfer.port import Wait
from cphicache.transfer.streams.errors import (
    QUEUE_LIMIT,
    Failures,
    check_open,
    check_outside_work,
    check_queue,
    check_queue_limit,
)
from cphicache.transfer.streams.port import Event

TAIL_SHAPE = 1.1
"""Shape of the Pareto tail of durations: a finite mean, no variance."""

TAIL_LIMIT = 1_000.0
"""Largest draw of the tail; a copy lasts at most ``cost_us * (1 + jitter * TAIL_LIMIT)``."""


@dataclass(frozen=True, slots=True, eq=False)
class VirtualEvent:
    """Complete when the clock of ``owner`` has reached ``completion_us``."""

    owner: VirtualStreams
    completion_us: float


class _Effect(NamedTuple):
    """Ordered by time, then by submission; sequence numbers are unique, so the rest is never compared."""

    time_us: float
    sequence: int
    stream: VirtualStream
    work: Callable[[], None]


class VirtualStream:
    """One FIFO of the simulation. Made by :meth:`VirtualStreams.stream`."""

    __slots__ = ("_name", "_owner", "_queued", "_ready_us")

    def __init__(self, owner: VirtualStreams, name: str) -> None:
        self._owner = owner
        self._name = name
        self._ready_us = 0.0  # end of the last item and of every wait since: the next item starts no earlier
        self._queued = 0  # effects that have not run

    @property
    def name(self) -> str:
        """Name of the stream."""
        return self._name

    @property
    def takes_whole(self) -> bool:
        """No: each part has a duration of its own, and a time of its own at which it takes effect."""
        return False

    def submit(self, work: Callable[[], None], *, cost_us: float = 0.0) -> None:
        """Queue ``work`` for ``cost_us`` microseconds of virtual time, plus jitter. An effect that is due now runs at once.

        Raises ValueError for a negative or infinite cost, :class:`StreamError` for work that raised earlier, for a full queue and
        after ``close``; nothing is queued then.
        """
        owner = self._owner
        owner._check_call(self._name)
        owner._failures.surface()
        _check_duration("cost_us", cost_us)
        check_queue(self._name, self._queued, owner._queue_limit)
        start_us = max(owner._now_us, self._ready_us)
        duration_us, at_start = owner._draw(cost_us)
        self._ready_us = start_us + duration_us
        self._queued += 1
        owner._schedule(start_us if at_start else self._ready_us, self, work)

    def record(self) -> VirtualEvent:
        """An event that completes when everything submitted so far has ended (now, if that is the case already)."""
        self._owner._check_call(self._name)
        return VirtualEvent(self._owner, max(self._owner._now_us, self._ready_us))

    def wait(self, event: Event, why: Wait) -> None:
        """Later items start no earlier than ``event``'s completion. Events of other, closed :class:`VirtualStreams` are complete;
        those of open ones raise ValueError, since two clocks do not compare."""
        self._owner._check_call(self._name)
        self._ready_us = max(self._ready_us, self._owner.completion_us(event))


class VirtualStreams:
    """A virtual clock behind the stream port; see :class:`cphicache.transfer.streams.port.Streams`.

    The clock (microseconds, from 0) advances only by :meth:`pause`, :meth:`synchronize` and :meth:`close`. With ``jitter`` 0 an
    item lasts exactly its cost and has its effect at its end. With ``jitter`` > 0 durations have a bounded Pareto tail, and the
    seeded generator decides for each item whether the effect comes at its start or at its end: over the seeds, items that cost
    something take effect in every order that FIFO and events allow. Items of cost 0 stay instantaneous.
    Same seed and same calls: same order. ``queue_limit``: effects that a stream may hold; one more is a :class:`StreamError`.
    Raises ValueError for a negative or infinite jitter and for a limit below 1.
    """

    __slots__ = (
        "_closed",
        "_failures",
        "_heap",
        "_jitter",
        "_now_us",
        "_queue_limit",
        "_random",
        "_running",
        "_sequence",
        "_streams",
    )

    def __init__(self, seed: int = 0, jitter: float = 0.0, *, queue_limit: int = QUEUE_LIMIT) -> None:
        if not (isfinite(jitter) and jitter >= 0.0):
            raise ValueError(f"jitter is {jitter}: a finite factor >= 0 is needed")
        check_queue_limit(queue_limit)
        self._jitter = jitter
        self._queue_limit = queue_limit
        self._random = random.Random(seed)
        self._now_us = 0.0
        self._heap: list[_Effect] = []
        self._sequence = 0
        self._streams: dict[str, VirtualStream] = {}
        self._failures = Failures()
        self._running = False
        self._closed = False

    def stream(self, name: str) -> VirtualStream:
        """The stream of that name, created on first use."""
        self._check_call(name)
        known = self._streams.get(name)
        if known is None:
            known = self._streams[name] = VirtualStream(self, name)
        return known

    def query(self, event: Event, why: Wait) -> bool:
        """Is the event's completion time <= now? Raises :class:`StreamError` for work that raised earlier."""
        self._check_caller()
        self._failures.surface()
        return self.completion_us(event) <= self._now_us

    def synchronize(self, event: Event) -> None:
        """Advance the clock to the event's completion (not at all if that is past), then raise :class:`StreamError` for work that
        raised."""
        self._check_caller()
        self._advance(self.completion_us(event))
        self._failures.surface()

    def pause(self, duration_us: float) -> None:
        """Advance the clock by ``duration_us`` microseconds; raises ValueError for a negative or infinite duration."""
        self._check_caller()
        _check_duration("duration_us", duration_us)
        self._advance(self._now_us + duration_us)

    @property
    def now_us(self) -> float:
        """Virtual time in microseconds; inside work the time of its effect."""
        return self._now_us

    def completion_us(self, event: Event) -> float:
        """Virtual time in microseconds at which ``event`` completes or completed. Events of other, closed streams: 0."""
        if not isinstance(event, VirtualEvent):
            raise TypeError(f"{type(event).__name__} is no event of virtual streams: pass what record() returned")
        if event.owner is self:
            return event.completion_us
        if event.owner._closed:
            return 0.0
        raise ValueError("event of other virtual streams that are still open: their clock is not this one; close them first")

    def close(self) -> None:
        """Advance the clock to the end of everything queued, then raise :class:`StreamError` for work that raised and was not
        reported. Idempotent."""
        self._check_caller()
        self._closed = True
        self._advance(max((stream._ready_us for stream in self._streams.values()), default=0.0))
        self._failures.surface()

    def _check_call(self, name: str) -> None:
        self._check_caller()
        check_open(name, closed=self._closed)

    def _check_caller(self) -> None:
        check_outside_work(inside=self._running)

    def _draw(self, cost_us: float) -> tuple[float, bool]:
        """Duration of the next item, and whether its effect comes at its start."""
        if self._jitter == 0.0:
            return cost_us, False
        tail = min(self._random.paretovariate(TAIL_SHAPE) - 1.0, TAIL_LIMIT)
        return cost_us * (1.0 + self._jitter * tail), self._random.random() < 0.5

    def _schedule(self, time_us: float, stream: VirtualStream, work: Callable[[], None]) -> None:
        heapq.heappush(self._heap, _Effect(time_us, self._sequence, stream, work))
        self._sequence += 1
        self._advance(self._now_us)

    def _advance(self, until_us: float) -> None:
        """Run the effects that are due up to ``until_us`` in order, and set the clock to it (never back)."""
        while self._heap and self._heap[0].time_us <= until_us:
            effect = heapq.heappop(self._heap)
            self._now_us = effect.time_us
            effect.stream._queued -= 1
            self._running = True
            try:
                effect.work()
            except Exception as error:
                self._failures.add(effect.stream.name, effect.work, error)
            finally:
                self._running = False
        self._now_us = max(self._now_us, until_us)


def _check_duration(what: str, duration_us: float) -> None:
    if not (isfinite(duration_us) and duration_us >= 0.0):
        raise ValueError(f"{what} is {duration_us}: a finite number of microseconds >= 0 is needed")
