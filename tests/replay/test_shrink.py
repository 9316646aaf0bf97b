"""A log that does not execute as recorded is reduced to the few calls that fail, and written as a test."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from cphicache.agree.port import GroupBroken
from cphicache.engine import CpHiRadixCache
from cphicache.engine.effects import Effects
from cphicache.engine.holds import Holds
from cphicache.engine.records import Backup
from cphicache.reexecute import NothingFails, RecordedLog, run_case, shrink
from cphicache.reexecute.script import RAW
from cphicache.run.cli import main
from tests.replay.conftest import serve
from tests.replay.logs import Event, events_of, find, step, write

SMALL = {"log_level": "ops", "scale": 0.0625, "requests": 12}
MOST = 10


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    (path,) = serve(tmp_path_factory.mktemp("ops"), cp_size=1, **SMALL)
    return path


def plant(patch: pytest.MonkeyPatch, *, when: str) -> None:
    """A backup that ends does not give its device lock back."""
    released = Holds.release_device

    def release(self: Holds, record: Backup) -> None:
        if record.state != when:
            released(self, record)

    patch.setattr(Holds, "release_device", release)


def test_a_planted_bug_becomes_a_test(recorded: Path, tmp_path: Path) -> None:
    """R37: a lock that a commit keeps is reduced to ten calls at most; the test that is written fails with it and passes without."""
    out = tmp_path / "test_case.py"
    with pytest.MonkeyPatch.context() as patch:
        plant(patch, when="LAYERS_IN_FLIGHT")
        answer = CliRunner().invoke(main, ["replay", "--shrink", str(recorded), "-o", str(out)])
        assert answer.exit_code == 0, answer.output
        assert answer.stderr == "", "progress is for terminals"
        assert "expected locks -1, found None" in answer.output
        names = load(out)
        assert len(names["OPERATIONS"]) <= MOST
        with pytest.raises(AssertionError, match="locks=-1"):
            names["test_the_reduced_operations"]()
    names["test_the_reduced_operations"]()
    assert [path.name for path in tmp_path.iterdir()] == ["test_case.py"]


def test_what_the_checker_finds_becomes_a_test(tmp_path: Path) -> None:
    """R37: a log that was written with the bug executes as recorded; what the outside checker finds on the way is reduced."""
    with pytest.MonkeyPatch.context() as patch:
        plant(patch, when="LAYERS_IN_FLIGHT")
        with pytest.MonkeyPatch.context() as blind:
            blind.setattr("cphicache.run.world.require", lambda census: None)
            blind.setattr("cphicache.run.world.check_quiet", lambda census: [])
            paths = serve(tmp_path, cp_size=2, **SMALL)
        case = shrink(RecordedLog(paths[1]))
        assert case.expected is None
        assert case.text.startswith("the checker found locks at tick")
        assert len(case.operations) <= MOST
    with pytest.raises(NothingFails):
        shrink(RecordedLog(serve(tmp_path, cp_size=1, **SMALL)[0]))


def test_what_the_engine_raises_becomes_a_test(recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R37: a call that raises is reduced too, to the same error in the same call."""

    def commit(self: Effects, record: Backup) -> None:
        raise AssertionError("planted")

    monkeypatch.setattr(Effects, "commit", commit)
    case = shrink(RecordedLog(recorded))
    assert "AssertionError: planted" in case.text
    assert len(case.operations) <= MOST
    assert case.operations[-1]["call"] == "begin_tick"


def test_a_log_that_does_not_fail_is_refused(recorded: Path, tmp_path: Path) -> None:
    """R37: where nothing fails nothing is written, and the exit status is 2."""
    out = tmp_path / "test_case.py"
    answer = CliRunner().invoke(main, ["replay", "--shrink", str(recorded), "-o", str(out)])
    assert answer.exit_code == 2
    assert "there is nothing to shrink" in answer.output
    assert not out.exists()


@pytest.mark.parametrize(
    ("wanted", "damage", "says"),
    [
        ({"call": "admit"}, {"node": 4321}, "not when its calls are told without its numbers: cannot be shrunk"),
        ({"call": "begin_tick"}, {"idle": "True"}, "expected idle 'True', found True: the two read alike: cannot be shrunk"),
    ],
)
def test_what_no_script_tells_is_refused(recorded: Path, tmp_path: Path, wanted: Event, damage: Event, says: str) -> None:
    """R37: a log that fails by what a script leaves out (a node that no call gave, the type of a value) is refused in one line."""
    events = events_of(recorded)
    at = find(events, lambda event: wanted.items() <= event.items(), nth=2)
    events[at] |= damage
    out = tmp_path / "test_case.py"
    answer = CliRunner().invoke(main, ["replay", "--shrink", str(write(tmp_path / "edited.jsonl", events)), "-o", str(out)])
    assert (answer.exit_code, answer.output.count("\n")) == (2, 1)
    assert f"line {at + 1} " in answer.output
    assert says in answer.output
    assert not out.exists()


def test_a_number_alone_that_differs_is_reduced(recorded: Path, tmp_path: Path) -> None:
    """R37: where the failing event differs in a number that is left out elsewhere, the case tells that number too."""
    events = events_of(recorded)
    at = find(events, step("reserve", before="DEVICE_VALID_HOST_NONE", after="RESERVED"), nth=2)
    events[at]["slots"] = 7
    case = shrink(RecordedLog(write(tmp_path / "edited.jsonl", events)))
    assert case.fields == ("slots",)
    assert case.expected is not None
    assert "slots=7" in case.expected[-1]
    trouble = run_case(case.config, case.operations, case.expected, fields=case.fields)
    assert trouble is not None
    assert "slots=7; found" in trouble
    assert trouble.endswith("slots=112")
    assert len(case.operations) <= MOST


def test_a_page_that_no_call_gave_is_told_by_its_number(recorded: Path, tmp_path: Path) -> None:
    """R37: a log whose caller names a page that it was never given is reduced with that number, since nothing else stands for it."""
    events = events_of(recorded)
    at = find(events, lambda event: event.get("call") == "reserve", nth=2)
    events[at]["row"] = [777]
    case = shrink(RecordedLog(write(tmp_path / "edited.jsonl", events)))
    assert case.operations[-1]["row"] == [(RAW, 777, 778)]
    assert len(case.operations) <= MOST
    assert run_case(case.config, case.operations, case.expected, fields=case.fields) is not None


@pytest.mark.parametrize("error", [RuntimeError, GroupBroken])
def test_a_first_call_that_fails_is_all(recorded: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception]) -> None:
    """R37: nothing is left out of a single call; one that loses its group though no rank was lost has failed too."""

    def begin_tick(self: CpHiRadixCache, *, idle: bool = False) -> None:
        raise error("planted")

    monkeypatch.setattr(CpHiRadixCache, "begin_tick", begin_tick)
    case = shrink(RecordedLog(recorded))
    assert [call["call"] for call in case.operations] == ["begin_tick"]
    trouble = run_case(case.config, case.operations, case.expected, fields=case.fields)
    assert trouble == f"begin_tick raised {error.__name__}: planted"


@pytest.mark.parametrize("most", [1, 5, 40])
def test_few_trials_leave_more(most: int, recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R37: where the trials are used up, the smallest script that was found is the case: it fails, and could be smaller. Meanwhile
    progress is told, call by call, and script by script."""
    plant(monkeypatch, when="LAYERS_IN_FLIGHT")
    least = shrink(RecordedLog(recorded))
    monkeypatch.setattr(sys.modules["cphicache.reexecute.shrink"], "MAX_TRIALS", most)  # the package has a function of that name
    done: list[int] = []
    tried: list[tuple[int, int]] = []
    case = shrink(RecordedLog(recorded), on_operation=done.append, on_trial=lambda *told: tried.append(told))
    assert case.trials == most < least.trials
    assert len(least.operations) < len(case.operations) <= case.recorded
    assert run_case(case.config, case.operations, case.expected, fields=case.fields) is not None
    assert done == list(range(1, case.recorded))
    assert [count for count, _ in tried] == list(range(most))
    assert tried[0][1] == case.recorded >= tried[-1][1] >= len(case.operations)


def load(path: Path) -> dict[str, object]:
    names: dict[str, object] = {}
    exec(compile(path.read_text(), str(path), "exec"), names)
    return names
