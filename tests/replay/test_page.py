"""The report page: its data, and the text that it is made into."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from cphicache.events import read_events
from cphicache.replay import UnusableLogs, page_data, page_text, replay, write_page
from cphicache.replay import lifecycles as lifecycles_module
from cphicache.replay.lifecycles import OUTCOMES, STATES, Lifecycles, Names
from cphicache.run.cli import main
from tests.replay.logs import events_of, find, step, write


def data_in(text: str) -> dict[str, Any]:
    """The data of a page."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    data: dict[str, Any] = json.loads(found[1])
    return data


def test_every_backup_and_step_is_on_the_page(one_rank: Path) -> None:
    """R37: each generation that was reserved is a backup with its outcome, its steps and its stays in states, as the log has them."""
    data = page_data(replay([one_rank]))
    (rank,) = data["ranks"]
    backups, steps, segments = rank["backups"], rank["steps"], rank["segments"]
    logged = [event for event in read_events(one_rank) if event["event"] == "step"]
    keys = list(zip(backups["node"], backups["generation"], strict=True))
    assert len(set(keys)) == len(keys)
    reserved = {(event["node"], event["generation"]) for event in logged if event["after"] == "RESERVED"}
    heads = {(event["head"], event["generation"]) for event in logged if "head" in event and "stale" not in event}
    assert reserved | heads == set(keys)
    of_step = [keys[at] for at in steps["backup"]]
    assert of_step == [key for event in logged if (key := (event["node"], event["generation"])) in set(keys)]
    committed = {key for key, outcome in zip(keys, backups["outcome"], strict=True) if OUTCOMES[outcome] == "committed"}
    assert committed - heads == {(event["node"], event["generation"]) for event in logged if event["after"] == "COMMITTED"} - heads
    rolled = sum(OUTCOMES[outcome] == "rolled back" for outcome in backups["outcome"])
    assert rolled == sum(event["after"] == "ROLLED_BACK" != event["before"] for event in logged)
    assert all(start <= end for start, end in zip(segments["from"], segments["to"], strict=True))
    key = next(iter(reserved - heads))
    stays = [STATES[state] for at, state in zip(segments["backup"], segments["state"], strict=True) if keys[at] == key]
    mine = [event for event in logged if (event["node"], event["generation"]) == key and event["before"] != event["after"]]
    assert stays == [event["after"] for event in mine if event["after"] != STATES[0]]


def test_the_page_has_the_replays_counts(one_rank: Path) -> None:
    """R37: the edges' counts are the tally's, and the last host occupancy is what the last step says."""
    report = replay([one_rank])
    (rank,) = page_data(report)["ranks"]
    counts = {(STATES[before], trigger, STATES[after]): count for before, trigger, after, count in rank["edges"]}
    assert counts == dict(report.logs[0].tally.edges)
    used = [event["used"] for event in read_events(one_rank) if "used" in event]
    assert rank["occupancy"][-1][1] == used[-1]
    assert max(point[1] for point in rank["occupancy"]) <= rank["host_slots"]


def test_occupancy_is_of_all_ranks(four_ranks: list[Path]) -> None:
    """R37: the host pool's size on the page is that of all ranks together, as the used slots are."""
    for rank in page_data(replay(four_ranks))["ranks"]:
        (cache,) = [event for event in read_events(four_ranks[rank["rank"]]) if event["event"] == "cache"]
        assert rank["host_slots"] == 4 * cache["host_slots"]
        assert cache["host_slots"] < max(point[1] for point in rank["occupancy"]) <= rank["host_slots"]


def test_device_tokens_stay_within_the_pool(one_rank: Path) -> None:
    """R37: what the page says is on the device fits there; evicted tokens add up to those of the log."""
    (rank,) = page_data(replay([one_rank]))["ranks"]
    assert all(locked >= 0 and 0 <= backed <= rank["device_tokens"] for _, _, locked, backed, *_ in rank["occupancy"])
    told = {event["tick"]: event["in_use"] for event in read_events(one_rank) if event["event"] == "device"}
    curve = {point[0]: point[5] for point in rank["occupancy"]}
    assert {tick: curve[tick] for tick in told} == told
    assert 0 < max(told.values()) <= rank["device_tokens"]
    assert all(0 <= evictable <= used for *_, used, evictable in rank["occupancy"])
    evicted = sum(event["tokens"] for event in read_events(one_rank) if event["event"] == "device_evicted")
    assert sum(point[4] for point in rank["occupancy"]) == evicted > 0


def test_a_long_run_is_told_in_ranges(one_rank: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R37: a page is bounded: curves are thinned with the most that was used and the sum that was evicted, backups and steps beyond the
    bound are counted."""
    whole = Lifecycles(one_rank, Names())
    monkeypatch.setattr(lifecycles_module, "POINTS_KEPT", 10)
    monkeypatch.setattr(lifecycles_module, "BACKUPS_KEPT", 50)
    monkeypatch.setattr(lifecycles_module, "STEPS_KEPT", 200)
    part = Lifecycles(one_rank, Names())
    assert len(part.curve()) <= 10
    assert sum(point[4] for point in part.curve()) == sum(point[4] for point in whole._curve)
    assert max(point[1] for point in part.curve()) == max(point[1] for point in whole._curve)
    assert len(part.backups["node"]) == 50
    assert part.backups_left_out == len(whole.backups["node"]) - 50
    assert len(part.steps["tick"]) == 200
    assert part.steps_left_out == len(whole.steps["tick"]) - 200


def test_equal_logs_give_equal_pages(four_ranks: list[Path], tmp_path: Path) -> None:
    """R37: the page depends on the logs only, not on the folder they are in, and needs nothing from elsewhere."""
    moved = [Path(tmp_path / path.name) for path in four_ranks]
    for path, copy in zip(four_ranks, moved, strict=True):
        copy.write_bytes(path.read_bytes())
    write_page(four_ranks, tmp_path / "one.html")
    write_page(list(reversed(moved)), tmp_path / "two.html")
    text = (tmp_path / "one.html").read_text()
    assert text == (tmp_path / "two.html").read_text()
    assert set(re.findall(r"https?://[^\"' ]*", text)) <= {"http://www.w3.org/2000/svg"}
    assert not re.search(r"<(script|img|link)[^>]*\b(src|href)=\"(?!data:)", text)


def test_nothing_of_a_log_is_markup(one_rank: Path, tmp_path: Path) -> None:
    """R37: whatever a log or its name holds is text on the page."""
    events = events_of(one_rank)
    at = find(events, step("reserve", after="RESERVED"))
    events[at]["request"] = "</script><script>alert(1)</script>"
    text = page_text(page_data(replay([write(tmp_path / "<b>&.jsonl", events)])))
    assert "alert(1)</script>" not in text
    assert "<title>cphicache report: &lt;b&gt;&amp;.jsonl</title>" in text
    data = data_in(text)
    assert events[at]["request"] in data["names"]
    assert data["title"] == "<b>&.jsonl"


def test_a_disagreement_and_a_cut_are_told(four_ranks: list[Path], tmp_path: Path) -> None:
    """R37: the first event that ranks disagree on is on the page with its fields; a cut log is drawn up to the cut."""
    events = events_of(four_ranks[2])
    at = find(events, step("agreed", after="COMMITTED"))
    events[at]["slots"] += 16
    data = page_data(replay([four_ranks[0], four_ranks[1], write(tmp_path / "edited.jsonl", events)]))
    assert data["disagreement"]["rank"] == 2
    assert "slots" in data["disagreement"]["fields"]
    assert {finding["kind"] for finding in data["findings"]} >= {"ranks_disagree"}
    assert data["findings_total"] >= len(data["findings"]) > 0
    whole = events_of(four_ranks[0])
    write(tmp_path / "cut.jsonl", whole[: find(whole, step("layer_stored")) + 1])
    (rank,) = page_data(replay([tmp_path / "cut.jsonl"]))["ranks"]
    assert rank["cut"]
    assert "pending" in {OUTCOMES[outcome] for outcome in rank["backups"]["outcome"]}


def test_a_page_of_a_log_that_ends_in_a_line(one_rank: Path, tmp_path: Path) -> None:
    """R37: what was written before the line that is cut is drawn; a log that was closed before anything happened is an empty page."""
    content = one_rank.read_bytes()
    (tmp_path / "cut.jsonl").write_bytes(content[: len(content) // 2])
    (cut,), (whole,) = (page_data(replay([path]))["ranks"] for path in (tmp_path / "cut.jsonl", one_rank))
    assert "the line is cut short" in cut["cut"]
    assert 0 < len(cut["steps"]["tick"]) < len(whole["steps"]["tick"])
    assert cut["steps"]["tick"] == whole["steps"]["tick"][: len(cut["steps"]["tick"])]
    events = events_of(one_rank)
    empty = page_data(replay([write(tmp_path / "empty.jsonl", [events[0], events[-1]])]))
    assert (empty["findings_total"], empty["ranks"][0]["occupancy"], empty["ranks"][0]["steps"]["tick"]) == (0, [], [])


def test_warnings_name_logs_without_their_folders(four_ranks: list[Path], tmp_path: Path) -> None:
    """R37: a page that is passed on does not say where its logs were."""
    header, *events = events_of(four_ranks[1])
    other = write(tmp_path / "other.jsonl", [{**header, "config": {}}, *events])
    data = page_data(replay([four_ranks[0], other]))
    assert data["warnings"] == [f"{four_ranks[0].name} and other.jsonl were configured differently"]


@pytest.mark.parametrize(
    "field",
    [
        "tick",
        "node",
        "generation",
        "trigger",
        "before",
        "after",
        "submitted",
        "confirmed",
        "slots",
        "used",
        "head",
        "head_slots",
        "request",
    ],
)
def test_a_field_of_another_type_is_a_finding(one_rank: Path, tmp_path: Path, field: str) -> None:
    """R37: a log that was edited into nonsense is still drawn; what is wrong with it is told."""
    events = events_of(one_rank)
    at = find(events, lambda event: event["event"] == "step" and field in event)
    for value in ("x", [1], {"a": 1}, None):
        edited = [*events[:at], {**events[at], field: value}, *events[at + 1 : at + 200]]
        data = data_in(page_text(page_data(replay([write(tmp_path / "edited.jsonl", edited)]))))
        assert data["findings_total"] > 0


def test_the_command_writes_a_whole_page_or_none(one_rank: Path, tmp_path: Path) -> None:
    """R37: the page is there as a whole or not at all; what cannot be read or written is one clear line and exit status 2."""
    run = CliRunner()
    done = run.invoke(main, ["report", str(one_rank), "-o", str(tmp_path / "report.html")])
    assert (done.exit_code, done.output) == (0, f"{tmp_path / 'report.html'}: nothing is wrong\n")
    for arguments in (
        [str(tmp_path / "none"), "-o", str(tmp_path / "x.html")],
        [str(one_rank), "-o", str(tmp_path / "absent" / "x.html")],
    ):
        refused = run.invoke(main, ["report", *arguments])
        assert refused.exit_code == 2
        assert refused.output.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
    with pytest.raises(UnusableLogs, match="name another file with -o"):
        write_page([one_rank], tmp_path / "absent" / "x.html")
