"""SGLang's device allocator as the engine's :class:`~cphicache.alloc.AllocatorPort`, for pages that every rank stores.

SGLang hands out the pages that its batches write; the engine gives them back, and takes pages itself for load-backs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from cphicache.alloc import AllocatorSnapshot, allocator_state_text
from cphicache.spaces.types import LogicalPage


class ServerAllocator:
    """``server``: SGLang's ``PagedTokenToKVPoolAllocator`` or (page size 1) ``TokenToKVPoolAllocator``. One owner lane.

    Between ``free_group_begin`` and ``free_group_end`` SGLang holds frees back: :meth:`available_size` rises at the end of the group.
    """

    def __init__(self, server: Any) -> None:
        self._server = server
        self._page_size: int = server.page_size
        self._usable = range(1, server.size // server.page_size + 1)

    @property
    def usable_pages(self) -> range:
        """See the port."""
        return self._usable

    def available_size(self) -> int:
        """See the port."""
        return int(self._server.available_size())

    def lane_free(self) -> tuple[int, ...]:
        """See the port."""
        return (self.available_size() // self._page_size,)

    def alloc(self, n: int, after: LogicalPage | None = None) -> list[LogicalPage] | None:
        """See the port; with one lane, ``after`` does not matter."""
        if n == 0:
            return []
        locs = self._server.alloc(n * self._page_size)
        if locs is None:
            return None
        return [LogicalPage(page) for page in (locs[:: self._page_size] // self._page_size).tolist()]

    def alloc_for_owners(self, owners: Sequence[int]) -> list[LogicalPage] | None:
        """See the port; all owners are rank 0."""
        return self.alloc(len(owners))

    def lane_shortage(self, n: int, after: LogicalPage | None = None) -> tuple[int, ...]:
        """See the port."""
        return (max(n - self.available_size() // self._page_size, 0),)

    def lane_shortage_for_owners(self, owners: Sequence[int]) -> tuple[int, ...]:
        """See the port."""
        return self.lane_shortage(len(owners))

    def free(self, pages: Sequence[LogicalPage]) -> None:
        """See the port."""
        if pages:
            self._server.free_page_ids(torch.tensor(pages, dtype=torch.int64, device=self._server.device))

    def out_of_memory_text(self, evictable_size: int, evict_result: object | None) -> str:
        """See the port."""
        available = self.available_size()
        state = allocator_state_text(available, self._page_size)
        return f"Available tokens: {available + evictable_size} ({state} + evictable_size={evictable_size}), evict_result={evict_result}"

    def snapshot(self) -> AllocatorSnapshot:
        """See the port. Not inside a group of frees, whose pages are in no list."""
        return AllocatorSnapshot((tuple(LogicalPage(page) for page in sorted(self._server.get_all_free_pages().tolist())),), ((),))

    def restore(self, snapshot: AllocatorSnapshot) -> None:
        """Refused: the pages are SGLang's."""
        raise ValueError(
            "restore of an engine inside SGLang: its device pages belong to the server; restore into an engine of your own"
        )

    def canonical(self) -> AllocatorSnapshot:
        """See the port."""
        return self.snapshot()
