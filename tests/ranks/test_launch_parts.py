"""What the launcher and its ranks exchange: options, greetings, results, logs."""

from __future__ import annotations

import os
import re
from collections import Counter
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from cphicache.agree.handshake import HandshakeRefused, check_equal
from cphicache.run.cli import run
from cphicache.run.compare import first_difference
from cphicache.run.config import RunConfig
from cphicache.run.handshake import hello
from cphicache.run.jobs import load_requests
from cphicache.run.launch import outcome_of, rank_arguments, run_processes
from cphicache.run.model import Mismatch
from cphicache.run.rank_main import parse
from cphicache.run.wire import decode, encode
from cphicache.run.world import RunFailed
from tests.ranks.test_membership import DictStore
from tests.ranks.worlds import config_of, delayed, in_threads, rank_logs

OTHER: dict[str, object] = {
    "trace": Path("other.jsonl"),
    "requests": 7,
    "scale": 0.5,
    "seed": 3,
    "arrival": "asap",
    "tick_ms": 5.0,
    "abort_rate": 0.0,
    "retract_rate": 0.25,
    "cp_size": 2,
    "page_size": 8,
    "device_tokens": 4096,
    "host_tokens": 8192,
    "kv_replicated": True,
    "rank_timeout_s": 3.5,
    "check_ranks": 5,
    "kv": "mha",
    "kv_dtype": "fp16",
    "layout": "page_first",
    "backend": "kernel",
    "page_first_d2h": "triton",
    "reference_operators": True,
    "index_dim": 64,
    "index_every": 2,
    "layers": 2,
    "draft_layers": 0,
    "latent_dim": 16,
    "rope_dim": 4,
    "kv_heads": 1,
    "head_dim": 8,
    "chunk_tokens": 64,
    "max_batch": 3,
    "policy": "write_back",
    "selective_hits": 3,
    "write_back_wait": "drop",
    "eviction_policy": "fifo",
    "reclaim_device_valid": True,
    "overlap": False,
    "max_deferral_ticks": 9,
    "max_retries": 1,
    "load_back_threshold": 0,
    "streams": "threads",
    "verify": "sample",
    "log": Path("events.jsonl"),
    "log_level": "ops",
}
"""Another legal value than the default for every option that a rank is told."""
NOT_TOLD = {"launch", "out", "json"}


def test_every_option_reaches_the_ranks() -> None:
    """R35: whatever option a run is given, each of its ranks parses the same value from its own command line."""
    assert set(OTHER) == {field.name for field in fields(RunConfig)} - NOT_TOLD
    config = RunConfig.from_mapping(OTHER)
    assert all(getattr(config, field.name) != field.default for field in fields(config) if field.name not in NOT_TOLD)
    assert parse(rank_arguments(config)) == config
    assert rank_arguments(RunConfig(launch="processes", json=True)) == []
    assert {parameter.name for parameter in run.params} >= set(OTHER)


REFUSED: dict[str, Any] = {
    "page_size": 8,
    "cp_size": 3,
    "device_tokens": 1024,
    "host_tokens": 2048,
    "policy": "write_back",
    "seed": 1,
    "kv": "mha",
    "kv_dtype": "fp16",
    "layout": "page_first",
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_rank_that_was_started_otherwise_is_named(name: str) -> None:
    """R35: a rank with another page size, CP size, pool size, policy or kind of KV is refused with rank, field and both values."""
    config = config_of()
    other = replace(config, **{name: REFUSED[name]})
    requests = load_requests(config)
    hellos = [hello(each, requests) for each in (config, config, other)]
    words, value = name.replace("_", " "), REFUSED[name]
    with pytest.raises(HandshakeRefused, match=f"rank 2 is refused: its {words} is {value}, rank 0 has {getattr(config, name)};"):
        check_equal(hellos)
    check_equal(hellos[:2])


@pytest.mark.parametrize("field", ["version", "transition table", "torch"])
def test_what_is_built_in_is_compared_too(field: str) -> None:
    """R35: ranks of another version or transition table are refused as well; so are other requests."""
    config = config_of()
    requests = load_requests(config)
    mine = hello(config, requests)
    with pytest.raises(HandshakeRefused, match=re.escape(f"rank 1 is refused: its {field} is another, rank 0 has {mine[field]};")):
        check_equal([mine, {**mine, field: "another"}])
    with pytest.raises(HandshakeRefused, match="rank 1 is refused: its workload is 11 requests"):
        check_equal([mine, hello(config, requests[:-1])])
    with pytest.raises(HandshakeRefused, match="its new field is 1, rank 0 has nothing"):
        check_equal([mine, {**mine, "new field": "1"}])


def test_ranks_may_log_elsewhere() -> None:
    """R35: where a rank writes and what it prints is its own business."""
    config = config_of()
    requests = load_requests(config)
    check_equal([hello(config, requests), hello(replace(config, log=Path("here.jsonl"), json=True, launch="threads"), requests)])


def test_a_result_comes_back_as_it_was() -> None:
    """R30: what a rank reports is decoded to what it had counted, keys that are numbers and evidence included."""
    first, second = in_threads(config_of(), delayed(0))
    mismatch = Mismatch("r1", None, 0, "target", 1, "latent", 5, 6, 7, 8)
    first.verdict.evidence.append(mismatch)
    told = replace(first, log=Path("a.jsonl"), waits=3, blocked_s=0.5, broken="why", gone="what")
    assert decode(encode(told).encode()) == told
    not_utf8 = replace(told, log=Path(os.fsdecode(b"\xff\xc3/\xc3\xa4.jsonl")))
    assert decode(encode(not_utf8).encode()) == not_utf8
    assert decode(encode(second).encode()) == second
    assert isinstance(decode(encode(second).encode()).counters.ticks_to_visible, Counter)


def test_logs_are_compared_event_for_event(tmp_path: Path) -> None:
    """R20, R36: equal logical events are no difference; the first one that is another, or missing, is told with both."""
    config = config_of(log=tmp_path / "events.jsonl")
    in_threads(config, delayed(1))
    logs = rank_logs(tmp_path / "events.jsonl", 2)
    assert first_difference(list(enumerate(logs))) is None
    lines = logs[1].read_bytes().splitlines(keepends=True)
    at = next(index for index, line in enumerate(lines) if b'"trigger":"reserve"' in line)
    short = tmp_path / "short.jsonl"
    short.write_bytes(b"".join(lines[:at]))
    difference = first_difference([(0, logs[0]), (1, short)])
    assert difference is not None
    assert "the logs of ranks 0 and 1 differ: rank 0 event" in difference
    assert difference.endswith("rank 1 has no further event")
    changed = tmp_path / "changed.jsonl"
    changed.write_bytes(b"".join([*lines[:at], lines[at].replace(b'"RESERVED"', b'"COMMITTED"'), *lines[at + 1 :]]))
    difference = first_difference([(0, logs[0]), (3, changed)])
    assert difference is not None
    assert "after=RESERVED" in difference
    assert "after=COMMITTED" in difference


def test_a_log_that_cannot_be_compared_is_a_difference(tmp_path: Path) -> None:
    """R20, R36: a log that was cut, or has gone, proves nothing: the outcome says which, beside all results."""
    config = config_of(log=tmp_path / "events.jsonl")
    results = in_threads(config, delayed(1))
    store = DictStore()
    for result in results:
        store.set(f"result/{result.rank}", encode(result))
    assert outcome_of(config, store, {}).difference is None
    _, second = rank_logs(tmp_path / "events.jsonl", 2)
    second.write_bytes(second.read_bytes()[:-10])
    difference = outcome_of(config, store, {}).difference
    assert difference is not None
    assert f"event log {second}, line " in difference
    assert "the line is cut short" in difference
    second.unlink()
    outcome = outcome_of(config, store, {})
    assert outcome.difference == f"event log {second}: cannot be read (No such file or directory)"
    assert outcome.results == results


def test_a_trace_that_only_one_process_can_read_is_refused(tmp_path: Path) -> None:
    """R35: every rank reads the trace by its name, so one that is not a regular file is refused as unusable before any rank is started."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(
        RunFailed, match="pipe: is not a regular file, and with --launch processes every rank reads it; give a file"
    ) as caught:
        run_processes(config_of(trace=pipe), command=("a command that does not exist",))
    assert caught.value.kind == "unusable"
