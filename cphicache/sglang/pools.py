"""SGLang's device KV pool, adopted: the copies read and write the tensors that its forward uses."""

from __future__ import annotations

from typing import Any

from cphicache.sglang.refusal import SglangRefused
from cphicache.transfer.pools.device import DevicePool, KVShape


def adopt_pool(pool: Any, page_size: int) -> DevicePool:
    """The device pool ``pool`` (``MHATokenToKVPool`` or ``MLATokenToKVPool``). Raises :class:`SglangRefused` for any other."""
    name = type(pool).__name__
    try:
        if name == "MHATokenToKVPool":
            layout = getattr(pool, "kv_cache_layout", "nhd")
            if layout != "nhd":
                raise SglangRefused(f"device pool {name} with layout {layout!r} is not supported: use the layout 'nhd'")
            if getattr(pool, "is_quantized_kv_cache", False):
                raise SglangRefused(f"device pool {name} with a quantized KV cache is not supported: its scales would not be moved")
            buffers = {"k": list(pool.k_buffer), "v": list(pool.v_buffer)}
            kind = "mha"
        elif name == "MLATokenToKVPool":
            buffers = {"latent": list(pool.kv_buffer)}
            kind = "mla"
        else:
            raise SglangRefused(f"device pool {name} is not supported: use a model with MHA/GQA or MLA KV (see docs/sglang.md)")
        elements = {component: tensors[0][:1].numel() for component, tensors in buffers.items()}
        first = next(iter(buffers.values()))
        shape = KVShape(kind, len(first), elements, first[0].dtype)
        return DevicePool.adopt(shape, buffers, page_size=page_size)
    except SglangRefused:
        raise
    except ValueError as error:
        raise SglangRefused(f"device pool {name}: {error}") from error
