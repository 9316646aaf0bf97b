"""Canaries: bugs that a simulation plants from outside, at the ports of the very classes that serve. Each must be caught."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from cphicache.run.simulate.outcome import Code
from cphicache.transfer.port import Wait
from cphicache.transfer.streams.port import Event, Stream, Streams


@dataclass(frozen=True, slots=True)
class Canary:
    """A bug, and what it must be caught as: one of ``codes``, whichever a seed meets first."""

    name: str
    text: str
    codes: tuple[Code, ...]


CANARIES: Mapping[str, Canary] = {
    canary.name: canary
    for canary in (
        Canary(
            "early-release", "host slots are given back before their copies have ended", (Code.WRONG_BYTES, Code.BROKEN_INVARIANT)
        ),
        Canary("lost-wait", "copies do not wait for the layer to be stored", (Code.WRONG_BYTES,)),
        Canary("lost-page", "a request that ends early gives back all pages but one", (Code.BROKEN_INVARIANT,)),
        Canary("never-admitted", "from the fourth match on every request is deferred for ever", (Code.NO_PROGRESS,)),
        Canary("crash", "the fourth match raises LookupError", (Code.CRASH,)),
    )
}


class ShapedStreams:
    """Streams whose copies take ``slowness`` times as long (the model computes as fast as ever), with a bug if one is planted: waits
    for ``lost`` are forgotten by ``Stream.wait``, and ``query`` says that what they wait for has ended."""

    def __init__(self, inner: Streams, slowness: float, lost: Wait | None = None) -> None:
        self._inner = inner
        self._wrapped: dict[str, _ShapedStream] = {}
        self.slowness = slowness
        self.lost = lost

    def stream(self, name: str) -> Stream:
        """See :class:`~cphicache.transfer.streams.port.Streams`."""
        if name not in self._wrapped:
            self._wrapped[name] = _ShapedStream(self, self._inner.stream(name))
        return self._wrapped[name]

    def query(self, event: Event, why: Wait) -> bool:
        """See :class:`~cphicache.transfer.streams.port.Streams`."""
        return why is self.lost or self._inner.query(event, why)

    def synchronize(self, event: Event) -> None:
        """See :class:`~cphicache.transfer.streams.port.Streams`."""
        self._inner.synchronize(event)

    def pause(self, duration_us: float) -> None:
        """See :class:`~cphicache.transfer.streams.port.Streams`."""
        self._inner.pause(duration_us)

    @property
    def now_us(self) -> float | None:
        """See :class:`~cphicache.transfer.streams.port.Streams`."""
        return self._inner.now_us

    def close(self) -> None:
        """See :class:`~cphicache.transfer.streams.port.Streams`."""
        self._inner.close()


class _ShapedStream:
    def __init__(self, owner: ShapedStreams, inner: Stream) -> None:
        self._owner = owner
        self._inner = inner
        self._slowness = 1.0 if inner.name == "compute" else owner.slowness

    @property
    def name(self) -> str:
        return self._inner.name

    @property
    def takes_whole(self) -> bool:
        return self._inner.takes_whole

    def submit(self, work: Callable[[], None], *, cost_us: float = 0.0) -> None:
        self._inner.submit(work, cost_us=cost_us * self._slowness)

    def record(self) -> Event:
        return self._inner.record()

    def wait(self, event: Event, why: Wait) -> None:
        if why is not self._owner.lost:
            self._inner.wait(event, why)


def shape_streams(streams: Streams, slowness: float, canary: Canary | None) -> Streams:
    """The streams with this slowness, and the canary if it is one of waits."""
    match canary and canary.name:
        case "early-release":
            return ShapedStreams(streams, slowness, Wait.DRAIN_TO_FREE)
        case "lost-wait":
            return ShapedStreams(streams, slowness, Wait.STORE_TO_COPY)
    return ShapedStreams(streams, slowness)


def plant_in_cache(canary: Canary | None, cache: Any) -> None:
    """Plant the canary in one rank's cache (its ``end_request`` and ``prepare``) if that is where it lives."""
    match canary and canary.name:
        case "lost-page":
            end_request = cache.end_request

            def leaking(rid: str, row: Sequence[int], reason: str) -> None:
                end_request(rid, list(row)[:-1], reason)

            cache.end_request = leaking
        case "crash" | "never-admitted" as name:
            prepare, calls = cache.prepare, count()

            def failing(*arguments: Any) -> Any:
                if next(calls) < 3:
                    return prepare(*arguments)
                if name == "crash":
                    raise LookupError("planted")
                return None

            cache.prepare = failing
