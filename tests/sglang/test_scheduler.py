"""The real SGLang scheduler with cphicache as its cache, against the same scheduler without any cache."""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

HERE = Path(__file__).parent
WORK = HERE.parents[1] / ".sglang"
LIMIT_S = 240


def environment():
    return os.environ | {
        "PYTHONPATH": os.pathsep.join((str(HERE / "stubs"), str(HERE.parents[1]))), "PYTHONDONTWRITEBYTECODE": "1",
        "SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1",
        "TORCH_EXTENSIONS_DIR": str(WORK / "torch_extensions"), "SGLANG_CACHE_DIR": str(WORK / "cache"),
    }  # fmt: skip


def call(*arguments, limit_s=LIMIT_S, **variables):
    return subprocess.run(
        [sys.executable, "-W", "ignore", *arguments], cwd=HERE, env=environment() | variables, capture_output=True, text=True,
        timeout=limit_s, check=False,
    )  # fmt: skip


@cache
def models():
    if not (WORK / "mtp" / "model.safetensors").exists():
        done = call("models.py", str(WORK))
        assert done.returncode == 0, done.stderr[-4000:]
    return WORK


@cache
def _served(text):
    done = call("worker.py", text)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def served(model, scenario, backend="cphicache", **config):
    config |= {"model": str(models() / model), "scenario": scenario, "backend": backend}
    return _served(json.dumps(config, sort_keys=True))


def tokens(result):
    return {rid: told["tokens"] for rid, told in result["served"].items() if isinstance(told, dict)}


@pytest.mark.parametrize("model", ["llama", "mla"])
def test_prompt_comes_back_from_device_and_from_host(model):
    """R24, R25: the second time a prompt is on the device, after eviction on the host, and its tokens are those of a run without cache."""
    result, reference = served(model, "basic"), served(model, "basic", "none")
    first, again, back = (result["served"][name] for name in ("first", "again", "back"))
    assert (first["device"], first["host"]) == (0, 0)
    assert (again["device"], again["host"]) == (304, 0)
    assert (back["device"], back["host"]) == (0, 304)
    assert tokens(result) == tokens(reference)
    assert result["watch"]["findings"] == []


@pytest.mark.parametrize("model", ["llama", "mla"])
def test_corrupted_host_copy_changes_the_tokens(model):
    """R25: the tokens after a load-back come from the loaded bytes: other bytes give other tokens (control of the tests above)."""
    result = served(model, "basic", corrupt=True)
    assert result["served"]["back"]["host"] == 304
    assert result["served"]["back"]["tokens"] != result["served"]["first"]["tokens"]


def test_first_layer_is_submitted_before_the_last_layer_is_stored():
    """R10, R12: backup overlaps the forward that computes the KV, in every forward that backs anything up."""
    watch = served("llama", "basic")["watch"]
    assert watch["forwards_with_backup"] > 0
    assert watch["early"] == watch["forwards_with_backup"]


RUNS = [
    ("llama", 16, True, "layer_first", {}),
    ("llama", 16, False, "page_first_direct", {"max_total_tokens": 640}),
    ("llama", 1, True, "page_first_direct", {"max_total_tokens": 640}),
    ("llama", 64, False, "layer_first", {}),
    ("mla", 16, False, "layer_first", {"max_total_tokens": 640}),
    ("mla", 64, True, "page_first_direct", {}),
    ("llama", 16, False, "layer_first", {"max_total_tokens": 640, "enable_mixed_chunk": True, "chunked_prefill_size": 50}),
    ("llama", 16, True, "layer_first", {"max_total_tokens": 640, "hicache_write_policy": "write_back"}),
    ("llama", 16, False, "layer_first", {"max_total_tokens": 640, "hicache_write_policy": "write_through_selective"}),
]


@pytest.mark.parametrize(("model", "page_size", "overlap_schedule", "layout", "options"), RUNS)
def test_random_requests_give_the_tokens_of_a_run_without_cache(model, page_size, overlap_schedule, layout, options):
    """R12, R17, R25-R27: requests with shared prefixes, chunks and aborts, under eviction: equal tokens, no finding, no leak."""
    options = {"max_total_tokens": 768, "chunked_prefill_size": 128 if page_size == 64 else 64, **options}
    reference = served(model, "random", "none", requests=60, options={"max_total_tokens": 2048})
    options |= {"page_size": page_size, "disable_overlap_schedule": not overlap_schedule, "hicache_mem_layout": layout}
    result = served(model, "random", requests=60, options=options)
    whole = {rid for rid, told in result["served"].items() if told["reason"] == "FINISH_LENGTH"}
    assert len(whole) >= 40
    expected, found = tokens(reference), tokens(result)
    assert {rid: found[rid] for rid in whole if reference["served"][rid]["reason"] == "FINISH_LENGTH"} == {
        rid: expected[rid] for rid in whole if reference["served"][rid]["reason"] == "FINISH_LENGTH"
    }
    assert result["watch"]["findings"] == []
    assert result["watch"]["load_backs"] > 0
    assert sum(told["host"] for told in result["served"].values()) > 0


def test_host_pool_far_below_the_working_set():
    """R13, R27: with a host pool of half the device pool nothing hangs and nothing leaks; host copies are evicted, the tokens are right."""
    options = {"max_total_tokens": 768, "chunked_prefill_size": 64, "hicache_ratio": 0.5}
    result = served("llama", "random", requests=60, options=options)
    reference = served("llama", "random", "none", requests=60, options={"max_total_tokens": 2048})
    finished = [rid for rid, told in result["served"].items() if told["reason"] == "FINISH_LENGTH"]
    for rid in finished:
        if reference["served"][rid]["reason"] == "FINISH_LENGTH":
            assert result["served"][rid]["tokens"] == reference["served"][rid]["tokens"]
    assert result["watch"]["findings"] == []
    assert result["watch"]["host_evictions"] + sum(result["watch"]["refused"].values()) > 0


def test_retracted_requests_start_again():
    """R12, R18: requests that are taken back for lack of pages give up their reservations, start again and give the same tokens."""
    options = {"max_total_tokens": 384, "schedule_conservativeness": 0.1}
    result = served("llama", "retract", options=options)
    reference = served("llama", "retract", "none", options={"max_total_tokens": 2048})
    assert result["served"]["retracted"] > 0
    assert tokens(result) == tokens(reference)
    assert result["watch"]["findings"] == []


def test_request_that_would_split_a_pending_node_waits_alone():
    """R17: while copies are slow, the request that would divide a pending node is passed over, and one without a part in it runs first."""
    result = served("llama", "waiting", delay_us=400_000)
    reference = served("llama", "waiting", "none")
    assert result["watch"]["deferred"] > 0
    assert result["served"]["order"] == ["other", "divides"]
    assert tokens(result) == tokens(reference)
    assert result["watch"]["findings"] == []


def test_nobody_is_preempted_for_a_request_that_has_to_wait():
    """R17: with priorities, a running request is not taken back for one that would be passed over; both end, with the right tokens."""
    priorities = {"enable_priority_scheduling": True, "max_running_requests": 1, "priority_scheduling_preemption_threshold": 1}
    result = served("llama", "preempt", delay_us=400_000, options=priorities)
    reference = served("llama", "preempt", "none", options={"max_running_requests": 1, "enable_priority_scheduling": True})
    assert result["watch"]["deferred"] > 0
    assert tokens(result) == tokens(reference)
    assert result["watch"]["findings"] == []


def test_failed_load_back_aborts_its_readers_and_enters_nothing():
    """R25: a request that was admitted on a load-back which fails is aborted with the reason, or its KV does not enter the tree."""
    result = served("llama", "basic", fail_load=True)
    assert result["watch"]["load_backs_failed"] == 1
    assert result["served"]["back"]["reason"] == "FINISH_ABORT"
    assert result["watch"]["findings"] == []


def test_flush_with_backups_in_flight():
    """R18: a flush brings backups in flight to their end and forgets everything; the prompt is computed again, with the same tokens."""
    result = served("llama", "flush", delay_us=400_000)
    assert result["served"]["busy"] > 0
    assert result["served"]["flushed"]
    assert result["served"]["again"]["cached"] == 0
    assert result["served"]["again"]["tokens"] == result["served"]["first"]["tokens"]
    assert result["watch"]["findings"] == []


@pytest.mark.parametrize(
    ("options", "variables", "says"),
    [
        ({"enable_hierarchical_cache": False}, {}, "add that flag"),
        ({"speculative_algorithm": "NGRAM", "page_size": 1}, {}, "use EAGLE, NEXTN or STANDALONE"),
        ({"radix_eviction_policy": "priority"}, {}, "--radix-eviction-policy priority is not supported"),
        ({}, {"CPHICACHE_OVERLAP": "maybe"}, "give true or false"),
        ({}, {"CPHICACHE_COLOUR": "red"}, "CPHICACHE_COLOUR is not a setting"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(options, variables, says):
    """R35: a start that cannot work ends with one line on stderr that names the option and the remedy."""
    config = {"model": str(models() / "llama"), "scenario": "basic", "backend": "cphicache", "options": options}
    done = call("worker.py", json.dumps(config), **variables)
    assert done.returncode != 0
    lines = [line for line in done.stderr.splitlines() if line.startswith("[cphicache] does not start: ")]
    assert len(lines) == 1
    assert says in lines[0]
