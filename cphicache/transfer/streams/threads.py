"""Streams as worker threads: true asynchrony on a machine without an accelerator.

One daemon thread a stream takes entries from a FIFO queue. An event is a count: ``entry n of this stream has run``, so recording
costs nothing and an event of a closed stream is complete for ever. A wait is an entry at which the worker blocks; since it can
only name an event that was recorded before it, workers never wait in a circle.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite
from queue import SimpleQueue

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


@dataclass(frozen=True, slots=True, eq=False)
class ThreadEvent:
    """Complete when the first ``entries`` entries of ``stream`` have run."""

    stream: ThreadStream
    entries: int


class ThreadStream:
    """One worker thread and its queue. Made by :meth:`ThreadStreams.stream`."""

    __slots__ = ("_delays", "_done", "_name", "_owner", "_progress", "_queue", "_submitted", "_thread")

    def __init__(self, owner: ThreadStreams, name: str, delays: random.Random) -> None:
        self._owner = owner
        self._name = name
        self._delays = delays
        self._queue: SimpleQueue[Callable[[], None] | ThreadEvent | None] = SimpleQueue()
        self._submitted = 0  # written by the scheduler thread only; done <= submitted <= done + queue limit
        self._done = 0  # written by the worker only, under _progress
        self._progress = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=f"stream-{name}", daemon=True)
        self._thread.start()

    @property
    def name(self) -> str:
        """Name of the stream."""
        return self._name

    @property
    def takes_whole(self) -> bool:
        """Unless the worker idles between items."""
        return self._owner._max_delay_us == 0.0

    def submit(self, work: Callable[[], None], *, cost_us: float = 0.0) -> None:
        """Queue ``work`` for the worker; ``cost_us`` is ignored. Never blocks.

        Raises :class:`StreamError` for work that raised earlier, for a full queue and after ``close``; nothing is queued then.
        """
        self._owner._check_call(self._name)
        self._owner._failures.surface()
        self._put(work)

    def record(self) -> ThreadEvent:
        """An event that completes when everything submitted so far has run."""
        self._owner._check_call(self._name)
        return ThreadEvent(self, self._submitted)

    def wait(self, event: Event, why: Wait) -> None:
        """The worker blocks on ``event`` when it gets here. Events of other :class:`ThreadStreams` are allowed, closed or not."""
        self._owner._check_call(self._name)
        known = _thread_event(event)
        if not known.stream._has_run(known.entries):
            self._put(known)

    def _put(self, entry: Callable[[], None] | ThreadEvent) -> None:
        with self._progress:
            queued = self._submitted - self._done
        check_queue(self._name, queued, self._owner._queue_limit)
        self._submitted += 1
        self._queue.put(entry)

    def _has_run(self, entries: int) -> bool:
        with self._progress:
            return self._done >= entries

    def _block(self, entries: int) -> None:
        with self._progress:
            self._progress.wait_for(lambda: self._done >= entries)

    def _stop(self) -> None:
        self._queue.put(None)

    def _join(self) -> None:
        self._thread.join()

    def _run(self) -> None:
        while (entry := self._queue.get()) is not None:
            if isinstance(entry, ThreadEvent):
                entry.stream._block(entry.entries)
            else:
                self._owner._delay(self._delays)
                try:
                    entry()
                except BaseException as error:  # even SystemExit: a dead worker would hang everything that waits for it
                    self._owner._failures.add(self._name, entry, error)
            del entry  # what the work holds (tensors) must not live on while the worker idles
            with self._progress:
                self._done += 1
                self._progress.notify_all()


class ThreadStreams:
    """Real threads behind the stream port; see :class:`cphicache.transfer.streams.port.Streams`.

    ``max_delay_us``: before each work item the worker idles for a random time in ``[0, max_delay_us]``, drawn by ``seed`` and
    stream name (``None``: not reproducible), so that copies complete late and in changing order; ``close`` cuts delays short.
    ``queue_limit``: entries (work and waits) that a stream may hold; one more is a :class:`StreamError`, not back-pressure, because
    the scheduler thread must not block and the number of jobs is bounded elsewhere.
    Raises ValueError for a negative or infinite delay and for a limit below 1.
    """

    __slots__ = ("_closed", "_closing", "_failures", "_max_delay_us", "_queue_limit", "_seed", "_streams", "_workers")

    def __init__(self, seed: int | None = None, max_delay_us: float = 0.0, *, queue_limit: int = QUEUE_LIMIT) -> None:
        if not (isfinite(max_delay_us) and max_delay_us >= 0.0):
            raise ValueError(f"max_delay_us is {max_delay_us}: a finite number of microseconds >= 0 is needed")
        check_queue_limit(queue_limit)
        self._seed = seed
        self._max_delay_us = max_delay_us
        self._queue_limit = queue_limit
        self._streams: dict[str, ThreadStream] = {}
        self._workers: set[int | None] = set()
        self._failures = Failures()
        self._closing = threading.Event()
        self._closed = False

    def stream(self, name: str) -> ThreadStream:
        """The stream of that name; its worker starts on first use."""
        self._check_call(name)
        known = self._streams.get(name)
        if known is None:
            # A generator of its own, so that one stream's delays do not depend on how fast another one runs.
            delays = random.Random(None if self._seed is None else f"{self._seed}/{name}")
            known = self._streams[name] = ThreadStream(self, name, delays)
            self._workers.add(known._thread.ident)
        return known

    def query(self, event: Event, why: Wait) -> bool:
        """Has the event completed? Never blocks. Raises :class:`StreamError` for work that raised earlier."""
        self._check_caller()
        self._failures.surface()
        known = _thread_event(event)
        return known.stream._has_run(known.entries)

    def synchronize(self, event: Event) -> None:
        """Block until the event has completed, then raise :class:`StreamError` for work that raised."""
        self._check_caller()
        known = _thread_event(event)
        known.stream._block(known.entries)
        self._failures.surface()

    def pause(self, duration_us: float) -> None:
        """Nothing: real streams run by themselves."""

    @property
    def now_us(self) -> float | None:
        """``None``: real streams have no virtual time."""
        return None

    def close(self) -> None:
        """Run what is queued, join the workers, then raise :class:`StreamError` for work that raised unreported. Idempotent."""
        self._check_caller()
        if not self._closed:
            self._closed = True
            self._closing.set()
            for stream in self._streams.values():
                stream._stop()
        for stream in self._streams.values():
            stream._join()
        self._failures.surface()

    def _check_call(self, name: str) -> None:
        self._check_caller()
        check_open(name, closed=self._closed)

    def _check_caller(self) -> None:
        check_outside_work(inside=threading.get_ident() in self._workers)

    def _delay(self, delays: random.Random) -> None:
        if self._max_delay_us > 0.0:
            self._closing.wait(delays.uniform(0.0, self._max_delay_us) * 1e-6)


def _thread_event(event: Event) -> ThreadEvent:
    if not isinstance(event, ThreadEvent):
        raise TypeError(f"{type(event).__name__} is no event of thread streams: pass what record() returned")
    return event
