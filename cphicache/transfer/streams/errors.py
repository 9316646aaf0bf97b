"""What goes wrong in a stream, for every implementation of the port: always our bug, never lost, never a hang."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

QUEUE_LIMIT = 65_536
"""Entries that one stream may hold unless told otherwise: about a hundred forward passes of a 61-layer model with a draft."""

FAILURES_KEPT = 8
"""Exceptions kept in full until they are raised; further ones are counted only."""


class StreamError(AssertionError):
    """Our bug: work raised, or a stream was used in a way that its port forbids. The text names the stream (and the work)."""


class _Failure(NamedTuple):
    text: str
    error: BaseException


class Failures:
    """Exceptions of work, kept until the scheduler thread can be told. Thread-safe; at most :data:`FAILURES_KEPT` are held."""

    __slots__ = ("_count", "_kept", "_lock")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: list[_Failure] = []
        self._count = 0

    def add(self, stream: str, work: Callable[[], None], error: BaseException) -> None:
        """Remember that ``work`` raised ``error`` on ``stream``."""
        text = f"stream {stream!r}: work {work_name(work)} raised {type(error).__name__}: {error}"
        with self._lock:
            self._count += 1
            if len(self._kept) < FAILURES_KEPT:
                self._kept.append(_Failure(text, error))

    def surface(self) -> None:
        """Raise what was remembered, once: the first as :class:`StreamError` (its cause is the exception), the rest as notes."""
        with self._lock:
            kept, count = self._kept, self._count
            self._kept, self._count = [], 0
        if not kept:
            return
        raised = StreamError(kept[0].text)
        for failure in kept[1:]:
            raised.add_note(f"also: {failure.text}")
        if count > len(kept):
            raised.add_note(f"and {count - len(kept)} more")
        raise raised from kept[0].error


def work_name(work: Callable[[], None]) -> str:
    """A name to find ``work`` by: its qualified name, that of the function inside a partial, or its repr."""
    function = getattr(work, "func", work)
    name = getattr(function, "__qualname__", None)
    return name if isinstance(name, str) else repr(function)


def check_queue(stream: str, queued: int, limit: int) -> None:
    """Raise :class:`StreamError` when a stream that holds ``queued`` entries cannot take one more."""
    if queued >= limit:
        raise StreamError(
            f"stream {stream!r}: expected at most {limit} queued entries, found {queued} and one more: synchronize first"
        )


def check_open(stream: str, *, closed: bool) -> None:
    """Raise :class:`StreamError` when the streams were closed already."""
    if closed:
        raise StreamError(f"stream {stream!r}: used after close()")


def check_outside_work(*, inside: bool) -> None:
    """Raise :class:`StreamError` when work calls its own streams."""
    if inside:
        raise StreamError("work called its own streams: only the scheduler thread may")


def check_queue_limit(queue_limit: int) -> None:
    """Raise ValueError unless ``queue_limit`` is at least 1."""
    if queue_limit < 1:
        raise ValueError(f"queue_limit is {queue_limit}: at least 1 is needed")
