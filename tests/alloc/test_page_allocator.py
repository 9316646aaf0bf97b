"""Logical device pages by owner lane."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cphicache.alloc import AllocatorSnapshot, PageAccountingError, PageAllocator, allocator_state_text
from cphicache.spaces import CpSharedKVLayout, LogicalPage


def allocator(usable_pages: int, cp_size: int = 4, page_size: int = 4, base: int = 1, cp_rank: int = 0) -> PageAllocator:
    return PageAllocator(CpSharedKVLayout(page_size, cp_size, cp_rank, base), usable_pages)


def pages(*numbers: int) -> tuple[LogicalPage, ...]:
    return tuple(LogicalPage(number) for number in numbers)


def taken(found: list[LogicalPage] | None) -> list[LogicalPage]:
    assert found is not None
    return found


def single_lane() -> PageAllocator:
    """Page size 64, free list [1, 5], release list [7]."""
    pool = allocator(8, cp_size=1, page_size=64)
    pool.restore(AllocatorSnapshot(free=(pages(1, 5),), release=(pages(7),)))
    return pool


@pytest.mark.parametrize(("base", "first"), [(1, 1), (0, 4)])
def test_reserved_pages_are_never_handed_out(base: int, first: int) -> None:
    """R2: exactly the usable pages after the reserved ones are handed out, in ascending order from lane 0."""
    pool = allocator(8, base=base)
    assert pool.usable_pages == range(first, first + 8)
    assert taken(pool.alloc(8)) == list(range(first, first + 8))
    assert pool.alloc(1) is None
    assert pool.free_pages_set() == set()


def test_new_chain_starts_at_the_fullest_lane() -> None:
    """R4: page P of a new chain comes from lane (b + P) % cp_size, b the lane with most free pages, the lowest id among equals."""
    pool = allocator(16)
    layout = CpSharedKVLayout(4, 4, 0)
    assert layout.owners(taken(pool.alloc(2))) == (0, 1)
    assert pool.lane_free() == (3, 3, 4, 4)
    assert layout.owners(taken(pool.alloc(6))) == (2, 3, 0, 1, 2, 3)
    assert pool.lane_free() == (2, 2, 2, 2)


def test_extension_goes_on_with_the_next_lane() -> None:
    """R4: an extension continues the cycle of its chain, whichever lane is fullest, so counts by rank differ by at most one."""
    pool = allocator(16)
    layout = CpSharedKVLayout(4, 4, 0)
    chain = taken(pool.alloc(3))
    for length in (1, 2, 5):
        chain += taken(pool.alloc(length, after=chain[-1]))
    owners = layout.owners(chain)
    assert owners == tuple(index % 4 for index in range(11))
    counts = [owners.count(rank) for rank in range(4)]
    assert max(counts) - min(counts) <= 1


def test_available_size_is_bounded_by_the_smallest_lane() -> None:
    """R4: available size = cp_size x smallest lane x page size, although other lanes hold more."""
    pool = allocator(16)
    pool.alloc_for_owners([2, 2, 2])
    assert pool.lane_free() == (4, 4, 1, 4)
    assert pool.available_pages() == 4
    assert pool.available_size() == 16


def test_alloc_for_owners_follows_the_pattern() -> None:
    """R4: a load-back gets pages of exactly the owner pattern asked for, or None and the lanes that are short."""
    pool = allocator(8)
    layout = CpSharedKVLayout(4, 4, 0)
    found = taken(pool.alloc_for_owners([3, 0, 0, 2]))
    assert layout.owners(found) == (3, 0, 0, 2)
    before = pool.snapshot()
    assert pool.alloc_for_owners([0, 1, 3, 3, 3]) is None
    assert pool.lane_shortage_for_owners([0, 1, 3, 3, 3]) == (1, 0, 0, 2)
    assert not pool.can_alloc_for_owners([0])
    assert pool.can_alloc_for_owners([1, 1, 2, 3])
    assert pool.snapshot() == before
    assert pool.alloc_for_owners([]) == []


def test_one_allocation_of_16_tokens() -> None:
    """R4: a load-back of 4..19 (owners 0..3) is one allocation of 16 logical tokens, one page a rank."""
    pool = allocator(8)
    assert 4 * len(taken(pool.alloc_for_owners((0, 1, 2, 3)))) == 16
    assert pool.lane_free() == (1, 1, 1, 1)


def test_eviction_for_a_lane_demand_ends_when_each_lane_has_enough() -> None:
    """R4: shortage is told by lane: pages freed in another lane do not end it."""
    pool = allocator(8)
    held = taken(pool.alloc(8))
    assert pool.lane_shortage(2) == (1, 1, 0, 0)
    pool.free([held[2], held[6]])
    assert pool.lane_shortage_for_owners([0, 1]) == (1, 1, 0, 0)
    assert pool.alloc_for_owners([0, 1]) is None
    pool.free([held[0], held[1]])
    assert pool.lane_shortage_for_owners([0, 1]) == (0, 0, 0, 0)
    assert taken(pool.alloc_for_owners([0, 1])) == [1, 2]


@pytest.mark.parametrize(("prefix_len", "seq_len", "new_pages"), [(60, 130, 2), (64, 128, 1), (0, 1, 1), (0, 0, 0), (5, 5, 0)])
def test_pages_for_extend(prefix_len: int, seq_len: int, new_pages: int) -> None:
    """R29: extend = ceil(seq/page) - ceil(prefix/page), page 64."""
    assert allocator(4, page_size=64).pages_for_extend(prefix_len, seq_len) == new_pages


def test_pages_for_decode() -> None:
    """R29: decode at page 64: 64 needs 0, 65 needs 1, 129 needs 1; at page size 1 each token needs one."""
    pool = allocator(4, page_size=64)
    assert [pool.pages_for_decode(length) for length in (64, 65, 129, 1)] == [0, 1, 1, 1]
    assert [allocator(4, page_size=1).pages_for_decode(length) for length in (1, 2, 64, 65)] == [1, 1, 1, 1]


def test_state_text_is_as_worked() -> None:
    """R29: the state text for page 64, free [1,5], release [7], the parts behind it, and the short form without page lists."""
    pool = single_lane()
    assert pool.allocator_state_str() == (
        "allocator_available_size=192 (allocator_free_size=128 [free_pages=2] + allocator_release_size=64 [release_pages=1])"
    )
    assert (pool.immediate_available_pages(), pool.immediate_available_size()) == (2, 128)
    assert (pool.deferred_available_pages(), pool.deferred_available_size()) == (1, 64)
    assert allocator_state_text(192, 64) == "allocator_available_size=192"


class Evicted(NamedTuple):
    num_tokens_evicted: int
    nodes: int


@dataclass(frozen=True)
class EvictedAsDataclass:
    num_tokens_evicted: int


def test_out_of_memory_text() -> None:
    """R29: out of memory tells the sum, the allocator state, what is evictable, what eviction returned, and free pages by lane."""
    pool = single_lane()
    state = pool.allocator_state_str()
    assert pool.out_of_memory_text(64, Evicted(128, 2)) == (
        f"Available tokens: 256 ({state} + evictable_size=64), "
        "evict_result=(num_tokens_evicted=128, nodes=2), free_pages_by_lane=[3]"
    )
    assert "evict_result=(num_tokens_evicted=5), " in pool.out_of_memory_text(0, EvictedAsDataclass(5))
    assert "evict_result=None, free_pages_by_lane=[1, 1, 1, 1]" in allocator(4).out_of_memory_text(0, None)
    with pytest.raises(ValueError, match="evict_result is 5: give a dataclass or named tuple"):
        pool.out_of_memory_text(0, 5)


def test_release_list_is_sorted_in_only_when_short() -> None:
    """R29: released pages stay on their list until the free list alone is short, and are handed out sorted then."""
    pool = allocator(8, cp_size=1)
    held = taken(pool.alloc(6))
    pool.free([held[4], held[0]])
    assert taken(pool.alloc(1)) == [7]
    assert pool.snapshot() == AllocatorSnapshot(free=(pages(8),), release=(pages(1, 5),))
    assert taken(pool.alloc(2)) == [1, 5]
    assert pool.snapshot() == AllocatorSnapshot(free=(pages(8),), release=((),))


def test_a_refusal_merges_nothing() -> None:
    """R29: new pages are counted before anything is allocated; a refusal returns None and changes neither list."""
    pool = single_lane()
    before = pool.snapshot()
    assert pool.alloc(4) is None
    assert not pool.can_alloc(4)
    assert pool.lane_shortage(4) == (1,)
    assert pool.snapshot() == before
    assert pool.can_alloc(3)
    assert pool.alloc(0) == []


@pytest.mark.parametrize(
    ("freed", "text"),
    [
        ((2, 5), "page 5 free already .lane 0, allocator_available_size="),
        ((2, 2), "a page twice"),
        ((2, 0), r"expected pages in 1\.\.8, found reserved page 0"),
        ((2, 9), "found foreign page 9"),
        ((2, -1), "found foreign page -1"),
    ],
)
def test_wrong_frees_are_our_bug(freed: tuple[int, ...], text: str) -> None:
    """R30: freeing a free, reserved or foreign page is an internal error with the evidence, and nothing of that call is freed."""
    pool = allocator(8)
    pool.alloc(4)
    before = pool.snapshot()
    with pytest.raises(PageAccountingError, match=text):
        pool.free(pages(*freed))
    assert pool.snapshot() == before
    pool.free(pages(2))
    with pytest.raises(PageAccountingError, match="page 2 free already"):
        pool.free(pages(2))


def test_is_free_covers_every_number() -> None:
    """R30: a page is free or handed out; numbers that the allocator does not have are never free."""
    pool = allocator(4)
    held = taken(pool.alloc(2))
    assert [pool.is_free(LogicalPage(number)) for number in range(-1, 6)] == [False, False, False, False, True, True, False]
    pool.free(held)
    assert pool.free_pages_set() == {1, 2, 3, 4}


def test_impossible_arguments_are_refused() -> None:
    """R35: sizes, owners and chains that cannot be are refused, naming the value and the remedy."""
    for usable in (0, 6, -4):
        with pytest.raises(ValueError, match=f"usable_pages is {usable}: give a positive multiple of cp_size 4"):
            allocator(usable)
    pool = allocator(4)
    with pytest.raises(ValueError, match="n is -1"):
        pool.alloc(-1)
    with pytest.raises(ValueError, match="after is page 0: give the chain's last page"):
        pool.can_alloc(1, after=LogicalPage(0))
    with pytest.raises(ValueError, match="owner is 4"):
        pool.alloc_for_owners([0, 4])
    with pytest.raises(ValueError, match="prefix_len is 3, seq_len is 2"):
        pool.pages_for_extend(3, 2)
    with pytest.raises(ValueError, match="seq_len is 0"):
        pool.pages_for_decode(0)


@pytest.mark.parametrize(
    ("snapshot", "text"),
    [
        (AllocatorSnapshot(free=((),), release=((),)), "snapshot has 1 lanes"),
        (AllocatorSnapshot(free=(pages(2), ()), release=((), ())), "page 2 in lane 0"),
        (AllocatorSnapshot(free=(pages(1), ()), release=(pages(1), ())), "page 1 in lane 0"),
        (AllocatorSnapshot(free=(pages(5), ()), release=((), ())), "page 5 in lane 0"),
    ],
)
def test_foreign_snapshots_are_refused(snapshot: AllocatorSnapshot, text: str) -> None:
    """R30: a snapshot that cannot be of this allocator is refused and leaves it as it was."""
    pool = allocator(4, cp_size=2)
    before = pool.snapshot()
    with pytest.raises(ValueError, match=text):
        pool.restore(snapshot)
    assert pool.snapshot() == before


class NaiveAllocator:
    """Naive twin: plain lists, re-sorted and searched at each call."""

    def __init__(self, cp_size: int, base: int, usable: int) -> None:
        first = 1 if base else cp_size
        self.cp_size, self.base = cp_size, base
        self.free, self.release = list(range(first, first + usable)), list[int]()

    def lane(self, page: int) -> int:
        return (page - self.base) % self.cp_size

    def count(self, lane: int) -> int:
        return sum(self.lane(page) == lane for page in self.free + self.release)

    def pattern(self, n: int, after: int | None) -> list[int]:
        start = max(range(self.cp_size), key=lambda lane: (self.count(lane), -lane)) if after is None else self.lane(after) + 1
        return [(start + index) % self.cp_size for index in range(n)]

    def take(self, pattern: list[int]) -> list[int] | None:
        if any(self.count(lane) < pattern.count(lane) for lane in range(self.cp_size)):
            return None
        for lane in range(self.cp_size):
            if sum(self.lane(page) == lane for page in self.free) < pattern.count(lane):
                self.free += [page for page in self.release if self.lane(page) == lane]
                self.release = [page for page in self.release if self.lane(page) != lane]
        found = []
        for lane in pattern:
            page = min(page for page in self.free if self.lane(page) == lane)
            self.free.remove(page)
            found.append(page)
        return found


@settings(derandomize=True, max_examples=80, deadline=None)
@given(data=st.data(), cp_size=st.integers(1, 4), base=st.integers(0, 1), rounds=st.integers(1, 5))
def test_allocator_agrees_with_plain_lists(data: st.DataObject, cp_size: int, base: int, rounds: int) -> None:
    """R29, R20: on random histories every rank's allocator hands out the pages of the plain lists, in the same order, refuses
    when they do, keeps free + release + handed out = usable, and goes on alike from a restored snapshot."""
    usable = rounds * cp_size
    ranks = [allocator(usable, cp_size=cp_size, base=base, cp_rank=rank) for rank in (0, cp_size - 1)]
    naive = NaiveAllocator(cp_size, base, usable)
    held: list[LogicalPage] = []
    for _ in range(data.draw(st.integers(1, 14))):
        action = data.draw(st.sampled_from(["alloc", "owners", "free", "restore"]))
        if action == "restore":
            fresh = allocator(usable, cp_size=cp_size, base=base)
            fresh.restore(ranks[0].snapshot())
            ranks[0] = fresh
        elif action == "free":
            freed = data.draw(st.permutations(held))[: data.draw(st.integers(0, len(held)))]
            held = [page for page in held if page not in freed]
            naive.release += freed
            for pool in ranks:
                pool.free(freed)
        else:
            after = data.draw(st.sampled_from([None, *held])) if action == "alloc" else None
            n = data.draw(st.integers(0, usable))
            pattern = (
                naive.pattern(n, after) if action == "alloc" else data.draw(st.lists(st.integers(0, cp_size - 1), max_size=usable))
            )
            missing = tuple(max(pattern.count(lane) - naive.count(lane), 0) for lane in range(cp_size))
            expected = naive.take(pattern)
            for pool in ranks:
                if action == "alloc":
                    assert pool.lane_shortage(n, after) == missing
                    assert pool.can_alloc(n, after) == (expected is not None)
                    assert pool.alloc(n, after) == expected
                else:
                    assert pool.lane_shortage_for_owners(pattern) == missing
                    assert pool.can_alloc_for_owners(pattern) == (expected is not None)
                    assert pool.alloc_for_owners(pattern) == expected
            held += [LogicalPage(page) for page in expected or []]
        for pool in ranks:
            assert pool.free_pages_set() == {*naive.free, *naive.release}
            assert pool.immediate_available_pages() == len(naive.free)
            assert pool.deferred_available_pages() == len(naive.release)
            assert pool.immediate_available_pages() + pool.deferred_available_pages() + len(held) == usable
            assert pool.available_pages() == cp_size * min(naive.count(lane) for lane in range(cp_size))
            assert {page for page in pool.usable_pages if pool.is_free(LogicalPage(page))} == pool.free_pages_set()
        assert ranks[0].canonical() == ranks[-1].canonical()
        assert hash(ranks[0].canonical()) == hash(ranks[-1].canonical())
