"""Host KV pools: pinned-memory twins of a device pool, with SGLang's method names (``memory_pool_host.py``).

Indices are token slots (int64, one dimension, on the CPU), equally long for host and device. A pool moves bytes and keeps no
account of its slots (see :mod:`cphicache.transfer.pools.slots`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from cphicache.transfer.backends import copy_backend, require_supported
from cphicache.transfer.backends.port import RowPair, plan_rows
from cphicache.transfer.pools.device import DevicePool, KVShape, byte_rows


class HostKVPool:
    """What every host layout offers. The base class holds no buffer: its copies raise NotImplementedError."""

    layout = "none"

    def __init__(self, shape: KVShape, slots: int, page_size: int, device: str | torch.device = "cpu") -> None:
        """``slots``: token slots, a whole number of pages of ``page_size`` tokens. ``device``: where the buffers lie."""
        if page_size < 1:
            raise ValueError(f"page_size={page_size}: use at least 1 token a page")
        if slots < page_size or slots % page_size:
            raise ValueError(f"slots={slots} of a host pool: use a whole number of pages of {page_size} tokens, at least one")
        self.shape = shape
        self.slots = slots
        self.page_size = page_size
        self.device = torch.device(device)

    def load_to_device_per_layer(
        self, device_pool: DevicePool, host_indices: torch.Tensor, device_indices: torch.Tensor, layer_id: int, io_backend: str
    ) -> None:
        """Copy layer ``layer_id`` of the host slots to the device slots (H2D)."""
        raise NotImplementedError(f"{type(self).__name__} does not load layer by layer")

    def backup_from_device_all_layer(
        self, device_pool: DevicePool, host_indices: torch.Tensor, device_indices: torch.Tensor, io_backend: str
    ) -> None:
        """Copy every layer of the device slots to the host slots (D2H)."""
        raise NotImplementedError(f"{type(self).__name__} does not back up all layers")

    def backup_from_device_per_layer(
        self, device_pool: DevicePool, host_indices: torch.Tensor, device_indices: torch.Tensor, layer_id: int, io_backend: str
    ) -> None:
        """Copy layer ``layer_id`` of the device slots to the host slots (D2H)."""
        raise NotImplementedError(f"{type(self).__name__} does not back up layer by layer")

    def read(self, layer: int, slots: Sequence[int] | torch.Tensor) -> dict[str, torch.Tensor]:
        """Copies of ``n`` host slots of one layer: component -> uint8 ``[n, item_bytes]``."""
        raise NotImplementedError(f"{type(self).__name__} holds no buffer")


class LayerFirstHostPool(HostKVPool):
    """Layout ``layer_first``: per component one tensor ``[layers, slots, item elements]``, the device pool's own order."""

    layout = "layer_first"

    def __init__(self, shape: KVShape, slots: int, page_size: int, device: str | torch.device = "cpu") -> None:
        """As :class:`HostKVPool`; allocates zeroed buffers of ``layers x slots x layer_bytes`` bytes in all."""
        super().__init__(shape, slots, page_size, device)
        self._buffers = {
            name: torch.zeros((shape.layers, slots, elements), dtype=shape.dtype, device=self.device)
            for name, elements in shape.components.items()
        }

    def rows(self, layer: int, component: str) -> torch.Tensor:
        """The uint8 view ``[slots, item_bytes]`` of one layer and component (shared memory)."""
        return byte_rows(self._buffers[component][layer])

    def read(self, layer: int, slots: Sequence[int] | torch.Tensor) -> dict[str, torch.Tensor]:
        """Copies of ``n`` host slots of one layer: component -> uint8 ``[n, item_bytes]``."""
        index = torch.as_tensor(slots, dtype=torch.int64)
        return {name: self.rows(layer, name)[index] for name in self.shape.components}

    def load_to_device_per_layer(
        self, device_pool: DevicePool, host_indices: torch.Tensor, device_indices: torch.Tensor, layer_id: int, io_backend: str
    ) -> None:
        """Copy layer ``layer_id`` of the host slots to the device slots (H2D)."""
        self._require_twin(device_pool, io_backend)
        plan = plan_rows(host_indices, device_indices, self.slots, device_pool.slots)
        copy_backend(io_backend).copy_rows([pair.reversed() for pair in self._pairs(device_pool, layer_id)], plan)

    def backup_from_device_all_layer(
        self, device_pool: DevicePool, host_indices: torch.Tensor, device_indices: torch.Tensor, io_backend: str
    ) -> None:
        """Copy every layer of the device slots to the host slots (D2H)."""
        self._require_twin(device_pool, io_backend)
        plan = plan_rows(device_indices, host_indices, device_pool.slots, self.slots)
        pairs = [pair for layer in range(self.shape.layers) for pair in self._pairs(device_pool, layer)]
        copy_backend(io_backend).copy_rows(pairs, plan)

    def backup_from_device_per_layer(
        self, device_pool: DevicePool, host_indices: torch.Tensor, device_indices: torch.Tensor, layer_id: int, io_backend: str
    ) -> None:
        """Copy layer ``layer_id`` of the device slots to the host slots (D2H)."""
        self._require_twin(device_pool, io_backend)
        plan = plan_rows(device_indices, host_indices, device_pool.slots, self.slots)
        copy_backend(io_backend).copy_rows(self._pairs(device_pool, layer_id), plan)

    def _pairs(self, device_pool: DevicePool, layer: int) -> list[RowPair]:
        return [RowPair(device_pool.rows(layer, name), self.rows(layer, name)) for name in self.shape.components]

    def _require_twin(self, device_pool: DevicePool, io_backend: str) -> None:
        require_supported(self.shape.kind, self.layout, io_backend)
        if device_pool.shape is not self.shape and device_pool.shape != self.shape:
            raise ValueError(f"device pool of {device_pool.shape} with a host pool of {self.shape}: use the same shape for both")


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
        require_supported(host_pool.shape.kind, host_pool.layout, io_backend)
        if host_pool.shape != device_pools[payload].shape:
            raise ValueError(
                f"{payload}: device pool of {device_pools[payload].shape}, host pool of {host_pool.shape}: use one shape"
            )
        if host_pool.page_size != page_size:
            raise ValueError(f"{payload}: host pool page_size={host_pool.page_size}, layout page_size={page_size}: use one")
