"""The writer and the reader of event logs."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any

import orjson
import pytest
import structlog
import torch

from cphicache.events import EventLog, EventLogError, Level, logical_view, read_events
from cphicache.events.types import EVENTS, FIELDS
from cphicache.lifecycle import State, Trigger, table_hash


def make_log(
    path: Path | None = None, *, level: Level = Level.LIFECYCLE, rank: int = 0, clock: Any = None, keep: int = 1000
) -> EventLog:
    return EventLog(path, rank=rank, level=level, wall_clock=clock, header={"seed": 7}, keep=keep)


def one_step(log: EventLog, tick: int = 3, trigger: Trigger = Trigger.LAYER_STORED, **changes: Any) -> None:
    fields: dict[str, Any] = {
        "number": 5,
        "bound": True,
        "agreed": False,
        "marks": [(3, 2), (1, 0)],
        "payloads": ("target", "draft"),
        "slots": 16,
    }
    log.step(tick, 11, 2, trigger, State.RESERVED, State.LAYERS_IN_FLIGHT, **{**fields, **changes})


def test_a_step_has_every_field_of_the_schema(tmp_path: Path) -> None:
    """R36: a step is one JSON line: number, tick, rank, node, generation, trigger, states, watermarks, slots, reason."""
    with make_log(tmp_path / "log.jsonl", rank=3) as log:
        one_step(log, stale="late", reason="because")
    lines = (tmp_path / "log.jsonl").read_bytes().splitlines()
    assert len(lines) == 3
    assert orjson.loads(lines[1]) == {
        "rank": 3,
        "seq": 1,
        "event": "step",
        "tick": 3,
        "node": 11,
        "generation": 2,
        "trigger": "layer_stored",
        "before": "RESERVED",
        "after": "LAYERS_IN_FLIGHT",
        "stale": "late",
        "number": 5,
        "bound": True,
        "agreed": False,
        "submitted": {"target": 3, "draft": 1},
        "confirmed": {"target": 2, "draft": 0},
        "slots": 16,
        "used": 0,
        "reason": "because",
    }
    assert set(orjson.loads(lines[1])) <= {*FIELDS, *EVENTS["step"]}


def test_absent_facts_have_no_field() -> None:
    """R36: a step without number, stale name, reason and wall time says nothing about them."""
    log = make_log()
    one_step(log, number=None)
    assert not {"number", "stale", "reason", "wall", "local", "locks"} & set(log.events[1])


def test_the_header_says_what_wrote_the_log(tmp_path: Path) -> None:
    """R36: the first record has the schema version, the table's hash, package versions, rank and the caller's configuration."""
    make_log(tmp_path / "log.jsonl", rank=2).close()
    header, end = read_events(tmp_path / "log.jsonl")
    assert (header["event"], header["schema"], header["table"], header["level"]) == ("header", 2, table_hash(), "lifecycle")
    assert (header["rank"], header["seq"], header["config"]) == (2, 0, {"seed": 7})
    assert header["versions"]["torch"] == torch.__version__
    assert (end["event"], end["seq"], end["lost"], end["reason"]) == ("end", 1, 0, "closed")


def test_equal_runs_give_equal_files_without_wall_clock(tmp_path: Path) -> None:
    """R36: with no wall clock two logs of the same events are equal byte for byte."""
    for name in ("a", "b"):
        with make_log(tmp_path / name) as log:
            for tick in range(5):
                one_step(log, tick)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_wall_time_is_a_field_of_its_own() -> None:
    """R36: with a wall clock every event has its time, and nothing else differs."""
    ticks = count(100)
    timed, untimed = make_log(clock=lambda: float(next(ticks))), make_log()
    for log in (timed, untimed):
        one_step(log)
    events = timed.events
    assert [event.pop("wall") for event in events] == [100.0, 101.0]
    assert events == untimed.events


def test_levels_decide_what_is_recorded(tmp_path: Path) -> None:
    """R36: off records nothing and makes no file, lifecycle leaves operations out, ops has everything."""
    names = {}
    for level in Level:
        log = make_log(level=level)
        one_step(log)
        log.note(4, "refusal", needed=3)
        log.op(4, "insert", pages=["ab"])
        names[level] = [event["event"] for event in log.events]
    assert names == {
        Level.OFF: [],
        Level.LIFECYCLE: ["header", "step", "refusal"],
        Level.OPS: ["header", "step", "refusal", "insert"],
    }
    make_log(tmp_path / "none.jsonl", level=Level.OFF).close()
    assert not (tmp_path / "none.jsonl").exists()


def test_memory_is_bounded_and_counts_what_it_dropped() -> None:
    """R36: without a file the newest events are kept, older ones are dropped and counted."""
    log = make_log(keep=3)
    for tick in range(5):
        log.note(tick, "fact")
    assert [event["seq"] for event in log.events] == [3, 4, 5]
    assert log.dropped == 3
    with pytest.raises(ValueError, match="keep is 0"):
        make_log(keep=0)


@pytest.mark.parametrize("path", [None, "log.jsonl"])
def test_tensors_are_refused_and_leave_no_gap(path: str | None, tmp_path: Path) -> None:
    """R36: a value that JSON does not know, such as a tensor, is refused; the log goes on as if it had not been offered."""
    file = tmp_path / path if path else None
    log = make_log(file)
    with pytest.raises(TypeError, match="Tensor"):
        log.note(1, "leak", contents=torch.zeros(2))
    log.note(2, "fact")
    log.close()
    events = list(read_events(file)) if file else log.events
    assert [(event["seq"], event["event"]) for event in events][:2] == [(0, "header"), (1, "fact")]


@pytest.mark.parametrize("event", ["header", "step", "end", "lost"])
def test_names_of_the_log_are_taken(event: str) -> None:
    """R36: another fact can be neither header nor step, and cannot set rank, sequence number or wall time."""
    log = make_log()
    with pytest.raises(ValueError, match=f"may not set {event}"):
        log.note(1, event)
    with pytest.raises(ValueError, match="may not set seq, wall"):
        log.note(1, "fact", seq=1, wall=2)


def test_a_file_that_cannot_be_made_is_one_clear_line(tmp_path: Path) -> None:
    """R36: a missing directory is an EventLogError that names the path and the remedy."""
    with pytest.raises(EventLogError, match=r"absent/log\.jsonl: cannot be opened .*create its directory") as caught:
        make_log(tmp_path / "absent" / "log.jsonl")
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a file that is always full")
def test_a_full_disk_is_said_once() -> None:
    """R36: a failing write names the path and the bytes lost, once; the log is closed then, and closing again is quiet."""
    log = make_log(Path("/dev/full"))
    with pytest.raises(EventLogError, match=r"/dev/full: cannot be written .* bytes are lost: give room, or name another file$"):
        log.flush()
    log.close()
    with pytest.raises(EventLogError, match="after it was closed"):
        log.note(1, "fact")


def test_the_file_holds_whole_lines_at_any_time(tmp_path: Path) -> None:
    """R36: whenever the writer stops, the file ends at a line's end, and what it holds can be read; a flush writes all of it."""
    path = tmp_path / "log.jsonl"
    log = make_log(path)
    for tick in range(2000):
        log.note(tick, "fact", filler="x" * 60)
        if tick % 500 == 0:
            seen = path.read_bytes()
            assert seen == b"" or seen.endswith(b"}\n")
    log.flush()
    assert len(list(read_events(path))) == log.seq + 1 == 2001
    log.close()
    log.close()
    assert list(read_events(path))[-1]["event"] == "end"


def test_global_configuration_neither_changes_nor_matters(tmp_path: Path) -> None:
    """R36: a structlog that was configured elsewhere does not reach the log, and the log configures nothing."""
    structlog.reset_defaults()
    make_log(tmp_path / "plain").close()
    assert not structlog.is_configured()
    try:
        structlog.configure(processors=[lambda logger, name, event: {**event, "event": "spoiled"}])
        make_log(tmp_path / "spoiled").close()
    finally:
        structlog.reset_defaults()
    assert (tmp_path / "plain").read_bytes() == (tmp_path / "spoiled").read_bytes()


def test_ranks_that_agree_have_equal_logical_views() -> None:
    """R36: rank, number in the log, wall time, confirmed layers and local events may differ, and nothing else."""
    ranks = [make_log(rank=0), make_log(rank=1, clock=lambda: 1.0)]
    one_step(ranks[0], trigger=Trigger.COPY_DONE)
    ranks[1].note(3, "stale_completion", local=True)
    ranks[1].note(3, "stale_completion", local=True)
    for log, marks in zip(ranks, ([(3, 2)], [(3, 0)]), strict=True):
        one_step(log, marks=marks, payloads=("target",))
        log.note(4, "refusal", needed=[3, 4])
    views = [[view for event in log.events if (view := logical_view(event)) is not None] for log in ranks]
    assert views[0] == views[1]
    assert [view["event"] for view in views[0]] == ["step", "refusal"]
    one_step(ranks[0], agreed=True)
    one_step(ranks[1], agreed=False)
    assert logical_view(ranks[0].events[-1]) != logical_view(ranks[1].events[-1])
