"""Ranks as real processes, small. The whole table of faults and sizes is in ``test_processes_soak``."""

from __future__ import annotations

import _thread
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from subprocess import DEVNULL, Popen, run
from threading import Thread

import pytest

from cphicache.agree.membership import KeyStore
from cphicache.events import read_events
from cphicache.run.launch import rank_arguments
from cphicache.run.world import RunFailed, make_streams
from cphicache.signals import exit_on_signals
from tests.ranks.worlds import ROOT, assert_well, assert_whole, config_of, in_processes, in_threads, rank_logs


def test_processes_tell_the_story_that_threads_tell(tmp_path: Path) -> None:
    """R20, R21, R23: the same options over processes give the logs that they give over threads, byte for byte on every rank, with one
    reduction for each tick with something in flight and none elsewhere; the digests of all ticks agree."""
    for launch in ("threads", "processes"):
        (tmp_path / launch).mkdir()
    threads = config_of(launch="threads", log=tmp_path / "threads" / "events.jsonl")
    processes = config_of(log=tmp_path / "processes" / "events.jsonl", check_ranks=2)
    assert_well(in_threads(threads, make_streams))
    outcome = in_processes(processes)
    assert_whole(outcome, processes)
    assert outcome.results[0].digests > 10
    assert all(result.waits == result.collectives for result in outcome.results)
    assert threads.log is not None
    assert processes.log is not None
    for mine, theirs in zip(rank_logs(threads.log, 2), rank_logs(processes.log, 2), strict=True):
        assert mine.read_bytes() == theirs.read_bytes()


def test_a_killed_rank_ends_a_sharded_run_in_order() -> None:
    """R22: with KV sharded over CP the death of a rank ends the run: it is named with what it died of, the number and the wait; the
    survivor has no slot left in use but committed ones, and says which pages are gone."""
    config = config_of()
    outcome = in_processes(config, {"rank": 1, "point": "layer", "kind": "kill", "nth": 40})
    assert outcome.lost == {1: "was killed by SIGKILL"}
    (survivor,) = outcome.results
    assert_well(outcome.results)
    assert survivor.broken is not None
    assert "rank 1 does not answer reduction" in survivor.broken
    assert "it was killed by SIGKILL; waiting for number" in survivor.broken
    assert survivor.gone is not None
    assert survivor.gone.startswith("gone with rank 1: 64 of 128 device pages, of which ")
    assert survivor.served.abandoned > 0


def test_a_stopped_rank_is_given_up_and_stops_when_it_wakes(capfd: pytest.CaptureFixture[str]) -> None:
    """R22, R23: with KV that every rank has, the others serve everything to the end after a rank was stopped for longer than the limit, all
    alike; when it wakes it finds itself excluded and stops with one line."""
    config = config_of(kv_replicated=True, cp_size=3, rank_timeout_s=1.5)

    def wake(ranks: Sequence[Popen[bytes]], store: KeyStore) -> None:
        def when_it_is_out() -> None:
            store.get("settled")
            os.kill(ranks[1].pid, signal.SIGCONT)

        Thread(target=when_it_is_out, daemon=True).start()

    outcome = in_processes(config, {"rank": 1, "point": "reduction", "kind": "stop", "nth": 4}, on_start=wake)
    assert [result.rank for result in outcome.results] == [0, 2]
    assert_well(outcome.results)
    assert outcome.difference is None
    for result in outcome.results:
        assert result.broken is None
        assert result.quarantined is not None
        assert result.quarantined.startswith("rank 1 does not answer reduction 4 (waited ")
        assert " s of at most 1.5 s): no sign of life for " in result.quarantined
        assert result.served.finished + result.served.aborted == 12
        assert result.served == outcome.results[0].served
    assert outcome.lost == {1: "ended with status 1"}
    lines = [line for line in capfd.readouterr().err.splitlines() if "excluded" in line]
    assert len(lines) == 1
    assert lines[0].startswith("cphicache: rank 1 was excluded from the group: rank 1 does not answer reduction 4")
    assert lines[0].endswith("; it stops")


def test_a_rank_with_other_options_is_refused_at_start() -> None:
    """R35: a rank that is started with another page size is refused before anything is served, with rank, field and both values."""
    config = config_of(chunk_tokens=32)
    with pytest.raises(RunFailed, match="rank 1 is refused: its page size is 8, rank 0 has 4; start all ranks with") as caught:
        in_processes(config, extra={1: ["--page-size", "8"]})
    assert caught.value.kind == "unusable"


@pytest.mark.usefixtures("default_sigint")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_all_ranks(tmp_path: Path, number: signal.Signals) -> None:
    """R22: an interrupt, or a signal to end, ends every rank after its step: no process is left, and every log is whole."""
    config = config_of(requests=2000, log=tmp_path / "events.jsonl")
    started: list[Popen[bytes]] = []

    def interrupt(ranks: Sequence[Popen[bytes]], store: KeyStore) -> None:
        started.extend(ranks)

        def when_all_are_ready() -> None:
            for rank in range(2):
                store.get(f"ready/{rank}")
            _thread.interrupt_main(number)

        Thread(target=when_all_are_ready, daemon=True).start()

    with pytest.raises((KeyboardInterrupt, SystemExit)), exit_on_signals(signal.SIGTERM):
        in_processes(config, on_start=interrupt)
    assert [process.returncode for process in started] == [130, 130]
    for log in rank_logs(tmp_path / "events.jsonl", 2):
        assert sum(1 for _ in read_events(log)) >= 1


def test_the_command_line_prints_all_ranks_and_their_sum() -> None:
    """R23: ``cphicache run --launch processes`` ends with status 0, the sum of all ranks, and each rank's figures."""
    command = [sys.executable, "-m", "cphicache.run.cli", "run", "--launch", "processes", "--json", *rank_arguments(config_of())]
    done = run(command, cwd=ROOT, stdin=DEVNULL, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    summary = json.loads(done.stdout)
    assert [rank["rank"] for rank in summary["ranks"]] == [0, 1]
    assert summary["lost ranks"] == []
    assert summary["logs differ"] is None
    assert summary["bytes"]["D2H"] == sum(rank["D2H"] for rank in summary["ranks"])
    assert summary["agreement"]["collectives elsewhere (to reserve, evict, defer)"] == 0
