"""No rank that stands still keeps the launcher waiting for ever, whenever it does so."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from subprocess import Popen

import pytest

from cphicache.agree.membership import KeyStore
from cphicache.run import launch
from cphicache.run.config import RunConfig
from cphicache.run.launch import run_processes
from cphicache.run.world import RunFailed
from tests.ranks.worlds import FAULTY_RANK, ROOT, config_of


def failed_with_rank_1_stopped(config: RunConfig, first: Sequence[str], start_timeout_s: float) -> str:
    """Stop rank 1 before it has done anything, and give rank 0 more options: what the launcher says of them."""
    processes: list[Popen[bytes]] = []

    def stop(ranks: Sequence[Popen[bytes]], store: KeyStore) -> None:
        processes.extend(ranks)
        os.kill(ranks[1].pid, signal.SIGSTOP)

    with pytest.raises(RunFailed) as caught:
        run_processes(
            config,
            command=FAULTY_RANK,
            environment={"TEST_RANK_FAULT": "{}", "PYTHONPATH": str(ROOT)},
            extra={0: first},
            on_start=stop,
            start_timeout_s=start_timeout_s,
        )
    assert caught.value.kind == "failed"
    assert processes[1].returncode == -signal.SIGKILL
    assert processes[0].returncode is not None
    return str(caught.value)


def test_a_rank_that_does_not_start_is_ended_and_named() -> None:
    """R22: the launcher bounds the start: a rank that was stopped before its greeting is named and ended, and so is the run."""
    told = failed_with_rank_1_stopped(config_of(), (), start_timeout_s=0.5)
    assert "rank 1 has not said hello within 0.5 s and was ended" in told


def test_a_rank_that_outlives_an_error_without_a_sign_is_ended_and_named() -> None:
    """R22: a rank that was stopped when another one ended with an error is ended after the time limit for ranks, long before that for the
    start, and named together with the other."""
    told = failed_with_rank_1_stopped(config_of(rank_timeout_s=0.5), ["--page-size", "-1"], start_timeout_s=600.0)
    assert "rank 0 ended with status 2" in told
    assert "rank 1 did not answer for 2.5 s after another rank had ended, and was ended" in told


# -- ranks that only stand there, or end -----------------------------------------------------------------------------------------


def run_stubs(
    *bodies: str, on_start: Callable[[Sequence[Popen[bytes]], KeyStore], None], start_timeout_s: float = 600.0, **options: object
) -> None:
    """Run these programs as ranks. All of them have ended, whatever the launcher raises."""
    processes: list[Popen[bytes]] = []

    def started(ranks: Sequence[Popen[bytes]], store: KeyStore) -> None:
        processes.extend(ranks)
        on_start(ranks, store)

    try:
        run_processes(
            config_of(**options),
            command=[sys.executable, "-S", "-c", f"import os, signal, sys\nexec({bodies!r}[int(os.environ['RANK'])])"],
            on_start=started,
            start_timeout_s=start_timeout_s,
        )
    finally:
        assert all(process.returncode is not None for process in processes)


WAITS = "signal.pause()"
ENDS_BADLY = "sys.exit(3)"


def test_no_rank_is_left_when_the_launcher_fails() -> None:
    """R22: whatever ends the launcher, and be it an error of its own, ends its ranks."""
    ranks: list[Popen[bytes]] = []

    def fails(started: Sequence[Popen[bytes]], store: KeyStore) -> None:
        ranks.extend(started)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_stubs(WAITS, WAITS, on_start=fails)
    assert [process.returncode for process in ranks] == [-signal.SIGKILL] * 2


@pytest.mark.usefixtures("default_sigint")
def test_an_interrupt_is_handed_on_to_those_that_are_left() -> None:
    """R22: a rank that has ended before the interrupt is not asked to end, the other one is, and not killed."""
    ranks: list[Popen[bytes]] = []

    def interrupted(started: Sequence[Popen[bytes]], store: KeyStore) -> None:
        ranks.extend(started)
        started[0].wait()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_stubs(ENDS_BADLY, f"signal.signal(signal.SIGINT, signal.SIG_DFL); {WAITS}", on_start=interrupted)
    assert [process.returncode for process in ranks] == [3, -signal.SIGINT]


def told_of_stubs(*bodies: str, verdict: Sequence[int] = (), start_timeout_s: float = 600.0) -> str:
    """What the launcher says in the end. Its ranks have given these up; a first rank that ends has ended before the launcher looks."""

    def started(ranks: Sequence[Popen[bytes]], store: KeyStore) -> None:
        if verdict:
            store.set("verdict", json.dumps([verdict, "why"]))
        if bodies[0] is not WAITS:
            ranks[0].wait()

    with pytest.raises(RunFailed) as caught:
        run_stubs(*bodies, on_start=started, start_timeout_s=start_timeout_s)
    return str(caught.value)


NEVER_STARTED = "has not said hello within {} s and was ended"
GIVEN_UP = "was given up by the others and did not stop"


def test_a_rank_that_has_ended_is_not_ended_again() -> None:
    """R22: when the start takes too long, who has ended by itself is named with its status, and only the other one is ended."""
    told = told_of_stubs(ENDS_BADLY, WAITS, start_timeout_s=0.0)
    assert told == f"no rank has come to its end: rank 0 ended with status 3; rank 1 {NEVER_STARTED.format(0)}"


def test_ranks_that_were_given_up_and_do_not_stop_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """R22: when every rank that still runs is out, it has a short time to see that, and is killed then."""
    monkeypatch.setattr(launch, "GRACE_S", 0.0)
    assert told_of_stubs(WAITS, WAITS, verdict=[0, 1]) == f"no rank has come to its end: rank 0 {GIVEN_UP}; rank 1 {GIVEN_UP}"


def test_a_rank_is_ended_for_one_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """R22: when two limits are over at the same time the first one is the reason that is told."""
    monkeypatch.setattr(launch, "GRACE_S", 0.0)
    told = told_of_stubs(WAITS, WAITS, verdict=[0, 1], start_timeout_s=1e-9)
    assert told == "no rank has come to its end: " + "; ".join(f"rank {rank} {NEVER_STARTED.format('1e-09')}" for rank in (0, 1))


def test_a_trace_has_the_same_name_for_every_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R35: ranks are told the file behind a name that depends on the folder or on the process."""
    trace, link, told = tmp_path / "trace.jsonl", tmp_path / "link", tmp_path / "told"
    trace.write_text("{}")
    link.symlink_to(trace)
    monkeypatch.chdir(tmp_path)
    tells = f"open({str(told)!r} + os.environ['RANK'], 'w').write(sys.argv[sys.argv.index('--trace') + 1])"
    with pytest.raises(RunFailed, match="rank 0 ended without a result; rank 1 ended without a result"):
        run_stubs(tells, tells, on_start=lambda ranks, store: None, trace=Path("link"))
    assert [(tmp_path / f"told{rank}").read_text() for rank in (0, 1)] == [str(trace)] * 2
