"""Small whole runs, about a tenth of a second each: short prompts, pools that press on both tiers, every byte compared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cphicache.run.config import RunConfig
from cphicache.run.jobs import load_requests
from cphicache.run.report import Summary, summarize
from cphicache.run.world import StreamsFactory, make_streams, run_world
from cphicache.transfer.faults import CopyFaults

SMALL: Mapping[str, Any] = {
    "requests": 20,
    "scale": 0.0625,
    "cp_size": 2,
    "page_size": 4,
    "device_tokens": 512,
    "host_tokens": 1024,
    "layers": 3,
    "draft_layers": 1,
    "latent_dim": 8,
    "rope_dim": 4,
    "kv_heads": 1,
    "head_dim": 8,
    "chunk_tokens": 32,
}


def small(**changed: Any) -> RunConfig:
    """A configuration of a small run."""
    return RunConfig.from_mapping({**SMALL, **changed})


def serve(config: RunConfig, *, streams: StreamsFactory = make_streams, faults: Mapping[int, CopyFaults] | None = None) -> Summary:
    """Serve all requests and sum up, whatever was found."""
    requests = load_requests(config)
    summary = summarize(config, run_world(config, requests, streams=streams, faults=faults))
    assert sum(summary["requests"].values()) == len(requests)
    return summary


def assert_fine(summary: Summary) -> None:
    """No wrong byte, no leak, no disagreement, and bytes were compared at all."""
    assert summary["checks"]["mismatches"] == 0, summary["evidence"]
    assert summary["checks"]["leaks"] == 0
    assert summary["ranks_agree"]
    assert summary["checks"]["bytes compared"] > 0
    assert summary["checks"]["conservation checks"] > 0


def serve_fine(config: RunConfig, *, streams: StreamsFactory = make_streams) -> Summary:
    """Serve all requests; everything must be right."""
    summary = serve(config, streams=streams)
    assert_fine(summary)
    return summary


def counted(summary: Summary, group: str, name: str) -> int:
    """A figure that the summary names only when it is not 0."""
    return int(summary[group].get(name, 0))
