"""Free logical device pages in one lane for each owner (R4, R29).

A lane's pages are in one of two lists, or handed out:

    free    descending, handed out from its end, so that each lane gives its lowest page first
    release pages given back since; sorted into ``free`` only when a demand exceeds ``free`` alone

A demand is counted before anything is taken: a refusal returns None and changes nothing. A merge sorts at most the pages about
to be handed out plus the released ones, so the work is amortised over the pages that come and go.
Lanes ascend together, so neighbouring pages of a chain tend to have neighbouring numbers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from cphicache.spaces.layout import CpSharedKVLayout
from cphicache.spaces.types import LogicalPage


class PageAccountingError(AssertionError):
    """Our bug: a page was given back that is free, reserved or not of this allocator."""


class AllocatorSnapshot(NamedTuple):
    """State of an allocator: ascending free and release lists by lane."""

    free: tuple[tuple[LogicalPage, ...], ...]
    release: tuple[tuple[LogicalPage, ...], ...]


def allocator_state_text(
    available_size: int, page_size: int, free_pages: int | None = None, release_pages: int | None = None
) -> str:
    """One line on an allocator's room (R29), sizes in tokens. An allocator without page lists gives no page counts and gets the
    first field only."""
    first = f"allocator_available_size={available_size}"
    if free_pages is None or release_pages is None:
        return first
    return (
        f"{first} (allocator_free_size={free_pages * page_size} [free_pages={free_pages}] + "
        f"allocator_release_size={release_pages * page_size} [release_pages={release_pages}])"
    )


class PageAllocator:
    """Hands out ``usable_pages`` logical pages, starting after the reserved ones, with the owners of ``layout``.

    Equal on all ranks: nothing here depends on ``layout.cp_rank``. ``usable_pages`` is a positive multiple of cp_size.
    """

    __slots__ = ("_free", "_is_free", "_lane_pages", "_layout", "_pages", "_release")

    def __init__(self, layout: CpSharedKVLayout, usable_pages: int) -> None:
        if usable_pages < 1 or usable_pages % layout.cp_size:
            raise ValueError(f"usable_pages is {usable_pages}: give a positive multiple of cp_size {layout.cp_size}")
        first = layout.reserved_pages.stop
        self._layout = layout
        self._pages = range(first, first + usable_pages)
        self._free: list[list[LogicalPage]] = [[] for _ in range(layout.cp_size)]
        self._release: list[list[LogicalPage]] = [[] for _ in range(layout.cp_size)]
        self._is_free = bytearray(b"\x01" * usable_pages)
        for number in reversed(self._pages):
            page = LogicalPage(number)
            self._free[layout.owner_of_page(page)].append(page)
        self._lane_pages = [range(lane[-1], lane[0] + 1, layout.cp_size) for lane in self._free]

    # -- counts ---------------------------------------------------------------------------------------------------------

    @property
    def page_size(self) -> int:
        """Tokens a page."""
        return self._layout.page_size

    @property
    def usable_pages(self) -> range:
        """All pages of this allocator, free or handed out."""
        return self._pages

    def lane_free(self) -> tuple[int, ...]:
        """Pages to hand out by lane, free and release lists together."""
        return tuple(len(free) + len(release) for free, release in zip(self._free, self._release, strict=True))

    def available_pages(self) -> int:
        """Pages that a chain can still get: cp_size x smallest lane, since a chain draws on all lanes alike."""
        return len(self._free) * min(self.lane_free())

    def available_size(self) -> int:
        """Tokens of :meth:`available_pages`."""
        return self.available_pages() * self.page_size

    def immediate_available_pages(self) -> int:
        """Pages in the free lists of all lanes."""
        return sum(len(free) for free in self._free)

    def immediate_available_size(self) -> int:
        """Tokens of :meth:`immediate_available_pages`."""
        return self.immediate_available_pages() * self.page_size

    def deferred_available_pages(self) -> int:
        """Pages in the release lists of all lanes."""
        return sum(len(release) for release in self._release)

    def deferred_available_size(self) -> int:
        """Tokens of :meth:`deferred_available_pages`."""
        return self.deferred_available_pages() * self.page_size

    def is_free(self, page: LogicalPage) -> bool:
        """Is the page in a free or release list? False for pages that this allocator never hands out."""
        return page in self._pages and bool(self._is_free[page - self._pages.start])

    def free_pages_set(self) -> set[LogicalPage]:
        """Pages of all free and release lists, for checkers."""
        return {page for lists in (self._free, self._release) for lane in lists for page in lane}

    def pages_for_extend(self, prefix_len: int, seq_len: int) -> int:
        """New pages to grow a sequence from ``prefix_len`` to ``seq_len`` tokens."""
        if not 0 <= prefix_len <= seq_len:
            raise ValueError(f"prefix_len is {prefix_len}, seq_len is {seq_len}: give 0 <= prefix_len <= seq_len")
        return -(-seq_len // self.page_size) - -(-prefix_len // self.page_size)

    def pages_for_decode(self, seq_len: int) -> int:
        """New pages for one more token; ``seq_len`` counts that token."""
        if seq_len < 1:
            raise ValueError(f"seq_len is {seq_len}: give the length with the new token, at least 1")
        return self.pages_for_extend(seq_len - 1, seq_len)

    # -- ask ------------------------------------------------------------------------------------------------------------

    def can_alloc(self, n: int, after: LogicalPage | None = None) -> bool:
        """Would :meth:`alloc` succeed now?"""
        return not any(self.lane_shortage(n, after))

    def can_alloc_for_owners(self, owners: Sequence[int]) -> bool:
        """Would :meth:`alloc_for_owners` succeed now?"""
        return not any(self.lane_shortage_for_owners(owners))

    def lane_shortage(self, n: int, after: LogicalPage | None = None) -> tuple[int, ...]:
        """Pages missing by lane for :meth:`alloc`; all 0 when it would succeed. The first lane of a new chain is the fullest one
        now: ask again after an eviction."""
        return self._shortage(self._cyclic_demand(n, self._first_lane(after)))

    def lane_shortage_for_owners(self, owners: Sequence[int]) -> tuple[int, ...]:
        """Pages missing by lane for :meth:`alloc_for_owners`; all 0 when it would succeed."""
        return self._shortage(self._owner_demand(owners))

    # -- do -------------------------------------------------------------------------------------------------------------

    def alloc(self, n: int, after: LogicalPage | None = None) -> list[LogicalPage] | None:
        """Hand out ``n`` pages of a chain, cyclically over the lanes; None when a lane is short, with nothing changed.

        A chain that goes on behind page ``after`` starts with the lane next to its owner; a new chain (None) with the lane that
        has most pages, the lowest id among equals.
        """
        start = self._first_lane(after)
        demand = self._cyclic_demand(n, start)
        if any(self._shortage(demand)):
            return None
        self._merge_where_short(demand)
        lanes = len(self._free)
        return self._take((start + index) % lanes for index in range(n))

    def alloc_for_owners(self, owners: Sequence[int]) -> list[LogicalPage] | None:
        """Hand out one page of each of these owners, in their order; None when a lane is short, with nothing changed."""
        demand = self._owner_demand(owners)
        if any(self._shortage(demand)):
            return None
        self._merge_where_short(demand)
        return self._take(owners)

    def free(self, pages: Sequence[LogicalPage]) -> None:
        """Give pages back, onto the release lists. Giving back what is not handed out is our bug; nothing changes then."""
        for page in pages:
            if page not in self._pages:
                kind = "reserved" if page in self._layout.reserved_pages else "foreign"
                raise PageAccountingError(
                    f"expected pages in {self._pages.start}..{self._pages.stop - 1}, "
                    f"found {kind} page {page} in a free of {list(pages)}"
                )
            if self.is_free(page):
                raise PageAccountingError(
                    f"expected handed-out pages, found page {page} free already (lane {self._layout.owner_of_page(page)}, "
                    f"{self.allocator_state_str()}) in a free of {list(pages)}"
                )
        if len(set(pages)) != len(pages):
            raise PageAccountingError(f"expected each page once, found a page twice in a free of {list(pages)}")
        for page in pages:
            self._is_free[page - self._pages.start] = 1
            self._release[self._layout.owner_of_page(page)].append(page)

    # -- texts ----------------------------------------------------------------------------------------------------------

    def allocator_state_str(self) -> str:
        """One line on what is available and where. With several lanes the parts may sum to more than is available: pages of the
        fuller lanes that no chain can use."""
        return allocator_state_text(
            self.available_size(), self.page_size, self.immediate_available_pages(), self.deferred_available_pages()
        )

    def out_of_memory_text(self, evictable_size: int, evict_result: object | None) -> str:
        """One line for an allocation that failed. ``evictable_size``: tokens that eviction could still free. ``evict_result``: what
        the eviction returned, a dataclass or named tuple whose fields are printed; None when none was tried."""
        result = "None" if evict_result is None else f"({_fields_text(evict_result)})"
        return (
            f"Available tokens: {self.available_size() + evictable_size} "
            f"({self.allocator_state_str()} + evictable_size={evictable_size}), "
            f"evict_result={result}, free_pages_by_lane={list(self.lane_free())}"
        )

    # -- state ----------------------------------------------------------------------------------------------------------

    def snapshot(self) -> AllocatorSnapshot:
        """The whole state, immutable. Release lists are kept sorted: their order never shows."""
        return AllocatorSnapshot(
            tuple(tuple(reversed(lane)) for lane in self._free), tuple(tuple(sorted(lane)) for lane in self._release)
        )

    def restore(self, snapshot: AllocatorSnapshot) -> None:
        """Go back to a state taken from an allocator of the same size and layout; ValueError when it cannot be one."""
        lanes = len(self._free)
        if len(snapshot.free) != lanes or len(snapshot.release) != lanes:
            raise ValueError(f"snapshot has {len(snapshot.free)} lanes: restore it into an allocator of that cp_size, not {lanes}")
        first, is_free = self._pages.start, bytearray(len(self._pages))
        for lane, pages in enumerate(zip(snapshot.free, snapshot.release, strict=True)):
            belongs = self._lane_pages[lane]
            for page in (*pages[0], *pages[1]):
                if page not in belongs or is_free[page - first]:
                    raise ValueError(
                        f"snapshot holds page {page} in lane {lane} (of another size or twice): restore what snapshot() returned"
                    )
                is_free[page - first] = 1
        self._is_free = is_free
        self._free = [list(reversed(lane)) for lane in snapshot.free]
        self._release = [list(lane) for lane in snapshot.release]

    def canonical(self) -> AllocatorSnapshot:
        """Hashable, equal exactly for states that hand out alike."""
        return self.snapshot()

    # -- inside ---------------------------------------------------------------------------------------------------------

    def _first_lane(self, after: LogicalPage | None) -> int:
        if after is None:
            counts = self.lane_free()
            return counts.index(max(counts))
        if after not in self._pages:
            raise ValueError(
                f"after is page {after}: give the chain's last page, in {self._pages.start}..{self._pages.stop - 1}, or None"
            )
        return (self._layout.owner_of_page(after) + 1) % len(self._free)

    def _cyclic_demand(self, n: int, start: int) -> list[int]:
        if n < 0:
            raise ValueError(f"n is {n}: give the number of pages, 0 or more")
        lanes = len(self._free)
        rounds, rest = divmod(n, lanes)
        return [rounds + ((lane - start) % lanes < rest) for lane in range(lanes)]

    def _owner_demand(self, owners: Sequence[int]) -> list[int]:
        demand = [0] * len(self._free)
        for owner in owners:
            if not 0 <= owner < len(demand):
                raise ValueError(f"owner is {owner}: give ranks in 0..{len(demand) - 1} (cp_size {len(demand)})")
            demand[owner] += 1
        return demand

    def _shortage(self, demand: Sequence[int]) -> tuple[int, ...]:
        return tuple(max(wanted - free, 0) for wanted, free in zip(demand, self.lane_free(), strict=True))

    def _merge_where_short(self, demand: Sequence[int]) -> None:
        for lane, wanted in enumerate(demand):
            if wanted > len(self._free[lane]):
                self._free[lane] = sorted(self._free[lane] + self._release[lane], reverse=True)
                self._release[lane] = []

    def _take(self, lanes: Iterable[int]) -> list[LogicalPage]:
        pages = [self._free[lane].pop() for lane in lanes]
        for page in pages:
            self._is_free[page - self._pages.start] = 0
        return pages


def _fields_text(result: object) -> str:
    if dataclasses.is_dataclass(result):
        names = [field.name for field in dataclasses.fields(result)]
    elif isinstance(result, tuple) and hasattr(result, "_fields"):
        names = list(result._fields)
    else:
        raise ValueError(f"evict_result is {result!r}: give a dataclass or named tuple with num_tokens_evicted, or None")
    return ", ".join(f"{name}={getattr(result, name)}" for name in names)
