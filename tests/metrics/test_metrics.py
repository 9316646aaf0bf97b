"""Metrics of a run, and the dashboard that shows them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.request import urlopen

import pytest
import torch
from click.testing import CliRunner
from prometheus_client import CollectorRegistry, generate_latest, start_http_server

from cphicache.agree.local import SingleReducer
from cphicache.metrics import METRICS, CacheMetrics, exposed_names
from cphicache.run.cli import main
from cphicache.run.config import RunConfig
from cphicache.run.jobs import load_requests
from cphicache.run.world import RankResult, RankWorld, make_streams, run_world
from tests.engine.rig import Rig

DOCS = Path(__file__).resolve().parents[2] / "docs"
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def samples(registry: CollectorRegistry) -> Samples:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in registry.collect()
        for sample in family.samples
    }


def value(found: Samples, name: str, rank: int = 0, **labels: str) -> float:
    return found[f"cphicache_{name}", tuple(sorted({"rank": str(rank), **labels}.items()))]


@pytest.fixture(scope="module")
def run() -> tuple[CacheMetrics, list[RankResult]]:
    """Two ranks under memory pressure, watched."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        config = RunConfig(
            cp_size=2, requests=120, verify="off", device_tokens=2048, host_tokens=4096, scale=0.0625, abort_rate=0.2
        ).sized_for(1)
        metrics = CacheMetrics()
        return metrics, run_world(config, load_requests(config), metrics=metrics)
    finally:
        torch.set_num_threads(threads)


def test_all_series_are_there_from_the_start_as_zeros() -> None:
    """R40: before anything happened every series of a watched rank is exposed; all but free slots and tokens are 0."""
    config = RunConfig(cp_size=1).sized_for(1)
    world = RankWorld(config, 0, [], SingleReducer(), streams=make_streams(config, 0))
    metrics = CacheMetrics()
    world.observe_with(metrics, 8)
    found = samples(metrics.registry)
    assert {name for name, _ in found} == exposed_names()
    for name, metric in METRICS.items():
        for label in metric.values:
            suffix = {"counter": "_total", "gauge": "", "histogram": "_count"}[metric.kind]
            labels = {metric.label: label} if metric.label else {}
            if label not in ("FREE", "free"):
                assert value(found, f"{name}{suffix}", **labels) == 0, (name, label)
    assert value(found, "host_slots", state="FREE") == config.host_tokens_per_rank
    world.streams.close()


def test_series_do_not_grow(run: tuple[CacheMetrics, list[RankResult]]) -> None:
    """R40: labels come from closed sets: after a run there are the same series as before it."""
    metrics, _ = run
    found = samples(metrics.registry)
    expected = sum(len(metric.values) * (1 if metric.kind != "histogram" else 13) for metric in METRICS.values())
    assert len(found) == 2 * expected
    assert {name for name, _ in found} == exposed_names()


def test_values_are_the_counters(run: tuple[CacheMetrics, list[RankResult]]) -> None:
    """R40: what is exposed is what the engine, the transfer and the scheduler counted; no reason is left out."""
    metrics, results = run
    found = samples(metrics.registry)
    for result in results:
        counters, rank = result.counters, result.rank
        assert value(found, "backups_total", rank, outcome="committed") == counters.committed > 0
        assert value(found, "copied_bytes_total", rank, direction="d2h") == result.transfer.d2h_bytes > 0
        assert value(found, "request_tokens_total", rank, tier="computed") == result.served.tokens_computed > 0
        assert value(found, "collectives_total", rank, kind="tick") == counters.reductions > 0
        for name, counter in (
            ("backups_rolled_back", counters.rolled_back),
            ("backups_refused", counters.refused),
            ("stale", counters.stale),
            ("load_backs_refused", counters.load_refused),
        ):
            metric = METRICS[name]
            exposed = {label: value(found, f"{name}_total", rank, **{metric.label: label}) for label in metric.values}
            assert {label: count for label, count in exposed.items() if count} == {str(k): v for k, v in counter.items() if v}
        assert value(found, "host_visible_ticks_count", rank) == sum(counters.ticks_to_visible.values())
        assert value(found, "backup_state_ticks_count", rank, state="RESERVED") == counters.reserved
        assert value(found, "load_back_ticks_count", rank) == counters.load_backs > 0


def test_slots_add_up(run: tuple[CacheMetrics, list[RankResult]]) -> None:
    """R40: host slots of all states make up the pool; after the run none is pending."""
    metrics, _ = run
    found = samples(metrics.registry)
    by_state = {state: value(found, "host_slots", state=state) for state in METRICS["host_slots"].values}
    assert sum(by_state.values()) == 4096
    assert by_state["COMMITTED"] > 0
    assert by_state["RESERVED"] == by_state["LAYERS_IN_FLIGHT"] == by_state["ROLLED_BACK"] == 0


def test_what_comes_and_goes_between_two_looks_is_counted() -> None:
    """R40: a backup that is reserved and ends before the next look has spent no tick in its first state; it counts, once."""
    rig, metrics = Rig(), CacheMetrics()
    side = rig.sides[0]
    metrics.watch(0, side.cache, lambda: SimpleNamespace(d2h_bytes=0, h2d_bytes=0), token_bytes=1)  # type: ignore[arg-type,return-value]
    for looks in (1, 2):
        rig.serve(f"r{looks}", "abcd"[: 2 * looks])
        rig.tick(2)
        metrics.tick(0)
        counts = {
            state: histogram.buckets()[0][-1][1]
            for (name, state), histogram in metrics._ranks[0].histograms.items()
            if name == "backup_state_ticks"
        }
        assert not side.cache.state.pending
        assert counts["RESERVED"] == side.cache.counters.reserved == looks
    rig.rest()


def test_the_host_may_bring_its_registry(run: tuple[CacheMetrics, list[RankResult]]) -> None:
    """R40: metrics go into a given registry, where they stand beside the host's; a rank is watched once."""
    registry = CollectorRegistry()
    metrics = CacheMetrics(registry)
    assert metrics.registry is registry
    assert b"# TYPE cphicache_backups_total counter" in generate_latest(registry)
    config = RunConfig(cp_size=1).sized_for(1)
    world = RankWorld(config, 0, [], SingleReducer(), streams=make_streams(config, 0))
    world.observe_with(metrics, 8)
    with pytest.raises(ValueError, match="rank 0 is watched already"):
        world.observe_with(metrics, 8)
    world.streams.close()


def test_metrics_are_served_over_http(run: tuple[CacheMetrics, list[RankResult]]) -> None:
    """R40: a scrape gets them."""
    metrics, _ = run
    server, thread = start_http_server(0, "127.0.0.1", metrics.registry)
    try:
        with urlopen(f"http://127.0.0.1:{server.server_port}/metrics", timeout=10) as answer:
            text = answer.read().decode()
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    assert 'cphicache_backups_total{outcome="committed",rank="1"}' in text


def test_a_run_serves_its_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    """R40: `--metrics-port 0` takes any free port, says which on stderr, and serves there what the run has counted."""
    started: list[tuple[Any, Any]] = []

    def start(port: int, **options: Any) -> Any:
        started.append(start_http_server(port, **options))
        return started[0]

    monkeypatch.setattr("prometheus_client.start_http_server", start)
    sizes = ["--requests", "3", "--cp-size", "1", "--layers", "1", "--draft-layers", "0", "--verify", "off"]
    done = CliRunner().invoke(main, ["run", "--json", *sizes, "--metrics-port", "0"])
    ((server, thread),) = started
    try:
        assert done.exit_code == 0, done.output
        (address,) = re.findall(rf"^metrics at (http://localhost:{server.server_port}/metrics)$", done.stderr, re.MULTILINE)
        with urlopen(address) as response:
            text = response.read().decode()
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    computed = json.loads(done.stdout)["tokens"]["computed"]
    assert (
        float(*re.findall(r'^cphicache_request_tokens_total\{rank="0",tier="computed"\} (.*)$', text, re.MULTILINE)) == computed > 0
    )


def test_a_port_that_is_taken_is_one_clear_line() -> None:
    """R40: `--metrics-port` with a port in use is refused with the port and the remedy."""
    server, thread = start_http_server(0, registry=CollectorRegistry())
    try:
        done = CliRunner().invoke(main, ["run", "--requests", "1", "--metrics-port", str(server.server_port)])
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    assert done.exit_code == 2
    assert f"--metrics-port {server.server_port}: cannot be served" in done.output


def test_the_dashboard_shows_metrics_that_exist() -> None:
    """R40: every metric name in the Grafana dashboard is exposed, every label in it is one of that metric's, and every metric is shown."""
    dashboard = json.loads((DOCS / "grafana.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    shown = {name for query in queries for name in re.findall(r"cphicache_\w+", query)}
    assert shown <= exposed_names()
    stems = {re.sub(r"_(total|bucket|count|sum)$", "", name).removeprefix("cphicache_") for name in shown}
    assert stems == set(METRICS)
    labels = {metric.label for metric in METRICS.values() if metric.label} | {"rank", "le"}
    for query in queries:
        for group in re.findall(r"by \(([^)]*)\)", query):
            assert {name.strip() for name in group.split(",")} <= labels
