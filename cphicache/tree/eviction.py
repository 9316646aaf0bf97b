"""Eviction order: policies, and heaps of candidates with lazy deletion.

A policy is a pure function of node fields, and ties go to the lower node id, so that all ranks name the same victim.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic

from cphicache.tree.node import B, Node

Rank = tuple[int, ...]
"""Policy value of a node; the lowest goes first."""

_STALE_SLACK = 64
"""Stale heap entries allowed beyond one a live candidate, so that small heaps are not rebuilt all the time."""


@dataclass(frozen=True, slots=True)
class Policy:
    """An eviction order. ``reads`` names the node fields that ``rank`` depends on (the tree's canonical form keeps those only)."""

    name: str
    rank: Callable[[Node[Any]], Rank]
    reads: tuple[str, ...]


POLICIES: dict[str, Policy] = {
    policy.name: policy
    for policy in (
        Policy("lru", lambda node: (node.last_access,), ("last_access",)),
        Policy("lfu", lambda node: (node.hits, node.last_access), ("hits", "last_access")),
        Policy("fifo", lambda node: (node.created,), ("created",)),
        Policy("mru", lambda node: (-node.last_access,), ("last_access",)),
        Policy("priority", lambda node: (node.priority, node.last_access), ("priority", "last_access")),
    )
}
"""Least recently used, least frequently used, first in first out, most recently used, lowest priority first."""
SEGMENTED = "slru"


def segmented_lru(name: str, protected_hits: int) -> Policy:
    """Segmented LRU: nodes with fewer hits than ``protected_hits`` go before all others; in each of the two parts, the oldest."""
    return Policy(name, lambda node: (int(node.hits >= protected_hits), node.last_access), ("hits", "last_access"))


def policy_named(name: str) -> Policy:
    """The policy of that name (``slru`` protects from 2 hits on, ``slru-N`` from N); ValueError with the known names otherwise."""
    policy = POLICIES.get(name)
    if policy is not None:
        return policy
    base, _, hits = name.partition("-")
    if base == SEGMENTED and (not hits or (hits.isdecimal() and int(hits) >= 1)) and name != SEGMENTED + "-":
        return segmented_lru(name, int(hits or 2))
    raise ValueError(f"unknown eviction policy {name!r}: use one of {', '.join((*POLICIES, SEGMENTED, SEGMENTED + '-N'))}")


class Candidates(Generic[B]):
    """The nodes that may be evicted, best victim first.

    A heap entry is live if ``_live`` holds that very entry; others are stale and skipped when they surface. A live entry's rank is
    at most the node's true rank: it is pushed anew at once when the rank falls, and when it surfaces if the rank has risen.
    ``len(heap) <= 2 * len(live) + slack`` by compaction. All costs are O(log n), amortised over ``add``, ``discard``, ``refresh``.
    ``operations`` counts heap pushes and pops and the entries that compactions move.
    """

    __slots__ = ("_heap", "_live", "_rank", "_stamp", "operations")

    def __init__(self, policy: Policy) -> None:
        self._rank = policy.rank
        self._heap: list[tuple[Rank, int, int, Node[B]]] = []
        self._live: dict[int, tuple[Rank, int, int, Node[B]]] = {}
        self._stamp = 0  # makes entries of the same node differ, so that nodes themselves are never compared
        self.operations = 0

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, node: Node[B]) -> bool:
        return node.id in self._live

    @property
    def heap_entries(self) -> int:
        """Entries in the heap, stale ones included."""
        return len(self._heap)

    def order(self, node: Node[B]) -> tuple[Rank, int]:
        """What victims are sorted by: rank, then node id."""
        return self._rank(node), node.id

    def add(self, node: Node[B]) -> None:
        """Make ``node`` a candidate; nothing happens if it is one."""
        if node.id not in self._live:
            self._push(node)
            self._compact_if_stale()

    def discard(self, node: Node[B]) -> None:
        """Make ``node`` no candidate; nothing happens if it is none. Its entry stays behind as a stale one."""
        if self._live.pop(node.id, None) is not None:
            self._compact_if_stale()

    def refresh(self, node: Node[B]) -> None:
        """Take note that fields which the policy reads may have changed."""
        entry = self._live.get(node.id)
        if entry is not None and self._rank(node) < entry[0]:
            self._push(node)
            self._compact_if_stale()

    def peek(self) -> Node[B] | None:
        """The best victim, which stays a candidate; None if there is none."""
        heap = self._heap
        while heap:
            entry = heap[0]
            node = entry[3]
            if self._live.get(node.id) is not entry:
                heapq.heappop(heap)
                self.operations += 1
            elif (rank := self._rank(node)) != entry[0]:
                self._stamp += 1
                fresh = (rank, node.id, self._stamp, node)
                self._live[node.id] = fresh
                heapq.heapreplace(heap, fresh)
                self.operations += 2
            else:
                return node
        return None

    def pop(self) -> Node[B] | None:
        """The best victim, which is no candidate any more; None if there is none."""
        node = self.peek()
        if node is not None:
            heapq.heappop(self._heap)
            self.operations += 1
            del self._live[node.id]
        return node

    def first(self, accept: Callable[[Node[B]], bool] | None, aside: list[Node[B]] | None) -> Node[B] | None:
        """The best victim that ``accept`` takes; it stays a candidate. The rejected ones are put back before the return, or, if
        ``aside`` is given, are appended to it and are no candidates until the caller adds them again."""
        if accept is None:
            return self.peek()
        rejected: list[Node[B]] = []
        try:
            while (node := self.peek()) is not None:
                if accept(node):
                    return node
                self.pop()
                rejected.append(node)
            return None
        finally:
            if aside is not None:
                aside.extend(rejected)
            else:
                self.add_all(rejected)

    def add_all(self, nodes: Iterable[Node[B]]) -> None:
        """:meth:`add` for several nodes."""
        for node in nodes:
            self.add(node)

    def clear(self) -> None:
        """Forget all candidates."""
        self._heap.clear()
        self._live.clear()

    def _push(self, node: Node[B]) -> None:
        self._stamp += 1
        entry = (self._rank(node), node.id, self._stamp, node)
        self._live[node.id] = entry
        heapq.heappush(self._heap, entry)
        self.operations += 1

    def _compact_if_stale(self) -> None:
        if len(self._heap) > 2 * len(self._live) + _STALE_SLACK:
            self._heap = list(self._live.values())
            heapq.heapify(self._heap)
            self.operations += len(self._heap)


def plan_host_victims(
    candidates: Candidates[B], enough: Callable[[Node[B]], bool], accept: Callable[[Node[B]], bool]
) -> list[Node[B]] | None:
    """Evict host leaves on paper; see ``RadixTree.plan_host_victims``."""
    victims: list[Node[B]] = []
    looked_at: list[Node[B]] = []
    children_left: dict[int, int] = {}
    joined: list[tuple[Rank, int, Node[B]]] = []  # parents that have become leaves by the victims so far
    try:
        while True:
            node = candidates.peek()
            if joined and (node is None or joined[0][:2] < candidates.order(node)):
                node = heapq.heappop(joined)[2]
                candidates.operations += 1
            elif node is None:
                return None
            else:
                candidates.pop()
                looked_at.append(node)
            if not accept(node):
                continue
            victims.append(node)
            if enough(node):
                return victims
            parent = node.parent
            if parent is None or not parent.is_host_removable:
                continue
            left = children_left.get(parent.id, len(parent.children)) - 1
            children_left[parent.id] = left
            if left == 0:
                heapq.heappush(joined, (*candidates.order(parent), parent))
                candidates.operations += 1
    finally:
        candidates.add_all(looked_at)
