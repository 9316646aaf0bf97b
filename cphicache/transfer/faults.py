"""Planned faults of one rank's copies and reservations. Product code runs without (``None``)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Literal, NamedTuple

from cphicache.transfer.port import HostSlotsExhausted, OpKey

Direction = Literal["d2h", "h2d"]


class CopyFault(RuntimeError):
    """The failure that a planned fault raises inside a copy."""


class CopyCall(NamedTuple):
    """One job's copy of one layer. ``nth`` counts the calls for the same direction, payload and layer from 0, in stream order."""

    direction: Direction
    payload: str
    layer: int
    nth: int
    job: OpKey | int
    """The backup's key, or the number of the load-back."""


class CopyFaults:
    """Which copies and reservations fail. Plan first, then run: the checks are called on stream threads.

    Jobs that own nothing on this rank make no call and cannot fail.
    """

    __slots__ = ("_calls", "_planned", "_predicates", "_reserve_planned", "_reserves", "fired", "fired_reserves")

    def __init__(self) -> None:
        self._planned: set[tuple[Direction, str, int, int]] = set()
        self._predicates: list[Callable[[CopyCall], bool]] = []
        self._reserve_planned: set[tuple[str, int]] = set()
        self._calls: Counter[tuple[Direction, str, int]] = Counter()
        self._reserves: Counter[str] = Counter()
        self.fired: list[CopyCall] = []
        self.fired_reserves: list[tuple[OpKey, str]] = []

    def fail_copy(self, direction: Direction, payload: str, layer: int, *, nth: int = 0) -> None:
        """The ``nth`` copy of that layer fails."""
        self._planned.add((direction, payload, layer, nth))

    def fail_copies_where(self, predicate: Callable[[CopyCall], bool]) -> None:
        """Every copy for which ``predicate`` answers True fails. It runs on a stream thread: read the call, nothing else."""
        self._predicates.append(predicate)

    def fail_reserve(self, payload: str, *, nth: int = 0) -> None:
        """The ``nth`` reservation of that payload finds no slots (counted from 0 over reservations that need any)."""
        self._reserve_planned.add((payload, nth))

    def check_copy(self, direction: Direction, payload: str, layer: int, job: OpKey | int) -> None:
        """Called inside a copy, before it moves bytes. Raises :class:`CopyFault` where a fault is planned."""
        point = (direction, payload, layer)
        call = CopyCall(direction, payload, layer, self._calls[point], job)
        self._calls[point] += 1
        if (*point, call.nth) in self._planned or any(predicate(call) for predicate in self._predicates):
            self.fired.append(call)
            raise CopyFault(f"planned fault: {call}")

    def check_reserve(self, payload: str, op: OpKey) -> None:
        """Called before slots of ``payload`` are taken. Raises :class:`HostSlotsExhausted` where a fault is planned."""
        nth = self._reserves[payload]
        self._reserves[payload] += 1
        if (payload, nth) in self._reserve_planned:
            self.fired_reserves.append((op, payload))
            raise HostSlotsExhausted(f"planned fault: reservation {nth} of {payload} for {op}")
