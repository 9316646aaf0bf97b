"""Equal seed and options: equal logs, byte for byte. Ranks: equal logical views, event for event, whatever fails on one of them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cphicache.events import logical_view, read_events
from cphicache.events.types import OPS_EVENTS
from cphicache.run.config import RunConfig
from cphicache.transfer.faults import CopyFaults
from tests.run.worlds import assert_fine, serve, serve_fine, small

RANKS = 3


def config_in(folder: Path, **changed: Any) -> RunConfig:
    folder.mkdir()
    return small(cp_size=RANKS, requests=16, log=folder / "events.jsonl", **changed)


def logs(folder: Path) -> list[Path]:
    return [folder / f"events.rank{rank}.jsonl" for rank in range(RANKS)]


def views(log: Path) -> list[dict[str, Any]]:
    return [view for event in read_events(log) if (view := logical_view(event)) is not None]


def assert_ranks_equal(folder: Path) -> list[dict[str, Any]]:
    """The ranks' logical views, compared one by one so that a failure shows the first that differs."""
    first, *others = (views(log) for log in logs(folder))
    for other in others:
        for mine, theirs in zip(first, other, strict=True):
            assert mine == theirs
    return first


@pytest.mark.parametrize("level", ["lifecycle", "ops"])
def test_equal_seed_and_options_give_equal_logs(level: str, tmp_path: Path) -> None:
    """R36: two runs with virtual streams write the same event log, byte for byte, on every rank and at both levels."""
    for name in ("once", "again"):
        serve_fine(config_in(tmp_path / name, log_level=level))
    for once, again in zip(logs(tmp_path / "once"), logs(tmp_path / "again"), strict=True):
        assert once.read_bytes() == again.read_bytes()
        assert once.stat().st_size > 0


def test_ops_adds_to_the_lifecycle_log(tmp_path: Path) -> None:
    """R36: level ops records matches and inserts too, and changes no step of the lifecycle."""
    for level in ("lifecycle", "ops"):
        serve_fine(config_in(tmp_path / level, log_level=level))
    steps, ops = views(logs(tmp_path / "lifecycle")[0]), views(logs(tmp_path / "ops")[0])
    asked = [event for event in ops if event["event"] in ("match", "insert")]
    assert asked
    assert [event for event in ops if event["event"] not in OPS_EVENTS] == steps


def test_another_seed_gives_another_log(tmp_path: Path) -> None:
    """R34: the seed decides workload and order of completion: another one, another log."""
    for seed in (0, 1):
        serve_fine(config_in(tmp_path / str(seed), seed=seed))
    first, second = (views(logs(tmp_path / str(seed))[0]) for seed in (0, 1))
    assert first != second


@pytest.mark.parametrize(
    "changed", [{}, {"policy": "write_back"}, {"host_tokens": 384, "reclaim_device_valid": True}, {"overlap": False}]
)
def test_all_ranks_decide_alike(changed: dict[str, Any], tmp_path: Path) -> None:
    """R20, R21: ranks whose copies end in different orders take the same logical steps in the same order at the same ticks."""
    serve_fine(config_in(tmp_path / "run", log_level="ops", **changed))
    assert len(assert_ranks_equal(tmp_path / "run")) > 100


def failing(plan: Callable[[CopyFaults], None]) -> CopyFaults:
    faults = CopyFaults()
    plan(faults)
    return faults


def some_backups(faults: CopyFaults) -> None:
    faults.fail_copies_where(lambda call: call.direction == "d2h" and call.layer == 1 and call.nth % 7 == 3)


def some_loads(faults: CopyFaults) -> None:
    faults.fail_copies_where(lambda call: call.direction == "h2d" and call.payload == "draft" and call.nth % 2 == 0)


def some_reservations(faults: CopyFaults) -> None:
    for nth in range(0, 60, 9):
        faults.fail_reserve("draft", nth=nth)


@pytest.mark.parametrize("plan", [some_backups, some_reservations])
def test_a_failed_backup_on_one_rank_is_a_rollback_on_all(plan: Callable[[CopyFaults], None], tmp_path: Path) -> None:
    """R22: copies and reservations that fail on rank 1 alone change no logical step before they are agreed; then all ranks roll back
    at the same tick. No byte is wrong and nothing leaks."""
    faults = failing(plan)
    summary = serve(config_in(tmp_path / "run", log_level="ops"), faults={1: faults})
    assert_fine(summary)
    assert faults.fired or faults.fired_reserves
    assert summary["backups"]["rolled back: agreed failed"] > 0
    events = assert_ranks_equal(tmp_path / "run")
    assert any(event.get("trigger") == "agreed_failed" and event["after"] == "ROLLED_BACK" for event in events)


@pytest.mark.parametrize("seed", range(2))
def test_a_failed_load_on_one_rank_is_given_up_by_all(seed: int, tmp_path: Path) -> None:
    """R22, R25: load-backs that fail on rank 1 alone are given up on all ranks at the same tick. What was read of them meanwhile is the
    only wrong KV, on that rank and payload alone: nothing that was computed from it is ever reused, and nothing leaks."""
    faults = failing(some_loads)
    summary = serve(config_in(tmp_path / "run", seed=seed, log_level="ops"), faults={1: faults})
    assert faults.fired
    assert summary["load-backs"]["failed"] > 0
    assert summary["checks"]["leaks"] == 0
    assert summary["ranks_agree"]
    events = assert_ranks_equal(tmp_path / "run")
    failed = {event["node"] for event in events if event.get("trigger") == "load_failed"}
    assert len(summary["evidence"]) == summary["checks"]["mismatches"]
    for line in summary["evidence"]:
        found = re.search(r" node (\d+) rank 1 draft ", line)
        assert found, line
        assert int(found[1]) in failed, line


def test_faults_are_as_repeatable_as_everything_else(tmp_path: Path) -> None:
    """R22, R36: the same planned faults give the same logs, byte for byte, on the failing rank and on the others."""
    for name in ("once", "again"):
        faults = failing(some_backups)
        serve(config_in(tmp_path / name), faults={1: faults})
        assert faults.fired
    for once, again in zip(logs(tmp_path / "once"), logs(tmp_path / "again"), strict=True):
        assert once.read_bytes() == again.read_bytes()
