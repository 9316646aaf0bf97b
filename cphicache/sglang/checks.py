"""Fail fast: what cannot work, or is not supported yet, is refused at start with one line."""

from __future__ import annotations

from importlib import metadata
from typing import Any

from cphicache.sglang import hooks
from cphicache.sglang.contracts import CONTRACTS, Contract
from cphicache.sglang.refusal import SglangRefused, say

TESTED = tuple(contract.version for contract in CONTRACTS)
POLICIES = ("lru", "lfu")
"""Eviction policies that both sides have. ``priority``: the requests' priorities do not reach the tree yet."""
ALLOCATORS = ("PagedTokenToKVPoolAllocator", "TokenToKVPoolAllocator")
HOST_POLICIES = ("write_through", "write_through_selective", "write_back")


def check_version(contract: Contract) -> None:
    """Raise :class:`SglangRefused` if the installed SGLang lacks a name of its contract, or a hook did not take. Warn if it is untested."""
    version = metadata.version("sglang")
    tested = ", ".join(TESTED)
    if version not in TESTED:
        say(f"SGLang {version} is not among the tested versions ({tested})")
    lacking = contract.lacking()
    if lacking:
        raise SglangRefused(
            f"SGLang {version} has no {', '.join(lacking)}, unlike {contract.version}, which is nearest: use a tested version ({tested})"
        )
    gone = hooks.missing()
    if gone:
        raise SglangRefused(
            f"SGLang {version}: no hook took on {', '.join(gone)}; use a tested version ({tested}), or look for a plug-in "
            "that has replaced it"
        )


def check_start(context: Any, memory: Any, disaggregation: Any, serving: Any, spec: Any) -> None:
    """Raise :class:`SglangRefused` for the first thing that is in the way. The arguments are SGLang's build context and configuration."""
    params = context.params
    allocator = type(params.token_to_kv_pool_allocator).__name__
    refusals = (
        (
            not context.enable_hierarchical_cache,
            "--radix-cache-backend cphicache without --enable-hierarchical-cache: add that flag",
        ),
        (context.disable_radix_cache, "--disable-radix-cache with --radix-cache-backend cphicache: give one of them"),
        (
            memory.hicache_storage_backend is not None,
            f"--hicache-storage-backend {memory.hicache_storage_backend}: a storage (L3) backend is not supported; drop that option",
        ),
        (
            memory.hicache_host_memory_mode != "cache",
            f"--hicache-host-memory-mode {memory.hicache_host_memory_mode} is not supported: use cache",
        ),
        (context.is_hybrid_swa, "sliding-window (SWA) models are not supported: serve this model with the built-in cache"),
        (context.is_hybrid_ssm, "Mamba and linear-attention models are not supported: serve this model with the built-in cache"),
        (
            spec.speculative_algorithm is not None or params.is_eagle,
            f"--speculative-algorithm {spec.speculative_algorithm}: draft KV is not supported yet; drop that option",
        ),
        (params.pp_size > 1, f"--pp-size {params.pp_size}: pipeline parallelism is not supported; use 1"),
        (context.tp_size > 1, f"--tp-size {context.tp_size}: several ranks are not supported yet inside SGLang; use 1"),
        (
            params.attn_cp_size > 1,
            f"attention CP size {params.attn_cp_size}: several ranks are not supported yet inside SGLang; use 1",
        ),
        (
            disaggregation.disaggregation_mode not in (None, "null"),
            f"--disaggregation-mode {disaggregation.disaggregation_mode} is not supported: its events bypass the cache",
        ),
        (serving.enable_streaming_session, "--enable-streaming-session is not supported: drop that option"),
        (
            params.eviction_policy not in POLICIES,
            f"--radix-eviction-policy {params.eviction_policy} is not supported: use one of {', '.join(POLICIES)}",
        ),
        (
            memory.hicache_write_policy not in HOST_POLICIES,
            f"--hicache-write-policy {memory.hicache_write_policy} is not known: use one of {', '.join(HOST_POLICIES)}",
        ),
        (allocator not in ALLOCATORS, f"device allocator {allocator} is not supported: cphicache knows {', '.join(ALLOCATORS)}"),
        (params.enable_kv_cache_events, "--kv-events-config is not supported yet: drop that option"),
    )
    for is_so, text in refusals:
        if is_so:
            raise SglangRefused(text)
