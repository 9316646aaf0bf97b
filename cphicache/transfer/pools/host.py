"""Host KV pools: pinned-memory twins of a device pool, with SGLang's method names (``memory_pool_host.py``).

Indices are token slots (int64, one dimension, on the CPU), equally long for host and device, or whole pages of them
(:class:`~cphicache.transfer.backends.port.PageSlots` on both sides). A pool moves bytes and keeps no account of its slots (see
:mod:`cphicache.transfer.pools.slots`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from weakref import WeakKeyDictionary, ref

import torch

from cphicache.transfer.backends import UnsupportedCombination, copy_backend, require_supported
from cphicache.transfer.backends.port import CopyBackend, CopyGroup, Indices, PageSlots, RowPlan, plan_pages, plan_rows
from cphicache.transfer.pools.device import DevicePool, KVShape
from cphicache.transfer.pools.memory import HostMemory
from cphicache.transfer.support import BY_PAGE

Backends = Callable[[str], CopyBackend]


class HostKVPool:
    """What every host layout offers. The base class holds no buffer: its copies raise NotImplementedError."""

    layout = "none"

    def __init__(self, shape: KVShape, slots: int, page_size: int) -> None:
        """``slots``: token slots, a whole number of pages of ``page_size`` tokens."""
        if page_size < 1:
            raise ValueError(f"page_size={page_size}: use at least 1 token a page")
        if slots < page_size or slots % page_size:
            raise ValueError(f"slots={slots} of a host pool: use a whole number of pages of {page_size} tokens, at least one")
        self.shape = shape
        self.slots = slots
        self.page_size = page_size

    def check_twin(self, device_pool: DevicePool, io_backend: str) -> None:
        """Raise unless this pool, the device pool and the backend can copy everything that a token is made of (R32, R35)."""
        require_supported(self.shape.kind, self.layout, io_backend)

    def load_to_device_per_layer(
        self, device_pool: DevicePool, host_indices: Indices, device_indices: Indices, layer_id: int, io_backend: str
    ) -> None:
        """Copy layer ``layer_id`` of the host slots to the device slots (H2D)."""
        raise NotImplementedError(f"{type(self).__name__} does not load layer by layer")

    def backup_from_device_all_layer(
        self, device_pool: DevicePool, host_indices: Indices, device_indices: Indices, io_backend: str
    ) -> None:
        """Copy every layer of the device slots to the host slots (D2H)."""
        raise NotImplementedError(f"{type(self).__name__} does not back up all layers")

    def backup_from_device_per_layer(
        self, device_pool: DevicePool, host_indices: Indices, device_indices: Indices, layer_id: int, io_backend: str
    ) -> None:
        """Copy layer ``layer_id`` of the device slots to the host slots (D2H)."""
        raise NotImplementedError(f"{type(self).__name__} does not back up layer by layer")

    def read(self, layer: int, slots: Sequence[int] | torch.Tensor) -> dict[str, torch.Tensor]:
        """Copies of ``n`` host slots of one layer: component -> uint8 ``[n, item_bytes]``."""
        raise NotImplementedError(f"{type(self).__name__} holds no buffer")


class BufferedHostPool(HostKVPool):
    """A host pool with one buffer a component, in the order of its layout, for the layers that have the component.

    ``memory``: where the buffers come from; ``layers x slots x item_bytes`` bytes each. ``backends``: the copy backend of a name.
    """

    def __init__(
        self,
        shape: KVShape,
        slots: int,
        page_size: int,
        *,
        memory: HostMemory | None = None,
        backends: Backends = copy_backend,
    ) -> None:
        super().__init__(shape, slots, page_size)
        self._backends = backends
        memory = memory or HostMemory()
        self._buffers = {
            name: memory.allocate(len(shape.layers_of(name)) * slots * shape.item_bytes(name)).view(self._dimensions(name))
            for name in shape.components
        }
        self._twins: WeakKeyDictionary[DevicePool, _Twin] = WeakKeyDictionary()
        self._last_twin: tuple[ref[DevicePool], _Twin] | None = None

    def _dimensions(self, component: str) -> tuple[int, ...]:
        rows, page_rows, item_bytes = self._unit(component)
        layers = len(self.shape.layers_of(component))
        match self.layout:
            case "layer_first":
                return layers, rows, item_bytes
            case "page_first":
                return rows, layers, item_bytes
        return rows // page_rows, layers, page_rows, item_bytes

    def _unit(self, component: str) -> tuple[int, int, int]:
        """Rows of a component's buffer, rows a page, bytes a row: by token, or by page where the device has it so."""
        item_bytes = self.shape.item_bytes(component)
        if component in BY_PAGE:
            return self.slots // self.page_size, 1, self.page_size * item_bytes
        return self.slots, self.page_size, item_bytes

    def buffer(self, component: str) -> torch.Tensor:
        """The whole buffer (shared memory), uint8; see :class:`~cphicache.transfer.backends.port.CopyGroup` for its dimensions."""
        return self._buffers[component]

    def tensors(self) -> list[torch.Tensor]:
        """What pointer tables may point to: each buffer, or its layers where the layout has them one after the other."""
        buffers = self._buffers.values()
        return [layer for buffer in buffers for layer in (buffer.unbind(0) if self.layout == "layer_first" else (buffer,))]

    def _items(self, layer: int, component: str) -> torch.Tensor:
        """``[pages, page_size, item_bytes]`` of one layer, shared memory."""
        local = self.shape.layers_of(component).index(layer)
        buffer = self._buffers[component]
        rows = buffer[local] if self.layout == "layer_first" else buffer[:, local]
        return rows.view(self.slots // self.page_size, self.page_size, self.shape.item_bytes(component))

    def read(self, layer: int, slots: Sequence[int] | torch.Tensor) -> dict[str, torch.Tensor]:
        """Copies of ``n`` host slots of one layer: component -> uint8 ``[n, item_bytes]``."""
        index = torch.as_tensor(slots, dtype=torch.int64)
        at = index // self.page_size, index % self.page_size
        return {name: self._items(layer, name)[at] for name in self.shape.components_of(layer)}

    def store(self, layer: int, slots: Sequence[int] | torch.Tensor, items: Mapping[str, torch.Tensor]) -> None:
        """Write ``items`` (component -> uint8 ``[n, item_bytes]``) to ``n`` host slots of one layer."""
        index = torch.as_tensor(slots, dtype=torch.int64)
        for name in self.shape.components_of(layer):
            self._items(layer, name)[index // self.page_size, index % self.page_size] = items[name]

    def load_to_device_per_layer(
        self, device_pool: DevicePool, host_indices: Indices, device_indices: Indices, layer_id: int, io_backend: str
    ) -> None:
        """Copy layer ``layer_id`` of the host slots to the device slots (H2D): each component once, in copy order."""
        twin = self._twin(device_pool, io_backend)
        plan = twin.loads.plan(host_indices, device_indices, self.slots, device_pool.slots)
        for group, local in twin.of_layer(layer_id, plan):
            twin.backend.load_layer(group, local, self._plan_of(group, plan))

    def backup_from_device_all_layer(
        self, device_pool: DevicePool, host_indices: Indices, device_indices: Indices, io_backend: str
    ) -> None:
        """Copy every layer of the device slots to the host slots (D2H): each component once, in copy order."""
        twin = self._twin(device_pool, io_backend)
        plan = twin.backups.plan(device_indices, host_indices, device_pool.slots, self.slots)
        for group in twin.groups if plan.row_count else ():
            twin.backend.backup_layers(group, self._plan_of(group, plan))

    def backup_from_device_per_layer(
        self, device_pool: DevicePool, host_indices: Indices, device_indices: Indices, layer_id: int, io_backend: str
    ) -> None:
        """Copy layer ``layer_id`` of the device slots to the host slots (D2H): each component once, in copy order."""
        twin = self._twin(device_pool, io_backend)
        plan = twin.backups.plan(device_indices, host_indices, device_pool.slots, self.slots)
        for group, local in twin.of_layer(layer_id, plan):
            twin.backend.backup_layer(group, local, self._plan_of(group, plan))

    def check_twin(self, device_pool: DevicePool, io_backend: str) -> None:
        """Raise unless this pool, the device pool and the backend can copy everything that a token is made of (R32, R35)."""
        self._twin(device_pool, io_backend)

    def _plan_of(self, group: CopyGroup, plan: RowPlan) -> RowPlan:
        return plan.by_page(self.page_size) if group.by_page else plan

    def _twin(self, device_pool: DevicePool, io_backend: str) -> _Twin:
        last = self._last_twin
        if last is not None and last[0]() is device_pool and last[1].io_backend == io_backend:
            return last[1]
        known = self._twins.get(device_pool)
        if known is not None and known.io_backend == io_backend:
            self._last_twin = ref(device_pool), known
            return known
        require_supported(self.shape.kind, self.layout, io_backend)
        if device_pool.shape != self.shape:
            raise ValueError(f"device pool of {device_pool.shape} with a host pool of {self.shape}: use the same shape for both")
        if device_pool.page_size not in (None, self.page_size):
            raise ValueError(f"device pool page_size={device_pool.page_size}, host pool page_size={self.page_size}: use one")
        backend = self._backends(io_backend)
        groups = self._groups(device_pool)
        for group in groups:
            backend.check(group)
        twin = self._twins[device_pool] = _Twin(io_backend, backend, groups)
        return twin

    def _groups(self, device_pool: DevicePool) -> list[CopyGroup]:
        """One group a component, in copy order; K and V share one when their items are of one size."""
        names = list(self.shape.components)
        alike = len({self.shape.item_bytes(name) for name in names}) == 1
        together = [tuple(names)] if self.shape.kind == "mha" and alike else [(name,) for name in names]
        groups = []
        for components in together:
            first = components[0]
            _, page_rows, item_bytes = self._unit(first)
            layers = self.shape.layers_of(first)
            groups.append(
                CopyGroup(
                    components=components,
                    layers=layers,
                    device=tuple(tuple(device_pool.copy_rows(layer, name) for layer in layers) for name in components),
                    host=tuple(self._buffers[name] for name in components),
                    layout=self.layout,
                    item_bytes=item_bytes,
                    page_rows=page_rows,
                    by_page=first in BY_PAGE,
                )
            )
        return groups


class _Plans:
    """The last plan of one direction: a batch's layers are copied by the same indices, and are planned once."""

    __slots__ = ("_last",)

    def __init__(self) -> None:
        self._last: tuple[Indices, Indices, tuple[int, int], RowPlan] | None = None

    def plan(self, source: Indices, destination: Indices, source_slots: int, destination_slots: int) -> RowPlan:
        """See :func:`~cphicache.transfer.backends.port.plan_rows`."""
        slots = source_slots, destination_slots
        last = self._last
        if last is not None and last[2] == slots and _same(last[0], source) and _same(last[1], destination):
            return last[3]
        if isinstance(source, PageSlots) and isinstance(destination, PageSlots):
            plan = plan_pages(source, destination, *slots)
        elif isinstance(source, PageSlots) or isinstance(destination, PageSlots):
            raise TypeError("slots on one side, whole pages on the other: give both in one form")
        else:
            source, destination = source.clone(), destination.clone()  # our own: the caller may write to its tensors later
            plan = plan_rows(source, destination, *slots)
        self._last = source, destination, slots, plan
        return plan


def _same(first: Indices, second: Indices) -> bool:
    if isinstance(first, PageSlots) or isinstance(second, PageSlots):
        return first is second
    return first.dtype == second.dtype and first.device == second.device and torch.equal(first, second)


class _Twin:
    """What copies between this host pool and one device pool need."""

    __slots__ = ("backend", "backups", "groups", "io_backend", "loads")

    def __init__(self, io_backend: str, backend: CopyBackend, groups: list[CopyGroup]) -> None:
        self.io_backend = io_backend
        self.backend = backend
        self.groups = groups
        self.backups = _Plans()
        self.loads = _Plans()

    def of_layer(self, layer: int, plan: RowPlan) -> list[tuple[CopyGroup, int]]:
        """The groups that have the layer, with its local number; none when the plan moves nothing. IndexError for no layer."""
        found = [(group, group.layers.index(layer)) for group in self.groups if layer in group.layers]
        if not found:
            raise IndexError(f"layer {layer} is none of the pool's layers {self.groups[0].layers[0]}..{self.groups[0].layers[-1]}")
        return found if plan.row_count else []


class LayerFirstHostPool(BufferedHostPool):
    """Layout ``layer_first``: ``[layers, slots, item]``, the device pool's own order."""

    layout = "layer_first"


class PageFirstHostPool(BufferedHostPool):
    """Layout ``page_first``: ``[slots, layers, item]``: all layers of a token, and so of a page, lie together."""

    layout = "page_first"


class PageFirstDirectHostPool(BufferedHostPool):
    """Layout ``page_first_direct``: ``[pages, layers, page_size, item]``: a page of one layer is one piece."""

    layout = "page_first_direct"


_BY_LAYOUT = {pool.layout: pool for pool in (LayerFirstHostPool, PageFirstHostPool, PageFirstDirectHostPool)}


def make_host_pool(
    layout: str,
    shape: KVShape,
    slots: int,
    page_size: int,
    *,
    memory: HostMemory | None = None,
    backends: Backends = copy_backend,
) -> BufferedHostPool:
    """A host pool of that layout. Raises :class:`UnsupportedCombination` for a layout that is not known."""
    if layout not in _BY_LAYOUT:
        raise UnsupportedCombination(f"layout {layout!r} is not one of {sorted(_BY_LAYOUT)}")
    return _BY_LAYOUT[layout](shape, slots, page_size, memory=memory, backends=backends)


def check_pools(
    device_pools: Mapping[str, DevicePool], host_pools: Mapping[str, HostKVPool], page_size: int, io_backend: str
) -> None:
    """Raise ValueError unless the pools of one rank, by payload, fit each other, ``page_size`` and ``io_backend`` (R35)."""
    for option, pools in (("device_pools", sorted(device_pools)), ("host_pools", sorted(host_pools))):
        if pools not in (["target"], ["draft", "target"]):
            raise ValueError(f"{option} has payloads {pools}: give 'target', and 'draft' where there is a draft model")
    if device_pools.keys() != host_pools.keys():
        raise ValueError(
            f"device pools for {sorted(device_pools)}, host pools for {sorted(host_pools)}: give both for each payload"
        )
    for payload, host_pool in host_pools.items():
        if host_pool.shape != device_pools[payload].shape:
            raise ValueError(
                f"{payload}: device pool of {device_pools[payload].shape}, host pool of {host_pool.shape}: use one shape"
            )
        if host_pool.page_size != page_size:
            raise ValueError(f"{payload}: host pool page_size={host_pool.page_size}, layout page_size={page_size}: use one")
        host_pool.check_twin(device_pools[payload], io_backend)
