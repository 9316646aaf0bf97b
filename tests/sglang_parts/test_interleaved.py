"""SGLang's allocator of pages that ranks share, as the engine's. The stand-in places pages as SGLang's does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cphicache.sglang.interleaved import InterleavedServerAllocator
from cphicache.spaces import CpSharedKVLayout, LogicalPage

PAGE, LANES = 4, 3


class InterleavedServer:
    """Has the methods of SGLang's ``PageInterleavePoolAllocator`` that are used: the owner of a chain's page P is (base + P) % LANES."""

    def __init__(self, pages_a_lane: int) -> None:
        self.size, self.page_size, self.device, self.shard_size = pages_a_lane * LANES * PAGE, PAGE, "cpu", LANES
        self.lanes = [list(range(LANES + lane, LANES * (pages_a_lane + 1), LANES)) for lane in range(LANES)]

    def available_size(self) -> int:
        return LANES * min(map(len, self.lanes)) * PAGE

    def class_free_page_counts(self) -> list[int]:
        return [len(lane) for lane in self.lanes]

    def least_full_class(self) -> int:
        return max(range(LANES), key=lambda lane: len(self.lanes[lane]))

    def get_all_free_pages(self) -> torch.Tensor:
        return torch.tensor([page for lane in self.lanes for page in lane])

    def alloc_extend(self, *given: Any, rotation_bases: list[int | None]) -> torch.Tensor | None:
        prefixes, prefixes_cpu, lengths, lengths_cpu, last_locs, total = given
        assert int(lengths.sum()) == int(lengths_cpu.sum()) == total
        assert not prefixes.any()
        assert not prefixes_cpu.any()
        assert (last_locs == -1).all()
        wanted: list[int] = []
        for tokens, base in zip(lengths.tolist(), rotation_bases, strict=True):
            first = self.least_full_class() if base is None else base
            wanted += [(first + at) % LANES for at in range(tokens // PAGE)]
        if any(wanted.count(lane) > len(free) for lane, free in enumerate(self.lanes)):
            return None
        pages = torch.tensor([self.lanes[lane].pop(0) for lane in wanted])
        return (pages[:, None] * PAGE + torch.arange(PAGE)).reshape(-1)

    def free(self, locs: torch.Tensor) -> None:
        for page in (locs // PAGE).tolist():
            self.lanes[page % LANES].append(page)


def made(pages_a_lane: int = 2) -> tuple[InterleavedServer, InterleavedServerAllocator]:
    server = InterleavedServer(pages_a_lane)
    return server, InterleavedServerAllocator(server)


def owners(pages: list[LogicalPage] | None) -> list[int]:
    assert pages is not None
    return list(CpSharedKVLayout(PAGE, LANES, 0, base=0).owners(pages))


def test_the_pages_of_a_chain_go_round() -> None:
    """R1, R4: pages 0..N-1 are reserved; a chain goes on with the rank after that of its last page; a new one begins where most is."""
    _, alloc = made()
    assert alloc.usable_pages == range(3, 9)
    assert alloc.lane_free() == (2, 2, 2)
    first = alloc.alloc(2)
    assert owners(first) == [0, 1]
    assert first is not None
    assert owners(alloc.alloc(2, first[-1])) == [2, 0]
    assert alloc.lane_free() == (0, 1, 1)
    assert alloc.alloc(0) == []
    assert owners(alloc.alloc(1)) == [1]


def test_what_lanes_lack_is_told_by_lane_and_takes_nothing() -> None:
    """R4: a demand that one rank cannot meet takes no page of any, and its shortage is that rank's."""
    _, alloc = made()
    first = alloc.alloc(1)
    assert first is not None
    assert alloc.alloc(5, first[-1]) is not None
    alloc.free(first)
    assert alloc.lane_free() == (1, 0, 0)
    assert alloc.alloc(2, LogicalPage(5)) is None
    assert alloc.lane_shortage(2, LogicalPage(5)) == (0, 1, 0)
    assert alloc.lane_shortage(4) == (1, 1, 1)
    assert alloc.lane_shortage_for_owners([0]) == (0, 0, 0)
    assert alloc.lane_free() == (1, 0, 0)


def test_a_load_back_gets_pages_of_the_same_owners() -> None:
    """R25: the owner pattern of a host copy is kept page by page, also where it does not go round."""
    _, alloc = made(3)
    for pattern in ([2, 0, 1], [1, 1, 2], []):
        assert owners(alloc.alloc_for_owners(pattern)) == pattern
    assert alloc.alloc_for_owners([2, 2]) is None


def test_freed_pages_are_seen_by_lane() -> None:
    """R29, R30: a checker sees each rank's free pages; freeing gives a page to its own rank, and freeing none is no call."""
    server, alloc = made()
    taken = alloc.alloc(3)
    assert taken is not None
    assert alloc.snapshot().free == ((6,), (7,), (8,))
    alloc.free(taken[1:])
    assert alloc.snapshot().free == ((6,), (4, 7), (5, 8))
    server.free = SimpleNamespace()  # type: ignore[method-assign, assignment]
    alloc.free([])


def test_the_engine_cannot_put_the_servers_pages_back() -> None:
    """R29: pages belong to the server: a state of them is not restored from outside."""
    _, alloc = made()
    with pytest.raises(ValueError, match="belong to the server"):
        alloc.restore(alloc.canonical())
