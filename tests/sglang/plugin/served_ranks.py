"""A plug-in of the tests, in every process of a server: what lets SGLang run on a CPU, slow copies, and a checker that looks on.

``SERVED_RANKS`` is JSON: ``drafts``, whether a draft model is served too; ``out``, where a rank that ends leaves what its checker has
found; ``delay_us``, the most by which each copy is late; ``slow``, the rank whose copies are five times as late from the first flush on,
and of which some fail.
"""

import json
import os
from pathlib import Path

SLOWER = 5
FAILING = ((1, 3), (2, 9))
"""Copies to the host, by layer and number, that fail on the slow rank alone."""


def install():
    config = json.loads(os.environ["SERVED_RANKS"])
    import cpu
    import worker

    cpu.install()
    if config.get("drafts"):
        cpu.install_speculative()
    if "delay_us" not in config:
        return  # a server without cphicache
    worker.forbid_built_in()
    from cphicache.sglang import factory
    from cphicache.transfer.faults import CopyFaults
    from cphicache.transfer.streams.threads import ThreadStreams

    made, build, streams = [], factory.build_cache, factory.HostForwardStreams

    def make_streams():
        made.append(ThreadStreams(max_delay_us=config["delay_us"], seed=1))
        return streams(made[-1])

    def build_watched(context, problem=None, faults=None):
        if context.tp_rank == config["slow"]:
            faults = CopyFaults()
            for layer, nth in FAILING:
                faults.fail_copy("d2h", "target", layer, nth=nth)
        cache = build(context, problem, faults)
        watch(cache, context.tp_rank, made[-1], config)
        return cache

    factory.HostForwardStreams, factory.build_cache = make_streams, build_watched


def watch(cache, rank, threads, config):
    """Check at every iteration in which something is there to check, and when the cache ends."""
    from cphicache.check.conservation import check, check_quiet
    from cphicache.run.census import take_census

    engine, findings, checks = cache.engine, [], 0
    events, reset, release = cache.check_hicache_events, cache.reset, cache.release_host_resources

    def census():
        return take_census(engine, cache.running_rows(), cache._transfer.free_slots(), 0)

    def check_hicache_events():
        nonlocal checks
        events()
        if engine.state.requests or engine.state.pending or engine.state.loads:
            checks += 1
            findings.extend(str(finding) for finding in check(census()))

    def flush():
        reset()
        if rank == config["slow"]:
            threads._max_delay_us = config["delay_us"] * SLOWER

    def release_host_resources():
        release()
        findings.extend(str(finding) for finding in check_quiet(census()))
        reducer = engine._agreement._reducer
        told = {
            "findings": findings[:5], "checks": checks, "committed": engine.counters.committed, "waits": reducer.waited,
            "host_tokens": engine.counters.load_back_tokens, "ticks": engine.state.tick, "blocked_s": reducer.blocked_s,
            "longest_s": reducer.longest_s,
        }  # fmt: skip
        Path(f"{config['out']}.{rank}").write_text(json.dumps(told))

    cache.check_hicache_events, cache.reset, cache.release_host_resources = check_hicache_events, flush, release_host_resources
