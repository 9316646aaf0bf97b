"""CUDA streams behind the stream port.

``submit`` runs its work at once, on the scheduler thread, with the CUDA stream as the current one: the work enqueues kernels and
asynchronous copies and returns. The device keeps the order from there on. So work must not wait for the device itself, and what the
*host* side of work does is done when ``submit`` returns; an event speaks of the device side.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol, cast

from cphicache.transfer.port import Wait
from cphicache.transfer.streams.errors import Failures, check_open, check_outside_work
from cphicache.transfer.streams.port import Event

COMPUTE = "compute"
"""The stream that is not made but taken: the one that the forward pass runs on."""


class DeviceEvent(Protocol):
    """What is used of ``torch.cuda.Event``."""

    def query(self) -> bool:
        """Has it completed?"""

    def synchronize(self) -> None:
        """Block until it has."""


class DeviceStream(Protocol):
    """What is used of ``torch.cuda.Stream``."""

    def record_event(self, event: Any = None) -> Any:
        """Record (a new) event."""

    def wait_event(self, event: Any) -> None:
        """Later work of the stream runs after the event."""

    def synchronize(self) -> None:
        """Block until the stream is empty."""


class CudaModule(Protocol):
    """What is used of ``torch.cuda``."""

    def is_available(self) -> bool:
        """Is there a GPU?"""

    def current_stream(self, device: Any = None) -> DeviceStream:
        """The stream that this thread uses on ``device``."""

    def Stream(self, device: Any = None) -> DeviceStream:
        """A new stream."""

    def Event(self) -> DeviceEvent:
        """A new event, not recorded yet."""

    def stream(self, stream: Any) -> AbstractContextManager[None]:
        """Make ``stream`` the current one inside a ``with``."""


class CudaUnavailable(RuntimeError):
    """There is no GPU that torch can use; the text says what to do."""


class CudaEvent:
    """A recorded CUDA event."""

    __slots__ = ("device_event",)

    def __init__(self, device_event: DeviceEvent) -> None:
        self.device_event = device_event


class CudaStream:
    """One CUDA stream. Made by :meth:`CudaStreams.stream`."""

    __slots__ = ("_name", "_owner", "device_stream")

    def __init__(self, owner: CudaStreams, name: str, device_stream: DeviceStream) -> None:
        self._owner = owner
        self._name = name
        self.device_stream = device_stream

    @property
    def name(self) -> str:
        """Name of the stream."""
        return self._name

    @property
    def takes_whole(self) -> bool:
        """Yes: the device takes launches one after the other anyway."""
        return True

    def submit(self, work: Callable[[], None], *, cost_us: float = 0.0) -> None:
        """Run ``work`` now, with this stream as torch's current one; ``cost_us`` is ignored.

        Raises :class:`StreamError` for work that raised earlier and after ``close``; nothing is run then. What ``work`` raises is
        remembered and raised by a later call, as on every other kind of stream. CUDA bounds its queue itself: a launch into a full
        one takes as long as the device needs to make room.
        """
        self._owner._check_call(self._name)
        self._owner._failures.surface()
        self._owner._run(self, work)

    def record(self) -> CudaEvent:
        """An event that completes when everything submitted so far has run on the device."""
        self._owner._check_call(self._name)
        event = self._owner._cuda.Event()
        self.device_stream.record_event(event)
        return CudaEvent(event)

    def wait(self, event: Event, why: Wait) -> None:
        """Later work of this stream runs after ``event``; the host does not wait. Events of closed :class:`CudaStreams` are allowed."""
        self._owner._check_call(self._name)
        self.device_stream.wait_event(_cuda_event(event).device_event)


class CudaStreams:
    """CUDA streams behind the stream port; see :class:`cphicache.transfer.streams.port.Streams`.

    ``device``: a torch device or its index (None: the current one). ``compute``: the ``torch.cuda.Stream`` of the forward pass; None
    takes the stream that is current when this is made. Every other stream is new, and ordered through events only (torch makes its
    streams so that the default stream does not hold them up). ``cuda``: the module to use in place of ``torch.cuda`` (tests).
    Raises :class:`CudaUnavailable` without a GPU.

    ``submit``, ``record``, ``wait`` and ``query`` never wait for the device; ``synchronize`` and ``close`` do.
    """

    __slots__ = ("_closed", "_compute", "_cuda", "_device", "_failures", "_inside", "_streams")

    def __init__(self, device: Any = None, *, compute: Any = None, cuda: CudaModule | None = None) -> None:
        self._cuda = _torch_cuda() if cuda is None else cuda
        if not self._cuda.is_available():
            raise CudaUnavailable(
                "no GPU: torch.cuda.is_available() is False; install a CUDA build of torch and a driver, or stay on the CPU "
                "(--streams threads)"
            )
        self._device = device
        self._compute = self._cuda.current_stream(device) if compute is None else compute
        self._streams: dict[str, CudaStream] = {}
        self._failures = Failures()
        self._inside = False
        self._closed = False

    def stream(self, name: str) -> CudaStream:
        """The stream of that name: ``compute`` is the forward's, every other one is made on first use."""
        self._check_call(name)
        known = self._streams.get(name)
        if known is None:
            device_stream = self._compute if name == COMPUTE else self._cuda.Stream(device=self._device)
            known = self._streams[name] = CudaStream(self, name, device_stream)
        return known

    def query(self, event: Event, why: Wait) -> bool:
        """Has the event completed? Never blocks. Raises :class:`StreamError` for work that raised earlier."""
        check_outside_work(inside=self._inside)
        self._failures.surface()
        return _cuda_event(event).device_event.query()

    def synchronize(self, event: Event) -> None:
        """Block until the event has completed, then raise :class:`StreamError` for work that raised."""
        check_outside_work(inside=self._inside)
        _cuda_event(event).device_event.synchronize()
        self._failures.surface()

    def pause(self, duration_us: float) -> None:
        """Nothing: real streams run by themselves."""

    @property
    def now_us(self) -> float | None:
        """``None``: real streams have no virtual time."""
        return None

    def close(self) -> None:
        """Wait until every stream used here is empty, then raise :class:`StreamError` for work that raised unreported. Idempotent."""
        check_outside_work(inside=self._inside)
        if not self._closed:
            self._closed = True
            for stream in self._streams.values():
                stream.device_stream.synchronize()
        self._failures.surface()

    def _run(self, stream: CudaStream, work: Callable[[], None]) -> None:
        self._inside = True
        try:
            with self._cuda.stream(stream.device_stream):
                work()
        except Exception as error:  # told by the next call, as the port says: the caller of submit() is not the culprit
            self._failures.add(stream.name, work, error)
        finally:
            self._inside = False

    def _check_call(self, name: str) -> None:
        check_outside_work(inside=self._inside)
        check_open(name, closed=self._closed)


def _torch_cuda() -> CudaModule:
    import torch

    return cast(CudaModule, torch.cuda)


def _cuda_event(event: Event) -> CudaEvent:
    if not isinstance(event, CudaEvent):
        raise TypeError(f"{type(event).__name__} is no event of CUDA streams: pass what record() returned")
    return event
