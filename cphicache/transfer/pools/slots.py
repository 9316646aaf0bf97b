"""Host slots of one pool: whole pages, page aligned, all or nothing. Plain integers."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from itertools import pairwise


class TransferInternalError(AssertionError):
    """A defect in cphicache itself: the message says what was expected and what was found."""


class HostSlotAllocator:
    """Free pages of one host pool, kept as sorted, disjoint, maximal runs ``[start page, page count]``.

    A demand is met from the first run that holds all of it, else from the largest runs, so that copies stay mergeable.
    """

    __slots__ = ("_free_pages", "_runs", "page_size", "total_slots")

    def __init__(self, total_slots: int, page_size: int) -> None:
        if page_size < 1:
            raise ValueError(f"page_size={page_size}: use at least 1 token a page")
        if total_slots < 0 or total_slots % page_size:
            raise ValueError(f"total_slots={total_slots} is not a whole number of pages of {page_size} tokens: round it down")
        self.total_slots = total_slots
        self.page_size = page_size
        self.reset()

    @property
    def free_slots(self) -> int:
        """Free token slots."""
        return self._free_pages * self.page_size

    def reset(self) -> None:
        """Every slot is free."""
        self._free_pages = self.total_slots // self.page_size
        self._runs = [(0, self._free_pages)] if self._free_pages else []

    def allocate(self, slots: int) -> list[int] | None:
        """Take ``slots`` token slots (whole pages), ascending within each run. ``None``: too few are free, and none is taken."""
        if slots < 0 or slots % self.page_size:
            raise ValueError(f"slots={slots} is not a whole number of pages of {self.page_size} tokens: ask for whole pages")
        missing = slots // self.page_size
        if missing > self._free_pages:
            return None
        taken: list[int] = []
        while missing:
            at = next((i for i, (_, pages) in enumerate(self._runs) if pages >= missing), None)
            if at is None:
                at = max(range(len(self._runs)), key=lambda i: self._runs[i][1])
            start, pages = self._runs[at]
            used = min(pages, missing)
            if used == pages:
                del self._runs[at]
            else:
                self._runs[at] = (start + used, pages - used)
            taken.extend(range(start * self.page_size, (start + used) * self.page_size))
            missing -= used
            self._free_pages -= used
        return taken

    def free(self, slots: Sequence[int]) -> None:
        """Give whole pages back, in any page order. A foreign, torn or free page is our bug: raised before anything is freed."""
        pages = self._whole_pages(slots)
        for page in pages:
            self._require_used(page)
        for page in pages:
            self._insert(page)

    def _whole_pages(self, slots: Sequence[int]) -> list[int]:
        size = self.page_size
        pages = []
        for at in range(0, len(slots), size):
            chunk = list(slots[at : at + size])
            page = chunk[0] // size
            if chunk != list(range(page * size, (page + 1) * size)):
                raise TransferInternalError(f"free of host slots: expected the whole page {page} of {size} tokens, found {chunk}")
            if not 0 <= page < self.total_slots // size:
                raise TransferInternalError(f"free of host slots: expected slots in [0, {self.total_slots}), found {chunk}")
            pages.append(page)
        pages.sort()
        for first, second in pairwise(pages):
            if first == second:
                raise TransferInternalError(f"free of host slots: expected page {first} once, found it twice in one call")
        return pages

    def _require_used(self, page: int) -> None:
        at = bisect_left(self._runs, (page + 1, 0)) - 1
        if at >= 0 and page < self._runs[at][0] + self._runs[at][1]:
            start, count = self._runs[at]
            first_slot = page * self.page_size
            raise TransferInternalError(
                f"free of host slots {first_slot}..{first_slot + self.page_size - 1}: expected page {page} in use, "
                f"found it in the free run of pages {start}..{start + count - 1}"
            )

    def _insert(self, page: int) -> None:
        start, count = page, 1
        at = bisect_left(self._runs, (page, 0))
        if at < len(self._runs) and self._runs[at][0] == page + 1:
            count += self._runs.pop(at)[1]
        if at and sum(self._runs[at - 1]) == page:
            start, before = self._runs.pop(at - 1)
            count += before
        insort(self._runs, (start, count))
        self._free_pages += 1
