"""Logs of real runs, executed on a real engine: the same events, or the first difference by name; what cannot be executed is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from cphicache.engine import CpHiRadixCache
from cphicache.engine.effects import Effects
from cphicache.engine.records import Backup
from cphicache.events import EventLog, Level
from cphicache.reexecute import Execution, RecordedLog, Refused
from cphicache.run.cli import main
from cphicache.transfer.faults import CopyFaults
from cphicache.tree import RadixKey
from tests.engine.small_scheduler import Loopback, SmallScheduler, Step, small_config
from tests.engine_fakes import FakeTransfer
from tests.replay.conftest import serve
from tests.replay.logs import Event, events_of, find, step, write

PRESSING = {"device_tokens": 2048, "host_tokens": 8192, "abort_rate": 0.2, "scale": 0.0625, "requests": 40}


def executed(path: Path) -> Execution:
    execution = Execution(RecordedLog(path))
    assert execution.run() is None
    return execution


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The log of a run of one rank under memory pressure, with every call."""
    (path,) = serve(tmp_path_factory.mktemp("ops"), cp_size=1, log_level="ops", **PRESSING)
    return path


# -- the same -----------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "options",
    [
        {"policy": "write_through_selective"},
        {"policy": "write_back", "device_tokens": 1024},
        {"policy": "write_back", "device_tokens": 1024, "write_back_wait": "drop"},
        {"page_size": 1, "requests": 15},
        {"page_size": 16, "eviction_policy": "lfu"},
        {"reclaim_device_valid": True, "overlap": False},
        {"streams": "threads"},
    ],
    ids=lambda options: "-".join(str(value) for value in options.values()),
)
def test_a_run_executes_to_the_same_events(tmp_path: Path, options: dict[str, Any]) -> None:
    """R37: the calls of a log, made on a real engine, give the events of the log one for one, under every policy and page size."""
    (path,) = serve(tmp_path, cp_size=1, log_level="ops", **{**PRESSING, **options})
    execution = executed(path)
    engines = [event for event in events_of(path) if event["event"] not in ("header", "end")]
    assert execution.events == len(engines)
    assert execution.executed == sum(event["event"] == "op" for event in engines)


def test_each_rank_executes_alone(tmp_path: Path) -> None:
    """R37: the log of each of four ranks executes on its own, with what this rank saw of its copies and of the others."""
    faults = {1: CopyFaults(), 2: CopyFaults()}
    for nth in (3, 11, 40):
        faults[1].fail_copy("d2h", "target", 0, nth=nth)
        faults[2].fail_reserve("target", nth=nth)
    paths = serve(tmp_path, cp_size=4, log_level="ops", faults=faults)
    assert len(paths) == 4
    for path in paths:
        assert executed(path).executed > 1000
    assert any(event["event"] == "copy_status" and event["failed"] for event in events_of(paths[1]))
    assert any(event["event"] == "local_reserve_failed" for event in events_of(paths[2]))


def test_calls_that_the_scheduler_does_not_make(tmp_path: Path) -> None:
    """R37: resets, flushes, evictions, failing reservations and copies, pins and completions handed in are repeated too."""
    path = tmp_path / "events.jsonl"
    steps: list[Step] = [
        *(("admit", 0b11010 + at * 8) for at in range(2)), ("forward", 2), ("results", 1), ("tick", 2), ("copy_fails", 0), ("no_slots", 0),
        ("admit", 37), ("forward", 1), ("results", 7), ("tick", 1), ("evict", 9), ("admit", 77), ("abort", 0), ("reset", 0), ("tick", 3),
        ("admit", 9), ("forward", 0), ("results", 1), ("tick", 1), ("evict", 15), ("admit", 12), ("tick", 0), ("flush", 0),
    ]  # fmt: skip
    live = LoggedScheduler(path)
    live.run(steps)
    live.cache.pin_host(live.cache.key((1, 1, 1, 1), "tenant"), 3)
    live.cache.touch(live.cache.match_prefix(live.cache.key((1, 1, 1, 1), "tenant")).device_node)
    live.cache.agree_now()
    live.cache.free(live.cache.alloc(1, None) or [])
    live.end()
    live.cache.quarantine("asked for")
    live.cache.shutdown()
    live.log.close()
    calls = {event["call"] for event in events_of(path) if event["event"] == "op"}
    assert {
        "evict",
        "reset_backups",
        "flush",
        "pin_host",
        "touch",
        "agree_now",
        "free",
        "quarantine",
        "shutdown",
        "end_payload",
    } <= calls
    executed(path)


class LoggedScheduler(SmallScheduler):
    def __init__(self, path: Path) -> None:
        super().__init__(small_config(), FakeTransfer(small_config()))
        self.log = EventLog(path, rank=0, level=Level.OPS, wall_clock=None, header={})
        self.cache = CpHiRadixCache(self.config, self.local, self.reducer, self.log)


def test_no_token_is_in_the_clear(recorded: Path) -> None:
    """R36: calls are logged with hashes of pages, under a secret; namespaces too."""
    events = [event for event in events_of(recorded) if event["event"] == "op"]
    assert all(len(name) == 16 for event in events for name in event.get("keys", ()))
    log = EventLog(None, rank=0, level=Level.OPS, wall_clock=None, header={})
    cache = CpHiRadixCache(small_config(), FakeTransfer(small_config()), Loopback(), log)
    cache.prepare("r", RadixKey.of([1, 2], 2, "tenant"))
    told = next(event for event in log.events if event.get("call") == "prepare")
    assert len(told["namespace"]) == 16
    assert "tenant" not in str(log.events)


def test_level_lifecycle_has_no_calls(one_rank: Path) -> None:
    """R36: what is needed for execution costs nothing below level ops."""
    assert not any(event["event"] in ("op", "engine", "copy_status") for event in events_of(one_rank))


# -- the first difference -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("wanted", "field", "value"),
    [
        (step("agreed"), "after", "ROLLED_BACK"),
        (step("reserve"), "slots", 12345),
        (lambda event: event["event"] == "device_evicted", "tokens", 1),
        (lambda event: event["event"] == "copy_status", "node", 99999),
    ],
    ids=["step", "number", "fact", "completion"],
)
def test_an_edited_line_is_named(
    recorded: Path, tmp_path: Path, wanted: Callable[[Event], bool], field: str, value: object
) -> None:
    """R37: execution and log part at the edited line, which is told with what was expected and what was found."""
    events = events_of(recorded)
    at = find(events, wanted, nth=2)
    events[at][field] = value
    execution = Execution(RecordedLog(write(tmp_path / "edited.jsonl", events)))
    difference = execution.run()
    assert difference is not None
    assert difference.line.number == at + 1
    assert f"line {at + 1} " in str(difference)
    answer = CliRunner().invoke(main, ["replay", "--execute", str(tmp_path / "edited.jsonl")])
    assert answer.exit_code == 1
    assert answer.output == f"{difference}\n"


def test_a_missing_step_is_named(recorded: Path, tmp_path: Path) -> None:
    """R37: where a step was taken out of the log, the line that stands in its place is told."""
    events = events_of(recorded)
    at = find(events, step("forward_ended"), nth=3)
    del events[at]
    difference = Execution(RecordedLog(write(tmp_path / "edited.jsonl", events))).run()
    assert difference is not None
    assert difference.found is not None
    assert difference.found["trigger"] == "forward_ended"
    assert abs(difference.line.number - at - 1) <= 1


def test_an_engine_that_raises_is_a_difference(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R37: what the engine raises is told with the operation that it was executing."""

    def commit(self: Effects, record: Backup) -> None:
        raise AssertionError("planted")

    monkeypatch.setattr(Effects, "commit", commit)
    difference = Execution(RecordedLog(recorded)).run()
    assert difference is not None
    assert difference.error == "AssertionError: planted"
    assert "the engine raised AssertionError: planted" in str(difference)


# -- refused ------------------------------------------------------------------------------------------------------------------------
def refused(path: Path, what: str) -> None:
    with pytest.raises(Refused, match=what):
        RecordedLog(path)
    answer = CliRunner().invoke(main, ["replay", "--execute", str(path)])
    assert answer.exit_code == 2
    assert answer.output.count("\n") == 1


def test_other_levels_are_refused(one_rank: Path) -> None:
    """R37: a log of level lifecycle is refused in one line that says so."""
    refused(one_rank, "only a log of level ops")


def test_losses_cuts_and_gaps_are_refused(recorded: Path, tmp_path: Path) -> None:
    """R37: a log with losses, without its end, with a cut line or with a gap is refused in one line that says so."""
    events = events_of(recorded)
    lost = {"seq": 12, "rank": 0, "event": "lost", "first": 10, "lost": 3}
    refused(write(tmp_path / "lost", [*events[:10], lost, *events[13:]], renumber=False), "a log with losses")
    refused(write(tmp_path / "no_end", events[:-1]), "it has no end")
    refused(write(tmp_path / "gap", [*events[:50], *events[60:]], renumber=False), "not whole")
    cut = tmp_path / "cut"
    cut.write_bytes(recorded.read_bytes()[:-5])
    refused(cut, "not whole")
    refused(tmp_path / "absent", "cannot be read")


def test_what_an_older_version_wrote_is_refused(recorded: Path, tmp_path: Path) -> None:
    """R37: a log of level ops without calls, with a replaced state, or with an unknown configuration is refused."""
    events = events_of(recorded)
    refused(write(tmp_path / "old", [event for event in events if event["event"] not in ("op", "engine")]), "older version")
    restored = {"event": "op", "call": "restore", "tick": 0, "rank": 0}
    refused(write(tmp_path / "restored", [*events[:3], restored, *events[3:]]), "was replaced")
    at = find(events, lambda event: event["event"] == "engine")
    events[at]["config"]["news"] = 1
    refused(write(tmp_path / "config", events), "configuration is not known")


def test_options_that_do_not_go_together(recorded: Path) -> None:
    """R35: the command names what it cannot do in one line, with exit status 2."""
    for options, says in (
        (["--execute", "--node", "1"], "--execute takes whole logs: leave out --node"),
        (["--shrink"], "--shrink: give the file to write"),
        (["--execute", "--shrink", "-o", "x.py"], "give one of them"),
        (["--shrink", "--json", "-o", "x.py"], "leave out --json"),
        ([str(recorded), "--shrink", "-o", "x.py"], "--shrink takes the log of one rank, and 2 were given"),
        (["-o", "x.py"], "-o x.py: is the test case that --shrink writes"),
    ):
        answer = CliRunner().invoke(main, ["replay", str(recorded), *options])
        assert (answer.exit_code, answer.output.count("\n")) == (2, 1)
        assert says in answer.output
    answer = CliRunner().invoke(main, ["replay", str(recorded), "--execute"])
    assert answer.exit_code == 0
    assert "events as recorded" in answer.output


def test_json_has_an_entry_for_each_log(recorded: Path, tmp_path: Path) -> None:
    """R37: with ``--json`` only that is printed: a log's events and its first difference, or none; one is enough for status 1."""
    events = events_of(recorded)
    at = find(events, step("copy_done"))
    edited = write(tmp_path / "edited.jsonl", [*events[:at], {**events[at], "slots": 12345}, *events[at + 1 :]])
    answer = CliRunner().invoke(main, ["replay", str(edited), str(recorded), "--execute", "--json"])
    assert answer.exit_code == 1
    different, same = json.loads(answer.output)["logs"]
    assert (different["log"], same["log"]) == (str(edited), str(recorded))
    assert "12345" in different["difference"]
    assert same["difference"] is None
    assert same["events"] > different["events"] > 0
