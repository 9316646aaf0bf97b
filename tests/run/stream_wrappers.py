"""Streams around streams: one records what is submitted and when it happens, one lets the scheduler run ahead of the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from cphicache.transfer.jobs import CopyBatch
from cphicache.transfer.port import Wait
from cphicache.transfer.streams.port import Event, Stream, Streams
from cphicache.transfer.streams.virtual import VirtualStreams


class Item(NamedTuple):
    """A work item that costs time: a layer's compute, or a layer's copy."""

    stream: str
    seq: int
    """Last event in the log when it was submitted."""
    tick: int
    submitted_us: float
    done_us: float
    batch: CopyBatch | None
    """What a copy copies."""


class RecordingStreams:
    """Forwards to a virtual clock; ``items`` are in order of submission. ``log_position`` gives (last sequence number, tick)."""

    def __init__(self, inner: VirtualStreams) -> None:
        self._inner = inner
        self._wrapped: dict[str, _RecordingStream] = {}
        self.items: list[Item] = []
        self.log_position: Callable[[], tuple[int, int]] = lambda: (-1, 0)

    def stream(self, name: str) -> Stream:
        if name not in self._wrapped:
            self._wrapped[name] = _RecordingStream(self, self._inner, name)
        return self._wrapped[name]

    def query(self, event: Event, why: Wait) -> bool:
        return self._inner.query(event, why)

    def synchronize(self, event: Event) -> None:
        self._inner.synchronize(event)

    def pause(self, duration_us: float) -> None:
        self._inner.pause(duration_us)

    @property
    def now_us(self) -> float:
        return self._inner.now_us

    def close(self) -> None:
        self._inner.close()

    def of(self, stream: str, tick: int) -> list[Item]:
        """What a tick submitted to one stream."""
        return [item for item in self.items if item.stream == stream and item.tick == tick]


class _RecordingStream:
    def __init__(self, owner: RecordingStreams, clock: VirtualStreams, name: str) -> None:
        self._owner = owner
        self._clock = clock
        self._inner = clock.stream(name)
        self.name = name

    @property
    def takes_whole(self) -> bool:
        return self._inner.takes_whole

    def submit(self, work: Callable[[], None], *, cost_us: float = 0.0) -> None:
        seq, tick = self._owner.log_position()
        submitted_us = self._clock.now_us
        self._inner.submit(work, cost_us=cost_us)
        if cost_us > 0.0:
            done_us = self._clock.completion_us(self._inner.record())
            batch = next((part for part in work.args if isinstance(part, CopyBatch)), None) if isinstance(work, partial) else None
            self._owner.items.append(Item(self.name, seq, tick, submitted_us, done_us, batch))

    def record(self) -> Event:
        return self._inner.record()

    def wait(self, event: Event, why: Wait) -> None:
        self._inner.wait(event, why)


class RunAheadStreams:
    """The scheduler waits for the forward of ``depth`` steps ago only, as one does that schedules the next step while the device still
    works on the last. Waits for copies are kept."""

    def __init__(self, inner: Streams, depth: int) -> None:
        self._inner = inner
        self._depth = depth
        self._compute: _Compute | None = None
        self._behind: deque[Event] = deque()

    def stream(self, name: str) -> Stream:
        if name != "compute":
            return self._inner.stream(name)
        if self._compute is None:
            self._compute = _Compute(self._inner.stream(name))
        return self._compute

    def query(self, event: Event, why: Wait) -> bool:
        return self._inner.query(event, why)

    def synchronize(self, event: Event) -> None:
        if self._compute is None or event not in self._compute.recorded:
            self._inner.synchronize(event)
            return
        self._behind.append(event)
        if len(self._behind) > self._depth:
            self._inner.synchronize(self._behind.popleft())

    def pause(self, duration_us: float) -> None:
        self._inner.pause(duration_us)

    @property
    def now_us(self) -> float | None:
        return self._inner.now_us

    def close(self) -> None:
        self._inner.close()


class _Compute:
    """The compute stream, and which events are its own."""

    def __init__(self, inner: Stream) -> None:
        self._inner = inner
        self.recorded: set[Event] = set()

    @property
    def name(self) -> str:
        return self._inner.name

    @property
    def takes_whole(self) -> bool:
        return self._inner.takes_whole

    def submit(self, work: Callable[[], None], *, cost_us: float = 0.0) -> None:
        self._inner.submit(work, cost_us=cost_us)

    def record(self) -> Event:
        event = self._inner.record()
        self.recorded.add(event)
        return event

    def wait(self, event: Event, why: Wait) -> None:
        self._inner.wait(event, why)
