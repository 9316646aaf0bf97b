"""Timing of copies changes when the ranks agree, and nothing else: delays by rank and layer, and a naive twin that does not agree."""

from __future__ import annotations

from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from cphicache.agree.local import SingleReducer
from cphicache.events import read_events
from cphicache.run.compare import first_difference
from cphicache.run.config import RunConfig
from cphicache.run.jobs import load_requests
from cphicache.run.world import RankWorld
from tests.ranks.worlds import View, assert_well, assert_whole, config_of, delayed, in_processes, in_threads, rank_logs, views

RANKS = 3
SEEDS = 50
FAST_SEEDS = 4


def logged(folder: Path, **changed: Any) -> RunConfig:
    folder.mkdir()
    return config_of(cp_size=RANKS, log=folder / "events.jsonl", log_level="ops", **changed)


@pytest.fixture(scope="module")
def undelayed(tmp_path_factory: pytest.TempPathFactory) -> list[View]:
    """The logical events of a run in which every copy takes exactly what it costs."""
    config = logged(tmp_path_factory.mktemp("undelayed") / "run")
    assert_well(in_threads(config, delayed(0, jitter=0.0)))
    assert config.log is not None
    return views(rank_logs(config.log, RANKS)[0])


def assert_equal_until_a_commit_moves(mine: list[View], reference: list[View]) -> None:
    """The first difference, if there is one, is what a reduction of the same tick has brought."""
    for one, other in zip(mine, reference, strict=False):
        if one != other:
            assert (one["event"], other["event"]) == ("reduction", "reduction")
            assert one["tick"] == other["tick"]
            return
    assert len(mine) == len(reference)


def one_seed(seed: int, folder: Path, undelayed: list[View]) -> None:
    config = logged(folder / str(seed))
    assert_well(in_threads(config, delayed(seed)))
    assert config.log is not None
    logs = rank_logs(config.log, RANKS)
    assert first_difference(list(enumerate(logs))) is None
    assert_equal_until_a_commit_moves(views(logs[0]), undelayed)


@pytest.mark.parametrize("seed", range(1, FAST_SEEDS + 1))
def test_delays_move_commits_and_nothing_else(seed: int, tmp_path: Path, undelayed: list[View]) -> None:
    """R20, R21: with copies of every rank and layer late by random times all ranks take the same logical steps, equal to those of the
    undelayed run up to the first reduction that brings something else at the same tick."""
    one_seed(seed, tmp_path, undelayed)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(FAST_SEEDS + 1, SEEDS + 1))
def test_delays_of_many_seeds(seed: int, tmp_path: Path, undelayed: list[View]) -> None:
    """R20, R21: the same over fifty seeds."""
    one_seed(seed, tmp_path, undelayed)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(3))
def test_delays_in_processes(seed: int, tmp_path: Path, undelayed: list[View]) -> None:
    """R20, R21, R34: ranks as processes, copies on real threads of which one rank's are late by up to a few milliseconds: the ranks' logs
    are equal event for event, and equal to the undelayed run's until a commit lands at another tick."""
    config = logged(tmp_path / "run", streams="threads")
    assert_whole(in_processes(config, {"rank": seed % RANKS, "delay_us": 3000.0, "seed": seed}), config)
    assert config.log is not None
    assert_equal_until_a_commit_moves(views(rank_logs(config.log, RANKS)[0]), undelayed)


def test_rank_local_decisions_diverge_and_ours_do_not(tmp_path: Path) -> None:
    """R20, R21: a twin whose ranks commit when their own copies have ended takes other steps on each rank, on the very input and timing on
    which ours take the same ones."""
    for name, agrees in (("ours", True), ("twin", False)):
        config = logged(tmp_path / name)
        if agrees:
            assert_well(in_threads(config, delayed(5)))
        else:
            _run_apart(config)
        assert config.log is not None
        difference = first_difference(list(enumerate(rank_logs(config.log, RANKS))))
        assert (difference is None) is agrees
        assert sum(1 for _ in read_events(rank_logs(config.log, RANKS)[0])) > 100


def _run_apart(config: RunConfig) -> None:
    """Each rank is content with its own sample."""

    def serve(rank: int) -> None:
        RankWorld(config, rank, load_requests(config), SingleReducer(), streams=delayed(5)(config, rank)).run()

    threads = [Thread(target=serve, args=(rank,)) for rank in range(config.cp_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
