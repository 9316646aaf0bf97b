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
from cphicache.reexecute import Execution, NothingFails, RecordedLog, Refused, shrink
from cphicache.run.cli import main
from cphicache.tree import RadixKey
from tests.engine.small_scheduler import Loopback, small_config
from tests.engine_fakes import FakeTransfer
from tests.replay.calls import odd_calls
from tests.replay.conftest import PRESSING, serve
from tests.replay.logs import Event, events_of, find, step, write


def executed(path: Path) -> Execution:
    execution = Execution(RecordedLog(path))
    assert execution.run() is None
    return execution


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


def test_each_rank_executes_alone(failing_ranks: list[Path]) -> None:
    """R37: the log of each of four ranks executes on its own, with what this rank saw of its copies and of the others."""
    assert len(failing_ranks) == 4
    for path in failing_ranks:
        assert executed(path).executed > 1000
    assert any(event["event"] == "copy_status" and event["failed"] for event in events_of(failing_ranks[1]))
    assert any(event["event"] == "local_reserve_failed" for event in events_of(failing_ranks[2]))


def test_calls_that_the_scheduler_does_not_make(tmp_path: Path) -> None:
    """R37: resets, flushes, evictions, failing reservations and copies, pins and completions handed in are repeated too."""
    path = odd_calls(tmp_path / "events.jsonl")
    calls = {event["call"] for event in events_of(path) if event["event"] == "op"}
    assert {
        "evict",
        "reset_backups",
        "flush",
        "pin_host",
        "touch",
        "completion",
        "agree_now",
        "free",
        "quarantine",
        "shutdown",
        "end_payload",
    } <= calls
    executed(path)


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
    ("wanted", "field", "value", "says"),
    [
        (step("agreed"), "after", "ROLLED_BACK", "expected after 'ROLLED_BACK', found 'COMMITTED'"),
        (step("reserve"), "slots", 12345, "expected slots 12345, found 48"),
        (step("forward_ended"), "trigger", "abort", "-> LAYERS_IN_FLIGHT, found forward_ended node"),
        (lambda event: event["event"] == "device_evicted", "tokens", 1, "device_evicted: expected tokens 1, found"),
        (lambda event: event["event"] == "copy_status", "node", 99999, "copy_status node 99999 generation"),
    ],
    ids=["step", "number", "another step", "fact", "completion"],
)
def test_an_edited_line_is_named(  # noqa: PLR0917 - what is edited, and what is said
    recorded: Path, tmp_path: Path, wanted: Callable[[Event], bool], field: str, value: object, says: str
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
    assert says in str(difference)
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


def test_a_step_that_the_log_lacks_at_the_end_of_a_call_is_named(recorded: Path, tmp_path: Path) -> None:
    """R37: where the engine goes on and the log does not, the line is told after which it does, with what the engine did."""
    events = events_of(recorded)
    at = find(events, step("agreed", after="COMMITTED"), nth=-1)
    call = find(events[:at], lambda event: event["event"] == "op", nth=-1)
    after = [event for event in events[at:] if event["event"] not in ("op", "end")]
    assert len(after) < 5, "the log ends in this call but for a few facts"
    difference = Execution(RecordedLog(write(tmp_path / "edited.jsonl", [*events[:at], events[-1]]))).run()
    assert difference is not None
    assert (difference.line.number, difference.expected) == (at, None)
    told = f"expected no further event, found agreed node {events[at]['node']} generation {events[at]['generation']}"
    assert told in str(difference)
    assert call < at


@pytest.mark.parametrize(
    ("wanted", "damage", "says"),
    [
        ("begin_tick", {"call": "ponder"}, "Unplayable: a call 'ponder' is not known: the log is of another version"),
        ("admit", {"node": 4321}, "Unplayable: node 4321 is not in the tree"),
        ("prepare", {"keys": ["12"]}, "ValueError: page hash '12': 16 hex digits were expected"),
    ],
)
def test_a_damaged_call_is_named(recorded: Path, tmp_path: Path, wanted: str, damage: Event, says: str) -> None:
    """R37: a call that cannot be made ends the execution at its line with what is wrong with it."""
    events = events_of(recorded)
    at = find(events, lambda event: event.get("call") == wanted, nth=3)
    events[at] |= damage
    difference = Execution(RecordedLog(write(tmp_path / "edited.jsonl", events))).run()
    assert difference is not None
    assert (difference.line.number, difference.error) == (at + 1, says)


def test_a_reduction_that_the_log_lacks_is_named(recorded: Path, tmp_path: Path) -> None:
    """R37: where the engine waits for a reduction and none was recorded, the call ends there."""
    events = events_of(recorded)
    last = find(events, lambda event: event["event"] == "reduction", nth=-1)
    del events[last]
    difference = Execution(RecordedLog(write(tmp_path / "edited.jsonl", events))).run()
    assert difference is not None
    assert difference.line.number == last + 1
    assert difference.error == "NotRecorded: a reduction is waited for, and the log has none here"


def test_a_difference_before_the_first_call_is_named(recorded: Path, tmp_path: Path) -> None:
    """R37: what the engine says of itself is compared too; as no call leads there, there is nothing to shrink."""
    events = events_of(recorded)
    at = find(events, lambda event: event["event"] == "cache")
    events[at]["host_slots"] += 1
    path = write(tmp_path / "edited.jsonl", events)
    execution = Execution(RecordedLog(path))
    difference = execution.run()
    assert difference is not None
    assert (difference.line.number, difference.fields, execution.executed) == (at + 1, ("host_slots",), 0)
    with pytest.raises(NothingFails, match="before its first call: there is no call to leave out"):
        shrink(RecordedLog(path))


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


def test_logs_of_two_engines_are_refused(recorded: Path, tmp_path: Path) -> None:
    """R37: what two engines wrote into one log is refused with the line at which the second begins."""
    events = events_of(recorded)
    at = find(events, lambda event: event["event"] == "engine")
    refused(write(tmp_path / "two", [*events[:-1], events[at], events[-1]]), f"line {len(events)}: a second engine")


@pytest.mark.parametrize(
    ("name", "lost", "damage", "says"),
    [
        ("copy_status", "drained", {}, r"a field is missing or is no number \('drained'\)"),
        ("reduction", "count", {}, "'reduction' has no field 'count'"),
        ("op", "payload", {"payload": -1}, "field 'payload' of 'op' is -1 where a whole number from 0 on was expected"),
        ("op", "keys", {"keys": [5]}, r"field 'keys' of 'op' is \[5\] where a list of strings was expected"),
    ],
)
def test_an_answer_or_a_call_with_a_wrong_field_is_refused(  # noqa: PLR0917 - what is changed, and what is told of it
    recorded: Path, tmp_path: Path, name: str, lost: str, damage: Event, says: str
) -> None:
    """R37: what cannot be given or asked again ends the execution in one line that names its line, with exit status 2."""
    events = events_of(recorded)
    at = find(events, lambda event: event["event"] == name and lost in event, nth=2)
    del events[at][lost]
    events[at] |= damage
    path = write(tmp_path / "edited.jsonl", events)
    with pytest.raises(Refused, match=f"line {at + 1}: {says}"):
        Execution(RecordedLog(path)).run()
    answer = CliRunner().invoke(main, ["replay", "--execute", str(path)])
    assert (answer.exit_code, answer.output.count("\n")) == (2, 1)


def test_progress_is_told_in_bytes(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R37: a long log tells how far it has been read, once while it is looked through and once while it is executed."""
    monkeypatch.setattr("cphicache.reexecute.recorded.PROGRESS_LINES", 500)
    read: list[int] = []
    log = RecordedLog(recorded, on_progress=read.append)
    looked = len(read)
    Execution(log).run()
    for once in (read[:looked], read[looked:]):
        assert len(once) > 3
        assert once == sorted(once)
        assert recorded.stat().st_size * 3 // 4 < once[-1] <= recorded.stat().st_size


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
