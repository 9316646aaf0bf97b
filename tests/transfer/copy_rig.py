"""One pool pair whose every byte is watched, and the check that all conformance tests share: what a copy should have written, computed by
address arithmetic of its own, against what all buffers hold afterwards, their guards included."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from cphicache.transfer.backends import make_backend
from cphicache.transfer.backends.port import CopyBackend, CopyGroup, RowPlan
from cphicache.transfer.backends.reference import ReferenceOperators
from cphicache.transfer.backends.rows import RowsBackend
from cphicache.transfer.backends.triton_backend import TritonBackend
from cphicache.transfer.pools.device import DevicePool, KVShape
from cphicache.transfer.pools.host import BufferedHostPool, make_host_pool
from cphicache.transfer.pools.memory import HostMemory
from cphicache.transfer.streams.errors import StreamError
from cphicache.transfer.streams.port import Streams
from cphicache.transfer.streams.threads import ThreadStreams
from cphicache.transfer.streams.virtual import VirtualStreams

GUARD_BYTES = 4096
DEVICE_PAGES, HOST_PAGES = 7, 6
PATTERNS: dict[str, tuple[list[int], list[int]]] = {
    "one page": ([3], [5]),
    "contiguous": ([2, 3, 4], [1, 2, 3]),
    "scattered": ([6, 2, 3, 0], [0, 4, 5, 2]),
    "reversed": ([6, 5, 4], [2, 1, 0]),
}
"""Device pages and host pages. ``scattered`` ends with a run of one page and has a run of two that crosses nothing."""

SHAPES: dict[str, KVShape] = {
    "mla bf16": KVShape("mla", 3, {"latent": 12}, torch.bfloat16),
    "mla fp8 packed": KVShape("mla", 1, {"latent": 656}, torch.uint8, scales="row"),
    "mha fp16": KVShape("mha", 3, {"k": 8, "v": 8}, torch.float16),
    "mha fp8, K wider than V": KVShape("mha", 2, {"k": 24, "v": 16}, torch.float8_e4m3fn),
    "dsa bf16, every layer indexed": KVShape("dsa", 3, {"latent": 12, "indexer": 24}, torch.bfloat16),
    "dsa fp8, layers 0 and 2 of 3": KVShape(
        "dsa", 3, {"latent": 56, "indexer": 40}, torch.uint8, indexer_layers=(0, 2), scales="row"
    ),
    "draft mla": KVShape("mla", 2, {"latent": 16}, torch.bfloat16),
    "draft mha fp8": KVShape("mha", 1, {"k": 32, "v": 32}, torch.float8_e5m2),
    "draft dsa": KVShape("dsa", 2, {"latent": 16, "indexer": 16}, torch.float8_e4m3fn, indexer_layers=(1,)),
}
STREAMS: dict[str, Callable[[], Streams]] = {
    "threads": lambda: ThreadStreams(seed=1, max_delay_us=20.0),
    "virtual": lambda: VirtualStreams(seed=1, jitter=1.0),
}

Bytes = npt.NDArray[np.uint8]
Call = tuple[str, tuple[str, ...], int | None]
"""Direction, components, the payload's layer (None: all)."""


class GuardedMemory(HostMemory):
    """Host memory with bytes before and behind each buffer that nobody may touch."""

    def __init__(self) -> None:
        super().__init__()
        self.wholes: list[torch.Tensor] = []

    def allocate(self, size_bytes: int) -> torch.Tensor:
        whole = super().allocate(size_bytes + 2 * GUARD_BYTES)
        self.wholes.append(whole)
        return whole[GUARD_BYTES : GUARD_BYTES + size_bytes]


class Recorder:
    """A backend that writes down its calls and forwards them."""

    def __init__(self, inner: CopyBackend) -> None:
        self._inner = inner
        self.name = inner.name
        self.calls: list[Call] = []

    def check(self, group: CopyGroup) -> None:
        self._inner.check(group)

    def backup_layer(self, group: CopyGroup, layer: int, plan: RowPlan) -> None:
        self.calls.append(("d2h", group.components, group.layers[layer]))
        self._inner.backup_layer(group, layer, plan)

    def backup_layers(self, group: CopyGroup, plan: RowPlan) -> None:
        self.calls.append(("d2h", group.components, None))
        self._inner.backup_layers(group, plan)

    def load_layer(self, group: CopyGroup, layer: int, plan: RowPlan) -> None:
        self.calls.append(("h2d", group.components, group.layers[layer]))
        self._inner.load_layer(group, layer, plan)


def backend_of(name: str, operators: ReferenceOperators) -> CopyBackend:
    """On CPU: the operators' stand-ins, Triton's interpreter. ``kernel+triton``: kernel whose page-first D2H is the Triton kernel."""
    triton = RowsBackend(TritonBackend(interpret=True))
    if name == "triton":
        return triton
    return make_backend(
        name.removesuffix("+triton"),
        operators=operators,
        index_device="cpu",
        page_first_d2h=triton if name.endswith("+triton") else None,
    )


@dataclass
class CopyRig:
    """Pools over guarded buffers filled with bytes that differ everywhere. ``wrap_backend``, ``operators``, ``pool_class``: for faults."""

    shape: KVShape
    layout: str
    backend: str
    page_size: int
    operators: ReferenceOperators = field(default_factory=ReferenceOperators)
    wrap_backend: Callable[[CopyBackend], CopyBackend] = lambda backend: backend
    pool_class: type[BufferedHostPool] | None = None

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(7)
        shape, page = self.shape, self.page_size
        self._device_wholes: dict[tuple[str, int], torch.Tensor] = {}
        buffers: dict[str, list[torch.Tensor | None]] = {}
        for name, elements in shape.components.items():
            buffers[name] = [None] * shape.layers
            for layer in shape.layers_of(name):
                size = DEVICE_PAGES * page * shape.item_bytes(name)
                whole = torch.randint(0, 256, (size + 2 * GUARD_BYTES,), dtype=torch.uint8, generator=generator)
                self._device_wholes[name, layer] = whole
                inner = whole[GUARD_BYTES : GUARD_BYTES + size].view(shape.dtype_of(name))
                buffers[name][layer] = inner.view(-1, elements * (page if name == "indexer" else 1))
        self.device = DevicePool.adopt(shape, buffers, page_size=page)
        memory = GuardedMemory()
        self.recorder: Recorder | None = None
        options: dict[str, Any] = {"memory": memory, "backends": self._backend}
        slots = HOST_PAGES * page
        if self.pool_class is None:
            self.host = make_host_pool(self.layout, shape, slots, page, **options)
        else:
            self.host = self.pool_class(shape, slots, page, **options)
        self._host_wholes = dict(zip(shape.components, memory.wholes, strict=True))
        for whole in memory.wholes:
            whole.copy_(torch.randint(0, 256, whole.shape, dtype=torch.uint8, generator=generator))
        self.operators.register(*self.device.tensors(), *self.host.tensors())

    def _backend(self, io_backend: str) -> CopyBackend:
        self.recorder = Recorder(self.wrap_backend(backend_of(self.backend, self.operators)))
        return self.recorder

    @property
    def io_backend(self) -> str:
        return self.backend.removesuffix("+triton")

    # -- what should be there --------------------------------------------------------------------------------------------------
    def raw(self) -> dict[tuple[str, str, int], Bytes]:
        """Every byte of every buffer, guards included."""
        device = {("device", name, layer): whole.numpy().copy() for (name, layer), whole in self._device_wholes.items()}
        return device | {("host", name, 0): whole.numpy().copy() for name, whole in self._host_wholes.items()}

    def device_at(self, component: str, slots: Sequence[int]) -> npt.NDArray[np.int64]:
        """Offset of each token in its layer's device buffer. By page it is the same: the page's tokens lie one after the other."""
        return np.asarray(slots, dtype=np.int64) * self.shape.item_bytes(component)

    def host_at(self, component: str, layer: int, slots: Sequence[int]) -> npt.NDArray[np.int64]:
        """Offset of each token in a host buffer, by R32: an indexer page counts as one row."""
        item, page, local = self.shape.item_bytes(component), self.page_size, self.shape.layers_of(component).index(layer)
        layers, slot = len(self.shape.layers_of(component)), np.asarray(slots, dtype=np.int64)
        if self.layout == "layer_first":
            return (local * HOST_PAGES * page + slot) * item
        if self.layout == "page_first" and component != "indexer":
            return slot * (layers * item) + local * item
        return ((slot // page) * layers + local) * page * item + slot % page * item

    def expected(
        self, before: dict[tuple[str, str, int], Bytes], direction: str, layers: Sequence[int], device: list[int], host: list[int]
    ) -> dict[tuple[str, str, int], Bytes]:
        """What all buffers hold after a copy of ``layers``: one token after the other, from offset to offset."""
        after = {key: content.copy() for key, content in before.items()}
        for name in self.shape.components:
            item = np.arange(self.shape.item_bytes(name)) + GUARD_BYTES
            for layer in self.shape.layers_of(name):
                if layer in layers:
                    on_device = self.device_at(name, device)[:, None] + item
                    on_host = self.host_at(name, layer, host)[:, None] + item
                    device_key, host_key = ("device", name, layer), ("host", name, 0)
                    if direction == "d2h":
                        after[host_key][on_host] = before[device_key][on_device]
                    else:
                        after[device_key][on_device] = before[host_key][on_host]
        return after

    def tokens(self, pages: Sequence[int]) -> list[int]:
        return [page * self.page_size + at for page in pages for at in range(self.page_size)]

    def calls(self, direction: str, layer: int | None) -> list[Call]:
        """Which groups a copy goes through, each once, in copy order (R31)."""
        if self.shape.kind == "mha" and self.shape.item_bytes("k") == self.shape.item_bytes("v"):
            groups: list[tuple[str, ...]] = [("k", "v")]
        else:
            groups = [(name,) for name in self.shape.components]
        return [(direction, names, layer) for names in groups if layer is None or layer in self.shape.layers_of(names[0])]

    # -- the check ---------------------------------------------------------------------------------------------------------------
    def copy(self, direction: str, layer: int | None, device: list[int], host: list[int]) -> None:
        """One copy through the host pool's own methods; ``layer`` None: all."""
        host_rows, device_rows = (torch.tensor(slots, dtype=torch.int64) for slots in (host, device))
        if layer is None:
            self.host.backup_from_device_all_layer(self.device, host_rows, device_rows, self.io_backend)
        elif direction == "d2h":
            self.host.backup_from_device_per_layer(self.device, host_rows, device_rows, layer, self.io_backend)
        else:
            self.host.load_to_device_per_layer(self.device, host_rows, device_rows, layer, self.io_backend)

    def problems(self, streams: Streams, device_pages: Sequence[int], host_pages: Sequence[int]) -> list[str]:
        """Do every D2H layer, D2H of all layers and every H2D layer; say what is wrong with bytes, calls or the copy itself."""
        device, host = self.tokens(device_pages), self.tokens(host_pages)
        every = range(self.shape.layers)
        copies = [*(("d2h", layer) for layer in every), ("d2h", None), *(("h2d", layer) for layer in every)]
        stream = streams.stream("write")
        found: list[str] = []
        for direction, layer in copies:
            what = f"{direction} layer {'all' if layer is None else layer}"
            # Fresh destination bytes, so that a copy that does nothing shows after one that did it.
            for whole in (self._host_wholes if direction == "d2h" else self._device_wholes).values():
                whole.bitwise_xor_(0x5A)
            before = self.raw()
            if self.recorder is not None:
                self.recorder.calls.clear()

            def work(direction: str = direction, layer: int | None = layer) -> None:
                self.copy(direction, layer, device, host)

            stream.submit(work, cost_us=1.0)
            try:
                streams.synchronize(stream.record())
            except StreamError as error:
                found.append(f"{what}: {error}")
                continue
            expected = self.expected(before, direction, list(every) if layer is None else [layer], device, host)
            found += [f"{what}: {line}" for line in differences(expected, self.raw())]
            calls = self.recorder.calls if self.recorder is not None else []
            if calls != self.calls(direction, layer):
                found.append(f"{what}: expected the copies {self.calls(direction, layer)}, found {calls}")
        return found


def differences(expected: dict[tuple[str, str, int], Bytes], found: dict[tuple[str, str, int], Bytes]) -> list[str]:
    """One line for each buffer with a wrong byte: the first one, and how many."""
    lines = []
    for key, content in expected.items():
        wrong = np.flatnonzero(content != found[key])
        if wrong.size:
            lines.append(f"{key}: {wrong.size} wrong bytes, the first at {int(wrong[0]) - GUARD_BYTES}")
    return lines
