"""A log that does not execute as recorded is reduced to the few calls that fail, and written as a test."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from cphicache.engine.effects import Effects
from cphicache.engine.holds import Holds
from cphicache.engine.records import Backup
from cphicache.reexecute import NothingFails, RecordedLog, shrink
from cphicache.run.cli import main
from tests.replay.conftest import serve

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


def load(path: Path) -> dict[str, object]:
    names: dict[str, object] = {}
    exec(compile(path.read_text(), str(path), "exec"), names)
    return names
