"""One rank with small pools, filled with bytes that differ by slot, layer, payload and component; whole-pool snapshots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cphicache.spaces.layout import CpSharedKVLayout
from cphicache.spaces.types import LogicalPage
from cphicache.transfer.faults import CopyFaults
from cphicache.transfer.pools.device import DevicePool, KVShape
from cphicache.transfer.pools.host import LayerFirstHostPool
from cphicache.transfer.port import LoadItem, OpKey
from cphicache.transfer.rank import RankTransfer
from cphicache.transfer.streams.port import Streams

Bytes = dict[tuple[int, str], torch.Tensor]
"""uint8 ``[slots, item_bytes]`` by (layer, component)."""

ELEMENTS = {"mla": {"latent": 12}, "mha": {"k": 8, "v": 5}, "dsa": {"latent": 12, "indexer": 6}}
"""Odd item sizes beside ones that are a multiple of 8 bytes."""


def shape_of(kind: str, layers: int, dtype: torch.dtype = torch.bfloat16) -> KVShape:
    return KVShape(kind=kind, layers=layers, components=ELEMENTS[kind], dtype=dtype)


def random_items(shape: KVShape, tokens: int, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randint(0, 256, (tokens, shape.item_bytes(name)), dtype=torch.uint8, generator=generator)
        for name in shape.components
    }


def snapshot(pool: DevicePool | LayerFirstHostPool) -> Bytes:
    everything = range(pool.slots)
    return {
        (layer, name): rows.clone() for layer in range(pool.shape.layers) for name, rows in pool.read(layer, everything).items()
    }


def assert_same(found: Bytes, expected: Bytes) -> None:
    assert found.keys() == expected.keys()
    for key, rows in expected.items():
        assert torch.equal(found[key], rows), key


def fill(pool: DevicePool | LayerFirstHostPool, seed: int) -> None:
    for layer in range(pool.shape.layers):
        items = random_items(pool.shape, pool.slots, seed * 1000 + layer)
        pool.store(layer, range(pool.slots), items)


def copied(destination: Bytes, source: Bytes, to: Sequence[int], at: Sequence[int], layers: Sequence[int]) -> Bytes:
    """The naive twin of every copy: one row at a time."""
    result = {key: rows.clone() for key, rows in destination.items()}
    for (layer, name), rows in source.items():
        if layer in layers:
            for to_slot, at_slot in zip(to, at, strict=True):
                result[layer, name][to_slot] = rows[at_slot]
    return result


def pages(*numbers: int) -> list[LogicalPage]:
    return [LogicalPage(number) for number in numbers]


@dataclass
class Rig:
    rank: RankTransfer
    layout: CpSharedKVLayout
    device: dict[str, DevicePool]
    host: dict[str, LayerFirstHostPool]
    streams: Streams

    @classmethod
    def of(
        cls,
        streams: Streams,
        layout: CpSharedKVLayout,
        *,
        device_pages: int = 12,
        host_pages: int = 10,
        draft_host_pages: int | None = 10,
        kind: str = "mla",
        layers: int = 3,
        d2h_bytes_per_us: float = 1.0,
        h2d_bytes_per_us: float = 1.0,
        faults: CopyFaults | None = None,
    ) -> Rig:
        """``draft_host_pages=None``: no draft payload. The draft has two layers."""
        host_sizes = {"target": host_pages} | ({} if draft_host_pages is None else {"draft": draft_host_pages})
        shapes = {"target": shape_of(kind, layers), "draft": shape_of(kind, 2)}
        size = layout.page_size
        device = {payload: DevicePool(shapes[payload], device_pages * size) for payload in host_sizes}
        host = {payload: LayerFirstHostPool(shapes[payload], count * size, size) for payload, count in host_sizes.items()}
        for at, payload in enumerate(host_sizes):
            fill(device[payload], 1 + at)
            fill(host[payload], 11 + at)
        rank = RankTransfer(
            layout, device, host, streams, d2h_bytes_per_us=d2h_bytes_per_us, h2d_bytes_per_us=h2d_bytes_per_us, faults=faults
        )
        return cls(rank, layout, device, host, streams)

    def submit_all(self, *ops: OpKey) -> None:
        for payload, pool in self.device.items():
            self.rank.submit_layers(ops, payload, range(pool.shape.layers))

    def back_up(self, node: int, on: Sequence[LogicalPage], generation: int = 0) -> None:
        """A whole committed backup."""
        op = OpKey(node, generation)
        self.rank.reserve(op, on)
        self.submit_all(op)
        self.rank.wait_backup(op)
        self.rank.commit(op)

    def load(self, load: int, node: int, on: Sequence[LogicalPage]) -> None:
        """A whole load-back of one node."""
        self.rank.queue_load(load, [LoadItem(node, on)])
        self.rank.start_loads()
        self.rank.wait_load(load)
        self.rank.end_load(load)

    def slots(self, page: int) -> list[int]:
        """Physical slots of an owned logical page."""
        first = self.layout.physical_page(LogicalPage(page)) * self.layout.page_size
        return list(range(first, first + self.layout.page_size))

    def device_page(self, payload: str, layer: int, page: int) -> dict[str, torch.Tensor]:
        return self.device[payload].read(layer, self.slots(page))

    def store(self, payload: str, layer: int, page: int, seed: int, cost_us: float) -> dict[str, torch.Tensor]:
        """Queue a KV store of a whole page on the compute stream; returns what it writes."""
        pool = self.device[payload]
        items = random_items(pool.shape, self.layout.page_size, seed)
        slots = self.slots(page)
        self.streams.stream("compute").submit(lambda: pool.store(layer, slots, items), cost_us=cost_us)
        return items


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
