"""Signals that end a process without running ``finally`` and ``atexit``: turned into an exit that runs them, so that logs are flushed.

The event log itself touches no signal handler. A program that owns its process, such as the command line, uses this around its work.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def exit_on_signals(*numbers: signal.Signals) -> Iterator[None]:
    """While inside, each of these signals raises ``SystemExit(128 + number)`` in the main thread. Main thread only.

    Raising, rather than flushing in the handler, because a handler may have interrupted the flush that it would call.
    """

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    with _handled(numbers, leave):
        yield


@contextmanager
def interrupt_on_signals(*numbers: signal.Signals) -> Iterator[None]:
    """While inside, each of these signals raises ``KeyboardInterrupt`` in the main thread, as Ctrl-C does. Main thread only."""
    with _handled(numbers, signal.default_int_handler):
        yield


@contextmanager
def _handled(numbers: tuple[signal.Signals, ...], handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
