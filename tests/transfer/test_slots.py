"""Host pages: all or nothing, against a naive twin, and every misuse named."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cphicache.transfer.pools.slots import HostPageAllocator, TransferInternalError


class NaiveAllocator:
    """What :class:`HostPageAllocator` is to do, looking at every page each time. Runs are in the order in which they came about."""

    def __init__(self, total: int) -> None:
        self.runs = [list(range(total))] if total else []

    @property
    def free_pages(self) -> int:
        return sum(map(len, self.runs))

    def allocate(self, pages: int) -> list[int] | None:
        if pages > self.free_pages:
            return None
        taken: list[int] = []
        while len(taken) < pages:
            missing = pages - len(taken)
            lengths = sorted(map(len, self.runs))
            length = next((length for length in lengths if length >= missing), lengths[-1])
            run = [run for run in self.runs if len(run) == length][-1]
            self.runs.remove(run)
            taken += run[:missing]
            if run[missing:]:
                self.runs.append(run[missing:])
        return taken

    def free(self, pages: list[int]) -> None:
        grown: list[list[int]] = []
        for page in sorted(pages):
            if grown and grown[-1][-1] == page - 1:
                grown[-1].append(page)
            else:
                grown.append([page])
        for run in grown:
            before = [other for other in self.runs if other[-1] == run[0] - 1]
            behind = [other for other in self.runs if other[0] == run[-1] + 1]
            for other in before + behind:
                self.runs.remove(other)
            self.runs.append([page for part in (*before, run, *behind) for page in part])


def test_pages_come_from_the_shortest_run_that_holds_them() -> None:
    """R9: one run where a run is long enough, and the shortest such one; otherwise the longest runs are taken."""
    pool = HostPageAllocator(10)
    first = pool.allocate(2)
    middle = pool.allocate(3)
    assert first == [0, 1]
    assert middle == [2, 3, 4]
    pool.free(first)
    assert pool.allocate(1) == [0]  # not from the run of 5 pages
    assert pool.allocate(5) == [5, 6, 7, 8, 9]
    pool.free([8, 7])
    assert pool.allocate(3) == [7, 8, 1]
    assert pool.free_pages == 0
    assert all(type(page) is int for page in middle)


def test_a_demand_that_does_not_fit_takes_nothing() -> None:
    """R9: all or nothing; no capacity is a value."""
    pool = HostPageAllocator(4)
    assert pool.allocate(5) is None
    assert pool.free_pages == 4
    assert pool.allocate(4) == [0, 1, 2, 3]
    assert pool.allocate(1) is None


def test_nothing_is_a_success() -> None:
    """R9: a rank that owns nothing allocates nothing, and that is not a refusal, even of a full pool."""
    pool = HostPageAllocator(1)
    assert pool.allocate(1) is not None
    assert pool.allocate(0) == []
    pool.free([])
    assert pool.free_pages == 0


@pytest.mark.parametrize(
    ("freed", "found"),
    [
        ([2], "free run of pages 2..3"),
        ([3], "free run of pages 2..3"),
        ([0, 1, 2], "host page 2: .* free run of pages 2..3"),
        ([5], "expected pages in \\[0, 5\\), found 5"),
        ([-1], "expected pages in \\[0, 5\\), found -1"),
        ([0, 0], "expected page 0 once"),
        ([1, 0, 1], "expected page 1 once"),
        ([0, 1, 1], "expected page 1 once"),
        ([0, 3], "free run of pages 2..3"),
    ],
)
def test_a_wrong_free_is_our_bug_and_changes_nothing(freed: list[int], found: str) -> None:
    """R14: a double or foreign free is an internal error with evidence, before anything is freed."""
    pool = HostPageAllocator(5)
    assert pool.allocate(5) is not None
    pool.free([2, 3])
    with pytest.raises(TransferInternalError, match=found):
        pool.free(freed)
    assert pool.free_pages == 2
    pool.free([4, 0, 1])
    assert pool.allocate(5) == [0, 1, 2, 3, 4]


def test_sizes_below_nothing_are_refused() -> None:
    """R35: a pool and a demand have 0 pages or more."""
    with pytest.raises(ValueError, match="total_pages=-1"):
        HostPageAllocator(-1)
    with pytest.raises(ValueError, match="pages=-2"):
        HostPageAllocator(1).allocate(-2)


@settings(derandomize=True, max_examples=300, deadline=None)
@given(st.integers(0, 24), st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=60), st.randoms(use_true_random=False))
def test_random_histories_match_the_naive_twin(total: int, steps: list[tuple[bool, int]], order: object) -> None:
    """R9, R30: the same pages as the twin that looks at all of them, after any history of demands and of pages given back in parts."""
    pool, twin = HostPageAllocator(total), NaiveAllocator(total)
    held: list[int] = []
    for give_back, number in steps:
        if give_back:
            order.shuffle(held)  # type: ignore[attr-defined]
            returned = [held.pop() for _ in range(min(number, len(held)))]
            pool.free(returned)
            twin.free(returned)
        else:
            taken = pool.allocate(number)
            assert taken == twin.allocate(number)
            held += taken or []
        assert pool.free_pages == twin.free_pages == total - len(held)
        assert len(set(held)) == len(held)
    pool.free(held)
    assert pool.allocate(total) == list(range(total))
