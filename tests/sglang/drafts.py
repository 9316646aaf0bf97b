"""Serving with a draft model: its KV comes back from the host byte for byte, and its tokens are right as often as without a cache."""

import random
import threading

NEW_TOKENS, ALONE_TOKENS = 12, 30
PARTED = 192
"""Tokens after which one prompt parts from another: whole pages."""
NEVER_S = 20
"""How long a load-back is held for which no forward waits."""
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


def come_back(rig, name, tokens, before):
    """Push everything out of the device pool and ask for ``tokens`` again: what came out, and which layers were loaded as they were."""
    from worker import told

    for index, (_, other) in enumerate(requests(5, seed=29)):
        rig.generate(f"before {name} {index}", other, 2)
    out = told(rig.generate(name, tokens, ALONE_TOKENS))
    if not before:
        return out, {}
    after, loaded = stored(rig.cache, tokens), slice(out["device"], out["cached"])
    return out, {
        payload: [bool((old[loaded] == new[loaded]).all()) for old, new in zip(before[payload], after[payload], strict=True)]
        for payload in before
    }


def hold_draft_loads(cache):
    """The draft's KV comes back only when its forward waits for it: one that does not reads what was there before."""
    wanted, wait_layer, pool = threading.Event(), cache.wait_layer, draft_pool(cache)
    load = pool.load_to_device_per_layer

    def wait(payload, layer):
        if payload == "draft" and cache.engine.state.loads:
            wanted.set()
        wait_layer(payload, layer)

    def held(*args):
        wanted.wait(NEVER_S)
        load(*args)
        wanted.clear()

    cache.wait_layer, pool.load_to_device_per_layer = wait, held


def draft_pool(cache):
    return cache._transfer._loader._host_pools["draft"]


def serve_drafts(rig, config):
    """One prompt computed, and another that begins like it; the first pushed out and brought back; requests on shared beginnings, some
    at a time; then the first prompt once more, without its draft KV (control)."""
    from worker import told

    is_ours = config["backend"] == "cphicache"
    if is_ours:
        hold_draft_loads(rig.cache)
    asked, served, out = requests(config["requests"]), [], {}
    first = asked[0][1][:100] + requests(8, seed=23)[3][1]
    out["first"] = told(rig.generate("first", first, ALONE_TOKENS))
    out["parted"] = told(rig.generate("parted", first[:PARTED] + [token % 400 + 100 for token in first[PARTED:]], NEW_TOKENS))
    before = stored(rig.cache, first) if is_ours else {}
    out["back"], same = come_back(rig, "back", first, before)

    def callback():
        live = [req for req in served if not req.finished()]
        while len(served) < len(asked) and len(live) < AT_ONCE:
            live.append(rig.submit(*asked[len(served)], NEW_TOKENS))
            served.append(live[-1])
        return len(served) == len(asked) and not live and rig.scheduler.is_fully_idle()

    rig.loop(callback)
    out |= {req.rid: told(req) for req in served}
    if is_ours:
        draft_pool(rig.cache).load_to_device_per_layer = lambda *args: None
    out["forgotten"], forgotten = come_back(rig, "forgotten", first, before)
    return out | {"length": len(first), "same_bytes": same, "forgotten_bytes": forgotten}
