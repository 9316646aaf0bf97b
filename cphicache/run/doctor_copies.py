"""The copies that ``cphicache doctor`` tries: pools, streams and backends as a server uses them, compared byte by byte, and timed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from cphicache.transfer.backends import BackendUnavailable, make_backend
from cphicache.transfer.backends.port import CopyBackend
from cphicache.transfer.backends.reference import ReferenceOperators
from cphicache.transfer.backends.rows import RowsBackend
from cphicache.transfer.backends.triton_backend import TritonBackend, TritonUnavailable
from cphicache.transfer.pools.device import DevicePool, KVShape
from cphicache.transfer.pools.host import BufferedHostPool, make_host_pool
from cphicache.transfer.pools.memory import HostMemory
from cphicache.transfer.port import Wait
from cphicache.transfer.streams.cuda import CudaStreams
from cphicache.transfer.streams.port import Streams
from cphicache.transfer.streams.threads import ThreadStreams
from cphicache.transfer.support import Support, indexer_item_bytes

LAYERS = 3
PAGE_SIZE = 16
POOL_PAGES = 8
DEVICE_PAGES = (5, 2, 3, 7)
HOST_PAGES = (0, 4, 5, 1)
"""Pages that are copied: two are neighbours on both sides, the others lie apart."""

TIMED_PAGE_SIZE = 64
TIMED_PAGES = 128
TIMED_REPEATS = 5
PINNED_BYTES = 1 << 28
GB = 1e9


class WrongBytes(AssertionError):
    """A copy wrote other bytes than it should have."""


class Way(NamedTuple):
    """A backend to try. ``runs_on``: what stands behind it. ``operators``: the stand-ins that have to know the buffers."""

    backend: CopyBackend
    runs_on: str
    operators: ReferenceOperators | None = None


class Rates(NamedTuple):
    """10**9 bytes a second: one layer out, all layers out, one layer in."""

    d2h_layer: float
    d2h_all: float
    h2d_layer: float


class Lab(NamedTuple):
    """Where copies are tried."""

    device: torch.device
    streams: Streams

    def run(self, work: Callable[[], None]) -> None:
        """Run ``work`` on the write stream, after what the compute stream holds, and wait for it. Raises what it raised."""
        write = self.streams.stream("write")
        write.wait(self.streams.stream("compute").record(), Wait.STORE_TO_COPY)
        raised: list[Exception] = []

        def guarded() -> None:
            try:
                work()
            except Exception as error:  # what a copy raises is a finding, not a failure of the stream
                raised.append(error)

        write.submit(guarded)
        self.streams.synchronize(write.record())
        if raised:
            raise raised[0]

    def timed(self, work: Callable[[], None]) -> float:
        """Seconds of the device for one ``work``, after a first one that warms up. GPU only."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call,unused-ignore]
        self.run(work)

        def repeated() -> None:
            start.record()
            for _ in range(TIMED_REPEATS):
                work()
            end.record()

        self.run(repeated)
        return float(start.elapsed_time(end)) / 1e3 / TIMED_REPEATS


@contextmanager
def open_lab(*, on_gpu: bool) -> Iterator[Lab]:
    """CUDA streams and pinned memory, or threads. Raises :class:`~cphicache.transfer.streams.cuda.CudaUnavailable` without a GPU."""
    streams: Streams = CudaStreams() if on_gpu else ThreadStreams()
    try:
        yield Lab(torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu"), streams)
    finally:
        streams.close()


def ways(row: Support, device_type: str) -> list[Callable[[], Way]]:
    """How a combination can run. Backend ``kernel`` has two ways to copy one layer into a ``page_first`` pool. Each raises
    :class:`BackendUnavailable` when something is missing."""
    found: list[Callable[[], Way]] = [lambda: _way(row, device_type)]
    if (row.io_backend, row.layout) == ("kernel", "page_first"):
        found.append(lambda: _kernel_with_triton(device_type))
    return found


def _way(row: Support, device_type: str) -> Way:
    if device_type != "cpu":
        return Way(make_backend(row.io_backend), device_type)
    match row.io_backend:
        case "torch":
            return Way(make_backend("torch"), "cpu")
        case "triton":
            return Way(_triton(device_type), "Triton's interpreter")
    operators = ReferenceOperators()
    return Way(make_backend(row.io_backend, operators=operators, index_device="cpu"), "reference operators", operators)


def _kernel_with_triton(device_type: str) -> Way:
    triton = _triton(device_type)
    if device_type != "cpu":
        return Way(make_backend("kernel", page_first_d2h=triton), f"{device_type}, triton D2H")
    operators = ReferenceOperators()
    backend = make_backend("kernel", operators=operators, index_device="cpu", page_first_d2h=triton)
    return Way(backend, "reference operators, triton D2H", operators)


def _triton(device_type: str) -> CopyBackend:
    rows = TritonBackend(interpret=device_type == "cpu")
    try:
        rows.require_available()
    except TritonUnavailable as error:
        raise BackendUnavailable(str(error)) from error
    return RowsBackend(rows)


def compare(lab: Lab, row: Support, way: Way, page_size: int = PAGE_SIZE) -> None:
    """One layer out, all layers out, one layer in. Raises :class:`WrongBytes` unless every planned byte arrives and no other changes."""
    with _pools(lab, row, way, page_size, POOL_PAGES) as (device, host):
        generator = torch.Generator().manual_seed(1)
        for pool in (device, host):
            for tensor in pool.tensors():
                raw = tensor.view(torch.uint8)
                raw.copy_(torch.randint(0, 256, raw.shape, dtype=torch.uint8, generator=generator))
        on_device, on_host = (_slots(pages, page_size) for pages in (DEVICE_PAGES, HOST_PAGES))
        copies: list[tuple[str, Callable[[], None], bool, Sequence[int]]] = [
            (
                "backup of layer 1",
                lambda: host.backup_from_device_per_layer(device, on_host, on_device, 1, row.io_backend),
                True,
                [1],
            ),
            (
                "load of layer 2",
                lambda: host.load_to_device_per_layer(device, on_host, on_device, 2, row.io_backend),
                False,
                [2],
            ),
            (
                "backup of all layers",
                lambda: host.backup_from_device_all_layer(device, on_host, on_device, row.io_backend),
                True,
                range(LAYERS),
            ),
        ]
        for what, copy, outward, layers in copies:
            before = {True: _snapshot(host), False: _snapshot(device)}
            lab.run(copy)
            to, at = (on_host, on_device) if outward else (on_device, on_host)
            expected = {key: rows.clone() for key, rows in before[outward].items()}
            for (layer, name), rows in expected.items():
                if layer in layers:
                    rows[to] = before[not outward][layer, name][at]
            _require_same(f"{what}, destination", expected, _snapshot(host if outward else device))
            _require_same(f"{what}, source", before[not outward], _snapshot(device if outward else host))


def measure(lab: Lab, row: Support, way: Way) -> Rates:
    """Speed of scattered pages of 64 tokens. GPU only."""
    with _pools(lab, row, way, TIMED_PAGE_SIZE, TIMED_PAGES) as (device, host):
        generator = torch.Generator().manual_seed(2)
        pages = [torch.randperm(TIMED_PAGES, generator=generator).tolist() for _ in range(2)]
        on_device, on_host = (_slots(numbers, TIMED_PAGE_SIZE) for numbers in pages)
        layer_gb = host.shape.layer_bytes * host.slots / GB
        return Rates(
            layer_gb / lab.timed(lambda: host.backup_from_device_per_layer(device, on_host, on_device, 1, row.io_backend)),
            layer_gb * LAYERS / lab.timed(lambda: host.backup_from_device_all_layer(device, on_host, on_device, row.io_backend)),
            layer_gb / lab.timed(lambda: host.load_to_device_per_layer(device, on_host, on_device, 1, row.io_backend)),
        )


def pinned_limit(lab: Lab) -> tuple[float, float]:
    """10**9 bytes a second of one large copy to and from pinned memory: what no pair can pass. GPU only."""
    memory = HostMemory.for_device(lab.device)
    try:
        host, device = memory.allocate(PINNED_BYTES), torch.zeros(PINNED_BYTES, dtype=torch.uint8, device=lab.device)
        out = lab.timed(lambda: _ignore(host.copy_(device, non_blocking=True)))
        back = lab.timed(lambda: _ignore(device.copy_(host, non_blocking=True)))
        return PINNED_BYTES / GB / out, PINNED_BYTES / GB / back
    finally:
        memory.close()


def _shape(kind: str) -> KVShape:
    """Items as served models have them: MLA 512 + 64, an indexer key of 128 and its scale, two KV heads of 128."""
    if kind == "mha":
        return KVShape(kind, LAYERS, {"k": 256, "v": 256}, torch.bfloat16)
    components = {"latent": 576} | ({"indexer": indexer_item_bytes(128)} if kind == "dsa" else {})
    return KVShape(kind, LAYERS, components, torch.bfloat16)


@contextmanager
def _pools(lab: Lab, row: Support, way: Way, page_size: int, pages: int) -> Iterator[tuple[DevicePool, BufferedHostPool]]:
    shape, slots, memory = _shape(row.kind), pages * page_size, HostMemory.for_device(lab.device)
    try:
        device = DevicePool(shape, slots, page_size=page_size, device=lab.device)
        host = make_host_pool(row.layout, shape, slots, page_size, memory=memory, backends=lambda name: way.backend)
        if way.operators is not None:
            way.operators.register(*device.tensors(), *host.tensors())
        host.check_twin(device, row.io_backend)
        yield device, host
    finally:
        memory.close()


def _snapshot(pool: DevicePool | BufferedHostPool) -> dict[tuple[int, str], torch.Tensor]:
    return {
        (layer, name): rows.cpu()
        for layer in range(pool.shape.layers)
        for name, rows in pool.read(layer, range(pool.slots)).items()
    }


def _require_same(what: str, expected: dict[tuple[int, str], torch.Tensor], found: dict[tuple[int, str], torch.Tensor]) -> None:
    for (layer, name), rows in expected.items():
        wrong = (rows != found[layer, name]).nonzero()
        if len(wrong):
            slot, byte = wrong[0].tolist()
            raise WrongBytes(
                f"{what}: layer {layer} {name} slot {slot} byte {byte}: expected {int(rows[slot, byte]):#04x}, found "
                f"{int(found[layer, name][slot, byte]):#04x} ({len(wrong)} bytes differ)"
            )


def _slots(pages: Sequence[int], page_size: int) -> torch.Tensor:
    return torch.tensor([page * page_size + offset for page in pages for offset in range(page_size)], dtype=torch.int64)


def _ignore(value: object) -> None:
    """A copy is asked for its effect."""
