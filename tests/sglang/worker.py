"""One scheduler process of a test.  Usage: worker.py JSON   (prints what came out as the last line, in JSON)

SGLang's configuration is one a process, so that every combination runs in its own.
"""

import json
import random
import sys
import threading
from functools import partial
from importlib.util import find_spec
from itertools import pairwise

import cpu
import msgspec
import slow_copies
from drafts import serve_drafts
from rig import Rig
from workload import random_requests

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
        if find_spec(module) is not None:  # not every version has every one
            getattr(importlib.import_module(module), name).__init__ = partial(refuse, name)


def removable_tokens(tree, record):
    """Tokens of host-only nodes that nothing keeps, neither themselves nor what is below them, nor that the record hangs on them."""
    parent = record.node.parent if record.node is not None else None if record.parent is None else record.parent.node

    def count(node):
        below = [count(child) for child in node.children.values()]
        kept = not node.is_host_removable or node is parent or any(keeps for _, keeps in below)
        return sum(tokens for tokens, _ in below) + (0 if kept else node.length_tokens), kept

    return count(tree.root)[0]


class Watch:
    """Looks at the cache from outside: the checker at every iteration, the order of layer reports and submissions."""

    def __init__(self, rig):
        from cphicache.check.conservation import check, check_quiet
        from cphicache.run.census import take_census

        self.rig, self.cache, self.engine = rig, rig.cache, rig.cache.engine
        self.findings, self.checks, self.idles, self.victims_left = [], 0, 0, []
        self.forwards, self.commits = [], 0
        self._check, self._check_quiet, self._census = check, check_quiet, take_census
        rig.each = self.look
        rig.scheduler.on_idle = self._idle(rig.scheduler.on_idle)
        effects = self.engine._backups._effects
        effects.refuse = self._refused(effects.refuse)
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

    def _idle(self, on_idle):
        """Whenever SGLang is idle it checks its pools for leaks: so do we."""

        def checked():
            if self.rig.scheduler.is_fully_idle():
                self.idles += 1
                self.findings += [str(finding) for finding in self._check_quiet(self.census())]
            on_idle()

        return checked

    def _refused(self, refuse):
        """A backup that is refused for lack of host slots: how many could have been had, counted node by node."""

        def counted(record, given):
            free = self.engine.state.ledger.free(0, "target")
            if self.engine._backups.fit(record) and free + removable_tokens(self.engine.state.tree, record) >= record.need[0]:
                self.victims_left.append(record.describe())
            refuse(record, given)

        return counted

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
            "findings": self.findings[:5], "checks": self.checks, "idles": self.idles, "victims_left": self.victims_left[:5],
            "forwards_with_backup": len(order), "early": early, "draft_early": draft_early,
            "committed": counters.committed, "load_backs": counters.load_backs, "load_back_tokens": counters.load_back_tokens,
            "declined": counters.declined_inserts, "deferred": counters.deferred_splits, "parked": counters.parked_inserts,
            "parked_dropped": counters.parked_dropped, "duplicates": counters.duplicate_tokens, "refused": dict(counters.refused),
            "load_refused": dict(counters.load_refused), "load_backs_failed": counters.load_backs_failed,
            "host_evictions": counters.host_evictions, "device_evictions": counters.device_evictions,
            "rolled_back": dict(counters.rolled_back),
        }  # fmt: skip


IDLE = 500
"""Iterations."""


def told(req):
    return {
        "tokens": list(req.output_ids_through_stop), "retracted": req.retracted_stain, "cached": req.cached_tokens,
        "device": req.cached_tokens_device, "host": req.cached_tokens_host,
        "reason": None if req.finished_reason is None else type(req.finished_reason).__name__,
        "prompt": len(req.origin_input_ids), "verified": req.spec_verify_ct, "drafted_right": req.spec_num_correct_drafts,
    }  # fmt: skip


def prompts(seed):
    rng = random.Random(seed)
    return rng, lambda length: [rng.randrange(3, 500) for _ in range(length)]


def serve_basic(rig, config):
    """A prompt three times: computed, from the device, and (others have pushed it out) from the host."""
    _, prompt = prompts(7)
    first = prompt(320)
    given = {"priority": config["priority"]} if "priority" in config else {}
    out = {name: told(rig.generate(name, first, **given)) for name in ("first", "again")}
    for index in range(4):
        rig.generate(f"other{index}", prompt(400))
    if config.get("corrupt"):
        pool = rig.cache._transfer._loader._host_pools["target"]
        for tensor in pool.tensors():
            tensor.copy_(tensor.flip(0).roll(3, 0))
    out["back"] = told(rig.generate("back", first, config.get("back_tokens", 4), **given))
    return out


def serve_namespaces(rig, config):
    """One prompt in several namespaces, twice in each."""
    _, prompt = prompts(23)
    tokens = prompt(100)
    spaces = (
        {},
        {"extra_key": "a"},
        {"extra_key": ""},
        {"lora_id": "x"},
        {"lora_id": "y"},
        {"cache_salt": "a"},
        {"cache_salt": "ab"},
    )
    return {
        f"{space} {turn}": told(rig.generate(f"{index}.{turn}", tokens, 2, **space))
        for turn in (1, 2)
        for index, space in enumerate(spaces)
    }


def serve_abort_all(rig, config):
    """All requests are aborted at once, running and waiting ones, while backups are in flight; then a flush; then one of them again."""
    _, prompt = prompts(29)
    asked = [prompt(150) for _ in range(7)]
    requests = [rig.submit(f"r{index}", tokens, 40) for index, tokens in enumerate(asked)]
    seen = {}

    def callback():
        if not seen and requests[0].output_ids:
            seen.update(backups=len(rig.cache.ongoing_write_through), waiting=len(rig.scheduler.waiting_queue))
            rig.gone.update(req.rid for req in rig.scheduler.waiting_queue)
            rig.abort_all()
        return (
            bool(seen) and all(req.finished() or req.rid in rig.gone for req in requests) and not rig.scheduler.running_batch.reqs
        )

    rig.loop(callback)
    rig.scheduler.last_batch = None
    flushed = rig.scheduler.flush_cache()
    return {**seen, "flushed": flushed, "left": rig.cache.total_size(), "again": told(rig.generate("again", asked[0], 4))}


def serve_preempt_full(rig, config):
    """With priorities, one request at a time: the urgent one has room only when the backups of the one preempted for it have ended."""
    _, prompt = prompts(19)
    slow = rig.submit("slow", prompt(260), 30, priority=1)
    made, both_waited = [], []

    def callback():
        if slow.output_ids and not made:
            made.append(rig.submit("urgent", prompt(260), 3, priority=9))
        both_waited.append(bool(made) and {slow, made[0]} <= set(rig.scheduler.waiting_queue))
        return bool(made) and slow.finished() and made[0].finished() and rig.scheduler.is_fully_idle()

    rig.loop(callback)
    return {"both_waited": any(both_waited), **{req.rid: told(req) for req in (slow, *made)}}


def serve_events(rig, config):
    """What a router hears of the random requests, of a flush, and of a prompt after it; and what is in the cache at the end of each."""
    heard = []
    rig.scheduler.kv_events_publisher.kv_event_publisher.publish = lambda batch: heard.extend(batch.events)
    out = {}

    def take(name):
        rig.scheduler.kv_events_publisher.publish_kv_events()
        nodes = list(rig.cache.engine.state.tree.nodes())
        out[name] = {
            "events": [{"kind": type(event).__name__, **msgspec.structs.asdict(event)} for event in heard],
            "device_pages": sum(node.length_pages for node in nodes if node.on_device),
            "host_pages": sum(node.length_pages for node in nodes if node.backup.has_host_copy),
        }
        heard.clear()

    serve_random(rig, config)
    take("random")
    rig.scheduler.flush_cache()
    take("flush")
    tokens = prompts(31)[1](2 * rig.cache.page_size)
    rig.generate("plain", tokens)
    rig.generate("salted", tokens, cache_salt="s")
    take("prompt")
    return out | {"tokens": tokens}


def serve_random(rig, config):
    """The random requests, several at a time; a run without aborts is the reference."""
    asked = random_requests(config["requests"], config.get("seed", 3))
    requests, abort_at = [], {}

    def callback():
        live = [req for req in requests if not req.finished() and req.rid not in rig.gone]
        for req in live:
            limit = abort_at.get(req.rid)
            if limit is not None and len(req.output_ids) >= limit:
                del abort_at[req.rid]
                queued = req in rig.scheduler.waiting_queue
                rig.abort(req.rid)
                if queued:
                    rig.gone.add(req.rid)
        while len(requests) < len(asked) and len(live) < 6:
            one = asked[len(requests)]
            req = rig.submit(one.rid, one.tokens, one.new_tokens)
            if one.abort_at is not None and config.get("aborts", True):
                abort_at[one.rid] = one.abort_at
            requests.append(req)
            live.append(req)
        return len(requests) == len(asked) and not live and rig.scheduler.is_fully_idle()

    rig.loop(callback)
    rig.run(requests)
    return {req.rid: told(req) for req in requests}


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


def serve_declined(rig, config):
    """A prompt that goes on behind a load-back cannot be inserted when it has been computed, as a backup before it has not ended. Its
    request goes on for long; another one that begins with the same prompt comes when nothing is in flight any more."""
    _, prompt = prompts(37)
    first, is_ours = prompt(320), config["backend"] == "cphicache"
    rig.generate("first", first)
    for index in range(3):
        rig.generate(f"other{index}", prompt(400))
    if is_ours:
        from cphicache.transfer.port import CopyStatus

        transfer = rig.cache._transfer
        status, transfer.status = transfer.status, lambda key: CopyStatus(drained=False, failed=False)
    before, made, declined = rig.submit("before", prompt(60), 2), [], []

    def callback():
        if before.finished() and not made:
            made.append(rig.submit("long", first + prompt(64), 60))
        if len(made) == 1 and len(made[0].output_ids) > 2 and is_ours:
            declined.append(rig.cache.engine.counters.declined_inserts)
            transfer.status = status
        if len(made) == 1 and len(made[0].output_ids) > 20:
            assert not (is_ours and rig.cache.ongoing_load_back)
            made.append(rig.submit("same", list(made[0].origin_input_ids) + prompt(20), 2))
        return len(made) == 2 and all(req.finished() for req in made) and rig.scheduler.is_fully_idle()

    rig.loop(callback)
    return {"declined": sum(declined[:1]), **{req.rid: told(req) for req in made}}


def serve_failed_late(rig, config):
    """A request reads a load-back that fails, and is taken back for an urgent one before anybody has heard of that: the failure is known
    when the request's end asks for it."""
    from cphicache.transfer.port import CopyStatus

    _, prompt = prompts(43)
    first, engine, transfer = prompt(320), rig.cache.engine, rig.cache._transfer
    computed = told(rig.generate("first", first, 10, priority=1))
    for index in range(4):
        rig.generate(f"other{index}", prompt(400), priority=1)
    status, confirm, asked = transfer.load_status, engine.confirm_loads, []

    def confirm_loads(name):
        transfer.load_status = status
        asked.append(engine.counters.load_backs_failed)
        return confirm(name)

    transfer.load_status, engine.confirm_loads = lambda load: CopyStatus(drained=False, failed=False), confirm_loads
    slow, made = rig.submit("slow", first, 10, priority=1), []

    def callback():
        if slow.output_ids and not made:
            made.append(rig.submit("urgent", prompt(60), 3, priority=9))
        return bool(made) and slow.finished() and made[0].finished() and rig.scheduler.is_fully_idle()

    rig.loop(callback)
    known = {"known_before": asked[0], "preempted": slow.retracted_stain}
    again = told(rig.generate("again", first, 10, priority=1))
    return {**known, "first": computed, "again": again, **{req.rid: told(req) for req in (slow, *made)}}


def serve_idle(rig, config):
    """A request, and many iterations in which there is nothing to do; then another request."""
    _, prompt = prompts(41)
    first = told(rig.generate("first", prompt(100)))
    ticks = []

    def callback():
        ticks.append(rig.cache.engine.state.tick)
        return len(ticks) == IDLE

    rig.loop(callback)
    return {"first": first, "ticks": ticks[-1] - ticks[0], "second": told(rig.generate("second", prompt(100)))}


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
    # For a request that ignores the end token, SGLang 0.5.23 sets all of its new tokens aside.
    requests = [rig.submit(f"r{index}", prompt(64), 70, ignore_eos=False) for index in range(4)]
    rig.run(requests)
    return {"retracted": sum(req.retracted_stain for req in requests), **{req.rid: told(req) for req in requests}}


SCENARIOS = {
    "basic": serve_basic, "random": serve_random, "retract": serve_retract, "preempt": serve_preempt, "waiting": serve_waiting,
    "declined": serve_declined, "idle": serve_idle, "failed_late": serve_failed_late,
    "flush": serve_flush, "namespaces": serve_namespaces, "abort_all": serve_abort_all, "preempt_full": serve_preempt_full,
    "events": serve_events, "drafts": serve_drafts,
}  # fmt: skip


def prepare(config):
    """Before the scheduler is made: slow copies, failing copies, and nothing of SGLang's own engine."""
    forbid_built_in()
    from sglang.srt.mem_cache import registry

    from cphicache.sglang import factory
    from cphicache.transfer.faults import CopyFaults

    if config.get("delay_us"):
        slow_copies.slow(config["delay_us"])
    if config.get("fail_load"):
        faults = CopyFaults()
        faults.fail_copy("h2d", "target", 1)
        registry._RADIX_CACHE_REGISTRY["cphicache"] = lambda context: factory.build_cache(context, faults=faults)


def end_failing(cache):
    """The engine cannot end: what is told, and which copy threads are still there after it."""

    def fail():
        raise RuntimeError("planted in shutdown")

    cache.engine.shutdown = fail
    told = None
    try:
        cache.release_host_resources()
    except RuntimeError as error:
        told = str(error)
    return {"told": told, "threads": [thread.name for thread in threading.enumerate() if thread.name.startswith("stream-")]}


def serve(config):
    options = dict(config.get("options", {}))
    backend = config.get("backend")
    if backend == "cphicache":
        rig = Rig(config["model"], HIERARCHICAL | {"radix_cache_backend": "cphicache"} | options, prepare=partial(prepare, config))
        watch = Watch(rig)
    elif backend == "none":
        options = {name: value for name, value in options.items() if not name.startswith("hicache")}
        rig, watch = Rig(config["model"], {"disable_radix_cache": True} | options), None
    else:
        rig, watch = Rig(config["model"], HIERARCHICAL | options, prepare=cpu.install_built_in), None
    out = {"served": SCENARIOS[config["scenario"]](rig, config)}
    if watch is not None:
        watch.end()
        out["watch"] = watch.report()
        if config.get("end_fails"):
            out["end"] = end_failing(rig.cache)
        rig.cache.release_host_resources()
    print(json.dumps(out))


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]))
