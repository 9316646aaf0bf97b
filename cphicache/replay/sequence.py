"""The numbers that all ranks agree on, as a log tells them: given one by one, passed in order, never before the reduction says so."""

from __future__ import annotations

from collections.abc import Callable

from cphicache.replay.findings import Kind

Tell = Callable[[Kind, str], None]


class Sequence:
    """Numbers given and passed. ``sure`` is False when the start of the log, or events of it, are missing: then it only follows."""

    def __init__(self) -> None:
        self.next_number: int | None = 0
        self._open: dict[int, tuple[int, str] | None] = {}
        """Numbers given and not agreed, in order: node and place of a backup, None for a load-back."""
        self._passed = 0
        self._count = 0
        self._first_failed: int | None = None

    def lose_track(self) -> None:
        """Events are missing: numbers may have been given and passed unseen."""
        self.next_number = None
        self._open.clear()

    def give(self, number: int | None, owner: tuple[int, str] | None, tell: Tell) -> None:
        """A backup (``owner``: node and where) or a load-back (None) takes a number."""
        if number is None:
            tell(Kind.NUMBER, "no number where the next one should be taken")
            return
        expected = self.next_number
        if expected is not None and number != expected:
            twice = number < expected
            tell(Kind.NUMBER, f"number {number} is given {'twice' if twice else 'too early'}: {expected} is the next")
        self.next_number = number + 1 if expected is None or number >= expected else expected
        if number not in self._open:
            self._open[number] = owner

    def reduce(self, count: int, first_failed: int | None, tell: Tell) -> list[tuple[int, tuple[int, str]]]:
        """A reduction is applied. Returns backups that the one before it had passed and that no step has agreed."""
        left = self.overdue()
        if count < self._count:
            tell(Kind.REDUCTION, f"the count goes back from {self._count} to {count}")
        if self.next_number is not None and count > self.next_number:
            tell(Kind.REDUCTION, f"count {count} is ahead of the numbers given: {self.next_number} is the next")
        self._count, self._first_failed = max(count, self._count), first_failed
        self._passed = count if first_failed is None else min(count, first_failed + 1)
        for number in [number for number, owner in self._open.items() if owner is None and number < self._passed]:
            del self._open[number]  # a load-back's passing is no step of its own
        return left

    def overdue(self) -> list[tuple[int, tuple[int, str]]]:
        """Backups that the last reduction passed and that no step has agreed; they are forgotten."""
        left = [(number, owner) for number, owner in self._open.items() if owner is not None and number < self._passed]
        for number, _ in left:
            del self._open[number]
        return left

    def agree(self, number: int, tell: Tell) -> None:
        """A step says that a number has been passed."""
        if number >= self._passed and self.next_number is not None:
            tell(Kind.AGREED_EARLY, f"number {number} is agreed, the reduction has passed those below {self._passed}")
        earlier = next((other for other, owner in self._open.items() if owner is not None and other < number), None)
        if earlier is not None:
            tell(Kind.AGREED_ORDER, f"number {number} is agreed before number {earlier}")
        self._open.pop(number, None)

    def fail(self, number: int, tell: Tell) -> None:
        """A step says that a number is the first failed one."""
        if self._first_failed != number and self.next_number is not None:
            tell(Kind.AGREED_EARLY, f"number {number} is agreed to have failed, the reduction names {self._first_failed}")
