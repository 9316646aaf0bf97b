"""What the scheduler's thread pays in the engine and in the local half, and what the overlap gains on the virtual clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO

import orjson
import structlog
import torch

from cphicache.agree.local import SingleReducer
from cphicache.bench.harness import Effort, Measured, Sampler, Spread, clock, cost_us, looped, ratio
from cphicache.bench.lifecycle_rows import LAYERS, cycle_rows
from cphicache.bench.ports import EmptyPort, NoStreams
from cphicache.engine import CacheConfig, CpHiRadixCache
from cphicache.engine.records import Backup
from cphicache.engine.state import CacheState
from cphicache.engine.steps import Steps
from cphicache.events import EventLog, Level
from cphicache.lifecycle import BackupRecord, Input, LifecycleMachine, State, Trigger
from cphicache.lifecycle.record import NO_INPUT
from cphicache.spaces.layout import CpSharedKVLayout
from cphicache.spaces.types import LogicalPage
from cphicache.transfer.backends import copy_backend
from cphicache.transfer.pools.device import DevicePool, KVShape
from cphicache.transfer.pools.host import Backends, make_host_pool
from cphicache.transfer.port import OpKey
from cphicache.transfer.rank import RankTransfer
from cphicache.transfer.streams.port import Streams
from cphicache.transfer.streams.virtual import VirtualStreams

PAGE_SIZE = 16
ITEM_ELEMENTS = 4
BATCH = 1
COMPUTE_US = 20.0


class Engine:
    """An engine of one rank over real pools (of small items) and given streams."""

    def __init__(
        self,
        streams: Streams,
        *,
        nodes: int = 1,
        overlap: bool = True,
        copy_us: float = 0.0,
        page_size: int = PAGE_SIZE,
        node_pages: int = 1,
        layers: int = LAYERS,
        cp_size: int = 1,
        backends: Backends = copy_backend,
    ) -> None:
        pages = -(-2 * nodes * node_pages // cp_size) * cp_size
        self.nodes = nodes
        self.node_pages = node_pages
        self.config = CacheConfig(
            page_size=page_size,
            cp_size=cp_size,
            usable_pages=pages,
            payloads=(("target", layers),),
            host_slots=pages * page_size,
            overlap=overlap,
        )
        layout = CpSharedKVLayout(page_size, cp_size, 0)
        shape = KVShape("mla", layers, {"latent": ITEM_ELEMENTS}, torch.bfloat16)
        slots = layout.physical_pages_total(pages) * page_size
        rate = nodes * node_pages * page_size * shape.layer_bytes / copy_us if copy_us else 1.0
        self.transfer = RankTransfer(
            layout,
            {"target": DevicePool(shape, slots)},
            {"target": make_host_pool("layer_first", shape, pages * page_size, page_size, backends=backends)},
            streams,
            d2h_bytes_per_us=rate,
        )
        self.cache = CpHiRadixCache(self.config, self.transfer, SingleReducer())
        self._tokens = 0
        self._rows: dict[str, list[LogicalPage]] = {}
        self._keys: dict[str, Any] = {}

    def reserve(self) -> list[OpKey]:
        """One request a node, each with one new node, reserved for one batch."""
        cache = self.cache
        cache.begin_tick()
        found = []
        for number in range(self.nodes):
            rid = f"r{number}"
            self._admit(rid)
            cache.stores(rid, BATCH, 0)
            cache.reserve(rid, BATCH, self._keys[rid], self._rows[rid])
        for op in cache.batch(BATCH).ops:
            found.append(op.key)
        assert len(found) == self.nodes, "the host pool has room for every node twice"
        return found

    def _admit(self, rid: str) -> None:
        """A request with fresh tokens and pages for them."""
        self._tokens += 1
        self._keys[rid] = self.cache.key([self._tokens] * self.config.page_size * self.node_pages)
        self.cache.admit(rid, self.cache.state.tree.root, 0)
        row = self.cache.alloc(self.node_pages, None)
        assert row is not None, "the pool has room for every node twice"
        self._rows[rid] = row

    def backing_up(self) -> Sampler:
        """One node's backup without what every request pays anyway: admission, pages, insert and eviction are off the clock."""
        cache, rid = self.cache, "r0"

        def sample(operations: int) -> float:
            took = 0.0
            for _ in range(operations):
                self._admit(rid)
                cache.begin_tick()
                cache.stores(rid, BATCH, 0)
                key, row = self._keys[rid], self._rows[rid]
                start = clock()
                cache.reserve(rid, BATCH, key, row)
                cache.end_payload(BATCH, 0)
                cache.end_forward(BATCH)
                took += clock() - start
                cache.finish(rid, key, row)
                start = clock()
                cache.begin_tick()
                cache.begin_tick()
                took += clock() - start
                cache.flush()
            assert cache.counters.committed == cache.counters.reserved, "every backup has been committed"
            self._keys.clear()
            self._rows.clear()
            return took

        return sample

    def end(self) -> None:
        """The forward ends; the requests are inserted and leave; two ticks commit what was backed up; then all is forgotten."""
        cache = self.cache
        cache.end_payload(BATCH, 0)
        cache.end_forward(BATCH)
        for rid, key in self._keys.items():
            cache.finish(rid, key, self._rows[rid])
        self._keys.clear()
        self._rows.clear()
        for _ in range(2):
            cache.begin_tick()
        cache.flush()


def layer_cost(nodes: int) -> Callable[[Effort], Measured]:
    """Microseconds for one more stored layer of one payload with so many pending nodes, the submission included, without the copy."""

    def measure(effort: Effort) -> Measured:
        sampler = _layers(Engine(NoStreams(), nodes=nodes))
        return cost_us("layer", {"layer": sampler, "stock trigger": _stock_trigger()}, effort)

    return measure


def _layers(engine: Engine) -> Sampler:
    """A sampler of stored layers, one operation each."""

    def sample(operations: int) -> float:
        took, left = 0.0, operations
        stored = engine.cache.layer_stored
        while left > 0:
            engine.reserve()
            stored(BATCH, 0, 0)
            layers = range(1, min(LAYERS, left + 1))
            start = clock()
            for layer in layers:
                stored(BATCH, 0, layer)
            took += clock() - start
            left -= len(layers)
            engine.end()
        return took

    return sample


class _NoMachine(Steps):
    """What is left of the steps when the machine takes none: a call for each, and their events."""

    def _counted_step(self, record: Backup, trigger: Trigger, given: Input) -> str | None:
        return None

    def _step_each(self, records: Sequence[Backup], trigger: Trigger, given: Input) -> None:
        for record in records:  # as with a log
            self._counted_step(record, trigger, given)


def event_cost(nodes: int) -> Callable[[Effort], Measured]:
    """One line of structlog over what the event of a stored layer adds to a step, with so many pending nodes: its columns read, the
    clock, the place in the buffer."""

    def measure(effort: Effort) -> Measured:
        log = EventLog(None, rank=0, level=Level.LIFECYCLE, wall_clock=time.time, header={}, keep=1 << 12)
        config = CacheConfig(page_size=PAGE_SIZE, cp_size=1, usable_pages=1, payloads=(("target", LAYERS),), host_slots=PAGE_SIZE)
        logged, plain = _NoMachine(CacheState(config), log), _NoMachine(CacheState(config), None)
        records = [Backup(number, 1, bound=True, no_need=(0,)) for number in range(nodes)]
        for record in records:
            record.state = State.LAYERS_IN_FLIGHT
        given = Input(layers=(2,))

        def added(operations: int) -> float:
            took = {}
            for steps in (plain, logged):
                start = clock()
                for _ in range(operations):
                    steps.layers_stored(records, given)
                took[steps] = clock() - start
            return took[logged] - took[plain]

        with open("/dev/null", "wb") as nowhere:
            return ratio("structlog", "ours", {"ours": added, "structlog": _structlog_lines(nowhere)}, effort, scale=nodes)

    return measure


def _structlog_lines(file: BinaryIO) -> Sampler:
    """The same event, as structlog is used without a log of our own."""
    logger: Any = structlog.wrap_logger(
        structlog.BytesLogger(file=file),
        processors=[structlog.processors.TimeStamper(), structlog.processors.JSONRenderer(serializer=orjson.dumps)],
    ).bind(rank=0)

    def lines(operations: int) -> None:
        info = logger.info
        for number in range(operations):
            info(
                "step", tick=number, node=17, generation=3, trigger="layer_stored", before="LAYERS_IN_FLIGHT",
                after="LAYERS_IN_FLIGHT", bound=True, agreed=False, submitted={"target": 3}, confirmed={"target": 2}, slots=128,
                used=4096, payload="target", layers=(2,),
            )  # fmt: skip

    return looped(lines)


def _stock_trigger() -> Sampler:
    machine = LifecycleMachine(EmptyPort(1), cycle_rows(callbacks=False), check=False, stock=True)
    trigger = machine.stock_trigger(Trigger.RESERVE)
    record = BackupRecord(1, 1, bound=True)

    def loop(operations: int) -> None:
        for _ in range(operations):
            record.state = State.DEVICE_VALID_HOST_NONE
            trigger(record, NO_INPUT)

    return looped(loop)


def notification(*, stores: bool) -> Callable[[Effort], Measured]:
    """Microseconds of the notification when nothing is pending: no request of the batch is known, or (``stores``) decoding ones are."""

    def measure(effort: Effort) -> Measured:
        engine = Engine(NoStreams())
        if stores:
            engine.cache.admit("r0", engine.cache.state.tree.root, 0)
            engine.cache.stores("r0", BATCH, 0)
        stored = engine.cache.layer_stored

        def loop(operations: int) -> None:
            for _ in range(operations):
                stored(BATCH, 0, 3)

        def empty(operations: int) -> None:
            for _ in range(operations):
                pass

        return cost_us("notification", {"notification": looped(loop), "empty loop": looped(empty)}, effort)

    return measure


def virtual_overlap(effort: Effort) -> Measured:
    """Virtual time from the last layer's KV store to the end of all copies: layer by layer over all at once. A layer's copy takes as
    long as its compute. The same in every round: nothing is measured by the wall."""
    waits = {}
    for overlap in (True, False):
        streams = VirtualStreams()
        engine = Engine(streams, overlap=overlap, copy_us=COMPUTE_US)
        (op,) = engine.reserve()
        compute = streams.stream("compute")
        for layer in range(LAYERS):
            compute.submit(_compute, cost_us=COMPUTE_US)
            engine.cache.layer_stored(BATCH, 0, layer)
        stored_us = streams.completion_us(compute.record())
        engine.cache.end_payload(BATCH, 0)
        event = engine.transfer.last_copy_event(op)
        assert event is not None, "layers were submitted"
        waits[overlap] = streams.completion_us(event) - stored_us
        streams.close()
    value = waits[True] / waits[False]
    details = {"per layer us": waits[True], "all at once us": waits[False], "ideal": round(1 / LAYERS, 4)}
    return Measured(Spread(value, value, value), "x", 1, details)


def _compute() -> None:
    """The layer's kernels, in virtual time."""


def copied_bytes(effort: Effort) -> Measured:
    """Bytes copied over the bytes of the submitted operations, over some backups."""
    streams = VirtualStreams()
    engine = Engine(streams, nodes=effort.size(8, least=2), copy_us=COMPUTE_US)
    for _ in range(effort.size(4)):
        engine.reserve()
        for layer in range(LAYERS):
            engine.cache.layer_stored(BATCH, 0, layer)
        engine.end()
    item_bytes = KVShape("mla", LAYERS, {"latent": ITEM_ELEMENTS}, torch.bfloat16).token_bytes
    submitted = engine.cache.counters.tokens_submitted * item_bytes
    copied = engine.transfer.counters.d2h_bytes
    streams.close()
    value = copied / submitted
    return Measured(Spread(value, value, value), "x", 1, {"copied bytes": copied, "submitted bytes": submitted})
