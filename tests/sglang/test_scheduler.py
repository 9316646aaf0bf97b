"""The real SGLang scheduler with cphicache as its cache, against the same scheduler without any cache."""

import hashlib
from importlib import metadata

import pytest
from serving import call, models, reference, run_script, served
from soak import combinations, faults, options
from workload import WHOLE

from cphicache.events import read_events
from cphicache.replay import replay


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


REQUESTS = 60
RUNS = [
    *((*combination, {}) for combination in combinations()),
    ("llama", 16, False, "layer_first", {"enable_mixed_chunk": True, "chunked_prefill_size": 50}),
    ("llama", 16, True, "layer_first", {"hicache_write_policy": "write_back"}),
    ("llama", 16, False, "page_first_direct", {"hicache_write_policy": "write_through_selective"}),
    (
        "llama",
        16,
        False,
        "layer_first",
        {"radix_eviction_policy": "slru", "radix_eviction_policy_config": {"protected_threshold": 3}},
    ),
]


@pytest.mark.parametrize(("model", "page_size", "overlap_schedule", "layout", "more"), RUNS)
def test_random_requests_give_the_tokens_of_a_run_without_cache(model, page_size, overlap_schedule, layout, more):
    """R12, R17, R25-R27: requests with shared prefixes, chunks, aborts, retractions, under eviction: equal tokens, no finding, no leak."""
    result = served(model, "random", requests=REQUESTS, options=options(page_size, overlap_schedule, layout, **more))
    assert faults(result, reference(model, REQUESTS)) == []


def test_host_pool_far_below_the_working_set():
    """R13, R27: with a host pool of a third of the device pool nothing hangs and nothing leaks; host copies are evicted, backups are
    refused only when no victim is left, and the tokens are right."""
    given = options(16, overlap_schedule=True, layout="layer_first", hicache_ratio=0.33)
    result = served("llama", "random", requests=REQUESTS, options=given)
    assert [fault for fault in faults(result, reference("llama", REQUESTS)) if fault != "no host hits"] == []
    assert result["watch"]["host_evictions"] > 0
    assert result["watch"]["refused"]["no_host_slots"] > 0


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


def test_prompt_whose_insert_was_declined_is_found_before_its_request_ends():
    """R17: a running request's prompt that could not be inserted at first enters the tree as soon as that can be; who comes later has it
    from there."""
    result = served("llama", "declined")
    assert result["served"]["declined"] > 0, "the insert was not declined: nothing is tested"
    assert result["served"]["long"]["host"] == 320
    assert (result["served"]["same"]["device"], result["served"]["same"]["host"]) == (384, 0)
    reference = served("llama", "declined", "none")
    assert tokens(result)["same"] == tokens(reference)["same"]
    assert tokens(result)["long"] == tokens(reference)["long"]
    assert result["watch"]["findings"] == []


@pytest.mark.parametrize("overlap_schedule", [True, False])
def test_idle_iterations_leave_no_events(overlap_schedule, tmp_path):
    """R36, R37: while there is nothing to do, no tick is taken and nothing is logged; the log replays without a finding."""
    given = {"disable_overlap_schedule": not overlap_schedule}
    log = tmp_path / "events.jsonl"
    result = served("llama", "idle", options=given, variables={"CPHICACHE_LOG": str(log), "CPHICACHE_LOG_LEVEL": "ops"})
    assert result["served"]["ticks"] < 10
    assert sum(event.get("call") == "begin_tick" for event in read_events(log)) < 50
    report = replay([log])
    assert report.is_clean, report.text()
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


@pytest.mark.parametrize("overlap_schedule", [True, False])
def test_request_of_one_token_on_a_failed_load_back_is_aborted(overlap_schedule):
    """R25: a request that ends with its first token, before a failure of what it has read is agreed, is aborted all the same."""
    given = {"disable_overlap_schedule": not overlap_schedule}
    result = served("llama", "basic", fail_load=True, back_tokens=1, options=given)
    assert result["watch"]["load_backs_failed"] == 1
    assert result["served"]["back"]["reason"] == "FINISH_ABORT"
    assert result["watch"]["findings"] == []


@pytest.mark.parametrize("overlap_schedule", [True, False])
def test_request_that_is_taken_back_before_its_load_back_is_known_to_have_failed_is_aborted(overlap_schedule):
    """R25: a retraction asks whether what the request has read was right. It was not: the request does not go on with the tokens that it
    has, it is aborted, and nothing computed from the load-back is found later."""
    given = {"enable_priority_scheduling": True, "max_running_requests": 1, "priority_scheduling_preemption_threshold": 1}
    result = served("llama", "failed_late", fail_load=True, options=given | {"disable_overlap_schedule": not overlap_schedule})
    told = result["served"]
    assert (told["known_before"], told["preempted"]) == (0, True), "the failure was known before: nothing is tested"
    assert result["watch"]["load_backs_failed"] == 1
    assert told["slow"]["reason"] == "FINISH_ABORT"
    assert told["urgent"]["reason"] == told["again"]["reason"] == WHOLE
    assert told["again"]["tokens"] == told["first"]["tokens"]
    assert result["watch"]["findings"] == []


def test_all_requests_are_aborted_with_backups_in_flight():
    """R18: an abort of everything and a flush leave nothing behind, and the cache serves on."""
    result = served("llama", "abort_all", delay_us=200_000)
    told = result["served"]
    assert told["backups"] > 0
    assert told["waiting"] > 0
    assert told["flushed"]
    assert told["left"] == 0
    assert told["again"]["reason"] == WHOLE
    assert result["watch"]["findings"] == []


def test_preempted_request_comes_back_when_nothing_could_be_admitted():
    """R17: a preemption that frees too little, because backups hold pages, loses nobody: both requests wait, then end."""
    given = {"enable_priority_scheduling": True, "max_running_requests": 1, "priority_scheduling_preemption_threshold": 1}
    result = served("llama", "preempt_full", delay_us=400_000, options=given | {"max_total_tokens": 400})
    expected = served("llama", "preempt_full", "none", options={"max_running_requests": 1, "enable_priority_scheduling": True})
    assert result["served"]["both_waited"], "the preemption has made room at once: nothing is tested"
    assert tokens(result) == tokens(expected)
    assert result["watch"]["findings"] == []


def test_namespaces_share_nothing():
    """R30: a prompt with another extra key, LoRA adapter or cache salt is another prompt; in its own namespace it is found again."""
    told = served("llama", "namespaces")["served"]
    assert [one["cached"] for name, one in told.items() if name.endswith("1")] == [0] * 7
    assert [one["cached"] for name, one in told.items() if name.endswith("2")] == [96] * 7


@pytest.mark.parametrize(("given", "config"), [
    ({"radix_eviction_policy": "priority", "enable_priority_scheduling": True}, {"priority": 9}),
    ({"radix_eviction_policy": "slru"}, {}),
])  # fmt: skip
def test_eviction_policies_of_the_server(given, config):
    """R27: a prompt of high priority, or one that came twice, outlives newer ones on the device; under LRU it does not (above)."""
    result = served("llama", "basic", options=given, **config)
    assert (result["served"]["back"]["device"], result["served"]["back"]["host"]) == (304, 0)
    assert result["watch"]["findings"] == []


def block_hash(prior, tokens):
    return hashlib.sha256(prior + b"".join(token.to_bytes(4, "little") for token in tokens)).digest()


def test_router_hears_of_every_block():
    """R27: replaying the KV events gives the blocks that are on the device and on the host; hashes chain as SGLang's do."""
    result = served("llama", "events", requests=30, options=options(16, overlap_schedule=False, layout="layer_first") | {
        "kv_events_config": '{"publisher": "zmq", "endpoint": "inproc://events"}',
    })["served"]  # fmt: skip
    media = {"GPU": set(), "CPU_PINNED": set()}
    for event in result["random"]["events"]:
        blocks, known = event["block_hashes"], media[event["medium"]]
        if event["kind"] == "BlockStored":
            assert not known.intersection(blocks)
            assert len(event["token_ids"]) == len(blocks) * event["block_size"] == len(blocks) * 16
            above = event["parent_block_hash"]
            assert above is None or above in media["GPU"] | media["CPU_PINNED"]
            known.update(blocks)
        else:
            assert known.issuperset(blocks)
            known.difference_update(blocks)
    assert {"BlockStored", "BlockRemoved"} == {event["kind"] for event in result["random"]["events"]}
    assert len(media["GPU"]) == result["random"]["device_pages"] > 0
    assert len(media["CPU_PINNED"]) == result["random"]["host_pages"] > 0
    assert [event["kind"] for event in result["flush"]["events"]] == ["AllBlocksCleared"]
    first, second = result["tokens"][:16], result["tokens"][16:]
    for salt, seed in ((None, b""), ("s", hashlib.sha256(b"sglang-cache-salt-v1\0s").digest())):
        digest = block_hash(seed, first)
        stored = [
            event for event in result["prompt"]["events"]
            if (event["kind"], event.get("cache_salt"), event["medium"]) == ("BlockStored", salt, "GPU")
        ]  # fmt: skip
        expected = [int.from_bytes(each[:8], "big", signed=True) for each in (digest, block_hash(digest, second))]
        assert [block for event in stored for block in event["block_hashes"]] == expected


def test_flush_with_backups_in_flight():
    """R18: a flush brings backups in flight to their end and forgets everything; the prompt is computed again, with the same tokens."""
    result = served("llama", "flush", delay_us=400_000)
    assert result["served"]["busy"] > 0
    assert result["served"]["flushed"]
    assert result["served"]["again"]["cached"] == 0
    assert result["served"]["again"]["tokens"] == result["served"]["first"]["tokens"]
    assert result["watch"]["findings"] == []


def test_an_engine_that_cannot_end_leaves_nothing_open(tmp_path):
    """R35: an error of the engine's own end (a rank is lost) is told, and copy threads, host memory and log are given up all the same."""
    log = tmp_path / "events.jsonl"
    result = served("llama", "basic", end_fails=True, variables={"CPHICACHE_LOG": str(log)})
    assert result["end"] == {"told": "planted in shutdown", "threads": []}
    assert '"reason":"closed"' in log.read_text().splitlines()[-1]


@pytest.mark.parametrize(
    ("options", "variables", "says"),
    [
        ({"enable_hierarchical_cache": False}, {}, "add that flag"),
        ({"enable_streaming_session": True}, {}, "--enable-streaming-session is not supported"),
        ({}, {"CPHICACHE_OVERLAP": "maybe"}, "give true or false"),
        ({}, {"CPHICACHE_COLOUR": "red"}, "CPHICACHE_COLOUR is not a setting"),
        ({}, {"CPHICACHE_LOG": "/dev/null/events.jsonl"}, "/dev/null/events.jsonl: cannot be"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(options, variables, says):
    """R35: a start that cannot work ends with one line on stderr that names the option and the remedy."""
    config = {"model": str(models() / "llama"), "scenario": "basic", "backend": "cphicache", "options": options}
    done = call(config, **variables)
    assert done.returncode != 0
    lines = [line for line in done.stderr.splitlines() if line.startswith("[cphicache] does not start: ")]
    assert len(lines) == 1
    assert says in lines[0]


def test_installed_version_is_served_under_its_own_contract():
    """R35: the contract is that of the installed version, and lacks nothing of it."""
    done = run_script("-c", "from cphicache.sglang.contracts import installed_contract as it; print(it().version, it().lacking())")
    assert done.stdout.splitlines()[-1:] == [f"{metadata.version('sglang')} []"], done.stderr[-4000:]
