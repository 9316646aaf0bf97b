"""Metrics as SGLang's server reads them: the files of prometheus_client's multi-process mode."""

from __future__ import annotations

import pytest
from prometheus_client.metrics_core import HistogramMetricFamily

from cphicache.agree.local import SingleReducer
from cphicache.engine import CacheConfig
from cphicache.metrics import exposed_names
from cphicache.run.config import RunConfig
from cphicache.run.world import RankWorld, make_streams
from cphicache.sglang import metrics as server_metrics
from cphicache.sglang.metrics import FOLDER_VARIABLE, NOT_OURS, PERIOD_S, HostTokens, ServerMetrics, _series
from tests.engine_server import Prompt, Server


def test_buckets_are_written_apart() -> None:
    """R40: a reader of the files adds buckets up itself, so that each is written without those below it, series by series."""
    family = HistogramMetricFamily("ticks", "Ticks", labels=["state"])
    family.add_metric(["a"], [("1.0", 2.0), ("2.0", 5.0), ("+Inf", 5.0)], 9.0)
    family.add_metric(["b"], [("1.0", 7.0), ("2.0", 7.0), ("+Inf", 8.0)], 20.0)
    written = {(name, *labels.values()): value for name, labels, value in _series(family)}
    assert written == {
        ("ticks_sum", "a"): 9.0, ("ticks_bucket", "a", "1.0"): 2.0, ("ticks_bucket", "a", "2.0"): 3.0, ("ticks_bucket", "a", "+Inf"): 0.0,
        ("ticks_sum", "b"): 20.0, ("ticks_bucket", "b", "1.0"): 7.0, ("ticks_bucket", "b", "2.0"): 0.0, ("ticks_bucket", "b", "+Inf"): 1.0,
    }  # fmt: skip


def test_values_are_copied_once_a_period(monkeypatch: pytest.MonkeyPatch) -> None:
    """R40: the first tick writes every series but SGLang's own, later ones write again when the period is over, into the same series."""
    clock = [100.0]
    config = RunConfig(cp_size=1).sized_for(1)
    world = RankWorld(config, 0, [], SingleReducer(), streams=make_streams(config, 0))
    metrics = ServerMetrics(0, world.cache, lambda: world.transfer.counters, token_bytes=8, log=None)
    monkeypatch.setattr(server_metrics.time, "monotonic", lambda: clock[0])
    ticks = ("cphicache_ticks_total", "0")
    for at, expected in ((100.0, 1.0), (100.5, 1.0), (100.0 + PERIOD_S, 3.0)):
        clock[0] = at
        world.cache.begin_tick()
        metrics.tick()
        assert metrics._published[ticks].get() == expected
    names = exposed_names()
    written = {name for name, *_ in metrics._published}
    assert {name for name in names - written if not name.startswith(NOT_OURS)} == {
        name for name in names if name.endswith("_count")
    }
    assert not any(name.startswith(NOT_OURS) for name in written)
    world.close()


def test_the_host_pool_as_the_server_looks_at_it() -> None:
    """R40: slots of all ranks, and how many of them are free."""
    config = CacheConfig(page_size=4, cp_size=2, usable_pages=8, payloads=(("target", 1),), host_slots=16)
    server = Server(config)
    tokens = HostTokens(server.cache)
    assert (tokens.logical_size, tokens.available_size()) == (32, 32)
    server.serve(Prompt((1, 2)))
    assert tokens.available_size() == 24


def test_metrics_are_collected_where_the_server_has_a_folder_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """R40: without --enable-metrics there is no folder, and nothing is written."""
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    assert not ServerMetrics.are_collected()
    monkeypatch.setenv(FOLDER_VARIABLE, "metrics")
    assert ServerMetrics.are_collected()
