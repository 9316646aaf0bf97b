"""Removes exactly one wait from any streams, so that a test can show that the wait is needed (R34)."""

from __future__ import annotations

from collections.abc import Callable

from cphicache.transfer.port import Wait
from cphicache.transfer.streams.port import Event, Stream, Streams


class DroppingStream:
    """Forwards to ``inner``; waits named ``drop`` are counted and forgotten."""

    def __init__(self, owner: DroppingStreams, inner: Stream) -> None:
        self._owner = owner
        self._inner = inner

    @property
    def name(self) -> str:
        return self._inner.name

    @property
    def takes_whole(self) -> bool:
        return self._inner.takes_whole

    def submit(self, work: Callable[[], None], *, cost_us: float = 0.0) -> None:
        self._inner.submit(work, cost_us=cost_us)

    def record(self) -> Event:
        return self._inner.record()

    def wait(self, event: Event, why: Wait) -> None:
        if why is self._owner.drop:
            self._owner.dropped += 1
        else:
            self._inner.wait(event, why)


class DroppingStreams:
    """Forwards everything to ``inner`` but ignores ``Stream.wait`` and answers True to ``query`` where ``why`` is ``drop``.

    ``dropped`` counts what was removed: a test that expects wrong bytes asserts first that it is not 0.
    """

    def __init__(self, inner: Streams, drop: Wait) -> None:
        self._inner = inner
        self._wrapped: dict[str, DroppingStream] = {}
        self.drop = drop
        self.dropped = 0

    def stream(self, name: str) -> Stream:
        inner = self._inner.stream(name)
        if name not in self._wrapped:
            self._wrapped[name] = DroppingStream(self, inner)
        return self._wrapped[name]

    def query(self, event: Event, why: Wait) -> bool:
        if why is self.drop:
            self.dropped += 1
            return True
        return self._inner.query(event, why)

    def synchronize(self, event: Event) -> None:
        self._inner.synchronize(event)

    def pause(self, duration_us: float) -> None:
        self._inner.pause(duration_us)

    @property
    def now_us(self) -> float | None:
        return self._inner.now_us

    def close(self) -> None:
        self._inner.close()
