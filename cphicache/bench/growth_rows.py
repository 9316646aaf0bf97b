"""How costs grow with the number of nodes that do nothing, with layers, ranks and pages; and what nodes and backups take of memory."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, cast

from cphicache.bench.engine_rows import Engine
from cphicache.bench.harness import Effort, Measured, Sampler, Spread, calibrated, clock, looped, slope
from cphicache.bench.lifecycle_rows import record_cycles
from cphicache.bench.ports import EmptyPort, NoStreams
from cphicache.bench.tree_rows import SIZES, Leaves
from cphicache.engine import CpHiRadixCache
from cphicache.explore import WORLDS, explore
from cphicache.ledger import HostLedger
from cphicache.lifecycle import LifecycleMachine
from cphicache.run.census import take_census
from cphicache.run.study.serve import ServeConfig
from cphicache.transfer.pools.slots import HostPageAllocator

EXPLORED = (300, 1_000, 3_000)
WORLD = "chain-1"
RANKS = 8


def growth(sizes: Sequence[int], what: str, sampler_of: Callable[[int], Sampler]) -> Callable[[Effort], Measured]:
    """Exponent of an operation's cost over sizes. One size is built at a time; the costs, in rounds, are in the details for the plots."""

    def measure(effort: Effort) -> Measured:
        chosen = sorted({effort.size(size, least=8) for size in sizes}) if max(sizes) >= 1_000 else list(sizes)
        columns = []
        for size in chosen:
            columns.append(_costs_us(sampler_of(size), effort))
        return as_growth(what, chosen, columns, effort)

    return measure


def _costs_us(sampler: Sampler, effort: Effort) -> list[float]:
    costs = []
    gc.freeze()  # what was built is idle: before each sample the garbage collector looks at what the last one left only
    try:
        operations = calibrated(sampler, effort.sample_s)
        for _ in range(effort.rounds):
            gc.collect()
            costs.append(sampler(operations) / operations * 1e6)
    finally:
        gc.unfreeze()
    return costs


def as_growth(what: str, sizes: Sequence[int], columns: Sequence[Sequence[float]], effort: Effort) -> Measured:
    """The row of costs by size (a column each, microseconds, a cost a round)."""
    by_round = [slope(list(sizes), list(costs)) for costs in zip(*columns, strict=True)]
    costs = [round(Spread.of(list(column)).median, 3) for column in columns]
    return Measured(Spread.of(by_round), "exponent", effort.rounds, {"over": what, "sizes": list(sizes), "us": costs})


def idle_cache(nodes: int) -> tuple[CpHiRadixCache, Leaves]:
    """An engine whose tree has so many idle leaves, and they."""
    _, _, cache = ServeConfig(device_tokens=1 << 16, host_tokens=1 << 16, page_size=16, layers=1).parts()
    gc.disable()  # nothing of what is made here is garbage
    try:
        return cache, Leaves(nodes, tree=cache.state.tree)
    finally:
        gc.enable()


def over_tree(operation: str) -> Callable[[Effort], Measured]:
    """Exponent of an operation's cost over the leaves of the tree, idle ones all: ``tick`` (with nothing in flight), ``evict``, ``match``
    or ``insert``. All four are measured on one tree of a size, by the first row that asks."""

    def measure(effort: Effort) -> Measured:
        return _over_tree(effort)[operation]

    return measure


@cache
def _over_tree(effort: Effort) -> dict[str, Measured]:
    sizes = sorted({effort.size(size, least=8) for size in SIZES})
    columns: dict[str, list[list[float]]] = {}
    for size in sizes:
        engine, leaves = idle_cache(size)
        samplers = {
            "tick": _ticking(engine),
            "evict": leaves.evicting(),
            "match": leaves.matching(),
            "insert": leaves.inserting(),
        }
        for operation, sampler in samplers.items():
            columns.setdefault(operation, []).append(_costs_us(sampler, effort))
    return {operation: as_growth("leaves", sizes, costs, effort) for operation, costs in columns.items()}


def _ticking(engine: CpHiRadixCache) -> Sampler:
    def loop(operations: int) -> None:
        begin_tick = engine.begin_tick
        for _ in range(operations):
            begin_tick()

    return looped(loop)


def life_of(records: int) -> Sampler:
    """Create a record, let it be backed up and given back, drop it, among so many live ones."""
    return record_cycles(LifecycleMachine(cast(Any, EmptyPort(1))), records)


def account_of(nodes: int) -> Sampler:
    """Ask, take and give back in the ledger of eight ranks, while so many nodes have host slots."""
    need = (16,) * RANKS
    ledger = HostLedger(RANKS, {"target": 16 * (nodes + 1), "draft": 16 * (nodes + 1)})
    ledger.take((16 * nodes,) * RANKS)

    def loop(operations: int) -> None:
        for _ in range(operations):
            if ledger.fits(need):
                ledger.take(need)
                ledger.give(need)

    return looped(loop)


def fragments_of(runs: int) -> Sampler:
    """Take and give back four host pages among so many free runs, of one page each but for a long one."""
    pool = HostPageAllocator(2 * runs + 64)
    taken = pool.allocate(2 * runs)
    assert taken is not None, "an empty pool has room"
    pool.free(taken[1::2])

    def loop(operations: int) -> None:
        for _ in range(operations):
            found = pool.allocate(4)
            assert found is not None, "the long run has room"
            pool.free(found)

    return looped(loop)


def layers_of(layers: int) -> Sampler:
    """All reports of a forward of so many layers, one pending node."""
    engine = Engine(NoStreams(), layers=layers)

    def sample(operations: int) -> float:
        took = 0.0
        stored = engine.cache.layer_stored
        for _ in range(operations):
            (op,) = engine.reserve()
            assert op.generation > 0, "it is reserved"
            start = clock()
            for layer in range(layers):
                stored(1, 0, layer)
            took += clock() - start
            engine.end()
        return took

    return sample


def ranks_of(cp_size: int) -> Sampler:
    """One node's backup on one of so many ranks, with its share of the pages: reserve, submit, agree, commit."""
    return Engine(NoStreams(), overlap=False, node_pages=16, cp_size=cp_size).backing_up()


def pages_of(pages: int) -> Sampler:
    """One node's backup of so many pages: reserve, submit, agree, commit."""
    return Engine(NoStreams(), overlap=False, node_pages=pages).backing_up()


def explored(effort: Effort) -> Measured:
    """Exponent of the time a state over the number of states that are known already."""
    sizes = [effort.size(size, least=20 * (place + 1)) for place, size in enumerate(EXPLORED)]
    columns = []
    for size in sizes:
        start = clock()
        found = explore(WORLDS[WORLD], take_census, max_states=size)
        columns.append([(clock() - start) / max(1, found.states) * 1e6])
    return as_growth("states", sizes, columns, Effort(1, effort.sample_s, effort.shrink))


def node_memory(effort: Effort) -> Measured:
    """Bytes of an idle node of one page (16 tokens): tree node, key and record."""
    count = effort.size(20_000, least=100)
    bytes_each = _traced(lambda: idle_cache(count)) - _traced(lambda: idle_cache(0))
    value = bytes_each / count
    return Measured(Spread(value, value, value), "bytes", 1, {"nodes": count})


def backup_memory(effort: Effort) -> Measured:
    """Bytes that a pending backup of four pages of 16 tokens takes beyond its node: record, columns, job, batch; the index vectors apart
    that its batch gets when it is copied."""
    count = effort.size(256, least=4)
    engine = Engine(NoStreams(), nodes=count, node_pages=4)
    engine.reserve()
    engine.end()
    taken = _traced(engine.reserve)
    engine.end()
    value = taken / count
    vectors = 2 * 8 * 4 * engine.config.page_size  # physical locs and host slots, int64
    return Measured(Spread(value, value, value), "bytes", 1, {"backups": count, "index vectors beside it, bytes": vectors})


def _traced(make: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        kept = make()
        taken = tracemalloc.get_traced_memory()[0] - before
        del kept
    finally:
        tracemalloc.stop()
    return taken
