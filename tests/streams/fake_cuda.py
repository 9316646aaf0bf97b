"""A device without a device: queues of launched functions behind the names of ``torch.cuda``, as lazy as CUDA allows it to be.

Nothing runs before somebody waits for it, and then only what that needs; with a seed, queries and waits let a few more steps run, of any
stream. So an order that is not asked for through an event does not come about by chance. Every call is written down.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from cphicache.transfer.port import Wait
from cphicache.transfer.streams.cuda import CudaStreams
from cphicache.transfer.streams.port import Event, Stream


class FakeEvent:
    """Complete once its stream has come to the place where it was recorded. Never recorded: complete."""

    def __init__(self, cuda: FakeCuda, number: int) -> None:
        self._cuda = cuda
        self.name = f"event{number}"
        self.stream: FakeStream | None = None
        self.done = True

    def query(self) -> bool:
        self._cuda.calls.append(f"{self.name}.query")
        self._cuda.run_a_little()
        return self.done

    def synchronize(self) -> None:
        self._cuda.calls.append(f"{self.name}.synchronize")
        self.complete()

    def complete(self) -> None:
        while not self.done:
            assert self.stream is not None
            self._cuda.run_a_little()
            if not self.done:
                self.stream.step(force=True)


class FakeStream:
    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self._cuda = cuda
        self.name = name
        self.queue: deque[Callable[[], None] | tuple[str, FakeEvent]] = deque()

    def record_event(self, event: FakeEvent | None = None) -> FakeEvent:
        event = self._cuda.Event() if event is None else event
        self._cuda.calls.append(f"{self.name}.record {event.name}")
        event.stream, event.done = self, not self.queue
        if self.queue:
            self.queue.append(("record", event))
        return event

    def wait_event(self, event: FakeEvent) -> None:
        self._cuda.calls.append(f"{self.name}.wait {event.name}")
        self.queue.append(("wait", event))

    def synchronize(self) -> None:
        self._cuda.calls.append(f"{self.name}.synchronize")
        while self.queue:
            self._cuda.run_a_little()
            if self.queue:
                self.step(force=True)

    def step(self, *, force: bool) -> None:
        """Take the next entry; a wait that holds it up is forced to end, or left alone."""
        entry = self.queue[0]
        if not isinstance(entry, tuple):
            self.queue.popleft()
            entry()
            return
        kind, event = entry
        if kind == "wait" and not event.done:
            if force:
                event.complete()  # which may take this stream further, too
            return
        if kind == "record":
            event.done = True
        self.queue.popleft()


class FakeCuda:
    """Stands in for ``torch.cuda``. :meth:`launch` is what a kernel launch is: it queues on the current stream."""

    def __init__(self, seed: int | None = None, *, available: bool = True) -> None:
        self.calls: list[str] = []
        self.available = available
        self.forward = FakeStream(self, "forward")
        self._random = None if seed is None else random.Random(seed)
        self._streams = [self.forward]
        self._current = self.forward
        self._events = 0

    def is_available(self) -> bool:
        return self.available

    def current_stream(self, device: Any = None) -> FakeStream:
        return self._current

    def Stream(self, device: Any = None) -> FakeStream:
        made = FakeStream(self, f"side{len(self._streams)}")
        self._streams.append(made)
        return made

    def Event(self) -> FakeEvent:
        self._events += 1
        return FakeEvent(self, self._events)

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    def launch(self, kernel: Callable[[], None]) -> None:
        self.calls.append(f"{self._current.name}.launch")
        self._current.queue.append(kernel)

    def run_a_little(self) -> None:
        """With a seed: a few steps of streams that have something to do."""
        if self._random is not None:
            for _ in range(self._random.randrange(4)):
                stream = self._random.choice(self._streams)
                if stream.queue:
                    stream.step(force=False)


class LaunchingStream:
    """Makes a kernel launch of the work of a CUDA stream, so that its effects come when the device comes to it."""

    def __init__(self, cuda: FakeCuda, inner: Stream) -> None:
        self._cuda = cuda
        self._inner = inner

    @property
    def name(self) -> str:
        return self._inner.name

    def submit(self, work: Callable[[], None], *, cost_us: float = 0.0) -> None:
        self._inner.submit(lambda: self._cuda.launch(work), cost_us=cost_us)

    def record(self) -> Event:
        return self._inner.record()

    def wait(self, event: Event, why: Wait) -> None:
        self._inner.wait(event, why)


class LaunchingStreams:
    """:class:`CudaStreams` on a fake device, whose work is launched."""

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda
        self._inner = CudaStreams(cuda=cuda)
        self._wrapped: dict[str, LaunchingStream] = {}

    def stream(self, name: str) -> LaunchingStream:
        inner = self._inner.stream(name)
        return self._wrapped.setdefault(name, LaunchingStream(self._cuda, inner))

    def query(self, event: Event, why: Wait) -> bool:
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
