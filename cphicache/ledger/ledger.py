"""How many host slots every rank has left, known to every rank without asking (R20).

Which rank needs how many slots follows from the owners of an extent by arithmetic, and slots come back at agreed ticks only, so
every rank keeps this same account and reaches the same decision alone. An operation takes the same number of slots in each
payload of a rank (target and draft together or not at all, R5); therefore one number a rank is kept:

    free(rank, payload) = totals[payload] - used[rank]        0 <= used[rank] <= min(totals)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

Need: TypeAlias = tuple[int, ...]
"""Host slots (tokens) of an operation by rank, the same in each payload."""


class LedgerAccountingError(AssertionError):
    """Our bug: the account would leave 0 <= used <= total."""


class LedgerSnapshot(NamedTuple):
    """State of a ledger: slots in use by rank, and the retry epoch."""

    used: tuple[int, ...]
    freed_epoch: int


def need_of(owners: Sequence[int], page_size: int, cp_size: int) -> Need:
    """Host slots by rank of an extent of whole pages with these owners. ``sum(need) == pages * page_size``."""
    need = tuple([owners.count(rank) * page_size for rank in range(cp_size)])
    if sum(need) != len(owners) * page_size:
        wrong = next(owner for owner in owners if not 0 <= owner < cp_size)
        raise ValueError(f"owner is {wrong}: give ranks in 0..{cp_size - 1} (cp_size {cp_size})")
    return need


class HostLedger:
    """Free host slots of ``cp_size`` ranks in pools of ``totals`` slots (payload -> tokens; the same on every rank)."""

    __slots__ = ("_freed_epoch", "_smallest_total", "_totals", "_used")

    def __init__(self, cp_size: int, totals: Mapping[str, int]) -> None:
        if cp_size < 1:
            raise ValueError(f"cp_size is {cp_size}: give the number of context-parallel ranks, at least 1")
        if not totals:
            raise ValueError("totals is empty: give the host slots of at least one payload")
        for payload, total in totals.items():
            if total < 0:
                raise ValueError(f"totals[{payload!r}] is {total}: give host slots a rank, 0 or more")
        self._totals = MappingProxyType(dict(totals))
        self._smallest_total = min(totals.values())
        self._used = [0] * cp_size
        self._freed_epoch = 0

    @property
    def totals(self) -> Mapping[str, int]:
        """Host slots of one rank by payload (tokens)."""
        return self._totals

    @property
    def cp_size(self) -> int:
        """Number of ranks."""
        return len(self._used)

    @property
    def freed_epoch(self) -> int:
        """Grows each time that slots came back in a way that makes a refused reservation worth another try (R15)."""
        return self._freed_epoch

    def free(self, rank: int, payload: str) -> int:
        """Free host slots of one rank and payload."""
        if payload not in self._totals:
            raise ValueError(f"payload is {payload!r}: give one of {sorted(self._totals)}")
        if not 0 <= rank < len(self._used):
            raise ValueError(f"rank is {rank}: give a rank in 0..{len(self._used) - 1}")
        return self._totals[payload] - self._used[rank]

    @property
    def used(self) -> int:
        """Host slots in use, all ranks together, in each payload."""
        return sum(self._used)

    @property
    def used_by_rank(self) -> Sequence[int]:
        """The same by rank. Another object after each change, so that whoever keeps it keeps the figures of now."""
        return self._used

    def least_free(self) -> int:
        """The smallest free count over all ranks and payloads."""
        return self._smallest_total - max(self._used)

    def fits(self, need: Need) -> bool:
        """Does every rank have ``need`` in each payload?"""
        self._check_need(need)
        total = self._smallest_total
        for used, slots in zip(self._used, need, strict=True):  # noqa: SIM110 - a loop costs a third of all() over a generator
            if used + slots > total:
                return False
        return True

    def fits_with(self, need: Need, extra: Sequence[int]) -> bool:
        """Would ``need`` fit once ``extra`` slots by rank (in each payload) were given back by victims?"""
        self._check_need(need)
        self._check_need(extra)
        return all(used - more + slots <= self._smallest_total for used, slots, more in zip(self._used, need, extra, strict=True))

    def shortage(self, need: Need) -> dict[str, tuple[int, ...]]:
        """Missing slots by payload and rank; 0 where there are enough."""
        self._check_need(need)
        return {
            payload: tuple(max(used + slots - total, 0) for used, slots in zip(self._used, need, strict=True))
            for payload, total in self._totals.items()
        }

    def take(self, need: Need) -> None:
        """Take ``need`` from every rank and payload. The caller has asked :meth:`fits`: our bug if it does not."""
        self._check_need(need)
        taken = [used + slots for used, slots in zip(self._used, need, strict=True)]
        if max(taken) > self._smallest_total:
            raise LedgerAccountingError(f"expected room for {need}, found shortage {self.shortage(need)} (used {self._used})")
        self._used = taken

    def give(self, need: Need, counts_for_retry: bool = True) -> None:
        """Give ``need`` back to every rank and payload; our bug if more comes back than was taken.

        ``counts_for_retry`` is False for an operation's own rollback and for a reclaim: retrying on those would go on for ever.
        """
        self._check_need(need)
        left = [used - slots for used, slots in zip(self._used, need, strict=True)]
        if min(left) < 0:
            raise LedgerAccountingError(f"expected at most {self._used} slots in use by rank to come back, found {need}")
        self._used = left
        if counts_for_retry and any(need):
            self._freed_epoch += 1

    def snapshot(self) -> LedgerSnapshot:
        """The whole state, immutable."""
        return LedgerSnapshot(tuple(self._used), self._freed_epoch)

    def restore(self, snapshot: LedgerSnapshot) -> None:
        """Go back to a state taken from a ledger of the same size."""
        self._check_need(snapshot.used)
        if max(snapshot.used) > self._smallest_total:
            raise ValueError(
                f"snapshot uses {snapshot.used} of {self._smallest_total} slots: restore it into the ledger it came from"
            )
        self._used = list(snapshot.used)
        self._freed_epoch = snapshot.freed_epoch

    def canonical(self) -> tuple[int, ...]:
        """Equal for states that decide alike: slots in use by rank. The epoch only ever grows and means something only next to the
        epoch that a refused record remembers, so whoever holds the record puts that comparison into its own form."""
        return tuple(self._used)

    def _check_need(self, need: Sequence[int]) -> None:
        if len(need) != len(self._used):
            raise ValueError(f"need {tuple(need)} has {len(need)} entries: give one for each of {len(self._used)} ranks (need_of)")
        if min(need) < 0:
            raise ValueError(f"need {tuple(need)} holds {min(need)}: slots by rank are 0 or more")
