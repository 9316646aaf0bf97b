"""One rank's device KV pool: one tensor per (layer, component), indexed by physical token slot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import torch

COMPONENTS_BY_KIND: Mapping[str, tuple[str, ...]] = MappingProxyType({"mla": ("latent",), "mha": ("k", "v")})
"""The buffers of a layer, in copy order. MLA: one latent buffer. MHA: K and V."""


@dataclass(frozen=True, slots=True)
class KVShape:
    """What one token of one payload is made of.

    ``kind``: ``mla`` or ``mha``. ``layers``: layers of the payload. ``components``: item elements per token and layer, by name
    (``latent`` for MLA, ``k`` and ``v`` for MHA). ``dtype``: of the elements. Raises ValueError for anything else.
    """

    kind: str
    layers: int
    components: Mapping[str, int] = field(hash=False)
    dtype: torch.dtype

    def __post_init__(self) -> None:
        if self.kind not in COMPONENTS_BY_KIND:
            raise ValueError(f"KV pool kind {self.kind!r} is not supported: use one of {sorted(COMPONENTS_BY_KIND)}")
        names = COMPONENTS_BY_KIND[self.kind]
        if set(self.components) != set(names):
            raise ValueError(f"components={sorted(self.components)} of a {self.kind} pool: give exactly {list(names)}")
        if self.layers < 1:
            raise ValueError(f"layers={self.layers}: a payload has at least one layer")
        for name, elements in self.components.items():
            if elements < 1:
                raise ValueError(f"components[{name!r}]={elements}: a token has at least one element")
        object.__setattr__(self, "components", MappingProxyType({name: self.components[name] for name in names}))

    def item_bytes(self, component: str) -> int:
        """Bytes of one token of ``component`` in one layer."""
        return self.components[component] * self.dtype.itemsize

    @property
    def layer_bytes(self) -> int:
        """Bytes of one token in one layer, all components."""
        return sum(self.item_bytes(name) for name in self.components)


def byte_rows(buffer: torch.Tensor) -> torch.Tensor:
    """A uint8 view ``[slots, item_bytes]`` of ``buffer`` ``[slots, item elements]`` (any dtype, dense rows); shares memory."""
    return buffer.view(torch.uint8)


class DevicePool:
    """KV of one payload on one rank: for each (layer, component) a tensor ``[slots, item elements]`` of ``shape.dtype``.

    Slot numbers are physical locs. Bytes go in and out as uint8, so that every dtype, fp8 included, is moved bit by bit.
    """

    __slots__ = ("_buffers", "_rows", "shape", "slots")

    def __init__(self, shape: KVShape, slots: int, *, device: str | torch.device = "cpu") -> None:
        if slots < 1:
            raise ValueError(f"slots={slots}: a device pool has at least one token slot")
        self._hold(
            shape,
            {
                name: [torch.zeros((slots, elements), dtype=shape.dtype, device=device) for _ in range(shape.layers)]
                for name, elements in shape.components.items()
            },
        )

    @classmethod
    def adopt(cls, shape: KVShape, buffers: Mapping[str, Sequence[torch.Tensor]]) -> DevicePool:
        """A pool over tensors that somebody else allocated (the model runner): one list of per-layer tensors a component.

        A tensor is ``[slots, ...]``, contiguous, of ``shape.dtype``, with ``shape.components[name]`` elements a slot, and all of
        them have the same number of slots. Raises ValueError naming component, layer and what is wrong.
        """
        if set(buffers) != set(shape.components):
            raise ValueError(f"buffers={sorted(buffers)} of a {shape.kind} pool: give exactly {list(shape.components)}")
        held: dict[str, list[torch.Tensor]] = {}
        slots: int | None = None
        for name, elements in shape.components.items():
            layers = buffers[name]
            if len(layers) != shape.layers:
                raise ValueError(f"buffers[{name!r}] has {len(layers)} tensors: give one for each of the {shape.layers} layers")
            held[name] = []
            for layer, tensor in enumerate(layers):
                where = f"buffers[{name!r}][{layer}]"
                if tensor.dtype != shape.dtype:
                    raise ValueError(f"{where} is {tensor.dtype}: the pool's shape says {shape.dtype}")
                if tensor.dim() < 2 or tensor[:1].numel() != elements:
                    raise ValueError(
                        f"{where} has shape {list(tensor.shape)}: expected [slots, ...] with {elements} elements a slot"
                    )
                if not tensor.is_contiguous():
                    raise ValueError(f"{where} is not contiguous (strides {tensor.stride()}): adopt the dense buffer")
                slots = tensor.shape[0] if slots is None else slots
                if tensor.shape[0] != slots:
                    raise ValueError(f"{where} has {tensor.shape[0]} slots, others have {slots}: all buffers need the same slots")
                held[name].append(tensor.view(tensor.shape[0], elements))
        pool = cls.__new__(cls)
        pool._hold(shape, held)
        return pool

    def _hold(self, shape: KVShape, buffers: dict[str, list[torch.Tensor]]) -> None:
        self.shape = shape
        self._buffers = buffers
        self._rows = {name: [byte_rows(buffer) for buffer in layers] for name, layers in buffers.items()}
        self.slots = next(iter(buffers.values()))[0].shape[0]

    def buffer(self, layer: int, component: str) -> torch.Tensor:
        """The tensor ``[slots, item elements]`` of one layer and component (shared memory)."""
        return self._buffers[component][layer]

    def rows(self, layer: int, component: str) -> torch.Tensor:
        """The uint8 view ``[slots, item_bytes]`` of one layer and component (shared memory)."""
        return self._rows[component][layer]

    def store(self, layer: int, slots: Sequence[int] | torch.Tensor, items: Mapping[str, torch.Tensor]) -> None:
        """Write ``items`` (component -> uint8 ``[n, item_bytes]``) to ``n`` slots of one layer, as the forward's KV store does."""
        index = torch.as_tensor(slots, dtype=torch.int64)
        for name in self.shape.components:
            self._rows[name][layer][index] = items[name]

    def read(self, layer: int, slots: Sequence[int] | torch.Tensor) -> dict[str, torch.Tensor]:
        """Copies of ``n`` slots of one layer: component -> uint8 ``[n, item_bytes]``."""
        index = torch.as_tensor(slots, dtype=torch.int64)
        return {name: self._rows[name][layer][index] for name in self.shape.components}
