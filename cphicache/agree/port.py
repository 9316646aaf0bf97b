"""The reduction port: what all ranks have in common, once a tick."""

from __future__ import annotations

from typing import Protocol

NO_FAILURE = 2**62
"""Stands for "no failed operation" in a sample; larger than any number, and a valid signed 64-bit integer."""


class GroupBroken(RuntimeError):
    """A rank of the group has gone; the group is not used again. The text names the rank, ``ranks`` are all that have gone."""

    def __init__(self, text: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(text)
        self.ranks = ranks

    def while_waiting_for(self, what: str) -> GroupBroken:
        """The same, with what the group was waited for."""
        return type(self)(f"{self}; waiting for {what}", self.ranks)


class Excluded(GroupBroken):
    """This rank did not answer in time: the others have gone on without it, and it has to stop."""


class Reducer(Protocol):
    """Element-wise minimum of two integers over all ranks. At most one reduction is outstanding."""

    def issue(self, count: int, first_failed: int) -> None:
        """Contribute this rank's sample; returns at once."""

    def wait(self) -> tuple[int, int]:
        """The minimum over all ranks of what was issued last; blocks until every rank has contributed."""
