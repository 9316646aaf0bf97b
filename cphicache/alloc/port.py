"""What an engine asks of whoever owns the device pages: :class:`~cphicache.alloc.pages.PageAllocator`, or a server's own allocator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from cphicache.alloc.pages import AllocatorSnapshot
from cphicache.spaces.types import LogicalPage


class AllocatorPort(Protocol):
    """Device pages by owner lane. Equal calls on every rank give equal answers; a refusal returns None and changes nothing."""

    @property
    def usable_pages(self) -> range:
        """All pages, free or handed out."""

    def available_size(self) -> int:
        """Free tokens that a chain can still get."""

    def lane_free(self) -> tuple[int, ...]:
        """Free pages by lane."""

    def alloc(self, n: int, after: LogicalPage | None = None) -> list[LogicalPage] | None:
        """Hand out ``n`` pages that continue a chain behind page ``after``."""

    def alloc_for_owners(self, owners: Sequence[int]) -> list[LogicalPage] | None:
        """Hand out one page of each of these owners, in their order."""

    def lane_shortage(self, n: int, after: LogicalPage | None = None) -> tuple[int, ...]:
        """Pages missing by lane for :meth:`alloc`; all 0 when it would succeed."""

    def lane_shortage_for_owners(self, owners: Sequence[int]) -> tuple[int, ...]:
        """Pages missing by lane for :meth:`alloc_for_owners`; all 0 when it would succeed."""

    def free(self, pages: Sequence[LogicalPage]) -> None:
        """Give pages back, each once."""

    def out_of_memory_text(self, evictable_size: int, evict_result: object | None) -> str:
        """One line for an allocation that failed, sizes in tokens."""

    def snapshot(self) -> AllocatorSnapshot:
        """The free pages, by lane; for checkers, digests and snapshots."""

    def restore(self, snapshot: AllocatorSnapshot) -> None:
        """Go back to a state; ValueError from an allocator that cannot (a server's own)."""

    def canonical(self) -> AllocatorSnapshot:
        """Hashable, equal exactly for states that hand out alike."""
