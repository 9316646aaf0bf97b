"""Rows against SGLang's own radix cache. Each raises :class:`~cphicache.bench.harness.PeerMissing` where that is not installed."""

from __future__ import annotations

import importlib
import sys
import threading
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from cphicache.bench.engine_rows import Engine
from cphicache.bench.harness import Effort, Measured, Sampler, clock, looped, ratio
from cphicache.bench.peer import sglang_radix
from cphicache.bench.ports import NoBackend, NoStreams
from cphicache.bench.tree_rows import Leaves
from cphicache.spaces.types import LogicalPage
from cphicache.tree import RadixKey, RadixTree

PAGE_SIZE = 64
LEAVES = 100_000
PREFIX_PAGES = 4
MATCH_TOKENS = 32_768
MATCH_NODES = 512
BACKUP_PAGES = 54
"""3,456 tokens: what a committed backup of the conversation trace has on average (3,459; ``cphicache study serve``)."""


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


class _Device:
    """``torch.cuda`` as the peer's transfer engine uses it, of a device that has done everything at once."""

    class Event:
        """An event that has come."""

        def __init__(self, enable_timing: bool = False) -> None:
            pass

        def record(self) -> None:
            """It comes at once."""

        def wait(self, stream: object) -> None:
            """It has come."""

        def query(self) -> bool:
            """Yes."""
            return True

        def synchronize(self) -> None:
            """It has come."""

        def elapsed_time(self, other: object) -> float:
            """Nothing takes time here."""
            return 0.0

    class Stream:
        """A stream of which nothing is asked."""

    @staticmethod
    @contextmanager
    def stream(stream: object) -> Iterator[None]:
        """It is the current one."""
        yield


class PeerBackups:
    """SGLang's ``HiRadixCache`` and its cache controller over pools that hold nothing: their own code of a backup and of its end."""

    def __init__(self, module: Any, slots: int) -> None:
        self.peer = Peer(module)
        hiradix = importlib.import_module("sglang.srt.mem_cache.hiradix_cache")
        controllers = importlib.import_module("sglang.srt.managers.cache_controller")
        transfers = importlib.import_module("sglang.srt.mem_cache.l2_transfer")
        vars(transfers)["device_module"] = _Device
        self.pool = _host_pool(importlib.import_module("sglang.srt.mem_cache.pool_host.base"), slots)
        controller = object.__new__(controllers.HiCacheController)
        controller.__dict__.update(
            mem_pool_host=self.pool, mem_pool_device=None, write_queue=[], ack_write_queue=[], ack_load_queue=[], io_backend="direct",
            l2_transfer_engine=transfers.L2TransferEngine("direct"), write_policy="write_through",
        )  # fmt: skip
        self.cache: Any = object.__new__(hiradix.HiRadixCache)
        self.cache.__dict__.update(self.peer.cache.__dict__)
        self.cache.__dict__.update(
            cache_controller=controller, ongoing_write_through={}, ongoing_load_back={}, work_list=[], pp_rank=0, pp_size=1,
            tp_world_size=1, attn_cp_group=None, attn_tp_group=None, enable_storage=False, enable_storage_metrics=False,
            metrics_collector=None, evictable_host_leaves=set(),
        )  # fmt: skip

    def leaf(self, tokens: list[int]) -> Any:
        """A new node of these tokens."""
        self.peer.insert(tokens, torch.arange(len(tokens)))
        return self.cache.root_node.children[self.peer.key(tokens).child_key(PAGE_SIZE)]

    def backup(self, node: Any) -> None:
        """Write a node back and take in the end of it, as the scheduler does in the tick after."""
        self.cache.write_backup(node)
        self.cache.check_hicache_events()

    def forget(self, node: Any) -> None:
        """Off the clock: its host slots are free again."""
        assert node.backuped, "the peer has backed it up"
        assert not self.cache.ongoing_write_through, "and has taken in the end of it"
        self.pool.free(node.host_value)


def _host_pool(module: Any, slots: int) -> Any:
    """The peer's own account of host slots, over no memory: what a copy is given goes nowhere."""

    def nothing(*_: object) -> None:
        pass

    kind: Any = type("NoHostPool", (module.HostKVCache,), {"backup_from_device_all_layer": nothing})
    kind.__abstractmethods__ = frozenset()  # what else it has to have is not asked for
    pool: Any = object.__new__(kind)
    pool.__dict__.update(
        lock=threading.RLock(), size=slots, page_size=PAGE_SIZE, device="cpu", layout="layer_first", size_per_token=1,
        can_use_write_back_jit=False,
    )  # fmt: skip
    pool.clear()
    return pool


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


def backup_cost(pages: int = BACKUP_PAGES) -> Callable[[Effort], Measured]:
    """The scheduler thread's part of one node's backup, all layers at once, without the copy itself.

    Ours: reserve, submit (row vectors and the call of the copy operator included), number, two ticks with their reduction, commit.
    SGLang's: ``write_backup`` with its own host pool account, index moves, transfer engine and acknowledgement queue, and the tick that
    takes the end of it in (``check_hicache_events``). Both sides: one rank, so that nothing is reduced; streams, events and the copy
    operator do nothing.
    """

    def measure(effort: Effort) -> Measured:
        streams = NoStreams(run=True)
        engine = Engine(streams, overlap=False, page_size=PAGE_SIZE, node_pages=pages, backends=lambda name: NoBackend())
        with sglang_radix() as module:
            peer = PeerBackups(module, 1 << 20)
            fresh = 0

            def sglang(operations: int) -> float:
                nonlocal fresh
                took = 0.0
                for _ in range(operations):
                    fresh += 1
                    node = peer.leaf([fresh] * pages * PAGE_SIZE)
                    start = clock()
                    peer.backup(node)
                    took += clock() - start
                    peer.forget(node)
                return took

            return ratio("ours", "sglang", {"ours": engine.backing_up(), "sglang": sglang}, effort)

    return measure


def _repeated(call: Callable[[Any], object], argument: Any) -> Sampler:
    def loop(operations: int) -> None:
        for _ in range(operations):
            call(argument)

    return looped(loop)
