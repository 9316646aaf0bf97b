"""What a lifecycle step costs, and a record of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from cphicache.bench.harness import Effort, Measured, Sampler, Spread, looped, ratio
from cphicache.bench.ports import EmptyPort
from cphicache.engine.records import Backup
from cphicache.lifecycle import BackupRecord, Input, LifecycleMachine, Row, State, Trigger
from cphicache.lifecycle.record import NO_INPUT
from cphicache.transfer.pools.device import DevicePool, KVShape
from cphicache.transfer.pools.host import make_host_pool

LAYERS = 61
PAGE_SIZE = 64
LATENT_ELEMENTS = 576
"""One page of DeepSeek-V3's KV: 61 layers of 512 + 64 bf16 elements a token."""
FEW, MANY = 1_000, 100_000

_CYCLE = (
    (State.DEVICE_VALID_HOST_NONE, Trigger.RESERVE, State.RESERVED),
    (State.RESERVED, Trigger.LAYER_STORED, State.LAYERS_IN_FLIGHT),
    (State.LAYERS_IN_FLIGHT, Trigger.AGREED, State.COMMITTED),
    (State.COMMITTED, Trigger.RESET, State.DEVICE_VALID_HOST_NONE),
)


def cycle_rows(*, callbacks: bool) -> tuple[Row, ...]:
    """A backup's life as four edges without guards, each with three callbacks that call an empty method of the port, or none."""
    before, after = (("wake",), ("lose_children", "wake")) if callbacks else ((), ())
    return tuple(Row(source, trigger, dest, before=before, after=after) for source, trigger, dest in _CYCLE)


def _cycles(machine: LifecycleMachine[BackupRecord]) -> Sampler:
    record = BackupRecord(1, 1, bound=True)
    triggers = [trigger for _, trigger, _ in _CYCLE]

    def loop(operations: int) -> None:
        fire = machine.fire
        for _ in range(operations):
            for trigger in triggers:
                fire(record, trigger)

    return looped(loop)


def _stock_cycles(machine: LifecycleMachine[BackupRecord]) -> Sampler:
    """The package alone: ``events[trigger].trigger(record)``, without our answering of stale and error cells."""
    record = BackupRecord(1, 1, bound=True)
    events = [machine.stock_trigger(trigger) for _, trigger, _ in _CYCLE]

    def loop(operations: int) -> None:
        given = NO_INPUT
        for _ in range(operations):
            for trigger in events:
                trigger(record, given)

    return looped(loop)


def stepping(*, callbacks: bool) -> Callable[[Effort], Measured]:
    """Four edges through the machine against the same through the package."""

    def measure(effort: Effort) -> Measured:
        rows, port = cycle_rows(callbacks=callbacks), EmptyPort(LAYERS)
        ours = LifecycleMachine(port, rows, check=False)
        stock = LifecycleMachine(port, rows, check=False, stock=True)
        return ratio("stock", "ours", {"ours": _cycles(ours), "stock": _stock_cycles(stock)}, effort)

    return measure


def whole_table(effort: Effort) -> Measured:
    """A 61-layer backup through the whole table, guards and columns included, compiled against stock."""
    sides = {
        name: looped(_backup_loop(LifecycleMachine(EmptyPort(LAYERS), stock=stock)))
        for name, stock in (("ours", False), ("stock", True))
    }
    return ratio("stock", "ours", sides, effort)


def _backup_loop(machine: LifecycleMachine[BackupRecord]) -> Callable[[int], None]:
    """Reserve, 61 layers, end of the forward, done, agreed, given back: 66 steps with real guards and columns."""
    record = BackupRecord(1, 1, bound=True)
    stored = [Input(payload=0, layers=(layer,)) for layer in range(LAYERS)]

    def loop(operations: int) -> None:
        fire = machine.fire
        for _ in range(operations):
            fire(record, Trigger.RESERVE)
            for given in stored:
                fire(record, Trigger.LAYER_STORED, given)
            fire(record, Trigger.FORWARD_ENDED)
            fire(record, Trigger.COPY_DONE)
            fire(record, Trigger.AGREED)
            fire(record, Trigger.RESET)

    return loop


def share_of_copy(effort: Effort) -> Measured:
    """All steps of a one-page backup over the time in which its pages are copied layer by layer."""
    shape = KVShape("mla", LAYERS, {"latent": LATENT_ELEMENTS}, torch.bfloat16)
    pages = effort.size(64, least=4)
    device = DevicePool(shape, pages * PAGE_SIZE, page_size=PAGE_SIZE)
    host = make_host_pool("layer_first", shape, pages * PAGE_SIZE, PAGE_SIZE)
    order = torch.randperm(pages, generator=torch.Generator().manual_seed(1)).tolist()
    rows = [torch.arange(page * PAGE_SIZE, (page + 1) * PAGE_SIZE) for page in range(pages)]

    def copies(operations: int) -> None:
        for number in range(operations):
            to, at = rows[number % pages], rows[order[number % pages]]
            for layer in range(LAYERS):
                host.backup_from_device_per_layer(device, to, at, layer, "torch")

    page_bytes = shape.layer_bytes * PAGE_SIZE
    source, destination = (torch.zeros(pages, LAYERS, page_bytes, dtype=torch.uint8) for _ in range(2))

    def memcpy(operations: int) -> None:
        for number in range(operations):
            for layer in range(LAYERS):
                destination[number % pages, layer].copy_(source[number % pages, layer])

    machine = looped(_backup_loop(LifecycleMachine(EmptyPort(LAYERS))))
    return ratio("machine", "copy", {"machine": machine, "copy": looped(copies), "memcpy": looped(memcpy)}, effort)


def record_growth(effort: Effort) -> Measured:
    """Create a record, let it be backed up and given back, drop it: among many live ones against among few."""
    machine = LifecycleMachine(cast(Any, EmptyPort(1)))
    need = (0,)

    def cycles(live: int) -> Sampler:
        records = {number: Backup(number, 1, bound=True, no_need=need) for number in range(live)}

        def loop(operations: int) -> None:
            fire = machine.fire
            stored = Input(layers=(0,))
            for number in range(live, live + operations):
                record = records[number] = Backup(number, 1, bound=True, no_need=need)
                fire(record, Trigger.RESERVE)
                fire(record, Trigger.LAYER_STORED, stored)
                fire(record, Trigger.ABORT)
                fire(record, Trigger.AGREED)
                del records[number]

        return looped(loop)

    few, many = FEW, effort.size(MANY, least=2 * FEW)
    return ratio("many", "few", {"few": cycles(few), "many": cycles(many)}, effort)


def live_memory(effort: Effort) -> Measured:
    """Bytes that a record without a backup takes, with what it refers to alone."""
    import tracemalloc

    count = effort.size(20_000, least=100)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        records: Sequence[Backup] = [Backup(number, 2, bound=True, no_need=(0,)) for number in range(count)]
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    each = taken / len(records)
    return Measured(Spread(each, each, each), "bytes", 1)
