"""SGLang's CP-shared device allocator, ``PageInterleavePoolAllocator``, as the engine's: one lane for each rank that stores pages.

With N ranks, rank ``page % N`` stores a page, pages 0..N-1 are reserved, and the pages of one chain go round: the owner of its page P is
``(rotation base + P) % N``. That is the placement of :class:`~cphicache.spaces.layout.CpSharedKVLayout` with base 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from cphicache.alloc import AllocatorSnapshot
from cphicache.sglang.allocator import ServerAllocator
from cphicache.spaces.types import LogicalPage


class InterleavedServerAllocator(ServerAllocator):
    """``server``: SGLang's ``PageInterleavePoolAllocator``. Each allocation is one request of its ``alloc_extend``, or a batch of them."""

    def __init__(self, server: Any) -> None:
        super().__init__(server)
        self._lanes: int = server.shard_size
        self._usable = range(self._lanes, self._lanes + server.size // server.page_size)

    def lane_free(self) -> tuple[int, ...]:
        """See the port."""
        return tuple(self._server.class_free_page_counts())

    def alloc(self, n: int, after: LogicalPage | None = None) -> list[LogicalPage] | None:
        """See the port; a new chain starts in the lane that has most pages."""
        return self._alloc([(n, None if after is None else (after + 1) % self._lanes)])

    def alloc_for_owners(self, owners: Sequence[int]) -> list[LogicalPage] | None:
        """See the port. A chain's owners go round, so that one run of pages is the rule; a break starts another run."""
        runs: list[tuple[int, int | None]] = []
        for at, owner in enumerate(owners):
            if at and owner == (owners[at - 1] + 1) % self._lanes:
                runs[-1] = (runs[-1][0] + 1, runs[-1][1])
            else:
                runs.append((1, owner))
        return self._alloc(runs)

    def lane_shortage(self, n: int, after: LogicalPage | None = None) -> tuple[int, ...]:
        """See the port."""
        first = self._server.least_full_class() if after is None else after + 1
        return self.lane_shortage_for_owners([(first + at) % self._lanes for at in range(n)])

    def lane_shortage_for_owners(self, owners: Sequence[int]) -> tuple[int, ...]:
        """See the port."""
        wanted = Counter(owners)
        return tuple(max(wanted[lane] - free, 0) for lane, free in enumerate(self.lane_free()))

    def free(self, pages: Sequence[LogicalPage]) -> None:
        """See the port."""
        if pages:
            self._server.free(torch.tensor(pages, dtype=torch.int64, device=self._server.device) * self._page_size)

    def snapshot(self) -> AllocatorSnapshot:
        """See the port. Not inside a group of frees, whose pages are in no list."""
        pages = sorted(self._server.get_all_free_pages().tolist())
        lanes = tuple(tuple(LogicalPage(page) for page in pages if page % self._lanes == lane) for lane in range(self._lanes))
        return AllocatorSnapshot(lanes, ((),) * self._lanes)

    def _alloc(self, runs: Sequence[tuple[int, int | None]]) -> list[LogicalPage] | None:
        """Pages of runs (pages, lane of the first or None) in order: all of them, or None with nothing taken."""
        tokens = torch.tensor([count * self._page_size for count, _ in runs if count], dtype=torch.int64)
        if not len(tokens):
            return []
        none = torch.zeros_like(tokens)
        bases = [lane for count, lane in runs if count]
        # Each run is a request without a prefix, whose rotation base is the lane of its first page.
        locs = self._server.alloc_extend(none, none, tokens, tokens, none - 1, int(tokens.sum()), rotation_bases=bases)
        if locs is None:
            return None
        return [LogicalPage(page) for page in (locs[:: self._page_size] // self._page_size).tolist()]
