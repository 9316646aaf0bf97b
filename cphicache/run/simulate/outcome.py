"""What can come of a simulated world. No torch here."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import IntEnum


class Code(IntEnum):
    """Exit status by what went wrong."""

    FINE = 0
    WRONG_BYTES = 10
    BROKEN_INVARIANT = 11
    NO_PROGRESS = 12
    CRASH = 13
    CANARY_MISSED = 14

    @property
    def text(self) -> str:
        """In words."""
        return self.name.lower().replace("_", " ")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one world.

    ``kind``: what failed, coarsely enough that a smaller world can fail the same way. ``fingerprint``: equal for equal worlds that are
    repeatable; hashes what each rank did and the digests of its state. ``seen``: how often what happened.
    """

    code: Code
    kind: str = ""
    text: str = ""
    fingerprint: str = ""
    seen: Counter[str] = field(default_factory=Counter)

    def fails_like(self, other: Outcome) -> bool:
        """The same code and kind?"""
        return (self.code, self.kind) == (other.code, other.kind)
