"""What is measured, in the order of the table of docs/performance.md."""

from __future__ import annotations

from collections.abc import Sequence

from cphicache.bench.collective_rows import blocked_share, collectives
from cphicache.bench.copy_rows import PAGE_SIZE, RUN_TOKENS, backup_of_layer
from cphicache.bench.engine_rows import copied_bytes, event_cost, layer_cost, notification, virtual_overlap
from cphicache.bench.growth_rows import (
    EXPLORED,
    WORLD,
    account_of,
    backup_memory,
    explored,
    fragments_of,
    growth,
    layers_of,
    life_of,
    node_memory,
    over_tree,
    pages_of,
    ranks_of,
)
from cphicache.bench.harness import Bench, Target
from cphicache.bench.lifecycle_rows import live_memory, record_growth, share_of_copy, stepping, whole_table
from cphicache.bench.peer_rows import backup_cost, evict_one, insert_shared, match_chain
from cphicache.bench.tree_rows import SIZES


def _span(sizes: Sequence[int]) -> str:
    return f"{min(sizes):,} to {max(sizes):,}"


_SCATTERED, _COALESCED, _PAGE_FIRST = (Target("higher", *bounds) for bounds in ((0.5, 0.7), (0.8, 0.9), (0.4, 0.6)))

_EVENT = Target("higher", 15, 25)

BENCHES: tuple[Bench, ...] = (
    Bench(
        "lifecycle-callbacks",
        "a life of four edges, three empty callbacks each: stock `transitions` over ours",
        Target("higher", 5, 8),
        stepping(callbacks=True),
    ),
    Bench("lifecycle-plain", "the same without callbacks: stock over ours", Target("higher", 10, 20), stepping(callbacks=False)),
    Bench("lifecycle-table", "a 61-layer backup, the table's own guards and columns: stock over ours", None, whole_table),
    Bench(
        "machine-share",
        "all 66 steps of a one-page, 61-layer backup over the time of its copies",
        Target("lower", 0.10, 0.05),
        share_of_copy,
    ),
    Bench(
        "record-growth",
        "create and release a record: 100,000 live over 1,000 live",
        Target("lower", 1.2, 1.05),
        record_growth,
    ),
    Bench("record-memory", "memory of an idle record, all that it refers to alone included", None, live_memory),
    Bench(
        "event-record",
        "one structlog line over what the event of a stored layer adds to its step, 1 pending node",
        _EVENT,
        event_cost(1),
    ),
    Bench("event-record-32", "the same with 32 pending nodes", _EVENT, event_cost(32)),
    Bench(
        "layer-1", "one more stored layer and payload, 1 pending node, without the copy", Target("lower", 15, 7.5), layer_cost(1)
    ),
    Bench("layer-32", "the same with 32 pending nodes", Target("lower", 30, 15), layer_cost(32)),
    Bench(
        "notify-idle",
        "notification of a batch that nobody knows",
        Target("lower", 0.2, 0.1),
        notification(stores=False),
    ),
    Bench(
        "notify-decode",
        "notification of a batch without a backup",
        Target("lower", 0.2, 0.1),
        notification(stores=True),
    ),
    *(
        Bench(
            f"d2h-{layout}-{name}",
            f"D2H of a layer, {layout}, {what}: memcpy over ours",
            _PAGE_FIRST if layout == "page_first" else target,
            backup_of_layer(layout, run_tokens),
        )
        for layout in ("layer_first", "page_first", "page_first_direct")
        for name, what, run_tokens, target in (
            ("scattered", f"random pages of {PAGE_SIZE}", PAGE_SIZE, _SCATTERED),
            ("coalesced", f"random runs of {RUN_TOKENS}", RUN_TOKENS, _COALESCED),
        )
    ),
    Bench(
        "sglang-evict",
        "evicting one of 100,000 leaves: SGLang's RadixCache over ours",
        Target("higher", 100, 1000),
        evict_one,
    ),
    Bench(
        "sglang-match",
        "matching 32,768 tokens in 512 nodes: SGLang's RadixCache over ours",
        Target("higher", 2, 10),
        match_chain,
    ),
    Bench(
        "sglang-insert",
        "inserting 320 tokens, 256 of them shared, at 100,000 leaves: SGLang's RadixCache over ours",
        Target("higher", 1, 2),
        insert_shared,
    ),
    Bench(
        "sglang-backup",
        "the scheduler thread's part of the backup of a node of 54 pages (the conversation trace's mean), all layers at once: ours over "
        "SGLang's write_backup and its acknowledgement",
        Target("lower", 1, 0.5),
        backup_cost(),
    ),
    Bench("sglang-backup-4", "the same of a node of 4 pages (256 tokens)", None, backup_cost(4)),
    Bench("sglang-backup-128", "the same of a node of 128 pages (a prefill chunk of 8,192 tokens)", None, backup_cost(128)),
    *(
        Bench(f"{name}-growth", f"{what}, {_span(SIZES)} idle leaves: exponent of growth", None, over_tree(name))
        for name, what in (
            ("tick", "a tick with nothing in flight"),
            ("evict", "evicting a leaf"),
            ("match", "matching a prefix and a leaf"),
            ("insert", "inserting a leaf"),
        )
    ),
    *(
        Bench(f"{name}-growth", f"{what}, {_span(sizes)} {over}: exponent of growth", None, growth(sizes, over, sampler_of))
        for name, what, sizes, over, sampler_of in (
            ("lifecycle", "a record's life of four edges", SIZES, "live records", life_of),
            ("ledger", "taking and giving back slots of eight ranks", SIZES, "nodes with host slots", account_of),
            ("host-pages", "taking and giving back four host pages", SIZES, "free runs", fragments_of),
            ("layers", "all reports of a forward with one pending node", (1, 4, 16, 61, 122), "layers", layers_of),
            ("ranks", "one rank's part of the backup of 16 pages", (1, 2, 4, 8), "ranks", ranks_of),
            ("pages", "one node's backup", (1, 4, 16, 64, 256), "pages", pages_of),
        )
    ),
    Bench("explore-growth", f"a state of world {WORLD}, {_span(EXPLORED)} known states: exponent of growth", None, explored),
    Bench("node-memory", "memory of an idle node of one page of 16 tokens: tree node, key, record", None, node_memory),
    Bench("backup-memory", "memory of a pending backup of 4 pages beyond its node, index vectors apart", None, backup_memory),
    Bench(
        "collectives",
        "reductions a tick with a backup in flight; none to reserve and in other ticks",
        Target("lower", 1, 1),
        collectives,
    ),
    Bench(
        "collective-blocked",
        "time that a scheduler waits in the reduction of the tick before over that of a blocking all-reduce, 2 processes",
        Target("lower", 0.05, 0.01),
        blocked_share,
    ),
    Bench(
        "overlap-virtual",
        "virtual time from the last layer's store to the end of all copies: layer by layer over all at once",
        Target("lower", 1 / 30, 1 / 50),
        virtual_overlap,
    ),
    Bench("bytes-copied", "bytes copied over bytes of submitted operations", Target("lower", 1.0, 1.0), copied_bytes),
)


def chosen(names: tuple[str, ...], benches: tuple[Bench, ...] = BENCHES) -> list[Bench]:
    """The rows of those names, or whose names begin so, in the table's order; all without names. ValueError for a name of none."""
    for name in names:
        if not any(bench.name.startswith(name) for bench in benches):
            raise ValueError(f"no benchmark {name!r}: known are {', '.join(bench.name for bench in benches)}")
    return [bench for bench in benches if not names or bench.name.startswith(names)]
