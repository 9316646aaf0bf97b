"""Reducers inside one process: for a single rank, and for ranks that run as threads in lockstep.

The in-process group is the one object that such ranks share; it holds integers only (R20).
"""

from __future__ import annotations

from threading import Condition

from cphicache.agree.port import GroupBroken


class SingleReducer:
    """A group of one rank: the minimum is the sample itself."""

    def __init__(self) -> None:
        self._sample: tuple[int, int] | None = None

    def issue(self, count: int, first_failed: int) -> None:
        """See :class:`~cphicache.agree.port.Reducer`."""
        if self._sample is not None:
            raise AssertionError("a reduction is outstanding: expected it to be waited for before the next one is issued")
        self._sample = (count, first_failed)

    def wait(self) -> tuple[int, int]:
        """See :class:`~cphicache.agree.port.Reducer`."""
        if self._sample is None:
            raise AssertionError("no reduction is outstanding: expected an issue before the wait")
        sample, self._sample = self._sample, None
        return sample


class InProcessGroup:
    """Ranks as threads of one process. Every rank takes part in every reduction, in the same order.

    ``timeout_s`` bounds each wait: a rank that does not come breaks the group with an error that names it.
    """

    def __init__(self, size: int, timeout_s: float = 300.0) -> None:
        if size < 1:
            raise ValueError(f"group size {size}: give at least 1 rank")
        self.size = size
        self._timeout_s = timeout_s
        self._changed = Condition()
        self._rounds: dict[int, list[tuple[int, int] | None]] = {}
        self._readers_left: dict[int, int] = {}
        self._broken: str | None = None

    def member(self, rank: int) -> GroupMember:
        """The reducer of one rank."""
        return GroupMember(self, rank)

    def break_off(self, why: str) -> None:
        """A rank ends early: every rank that waits, now or later, gets :class:`GroupBroken` with this text."""
        with self._changed:
            self._broken = self._broken or why
            self._changed.notify_all()

    def contribute(self, round_number: int, rank: int, sample: tuple[int, int]) -> None:
        """Rank's sample for a round."""
        with self._changed:
            samples = self._rounds.setdefault(round_number, [None] * self.size)
            samples[rank] = sample
            self._readers_left.setdefault(round_number, self.size)
            self._changed.notify_all()

    def result(self, round_number: int) -> tuple[int, int]:
        """Element-wise minimum of a round, once every rank has contributed."""
        with self._changed:
            samples = self._rounds[round_number]
            self._changed.wait_for(lambda: self._broken is not None or None not in samples, self._timeout_s)
            missing = [rank for rank, sample in enumerate(samples) if sample is None]
            if missing and self._broken is None:
                self._broken = f"ranks {missing} did not contribute to reduction {round_number} within {self._timeout_s} s"
                self._changed.notify_all()
            if self._broken is not None:
                raise GroupBroken(self._broken)
            present = [sample for sample in samples if sample is not None]
            self._readers_left[round_number] -= 1
            if self._readers_left[round_number] == 0:
                del self._rounds[round_number], self._readers_left[round_number]
            return min(count for count, _ in present), min(failed for _, failed in present)


class GroupMember:
    """One rank's view of an :class:`InProcessGroup`."""

    def __init__(self, group: InProcessGroup, rank: int) -> None:
        if not 0 <= rank < group.size:
            raise ValueError(f"rank {rank} of a group of {group.size}: ranks are 0..{group.size - 1}")
        self._group = group
        self._rank = rank
        self._issued = 0
        self._waited = 0

    def issue(self, count: int, first_failed: int) -> None:
        """See :class:`~cphicache.agree.port.Reducer`."""
        if self._issued != self._waited:
            raise AssertionError(f"reduction {self._waited} is outstanding: expected it to be waited for before the next is issued")
        self._group.contribute(self._issued, self._rank, (count, first_failed))
        self._issued += 1

    def wait(self) -> tuple[int, int]:
        """See :class:`~cphicache.agree.port.Reducer`."""
        if self._issued == self._waited:
            raise AssertionError("no reduction is outstanding: expected an issue before the wait")
        result = self._group.result(self._waited)
        self._waited += 1
        return result
