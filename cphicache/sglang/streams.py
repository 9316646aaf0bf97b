"""The forward's stream where it is not the one that SGLang names: a forward on the host, or on whatever stream is current.

On a host, what the forward has issued has run, and it waits by blocking: there SGLang's scheduler thread runs the forward itself, and
the copies have threads of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from cphicache.transfer.port import Wait
from cphicache.transfer.streams.port import Event, Stream
from cphicache.transfer.streams.threads import ThreadStreams

COMPUTE = "compute"


class CurrentStream:
    """The CUDA stream that is current where it is used: without the overlap schedule, SGLang's forward runs on the one that the whole
    scheduler runs on."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def record_event(self, event: Any = None) -> Any:
        """See ``torch.cuda.Stream``."""
        return torch.cuda.current_stream(self._device).record_event(event)

    def wait_event(self, event: Any) -> None:
        """See ``torch.cuda.Stream``."""
        torch.cuda.current_stream(self._device).wait_event(event)

    def synchronize(self) -> None:
        """See ``torch.cuda.Stream``."""
        torch.cuda.current_stream(self._device).synchronize()


class HostForwardStream:
    """The calling thread as a stream."""

    def __init__(self, streams: ThreadStreams) -> None:
        self._streams = streams
        self._passed = streams.stream(COMPUTE)  # nothing is ever queued there: its events have completed when they are made

    @property
    def name(self) -> str:
        """Name of the stream."""
        return COMPUTE

    @property
    def takes_whole(self) -> bool:
        """Yes: all of it runs at once."""
        return True

    def submit(self, work: Callable[[], None], *, cost_us: float = 0.0) -> None:
        """Run ``work`` now."""
        work()

    def record(self) -> Event:
        """An event that has completed: everything before it has run."""
        return self._passed.record()

    def wait(self, event: Event, why: Wait) -> None:
        """Block until ``event`` has completed."""
        self._streams.synchronize(event)


class HostForwardStreams:
    """:class:`~cphicache.transfer.streams.port.Streams` whose ``compute`` is the calling thread; the others are those of ``threads``."""

    def __init__(self, threads: ThreadStreams | None = None) -> None:
        self._threads = ThreadStreams() if threads is None else threads
        self._compute = HostForwardStream(self._threads)

    def stream(self, name: str) -> Stream:
        """See the port."""
        return self._compute if name == COMPUTE else self._threads.stream(name)

    def query(self, event: Event, why: Wait) -> bool:
        """See the port."""
        return self._threads.query(event, why)

    def synchronize(self, event: Event) -> None:
        """See the port."""
        self._threads.synchronize(event)

    def pause(self, duration_us: float) -> None:
        """Nothing: real streams run by themselves."""

    @property
    def now_us(self) -> float | None:
        """``None``: real streams have no virtual time."""
        return None

    def close(self) -> None:
        """See the port."""
        self._threads.close()
