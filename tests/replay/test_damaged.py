"""Logs of which a field is missing or of another type than the schema's: every command tells it, none breaks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from click import Command
from click.testing import CliRunner

from cphicache.events import EVENTS, FIELDS
from cphicache.events.shapes import EVENT_SHAPES, FIELD_SHAPES, ShapeCheck
from cphicache.replay import Kind, replay
from cphicache.run.seen import diagram_command, replay_command, report_command, trace_command
from tests.replay.calls import lost_group, odd_calls
from tests.replay.logs import Event, events_of, find, step, write

GONE = object()
VALUES: tuple[object, ...] = (GONE, None, [], [[]], {}, {"target": []}, -1, 1 << 40, "x", 1.5, True)
"""What a field is changed to. Some of it fits some fields: a wrong value is no reason to break either."""

RARE: tuple[Event, ...] = (
    {"event": "refused", "node": 3, "request": "a", "reason": "no_host_slots"},
    {"event": "pinned", "nodes": [3], "ticks": 2},
    {"event": "lost", "first": 1, "lost": 2},
    {"event": "write_back_wait", "nodes": [3]},
    {"event": "load_back_failed", "request": "a", "node": 3, "tokens": 8, "reason": "no pages"},
    {"event": "load_back_refused", "request": "a", "node": 3, "tokens": 8, "reason": "no_device_pages"},
    {"event": "parked_dropped", "request": "a", "reason": "aborted"},
    {"event": "news", "node": 3, "nodes": [3], "head": 3, "trigger": "copy_done", "number": 0},
)
"""Events that the calls below do not lead to, and one of a newer version."""


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> list[Event]:
    """A log with an event of every kind."""
    folder = tmp_path_factory.mktemp("whole")
    header, *events = events_of(odd_calls(folder / "odd"))
    lost = next(event for event in events_of(lost_group(folder / "lost", excluded=True)) if event["event"] == "group_lost")
    rare = [{"rank": 0, "tick": events[-2]["tick"], "wall": 1.0, **event} for event in RARE]
    return [header, *events[:-1], lost, *rare, events[-1]]


def short(events: list[Event], at: int) -> tuple[list[Event], int, int]:
    """Of a log what is about the node of the event at ``at``; where the event is there; the node."""
    node = events[at].get("node") or events[find(events, step("split"))]["node"]
    kept = [
        place
        for place, event in enumerate(events)
        if place == at or event["event"] in ("header", "cache", "end") or (event["event"] == "step" and event["node"] == node)
    ]
    return [events[place] for place in kept], kept.index(at), node


def damaged(events: list[Event], kind: str) -> Iterator[tuple[str, list[Event], int, int]]:
    """Each field of the events of a kind, with each of the other values in one short log each. Of each field the first event that has it
    is changed, or the first of all, which gets it."""
    mine = [at for at, event in enumerate(events) if event["event"] == kind]
    assert mine
    for field in dict.fromkeys((*(name for at in mine for name in events[at]), *EVENTS.get(kind, ()))):
        log, at, node = short(events, next((at for at in mine if field in events[at]), mine[0]))
        log = [{**event, "seq": place} for place, event in enumerate(log)]
        for value in VALUES:
            changed = {**log[at], field: value}
            if value is GONE:
                changed = {name: value for name, value in log[at].items() if name != field}
            yield field, [*log[:at], changed, *log[at + 1 :]], at, node


def invoke(command: Command, *arguments: object) -> tuple[int, str]:
    """Exit status and output; what is not handled is raised."""
    done = CliRunner().invoke(command, [str(argument) for argument in arguments])
    assert done.exception is None or isinstance(done.exception, SystemExit), (done.exception, arguments)
    return done.exit_code, done.output


@pytest.mark.parametrize("kind", [*EVENTS, "news"])
def test_no_command_breaks_over_a_changed_field(kind: str, real: list[Event], tmp_path: Path) -> None:
    """R37: with a field of an event missing or changed, replay tells a finding or refuses the log, and the timeline and the page are
    whole or refused in one line. What is not of its type is named with its line and field."""
    log, out = tmp_path / "log", tmp_path / "out"
    for field, events, at, node in damaged(real, kind):
        write(log, events, renumber=False)
        told = invoke(replay_command, log)
        commands = {
            "replay": told,
            "narrowed": invoke(replay_command, log, "--json", "--node", node),
            "diagram": invoke(diagram_command, "--log", log, "--node", node),
            "trace": invoke(trace_command, log, "-o", out),
            "report": invoke(report_command, log, "-o", out),
        }
        case = (field, events[at], commands)
        for status, text in commands.values():
            assert status in (0, 1) or (status == 2 and text.count("\n") == 1), case
        if field != "event" and ShapeCheck().wrong(events[at]) is not None:
            assert told[0] in (1, 2), case
            assert commands["trace"][0] == commands["diagram"][0] == 2, case
            for text in (told[1], commands["trace"][1], commands["diagram"][1]):
                assert f"'{field}'" in text or "schema version" in text, case
                assert f"{log}, line {at + 1}: " in text or f"{log}:{at + 1}: " in text, case


@pytest.mark.parametrize(
    ("place", "value", "says"),
    [
        ("step.tick", GONE, "'step' has no field 'tick'; a whole number from 0 on was expected"),
        ("step.node", {}, "field 'node' of 'step' is {} where a whole number from 0 on was expected"),
        ("step.layers", [70_000], "field 'layers' of 'step' is [70000] where a list of layers below 65536 was expected"),
        ("step.submitted", {"target": -1}, "is {'target': -1} where numbers of layers up to 65536, by payload was expected"),
        ("step.payload", GONE, "'step' has no field 'payload'; a string was expected"),
        ("cache.payloads", [["target", 4]], "is [['target', 4]] where numbers of layers up to 65536, by payload was expected"),
        ("reduction.count", True, "field 'count' of 'reduction' is True where a whole number from 0 on was expected"),
        ("load_back.nodes", "x" * 99, f"field 'nodes' of 'load_back' is '{'x' * 56}... where a list of"),
    ],
)
def test_a_wrong_field_is_one_finding(place: str, value: object, says: str, one_rank: Path, tmp_path: Path) -> None:
    """R37: an event with a wrong field is one finding with its line and what is to be done, and replay goes on behind it without blaming
    what it has not seen; the timeline, which would be wrong without a word, is not drawn."""
    events = events_of(one_rank)
    kind, field = place.split(".")
    at = find(events, lambda event: event["event"] == kind and field in event and (field != "payload" or "layers" in event))
    node = events[at].get("node") if field != "node" else None
    changed = {name: old for name, old in events[at].items() if name != field}
    log = write(tmp_path / "log", [*events[:at], changed if value is GONE else {**changed, field: value}, *events[at + 1 :]])
    report = replay([log])
    (finding,) = report.findings.kept
    assert (finding.kind, finding.node, finding.line) == (Kind.UNREADABLE, node, at + 1)
    assert says in finding.text
    assert report.logs[0].end == "closed"
    status, told = invoke(trace_command, log, "-o", tmp_path / "out")
    assert status == 2
    assert told == f"cphicache: event log {log}, line {at + 1}: {finding.text}\n"
    assert told.endswith(": the file was damaged or edited, take it once more from where it was written\n")


def test_a_wrong_last_event_is_told(one_rank: Path, tmp_path: Path) -> None:
    """R37: a wrong event behind which nothing comes is told like any other."""
    *events, end = events_of(one_rank)
    findings = replay([write(tmp_path / "log", [*events, {**end, "lost": None}])]).findings.kept
    assert (findings[0].kind, findings[0].line) == (Kind.UNREADABLE, len(events) + 1)
    cut = write(tmp_path / "cut", [*events[:5], {**events[5], "tick": None}])
    cut.write_bytes(cut.read_bytes() + b'{"event')
    assert [(finding.kind, finding.line) for finding in replay([cut]).findings.kept] == [(Kind.UNREADABLE, 6), (Kind.CUT, 7)]


@pytest.mark.parametrize("config", [{}, {"token_layer_bytes": [], "device_tokens": {}}, {"token_layer_bytes": {"target": "x"}}])
def test_a_configuration_may_be_anything(config: dict[str, object], one_rank: Path, tmp_path: Path) -> None:
    """R36, R37: a header's configuration is what its caller gave; figures that need it are left out where it does not have them."""
    header, *events = events_of(one_rank)
    log = write(tmp_path / "log", [{**header, "config": config}, *events])
    report = replay([log])
    assert report.is_clean
    assert report.logs[0].tally.token_bytes is None
    assert invoke(report_command, log, "-o", tmp_path / "page.html") == (0, f"{tmp_path / 'page.html'}: nothing is wrong\n")


def test_every_field_has_its_shape() -> None:
    """R36: what the schema names is checked: no event and no field is without a type."""
    assert EVENT_SHAPES.keys() == EVENTS.keys()
    assert FIELD_SHAPES.keys() == FIELDS.keys()
    for kind, fields in EVENTS.items():
        assert EVENT_SHAPES[kind].keys() - FIELDS.keys() == fields.keys() - FIELDS.keys(), kind
