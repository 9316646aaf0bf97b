"""Signals of a program that owns its process: turned into an exit or an interrupt that runs ``finally`` and ``atexit``, so that logs are
flushed, or put off until imports are over. For the command line; the library touches no signal handler.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that ask a program to end."""


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
def deferred_signals() -> Iterator[None]:
    """While inside, a signal that asks to end is only noted; it is raised again at the end. Main thread only.

    For imports: some catch whatever is raised inside them, and then nobody would hear of the signal; others cannot be done twice.
    """
    noted: list[int] = []
    with _handled(ENDING, lambda number, frame: noted.append(number)):
        yield
    if noted:
        signal.raise_signal(noted[0])


@contextmanager
def _handled(numbers: tuple[signal.Signals, ...], handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
