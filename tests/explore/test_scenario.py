"""Violations as texts: readable, and played again."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from cphicache.engine.holds import Holds
from cphicache.explore import WORLDS, Happening, RequestScript, ScenarioError, Violation
from cphicache.explore.environment import Fate, Sample
from cphicache.explore.scenario import play, read, write
from cphicache.run import explore as exploring
from cphicache.run.census import take_census
from cphicache.run.cli import main
from tests.explore.worlds import single, tiny

STORY = """\
# world tiny: made up by a test
# violation: none, this is the happy path
admit a
  node 1 generation 1 RESERVED layers 0/0 pages 1 2 of a
  free host slots 2
store 0
  node 1 generation 1 LAYERS_IN_FLIGHT number 0 layers 1/0 pages 1 2 of a
  free host slots 2
insert a
  node 1 generation 1 LAYERS_IN_FLIGHT number 0 bound layers 1/0 pages 1 2 lock 1 hold 0
  free host slots 2
tick | ended
  node 1 generation 1 LAYERS_IN_FLIGHT number 0 bound layers 1/1 pages 1 2 lock 1 hold 0
  free host slots 2, reduction agreed=1,none
tick
  node 1 generation 1 COMMITTED number 0 bound agreed layers 1/1 pages 1 2 lock 0 hold 0
  free host slots 2
"""


def test_a_scenario_reads_like_a_story() -> None:
    """R13: events at the margin, answers behind bars, what follows indented; reading and writing are inverse."""
    name, happenings = read(STORY)
    assert name == "tiny"
    assert happenings[3] == Happening("tick", ((Fate.ENDED,),))
    assert write(tiny(), Violation("none, this is the happy path", tuple(happenings)), take_census) == STORY


def test_a_reduction_is_an_answer_too() -> None:
    """R18: what a drain round agreed on stands among the answers."""
    _, happenings = read("# world tiny: x\nshutdown | ended agreed=1,none | agreed=1,0\n")
    assert happenings == [Happening("shutdown", ((Fate.ENDED, Sample(1, None)), (Sample(1, 0),)))]
    lines = play(
        tiny(outside="shutdown"), read("# world tiny: x\nadmit a\nstore 0\nshutdown | ended agreed=1,none\n")[1], take_census
    )
    assert lines[-2:] == ["shutdown | ended agreed=1,none", "  free host slots 4"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("admit a\n", "no line '# world NAME"),
        ("# world tiny: x\ntick | perhaps\n", "answer 'perhaps'"),
        ("# world tiny: x\ninsert a\n", "event 'insert a' cannot come here"),
        ("# world tiny: x\nadmit a\nstore 0\ntick\n", "tick: no answer to node 1"),
        ("# world tiny: x\nadmit a\nstore 0\ntick | taken\n", "tick: answer 'taken' to node 1: give one of flying, ended, failed"),
        ("# world tiny: x\nadmit a\nstore 0\ntick | agreed=1,none\n", "tick: answer .* to node 1: give one of"),
        ("# world tiny: x\nadmit a\nstore 0\nshutdown | ended flying\n", "shutdown: answer 'flying' to a reduction: give what"),
        ("# world tiny: x\nadmit a\nstore 0\ntick | ended | ended\n", "tick: answers of 2 ranks, in a world of 1"),
        ("# world tiny: x\ntick | agreed=1\n", "answer 'agreed=1': give one of"),
    ],
)
def test_a_text_that_is_no_scenario_is_refused(text: str, why: str) -> None:
    """R35: one line that names what is wrong."""
    with pytest.raises(ScenarioError, match=why):
        play(tiny(outside="shutdown"), read(text)[1], take_census)


def test_a_drain_round_needs_what_was_agreed() -> None:
    """R18, R35: where the reduction of a drain round is not among the answers, the scenario ends there and says so."""
    lines = play(tiny(outside="shutdown"), read("# world tiny: x\nadmit a\nstore 0\nshutdown | ended\n")[1], take_census)
    assert lines[-2:] == ["shutdown | ended", "  rank 0 waits for a reduction, and there is none"]


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (
            lambda: RequestScript(rid="a", pages=(1, 2), chunks=(), batches=()),
            "chunks .* of request 'a': give rising ends, the last one 2",
        ),
        (lambda: RequestScript(rid="a", pages=(1, 2), chunks=(2, 1), batches=(0, 0)), "give rising ends, the last one 2"),
        (lambda: RequestScript(rid="a", pages=(1, 2), chunks=(1,), batches=(0,)), "give rising ends, the last one 2"),
        (
            lambda: RequestScript(rid="a", pages=(1, 2), chunks=(1, 2), batches=(0,)),
            "batches .* 'a': give one for each of 2 chunks",
        ),
        (lambda: tiny(outside="abort rain"), "outside events \\['rain'\\] of world 'tiny': give some of abort, reset, shutdown"),
        (lambda: tiny(single("a", 1), single("a", 2)), "requests of world 'tiny': give each a name of its own"),
    ],
)
def test_a_world_that_cannot_be_is_refused(made: Callable[[], object], why: str) -> None:
    """R35: a world is checked when it is made; one line says what it should be."""
    with pytest.raises(ValueError, match=why):
        made()


# -- the command ------------------------------------------------------------------------------------------------------------------------
def command(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(main, ["explore", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


def test_the_command_prints_numbers() -> None:
    """R30: states, edges and depth of each world; a bounded one says so; as JSON too."""
    status, out, _ = command("split", "chain-1", "--max-states", "40")
    assert status == 0
    assert "split" in out
    assert "bounded" in out
    assert "every history of up to" in " ".join(out.split())
    status, out, _ = command("split", "--max-states", "40", "--max-faults", "0", "--json")
    report = json.loads(out)["worlds"][0]
    assert status == 0
    assert report["world"] == "split"
    assert report["states"] > 40
    assert report["states"] > report["expanded"] > 0
    assert report["depth"] >= report["followed"] > 0
    assert report["violation"] is None


def test_a_terminated_exploration_says_how_far_it_came(monkeypatch: pytest.MonkeyPatch) -> None:
    """R30: SIGTERM, as an interrupt, ends the list of worlds with the numbers so far, and exit status 130."""
    monkeypatch.setattr("cphicache.run.explore._numbers", lambda report: os.kill(os.getpid(), signal.SIGTERM))
    before = signal.getsignal(signal.SIGTERM)
    status, out, _ = command("chain-2", "split", "--json")
    assert signal.getsignal(signal.SIGTERM) is before
    (report,) = json.loads(out)["worlds"]
    assert status == 130
    assert (report["world"], report["ended_by"], report["complete"]) == ("chain-2", "interrupted", False)
    assert report["states"] > report["expanded"] == 500


def test_worlds_are_listed_and_named() -> None:
    """R35: an unknown world is refused in one line that names the known ones."""
    status, out, _ = command("--list")
    assert status == 0
    assert all(name in out for name in WORLDS)
    status, out, _ = command("--list", "split")
    assert (status, [line.split()[0] for line in out.splitlines()]) == (0, ["split"])
    for arguments in (["nowhere"], ["--list", "nowhere"], ["split", "nowhere"]):
        status, out, err = command(*arguments)
        assert (status, out) == (2, "")
        assert err == f"cphicache: unknown world 'nowhere': give some of {', '.join(WORLDS)}\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--all", "split"], "--all and split: give either"),
        (["--list", "--json"], "--json: is of no use with --list"),
        (["--replay", __file__, "--max-states", "3"], "--max-states: is of no use with --replay"),
        (["--replay", __file__, "--list", "--all", "split"], "worlds, --all, --list: is of no use with --replay"),
    ],
)
def test_what_would_be_ignored_is_refused(arguments: list[str], said: str) -> None:
    """R35: nobody believes to have bounded or chosen what was not."""
    status, out, err = command(*arguments)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"cphicache: {said}")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"# world split\xff", "is not UTF-8 at byte 13; give a file that explore has written"),
        (b"# world nowhere: x\n", "unknown world 'nowhere'"),
        (b"admit a\n", "no line '# world NAME: ...': give a file that explore has written"),
        (b"# world split: x\nno event\n", "event 'no event' cannot come here"),
        (b" " * (exploring.SCENARIO_BYTES + 1), f"is longer than {exploring.SCENARIO_BYTES} bytes"),
    ],
    ids=["binary", "world", "no world", "event", "long"],
)
def test_a_file_that_is_no_scenario_is_one_line(content: bytes, said: str, tmp_path: Path) -> None:
    """R35: it names the file and what is wrong with it; status 2."""
    path = tmp_path / "scenario.txt"
    path.write_bytes(content)
    status, out, err = command("--replay", str(path))
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"cphicache: {path}: {said}")


def test_a_violation_is_written_and_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R30: exit status 1, a golden scenario in the folder, and a replay that goes the same way; with the bug mended, another."""
    small = replace(WORLDS["split"], outside=frozenset())
    monkeypatch.setitem(WORLDS, "split", small)
    with monkeypatch.context() as planted:
        planted.setattr(Holds, "hold_device", lambda self, record: None)
        status, _, err = command("split", "--out", str(tmp_path))
        path = tmp_path / "explore-split.txt"
        assert status == 1
        assert f"written to {path}" in err
        assert path.read_text().startswith("# world split: ")
        assert command("--replay", str(path))[0] == 0
    status, out, _ = command("--replay", str(path))
    assert status == 1
    assert out
