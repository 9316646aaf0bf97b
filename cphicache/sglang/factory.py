"""Builds the cache of one scheduler process: pools, streams, transfer, engine, adapter."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import asdict
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from sglang.srt.runtime_context import get_disagg, get_memory, get_parallel, get_schedule, get_serving, get_spec

from cphicache import __version__
from cphicache.engine import CacheConfig, CpHiRadixCache, WriteBackShort, WritePolicy
from cphicache.events import EventLog, Level, rank_log_path
from cphicache.sglang import hooks
from cphicache.sglang.allocator import ServerAllocator
from cphicache.sglang.checks import check_start, check_version
from cphicache.sglang.contracts import installed_contract
from cphicache.sglang.counter import LayerCounter
from cphicache.sglang.interleaved import InterleavedServerAllocator
from cphicache.sglang.metrics import ServerMetrics
from cphicache.sglang.pools import TARGET, adopt_pools, by_payload
from cphicache.sglang.prefix_cache import CphicachePrefixCache
from cphicache.sglang.ranks import Ranks, members_of
from cphicache.sglang.refusal import SglangRefused, say
from cphicache.sglang.settings import Settings, load_settings
from cphicache.sglang.streams import CurrentStream, HostForwardStreams
from cphicache.spaces.layout import CpSharedKVLayout
from cphicache.transfer.budget import HostBudget, host_budget, memory_limits
from cphicache.transfer.faults import CopyFaults
from cphicache.transfer.pools.device import DevicePool
from cphicache.transfer.pools.host import make_host_pool
from cphicache.transfer.pools.memory import HostMemory
from cphicache.transfer.rank import RankTransfer
from cphicache.transfer.streams.cuda import CudaStreams
from cphicache.transfer.streams.port import Streams


def build_cache(context: Any, problem: str | None = None, faults: CopyFaults | None = None) -> CphicachePrefixCache:
    """The backend's factory. ``problem``: what went wrong when the plug-in was loaded; ``faults``: planned failures (tests).

    Raises :class:`SglangRefused` and other ValueErrors, and RuntimeErrors for what the system does not give (host memory, a log file,
    a rank that does not come), told on stderr in one line too. What was opened until then is closed.
    """
    opened = ExitStack()
    try:
        if problem is not None:
            raise SglangRefused(problem)
        return _build(context, load_settings(os.environ), faults, opened)
    except BaseException as error:
        if isinstance(error, ValueError | RuntimeError):
            say(f"does not start: {error}")
        with opened:
            raise


def _build(context: Any, settings: Settings, faults: CopyFaults | None, opened: ExitStack) -> CphicachePrefixCache:
    """``opened``: gets everything that is to be closed, in order; the cache closes it when it ends."""
    memory, contract = get_memory(), installed_contract()
    check_version(contract)
    check_start(context, memory, get_disagg(), get_serving(), get_spec(), get_parallel())
    params = context.params
    page_size, server = params.page_size, params.token_to_kv_pool_allocator
    server_pools = by_payload(server.get_kvcache(), hooks.draft_pools())
    device_pools = adopt_pools(server_pools, page_size)
    layout, allocator = adopt_allocator(server)
    local_ranks = max(context.tp_size // get_parallel().nnodes, 1)
    budget = _budget(memory, device_pools, page_size, server.size // layout.cp_size, local_ranks)
    device = torch.device(server.device)
    io_backend = settings.io_backend or ("torch" if device.type == "cpu" else memory.hicache_io_backend)
    host_memory = opened.enter_context(closing(HostMemory.for_device(device)))
    host_pools = {
        payload: make_host_pool(memory.hicache_mem_layout, pool.shape, budget.slots, page_size, memory=host_memory)
        for payload, pool in device_pools.items()
    }
    streams = opened.enter_context(closing(_streams(device, context)))
    transfer = RankTransfer(
        layout,
        device_pools,
        host_pools,
        streams,
        io_backend=io_backend,
        faults=faults,
    )
    config = CacheConfig(
        page_size=page_size,
        cp_size=layout.cp_size,
        base=layout.base,
        usable_pages=len(allocator.usable_pages),
        payloads=tuple((payload, pool.shape.layers) for payload, pool in device_pools.items()),
        host_slots=budget.slots,
        policy=WritePolicy(memory.hicache_write_policy),
        eviction_policy=_eviction_policy(params),
        reclaim_device_valid=settings.reclaim_device_valid,
        overlap=settings.overlap,
        selective_hits=settings.selective_hits,
        max_deferral_ticks=settings.max_deferral_ticks,
        max_retries=settings.max_retries,
        load_back_threshold=settings.load_back_threshold,
        write_back_short=WriteBackShort(settings.write_back_short),
    )
    ranks = Ranks(members_of(params), settings.rank_timeout_s)
    opened.callback(ranks.leave)
    effective = asdict(config) | {
        "device_pools": {payload: type(pool).__name__ for payload, pool in server_pools.items()},
        "token_bytes": {payload: pool.shape.token_bytes for payload, pool in device_pools.items()},
        "host_layout": memory.hicache_mem_layout,
        "io_backend": io_backend,
        "host_bytes": budget.size_bytes,
        "log": settings.log or None,
        "ranks": ranks.size,
    }
    ranks.check_equal(
        {"version": __version__, "torch": str(torch.__version__)} | {name: str(value) for name, value in effective.items()}
    )
    log = _log(settings, ranks)
    if log is not None:
        opened.enter_context(log)
    engine = CpHiRadixCache(config, transfer, ranks.reducer, log, allocator=allocator)

    metrics = None
    if params.enable_metrics and ServerMetrics.are_collected():
        token_bytes = sum(pool.shape.token_bytes for pool in device_pools.values())
        metrics = ServerMetrics(ranks.rank, engine, lambda: transfer.counters, token_bytes=token_bytes, log=log)

    def note_tick(tick: int) -> None:
        ranks.note_tick(tick)
        if metrics is not None:
            metrics.tick()

    cache: CphicachePrefixCache = contract.cache_class()(
        params, engine, transfer, pools=server_pools, alone=ranks.size == 1, on_tick=note_tick, close=opened.close
    )
    counters = {payload: LayerCounter(cache, payload) for payload in server_pools}
    for payload, pool in server_pools.items():
        pool.register_layer_transfer_counter(counters[payload])
    context.tp_worker.register_hicache_layer_transfer_counter(counters[TARGET])
    if ranks.rank == 0:
        say("configuration: " + " ".join(f"{name}={value}" for name, value in effective.items()))
    return cache


def adopt_allocator(server: Any) -> tuple[CpSharedKVLayout, ServerAllocator]:
    """Where SGLang's allocator places the pages, and the engine's view of it. Raises :class:`SglangRefused`."""
    shards = getattr(server, "shard_size", 1)
    if shards == 1:
        return CpSharedKVLayout(server.page_size, 1, 0), ServerAllocator(server)
    if server.shard_spec is None:
        raise SglangRefused(f"device allocator {type(server).__name__} does not say which of {shards} shards this rank is")
    return CpSharedKVLayout(server.page_size, shards, server.shard_spec.shard_rank, base=0), InterleavedServerAllocator(server)


def _budget(memory: Any, pools: Mapping[str, DevicePool], page_size: int, device_tokens: int, ranks_here: int) -> HostBudget:
    """``--hicache-size`` (GB of 10**9 bytes a rank) wins over ``--hicache-ratio``, as in SGLang."""
    # SGLang's own host pools have a page more than the whole ones that the ratio gives: a part of a page counts as one.
    pages = int(Fraction(str(memory.hicache_ratio)) * device_tokens) // page_size + 1
    chosen: dict[str, Any] = {"tokens": pages * page_size}
    token_bytes = {payload: pool.shape.token_bytes for payload, pool in pools.items()}
    if memory.hicache_size and memory.hicache_size > 0:
        chosen = {"gib": memory.hicache_size * 1e9 / 2**30}
    return host_budget(token_bytes, page_size, ranks_here=ranks_here, limits=memory_limits(), **chosen)


def _streams(device: torch.device, context: Any) -> Streams:
    if device.type == "cpu":
        return HostForwardStreams()
    if device.type != "cuda":
        raise SglangRefused(f"device {device.type} is not supported: use cuda or cpu")
    if get_schedule().disable_overlap_schedule:
        return CudaStreams(device, compute=CurrentStream(device))  # the forward runs on the scheduler's own, which is made later
    return CudaStreams(device, compute=context.tp_worker.model_runner.forward_stream)


def _eviction_policy(params: Any) -> str:
    """SGLang's policy by the engine's name for it: that has the only parameter that SGLang knows in it."""
    given = dict(params.eviction_policy_config or {})
    hits = given.pop("protected_threshold", None) if params.eviction_policy == "slru" else None
    if given:
        raise SglangRefused(f"--radix-eviction-policy-config {given}: {params.eviction_policy} has no such parameter; leave it out")
    return params.eviction_policy if hits is None else f"slru-{hits}"


def _log(settings: Settings, ranks: Ranks) -> EventLog | None:
    if not settings.log or settings.log_level == "off":
        return None
    path = rank_log_path(Path(settings.log), ranks.rank, ranks.size)
    if get_parallel().dp_size > 1:  # replicas are servers of their own that do not know of each other
        path = path.with_name(f"{path.stem}.pid{os.getpid()}{path.suffix}")
    level = Level[settings.log_level.upper()]
    return EventLog(path, rank=ranks.rank, level=level, wall_clock=time.time, header={"server": "sglang", "ranks": ranks.size})
