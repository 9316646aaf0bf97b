"""The stream port: ordered asynchronous work, events between streams, and nothing else.

Implementations: real threads (true asynchrony), a virtual clock (deterministic, adversarial order), CUDA streams.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from cphicache.transfer.port import Wait


class Event(Protocol):
    """A point in a stream: everything that was submitted before it, waits included. Made by :meth:`Stream.record` only."""


class Stream(Protocol):
    """Work runs in submission order; two streams are ordered only through events."""

    @property
    def name(self) -> str:
        """Name of the stream."""

    @property
    def takes_whole(self) -> bool:
        """Work of several parts may be one item here: nobody tells when its parts take effect, only when all of it has."""

    def submit(self, work: Callable[[], None], *, cost_us: float = 0.0) -> None:
        """Queue ``work``. ``cost_us`` is its duration on the virtual clock in microseconds (ignored by the others).

        Work must not raise and must not call its streams. An exception is our bug: the stream goes on with its queue, and the next
        ``submit``, ``query``, ``synchronize`` or ``close`` of the scheduler thread raises it as
        :class:`cphicache.transfer.streams.errors.StreamError`, once. ``submit`` and ``query`` do nothing else then;
        ``synchronize`` and ``close`` have done their part first.
        """

    def record(self) -> Event:
        """An event that completes when everything submitted so far has run."""

    def wait(self, event: Event, why: Wait) -> None:
        """Later work of this stream runs after ``event`` and sees what came before it. ``why`` names the ordering (R34)."""


class Streams(Protocol):
    """The streams of one rank. Created by that rank, used from its scheduler thread only."""

    def stream(self, name: str) -> Stream:
        """The stream of that name, created on first use (``compute``, ``write``, ``load``)."""

    def query(self, event: Event, why: Wait) -> bool:
        """Has the event completed? True: what came before it has had its effect, for the caller too. Never blocks."""

    def synchronize(self, event: Event) -> None:
        """Block the scheduler thread until the event has completed (the virtual clock advances instead)."""

    def pause(self, duration_us: float) -> None:
        """The scheduler thread spends time: the virtual clock advances; real streams do nothing."""

    @property
    def now_us(self) -> float | None:
        """Virtual time in microseconds, ``None`` for real streams."""

    def close(self) -> None:
        """Run what is queued, stop the workers, raise what was left unraised. Idempotent.

        Events of closed streams are complete: querying, synchronizing and waiting for them stays legal. ``submit``, ``record``,
        ``wait`` and ``stream`` of closed streams raise ``StreamError``.
        """
