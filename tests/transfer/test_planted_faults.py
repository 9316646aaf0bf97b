"""Planted faults: each breaks one thing in an operator, a backend, a pool or a rank, and the check that passes without it must fail.

``FAULTS`` is the list. Byte faults go through :meth:`CopyRig.problems`, the check of the conformance suite; faults of a whole object
(draft, waits, freed slots) through :func:`object_problems`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch

from cphicache.spaces.layout import CpSharedKVLayout
from cphicache.transfer.backends import make_backend
from cphicache.transfer.backends.kvcacheio import DirectBackend, KernelBackend
from cphicache.transfer.backends.port import CopyBackend, CopyGroup, RowPair, RowPlan, plan_rows
from cphicache.transfer.backends.reference import ReferenceOperators
from cphicache.transfer.backends.rows import RowsBackend
from cphicache.transfer.backends.torch_backend import TorchBackend
from cphicache.transfer.pools.device import DevicePool
from cphicache.transfer.pools.host import BufferedHostPool, LayerFirstHostPool, PageFirstHostPool, make_host_pool
from cphicache.transfer.port import LoadItem, OpKey, Wait
from cphicache.transfer.rank import RankTransfer
from cphicache.transfer.streams.port import Streams
from cphicache.transfer.streams.virtual import VirtualStreams
from tests.streams.dropping import DroppingStreams
from tests.transfer.copy_rig import PATTERNS, SHAPES, CopyRig
from tests.transfer.rigs import pages, random_items, same

# -- operators that are wrong -------------------------------------------------------------------------------------------------------


class LayerOffByOne(ReferenceOperators):
    def transfer_kv_per_layer_mla_pf_lf(
        self, src: Any, dst: Any, src_indices: Any, dst_indices: Any, layer_id: int, **rest: Any
    ) -> None:  # type: ignore[override]
        super().transfer_kv_per_layer_mla_pf_lf(src, dst, src_indices, dst_indices, max(layer_id - 1, 0), **rest)


class KAndVSwapped(ReferenceOperators):
    def transfer_kv_per_layer(self, src_k: Any, dst_k: Any, src_v: Any, dst_v: Any, *rest: Any, **named: Any) -> None:  # type: ignore[override]
        super().transfer_kv_per_layer(src_k, dst_v, src_v, dst_k, *rest, **named)


class PageStrideWrong(ReferenceOperators):
    def transfer_kv_all_layer_mla_lf_pf(self, *, dst_layout_dim: int, item_size: int, **rest: Any) -> None:  # type: ignore[override]
        super().transfer_kv_all_layer_mla_lf_pf(dst_layout_dim=dst_layout_dim - item_size, item_size=item_size, **rest)


class ItemTooShort(ReferenceOperators):
    def transfer_kv_per_layer_mla(self, *, item_size: int, **rest: Any) -> None:  # type: ignore[override]
        super().transfer_kv_per_layer_mla(item_size=item_size - 8, **rest)


class EightBytesTooMany(ReferenceOperators):
    def _move(self, source: Any, destination: Any, src_indices: Any, dst_indices: Any, size_bytes: int) -> None:
        super()._move(source, destination, src_indices, dst_indices, size_bytes + 8)


class FirstPageOnly(ReferenceOperators):
    def transfer_kv_per_layer_direct_pf_lf(  # type: ignore[override]
        self, *, src_indices: Any, dst_indices: Any, page_size: int, **rest: Any
    ) -> None:
        first = {"src_indices": src_indices[:page_size], "dst_indices": dst_indices[:page_size]}
        super().transfer_kv_per_layer_direct_pf_lf(**first, page_size=page_size, **rest)


# -- backends that are wrong --------------------------------------------------------------------------------------------------------


class BaseNotShifted(KernelBackend):
    """The one-entry pointer table without the destination that begins at the layer."""

    def backup_layer(self, group: CopyGroup, layer: int, plan: RowPlan) -> None:
        tables = [table[layer : layer + 1] for table in group.device_tables]
        self._to_page_first(group, tables, list(group.host), plan)


class TableNotCut(KernelBackend):
    """The destination that begins at the layer with a table that begins at the first."""

    def backup_layer(self, group: CopyGroup, layer: int, plan: RowPlan) -> None:
        tables = [table[:1] for table in group.device_tables]
        self._to_page_first(group, tables, [host[:, layer] for host in group.host], plan)


class WholeBufferForOneLayer(DirectBackend):
    """One source with the whole destination instead of ``dst[:, layer:layer+1]``."""

    def backup_layer(self, group: CopyGroup, layer: int, plan: RowPlan) -> None:
        self._to_pages(group, [layers[layer] for layers in group.device], list(group.host), plan)


class LastRunDropped(TorchBackend):
    def copy_rows(self, pairs: Sequence[RowPair], plan: RowPlan) -> None:
        kept = sum(run.length for run in plan.runs[:-1])
        super().copy_rows(pairs, RowPlan(plan.source_rows[:kept], plan.destination_rows[:kept], plan.runs[:-1]))


class Wrapped:
    """A backend that forwards; faults override one method."""

    def __init__(self, inner: CopyBackend) -> None:
        self.inner = inner
        self.name = inner.name

    def check(self, group: CopyGroup) -> None:
        self.inner.check(group)

    def backup_layer(self, group: CopyGroup, layer: int, plan: RowPlan) -> None:
        self.inner.backup_layer(group, layer, plan)

    def backup_layers(self, group: CopyGroup, plan: RowPlan) -> None:
        self.inner.backup_layers(group, plan)

    def load_layer(self, group: CopyGroup, layer: int, plan: RowPlan) -> None:
        self.inner.load_layer(group, layer, plan)


class RowsReversed(Wrapped):
    """Bytes of the first row to the place of the last."""

    def backup_layer(self, group: CopyGroup, layer: int, plan: RowPlan) -> None:
        slots = 1 + int(max(plan.source_rows.max(), plan.destination_rows.max()))
        self.inner.backup_layer(group, layer, plan_rows(plan.source_rows.flip(0), plan.destination_rows, slots, slots))


class LoadGoesTheOtherWay(Wrapped):
    def load_layer(self, group: CopyGroup, layer: int, plan: RowPlan) -> None:
        swapped = RowPlan(plan.destination_rows, plan.source_rows, ())
        self.inner.backup_layer(group, layer, swapped)


class LastLayerLeftOut(Wrapped):
    """All layers, without the last one."""

    def backup_layers(self, group: CopyGroup, plan: RowPlan) -> None:
        for layer in range(len(group.layers) - 1):
            self.inner.backup_layer(group, layer, plan)


# -- pools that are wrong -----------------------------------------------------------------------------------------------------------


class IndexerBySlot(LayerFirstHostPool):
    def _plan_of(self, group: CopyGroup, plan: RowPlan) -> RowPlan:
        return plan


class IndexerTwice(LayerFirstHostPool):
    def _groups(self, device_pool: DevicePool) -> list[CopyGroup]:
        groups = super()._groups(device_pool)
        return [*groups, groups[-1]]


class IndexerFirst(LayerFirstHostPool):
    def _groups(self, device_pool: DevicePool) -> list[CopyGroup]:
        return super()._groups(device_pool)[::-1]


class IndexerForgotten(PageFirstHostPool):
    def _groups(self, device_pool: DevicePool) -> list[CopyGroup]:
        return super()._groups(device_pool)[:1]


class IndexerByModelLayer(LayerFirstHostPool):
    """The keys of layer 2 taken for the third of the layers that have keys, not for the second."""

    def _groups(self, device_pool: DevicePool) -> list[CopyGroup]:
        latent, indexer = super()._groups(device_pool)
        return [latent, replace(indexer, layers=tuple(range(len(indexer.layers))))]


@dataclass(frozen=True)
class ByteFault:
    """Where a fault is planted: a shape, a layout and a backend of the suite, and what is put in the place of the right one."""

    shape: str
    layout: str
    backend: str
    operators: Callable[[], ReferenceOperators] = ReferenceOperators
    wrap: Callable[[ReferenceOperators], Callable[[CopyBackend], CopyBackend]] | None = None
    pool: type[BufferedHostPool] | None = None


def instead(
    backend: type[KernelBackend] | type[DirectBackend],
) -> Callable[[ReferenceOperators], Callable[[CopyBackend], CopyBackend]]:
    return lambda operators: lambda right: backend(operators, index_device="cpu")


def around(backend: type[Wrapped]) -> Callable[[ReferenceOperators], Callable[[CopyBackend], CopyBackend]]:
    return lambda operators: backend


DSA = "dsa fp8, layers 0 and 2 of 3"
FAULTS: dict[str, ByteFault] = {
    "layer index off by one": ByteFault("mla bf16", "page_first", "kernel", LayerOffByOne),
    "K and V swapped": ByteFault("mha fp16", "layer_first", "kernel", KAndVSwapped),
    "page stride wrong": ByteFault("mla bf16", "page_first", "kernel", PageStrideWrong),
    "wrong item size": ByteFault("mla bf16", "layer_first", "kernel", ItemTooShort),
    "untouched bytes touched": ByteFault("mla bf16", "layer_first", "kernel", EightBytesTooMany),
    "pages after the first not loaded": ByteFault("mla bf16", "page_first_direct", "direct", FirstPageOnly),
    "base not shifted to the layer": ByteFault("mla bf16", "page_first", "kernel", wrap=instead(BaseNotShifted)),
    "pointer table not cut to the layer": ByteFault("mha fp16", "page_first", "kernel", wrap=instead(TableNotCut)),
    "whole destination for one layer": ByteFault("mla bf16", "page_first_direct", "direct", wrap=instead(WholeBufferForOneLayer)),
    "last partial run dropped": ByteFault(
        "mla bf16", "layer_first", "torch", wrap=lambda _: lambda __: RowsBackend(LastRunDropped())
    ),
    "rows in reversed order": ByteFault("mla bf16", "page_first", "torch", wrap=around(RowsReversed)),
    "load-back copies to the host": ByteFault("mla bf16", "layer_first", "torch", wrap=around(LoadGoesTheOtherWay)),
    "last layer left out": ByteFault("mla bf16", "page_first", "torch", wrap=around(LastLayerLeftOut)),
    "indexer by slot instead of page": ByteFault(DSA, "layer_first", "torch", pool=IndexerBySlot),
    "indexer twice": ByteFault(DSA, "layer_first", "kernel", pool=IndexerTwice),
    "indexer before the latent": ByteFault(DSA, "layer_first", "direct", pool=IndexerFirst),
    "indexer forgotten": ByteFault(DSA, "page_first", "torch", pool=IndexerForgotten),
    "indexer by the model's layer": ByteFault(DSA, "layer_first", "torch", pool=IndexerByModelLayer),
}
"""By what is wrong. Every one fails the check of the conformance suite."""


def byte_problems(fault: ByteFault, *, planted: bool) -> list[str]:
    operators = fault.operators() if planted else ReferenceOperators()
    rig = CopyRig(
        SHAPES[fault.shape],
        fault.layout,
        fault.backend,
        4,
        operators=operators,
        wrap_backend=fault.wrap(operators) if planted and fault.wrap is not None else lambda backend: backend,
        pool_class=fault.pool if planted else None,
    )
    with_streams = [(VirtualStreams(seed=1), *PATTERNS[pattern]) for pattern in ("scattered", "reversed")]
    return [line for streams, device, host in with_streams for line in rig.problems(streams, device, host)]


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_fails_the_suites_check(name: str) -> None:
    """R33: the check of the conformance suite finds each planted fault, and finds nothing in the same copies without it."""
    assert byte_problems(FAULTS[name], planted=False) == []
    assert byte_problems(FAULTS[name], planted=True)


# -- whole objects: target, indexer and draft, streams and slots -----------------------------------------------------------------------

PAGE = 4
LAYOUT = CpSharedKVLayout(PAGE, 1, 0)
SLOW, FAST = 1.0, 1000.0
"""Bytes a microsecond."""


class DraftSkipped(RankTransfer):
    """Says that the draft's layers were submitted, and copies none."""

    def submit_layers(self, ops: Iterable[OpKey], payload: str, layers: Sequence[int]) -> None:
        if payload != "draft":
            super().submit_layers(ops, payload, layers)
            return
        mask = self._mask(payload, layers, "submit_layers")
        self._mark_submitted([self._backup(op, "submit_layers") for op in ops], payload, mask)


class DraftOnTargetSlots(RankTransfer):
    """Copies the draft to the slots one page further on."""

    def reserve(self, op: OpKey, on: Sequence[Any]) -> None:
        super().reserve(op, on)
        job = self._backups[op]
        job.host_pages = {**job.host_pages, "draft": [(page + 1) % 2 for page in job.metadata.owned_pages.host]}


def object_problems(streams: Streams, rank_class: type[RankTransfer] = RankTransfer) -> list[str]:
    """Store two nodes, back them up, load one elsewhere while its host slots are given on; every payload and component must come back.

    D2H is fast and H2D slow, so that what is not waited for is overtaken."""
    backend = partial(make_backend, operators=ReferenceOperators(), index_device="cpu")
    shapes = {"target": SHAPES[DSA], "draft": SHAPES["draft dsa"]}
    device = {name: DevicePool(shape, 10 * PAGE, page_size=PAGE) for name, shape in shapes.items()}
    host = {name: make_host_pool("page_first_direct", shape, 2 * PAGE, PAGE, backends=backend) for name, shape in shapes.items()}
    rank = rank_class(LAYOUT, device, host, streams, io_backend="direct", d2h_bytes_per_us=FAST, h2d_bytes_per_us=SLOW)
    compute = streams.stream("compute")
    stored: dict[tuple[str, int, int], dict[str, torch.Tensor]] = {}

    def slots(page: int) -> range:
        return range(page * PAGE, (page + 1) * PAGE)

    def store(page: int, seed: int) -> None:
        rank.before_store(pages(page))
        for name, pool in device.items():
            for layer in range(pool.shape.layers):
                items = stored[name, layer, page] = random_items(pool.shape, PAGE, seed + layer + (50 if name == "draft" else 0))
                compute.submit(partial(pool.store, layer, slots(page), items), cost_us=300.0)

    def back_up(op: OpKey, page: int) -> None:
        rank.reserve(op, pages(page))
        for name, pool in device.items():
            for layer in range(pool.shape.layers):
                rank.submit_layers([op], name, [layer])

    def drained(ask: Callable[[], Any]) -> None:
        while not ask().drained:
            streams.pause(1.0)

    def wrong(page: int, at: int) -> list[str]:
        return [
            f"{name} layer {layer}: page {at} does not hold what page {page} did"
            for (name, layer, of), items in stored.items()
            if of == page
            and not same(
                device[name].read(layer, slots(at)), {part: items[part] for part in device[name].shape.components_of(layer)}
            )
        ]

    store(3, seed=900)
    for node, page in ((1, 1), (2, 2)):
        store(page, seed=100 * page)
        back_up(OpKey(node, 0), page)
        drained(partial(rank.status, OpKey(node, 0)))
        rank.commit(OpKey(node, 0))
    rank.queue_load(0, [LoadItem(1, pages(5))])
    rank.start_loads()
    drained(partial(rank.load_status, 0))
    rank.end_load(0)
    rank.free_node(1)
    back_up(OpKey(3, 0), 3)
    drained(partial(rank.status, OpKey(3, 0)))
    rank.commit(OpKey(3, 0))
    rank.queue_load(1, [LoadItem(2, pages(6)), LoadItem(3, pages(7))])
    rank.start_loads()
    rank.wait_load(1)
    streams.close()
    return [*wrong(1, 5), *wrong(2, 6), *wrong(3, 7)]


OBJECT_FAULTS: dict[str, Callable[[], list[str]]] = {
    "draft skipped": lambda: object_problems(VirtualStreams(), DraftSkipped),
    "draft one page off": lambda: object_problems(VirtualStreams(), DraftOnTargetSlots),
    "missing wait before the copy": lambda: object_problems(DroppingStreams(VirtualStreams(), Wait.STORE_TO_COPY)),
    "slot freed before the drain": lambda: object_problems(DroppingStreams(VirtualStreams(), Wait.DRAIN_TO_FREE)),
}


@pytest.mark.parametrize("name", OBJECT_FAULTS)
def test_a_fault_of_the_whole_object_is_found(name: str) -> None:
    """R5, R33, R34: target, indexer and draft come back together, through waits and given-on slots, and without each planted fault only."""
    assert OBJECT_FAULTS[name]()


@pytest.mark.parametrize("seed", range(4))
def test_the_whole_object_is_right_without_a_fault(seed: int) -> None:
    """R5, R33, R34: the green twin: in every order that the waits allow, all payloads and components come back."""
    assert object_problems(VirtualStreams()) == []
    assert object_problems(VirtualStreams(seed=seed, jitter=1.0)) == []


def test_the_list_is_long_enough() -> None:
    """R33: at least the twelve places that the suite has to watch."""
    assert len(FAULTS) + len(OBJECT_FAULTS) >= 12
