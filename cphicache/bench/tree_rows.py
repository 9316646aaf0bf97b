"""Radix tree: what eviction, matching and inserting cost, and how that grows with the tree."""

from __future__ import annotations

from array import array
from typing import Any

from cphicache.bench.harness import Sampler, clock, looped
from cphicache.spaces.types import LogicalPage
from cphicache.tree import Node, RadixKey, RadixTree

SIZES = (1_000, 10_000, 100_000, 1_000_000)
PAGE_SIZE = 16
PREFIX_PAGES = 4


class Leaves:
    """A tree of one shared prefix node with ``count`` leaves of a page each, in order of last access."""

    def __init__(self, count: int, page_size: int = PAGE_SIZE, tree: RadixTree[Any] | None = None) -> None:
        self.page_size = page_size
        self.tree: RadixTree[Any] = RadixTree(page_size, "lru", _nothing) if tree is None else tree
        self.now = self.next_id = 1
        prefix = self.key([0] * page_size * PREFIX_PAGES)
        self.prefix = self.add(self.tree.root, prefix)
        for number in range(count):
            self.add_leaf(number)

    def key(self, tokens: list[int]) -> RadixKey:
        """A key of these tokens."""
        return RadixKey.of(array("q", tokens), self.page_size)

    def add(self, parent: Node[Any], segment: RadixKey) -> Node[Any]:
        """A new node."""
        pages = [LogicalPage(number) for number in range(segment.pages)]
        node = self.tree.add_child(parent, segment, pages, self.next_id, self.now)
        self.next_id += 1
        self.now += 1
        return node

    def add_leaf(self, number: int) -> Node[Any]:
        """The leaf of that number."""
        return self.add(self.prefix, self.key([number + 1] * self.page_size))

    def evicting(self) -> Sampler:
        """Evict the next leaf; each is put back as the newest, off the clock."""

        def sample(operations: int) -> float:
            took = 0.0
            tree = self.tree
            for _ in range(operations):
                start = clock()
                victim = tree.next_device_victim()
                assert victim is not None, "there are leaves"
                tree.remove(victim)
                took += clock() - start
                self.add(self.prefix, victim.key)
            return took

        return sample

    def matching(self) -> Sampler:
        """Match a prefix and a leaf."""
        keys = [self.key([0] * self.page_size * PREFIX_PAGES + [number + 1] * self.page_size) for number in range(256)]

        def loop(operations: int) -> None:
            walk = self.tree.walk
            for number in range(operations):
                walk(keys[number % 256])

        return looped(loop)

    def inserting(self) -> Sampler:
        """Match a prefix and add a leaf below it; each is removed again, off the clock."""
        page = 0

        def sample(operations: int) -> float:
            nonlocal page
            took = 0.0
            for _ in range(operations):
                page += 1
                key = self.key([0] * self.page_size * PREFIX_PAGES + [-page] * self.page_size)
                start = clock()
                walk = self.tree.walk(key)
                node = self.add(walk.path[-1], key.slice(walk.matched_pages, key.pages))
                self.tree.touch(walk.path, self.now)
                took += clock() - start
                self.tree.remove(node)
            return took

        return sample


def _nothing(node: Node[Any]) -> None:
    """No backup object: the tree alone is measured."""
