"""Small runs over several ranks, in threads and in processes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from subprocess import Popen
from typing import Any

from cphicache.agree.membership import KeyStore
from cphicache.events import logical_view, read_events
from cphicache.run.config import RunConfig
from cphicache.run.jobs import load_requests
from cphicache.run.launch import Outcome, run_processes
from cphicache.run.world import RankResult, StreamsFactory, run_world
from cphicache.transfer.streams.port import Streams
from cphicache.transfer.streams.virtual import VirtualStreams
from tests.ranks.faulty_rank import PLAN
from tests.run.worlds import small

FAULTY_RANK = (sys.executable, "-m", "tests.ranks.faulty_rank")
ROOT = Path(__file__).resolve().parents[2]

View = dict[str, Any]


def config_of(**changed: Any) -> RunConfig:
    """A run of a second or so over two ranks, with both pools given."""
    return small(**{"requests": 12, "launch": "processes", "rank_timeout_s": 20.0, **changed})


def in_processes(
    config: RunConfig,
    plan: Mapping[str, Any] | None = None,
    extra: Mapping[int, Sequence[str]] | None = None,
    on_start: Callable[[Sequence[Popen[bytes]], KeyStore], None] = lambda ranks, store: None,
) -> Outcome:
    """Run the ranks as processes, one of them with a planned fault."""
    return run_processes(
        config,
        command=FAULTY_RANK,
        extra=extra,
        environment={PLAN: json.dumps(plan or {}), "PYTHONPATH": str(ROOT)},
        on_start=on_start,
    )


def in_threads(config: RunConfig, streams: StreamsFactory) -> list[RankResult]:
    """Run the ranks as threads of this process."""
    return run_world(config, load_requests(config), streams=streams)


def delayed(seed: int, jitter: float = 3.0) -> StreamsFactory:
    """Copies and layers of each rank take random times, by seed and rank; without jitter exactly what they cost."""

    def streams(config: RunConfig, rank: int) -> Streams:
        return VirtualStreams(seed=seed * 64 + rank, jitter=jitter)

    return streams


def rank_logs(log: Path, size: int) -> list[Path]:
    """Event logs of all ranks of a run that was told to write ``log``."""
    return [log.with_name(f"{log.stem}.rank{rank}{log.suffix}") for rank in range(size)]


def views(log: Path) -> list[View]:
    """What of a rank's log is equal on all ranks."""
    return [view for event in read_events(log) if (view := logical_view(event)) is not None]


def assert_whole(outcome: Outcome, config: RunConfig) -> None:
    """All ranks are there, agree, and have neither a wrong byte nor a leak."""
    assert outcome.lost == {}
    assert [result.rank for result in outcome.results] == list(range(config.cp_size))
    assert_well(outcome.results)
    assert outcome.difference is None
    first = outcome.results[0]
    assert first.counters.reductions <= first.counters.ticks_in_flight
    for result in outcome.results:
        assert result.broken is None
        assert result.collectives == result.counters.reductions + result.counters.drain_reductions
        assert result.served == first.served


def assert_well(results: Sequence[RankResult]) -> None:
    """No wrong byte and no leak, and both were looked for."""
    for result in results:
        assert result.verdict.mismatches == 0, result.verdict.evidence
        assert result.leaks == 0
    assert results
