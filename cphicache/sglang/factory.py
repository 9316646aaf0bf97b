"""Builds the cache of one scheduler process: pools, streams, transfer, engine, adapter."""

from __future__ import annotations

import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from sglang.srt.runtime_context import get_disagg, get_memory, get_schedule, get_serving, get_spec

from cphicache.agree.local import SingleReducer
from cphicache.engine import CacheConfig, CpHiRadixCache, WriteBackShort, WritePolicy
from cphicache.events import EventLog, Level
from cphicache.sglang.allocator import ServerAllocator
from cphicache.sglang.checks import check_start, check_version
from cphicache.sglang.contracts import installed_contract
from cphicache.sglang.counter import LayerCounter
from cphicache.sglang.pools import adopt_pool
from cphicache.sglang.prefix_cache import CphicachePrefixCache
from cphicache.sglang.refusal import SglangRefused, say
from cphicache.sglang.settings import Settings, load_settings
from cphicache.sglang.streams import HostForwardStreams
from cphicache.spaces.layout import CpSharedKVLayout
from cphicache.transfer.budget import HostBudget, host_budget, memory_limits
from cphicache.transfer.faults import CopyFaults
from cphicache.transfer.pools.device import DevicePool
from cphicache.transfer.pools.host import make_host_pool
from cphicache.transfer.pools.memory import HostMemory
from cphicache.transfer.rank import RankTransfer
from cphicache.transfer.streams.cuda import CudaStreams
from cphicache.transfer.streams.port import Streams

PAYLOAD = "target"


def build_cache(context: Any, problem: str | None = None, faults: CopyFaults | None = None) -> CphicachePrefixCache:
    """The backend's factory. ``problem``: what went wrong when the plug-in was loaded; ``faults``: planned failures (tests).

    Raises :class:`SglangRefused` and other ValueErrors, told on stderr in one line too.
    """
    try:
        if problem is not None:
            raise SglangRefused(problem)
        return _build(context, load_settings(os.environ), faults)
    except ValueError as error:
        say(f"does not start: {error}")
        raise


def _build(context: Any, settings: Settings, faults: CopyFaults | None) -> CphicachePrefixCache:
    memory, contract = get_memory(), installed_contract()
    check_version(contract)
    check_start(context, memory, get_disagg(), get_serving(), get_spec())
    params = context.params
    page_size, server = params.page_size, params.token_to_kv_pool_allocator
    kvcache = server.get_kvcache()
    device_pool = adopt_pool(kvcache, page_size)
    budget = _budget(memory, device_pool, page_size, server.size)
    device = torch.device(server.device)
    io_backend = settings.io_backend or ("torch" if device.type == "cpu" else memory.hicache_io_backend)
    host_memory = HostMemory.for_device(device)
    host_pool = make_host_pool(memory.hicache_mem_layout, device_pool.shape, budget.slots, page_size, memory=host_memory)
    streams = _streams(device, context)
    transfer = RankTransfer(
        CpSharedKVLayout(page_size, 1, 0),
        {PAYLOAD: device_pool},
        {PAYLOAD: host_pool},
        streams,
        io_backend=io_backend,
        faults=faults,
    )
    config = CacheConfig(
        page_size=page_size,
        cp_size=1,
        usable_pages=server.size // page_size,
        payloads=((PAYLOAD, device_pool.shape.layers),),
        host_slots=budget.slots,
        policy=WritePolicy(memory.hicache_write_policy),
        eviction_policy=params.eviction_policy,
        reclaim_device_valid=settings.reclaim_device_valid,
        overlap=settings.overlap,
        selective_hits=settings.selective_hits,
        max_deferral_ticks=settings.max_deferral_ticks,
        max_retries=settings.max_retries,
        load_back_threshold=settings.load_back_threshold,
        write_back_short=WriteBackShort(settings.write_back_short),
    )
    log = _log(settings)
    engine = CpHiRadixCache(config, transfer, SingleReducer(), log, allocator=ServerAllocator(server))

    def close() -> None:
        streams.close()
        host_memory.close()
        if log is not None:
            log.close()

    cache: CphicachePrefixCache = contract.cache_class()(params, engine, transfer, start_layer=kvcache.start_layer, close=close)
    counter = LayerCounter(cache)
    kvcache.register_layer_transfer_counter(counter)
    context.tp_worker.register_hicache_layer_transfer_counter(counter)
    effective = asdict(config) | {
        "device_pool": type(kvcache).__name__,
        "host_layout": memory.hicache_mem_layout,
        "io_backend": io_backend,
        "host_bytes": budget.size_bytes,
        "log": settings.log or None,
    }
    say("configuration: " + " ".join(f"{name}={value}" for name, value in effective.items()))
    return cache


def _budget(memory: Any, pool: DevicePool, page_size: int, device_tokens: int) -> HostBudget:
    """``--hicache-size`` (GB of 10**9 bytes) wins over ``--hicache-ratio``, as in SGLang."""
    token_bytes = {PAYLOAD: pool.shape.token_bytes}
    if memory.hicache_size and memory.hicache_size > 0:
        return host_budget(token_bytes, page_size, gib=memory.hicache_size * 1e9 / 2**30, limits=memory_limits())
    return host_budget(token_bytes, page_size, ratio=memory.hicache_ratio, device_slots=device_tokens, limits=memory_limits())


def _streams(device: torch.device, context: Any) -> Streams:
    if device.type == "cpu":
        return HostForwardStreams()
    if device.type != "cuda":
        raise SglangRefused(f"device {device.type} is not supported: use cuda or cpu")
    if get_schedule().disable_overlap_schedule:
        raise SglangRefused(
            "--disable-overlap-schedule on a GPU is not supported yet: the copies are ordered after the forward stream"
        )
    return CudaStreams(device, compute=context.tp_worker.model_runner.forward_stream)


def _log(settings: Settings) -> EventLog | None:
    if not settings.log or settings.log_level == "off":
        return None
    return EventLog(
        Path(settings.log), rank=0, level=Level[settings.log_level.upper()], wall_clock=time.time, header={"server": "sglang"}
    )
