"""The pools and the copy backend of a run, by its configuration."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from cphicache.run.config import RunConfig
from cphicache.transfer.backends import BackendUnavailable, copy_backend, make_backend
from cphicache.transfer.backends.port import CopyBackend
from cphicache.transfer.backends.reference import ReferenceOperators
from cphicache.transfer.budget import HostBudget, MemoryLimit, host_budget
from cphicache.transfer.pools.device import DevicePool, KVShape
from cphicache.transfer.pools.host import HostKVPool, make_host_pool
from cphicache.transfer.pools.memory import HostMemory
from cphicache.transfer.streams.cuda import CudaStreams, CudaUnavailable
from cphicache.transfer.support import COMPONENTS_BY_KIND, KV_DTYPES


def require_backend(config: RunConfig) -> None:
    """Raise :class:`~cphicache.transfer.backends.BackendUnavailable`, with the remedy, when the run's backend cannot run here:
    a package or the GPU is missing, or the backend cannot reach pools where the run has them. Tried on pools of one page."""
    memory = HostMemory.for_device(config.device_type)
    try:
        if config.device_type == "cuda":
            CudaStreams().close()
        devices, hosts = make_pools(config, [("target", 1)], config.page_size, config.page_size, memory=memory)
        hosts["target"].check_twin(devices["target"], config.backend)
    except CudaUnavailable as error:
        raise BackendUnavailable(f"--streams {config.streams}: {error}") from error
    except ValueError as error:
        raise BackendUnavailable(str(error)) from error
    finally:
        memory.close()


def require_memory(config: RunConfig, payloads: Sequence[tuple[str, int]], limits: Sequence[MemoryLimit]) -> HostBudget:
    """The host budget of one rank. Raises :class:`~cphicache.transfer.budget.HostBudgetError` when ``limits`` do not leave the host pools
    of all ranks, which this process holds."""
    return host_budget(
        {payload: kv_shape(config, layers).token_bytes for payload, layers in payloads},
        config.page_size,
        tokens=config.host_tokens,
        tokens_over_ranks=config.owners,
        ranks_here=config.cp_size,
        limits=limits,
    )


def kv_shape(config: RunConfig, layers: int) -> KVShape:
    """Shape of a payload's KV."""
    dtype = KV_DTYPES[config.kv_dtype]
    elements = dict.fromkeys(COMPONENTS_BY_KIND[config.kv], config.item_elements)
    indexer_layers = None
    if config.kv == "dsa":
        elements["indexer"] = config.index_item_bytes
        indexer_layers = tuple(range(0, layers, config.index_every))
    return KVShape(
        config.kv,
        layers,
        elements,
        getattr(torch, dtype.torch_name),
        indexer_layers=indexer_layers,
        scales="row" if dtype.packed else "static",
    )


def make_pools(
    config: RunConfig, payloads: Sequence[tuple[str, int]], device_slots: int, host_slots: int, *, memory: HostMemory
) -> tuple[dict[str, DevicePool], dict[str, HostKVPool]]:
    """One rank's device and host pools by payload, each with its own number of layers, where the run's copies go."""
    operators = ReferenceOperators() if config.reference_operators else None
    backends = partial(_backend, config, operators)
    devices: dict[str, DevicePool] = {}
    hosts: dict[str, HostKVPool] = {}
    for payload, layers in payloads:
        shape = kv_shape(config, layers)
        device = devices[payload] = DevicePool(shape, device_slots, page_size=config.page_size, device=config.device_type)
        host = make_host_pool(config.layout, shape, host_slots, config.page_size, memory=memory, backends=backends)
        hosts[payload] = host
        if operators is not None:
            operators.register(*device.tensors(), *host.tensors())
    return devices, hosts


def _backend(config: RunConfig, operators: ReferenceOperators | None, io_backend: str) -> CopyBackend:
    page_first_d2h = make_backend("triton") if config.page_first_d2h == "triton" else None
    if operators is not None:
        return make_backend(io_backend, operators=operators, index_device="cpu", page_first_d2h=page_first_d2h)
    if page_first_d2h is not None:
        return make_backend(io_backend, page_first_d2h=page_first_d2h)
    return copy_backend(io_backend)
