"""Replay of logs that are right, its figures, its filters and its memory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from click.testing import CliRunner

from cphicache.events import EVENTS, FIELDS, read_events
from cphicache.lifecycle import State, table_hash
from cphicache.replay import Filter, Kind, replay
from cphicache.replay.spread import Spread
from cphicache.run import seen
from cphicache.run.cli import main
from cphicache.transfer.faults import CopyFaults
from tests.replay.conftest import serve
from tests.replay.logs import events_of, find, step, write

ROOT = Path(__file__).resolve().parents[2]


def test_a_run_of_one_rank_replays_clean(one_rank: Path) -> None:
    """R37: the log of a real run has no findings, and the run had something to find: evictions, rollbacks, retries, splits."""
    report = replay([one_rank])
    assert report.findings.kept == []
    assert report.is_clean
    triggers = {event.get("trigger") for event in read_events(one_rank)}
    assert {"host_evict", "device_evict", "split", "abort", "reserve_retry", "bind_duplicate_part", "load_queued"} <= triggers


def test_runs_of_several_ranks_replay_clean(four_ranks: list[Path]) -> None:
    """R37: the logs of four ranks have no findings and agree."""
    report = replay(four_ranks)
    assert (report.findings.kept, report.disagreement, report.warnings) == ([], None, [])
    assert [log.rank for log in report.logs] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "options",
    [
        {"policy": "write_back", "device_tokens": 2048},
        {"policy": "write_through_selective"},
        {"host_tokens": 2048, "device_tokens": 4096, "reclaim_device_valid": True, "retract_rate": 0.3},
        {"streams": "threads", "log_level": "ops"},
    ],
    ids=["write_back", "selective", "reclaim", "threads"],
)
def test_other_policies_replay_clean(options: dict[str, Any], tmp_path: Path) -> None:
    """R37: whatever the policy and the order of completions, the log of a run has no findings."""
    report = replay(serve(tmp_path, cp_size=2, requests=50, **options))
    assert report.findings.kept == []


@pytest.mark.parametrize("streams", ["virtual", "threads"])
def test_failures_that_are_handled_are_no_findings(streams: str, tmp_path: Path) -> None:
    """R21, R22, R37: copies, load-backs and local reservations that fail on one rank are part of the lifecycle: the log says how they
    ended, and replay finds nothing wrong."""
    faults = CopyFaults()
    faults.fail_copies_where(lambda call: call.layer == 1 and call.nth % 13 == 5)
    faults.fail_reserve("target", nth=5)
    pressing = {"device_tokens": 2048, "host_tokens": 4096, "scale": 0.0625, "seed": 2}
    logs = serve(tmp_path, cp_size=2, faults={1: faults}, requests=100, streams=streams, **pressing)
    assert faults.fired
    assert faults.fired_reserves
    report = replay(logs)
    assert report.findings.kept == []
    assert report.logs[0].tally.rolled_back["agreed_failed"] > 0


def test_equal_runs_give_equal_logs(tmp_path: Path, four_ranks: list[Path]) -> None:
    """R35, R36: on the virtual clock the logs of two equal runs are equal byte for byte."""
    again = serve(tmp_path, cp_size=4)
    assert [path.read_bytes() for path in again] == [path.read_bytes() for path in four_ranks]


def test_every_event_is_documented(one_rank: Path, tmp_path: Path) -> None:
    """R36: every event of a run, and every field, has its line in `events/types.py` and its place in `docs/events.md`."""
    seen: dict[str, set[str]] = {}
    logs = [
        one_rank,
        *serve(tmp_path, cp_size=1, requests=40, streams="threads", log_level="ops", policy="write_back", device_tokens=1024),
    ]
    for log in logs:
        for event in read_events(log):
            seen.setdefault(event["event"], set()).update(event)
    for name, fields in seen.items():
        assert fields <= {*EVENTS[name], *FIELDS}, name
    text = (ROOT / "docs" / "events.md").read_text()
    assert [name for name in EVENTS if f"`{name}`" not in text] == []
    assert [field for fields in EVENTS.values() for field in fields if f"`{field}`" not in text] == []


def test_figures_are_those_of_the_run(one_rank: Path) -> None:
    """R37: outcomes, refusals and time in state follow from the events."""
    events = list(read_events(one_rank))
    report = replay([one_rank]).as_json()["logs"][0]
    assert report["outcomes"]["committed"] == sum(event.get("after") == "COMMITTED" != event.get("before") for event in events)
    assert report["refused"].get("no_host_slots", 0) == sum(event.get("refused") == "no_host_slots" for event in events)
    in_flight = report["ticks_in_state"]["LAYERS_IN_FLIGHT"]
    assert in_flight["count"] == sum(event.get("before") == "LAYERS_IN_FLIGHT" != event.get("after") for event in events)
    assert 0 < in_flight["p50"] <= in_flight["p95"] <= in_flight["p99"] <= in_flight["most"]


def test_bandwidth_needs_wall_time(one_rank: Path, tmp_path: Path) -> None:
    """R37: with wall times in the log the copies' bytes and bandwidth are told, without them they are not."""
    assert replay([one_rank]).logs[0].tally.as_json()["copy_kib_per_s"] is None
    timed = replay(serve(tmp_path, cp_size=1, requests=30, streams="threads")).logs[0].tally.as_json()
    assert timed["copied_bytes"] > 0
    assert timed["copy_kib_per_s"]["count"] > 0
    assert timed["wall_us_in_state"]["LAYERS_IN_FLIGHT"]["count"] > 0


def test_the_text_has_the_figures(one_rank: Path, four_ranks: list[Path], tmp_path: Path) -> None:
    """R37: what the figures are of is said where there are several logs; load-backs that were refused are told with their reasons, and
    the bandwidth of a log that has wall times."""
    clean = replay([one_rank]).text()
    assert clean.startswith(f"{one_rank}: rank 0, ")
    assert clean.endswith("nothing is wrong")
    assert "figures of rank" not in clean
    assert "\nfigures of rank 0\nbackups: " in replay(four_ranks).text()
    events = events_of(one_rank)
    refused = {"rank": 0, "event": "load_back_refused", "tick": events[-2]["tick"], "request": "r1", "reason": "quarantined"}
    assert (
        "\nload-backs refused: 1 quarantined\n" in replay([write(tmp_path / "refused", [*events[:-1], refused, events[-1]])]).text()
    )
    timed = replay(serve(tmp_path, cp_size=1, requests=30, streams="threads"))
    speed = timed.as_json()["logs"][0]["copy_kib_per_s"]
    assert f"p50 {speed['p50']} KiB/s, p99 {speed['p99']} KiB/s; {timed.logs[0].tally.copied_bytes} bytes in all" in timed.text()


def test_many_findings_are_counted_by_kind(one_rank: Path, tmp_path: Path) -> None:
    """R37: of many findings the first twenty are printed, and all are counted by their kind."""
    events = [
        {name: value for name, value in event.items() if name != "locks" or not step("agreed")(event)}
        for event in events_of(one_rank)
    ]
    report = replay([write(tmp_path / "faulty", events)])
    count = report.findings.total
    assert count > 20
    lines = report.text().splitlines()
    assert lines.count(f"... in all: {count} {Kind.LOCK_LEAKED}") == 1
    assert sum("the node's device lock was not released" in line for line in lines) == 20
    assert lines[-1] == f"{count} findings"


def test_progress_is_told_in_bytes(one_rank: Path, four_ranks: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """R37: a long replay tells how many bytes of all logs have been read."""
    monkeypatch.setattr(sys.modules["cphicache.replay.replay"], "PROGRESS_EVENTS", 100)  # the package has a function of that name
    for paths in ([one_rank], four_ranks):
        read: list[int] = []
        replay(paths, on_progress=read.append)
        size = sum(path.stat().st_size for path in paths)
        assert len(read) > 3
        assert read == sorted(read)
        assert size * 3 // 4 < read[-1] <= size


def test_a_log_of_schema_1_is_replayed(one_rank: Path, tmp_path: Path) -> None:
    """R36: a log without the later fields replays without findings, and says what is not checked."""
    later = {"used", "locks", "parent", "head", "head_slots", "layers", "payload", "refused"}
    old = [
        {name: value for name, value in event.items() if name not in later or event["event"] != "step"}
        for event in events_of(one_rank)
    ]
    old = [{**old[0], "schema": 1}, *(event for event in old[1:] if event["event"] not in ("cache", "end"))]
    report = replay([write(tmp_path / "old", old)])
    assert report.findings.kept == []
    assert "schema version 1" in report.warnings[0]
    told = {"rank": 0, "event": "refused", "tick": old[-1]["tick"], "node": 1, "reason": "no_host_slots"}
    refusals = [replay([write(tmp_path / "old", events)]).logs[0].tally.refused for events in (old, [*old, told])]
    assert refusals[1] - refusals[0] == {"no_host_slots": 1}


def test_a_log_whose_first_parts_are_gone_is_replayed(one_rank: Path, tmp_path: Path) -> None:
    """R36, R37: what is left of a rotated log is replayed; the missing start is the one finding."""
    events = events_of(one_rank)
    middle = len(events) // 2
    header = {**events[0], "part": 4, "seq": middle - 1}
    report = replay([write(tmp_path / "late", [header, events[1] | {"seq": middle}, *events[middle + 1 :]], renumber=False)])
    assert [(finding.kind, finding.line) for finding in report.findings.kept] == [(Kind.GAP, 1)]


def test_parts_that_were_put_together_are_one_log(one_rank: Path, tmp_path: Path) -> None:
    """R36, R37: each part of a rotated log begins with a header; between the events of others it means nothing."""
    events = events_of(one_rank)
    middle = len(events) // 2
    report = replay([write(tmp_path / "parts", [*events[:middle], {**events[0], "part": 1}, *events[middle:]])])
    assert report.findings.kept == []
    assert report.logs[0].tally.as_json() == replay([one_rank]).logs[0].tally.as_json()


def test_filters_narrow_what_is_reported(one_rank: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R37: a node, a request or a tick narrows findings and figures; the rest is checked and counted."""
    events = events_of(one_rank)
    at = find(events, step("hit", before="COMMITTED"))
    node, tick = events[at]["node"], events[at]["tick"]
    events[at]["locks"] = -1
    path = write(tmp_path / "faulty", events)
    assert replay([path], Filter(node=node)).findings.total == 1
    elsewhere = replay([path], Filter(node=node + 1))
    assert elsewhere.text().endswith("\n1 findings do not match the filter\nnothing is wrong")
    assert (elsewhere.findings.total, elsewhere.findings.elsewhere.total(), elsewhere.is_clean) == (0, 1, True)
    assert replay([path], Filter(since_tick=tick)).findings.total == 1
    assert replay([path], Filter(since_tick=tick + 1)).findings.total == 0
    narrowed = replay([path], Filter(node=node))
    story = narrowed.logs[0].story
    assert "what the log of rank 0 says:\n" + "\n".join(f"  {line}" for line in story) + "\n" in narrowed.text()
    with monkeypatch.context() as short:
        short.setattr("cphicache.replay.onelog.STORY_KEPT", 2)
        assert f"\n  {story[1]}\n  ... and {len(story) - 2} more\n" in replay([path], Filter(node=node)).text()
    assert f"node {node}." in story[0]
    assert "reserve" in story[0]
    request = next(event["request"] for event in events if event.get("node") == node and "request" in event)
    assert any("bind" in line for line in replay([path], Filter(request=request)).logs[0].story)


def test_the_command_line_tells_by_its_exit_status(one_rank: Path, tmp_path: Path) -> None:
    """R37: 0 when nothing is wrong, 1 when something is, 2 for what cannot be replayed; JSON on demand."""
    run = CliRunner()
    good = run.invoke(main, ["replay", str(one_rank), "--json"])
    assert good.exit_code == 0
    assert json.loads(good.output)["clean"] is True
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(seen, "PROGRESS_FROM_BYTES", 0)  # progress is shown then, and not on stdout
        assert run.invoke(main, ["replay", str(one_rank), "--json"]).stdout == good.stdout
    faulty = write(tmp_path / "faulty", [event for event in events_of(one_rank) if not step("copy_done")(event)])
    bad = run.invoke(main, ["replay", str(faulty)])
    assert bad.exit_code == 1
    assert "first divergence" in bad.output
    assert run.invoke(main, ["replay", str(tmp_path / "nowhere")]).exit_code == 2
    for option, asked in (("--node", "987654321"), ("--request", "nobody")):
        absent = run.invoke(main, ["replay", str(one_rank), option, asked])
        assert (absent.exit_code, absent.output.count("\n")) == (2, 1)
        assert f"{option} {asked}: is not in {one_rank}" in absent.output
    assert run.invoke(main, ["replay"]).exit_code == 2


KILLED = """
import os, signal, sys
from pathlib import Path
from cphicache.run.config import RunConfig
from cphicache.run.jobs import load_requests
from cphicache.run.world import run_world
config = RunConfig(cp_size=1, requests=60, verify="off", log=Path(sys.argv[1]))

def on_tick(scheduler):
    if scheduler.tick == 60:
        scheduler._cache._log.flush()
    elif scheduler.tick == 90:
        os.kill(os.getpid(), signal.SIGKILL)

run_world(config, load_requests(config), on_tick=on_tick)
"""


def test_a_killed_run_leaves_a_log_that_replays_up_to_the_cut(tmp_path: Path) -> None:
    """R36, R37: after SIGKILL in the middle of a run the log is readable and replays without other findings up to the cut, which is
    named; at most what came after the last flush is missing."""
    log = tmp_path / "events.jsonl"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", KILLED, str(log)], env=environment, capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    report = replay([log])
    assert [finding.kind for finding in report.findings.kept] == [Kind.CUT]
    assert report.logs[0].last_tick is not None
    assert 60 <= report.logs[0].last_tick <= 90
    assert "cut at line" in report.text()


def synthetic(backups: int) -> Iterator[bytes]:
    """A log of backups that are reserved, copied, committed and evicted, ten at a time."""
    seq = -1

    def line(**fields: Any) -> bytes:
        nonlocal seq
        seq += 1
        return orjson.dumps({"rank": 0, "seq": seq, **fields}) + b"\n"

    yield line(event="header", schema=2, table=table_hash(), level="lifecycle", versions={}, config={})
    yield line(event="cache", tick=0, page_size=1, cp_size=1, payloads={"target": 1}, host_slots=99, policy="write_through")
    n, r, in_flight, c = State.DEVICE_VALID_HOST_NONE, State.RESERVED, State.LAYERS_IN_FLIGHT, State.COMMITTED

    def steps(number: int) -> Iterator[bytes]:
        tick = number
        base = {"event": "step", "tick": tick, "node": number + 1, "generation": number + 1, "agreed": False, "bound": True}
        yield line(**base, trigger="reserve", before=n, after=r, submitted={"target": 0}, confirmed={"target": 0}, slots=1, used=1,
                   locks=1, parent=0)  # fmt: skip
        yield line(**base, trigger="layer_stored", before=r, after=in_flight, submitted={"target": 1}, confirmed={"target": 0}, slots=1,
                   used=1, payload="target", layers=[0])  # fmt: skip
        copied = {"before": in_flight, "after": in_flight, "slots": 1, "used": 1, "number": number}
        yield line(**base, trigger="forward_ended", submitted={"target": 1}, confirmed={"target": 0}, **copied)
        yield line(**base, trigger="copy_done", submitted={"target": 1}, confirmed={"target": 1}, **copied)
        yield line(event="reduction", tick=tick, count=number + 1, first_failed=None)
        done = {"submitted": {"target": 1}, "confirmed": {"target": 1}, "number": number}
        yield line(
            **{**base, "agreed": True}, trigger="agreed", before=in_flight, after=c, slots=1, used=1, locks=-1, parent=0, **done
        )
        yield line(**{**base, "agreed": True}, trigger="hit", before=c, after=c, slots=1, used=1, **done)
        yield line(**base, trigger="reclaim", before=c, after=n, submitted={"target": 0}, confirmed={"target": 0}, slots=0, used=0,
                   number=number)  # fmt: skip

    for number in range(backups):
        yield from steps(number)
    yield line(event="end", lost=0, reason="closed")


def peak_bytes(path: Path) -> int:
    tracemalloc.start()
    try:
        assert replay([path]).is_clean
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_memory_does_not_grow_with_the_log(tmp_path: Path) -> None:
    """R37: replay streams: a log ten times as long takes no more memory."""
    for name, backups in (("short", 300), ("long", 3000)):
        with (tmp_path / name).open("wb") as file:
            file.writelines(synthetic(backups))
    peak_bytes(tmp_path / "short")  # what is made once is made here
    short, long = peak_bytes(tmp_path / "short"), peak_bytes(tmp_path / "long")
    assert long < 1.5 * short + 64_000
    assert long < 2_000_000


def test_percentiles_of_many_numbers() -> None:
    """R37: percentiles are exact for small numbers, at most 1.6 % low for large ones, in bounded memory."""
    spread = Spread()
    for value in range(1, 101):
        spread.add(value)
    assert (spread.percentile(0.5), spread.percentile(0.95), spread.percentile(0.99), spread.most) == (50, 95, 99, 100)
    large = Spread()
    for value in range(0, 10_000_000, 1000):
        large.add(value)
    assert 0.984 * 5_000_000 <= large.percentile(0.5) <= 5_000_000
    assert len(large._buckets) < 2500
    assert Spread().summary()["p99"] == 0
