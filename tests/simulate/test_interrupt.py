"""``cphicache simulate``, interrupted: what it says of the worlds that have ended."""

from __future__ import annotations

import signal
from collections.abc import Generator, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import pytest
from click.testing import CliRunner, Result

from cphicache.run.cli import main
from cphicache.run.simulate import command
from cphicache.run.simulate.outcome import Code
from cphicache.run.simulate.workers import Done, run_seeds


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch, default_sigint: None) -> Any:
    """Runs the command, which is interrupted once these seeds have ended, in this order."""

    def run(
        ended: Iterable[int],
        *arguments: str,
        planted: Mapping[str, str] = MappingProxyType({}),
        by: signal.Signals = signal.SIGINT,
    ) -> Result:
        def some_then_interrupt(seeds: Iterable[int], **options: Any) -> Generator[Done, None, None]:
            yield from run_seeds(ended, **(options | dict(planted)))
            signal.raise_signal(by)

        monkeypatch.setattr(command, "run_seeds", some_then_interrupt)
        return CliRunner().invoke(main, ["simulate", *arguments])

    return run


@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM])
def test_it_says_how_many_have_passed_and_where_to_go_on(interrupted: Any, by: signal.Signals) -> None:
    """R34, R35: one line, the status of an interrupted program, and the seeds that are left."""
    result = interrupted([1, 2], "--seeds", "1..5", by=by)
    assert result.exit_code == 130
    assert result.output == "cphicache: interrupted: 2 of 5 worlds passed, none failed; go on with --seeds 3..5\n"


def test_a_seed_that_was_overtaken_is_left(interrupted: Any) -> None:
    """R34: with several processes seeds end in any order; the first that has not ended is where to go on."""
    result = interrupted([3, 1], "--seeds", "1..4")
    assert "2 of 4 worlds passed, none failed; go on with --seeds 2..4\n" in result.output


def test_nothing_is_left_when_all_have_ended(interrupted: Any) -> None:
    """R34: no seeds are named that have passed."""
    assert interrupted([1], "--seed", "1").output == "cphicache: interrupted: 1 of 1 worlds passed, none failed\n"


def test_a_failure_is_not_forgotten(interrupted: Any) -> None:
    """R34: a world that failed before the interrupt is named, and its code is the exit status."""
    result = interrupted([1], "--seeds", "1..3", "--keep-going", "--no-shrink", planted={"canary": "crash"})
    assert result.exit_code == Code.CRASH
    assert "interrupted: 0 of 3 worlds passed, seed 1 failed; go on with --seeds 2..3\n" in result.output


def test_a_planted_bug_that_was_caught_is_no_failure_of_the_run(interrupted: Any) -> None:
    """R34: under a canary a failing world is what is wanted: interrupted is interrupted."""
    result = interrupted([1], "--seeds", "1..3", "--keep-going", "--no-shrink", "--canary", "crash")
    assert result.exit_code == 130


def test_several_processes_are_summed_up_in_one_line(interrupted: Any) -> None:
    """R34, R35: with --jobs the worlds of all processes count, and none of the processes says anything of its own."""
    result = interrupted([1, 2], "--seeds", "1..9", "--jobs", "2")
    assert result.output == "cphicache: interrupted: 2 of 9 worlds passed, none failed; go on with --seeds 3..9\n"
