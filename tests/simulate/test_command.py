"""``cphicache simulate``: exit status, what is printed, processes."""

from __future__ import annotations

import shlex

import pytest
from click.testing import CliRunner, Result

from cphicache.run.cli import main
from cphicache.run.simulate.drawn import draw
from cphicache.run.simulate.outcome import Code


def simulate(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["simulate", *arguments])


def test_fine_seeds_end_with_0_and_say_what_was_seen() -> None:
    """R34: exit status 0, how many worlds ran, and what happened in them."""
    result = simulate("--seeds", "1..2")
    assert result.exit_code == 0
    assert "2 worlds, 0 failed" in result.output
    assert "bytes compared" in result.output


@pytest.mark.parametrize(("canary", "code"), [("lost-page", Code.BROKEN_INVARIANT), ("crash", Code.CRASH)])
def test_the_first_failure_ends_the_run_with_its_code(canary: str, code: Code) -> None:
    """R34: a planted bug is told by exit status and in words, with the command that repeats the seed."""
    result = simulate("--seeds", "1..50", "--canary", canary, "--no-shrink")
    assert result.exit_code == code
    assert f"to repeat:    cphicache simulate --seed 1 --canary {canary}" in result.output
    assert f"canary {canary}" in result.output
    assert "caught at seed 1" in result.output


def test_wrong_bytes_end_with_10() -> None:
    """R34: a lost wait is told as wrong bytes, with the first wrong one."""
    result = simulate("--seed", "18", "--canary", "lost-wait", "--no-shrink")
    assert result.exit_code == Code.WRONG_BYTES
    assert "wrong bytes" in result.output
    assert "expected 0x" in result.output


def test_no_progress_ends_with_12() -> None:
    """R13: a world that does not end within its ticks is told as no progress."""
    result = simulate("--seed", "1", "--canary", "never-admitted", "--no-shrink")
    assert result.exit_code == Code.NO_PROGRESS
    assert "no progress" in result.output


def test_a_canary_that_nothing_catches_fails_too() -> None:
    """R34: a checker that misses a planted bug is itself a failure, with a code and a text of its own."""
    world = draw(2).with_options(abort_rate=0.0, retract_rate=0.0, requests=1)
    result = simulate("--world", world.to_json(), "--canary", "crash")
    assert result.exit_code == Code.CANARY_MISSED
    assert "NOT caught as crash" in result.output


def test_the_shrunk_world_can_be_run_as_printed() -> None:
    """R34: the printed command for the shrunk world fails with the same code."""
    result = simulate("--seed", "1", "--canary", "lost-page")
    line = next(line for line in result.output.splitlines() if line.startswith("shrunk to:"))
    again = simulate(*shlex.split(line)[4:], "--no-shrink")
    assert again.exit_code == result.exit_code == Code.BROKEN_INVARIANT


def test_processes_share_the_seeds_and_all_failures_are_listed() -> None:
    """R34: with --jobs and --keep-going every seed runs, in processes of their own, and each failing one is named."""
    result = simulate("--seeds", "1..2", "--jobs", "2", "--keep-going", "--canary", "crash", "--no-shrink")
    assert result.exit_code == Code.CRASH
    for seed in (1, 2):
        assert f"--seed {seed} " in result.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--seeds", "9..1"], "is not a range"),
        (["--seeds", "1..x"], "is not a range"),
        (["--seeds", "0..1000000000"], "is not a range of 1 to 1000000000 seeds"),
        (["--seeds", f"{2**63}..{2**63 + 1}"], f"give at most {2**63 - 1}"),
        (["--seeds", f"1..{'9' * 5000}"], f"give at most {2**63 - 1}"),
        (["--seed", "9" * 26], f"{2**63 - 1}"),
        (["--seed", "1", "--seeds", "1..2"], "give one of them"),
        (["--world", "{}"], "--world: cannot be read"),
    ],
)
def test_unusable_input_is_one_line_and_status_2(arguments: list[str], said: str) -> None:
    """R35: the line names the option and the remedy."""
    result = simulate(*arguments)
    assert result.exit_code == 2
    assert said in result.output
    assert result.output.count("\n") == 1
