"""Serving with a draft model: its KV comes back from the host byte for byte, and its tokens are right as often as without a cache."""

import random

NEW_TOKENS = 12
AT_ONCE = 3


def requests(count, seed=19):
    """Prompts on shared beginnings, which together are more than the device pool holds."""
    rng = random.Random(seed)
    stems = [[rng.randrange(3, 500) for _ in range(length)] for length in (130, 200, 260, 330)]
    asked = []
    for index in range(count):
        stem = rng.choice(stems)
        cut = rng.choice((len(stem), len(stem) - 5, len(stem) // 2))
        asked.append((f"r{index}", stem[:cut] + [rng.randrange(3, 500) for _ in range(rng.randrange(1, 40))]))
    return asked


def stored(cache, tokens):
    """The bytes of a prompt's KV in SGLang's own device pools, by payload, as far as it is on the device."""
    from cphicache.tree import RadixKey

    found = cache.engine.match_prefix(RadixKey.of(tokens, cache.page_size, None, is_bigram=True))
    rows = [page * cache.page_size + offset for page in found.device_pages for offset in range(cache.page_size)]

    def bytes_of(pool):
        buffers = [*pool.k_buffer, *pool.v_buffer] if hasattr(pool, "k_buffer") else pool.kv_buffer
        return [buffer[rows].clone() for buffer in buffers]

    return {payload: bytes_of(pool) for payload, pool in zip(cache.engine.config.payload_names, cache._pools, strict=True)}


def serve_drafts(rig, config):
    """One prompt computed, pushed out, and brought back from the host; then requests on shared beginnings, some at a time."""
    from worker import told

    is_ours = config["backend"] == "cphicache"
    if is_ours and config.get("forget_draft"):
        rig.cache._transfer._loader._host_pools["draft"].load_to_device_per_layer = lambda *args, **kwargs: None
    asked, out = requests(config["requests"]), {}
    first = asked[0][1][:100] + requests(8, seed=23)[3][1]
    out["first"] = told(rig.generate("first", first, NEW_TOKENS))
    before = stored(rig.cache, first) if is_ours else {}
    for index, (_, tokens) in enumerate(requests(5, seed=29)):
        rig.generate(f"other{index}", tokens, 2)
    out["back"] = told(rig.generate("back", first, NEW_TOKENS))
    after = stored(rig.cache, first) if is_ours else {}
    out["same_bytes"] = {
        payload: [bool((old == new).all()) for old, new in zip(before[payload], after[payload], strict=True)] for payload in before
    }
    waiting, live = list(asked), []

    def callback():
        live[:] = [req for req in live if not req.finished()]
        while waiting and len(live) < AT_ONCE:
            rid, tokens = waiting.pop(0)
            live.append(rig.submit(rid, tokens, NEW_TOKENS))
            served.append(live[-1])
        return not waiting and not live and rig.scheduler.is_fully_idle()

    served = []
    rig.loop(callback)
    out |= {req.rid: told(req) for req in served}
    return out
