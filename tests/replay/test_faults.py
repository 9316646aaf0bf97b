"""Faults planted in the logs of real runs: replay names the fault, the node and the line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from cphicache.agree.port import GroupBroken
from cphicache.lifecycle import table_hash
from cphicache.replay import Kind, Report, UnusableLogs, replay
from cphicache.run.config import RunConfig
from cphicache.run.jobs import load_requests
from cphicache.run.scheduler import Scheduler
from cphicache.run.world import RankWorld, RunFailed, run_world
from tests.replay.logs import Event, events_of, find, step, write

COMMIT = step("agreed", before="LAYERS_IN_FLIGHT", after="COMMITTED")


class Planted(NamedTuple):
    """What replay must name: kind, node (None: no node) and line."""

    kind: Kind
    node: int | None
    line: int


def lifecycle_of(events: list[Event], node: int) -> list[int]:
    return [at for at, event in enumerate(events) if event["event"] == "step" and event["node"] == node]


def dropped_commit(events: list[Event]) -> Planted:
    """The step that commits, unlocks and ends a backup is not there: its next step tells."""
    evicted = find(events, step("host_evict"))
    node = events[evicted]["node"]
    at = next(at for at in lifecycle_of(events, node) if events[at]["after"] == "COMMITTED")
    following = next(other for other in lifecycle_of(events, node) if other > at)
    del events[at]
    return Planted(Kind.STATE_BEFORE, node, following)


def dropped_release(events: list[Event]) -> Planted:
    """A rollback never ends."""
    at = find(
        events, lambda event: event["event"] == "step" and event["before"] == "ROLLED_BACK" and event["after"] != "ROLLED_BACK"
    )
    node = events[at]["node"]
    last = lifecycle_of(events, node)[-2]
    assert lifecycle_of(events, node)[-1] == at
    del events[at]
    return Planted(Kind.NEVER_ENDED, node, last + 1)


def lock_kept(events: list[Event]) -> Planted:
    """The commit does not give the node's device lock back."""
    at = find(events, COMMIT)
    del events[at]["locks"]
    return Planted(Kind.LOCK_LEAKED, events[at]["node"], at + 1)


def unlocked_twice(events: list[Event]) -> Planted:
    """A hit gives a lock back that it does not hold."""
    at = find(events, step("hit", before="COMMITTED"))
    events[at]["locks"] = -1
    return Planted(Kind.LOCK_TWICE, events[at]["node"], at + 1)


def commit_before_a_layer(events: list[Event]) -> Planted:
    """One layer was never stored, and the backup commits."""
    at = find(events, COMMIT)
    node = events[at]["node"]
    missing = find(events, step("layer_stored", node=node, payload="draft"))
    del events[missing]
    for other in lifecycle_of(events, node):
        if other >= missing and events[other]["submitted"]["draft"]:
            events[other]["submitted"]["draft"] = 0
            events[other]["confirmed"]["draft"] = 0
    ended = find(events, step("forward_ended", node=node))
    return Planted(Kind.COMMIT_INCOMPLETE, node, ended + 1)


def confirmed_before_submitted(events: list[Event]) -> Planted:
    """More layers confirmed than submitted."""
    at = find(events, step("layer_stored", payload="target"), nth=5)
    events[at]["confirmed"]["target"] = events[at]["submitted"]["target"] + 1
    return Planted(Kind.CONFIRMED_EARLY, events[at]["node"], at + 1)


def edited_watermark(events: list[Event]) -> Planted:
    """The watermark says one layer less than was stored."""
    at = find(events, step("copy_done"), nth=2)
    events[at]["submitted"]["target"] -= 1
    events[at]["confirmed"]["target"] -= 1
    return Planted(Kind.WATERMARK, events[at]["node"], at + 1)


def double_free(events: list[Event]) -> Planted:
    """The ledger gets the slots of an evicted host copy twice."""
    at = find(events, step("host_evict"))
    more = next(events[other]["slots"] for other in reversed(lifecycle_of(events, events[at]["node"])) if other < at)
    for event in events[at:]:
        if "used" in event:
            event["used"] -= more
    return Planted(Kind.SLOTS_TWICE, events[at]["node"], at + 1)


def slots_never_released(events: list[Event]) -> Planted:
    """The ledger does not get the slots of a rollback back."""
    at = find(events, lambda event: event.get("before") == "ROLLED_BACK" and event.get("after") == "DEVICE_VALID_HOST_NONE")
    for event in events[at:]:
        if "used" in event:
            event["used"] += 16
    return Planted(Kind.SLOTS_LEAKED, events[at]["node"], at + 1)


def slots_kept(events: list[Event]) -> Planted:
    """An evicted host copy still has slots."""
    at = find(events, step("host_evict"))
    events[at]["slots"] = 16
    return Planted(Kind.SLOTS, events[at]["node"], at + 1)


def slots_appear(events: list[Event]) -> Planted:
    """A backup has more slots than it reserved."""
    at = find(events, step("forward_ended"), nth=3)
    events[at]["slots"] += 16
    return Planted(Kind.SLOTS, events[at]["node"], at + 1)


def edited_state(events: list[Event]) -> Planted:
    """A state that the table does not lead to."""
    at = find(events, step("layer_stored", before="RESERVED"), nth=4)
    events[at]["after"] = "COMMITTED"
    return Planted(Kind.ILLEGAL_EDGE, events[at]["node"], at + 1)


def edited_state_before(events: list[Event]) -> Planted:
    """A hit in a state in which the node is not."""
    at = find(events, step("hit", before="COMMITTED"))
    events[at]["before"] = events[at]["after"] = "RESERVED"
    return Planted(Kind.STATE_BEFORE, events[at]["node"], at + 1)


def wrong_stale_name(events: list[Event]) -> Planted:
    """A no-op under a name that the table does not have there."""
    at = find(events, lambda event: event.get("stale") is not None)
    events[at]["stale"] = "never_mind"
    return Planted(Kind.ILLEGAL_EDGE, events[at]["node"], at + 1)


def reordered_agreement(events: list[Event]) -> Planted:
    """Two numbers of one reduction are passed in the wrong order."""
    for at in range(len(events) - 1):
        one, other = events[at], events[at + 1]
        if step("agreed")(one) and step("agreed")(other):
            events[at], events[at + 1] = other, one
            return Planted(Kind.AGREED_ORDER, other["node"], at + 1)
    raise AssertionError("the run has no two such steps")


def agreed_early(events: list[Event]) -> Planted:
    """The reduction that passed a number is not there."""
    at = find(events, step("agreed"), nth=3)
    reduction = max(other for other in range(at) if events[other]["event"] == "reduction")
    first = find(events, step("agreed"), start=reduction)
    del events[reduction]
    return Planted(Kind.AGREED_EARLY, events[first - 1]["node"], first)


def completion_after_its_commit(events: list[Event]) -> Planted:
    """This rank's copies end after the commit."""
    commit = find(events, COMMIT)
    node = events[commit]["node"]
    done = find(events, step("copy_done", node=node))
    moved = {**events.pop(done), "tick": events[commit]["tick"], "before": "COMMITTED", "after": "COMMITTED"}
    events.insert(commit, moved)
    return Planted(Kind.ILLEGAL_EDGE, node, commit + 1)


def number_twice(events: list[Event]) -> Planted:
    """Two backups take one number."""
    at = find(events, step("forward_ended", after="LAYERS_IN_FLIGHT"), nth=4)
    node = events[at]["node"]
    for other in lifecycle_of(events, node):
        if other >= at and "number" in events[other]:
            events[other]["number"] = events[at]["number"] - 1
            break
    return Planted(Kind.NUMBER, node, at + 1)


def number_skipped(events: list[Event]) -> Planted:
    """A number is left out."""
    at = find(events, step("forward_ended", after="LAYERS_IN_FLIGHT"), nth=4)
    events[at]["number"] += 1
    return Planted(Kind.NUMBER, events[at]["node"], at + 1)


def agreed_missing(events: list[Event]) -> Planted:
    """A number was passed, and its backup did not hear of it: the next reduction tells."""
    at = find(events, step("agreed", after="LAYERS_IN_FLIGHT"))
    node = events[at]["node"]
    del events[at]
    return Planted(Kind.NOT_AGREED, node, find(events, lambda event: event["event"] == "reduction", start=at) + 1)


def reduction_back(events: list[Event]) -> Planted:
    """The reduced count falls."""
    at = find(events, lambda event: event["event"] == "reduction", nth=20)
    events[at]["count"] = 0
    return Planted(Kind.REDUCTION, None, at + 1)


def lost_child(events: list[Event]) -> Planted:
    """A child commits under a parent that has not."""
    at = find(events, lambda event: COMMIT(event) and event["parent"] != 0)
    events[at]["parent"] = 10**6
    return Planted(Kind.PARENT_UNCOMMITTED, events[at]["node"], at + 1)


def parent_freed_first(events: list[Event]) -> Planted:
    """A host copy goes while a child's is there."""
    child = find(events, lambda event: COMMIT(event) and event["parent"] != 0)
    parent = events[child]["parent"]
    slots = next(event["slots"] for event in reversed(events[:child]) if event.get("node") == parent)
    gone = {
        **next(event for event in events if step("host_evict")(event)),
        "tick": events[child]["tick"], "node": parent, "used": events[child]["used"] - slots,
        "generation": next(event["generation"] for event in reversed(events[:child]) if event.get("node") == parent),
    }  # fmt: skip
    gone.pop("number", None)
    events.insert(child + 1, gone)
    return Planted(Kind.PARENT_FREED, parent, child + 2)


def changed_generation(events: list[Event]) -> Planted:
    """A completion of another generation is taken for this one's."""
    at = find(events, step("copy_done"), nth=3)
    events[at]["generation"] += 1
    return Planted(Kind.GENERATION, events[at]["node"], at + 1)


def changed_column(events: list[Event]) -> Planted:
    """A backup is bound without a bind."""
    at = find(events, step("copy_done", bound=False), nth=1)
    events[at]["bound"] = True
    return Planted(Kind.COLUMN, events[at]["node"], at + 1)


def time_goes_back(events: list[Event]) -> Planted:
    """An event of an earlier tick."""
    at = find(events, step("agreed"), nth=5)
    events[at]["tick"] -= 1
    return Planted(Kind.TICK_BACK, events[at]["node"], at + 1)


def field_missing(events: list[Event]) -> Planted:
    """A step that lacks a field."""
    at = find(events, step("bind"))
    del events[at]["slots"]
    return Planted(Kind.UNREADABLE, events[at]["node"], at + 1)


def reserved_nothing(events: list[Event]) -> Planted:
    """A reservation without slots."""
    at = find(events, step("reserve", after="RESERVED"), nth=2)
    events[at]["slots"] = 0
    return Planted(Kind.SLOTS, events[at]["node"], at + 1)


def released_nothing(events: list[Event]) -> Planted:
    """A committed copy loses its slots without a step of its own, and is evicted as if it had them."""
    at = find(events, step("host_evict"))
    node = events[at]["node"]
    committed = max(other for other in lifecycle_of(events, node) if other < at and events[other]["after"] == "COMMITTED")
    for other in lifecycle_of(events, node):
        if committed <= other < at:
            events[other]["slots"] = 0
    return Planted(Kind.SLOTS, node, at + 1)


def divided_wrongly(events: list[Event]) -> Planted:
    """A split gives the head slots that the node keeps, too."""
    at = find(events, lambda event: step("split")(event) and event.get("head_slots"))
    events[at]["head_slots"] += 16
    return Planted(Kind.SLOTS, events[at]["node"], at + 1)


def loaded_twice(events: list[Event]) -> Planted:
    """A load-back is queued for a node that is being loaded."""
    at = find(events, step("load_queued"))
    events.insert(at + 1, dict(events[at]))
    return Planted(Kind.ILLEGAL_EDGE, events[at]["node"], at + 2)


def load_never_queued(events: list[Event]) -> Planted:
    """A load-back ends that was not queued."""
    at = find(events, step("load_queued"))
    node = events[at]["node"]
    del events[at]
    return Planted(Kind.ILLEGAL_EDGE, node, find(events, step("load_agreed", node=node), start=at) + 1)


def evicted_while_loading(events: list[Event]) -> Planted:
    """The host copy goes that a load-back reads."""
    at = find(events, step("load_queued"))
    node = events[at]["node"]
    gone = {
        **next(event for event in events if step("host_evict")(event)),
        **{name: events[at][name] for name in ("tick", "node", "generation", "bound")},
        "used": events[at]["used"] - events[at]["slots"],
    }
    gone.pop("number", None)
    events.insert(at + 1, gone)
    return Planted(Kind.PARENT_FREED, node, at + 2)


def number_missing(events: list[Event]) -> Planted:
    """A backup takes no number where its forward ends."""
    at = find(events, step("forward_ended", after="LAYERS_IN_FLIGHT"), nth=4)
    del events[at]["number"]
    return Planted(Kind.NUMBER, events[at]["node"], at + 1)


def reduction_of_no_numbers(events: list[Event]) -> Planted:
    """A reduction that cannot be read."""
    at = find(events, lambda event: event["event"] == "reduction", nth=20)
    events[at]["count"] = "many"
    return Planted(Kind.UNREADABLE, None, at + 1)


FAULTS: list[Callable[[list[Event]], Planted]] = [
    dropped_commit, dropped_release, lock_kept, unlocked_twice, commit_before_a_layer, confirmed_before_submitted, edited_watermark,
    double_free, slots_never_released, slots_kept, slots_appear, edited_state, edited_state_before, wrong_stale_name,
    reordered_agreement, agreed_early, completion_after_its_commit, number_twice, number_skipped, agreed_missing, reduction_back,
    lost_child, parent_freed_first, changed_generation, changed_column, time_goes_back, field_missing, reserved_nothing,
    released_nothing, divided_wrongly, loaded_twice, load_never_queued, evicted_while_loading, number_missing,
    reduction_of_no_numbers,
]  # fmt: skip


@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_a_planted_fault_is_named(plant: Callable[[list[Event]], Planted], one_rank: Path, tmp_path: Path) -> None:
    """R37: the first divergence is the planted fault, with its node and line, and the events before it are shown."""
    events = events_of(one_rank)
    expected = plant(events)
    report = replay([write(tmp_path / "faulty.jsonl", events)])
    assert expected in [Planted(finding.kind, finding.node, finding.line) for finding in report.findings.kept]
    first = report.findings.first
    assert first is not None
    assert first.line <= expected.line or expected.kind is Kind.NEVER_ENDED  # which is told of its last step, at the end
    assert report.findings.before_first
    assert f"faulty.jsonl:{expected.line}" in report.text()


def test_a_failure_that_the_reduction_does_not_name_is_named(failing_ranks: list[Path], tmp_path: Path) -> None:
    """R21, R37: a backup that rolls back for a failure on some rank does so when the reduction says so, and not before."""
    events = events_of(failing_ranks[0])
    at = find(events, step("agreed_failed", after="ROLLED_BACK"))
    reduction = find(events[:at], lambda event: event["event"] == "reduction", nth=-1)
    assert events[reduction]["first_failed"] == events[at]["number"]
    events[reduction]["first_failed"] = None
    (finding, *_) = replay([write(tmp_path / "faulty.jsonl", events)]).findings.kept
    assert (finding.kind, finding.node, finding.line) == (Kind.AGREED_EARLY, events[at]["node"], at + 1)
    assert finding.text == f"number {events[at]['number']} is agreed to have failed, the reduction names None"


def test_a_line_that_was_taken_out_is_named(one_rank: Path, tmp_path: Path) -> None:
    """R37: a gap in the sequence numbers is named with its line; what follows is checked as far as it can be."""
    events = events_of(one_rank)
    at = find(events, COMMIT)
    del events[at]
    report = replay([write(tmp_path / "gap.jsonl", events, renumber=False)])
    assert [(finding.kind, finding.line) for finding in report.findings.kept] == [(Kind.GAP, at + 1)]


def test_a_cut_line_is_named_and_replay_goes_up_to_it(one_rank: Path, tmp_path: Path) -> None:
    """R37: of a log whose last line is cut, the whole lines are replayed without findings; the cut is named with its line, and what
    was pending there is told, not blamed."""
    content = one_rank.read_bytes()
    lines = content[: len(content) * 2 // 3].splitlines(keepends=True)
    if lines[-1].endswith(b"\n"):
        lines[-1] = lines[-1][:-9]
    (tmp_path / "cut.jsonl").write_bytes(b"".join(lines))
    report = replay([tmp_path / "cut.jsonl"])
    assert [(finding.kind, finding.line) for finding in report.findings.kept] == [(Kind.CUT, len(lines))]
    assert report.logs[0].events == len(lines) - 1
    assert report.logs[0].open_at_cut()
    assert f"cut at line {len(lines)}" in report.text()
    assert f"pending there: {report.logs[0].open_at_cut()[0]}" in report.text()
    (tmp_path / "cut.jsonl").write_bytes(b"".join(lines[:2]) + lines[2][:9])
    early = replay([tmp_path / "cut.jsonl"]).text()
    assert "cut at line 3" in early
    assert "pending there" not in early


def test_nonsense_in_the_middle_is_named(one_rank: Path, tmp_path: Path) -> None:
    """R37: a line that is not JSON ends the replay there, with its number."""
    lines = one_rank.read_bytes().splitlines(keepends=True)
    (tmp_path / "bad.jsonl").write_bytes(b"".join([*lines[:50], b"{nonsense\n", *lines[50:]]))
    assert [(finding.kind, finding.line) for finding in replay([tmp_path / "bad.jsonl"]).findings.kept] == [(Kind.UNREADABLE, 51)]


def test_lost_events_are_named(one_rank: Path, tmp_path: Path) -> None:
    """R36, R37: where the writer lost events replay says how many, and does not blame the backups for what it has not seen."""
    events = events_of(one_rank)
    middle = len(events) // 2
    lost = {
        "rank": 0,
        "seq": events[middle + 9]["seq"],
        "event": "lost",
        "tick": events[middle]["tick"],
        "first": middle,
        "lost": 10,
    }
    events[middle : middle + 10] = [lost]
    report = replay([write(tmp_path / "lost.jsonl", events, renumber=False)])
    assert [(finding.kind, finding.line) for finding in report.findings.kept] == [(Kind.LOST, middle + 1)]
    assert report.logs[0].lost == 10


def test_ranks_that_disagree_are_named(four_ranks: list[Path], tmp_path: Path) -> None:
    """R37: the first logical difference between ranks is named: which rank, tick, sequence number, line and fields."""
    paths = []
    for rank, path in enumerate(four_ranks):
        events = events_of(path)
        if rank == 2:
            at = find(events, step("forward_ended"), nth=10)
            events[at]["reason"] = "another"
        paths.append(write(tmp_path / path.name, events))
    report = replay(paths)
    (finding,) = report.findings.kept
    assert (finding.kind, finding.rank, finding.line, finding.node) == (
        Kind.RANKS_DISAGREE,
        2,
        at + 1,
        events_of(paths[2])[at]["node"],
    )
    assert report.disagreement is not None
    assert report.disagreement["fields"] == {"reason": {"here": "another", "there": None}}


def test_a_rank_that_does_less_is_named(four_ranks: list[Path], tmp_path: Path) -> None:
    """R37: a rank that leaves out a logical event disagrees from there on; ranks may confirm copies when they like."""
    events = events_of(four_ranks[1])
    at = find(events, step("hit"), nth=7)
    node = events[at]["node"]
    del events[at]
    report = replay([four_ranks[0], write(tmp_path / "less.jsonl", events), *four_ranks[2:]])
    assert Kind.RANKS_DISAGREE in report.findings.counts
    finding = next(finding for finding in report.findings.kept if finding.kind is Kind.RANKS_DISAGREE)
    assert finding.rank == 1
    assert finding.line >= at + 1
    assert node >= 1


def test_swapped_ranks_are_named(four_ranks: list[Path], tmp_path: Path) -> None:
    """R37: an event of one rank in the log of another is named with its line and node; two logs of one rank cannot be merged."""
    one, other = events_of(four_ranks[0]), events_of(four_ranks[1])
    at = find(one, step("copy_done"), nth=5)
    one[at] = {**one[at], "rank": 1}
    report = replay([write(tmp_path / "swapped.jsonl", one), write(tmp_path / "other.jsonl", other)])
    assert (Kind.WRONG_RANK, one[at]["node"], at + 1) in [(f.kind, f.node, f.line) for f in report.findings.kept]
    with pytest.raises(UnusableLogs, match="both of rank 0"):
        replay([four_ranks[0], four_ranks[0]])


def test_a_copy_that_one_rank_cut_does_not_count_as_disagreement(four_ranks: list[Path], tmp_path: Path) -> None:
    """R37: a rank whose log is cut is left out of the comparison from there on."""
    lines = four_ranks[0].read_bytes().splitlines(keepends=True)
    cut = tmp_path / "cut.jsonl"
    cut.write_bytes(b"".join(lines[: len(lines) // 2]))
    report = replay([cut, *four_ranks[1:]])
    assert [finding.kind for finding in report.findings.kept] == [Kind.CUT]


def test_a_rank_of_whose_events_some_are_lost_is_compared_up_to_there(four_ranks: list[Path], tmp_path: Path) -> None:
    """R36, R37: ranks are compared up to where events of one are missing, which is said; a difference after it is nobody's fault."""
    events = events_of(four_ranks[1])
    at = find(events, COMMIT, nth=3)
    report = replay([four_ranks[0], write(tmp_path / "gap.jsonl", [*events[:at], *events[at + 5 :]], renumber=False)])
    assert [(finding.kind, finding.rank) for finding in report.findings.kept] == [(Kind.GAP, 1)]
    (warning,) = report.warnings
    assert warning == (
        f"the ranks are compared up to tick {events[at]['tick']} only: events are missing from {tmp_path / 'gap.jsonl'}"
    )


def test_logs_that_differ_in_what_they_were_written_under_are_told(four_ranks: list[Path], tmp_path: Path) -> None:
    """R37: another configuration, or another transition table, is a warning: the logs are replayed all the same."""
    paths = []
    for rank, path in enumerate(four_ranks[:2]):
        header, *events = events_of(path)
        header["table"] = "0123456789abcdef"
        header["config"] = {**header["config"], "requests": rank}
        paths.append(write(tmp_path / path.name, [header, *events]))
    report = replay(paths)
    assert report.is_clean
    differently, table = report.warnings
    assert differently == f"{paths[0]} and {paths[1]} were configured differently"
    assert table == f"the logs were written under transition table 0123456789abcdef, and are replayed under {table_hash()}"
    assert f"warning: {table}" in report.text()


def interrupted_run(folder: Path) -> list[Path]:
    """Logs of three ranks of which each is interrupted after another tick, the first one last."""

    def interrupt(world: RankWorld) -> None:
        def stop(scheduler: Scheduler) -> None:
            if scheduler.tick >= 40 - 2 * world.rank:
                raise GroupBroken("interrupted")

        world.watch_with(stop)

    config = RunConfig(verify="off", requests=60, cp_size=3, log=folder / "events.jsonl")
    with pytest.raises(RunFailed, match="interrupted"):
        run_world(config, load_requests(config), on_world=interrupt)
    return sorted(folder.glob("events*.jsonl"))


def test_ranks_that_are_interrupted_end_by_themselves(tmp_path: Path) -> None:
    """R37: an interrupt finds each rank at a tick of its own. What a rank does to end is not compared, and that is said; a difference
    before it is found all the same, also one between those that go on for longer."""
    logs = [events_of(path) for path in interrupted_run(tmp_path)]
    places = [find(events, lambda event: event["event"] == "quarantine") for events in logs]
    ends = [events[at]["tick"] for events, at in zip(logs, places, strict=True)]
    assert ends[2] < ends[0], "the ranks wind down at their own ticks"

    def report_of(edited: list[list[Event]]) -> Report:
        return replay([write(tmp_path / f"edited{rank}.jsonl", events) for rank, events in enumerate(edited)])

    report = report_of(logs)
    assert (report.findings.kept, report.disagreement) == ([], None)
    assert any(f"rank 2 is compared up to tick {ends[2]} only" in warning for warning in report.warnings)

    at = max(find(logs[2][: places[2]], step("forward_ended"), nth=-1), 0)
    changed = [*logs[2][:at], {**logs[2][at], "reason": "another"}, *logs[2][at + 1 :]]
    (finding,) = report_of([logs[0], logs[1], changed]).findings.kept
    assert (finding.kind, finding.rank, finding.line) == (Kind.RANKS_DISAGREE, 2, at + 1)

    cut = [events[:at] for events, at in zip(logs, (places[0], places[1], places[2] + 1), strict=True)]
    assert set(report_of(cut).findings.counts) == {Kind.CUT}, "nor is it compared with logs that end before"


def test_unusable_input_is_one_clear_line(one_rank: Path, four_ranks: list[Path], tmp_path: Path) -> None:
    """R37: no header, a newer schema, no file and logs of different runs are refused with the file and what is wrong."""
    events = events_of(one_rank)
    for name, changed, text in (
        ("headless", events[1:], "line 1: 'cache' where the header was expected"),
        ("newer", [{**events[0], "schema": 99}, *events[1:]], "schema version 99, newer than"),
    ):
        with pytest.raises(UnusableLogs, match=text) as caught:
            replay([write(tmp_path / name, changed)])
        assert "\n" not in str(caught.value)
    with pytest.raises(UnusableLogs, match="cannot be read"):
        replay([tmp_path / "nowhere"])
    with pytest.raises(UnusableLogs, match="give the logs of one run"):
        replay(
            [
                four_ranks[0],
                write(tmp_path / "other", [{**e, "rank": 1, "table": "x"} if e["event"] == "header" else e for e in events]),
            ]
        )
    with pytest.raises(UnusableLogs, match="no log was given"):
        replay([])
