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
ALLOCATORS = ("PagedTokenToKVPoolAllocator", "TokenToKVPoolAllocator", "PageInterleavePoolAllocator")
SPECULATIVE = ("EAGLE", "STANDALONE")
"""Algorithms as SGLang resolves them: NEXTN is EAGLE with the model's own draft layer."""
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


def check_start(  # noqa: PLR0917 - SGLang's parts of one configuration
    context: Any, memory: Any, disaggregation: Any, serving: Any, spec: Any, parallel: Any
) -> None:
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
            spec.speculative_algorithm not in (None, *SPECULATIVE),
            f"--speculative-algorithm {spec.speculative_algorithm} is not supported: use EAGLE, NEXTN or STANDALONE",
        ),
        (
            spec.speculative_algorithm is not None and spec.speculative_eagle_topk != 1,
            f"--speculative-eagle-topk {spec.speculative_eagle_topk} is not supported: use 1, a chain of draft tokens",
        ),
        (
            spec.speculative_adaptive,
            "--speculative-adaptive is not supported: some of its steps store no draft KV; drop that option",
        ),
        (
            spec.enable_multi_layer_eagle,
            "--enable-multi-layer-eagle is not supported: only one of its draft pools would be backed up; drop that option",
        ),
        (params.pp_size > 1, f"--pp-size {params.pp_size}: pipeline parallelism is not supported; use 1"),
        (
            parallel.enable_dp_attention,
            "--enable-dp-attention is not supported: its replicas run forwards for each other; drop that option, or use the built-in cache",
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
