"""SGLang's real DSA pool without a model, which wants a GPU: backed up and loaded back.  Usage: dsa.py   (prints what came out, in JSON)"""

import json

import cpu
import torch

PAGE, LAYERS = 64, 4
BACKED_UP, LOADED = [3, 5, 2], [7, 1, 4]
"""Pages of a node, before and after."""


def make_pool():
    """Random bytes in every layer; the second layer uses the indexer's choice of the first, and has no keys of its own."""
    from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool

    pool = DSATokenToKVPool(
        size=8 * PAGE, page_size=PAGE, kv_lora_rank=512, dtype=torch.bfloat16, qk_rope_head_dim=64, layer_num=LAYERS, device="cpu",
        index_head_dim=128, enable_memory_saver=False, kv_cache_dim=576, skip_topk_layers=[False, True, False, False],
    )  # fmt: skip
    for buffer in buffers(pool):
        buffer.view(torch.uint8).random_(0, 256)
    return pool


def buffers(pool):
    return [*pool.kv_buffer, *(buffer for buffer in pool.index_k_with_scale_buffer if buffer.numel())]


def by_page(buffer):
    """One row a page: the latent has a row a token, the indexer's keys a row a page."""
    rows = buffer.view(torch.uint8).reshape(buffer.shape[0], -1)
    return rows if buffer.dim() == 2 else rows.reshape(-1, PAGE * rows.shape[1])


def move(pool):
    """A backup of three pages, layer by layer, and its load-back to three others. Returns the host pool's bytes a token."""
    from cphicache.sglang.pools import adopt_pools, by_payload
    from cphicache.sglang.streams import HostForwardStreams
    from cphicache.spaces.layout import CpSharedKVLayout
    from cphicache.transfer.pools.host import make_host_pool
    from cphicache.transfer.port import LoadItem, OpKey
    from cphicache.transfer.rank import RankTransfer

    device = adopt_pools(by_payload(pool, ()), PAGE)
    host = {payload: make_host_pool("page_first_direct", adopted.shape, 4 * PAGE, PAGE) for payload, adopted in device.items()}
    streams = HostForwardStreams()
    rank = RankTransfer(CpSharedKVLayout(PAGE, 1, 0), device, host, streams)
    backup = OpKey(1, 0)
    rank.reserve(backup, BACKED_UP)
    for layer in range(LAYERS):
        rank.submit_layers([backup], "target", (layer,))
    rank.wait_backup(backup)
    rank.commit(backup)
    for buffer in buffers(pool):
        buffer.zero_()
    rank.queue_load(1, [LoadItem(1, LOADED)])
    producer = rank.start_loads()
    for layer in range(LAYERS):
        rank.wait_layer(producer, "target", layer)
    rank.wait_load(1)
    streams.close()
    return device["target"].shape.token_bytes


def main():
    cpu.install()
    pool = make_pool()
    before = [by_page(buffer).clone() for buffer in buffers(pool)]
    token_bytes = move(pool)
    after = [by_page(buffer) for buffer in buffers(pool)]
    others = [page for page in range(9) if page not in LOADED]
    print(
        json.dumps(
            {
                "equal": [torch.equal(old[BACKED_UP], new[LOADED]) for old, new in zip(before, after, strict=True)],
                "untouched": [not new[others].any() for new in after],
                "token_bytes": token_bytes,
            }
        )
    )


if __name__ == "__main__":
    main()
