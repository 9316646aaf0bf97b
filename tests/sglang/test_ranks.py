"""Servers of two ranks through ``sgl.Engine``: tensor parallelism, and attention CP."""

import json
import os
from functools import cache
from importlib.metadata import version

import pytest
from serving import HERE, WORK, environment, models, run_script

from cphicache.events import read_events
from cphicache.replay import replay

LIMIT_S = 900
"""Several processes import SGLang at once: on a busy machine that takes long."""
SEEDS = [3, 4]
"""Those of the first seed are served with equally fast copies on both ranks, those of the second with one rank's five times slower."""
REQUESTS = 20
HIERARCHICAL = {
    "radix_cache_backend": "cphicache", "enable_hierarchical_cache": True, "hicache_ratio": 4.0, "hicache_io_backend": "direct",
    "enable_cache_report": True,
}  # fmt: skip


EAGLE = {
    "speculative_algorithm": "EAGLE", "speculative_draft_model_path": str(WORK / "eagle"), "speculative_num_steps": 2,
    "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 3,
}  # fmt: skip
RUNS = [
    pytest.param("llama", {"tp_size": 2}, id="tp"),
    pytest.param("llama", {"tp_size": 2, "attn_cp_size": 2}, id="attention_cp"),
    pytest.param("mla", {"tp_size": 2}, id="mla", marks=pytest.mark.soak),
    pytest.param("drafted", {"tp_size": 2, **EAGLE}, id="eagle", marks=pytest.mark.soak),
]
"""Model and options. Each takes a minute of two cores."""


def serve(model, options, watched, **variables):
    watched |= {"drafts": "speculative_algorithm" in options}
    config = {"model": str(models() / model), "seeds": SEEDS, "requests": REQUESTS, "options": options}
    path = os.pathsep.join([environment()["PYTHONPATH"], str(HERE / "plugin"), str(HERE)])
    cores = "|".join(str(rank) for rank in range(options["tp_size"]))
    variables |= {"PYTHONPATH": path, "SERVED_RANKS": json.dumps(watched), "SGLANG_CPU_OMP_THREADS_BIND": cores}
    done = run_script("served.py", json.dumps(config), limit_s=LIMIT_S, **variables)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@cache
def _uncached(model, tp_size, attn_cp_size):
    options = {"tp_size": tp_size, "attn_cp_size": attn_cp_size, "max_total_tokens": 2048, "disable_radix_cache": True}
    return [[told["tokens"] for told in phase] for phase in serve(model, options, {})]


def reference(model, attn_cp_size):
    """The tokens of one rank without any cache, and without drafts; of attention CP where its own are others, which is so on a CPU with
    SGLang 0.5.23."""
    if attn_cp_size > 1 and version("sglang") != "0.5.20":
        return _uncached(model, 2, attn_cp_size)
    return _uncached(model, 1, 1)


def ticks_of_local_ends(log):
    """By node and generation: the tick at which this rank's own copies were seen to have ended."""
    return {
        (event["node"], event["generation"]): event["tick"]
        for event in read_events(log)
        if event["event"] == "step" and event["trigger"] == "copy_done"
    }


@pytest.mark.parametrize(("model", "given"), RUNS)
def test_ranks_take_the_same_steps_and_give_the_tokens_of_one(model, given, tmp_path):
    """R10-R12, R20-R23: two ranks are asked the same and do the same at the same ticks, however fast their copies are; a copy that fails on
    one is rolled back on both; their tokens are those of one rank without a cache; some of the KV comes from the host; the checker finds
    nothing on either rank."""
    options = given | HIERARCHICAL | {"max_total_tokens": 640}
    watched = {"out": str(tmp_path / "watched"), "delay_us": 10_000, "slow": 1}
    logs = {"CPHICACHE_LOG": str(tmp_path / "events.jsonl"), "CPHICACHE_LOG_LEVEL": "ops"}
    answers = serve(model, options, watched, **logs)
    assert [[told["tokens"] for told in phase] for phase in answers] == reference(model, options.get("attn_cp_size", 1))
    assert all(sum(told["host"] for told in phase) > 0 for phase in answers)

    paths = [tmp_path / f"events.rank{rank}.jsonl" for rank in range(2)]
    report = replay(paths)
    assert report.is_clean, report.text()
    assert report.disagreement is None
    assert [log.cut for log in report.logs] == [None, None]
    failed = [log.tally.rolled_back["agreed_failed"] for log in report.logs]
    assert failed[0] == failed[1] > 0
    ended = [ticks_of_local_ends(path) for path in paths]
    assert len(ended[0]) > 20
    assert ended[0] != ended[1], "no copy was later on one rank than on the other: equal ticks would prove nothing"

    found = [json.loads((tmp_path / f"watched.{rank}").read_text()) for rank in range(2)]
    assert [told["findings"] for told in found] == [[], []]
    assert all(told["checks"] > 50 and told["waits"] > 0 for told in found)
    assert found[0]["committed"] == found[1]["committed"] > 20
