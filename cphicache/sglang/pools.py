"""SGLang's device KV pools, adopted: the copies read and write the tensors that its forwards use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from cphicache.sglang.refusal import SglangRefused
from cphicache.transfer.pools.device import DevicePool, KVShape

TARGET, DRAFT = "target", "draft"
"""The payloads, in the order in which a batch stores them: the model's KV, and that of the model that drafts for it."""


def by_payload(target: Any, drafts: Sequence[Any]) -> dict[str, Any]:
    """SGLang's pools by payload. Raises :class:`SglangRefused` for more than one of drafts."""
    if len(drafts) > 1:
        raise SglangRefused(f"{len(drafts)} draft pools are not supported: use a draft model with one")
    return dict(zip((TARGET, DRAFT), (target, *drafts), strict=False))


def adopt_pools(pools: Mapping[str, Any], page_size: int) -> dict[str, DevicePool]:
    """The pools of one rank by payload. Raises :class:`SglangRefused` for one that is not supported."""
    adopted = {payload: adopt_pool(pool, page_size) for payload, pool in pools.items()}
    slots = {payload: pool.slots for payload, pool in adopted.items()}
    if min(slots.values()) < slots[TARGET]:
        raise SglangRefused(f"device pools of {slots} slots are not supported: every token location must be in both")
    return adopted


def adopt_pool(pool: Any, page_size: int) -> DevicePool:
    """The device pool ``pool`` (MHA, MLA or DSA). Raises :class:`SglangRefused` for any other."""
    name = type(pool).__name__
    try:
        match name:
            case "MHATokenToKVPool":
                return _adopt_mha(pool, page_size)
            case "MLATokenToKVPool":
                return _adopt("mla", {"latent": pool.kv_buffer}, page_size)
            case "DSATokenToKVPool":
                return _adopt_dsa(pool, page_size)
        raise SglangRefused(f"device pool {name} is not supported: use a model with MHA/GQA, MLA or DSA KV (see docs/sglang.md)")
    except SglangRefused:
        raise
    except ValueError as error:
        raise SglangRefused(f"device pool {name}: {error}") from error


def _adopt_mha(pool: Any, page_size: int) -> DevicePool:
    layout = getattr(pool, "kv_cache_layout", "nhd")
    if layout != "nhd":
        raise SglangRefused(f"device pool MHATokenToKVPool with layout {layout!r} is not supported: use the layout 'nhd'")
    if getattr(pool, "is_quantized_kv_cache", False):
        raise SglangRefused(
            "device pool MHATokenToKVPool with a quantized KV cache is not supported: its scales would not be moved"
        )
    return _adopt("mha", {"k": pool.k_buffer, "v": pool.v_buffer}, page_size)


def _adopt_dsa(pool: Any, page_size: int) -> DevicePool:
    """The latent, and the indexer's keys with their scales, which are stored by page. A layer that uses the choice of the layer before
    it has none."""
    if pool.index_kpool != 1:
        raise SglangRefused(
            f"device pool DSATokenToKVPool with index_kpool {pool.index_kpool} is not supported: a key of its indexer is of several tokens"
        )
    keys: list[torch.Tensor] = list(pool.index_k_with_scale_buffer)
    layers = tuple(layer for layer, tensor in enumerate(keys) if tensor.numel())
    if not layers:
        return _adopt("mla", {"latent": pool.kv_buffer}, page_size)
    return _adopt("dsa", {"latent": pool.kv_buffer, "indexer": keys}, page_size, layers)


def _adopt(
    kind: str, buffers: dict[str, Sequence[torch.Tensor]], page_size: int, indexer_layers: tuple[int, ...] | None = None
) -> DevicePool:
    elements = {name: tensors[0][:1].numel() for name, tensors in buffers.items() if name != "indexer"}
    if indexer_layers is not None:
        elements["indexer"] = max(tensor[:1].numel() for tensor in buffers["indexer"]) // page_size
    first = next(iter(buffers.values()))
    shape = KVShape(kind, len(first), elements, first[0].dtype, indexer_layers=indexer_layers)
    return DevicePool.adopt(shape, {name: list(tensors) for name, tensors in buffers.items()}, page_size=page_size)
