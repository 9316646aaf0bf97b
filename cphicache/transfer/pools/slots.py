"""Host slots of one pool, given out by whole pages, all or nothing. Plain integers; no cost grows with the number of fragments."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from itertools import pairwise


class TransferInternalError(AssertionError):
    """A defect in cphicache itself: the message says what was expected and what was found."""


class HostPageAllocator:
    """Free pages of one host pool as disjoint, maximal runs, found by their first page, by their end and by their length.

    A demand is met from the shortest run that holds all of it, so that long runs stay for long demands; else from the longest runs, so
    that copies stay mergeable. Of runs of one length the one that came about last is taken.
    """

    __slots__ = ("_by_length", "_free_pages", "_in_use", "_length_at", "_lengths", "_start_of", "total_pages")

    def __init__(self, total_pages: int) -> None:
        if total_pages < 0:
            raise ValueError(f"total_pages={total_pages}: a host pool has 0 pages or more")
        self.total_pages = total_pages
        self._free_pages = total_pages
        self._in_use = bytearray(total_pages)
        self._length_at: dict[int, int] = {}
        self._start_of: dict[int, int] = {}  # by the page behind the run
        self._by_length: dict[int, dict[int, None]] = {}  # first pages; a dict keeps their order and gives up any of them at once
        self._lengths: list[int] = []  # the keys of that, ascending: at most sqrt(2 * total_pages) differ
        if total_pages:
            self._add_run(0, total_pages)

    @property
    def free_pages(self) -> int:
        """Free pages."""
        return self._free_pages

    def allocate(self, pages: int) -> list[int] | None:
        """Take so many pages, ascending within each run. ``None``: too few are free, and none is taken."""
        if pages < 0:
            raise ValueError(f"pages={pages}: ask for 0 or more")
        if pages > self._free_pages:
            return None
        self._free_pages -= pages
        taken: list[int] = []
        while pages:
            at = bisect_left(self._lengths, pages)
            length = self._lengths[at if at < len(self._lengths) else -1]
            start = next(reversed(self._by_length[length]))
            self._drop_run(start, length)
            used = min(length, pages)
            if used < length:
                self._add_run(start + used, length - used)
            self._in_use[start : start + used] = b"\x01" * used
            taken.extend(range(start, start + used))
            pages -= used
        return taken

    def free(self, pages: Sequence[int]) -> None:
        """Give pages back, in any order. A foreign or free page, or one given twice, is our bug: raised before anything is freed."""
        if not pages:
            return
        runs = self._runs_of(sorted(pages))
        for start, length in runs:
            if self._in_use.count(1, start, start + length) != length:
                self._raise_free_page(start, length)
        for start, length in runs:
            self._in_use[start : start + length] = bytes(length)
            first, end = self._start_of.get(start), start + length
            if first is None:
                first = start
            else:
                self._drop_run(first, start - first)
            behind = self._length_at.get(end)
            if behind is not None:
                self._drop_run(end, behind)
                end += behind
            self._add_run(first, end - first)
        self._free_pages += len(pages)

    def _runs_of(self, pages: list[int]) -> list[tuple[int, int]]:
        """Sorted pages as (first, length) of neighbours."""
        if pages[0] < 0 or pages[-1] >= self.total_pages:
            wrong = pages[0] if pages[0] < 0 else pages[-1]
            raise TransferInternalError(f"free of host pages: expected pages in [0, {self.total_pages}), found {wrong}")
        first, last = pages[0], pages[-1]
        runs = []
        for page, following in pairwise(pages):
            if following == page:
                raise TransferInternalError(f"free of host pages: expected page {page} once, found it twice in one call")
            if following != page + 1:
                runs.append((first, page + 1 - first))
                first = following
        runs.append((first, last + 1 - first))
        return runs

    def _raise_free_page(self, start: int, length: int) -> None:
        page = self._in_use.index(0, start, start + length)
        first = self._in_use.rfind(1, 0, page) + 1
        last = self._in_use.find(1, page)
        last = self.total_pages - 1 if last < 0 else last - 1
        raise TransferInternalError(
            f"free of host page {page}: expected it in use, found it in the free run of pages {first}..{last}"
        )

    def _add_run(self, start: int, length: int) -> None:
        self._length_at[start] = length
        self._start_of[start + length] = start
        alike = self._by_length.get(length)
        if alike is None:
            self._by_length[length] = {start: None}
            insort(self._lengths, length)
        else:
            alike[start] = None

    def _drop_run(self, start: int, length: int) -> None:
        del self._length_at[start], self._start_of[start + length]
        alike = self._by_length[length]
        del alike[start]
        if not alike:
            del self._by_length[length]
            del self._lengths[bisect_left(self._lengths, length)]
