"""No rank that stands still keeps the launcher waiting for ever, whenever it does so."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from subprocess import Popen

import pytest

from cphicache.agree.membership import KeyStore
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
