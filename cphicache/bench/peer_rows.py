"""Rows against SGLang's own radix cache. Each raises :class:`~cphicache.bench.harness.PeerMissing` where that is not installed."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from cphicache.bench.harness import Effort, Measured, Sampler, clock, looped, ratio
from cphicache.bench.peer import sglang_radix
from cphicache.bench.tree_rows import Leaves
from cphicache.spaces.types import LogicalPage
from cphicache.tree import RadixKey, RadixTree

PAGE_SIZE = 64
LEAVES = 100_000
PREFIX_PAGES = 4
MATCH_TOKENS = 32_768
MATCH_NODES = 512


class _Frees:
    """The peer's page allocator: it is told what is freed, and frees nothing."""

    device = "cpu"

    def free_segment(self, indices: object, start_pos: int = 0) -> None:
        """Nothing."""

    def free(self, indices: object) -> None:
        """Nothing."""


class Peer:
    """SGLang's radix cache without pools, and its calls in the form of ours."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._params = sys.modules["sglang.srt.mem_cache.base_prefix_cache"]
        self.cache = module.RadixCache.create_simulated(page_size=PAGE_SIZE, mock_allocator=_Frees())

    def key(self, tokens: list[int]) -> Any:
        """A key of these tokens."""
        return self._module.RadixKey(array("q", tokens))

    def insert(self, tokens: list[int], slots: torch.Tensor) -> None:
        """Insert tokens on these slots."""
        self.cache.insert(self._params.InsertParams(key=self.key(tokens), value=slots))

    def match(self, key: Any) -> Any:
        """Match a key."""
        return self.cache.match_prefix(self._params.MatchPrefixParams(key=key))

    def evict(self, tokens: int) -> Any:
        """Evict so many tokens."""
        return self.cache.evict(self._params.EvictParams(num_tokens=tokens))


@contextmanager
def _peer_of_leaves(leaves: int) -> Iterator[Peer]:
    with sglang_radix() as module:
        peer = Peer(module)
        slots = torch.arange(PAGE_SIZE * (PREFIX_PAGES + 1))
        for number in range(leaves):
            peer.insert(_path(number + 1), slots)
        yield peer


def _path(last: int) -> list[int]:
    return [0] * PAGE_SIZE * PREFIX_PAGES + [last] * PAGE_SIZE


def evict_one(effort: Effort) -> Measured:
    """Evict one of 100,000 leaves; each is put back as the newest, off the clock, on both sides."""
    leaves = effort.size(LEAVES, least=20)
    with _peer_of_leaves(leaves) as peer:
        slots, fresh = torch.arange(PAGE_SIZE * (PREFIX_PAGES + 1)), leaves

        def sample(operations: int) -> float:
            nonlocal fresh
            took = 0.0
            for _ in range(operations):
                start = clock()
                peer.evict(PAGE_SIZE)
                took += clock() - start
                fresh += 1
                peer.insert(_path(fresh), slots)
            return took

        return ratio("sglang", "ours", {"ours": Leaves(leaves, PAGE_SIZE).evicting(), "sglang": sample}, effort)


def match_chain(effort: Effort) -> Measured:
    """Match 32,768 tokens that lie in 512 nodes, one below the other."""
    nodes = effort.size(MATCH_NODES, least=2)
    tokens_each = MATCH_TOKENS // MATCH_NODES
    tokens = list(range(nodes * tokens_each))
    tree: RadixTree[Any] = RadixTree(PAGE_SIZE, "lru", lambda node: None)
    parent = tree.root
    whole = RadixKey.of(array("q", tokens), PAGE_SIZE)
    for number in range(nodes):
        pages = tokens_each // PAGE_SIZE
        segment = whole.slice(number * pages, (number + 1) * pages)
        parent = tree.add_child(parent, segment, [LogicalPage(number)] * pages, number + 1, number + 1)
    with sglang_radix() as module:
        peer = Peer(module)
        for number in range(1, nodes + 1):
            peer.insert(tokens[: number * tokens_each], torch.arange(number * tokens_each))
        key = peer.key(tokens)
        found = peer.match(key)
        assert len(found.device_indices) == len(tokens), "the peer matches everything"
        assert tree.walk(whole).matched_pages == whole.pages, "we match everything"
        return ratio("sglang", "ours", {"ours": _repeated(tree.walk, whole), "sglang": _repeated(peer.match, key)}, effort)


def insert_shared(effort: Effort) -> Measured:
    """Insert 320 tokens of which 256 are there, at 100,000 leaves: from a list of tokens to the new leaf, on both sides."""
    leaves = effort.size(LEAVES, least=20)
    ours = Leaves(leaves, PAGE_SIZE)
    with _peer_of_leaves(leaves) as peer:
        slots, fresh = torch.arange(PAGE_SIZE * (PREFIX_PAGES + 1)), leaves

        def sample(operations: int) -> float:
            nonlocal fresh
            paths = [_path(fresh + number + 1) for number in range(operations)]
            fresh += operations
            start = clock()
            for path in paths:
                peer.insert(path, slots)
            took = clock() - start
            peer.evict(PAGE_SIZE * operations)  # the oldest go, so that the tree stays as large
            return took

        return ratio("sglang", "ours", {"ours": _inserting(ours), "sglang": sample}, effort)


def _inserting(leaves: Leaves) -> Sampler:
    fresh = 1 << 40

    def sample(operations: int) -> float:
        nonlocal fresh
        paths = [_path(fresh + number) for number in range(operations)]
        fresh += operations
        added = []
        tree = leaves.tree
        start = clock()
        for path in paths:
            key = leaves.key(path)
            walk = tree.walk(key)
            added.append(leaves.add(walk.path[-1], key.slice(walk.matched_pages, key.pages)))
            tree.touch(walk.path, leaves.now)
        took = clock() - start
        for node in added:
            tree.remove(node)
        return took

    return sample


def _repeated(call: Callable[[Any], object], argument: Any) -> Sampler:
    def loop(operations: int) -> None:
        for _ in range(operations):
            call(argument)

    return looped(loop)
