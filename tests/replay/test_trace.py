"""The timeline: the public fields of the trace-event format, and what is drawn."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from cphicache.events import read_events
from cphicache.replay import UnusableLogs, write_trace
from cphicache.run.cli import main
from tests.replay.conftest import serve
from tests.replay.logs import events_of, write

NEEDED = {"X": {"dur"}, "b": {"id", "cat"}, "e": {"id", "cat"}, "s": {"id", "cat"}, "t": {"id", "cat"}, "f": {"id", "cat", "bp"},
          "M": {"args"}, "C": {"args"}, "i": {"s"}}  # fmt: skip
"""Phases of the format that are used, and the fields that each needs besides name, ph, ts, pid and tid."""


def trace_of(paths: list[Path], out: Path) -> list[dict[str, Any]]:
    count = write_trace(paths, out)
    whole = json.loads(out.read_text())
    assert whole["displayTimeUnit"] == "ms"
    assert len(whole["traceEvents"]) == count
    events: list[dict[str, Any]] = whole["traceEvents"]
    return events


def check_format(events: list[dict[str, Any]]) -> None:
    """What the public description of the format asks for."""
    open_asyncs: Counter[tuple[Any, ...]] = Counter()
    slices: dict[tuple[int, int], float] = {}
    for event in events:
        assert {"name", "ph", "ts", "pid", "tid"} | NEEDED[event["ph"]] <= set(event), event
        assert isinstance(event["name"], str)
        assert isinstance(event["ts"], int | float)
        assert event["ts"] >= 0
        assert (type(event["pid"]), type(event["tid"])) == (int, int)
        if event["ph"] in "be":
            key = (event["pid"], event["cat"], event["id"], event["name"])
            open_asyncs[key] += 1 if event["ph"] == "b" else -1
            assert open_asyncs[key] in (0, 1), event
        elif event["ph"] == "X":
            track = (event["pid"], event["tid"])
            assert event["dur"] > 0
            assert event["ts"] + 1e-6 >= slices.get(track, 0.0), f"slices of a track overlap: {event}"
            slices[track] = event["ts"] + event["dur"]
        elif event["ph"] == "M":
            assert isinstance(event["args"]["name"], str)
    assert not +open_asyncs


def test_the_trace_is_valid_and_shows_every_layer(four_ranks: list[Path], tmp_path: Path) -> None:
    """R37: every field that the format asks for is there, a rank is a process with its tracks, and every layer of every committed
    backup has its store, its copy and its flow to the commit."""
    events = trace_of(four_ranks, tmp_path / "trace.json")
    check_format(events)
    assert {event["pid"] for event in events} == {0, 1, 2, 3}
    tracks = {event["args"]["name"] for event in events if event["ph"] == "M" and event["name"] == "thread_name"}
    assert tracks == {"lifecycle", "compute", "write target", "write draft", "load target", "load draft"}
    committed = next(event for event in read_events(four_ranks[1]) if event.get("after") == "COMMITTED" != event.get("before"))
    copies = {
        (event["args"]["payload"], event["args"]["layer"])
        for event in events
        if event["ph"] == "X"
        and event["pid"] == 1
        and event["name"].startswith("copy ")
        and event["args"]["node"] == committed["node"]
    }
    assert copies == {("target", 0), ("target", 1), ("target", 2), ("target", 3), ("draft", 0)}
    identity = f"r1.n{committed['node']}.g{committed['generation']}."
    flows = Counter(event["ph"] for event in events if event["ph"] in "stf" and event["id"].startswith(identity))
    assert flows == {"s": 5, "t": 5, "f": 5}


def test_wall_time_is_the_time_base_when_there_is_one(tmp_path: Path) -> None:
    """R37: with wall times the timeline starts at 0 and is as long as the run; else a tick is a millisecond."""
    (log,) = serve(tmp_path, cp_size=1, requests=20, streams="threads")
    events = trace_of([log], tmp_path / "trace.json")
    check_format(events)
    walls = [event["wall"] for event in read_events(log) if event["event"] not in ("header", "end")]
    assert max(event["ts"] for event in events) == pytest.approx((walls[-1] - walls[0]) * 1e6, rel=1e-3)


def test_loads_have_their_tracks(one_rank: Path, tmp_path: Path) -> None:
    """R37: load-backs are drawn on the load tracks, and end when they are agreed."""
    events = trace_of([one_rank], tmp_path / "trace.json")
    check_format(events)
    queued = sum(event["event"] == "load_back" for event in read_events(one_rank))
    assert queued > 0
    assert sum(event["ph"] == "b" and event["cat"] == "load" for event in events) == queued
    assert sum(event["ph"] == "X" and event["name"] == "load target" for event in events) == queued


def test_a_cut_log_is_drawn_up_to_the_cut(one_rank: Path, tmp_path: Path) -> None:
    """R37: of a cut log the whole lines are drawn, and everything that was open is ended there."""
    content = one_rank.read_bytes()
    (tmp_path / "cut").write_bytes(content[: len(content) // 2])
    check_format(trace_of([tmp_path / "cut"], tmp_path / "trace.json"))


def test_a_log_of_schema_1_is_drawn(one_rank: Path, tmp_path: Path) -> None:
    """R36, R37: a log that does not name its payloads, nor the slots in use, is drawn with the tracks that its steps name."""
    old = [{name: value for name, value in event.items() if name != "used"} for event in events_of(one_rank)]
    old = [{**old[0], "schema": 1}, *(event for event in old[1:] if event["event"] not in ("cache", "end"))]
    events = trace_of([write(tmp_path / "old", old)], tmp_path / "trace.json")
    check_format(events)
    whole = trace_of([one_rank], tmp_path / "whole.json")
    for phase in "besf":
        assert sum(event["ph"] == phase for event in events) == sum(event["ph"] == phase for event in whole)
    assert not any(event["ph"] == "C" for event in events)
    tracks = {event["args"]["name"] for event in events if event["ph"] == "M"}
    assert tracks == {"rank 0", "lifecycle", "compute", "write target", "write draft", "load target", "load draft"}


def test_progress_is_told_in_bytes(one_rank: Path, four_ranks: list[Path], tmp_path: Path) -> None:
    """R37: a long trace tells how many bytes of all logs have been read."""
    for paths in ([one_rank], four_ranks):
        read: list[int] = []
        write_trace(paths, tmp_path / "trace.json", on_progress=read.append)
        assert read
        assert read == sorted(read)
        assert sum(path.stat().st_size for path in paths[:-1]) < read[-1] <= sum(path.stat().st_size for path in paths)


def test_the_command_writes_a_whole_file_or_none(one_rank: Path, tmp_path: Path) -> None:
    """R37: the file is there as a whole or not at all; what cannot be read or written is one clear line and exit status 2."""
    run = CliRunner()
    done = run.invoke(main, ["trace", str(one_rank), "-o", str(tmp_path / "trace.json")])
    assert done.exit_code == 0
    assert "trace events" in done.output
    assert run.invoke(main, ["trace", str(tmp_path / "none"), "-o", str(tmp_path / "other.json")]).exit_code == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["trace.json"]
    with pytest.raises(UnusableLogs, match="name another file with -o"):
        write_trace([one_rank], tmp_path / "absent" / "trace.json")


@pytest.mark.parametrize("command", ["trace", "report"])
def test_a_log_is_never_written_over(command: str, one_rank: Path, tmp_path: Path) -> None:
    """R35, R37: a file that is one of the logs, under whatever name, is refused in one line with exit status 2, and stays as it is."""
    log, other = tmp_path / "events.jsonl", tmp_path / "linked"
    log.write_bytes(one_rank.read_bytes())
    other.symlink_to(log)
    for out in (log, other):
        done = CliRunner().invoke(main, [command, str(log), "-o", str(out)])
        assert done.exit_code == 2
        assert done.output == f"cphicache: {out}: is one of the logs to read; name another file with -o\n"
    assert log.read_bytes() == one_rank.read_bytes()
