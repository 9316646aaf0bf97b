"""One node's way on the diagram of the state machine."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import pytest
from click.testing import CliRunner

from cphicache.events import read_events
from cphicache.lifecycle import State, Trigger
from cphicache.replay import UnusableLogs, Way, WayStep, node_way
from cphicache.run.cli import main
from cphicache.run.draw import GREY, dot_text, graph, marks_of, mermaid_text
from tests.replay.logs import events_of, find, step, write

N, R, L, C, B = State
needs_dot = pytest.mark.skipif(shutil.which("dot") is None, reason="needs graphviz's dot")


def a_committed_node(log: Path) -> int:
    node: int = next(event["node"] for event in read_events(log) if event.get("after") == "COMMITTED" != event.get("before"))
    return node


def test_a_way_is_what_the_log_says(one_rank: Path) -> None:
    """R39: the steps of a node's way, with their ticks, are those of the log; stale no-ops are left out."""
    for node in {event["node"] for event in read_events(one_rank) if event["event"] == "step"}:
        mine = [
            event
            for event in read_events(one_rank)
            if event.get("node") == node and event["event"] == "step" and "stale" not in event
        ]
        if not mine:
            continue
        way = node_way(one_rank, node)
        counts = Counter((event["before"], event["trigger"], event["after"]) for event in mine)
        assert sum(len(ticks) for ticks in way.steps.values()) == len(mine)
        assert {(step.before, step.trigger, step.after) for step in way.steps} == set(counts)
        assert sorted(tick for ticks in way.steps.values() for tick in ticks) == [event["tick"] for event in mine]


def test_taken_edges_are_marked(one_rank: Path) -> None:
    """R39: on both drawings every step that the node took stands with its count and ticks; the dot drawing greys what it did not take."""
    way = node_way(one_rank, a_committed_node(one_rank))
    marks = marks_of(way, graph())
    assert {("RESERVED", "LAYERS_IN_FLIGHT"), ("LAYERS_IN_FLIGHT", "COMMITTED")} <= marks.taken
    dot, mermaid = dot_text(way=way), mermaid_text(way=way)
    for one, ticks in way.steps.items():
        assert f"▶ {one.trigger} ×{len(ticks)} at tick {ticks[0]}" in dot
        assert f"▶ {one.trigger} ×{len(ticks)} at tick {ticks[0]}" in mermaid
    assert dot.count("penwidth=3") == len(marks.taken)
    assert GREY in dot
    assert f"class {','.join(state for state in State if state in marks.visited)} visited" in mermaid


def test_without_a_way_nothing_is_marked() -> None:
    """R39: the drawing of the table itself has no mark and no grey."""
    for text in (dot_text(), mermaid_text()):
        assert "▶" not in text
        assert GREY not in text
        assert "visited" not in text


def test_answers_that_the_log_tells_are_marked() -> None:
    """R16, R39: a retry after eviction marks the whole chain; a refusal with several possible reasons marks only that it was asked."""
    chain = [WayStep(N, Trigger.RESERVE, N, False), WayStep(N, Trigger.RESERVE_RETRY, R, False)]
    marks = marks_of(Way(1, 0, {one: [3] for one in chain}), graph())
    assert marks.taken == {
        (N, "reserve_1"), ("reserve_1", "reserve_2"), ("reserve_2", "reserve_3"), ("reserve_3", "reserve_retry_1"), ("reserve_retry_1", R),
    }  # fmt: skip
    refused = marks_of(Way(1, 0, {WayStep(N, Trigger.RESERVE, N, True): [1, 2, 3, 4, 5, 5]}), graph())
    assert refused.taken == {(N, "reserve_1")}
    assert refused.on_arrows == {(N, "reserve_1"): ("▶ reserve ×6 at tick 1, 2, 3 ... 5",)}


def test_the_command_prints_mermaid() -> None:
    """R39: without options the Mermaid text of the table, and nothing else."""
    done = CliRunner().invoke(main, ["diagram"])
    assert (done.exit_code, done.output) == (0, mermaid_text())


@needs_dot
def test_the_command_draws(one_rank: Path, tmp_path: Path) -> None:
    """R39: the file's name says which picture it is; the node's way is on it."""
    node = str(a_committed_node(one_rank))
    for name, begins in (("a.svg", b"<?xml"), ("a.png", b"\x89PNG")):
        done = CliRunner().invoke(main, ["diagram", "-o", str(tmp_path / name), "--log", str(one_rank), "--node", node])
        assert done.exit_code == 0, done.output
        assert (tmp_path / name).read_bytes().startswith(begins)
    assert f"marked: the way of node {node}, rank 0" in (tmp_path / "a.svg").read_text()
    refused = CliRunner().invoke(main, ["diagram", "-o", str(tmp_path / "absent" / "a.svg")])
    assert (refused.exit_code, refused.output.count("\n")) == (2, 1)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--node", "1"], "belong together"),
        (["-o", "a.gif"], "ends in .svg or .png"),
        (["--log", "{log}", "--node", "999999"], "no step of node 999999"),
        (["--log", "absent.jsonl", "--node", "1"], "absent.jsonl"),
    ],
)
def test_what_cannot_be_drawn_is_one_line(one_rank: Path, arguments: list[str], says: str) -> None:
    """R39: unusable input is one clear line and exit status 2."""
    done = CliRunner().invoke(main, ["diagram", *(argument.format(log=one_rank) for argument in arguments)])
    assert done.exit_code == 2
    assert done.output.count("\n") == 1
    assert says in done.output


def test_an_unknown_step_is_named(one_rank: Path, tmp_path: Path) -> None:
    """R39: a step that nobody knows is refused with its line; of a cut log the way up to the cut is read."""
    events = events_of(one_rank)
    at = find(events, step("layer_stored"))
    node = events[at]["node"]
    events[at]["trigger"] = "wish"
    with pytest.raises(UnusableLogs, match=f":{at + 1}: not a step that is known"):
        node_way(write(tmp_path / "edited.jsonl", events), node)
    content = one_rank.read_bytes()
    (tmp_path / "cut.jsonl").write_bytes(content[: len(content) // 2])
    cut = node_way(tmp_path / "cut.jsonl", node)
    assert (
        0 < sum(len(ticks) for ticks in cut.steps.values()) <= sum(len(ticks) for ticks in node_way(one_rank, node).steps.values())
    )
