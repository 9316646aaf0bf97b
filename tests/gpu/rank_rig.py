"""One rank over pools of a lab (a GPU, or the CPU to try the rig itself): two nodes are backed up while the device still stores them,
and come back onto other pages."""

from __future__ import annotations

import torch

from cphicache.run.doctor_copies import Lab, ways
from cphicache.spaces.layout import CpSharedKVLayout
from cphicache.spaces.types import LogicalPage
from cphicache.transfer.pools.device import DevicePool, KVShape
from cphicache.transfer.pools.host import make_host_pool
from cphicache.transfer.pools.memory import HostMemory
from cphicache.transfer.port import LoadItem, OpKey
from cphicache.transfer.rank import RankTransfer
from cphicache.transfer.support import Support

PAGE_SIZE, PAGES = 16, 12
FIRST, SECOND, WARM = OpKey(1, 0), OpKey(2, 0), OpKey(9, 0)
NODE_PAGES = {FIRST: (3, 5), SECOND: (8,), WARM: (10,)}
NEW_PAGES = (7, 2)


def numbers(pages: tuple[int, ...]) -> list[LogicalPage]:
    return [LogicalPage(page) for page in pages]


class RankRig:
    """Target of three layers, draft of one, both of the row's kind."""

    def __init__(self, lab: Lab, row: Support) -> None:
        way = ways(row, lab.device.type)[0]()
        self._lab = lab
        self._memory = HostMemory.for_device(lab.device)
        self._device, self._host = {}, {}
        for payload, layers in (("target", 3), ("draft", 1)):
            shape = _shape(row.kind, layers)
            device = self._device[payload] = DevicePool(shape, PAGES * PAGE_SIZE, page_size=PAGE_SIZE, device=lab.device)
            host = self._host[payload] = make_host_pool(
                row.layout, shape, PAGES * PAGE_SIZE, PAGE_SIZE, memory=self._memory, backends=lambda name: way.backend
            )
            if way.operators is not None:
                way.operators.register(*device.tensors(), *host.tensors())
        self._layout = CpSharedKVLayout(PAGE_SIZE, 1, 0)
        self._rank = RankTransfer(self._layout, self._device, self._host, lab.streams, io_backend=row.io_backend)
        # What the forward will store, made before: a store is one copy on the device.
        generator = torch.Generator().manual_seed(3)
        self._stored = {
            payload: [
                torch.randint(0, 256, tensor.view(torch.uint8).shape, dtype=torch.uint8, generator=generator).to(lab.device)
                for tensor in pool.tensors()
            ]
            for payload, pool in self._device.items()
        }

    def warm_up(self) -> None:
        """One whole backup and load-back: kernels are compiled, allocators filled."""
        self._back_up(WARM)
        self._rank.wait_backup(WARM)
        self._rank.commit(WARM)
        self._rank.queue_load(9, [LoadItem(WARM.node, numbers((11,)))])
        self._rank.start_loads()
        self._rank.wait_load(9)
        self._rank.end_load(9)

    def submit_backups(self) -> None:
        """The forward stores everything, and both nodes are backed up, layer by layer."""
        for op in (FIRST, SECOND):
            self._rank.reserve(op, numbers(NODE_PAGES[op]))
        compute = self._lab.streams.stream("compute")
        for payload, pool in self._device.items():
            compute.submit(lambda payload=payload, pool=pool: self._store(payload, pool))  # type: ignore[misc]
            for layer in range(pool.shape.layers):
                self._rank.submit_layers([FIRST, SECOND], payload, [layer])

    def poll(self) -> None:
        """Ask as the scheduler does."""
        for op in (FIRST, SECOND):
            assert not self._rank.status(op).failed, self._rank.failure(op)

    def finish_backups(self) -> None:
        """Both commit, and the host holds what the forward stored."""
        for op in (FIRST, SECOND):
            self._rank.wait_backup(op)
            assert self._rank.failure(op) is None
            assert self._rank.status(op).drained
            self._rank.commit(op)
        self._before = {payload: self._snapshot(pool) for payload, pool in self._device.items()}

    def start_load(self) -> None:
        """The first node comes back onto other pages; the forward waits for each layer."""
        pages = numbers(NEW_PAGES)
        self._rank.before_store(pages)
        self._rank.queue_load(0, [LoadItem(FIRST.node, pages)])
        producer = self._rank.start_loads()
        for payload, pool in self._device.items():
            for layer in range(pool.shape.layers):
                self._rank.wait_layer(producer, payload, layer)

    def finish_load(self) -> None:
        """The new pages hold the node's bytes, every other page is as it was."""
        self._rank.wait_load(0)
        assert self._rank.load_status(0) == (True, False)
        self._rank.end_load(0)
        to, at = (
            [page * PAGE_SIZE + offset for page in self._physical(pages) for offset in range(PAGE_SIZE)]
            for pages in (NEW_PAGES, NODE_PAGES[FIRST])
        )
        for payload, pool in self._device.items():
            expected = {key: rows.clone() for key, rows in self._before[payload].items()}
            for rows in expected.values():
                rows[to] = rows[at]
            for key, rows in self._snapshot(pool).items():
                assert torch.equal(rows, expected[key]), (payload, key)

    def close(self) -> None:
        """Unpin."""
        self._memory.close()

    def _back_up(self, op: OpKey) -> None:
        self._rank.reserve(op, numbers(NODE_PAGES[op]))
        for payload, pool in self._device.items():
            self._rank.submit_layers([op], payload, range(pool.shape.layers))

    def _store(self, payload: str, pool: DevicePool) -> None:
        for tensor, items in zip(pool.tensors(), self._stored[payload], strict=True):
            tensor.view(torch.uint8).copy_(items)

    def _physical(self, pages: tuple[int, ...]) -> list[int]:
        return [self._layout.physical_page(page) for page in numbers(pages)]

    @staticmethod
    def _snapshot(pool: DevicePool) -> dict[tuple[int, str], torch.Tensor]:
        return {
            (layer, name): rows.cpu()
            for layer in range(pool.shape.layers)
            for name, rows in pool.read(layer, range(pool.slots)).items()
        }


def _shape(kind: str, layers: int) -> KVShape:
    components = {"mha": {"k": 256, "v": 256}, "mla": {"latent": 576}, "dsa": {"latent": 576, "indexer": 132}}[kind]
    return KVShape(kind, layers, components, torch.bfloat16)
