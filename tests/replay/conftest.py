"""Logs of small real runs, made once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from cphicache.run.config import RunConfig
from cphicache.run.jobs import load_requests
from cphicache.run.world import run_world
from cphicache.transfer.faults import CopyFaults

PRESSING = {"device_tokens": 2048, "host_tokens": 8192, "abort_rate": 0.2, "scale": 0.0625, "requests": 40}


def serve(folder: Path, *, faults: dict[int, CopyFaults] | None = None, **options: Any) -> list[Path]:
    """Run a small world with a log; the logs' paths in rank order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        config = RunConfig(**{"verify": "off", "requests": 60, "log": folder / "events.jsonl", **options})
        results = run_world(config, load_requests(config), faults=faults)
    finally:
        torch.set_num_threads(threads)
    return [result.log for result in results if result.log is not None]


@pytest.fixture(scope="session")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The log of a run of one rank under memory pressure: evictions, retries, rollbacks, splits, load-backs."""
    pressing = {"device_tokens": 2048, "host_tokens": 8192, "abort_rate": 0.2, "scale": 0.0625, "max_deferral_ticks": 64, "seed": 1}
    (path,) = serve(tmp_path_factory.mktemp("one"), cp_size=1, requests=200, **pressing)
    return path


@pytest.fixture(scope="session")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The logs of a run of four ranks."""
    return serve(tmp_path_factory.mktemp("four"), cp_size=4)


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The log of a run of one rank under memory pressure, with every call."""
    (path,) = serve(tmp_path_factory.mktemp("ops"), cp_size=1, log_level="ops", **PRESSING)
    return path


@pytest.fixture(scope="session")
def failing_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The logs of four ranks with every call; copies of one and reservations of another fail."""
    faults = {1: CopyFaults(), 2: CopyFaults()}
    for nth in (3, 11, 40):
        faults[1].fail_copy("d2h", "target", 0, nth=nth)
        faults[2].fail_reserve("target", nth=nth)
    return serve(tmp_path_factory.mktemp("failing"), cp_size=4, log_level="ops", faults=faults)
