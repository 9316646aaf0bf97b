"""The table of faults and sizes over real processes; run by ``make test-ranks``."""

from __future__ import annotations

import json
import os
import select
import signal
import sys
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen, TimeoutExpired, run
from typing import Any

import pytest

from cphicache.events import read_events
from cphicache.run.launch import Outcome, rank_arguments
from tests.ranks.worlds import ROOT, assert_well, assert_whole, config_of, in_processes, rank_logs

pytestmark = pytest.mark.soak

LIMIT_S = 2.0
REQUESTS = 16
TORCHRUN = "torch.distributed.run"

POINTS: dict[str, int] = {"reserve": 4, "layer": 30, "reduction": 9, "load": 1}
"""At each point, the time at which the fault comes: when others are in flight, and host copies exist."""


def faulty(point: str, kind: str, **changed: Any) -> Outcome:
    config = config_of(requests=REQUESTS, cp_size=3, rank_timeout_s=LIMIT_S, check_ranks=4, **changed)
    return in_processes(config, {"rank": 1, "point": point, "kind": kind, "nth": POINTS[point]})


@pytest.mark.parametrize("cp_size", [1, 2, 3, 4])
def test_small_runs_of_every_size(cp_size: int) -> None:
    """R20, R21, R23: the synthetic workload over 1 to 4 processes (one needs no group): no wrong byte, no leak, equal logs on all ranks, at
    most one collective a tick with something in flight, none to reserve."""
    config = config_of(cp_size=cp_size, requests=40, check_ranks=8, device_tokens=640, host_tokens=1280)
    assert_whole(in_processes(config), config)


@pytest.mark.parametrize("changed", [{"policy": "write_back"}, {"streams": "threads"}, {"kv_replicated": True}])
def test_other_ways_to_run(changed: dict[str, Any]) -> None:
    """R19, R23, R34: the same holds under write_back with its drain rounds, with copies on real threads, and for ranks that all have the
    KV and still agree over their group."""
    config = config_of(cp_size=2, requests=30, check_ranks=8, **changed)
    outcome = in_processes(config)
    assert_whole(outcome, config)
    assert outcome.results[0].collectives > 0


@pytest.mark.parametrize("point", ["reserve", "layer", "load"])
def test_a_failed_copy_is_a_rollback_on_all(point: str) -> None:
    """R22, R25: a reservation, a copy or a load-back that fails on one process alone is rolled back on all at the same tick: their logs are
    equal, nothing leaks, everything is served, and no group breaks."""
    outcome = faulty(point, "raise")
    assert outcome.lost == {}
    assert outcome.difference is None
    for result in outcome.results:
        assert (result.broken, result.quarantined, result.leaks) == (None, None, 0)
        assert result.served.finished + result.served.aborted == REQUESTS
        failed = result.counters.load_backs_failed if point == "load" else result.counters.rolled_back["agreed_failed"]
        assert failed > 0
    if point != "load":  # what was read of a failed load-back is wrong until its failure is agreed, and is never reused
        assert_well(outcome.results)


@pytest.mark.parametrize("kind", ["kill", "stop", "hang"])
@pytest.mark.parametrize("point", POINTS)
def test_a_lost_rank_of_a_sharded_run(point: str, kind: str) -> None:
    """R22: with KV sharded over CP a rank that is killed, stopped, or stands still for longer than the limit, at any point of a backup or a
    load-back, ends the run in order on every survivor: the rank, the number and the wait are named, the wait is within the limit, the pages
    that are gone are told, and no slot, page or lock is left."""
    outcome = faulty(point, kind)
    assert set(outcome.lost) == {1}
    assert [result.rank for result in outcome.results] == [0, 2]
    assert outcome.difference is None
    for result in outcome.results:
        assert result.leaks == 0
        assert result.broken is not None
        assert "rank 1 does not answer reduction" in result.broken
        assert "; waiting for number" in result.broken
        assert (result.gone or "").startswith("gone with rank 1: 42 of 126 device pages, of which ")
        assert result.served.abandoned > 0
        assert result.longest_s < (LIMIT_S if kind == "kill" else 2 * LIMIT_S)


@pytest.mark.parametrize("kind", ["kill", "stop", "hang"])
@pytest.mark.parametrize("point", POINTS)
def test_a_lost_rank_of_a_replicated_run(point: str, kind: str) -> None:
    """R22, R23: with KV that every rank has the survivors quarantine the host tier in the same step, serve all requests to the end from the
    device with right bytes, and tell the same story to the end."""
    outcome = faulty(point, kind, kv_replicated=True)
    assert set(outcome.lost) == {1}
    assert [result.rank for result in outcome.results] == [0, 2]
    assert_well(outcome.results)
    assert outcome.difference is None
    for result in outcome.results:
        assert result.broken is None
        assert "rank 1 does not answer reduction" in (result.quarantined or "")
        assert result.served.finished + result.served.aborted == REQUESTS
        assert result.counters.refused["quarantined"] > 0


def cphicache(*arguments: str, module: str = "cphicache.run.cli") -> list[str]:
    return [sys.executable, "-m", module, *arguments]


def test_the_exit_status_of_a_lost_rank(tmp_path: Path) -> None:
    """R22: the command line ends with status 1 when a rank of a sharded run is lost, naming it on stderr, with the figures of the others in
    its summary."""
    config = config_of(requests=2000, rank_timeout_s=LIMIT_S)
    command = cphicache("run", "--launch", "processes", "--out", str(tmp_path / "out"), *rank_arguments(config))
    with Popen(command, cwd=ROOT, stdin=DEVNULL, stdout=DEVNULL, stderr=PIPE) as launcher:
        logs = rank_logs(tmp_path / "out" / "events.jsonl", 2)
        wait_until_written(launcher, logs)
        (victim,) = [pid for pid in children_of(launcher.pid) if rank_of(pid) == 1]
        os.kill(victim, signal.SIGKILL)
        _, errors = launcher.communicate(timeout=60)
    assert launcher.returncode == 1
    assert b"cphicache: rank 1 was killed by SIGKILL" in errors
    assert errors.count(b"cphicache: rank 1 does not answer reduction") == 1
    assert b"cphicache: gone with rank 1: " in errors
    summary = json.loads((tmp_path / "out" / "summary.json").read_bytes())
    assert summary["lost ranks"] == ["rank 1 was killed by SIGKILL"]
    assert sum(1 for _ in read_events(logs[0])) > 1


@pytest.mark.usefixtures("default_sigint")
def test_an_interrupted_command_line(tmp_path: Path) -> None:
    """R22: an interrupt from the terminal ends the launcher with status 130 and leaves no rank behind; the logs are whole."""
    command = cphicache("run", "--launch", "processes", "--out", str(tmp_path / "out"), *rank_arguments(config_of(requests=2000)))
    with Popen(command, cwd=ROOT, stdin=DEVNULL, stdout=DEVNULL, stderr=PIPE) as launcher:
        logs = rank_logs(tmp_path / "out" / "events.jsonl", 2)
        wait_until_written(launcher, logs)
        ranks = [os.pidfd_open(pid) for pid in children_of(launcher.pid)]
        launcher.send_signal(signal.SIGINT)
        _, errors = launcher.communicate(timeout=60)
    assert launcher.returncode == 130
    assert errors.decode().strip().endswith("cphicache: interrupted")
    assert len(ranks) == 2
    assert all_end(ranks, 0.0)
    for log in logs:
        assert sum(1 for _ in read_events(log)) > 1


def test_ranks_end_when_their_launcher_is_gone(tmp_path: Path) -> None:
    """R22: a launcher that is killed leaves no orphan: its ranks see that its store is gone, and stop."""
    command = cphicache("run", "--launch", "processes", "--out", str(tmp_path / "out"), *rank_arguments(config_of(requests=2000)))
    with Popen(command, cwd=ROOT, stdin=DEVNULL, stdout=DEVNULL, stderr=DEVNULL) as launcher:
        wait_until_written(launcher, rank_logs(tmp_path / "out" / "events.jsonl", 2))
        ranks = [os.pidfd_open(pid) for pid in children_of(launcher.pid)]
        launcher.kill()
    assert len(ranks) == 2
    assert all_end(ranks, 30.0)


def test_torchrun_starts_ranks_too(tmp_path: Path) -> None:
    """R23: ranks that torchrun has started meet in its store; rank 0 writes and prints the result of all."""
    arguments = ["--out", str(tmp_path / "out"), *rank_arguments(config_of())]
    command = cphicache("--nproc-per-node", "2", "-m", "cphicache.run.rank_main", *arguments, module=TORCHRUN)
    done = run(command, cwd=ROOT, stdin=DEVNULL, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    summary = json.loads((tmp_path / "out" / "summary.json").read_bytes())
    assert [rank["rank"] for rank in summary["ranks"]] == [0, 1]
    assert (summary["checks"]["mismatches"], summary["checks"]["leaks"]) == (0, 0)
    assert summary["logs differ"] is None
    assert b"by rank" in done.stdout


# -- the machine's own view of processes --------------------------------------------------------------------------------------------
def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()]


def rank_of(pid: int) -> int:
    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return next(int(variable.removeprefix(b"RANK=")) for variable in variables if variable.startswith(b"RANK="))


def all_end(processes: list[int], within_s: float) -> bool:
    """Whether these (handles of ``pidfd_open``) end in time."""
    left = list(processes)
    while left:
        ended, _, _ = select.select(left, [], [], within_s)
        if not ended:
            return False
        left = [process for process in left if process not in ended]
    return True


def wait_until_written(launcher: Popen[bytes], logs: list[Path]) -> None:
    """Until every rank serves: the first lines of a log are written before that."""
    for _ in range(600):
        if all(log.exists() and log.read_bytes().count(b"\n") > 20 for log in logs):
            return
        try:
            launcher.wait(0.1)
        except TimeoutExpired:
            continue
        raise AssertionError(f"the launcher has ended with status {launcher.returncode}")
    raise AssertionError(f"{logs}: expected every rank to write its log")
