"""Where a logical page lives: the only translation between logical and physical numbers (R1, R2).

With N = ``cp_size``, a logical page p that is not reserved has

    owner(p)    = (p - base) %  N
    physical(p) = (p - base) // N + base        on its owner; the offset inside the page is kept

    base 1, N = 4:  logical  0 | 1 2 3 4 | 5 6 7 8 | ...      base 0, N = 4:  logical  0 1 2 3 | 4 5 6 7 | ...
                    owner    - | 0 1 2 3 | 0 1 2 3 | ...                      owner    - - - - | 0 1 2 3 | ...
                    physical 0 | 1 1 1 1 | 2 2 2 2 | ...                      physical 0 0 0 0 | 1 1 1 1 | ...

Physical page 0 of every rank is reserved under either base. Base 0 is the placement of SGLang's page interleave.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cphicache.spaces.types import LogicalLoc, LogicalPage, PhysicalLoc, PhysicalPage


@dataclass(frozen=True, slots=True)
class CpSharedKVLayout:
    """Placement of the shared KV space as seen by rank ``cp_rank`` of ``cp_size`` context-parallel ranks.

    ``page_size``: tokens a page. ``base``: 1 reserves logical page 0, 0 reserves logical pages 0..cp_size-1.
    Everything but ``owns_*``, ``owned_pages``, ``physical*`` and ``logical*`` is equal on all ranks.

    Raises :class:`ValueError` on a number outside its space; reserved pages have no owner.
    """

    page_size: int
    cp_size: int
    cp_rank: int
    base: int = 1

    def __post_init__(self) -> None:
        if self.page_size < 1:
            raise ValueError(f"page_size is {self.page_size}: give the tokens a page, at least 1")
        if self.cp_size < 1:
            raise ValueError(f"cp_size is {self.cp_size}: give the number of context-parallel ranks, at least 1")
        if not 0 <= self.cp_rank < self.cp_size:
            raise ValueError(f"cp_rank is {self.cp_rank}: give a rank in 0..{self.cp_size - 1} (cp_size {self.cp_size})")
        if self.base not in (0, 1):
            raise ValueError(f"base is {self.base}: use 1 (page 0 reserved) or 0 (pages 0..cp_size-1 reserved)")

    # -- equal on all ranks ---------------------------------------------------------------------------------------------

    @property
    def reserved_pages(self) -> range:
        """Logical pages that are never owned or handed out; usable pages start at ``reserved_pages.stop``."""
        return range(1 if self.base == 1 else self.cp_size)

    def is_reserved_page(self, page: LogicalPage) -> bool:
        """Is this logical page reserved?"""
        if page < 0:
            raise ValueError(f"logical page is {page}: pages are 0 or more")
        return page in self.reserved_pages

    def page_of(self, loc: LogicalLoc) -> LogicalPage:
        """The logical page that holds a logical loc (reserved or not)."""
        if loc < 0:
            raise ValueError(f"logical loc is {loc}: locs are 0 or more")
        return LogicalPage(loc // self.page_size)

    def owner_of_page(self, page: LogicalPage) -> int:
        """The rank that stores a page."""
        if self.is_reserved_page(page):
            raise ValueError(
                f"logical page {page} is reserved and has no owner: usable pages start at {self.reserved_pages.stop} "
                f"(base {self.base}, cp_size {self.cp_size})"
            )
        return (page - self.base) % self.cp_size

    def owners(self, pages: Sequence[LogicalPage]) -> tuple[int, ...]:
        """The owner pattern of pages, in their order."""
        if pages and min(pages) < (1 if self.base == 1 else self.cp_size):
            return tuple(map(self.owner_of_page, pages))  # which says what is wrong with which page
        base, cp_size = self.base, self.cp_size
        return (0,) * len(pages) if cp_size == 1 else tuple([(page - base) % cp_size for page in pages])

    def owner(self, loc: LogicalLoc) -> int:
        """The rank that stores a logical loc."""
        return self.owner_of_page(self.page_of(loc))

    def locs(self, pages: Sequence[LogicalPage], tokens: int | None = None) -> list[LogicalLoc]:
        """Logical locs of ``pages`` in order; with ``tokens``, the first so many of them (the last page may be short)."""
        capacity = len(pages) * self.page_size
        wanted = capacity if tokens is None else tokens
        if not 0 <= wanted <= capacity:
            raise ValueError(f"tokens is {tokens}: {len(pages)} pages of {self.page_size} hold 0..{capacity}; pass more pages")
        return [LogicalLoc(page * self.page_size + offset) for page in pages for offset in range(self.page_size)][:wanted]

    def physical_pages_total(self, usable_logical_pages: int) -> int:
        """Pages of one rank's device pool, the reserved physical page 0 included; the same on every rank."""
        if usable_logical_pages < 1:
            raise ValueError(f"usable_logical_pages is {usable_logical_pages}: give at least 1")
        return -(-usable_logical_pages // self.cp_size) + 1

    # -- this rank's share ----------------------------------------------------------------------------------------------

    def owns_page(self, page: LogicalPage) -> bool:
        """Does this rank store the page? False for reserved pages."""
        return not self.is_reserved_page(page) and self.owner_of_page(page) == self.cp_rank

    def owned_pages(self, pages: Iterable[LogicalPage]) -> list[tuple[int, LogicalPage]]:
        """(index in ``pages``, page) of the pages that this rank stores. A reserved page among them is an error."""
        return [(index, page) for index, page in enumerate(pages) if self.owner_of_page(page) == self.cp_rank]

    def physical_pages(self, pages: Iterable[LogicalPage]) -> list[int]:
        """:meth:`physical_page` of each of these pages, all of which this rank stores: not checked again."""
        base, cp_size = self.base, self.cp_size
        return [(page - base) // cp_size + base for page in pages]

    def physical_page(self, page: LogicalPage) -> PhysicalPage:
        """The page of this rank's device pool that stores an owned logical page."""
        owner = self.owner_of_page(page)
        if owner != self.cp_rank:
            raise ValueError(f"logical page {page} is owned by rank {owner}, not by rank {self.cp_rank}: ask owns_page first")
        return PhysicalPage((page - self.base) // self.cp_size + self.base)

    def logical_page(self, physical_page: PhysicalPage) -> LogicalPage:
        """The logical page stored in a page of this rank's device pool; inverse of :meth:`physical_page`."""
        if physical_page < 1:
            raise ValueError(f"physical page is {physical_page}: page 0 is reserved, usable physical pages start at 1")
        return LogicalPage((physical_page - self.base) * self.cp_size + self.cp_rank + self.base)

    def physical(self, loc: LogicalLoc) -> PhysicalLoc:
        """The slot of this rank's device pool that stores an owned logical loc."""
        return PhysicalLoc(self.physical_page(self.page_of(loc)) * self.page_size + loc % self.page_size)

    def logical(self, physical_loc: PhysicalLoc) -> LogicalLoc:
        """The logical loc stored in a slot of this rank's device pool; inverse of :meth:`physical`."""
        page = self.logical_page(PhysicalPage(physical_loc // self.page_size))
        return LogicalLoc(page * self.page_size + physical_loc % self.page_size)
