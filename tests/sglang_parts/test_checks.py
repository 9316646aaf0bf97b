"""What is refused at start, told by SGLang's configuration alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from cphicache.sglang.checks import check_start
from cphicache.sglang.refusal import SglangRefused


def start(allocator: str = "PagedTokenToKVPoolAllocator", **changes: Any) -> None:
    """Check a configuration that works, with these changes of whichever part has the name."""
    params = SimpleNamespace(
        token_to_kv_pool_allocator=type(allocator, (), {})(), pp_size=1, attn_cp_size=1, eviction_policy="lru",
        enable_kv_cache_events=False,
    )  # fmt: skip
    parts = {
        "context": SimpleNamespace(
            params=params,
            enable_hierarchical_cache=True,
            disable_radix_cache=False,
            is_hybrid_swa=False,
            is_hybrid_ssm=False,
            tp_size=1,
        ),
        "memory": SimpleNamespace(
            hicache_storage_backend=None, hicache_host_memory_mode="cache", hicache_write_policy="write_through"
        ),
        "disaggregation": SimpleNamespace(disaggregation_mode="null"),
        "serving": SimpleNamespace(enable_streaming_session=False),
        "spec": SimpleNamespace(
            speculative_algorithm=None, speculative_eagle_topk=None, speculative_adaptive=False, enable_multi_layer_eagle=False
        ),
        "parallel": SimpleNamespace(enable_dp_attention=False, dcp_enabled=False),
    }
    for name, value in changes.items():
        owner = next(part for part in (*parts.values(), params) if hasattr(part, name))
        setattr(owner, name, value)
    check_start(**parts)


@pytest.mark.parametrize(
    "changes",
    [{}, {"tp_size": 8}, {"tp_size": 2, "attn_cp_size": 2}, {"tp_size": 2, "allocator": "PageInterleavePoolAllocator"}],
)
def test_several_ranks_start(changes: dict[str, Any]) -> None:
    """R10, R23: tensor parallelism, attention CP and an allocator whose pages ranks share are not refused."""
    start(**changes)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"pp_size": 2}, "--pp-size 2: pipeline parallelism is not supported; use 1"),
        ({"enable_dp_attention": True}, "--enable-dp-attention is not supported"),
        ({"dcp_enabled": True}, "decode context parallelism is not supported"),
        ({"allocator": "SWATokenToKVPoolAllocator"}, "device allocator SWATokenToKVPoolAllocator is not supported"),
        ({"hicache_storage_backend": "file"}, "--hicache-storage-backend file: a storage (L3) backend is not supported"),
    ],
)
def test_what_cannot_work_is_refused_by_its_option(changes: dict[str, Any], says: str) -> None:
    """R35: one line that names the option."""
    with pytest.raises(SglangRefused) as refused:
        start(**changes)
    assert str(refused.value).startswith(says)
    assert "\n" not in str(refused.value)
