"""One scheduler process of a test.  Usage: worker.py JSON   (prints what came out as the last line, in JSON)

SGLang's configuration is one a process, so that every combination runs in its own.
"""

import json
import random
import sys
from functools import partial
from itertools import pairwise

from drafts import serve_drafts
from rig import Rig

BUILT_IN = (
    ("sglang.srt.managers.cache_controller", "HiCacheController"),
    ("sglang.srt.mem_cache.pool_host.base", "HostKVCache"),
    ("sglang.srt.mem_cache.hiradix_cache", "HiRadixCache"),
    ("sglang.srt.mem_cache.unified_radix_cache", "UnifiedRadixCache"),
)
"""What must not be at work."""
HIERARCHICAL = {
    "enable_hierarchical_cache": True, "hicache_ratio": 4.0, "hicache_io_backend": "direct", "hicache_write_policy": "write_through",
    "enable_cache_report": True,
}  # fmt: skip


def forbid_built_in():
    import importlib

    def refuse(name, *args, **kwargs):
        raise AssertionError(f"{name} was made: the engine at work is not cphicache's")

    for module, name in BUILT_IN:
        getattr(importlib.import_module(module), name).__init__ = partial(refuse, name)


class Watch:
    """Looks at the cache from outside: the checker at every iteration, the order of layer reports and submissions."""

    def __init__(self, rig):
        from cphicache.check.conservation import check, check_quiet
        from cphicache.run.census import take_census

        self.rig, self.cache, self.engine = rig, rig.cache, rig.cache.engine
        self.findings, self.checks, self.idle_checks = [], 0, 0
        self.forwards, self.commits = [], 0
        self._check, self._check_quiet, self._census = check, check_quiet, take_census
        rig.each = self.look
        begin, end = self.cache.begin_forward, self.cache.end_forward
        stored, submit = self.cache.layer_stored, self.cache._transfer.submit_layers
        self._inside = False

        def begin_forward(batch):
            self.forwards.append([])
            self._inside = True
            begin(batch)

        def end_forward():
            end()
            self._inside = False

        def layer_stored(pool, layer):
            self.forwards[-1].append(("stored" if pool is self.cache._pools[0] else "draft stored", layer))
            stored(pool, layer)

        def submit_layers(ops, payload, layers):
            ops = list(ops)
            if self._inside:
                self.forwards[-1].extend(("d2h" if payload == "target" else "draft d2h", layer) for layer in layers)
            submit(ops, payload, layers)

        self.cache.begin_forward, self.cache.end_forward, self.cache.layer_stored = begin_forward, end_forward, layer_stored
        self.cache._transfer.submit_layers = submit_layers

    def census(self):
        return self._census(self.engine, self.cache.running_rows(), self.cache._transfer.free_slots(), 0)

    def look(self):
        self.checks += 1
        self.findings += [str(finding) for finding in self._check(self.census())]

    def end(self):
        self.findings += [str(finding) for finding in self._check_quiet(self.census())]

    def report(self):
        counters = self.engine.counters
        order = [forward for forward in self.forwards if any(kind == "d2h" for kind, _ in forward)]
        last = self.engine.config.payloads[0][1] - 1
        early = sum(
            forward.index(("d2h", 0)) < forward.index(("stored", last))
            for forward in order
            if ("d2h", 0) in forward and ("stored", last) in forward
        )
        draft_early = sum(any(pair == (("draft stored", 0), ("draft d2h", 0)) for pair in pairwise(forward)) for forward in order)
        return {
            "findings": self.findings[:5], "checks": self.checks, "forwards_with_backup": len(order), "early": early,
            "draft_early": draft_early,
            "committed": counters.committed, "load_backs": counters.load_backs, "load_back_tokens": counters.load_back_tokens,
            "declined": counters.declined_inserts, "deferred": counters.deferred_splits, "parked": counters.parked_inserts,
            "parked_dropped": counters.parked_dropped, "duplicates": counters.duplicate_tokens, "refused": dict(counters.refused),
            "load_refused": dict(counters.load_refused), "load_backs_failed": counters.load_backs_failed,
            "host_evictions": counters.host_evictions, "device_evictions": counters.device_evictions,
            "rolled_back": dict(counters.rolled_back),
        }  # fmt: skip


def told(req):
    return {
        "tokens": list(req.output_ids_through_stop), "cached": req.cached_tokens, "device": req.cached_tokens_device,
        "host": req.cached_tokens_host,
        "reason": None if req.finished_reason is None else type(req.finished_reason).__name__,
        "verified": req.spec_verify_ct, "drafted_right": req.spec_num_correct_drafts,
    }  # fmt: skip


def prompts(seed):
    rng = random.Random(seed)
    return rng, lambda length: [rng.randrange(3, 500) for _ in range(length)]


def serve_basic(rig, config):
    """A prompt three times: computed, from the device, and (others have pushed it out) from the host."""
    _, prompt = prompts(7)
    first = prompt(320)
    out = {"first": told(rig.generate("first", first)), "again": told(rig.generate("again", first))}
    for index in range(4):
        rig.generate(f"other{index}", prompt(400))
    if config.get("corrupt"):
        pool = rig.cache._transfer._loader._host_pools["target"]
        for tensor in pool.tensors():
            tensor.copy_(tensor.flip(0).roll(3, 0))
    out["back"] = told(rig.generate("back", first))
    return out


def serve_random(rig, config):
    """Requests with shared prefixes of several lengths, some longer than a chunk, a few aborted, several at a time."""
    rng, prompt = prompts(config.get("seed", 3))
    stems = [prompt(length) for length in (48, 130, 200, 330)]
    requests, made, out = [], 0, {}
    abort_at = {}

    def callback():
        nonlocal made
        live = [req for req in requests if not req.finished() and req.rid not in rig.gone]
        for req in live:
            limit = abort_at.get(req.rid)
            if limit is not None and len(req.output_ids) >= limit:
                del abort_at[req.rid]
                queued = req in rig.scheduler.waiting_queue
                rig.abort(req.rid)
                if queued:
                    rig.gone.add(req.rid)
        while made < config["requests"] and len(live) < 6:
            stem = rng.choice(stems)
            tokens = stem[: rng.choice((len(stem), len(stem) // 2, len(stem) - 5))] + prompt(rng.randrange(1, 60))
            rid = f"r{made}"
            req = rig.submit(rid, tokens, rng.randrange(1, 9))
            if rng.random() < 0.1:
                abort_at[rid] = rng.randrange(0, 3)
            requests.append(req)
            live.append(req)
            made += 1
        return made == config["requests"] and not live and rig.scheduler.is_fully_idle()

    rig.loop(callback)
    rig.run(requests)
    for req in requests:
        out[req.rid] = told(req)
    return out


def serve_waiting(rig, config):
    """Copies are slow: a request that would divide a node whose backup is pending, beside one that has nothing to do with it."""
    _, prompt = prompts(11)
    stem = prompt(200)
    first = rig.submit("first", stem + prompt(40), 12)
    order, made = [], []

    def callback():
        if first.output_ids and not made:
            made.append(rig.submit("divides", stem[:100] + prompt(40), 2))
            made.append(rig.submit("other", prompt(60), 2))
        order.extend(req.rid for req in made if req.finished() and req.rid not in order)
        return bool(made) and first.finished() and len(order) == 2 and rig.scheduler.is_fully_idle()

    rig.loop(callback)
    return {"order": order, **{req.rid: told(req) for req in (first, *made)}}


def serve_flush(rig, config):
    """A flush while backups are in flight, then the same prompt again."""
    _, prompt = prompts(5)
    first = prompt(320)
    req = rig.submit("first", first)
    rig.loop(lambda: req.finished() and not rig.scheduler.running_batch.reqs)
    busy = len(rig.cache.ongoing_write_through)
    rig.scheduler.last_batch = None
    flushed = rig.scheduler.flush_cache()
    return {"busy": busy, "flushed": flushed, "first": told(req), "again": told(rig.generate("again", first))}


def serve_preempt(rig, config):
    """One request at a time, with priorities: the urgent one would divide a node whose backup is pending, so that it has to wait."""
    _, prompt = prompts(17)
    stem = prompt(200)
    slow = rig.submit("slow", stem + prompt(40), 40, priority=1)
    made = []

    def callback():
        if slow.output_ids and not made:
            made.append(rig.submit("urgent", stem[:100] + prompt(40), 3, priority=9))
        return bool(made) and slow.finished() and made[0].finished() and rig.scheduler.is_fully_idle()

    rig.loop(callback)
    return {"preempted": slow.retracted_stain, **{req.rid: told(req) for req in (slow, *made)}}


def serve_retract(rig, config):
    """More tokens are decoded than the device pool has room for: SGLang takes requests back and starts them again."""
    _, prompt = prompts(13)
    requests = [rig.submit(f"r{index}", prompt(64), 70) for index in range(4)]
    rig.run(requests)
    return {"retracted": sum(req.retracted_stain for req in requests), **{req.rid: told(req) for req in requests}}


SCENARIOS = {
    "basic": serve_basic, "random": serve_random, "retract": serve_retract, "preempt": serve_preempt, "waiting": serve_waiting,
    "flush": serve_flush, "drafts": serve_drafts,
}  # fmt: skip


def prepare(config):
    """Before the scheduler is made: slow copies, failing copies, and nothing of SGLang's own engine."""
    forbid_built_in()
    from sglang.srt.mem_cache import registry

    from cphicache.sglang import factory
    from cphicache.transfer.faults import CopyFaults
    from cphicache.transfer.streams.threads import ThreadStreams

    if config.get("delay_us"):
        streams = factory.HostForwardStreams
        factory.HostForwardStreams = lambda: streams(ThreadStreams(max_delay_us=config["delay_us"], seed=1))
    if config.get("fail_load"):
        faults = CopyFaults()
        faults.fail_copy("h2d", "target", 1)
        registry._RADIX_CACHE_REGISTRY["cphicache"] = lambda context: factory.build_cache(context, faults=faults)


def main():
    config = json.loads(sys.argv[1])
    options = dict(config.get("options", {}))
    backend = config.get("backend")
    if backend == "cphicache":
        rig = Rig(config["model"], HIERARCHICAL | {"radix_cache_backend": "cphicache"} | options, prepare=partial(prepare, config))
        watch = Watch(rig)
    elif backend == "none":
        options = {name: value for name, value in options.items() if not name.startswith("hicache")}
        rig, watch = Rig(config["model"], {"disable_radix_cache": True} | options), None
    else:
        rig, watch = Rig(config["model"], HIERARCHICAL | options), None
    out = {"served": SCENARIOS[config["scenario"]](rig, config)}
    if watch is not None:
        watch.end()
        out["watch"] = watch.report()
        rig.cache.release_host_resources()
    print(json.dumps(out))


if __name__ == "__main__":
    main()
