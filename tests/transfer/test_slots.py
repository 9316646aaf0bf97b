"""Host slots: whole pages, all or nothing, and every misuse named."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cphicache.transfer.pools.slots import HostSlotAllocator, TransferInternalError


def test_slots_come_in_contiguous_page_aligned_runs() -> None:
    """R9: slots are ints, page aligned, and one run where a run is long enough; otherwise the largest runs are taken."""
    slots = HostSlotAllocator(40, 4)
    first = slots.allocate(8)
    middle = slots.allocate(8)
    assert first == list(range(8))
    assert middle == list(range(8, 16))
    slots.free(first)
    assert slots.allocate(24) == list(range(16, 40))
    slots.free(list(range(20, 24)))
    assert slots.allocate(12) == [*range(8), *range(20, 24)]
    assert slots.free_slots == 0
    assert all(type(slot) is int for slot in middle)


def test_a_demand_that_does_not_fit_takes_nothing() -> None:
    """R9: all or nothing; no capacity is a value."""
    slots = HostSlotAllocator(16, 4)
    assert slots.allocate(20) is None
    assert slots.free_slots == 16
    assert slots.allocate(16) == list(range(16))
    assert slots.allocate(4) is None


def test_nothing_is_a_success() -> None:
    """R9: a rank that owns nothing allocates nothing, and that is not a refusal, even of a full pool."""
    slots = HostSlotAllocator(4, 4)
    assert slots.allocate(4) is not None
    assert slots.allocate(0) == []
    slots.free([])
    assert slots.free_slots == 0


@pytest.mark.parametrize(
    ("freed", "found"),
    [
        ([8, 9, 10, 11], "free run of pages 2..3"),
        ([0, 1, 2], "found \\[0, 1, 2\\]"),
        ([1, 2, 3, 4], "found \\[1, 2, 3, 4\\]"),
        ([16, 17, 18, 19], "expected slots in \\[0, 16\\)"),
        ([-4, -3, -2, -1], "expected slots in \\[0, 16\\)"),
        ([0, 1, 2, 3, 0, 1, 2, 3], "expected page 0 once"),
        ([0, 1, 2, 3, 12, 13, 14, 15], "free run of pages 2..3"),
    ],
)
def test_a_wrong_free_is_our_bug_and_changes_nothing(freed: list[int], found: str) -> None:
    """R14: a double, torn or foreign free is an internal error with evidence, before anything is freed."""
    slots = HostSlotAllocator(16, 4)
    assert slots.allocate(8) is not None
    with pytest.raises(TransferInternalError, match=found):
        slots.free(freed)
    assert slots.free_slots == 8
    slots.free(list(range(8)))
    assert slots.allocate(16) == list(range(16))


@pytest.mark.parametrize(("total", "page"), [(10, 4), (-4, 4), (8, 0)])
def test_a_pool_of_broken_pages_is_refused(total: int, page: int) -> None:
    """R35: slots that are no whole number of pages are refused at construction."""
    with pytest.raises(ValueError, match=r"total_slots|page_size"):
        HostSlotAllocator(total, page)


@pytest.mark.parametrize("slots", [3, -4])
def test_part_of_a_page_is_never_handed_out(slots: int) -> None:
    """R9: asking for part of a page is a misuse."""
    with pytest.raises(ValueError, match="whole number of pages"):
        HostSlotAllocator(16, 4).allocate(slots)


@settings(derandomize=True, max_examples=60, deadline=None)
@given(st.sampled_from([1, 4]), st.lists(st.tuples(st.booleans(), st.integers(0, 7)), max_size=40))
def test_random_histories_match_a_set_of_free_pages(page_size: int, steps: list[tuple[bool, int]]) -> None:
    """R30: free + taken = total after every step, no slot is handed out twice, and a fit is found exactly when one exists."""
    slots = HostSlotAllocator(12 * page_size, page_size)
    free = set(range(12 * page_size))
    held: list[list[int]] = []
    for give_back, number in steps:
        if give_back and held:
            returned = held.pop(number % len(held))
            slots.free(returned)
            free |= set(returned)
        else:
            taken = slots.allocate(number * page_size)
            assert (taken is None) == (number * page_size > len(free))
            if taken is not None:
                assert len(taken) == len(set(taken)) == number * page_size
                assert set(taken) <= free
                free -= set(taken)
                held.append(taken)
        assert slots.free_slots == len(free)
    slots.reset()
    assert slots.allocate(12 * page_size) == list(range(12 * page_size))
