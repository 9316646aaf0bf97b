"""Stands in for SGLang's CPU operators, of which the tested paths call a few; the others say so when they are called."""

from .speculative import (
    assign_draft_cache_locs_contiguous_cpu,
    assign_extend_cache_locs_cpu,
    build_tree_kernel_efficient_cpu,
    copy_all_layer_kv_cache_cpu,
    fill_bonus_tokens_cpu,
    verify_tree_greedy_cpu,
)

__all__ = [
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_bonus_tokens_cpu",
    "verify_tree_greedy_cpu",
]


def assign_req_to_token_pool_cpu(req_pool_indices, req_to_token, start, end, out_cache_loc, pool_len):
    """Write each request's new locations, which lie one after another in ``out_cache_loc``, into its row."""
    at = 0
    for row, first, last in zip(req_pool_indices.tolist(), start.tolist(), end.tolist(), strict=True):
        count = last - first
        req_to_token[row, first:last] = out_cache_loc[at : at + count].to(req_to_token.dtype)
        at += count


def __getattr__(name):
    if name.startswith("__") or not name.endswith("_cpu"):
        raise AttributeError(name)

    def not_there(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.{name} is not part of the stand-in")

    return not_there
