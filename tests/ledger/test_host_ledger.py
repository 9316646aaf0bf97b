"""Free host slots of every rank as integers."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cphicache.ledger import HostLedger, LedgerAccountingError, LedgerSnapshot, need_of


def test_need_follows_from_owners_by_arithmetic() -> None:
    """R20: which rank needs how many slots is a count of owned pages; a rank that owns nothing needs none."""
    assert need_of([0, 1, 2, 3], 4, 4) == (4, 4, 4, 4)
    assert need_of([0, 1, 0], 64, 4) == (128, 64, 0, 0)
    assert need_of([], 4, 2) == (0, 0)
    with pytest.raises(ValueError, match=r"owner is 2: give ranks in 0\.\.1"):
        need_of([0, 2], 4, 2)


def test_all_payloads_are_taken_together() -> None:
    """R5: target and draft slots go together; the smaller pool decides, and the shortage names payload and rank."""
    ledger = HostLedger(2, {"target": 12, "draft": 8})
    ledger.take((8, 4))
    assert [ledger.free(rank, payload) for rank in (0, 1) for payload in ("target", "draft")] == [4, 0, 8, 4]
    assert ledger.least_free() == 0
    assert ledger.used == 12
    assert not ledger.fits((4, 0))
    assert ledger.fits((0, 4))
    assert ledger.shortage((6, 4)) == {"target": (2, 0), "draft": (6, 0)}
    assert dict(ledger.totals) == {"target": 12, "draft": 8}
    assert ledger.cp_size == 2


def test_victims_must_satisfy_every_rank() -> None:
    """R16: a rank that needs 3 is satisfied by victims that free 1 + 0 + 4 slots; slots freed on another rank do not help."""
    ledger = HostLedger(2, {"target": 8})
    ledger.take((8, 2))
    assert not ledger.fits_with((3, 0), (1, 0))
    assert ledger.fits_with((3, 0), (1 + 0 + 4, 0))
    assert not ledger.fits_with((3, 0), (0, 2))
    assert not ledger.fits_with((3, 7), (5, 0))


def test_take_without_room_is_our_bug_and_takes_nothing() -> None:
    """R20: taking what does not fit on one rank is an internal error with the shortage, and no rank's slots change."""
    ledger = HostLedger(2, {"target": 8})
    with pytest.raises(LedgerAccountingError, match=r"expected room for \(8, 9\), found shortage \{'target': \(0, 1\)\}"):
        ledger.take((8, 9))
    assert ledger.canonical() == (0, 0)


def test_give_above_total_is_our_bug_and_gives_nothing() -> None:
    """R14: slots come back exactly once: a second return is an internal error with the evidence, and nothing changes."""
    ledger = HostLedger(2, {"target": 8})
    ledger.take((4, 4))
    ledger.give((4, 0))
    with pytest.raises(LedgerAccountingError, match=r"expected at most \[0, 4\] .* found \(4, 4\)"):
        ledger.give((4, 4))
    assert ledger.canonical() == (0, 4)
    assert ledger.freed_epoch == 1


def test_epoch_counts_only_slots_worth_a_retry() -> None:
    """R15: an own rollback or a reclaim does not count as freed slots, and giving back nothing does not either."""
    ledger = HostLedger(2, {"target": 8})
    ledger.take((8, 4))
    ledger.give((4, 0), counts_for_retry=False)
    ledger.give((0, 0))
    assert ledger.freed_epoch == 0
    ledger.give((0, 4))
    assert ledger.freed_epoch == 1


def test_impossible_arguments_are_refused() -> None:
    """R35: a ledger that cannot work, and needs, ranks and payloads that it does not have, are refused by name."""
    with pytest.raises(ValueError, match="cp_size is 0"):
        HostLedger(0, {"target": 8})
    with pytest.raises(ValueError, match="totals is empty"):
        HostLedger(1, {})
    with pytest.raises(ValueError, match=r"totals\['draft'\] is -1"):
        HostLedger(1, {"target": 8, "draft": -1})
    ledger = HostLedger(2, {"target": 8})
    with pytest.raises(ValueError, match="has 1 entries: give one for each of 2 ranks"):
        ledger.fits((1,))
    with pytest.raises(ValueError, match="has 3 entries"):
        ledger.fits_with((1, 1), (0, 0, 0))
    for ask in (ledger.fits, ledger.shortage, ledger.take, ledger.give, lambda need: ledger.fits_with(need, (0, 0))):
        with pytest.raises(ValueError, match=r"need \(0, -1\) holds -1: slots by rank are 0 or more"):
            ask((0, -1))
    with pytest.raises(ValueError, match=r"payload is 'draft': give one of \['target'\]"):
        ledger.free(0, "draft")
    with pytest.raises(ValueError, match=r"rank is -1: give a rank in 0\.\.1"):
        ledger.free(-1, "target")
    with pytest.raises(ValueError, match=r"rank is 2: give a rank in 0\.\.1"):
        ledger.free(2, "target")
    with pytest.raises(ValueError, match="restore it into the ledger it came from"):
        ledger.restore(LedgerSnapshot((9, 0), 0))
    with pytest.raises(ValueError, match="has 3 entries: give one for each of 2 ranks"):
        ledger.restore(LedgerSnapshot((0, 0, 0), 0))


def test_snapshot_restores_the_whole_state() -> None:
    """R20: a restored ledger decides as it did; the canonical form ignores the epoch, which only ever grows."""
    ledger = HostLedger(2, {"target": 8})
    ledger.take((4, 8))
    before = ledger.snapshot()
    ledger.give((4, 0))
    ledger.restore(before)
    assert ledger.snapshot() == before
    assert (ledger.freed_epoch, ledger.free(0, "target")) == (0, 4)
    ledger.give((4, 0))
    ledger.take((4, 0))
    assert ledger.snapshot() != before
    assert ledger.canonical() == (4, 8)


def test_figures_by_rank_stay_as_they_were_read() -> None:
    """R20: whoever keeps the slots in use by rank keeps those of that moment."""
    ledger = HostLedger(2, {"target": 8})
    before = ledger.used_by_rank
    ledger.take((4, 8))
    assert (list(before), list(ledger.used_by_rank)) == ([0, 0], [4, 8])
    taken = ledger.used_by_rank
    ledger.give((4, 0))
    assert (list(taken), list(ledger.used_by_rank)) == ([4, 8], [0, 8])


class SetsOfSlots:
    """Naive twin: a set of slot numbers for every rank and payload."""

    def __init__(self, cp_size: int, totals: dict[str, int]) -> None:
        self.free = {(rank, payload): set(range(total)) for rank in range(cp_size) for payload, total in totals.items()}

    def fits(self, need: tuple[int, ...]) -> bool:
        return all(len(slots) >= need[rank] for (rank, _), slots in self.free.items())

    def take(self, need: tuple[int, ...]) -> dict[tuple[int, str], set[int]]:
        taken = {at: set(sorted(slots)[: need[at[0]]]) for at, slots in self.free.items()}
        for at, slots in taken.items():
            self.free[at] -= slots
        return taken

    def give(self, taken: dict[tuple[int, str], set[int]]) -> None:
        for at, slots in taken.items():
            self.free[at] |= slots


@settings(derandomize=True, max_examples=60, deadline=None)
@given(data=st.data(), cp_size=st.integers(1, 3), target=st.integers(0, 12), draft=st.integers(0, 12))
def test_ledger_agrees_with_sets_of_slots(data: st.DataObject, cp_size: int, target: int, draft: int) -> None:
    """R20: on random histories the ledger fits, refuses and counts exactly like sets of slots of every rank and payload."""
    totals = {"target": target, "draft": draft}
    ledger, naive = HostLedger(cp_size, totals), SetsOfSlots(cp_size, totals)
    held: list[tuple[tuple[int, ...], dict[tuple[int, str], set[int]]]] = []
    needs = st.tuples(*[st.integers(0, 5)] * cp_size)
    for _ in range(data.draw(st.integers(1, 15))):
        if data.draw(st.booleans()) and held:
            need, taken = held.pop(data.draw(st.integers(0, len(held) - 1)))
            ledger.give(need)
            naive.give(taken)
        else:
            need, extra = data.draw(needs), data.draw(needs)
            fits = naive.fits(need)
            assert ledger.fits(need) == fits
            assert ledger.fits_with(need, extra) == all(
                len(slots) + extra[rank] >= need[rank] for (rank, _), slots in naive.free.items()
            )
            assert fits == (not any(any(missing) for missing in ledger.shortage(need).values()))
            if fits:
                ledger.take(need)
                held.append((need, naive.take(need)))
        for (rank, payload), slots in naive.free.items():
            assert ledger.free(rank, payload) == len(slots)
        assert ledger.least_free() == min(len(slots) for slots in naive.free.values())
