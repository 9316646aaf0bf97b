"""One rank's device KV pool: one tensor per (layer, component), indexed by physical token slot or, for indexer keys, by page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

import torch

from cphicache.transfer.support import BY_PAGE, COMPONENTS_BY_KIND

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8)
"""Element types of a pool. ``uint8``: packed rows, which hold their scales (656 bytes for MLA with 512 + 64)."""


@dataclass(frozen=True, slots=True)
class KVShape:
    """What one token of one payload is made of.

    ``kind``: ``mla``, ``mha`` or ``dsa``. ``layers``: layers of the payload. ``components``: item elements per token and layer, by
    name (``latent``; ``k`` and ``v``; ``latent`` and ``indexer``). ``dtype``: of the elements; ``indexer_dtype``: of the indexer
    keys. ``indexer_layers``: the layers that have indexer keys, None for all. ``scales``: where the scales of an FP8 dtype are:
    ``static`` (constants of the model), ``row`` (inside the item) or ``buffer`` (a buffer of their own, which no copy moves:
    refused). Raises ValueError for anything else.
    """

    kind: str
    layers: int
    components: Mapping[str, int] = field(hash=False)
    dtype: torch.dtype
    indexer_dtype: torch.dtype = torch.uint8
    indexer_layers: tuple[int, ...] | None = None
    scales: Literal["static", "row", "buffer"] = "static"

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
        for option, dtype in (("dtype", self.dtype), ("indexer_dtype", self.indexer_dtype)):
            if dtype not in DTYPES:
                raise ValueError(f"{option}={dtype} is not supported: use one of {', '.join(map(str, DTYPES))}")
        if self.scales == "buffer":
            raise ValueError(
                f"dtype={self.dtype} with scales in a buffer of their own is not supported: they would not be moved with the KV; "
                "use static scales, or packed rows that hold them"
            )
        object.__setattr__(self, "components", MappingProxyType({name: self.components[name] for name in names}))
        object.__setattr__(self, "indexer_layers", self._checked_indexer_layers())

    def _checked_indexer_layers(self) -> tuple[int, ...] | None:
        given = self.indexer_layers
        if self.kind != "dsa":
            if given is not None:
                raise ValueError(f"indexer_layers={list(given)} of a {self.kind} pool: only dsa has indexer keys")
            return None
        layers = tuple(range(self.layers)) if given is None else tuple(given)
        if not layers or list(layers) != sorted(set(layers)) or layers[0] < 0 or layers[-1] >= self.layers:
            raise ValueError(f"indexer_layers={list(layers)}: give ascending layers in [0, {self.layers}), at least one")
        return layers

    def dtype_of(self, component: str) -> torch.dtype:
        """Element type of a component."""
        return self.indexer_dtype if component == "indexer" else self.dtype

    def layers_of(self, component: str) -> tuple[int, ...]:
        """The layers that have the component, ascending."""
        return self.indexer_layers or () if component == "indexer" else tuple(range(self.layers))

    def components_of(self, layer: int) -> tuple[str, ...]:
        """The components of one layer, in copy order."""
        return tuple(name for name in self.components if name != "indexer" or layer in (self.indexer_layers or ()))

    def item_bytes(self, component: str) -> int:
        """Bytes of one token of ``component`` in one layer."""
        return self.components[component] * self.dtype_of(component).itemsize

    def bytes_in_layer(self, layer: int) -> int:
        """Bytes of one token in that layer."""
        return sum(self.item_bytes(name) for name in self.components_of(layer))

    @property
    def layer_bytes(self) -> int:
        """Bytes of one token in a layer that has all components."""
        return sum(self.item_bytes(name) for name in self.components)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token, all layers."""
        return sum(self.item_bytes(name) * len(self.layers_of(name)) for name in self.components)


class DevicePool:
    """KV of one payload on one rank: for each (layer, component) a tensor ``[slots, item elements]``, or for components that are
    indexed by page ``[slots // page_size, page_size * item elements]``.

    Slot numbers are physical locs. Bytes go in and out as uint8, so that every dtype, fp8 included, is moved bit by bit.
    ``page_size`` (tokens) is needed where a component is indexed by page; ``slots`` is whole pages then. ValueError otherwise.
    """

    __slots__ = ("__weakref__", "_buffers", "_rows", "page_size", "shape", "slots")

    def __init__(self, shape: KVShape, slots: int, *, page_size: int | None = None, device: str | torch.device = "cpu") -> None:
        if slots < 1:
            raise ValueError(f"slots={slots}: a device pool has at least one token slot")
        page = _checked_page_size(shape, page_size)
        if slots % page:
            raise ValueError(f"slots={slots}: give whole pages of {page} tokens, which the indexer keys are stored by")
        buffers: dict[str, dict[int, torch.Tensor]] = {}
        for name, elements in shape.components.items():
            unit = page if name in BY_PAGE else 1
            size = (slots // unit, unit * elements)
            buffers[name] = {layer: torch.zeros(size, dtype=shape.dtype_of(name), device=device) for layer in shape.layers_of(name)}
        self._hold(shape, buffers, page_size, slots)

    @classmethod
    def adopt(
        cls, shape: KVShape, buffers: Mapping[str, Sequence[torch.Tensor | None]], *, page_size: int | None = None
    ) -> DevicePool:
        """A pool over tensors that somebody else allocated (the model runner): one list of per-layer tensors a component.

        A tensor is ``[slots, ...]``, contiguous, of the shape's dtype, with ``shape.components[name]`` elements a slot, and all of
        them have the same number of slots. Indexer keys: ``[pages, page_size * elements]``, at least as many pages as the slots
        need, and None or an empty tensor for layers without. Raises ValueError naming component, layer and what is wrong.
        """
        page = _checked_page_size(shape, page_size)
        if set(buffers) != set(shape.components):
            raise ValueError(f"buffers={sorted(buffers)} of a {shape.kind} pool: give exactly {list(shape.components)}")
        held: dict[str, dict[int, torch.Tensor]] = {}
        slots: int | None = None
        for name in shape.components:
            if len(buffers[name]) != shape.layers:
                raise ValueError(
                    f"buffers[{name!r}] has {len(buffers[name])} tensors: give one for each of the {shape.layers} layers"
                )
            held[name] = {}
            for layer, tensor in enumerate(buffers[name]):
                where = f"buffers[{name!r}][{layer}]"
                if layer not in shape.layers_of(name):
                    if tensor is not None and tensor.numel():
                        raise ValueError(
                            f"{where} has bytes, and indexer_layers={list(shape.layers_of(name))}: name the layer there"
                        )
                    continue
                elements = shape.components[name] * (page if name in BY_PAGE else 1)
                rows = _checked_buffer(where, tensor, shape.dtype_of(name), elements, "page" if name in BY_PAGE else "slot")
                if name in BY_PAGE:
                    assert slots is not None, "the latent comes first"
                    if rows.shape[0] * page < slots:
                        raise ValueError(
                            f"{where} has {rows.shape[0]} pages of {page} tokens: {slots} slots need {-(-slots // page)}"
                        )
                else:
                    slots = rows.shape[0] if slots is None else slots
                    if rows.shape[0] != slots:
                        raise ValueError(f"{where} has {rows.shape[0]} slots, others have {slots}: all buffers need the same slots")
                held[name][layer] = rows
        assert slots is not None, "a pool has a component"
        pool = cls.__new__(cls)
        pool._hold(shape, held, page_size, slots // page * page if shape.kind == "dsa" else slots)
        return pool

    def _hold(self, shape: KVShape, buffers: dict[str, dict[int, torch.Tensor]], page_size: int | None, slots: int) -> None:
        self.shape = shape
        self.page_size = page_size
        self.slots = slots
        self._buffers = buffers
        self._rows = {
            name: {layer: buffer.view(torch.uint8) for layer, buffer in layers.items()} for name, layers in buffers.items()
        }

    @property
    def device(self) -> torch.device:
        """Where the buffers lie."""
        return next(iter(next(iter(self._buffers.values())).values())).device

    def buffer(self, layer: int, component: str) -> torch.Tensor:
        """The tensor of one layer and component (shared memory): ``[slots, item elements]``, or by page."""
        return self._buffers[component][layer]

    def copy_rows(self, layer: int, component: str) -> torch.Tensor:
        """What copies move (shared memory): uint8 ``[slots, item_bytes]``, or ``[pages, page_size * item_bytes]`` by page."""
        return self._rows[component][layer]

    def rows(self, layer: int, component: str) -> torch.Tensor:
        """The uint8 view ``[slots, item_bytes]`` of one layer and component (shared memory)."""
        rows = self._rows[component][layer]
        return rows.view(-1, self.shape.item_bytes(component))[: self.slots] if component in BY_PAGE else rows

    def tensors(self) -> list[torch.Tensor]:
        """Every buffer, layer by layer within each component."""
        return [buffer for layers in self._buffers.values() for buffer in layers.values()]

    def store(self, layer: int, slots: Sequence[int] | torch.Tensor, items: Mapping[str, torch.Tensor]) -> None:
        """Write ``items`` (component -> uint8 ``[n, item_bytes]``) to ``n`` slots of one layer, as the forward's KV store does."""
        index = torch.as_tensor(slots, dtype=torch.int64)
        for name in self.shape.components_of(layer):
            rows = self.rows(layer, name)
            rows[index.to(rows.device)] = items[name].to(rows.device)

    def read(self, layer: int, slots: Sequence[int] | torch.Tensor) -> dict[str, torch.Tensor]:
        """Copies of ``n`` slots of one layer: component -> uint8 ``[n, item_bytes]``."""
        index = torch.as_tensor(slots, dtype=torch.int64)
        return {name: self.rows(layer, name)[index] for name in self.shape.components_of(layer)}


def _checked_page_size(shape: KVShape, page_size: int | None) -> int:
    if page_size is not None and page_size < 1:
        raise ValueError(f"page_size={page_size}: use at least 1 token a page")
    if shape.kind == "dsa" and page_size is None:
        raise ValueError("page_size=None of a dsa pool: its indexer keys are stored by page; give the tokens of a page")
    return page_size if shape.kind == "dsa" and page_size is not None else 1


def _checked_buffer(where: str, tensor: torch.Tensor | None, dtype: torch.dtype, elements: int, unit: str) -> torch.Tensor:
    if tensor is None:
        raise ValueError(f"{where} is None: the pool's shape says that the layer has it")
    if tensor.dtype != dtype:
        raise ValueError(f"{where} is {tensor.dtype}: the pool's shape says {dtype}")
    if tensor.dim() < 2 or tensor[:1].numel() != elements:
        raise ValueError(f"{where} has shape {list(tensor.shape)}: expected [{unit}s, ...] with {elements} elements a {unit}")
    if not tensor.is_contiguous():
        raise ValueError(f"{where} is not contiguous (strides {tensor.stride()}): adopt the dense buffer")
    return tensor.view(tensor.shape[0], elements)
