"""Small versions of the whole acceptance table: every variation of a run serves its requests with every byte right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cphicache.events import read_events
from cphicache.run.config import RunConfig
from cphicache.run.report import Summary
from cphicache.run.trace import BLOCK_TOKENS
from cphicache.transfer.streams.threads import ThreadStreams
from cphicache.transfer.streams.virtual import VirtualStreams
from tests.run.worlds import assert_fine, counted, serve, serve_fine, small


def token_bytes(config: RunConfig) -> int:
    """Bytes of one token over all layers and payloads, from the shapes alone (bf16)."""
    items = config.latent_dim + config.rope_dim if config.kv == "mla" else 2 * config.kv_heads * config.head_dim
    return 2 * items * (config.layers + config.draft_layers)


@pytest.mark.parametrize("kv", ["mla", "mha"])
@pytest.mark.parametrize("draft_layers", [0, 1, 2])
def test_every_layer_of_every_payload_is_copied_once(kv: str, draft_layers: int) -> None:
    """R5, R10: MLA and MHA, with 0, 1 and 2 draft layers: without aborts, D2H bytes are the submitted tokens times the bytes of all
    layers, components and payloads; H2D bytes are the loaded tokens times the same."""
    config = small(kv=kv, draft_layers=draft_layers, abort_rate=0.0)
    summary = serve_fine(config)
    assert summary["backups"]["committed"] > 0
    assert summary["tokens"]["host hit"] > 0
    assert summary["bytes"]["D2H"] == summary["backups"]["tokens submitted"] * token_bytes(config)
    assert summary["bytes"]["H2D"] == summary["tokens"]["host hit"] * token_bytes(config)


def test_write_through_backs_up_before_the_node_exists(tmp_path: Path) -> None:
    """R12, R19: under write_through reservations are made before the forward, and nothing is dropped for want of a copy."""
    summary = serve_fine(small(log=tmp_path / "log"))
    reasons = {event.get("reason") for event in read_events(tmp_path / "log.rank0") if event.get("trigger") == "reserve"}
    assert "before_forward" in reasons
    assert summary["backups"]["committed"] > 0
    assert summary["evictions"]["write-back waits"] == 0


def test_write_through_selective_backs_up_what_is_hit_again(tmp_path: Path) -> None:
    """R19: under write_through_selective a node is backed up by its second hit: fewer backups, all of them of stored KV."""
    eager = serve_fine(small())
    summary = serve_fine(small(policy="write_through_selective", log=tmp_path / "log"))
    reasons = {event.get("reason") for event in read_events(tmp_path / "log.rank0") if event.get("trigger") == "reserve"}
    assert "hit" in reasons
    assert "before_forward" not in reasons
    assert 0 < summary["backups"]["committed"] < eager["backups"]["committed"]


def test_write_back_backs_up_on_eviction_and_waits() -> None:
    """R19: under write_back nothing is backed up while the device has room; an eviction waits for the copies and drops nothing."""
    summary = serve_fine(small(policy="write_back"))
    assert summary["evictions"]["write-back waits"] > 0
    assert summary["agreement"]["collectives in drain rounds"] > 0
    assert summary["evictions"]["of these without a host copy"] == 0
    assert summary["tokens"]["host hit"] > 0
    assert serve_fine(small(policy="write_back", device_tokens=8192))["backups"]["reserved"] == 0


def test_write_back_drops_where_it_may_not_wait() -> None:
    """R19: with ``write_back_wait`` drop no eviction waits: nodes whose copy is not there yet go without one."""
    summary = serve_fine(small(policy="write_back", write_back_wait="drop"))
    assert summary["evictions"]["write-back waits"] == 0
    assert summary["agreement"]["collectives in drain rounds"] == 0
    assert summary["evictions"]["of these without a host copy"] > 0
    assert summary["backups"]["committed"] > 0


def submitted_first(log: Path, layers: int) -> set[int]:
    """Target layers that the first submission of each backup made."""
    steps = (event for event in read_events(log) if event.get("trigger") == "layer_stored")
    return {step["submitted"]["target"] for step in steps if step["before"] == "RESERVED" and step["submitted"]["target"] <= layers}


def test_without_overlap_all_layers_are_submitted_together(tmp_path: Path) -> None:
    """R11: ``--no-overlap`` is the same path with all layers reported at once, after the forward; with overlap it is one by one."""
    config = small(overlap=False, log=tmp_path / "late")
    assert serve_fine(config)["backups"]["committed"] > 0
    assert submitted_first(tmp_path / "late.rank0", config.layers) == {config.layers}
    serve_fine(small(log=tmp_path / "early"))
    assert 1 in submitted_first(tmp_path / "early.rank0", config.layers)


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_every_page_size_reuses_whole_pages(page_size: int) -> None:
    """R28: with pages of 1, 16 and 64 tokens all that is reused, backed up and evicted is whole pages."""
    config = small(page_size=page_size, scale=0.125, chunk_tokens=64, device_tokens=1024, host_tokens=2048)
    summary = serve_fine(config)
    tokens = [summary["tokens"]["device hit"], summary["tokens"]["host hit"], summary["backups"]["tokens committed"]]
    tokens += [summary["evictions"]["device tokens"], summary["backups"]["tokens wasted"]]
    assert all(count % page_size == 0 for count in tokens)
    assert summary["tokens"]["device hit"] > 0
    assert summary["backups"]["committed"] > 0


QUARTER: dict[str, Any] = {"device_tokens": 512, "host_tokens": 128}


def late_commits(log: Path) -> int:
    """Backups committed in the second half of a run's ticks."""
    events = [event for event in read_events(log) if "tick" in event]
    half = events[-1]["tick"] // 2
    return sum(event.get("after") == "COMMITTED" != event.get("before") and event["tick"] > half for event in events)


def test_a_small_host_pool_goes_on_with_reclaim(tmp_path: Path) -> None:
    """R16: with a host pool of a quarter of the device pool and ``reclaim_device_valid`` backups go on to the end of the run."""
    summary = serve_fine(small(**QUARTER, reclaim_device_valid=True, log=tmp_path / "log"))
    assert summary["evictions"]["reclaimed host copies"] > 0
    assert summary["seen"]["eviction-retries that succeeded"] > 0
    assert late_commits(tmp_path / "log.rank0") > 0


def test_a_small_host_pool_refuses_without_reclaim(tmp_path: Path) -> None:
    """R16: without the switch backups are refused with the reason, slots needed and free, nothing is reclaimed and nothing hangs."""
    config = small(**QUARTER, log=tmp_path / "log")
    summary = serve_fine(config)
    assert config.host_smaller_than_device
    assert counted(summary, "backups", "refused: no host slots") > 0
    assert summary["evictions"]["reclaimed host copies"] == 0
    refused = [event for event in read_events(tmp_path / "log.rank0") if event["event"] == "refused"]
    full = [event for event in refused if event["reason"] == "no_host_slots"]
    assert full
    assert all(any(need > free for need, free in zip(event["needed"], event["free"], strict=True)) for event in full)
    assert summary["backups"]["committed"] < serve(small(**QUARTER, reclaim_device_valid=True))["backups"]["committed"]


def test_virtual_streams_of_every_seed_serve_the_same_requests() -> None:
    """R34: whatever order of completion the seed chooses, every byte is right; the orders do differ."""
    summaries: list[Summary] = [serve_fine(small(seed=seed)) for seed in range(6)]
    assert len({json.dumps(summary["ticks to host-visible"]) + str(summary["agreement"]["ticks"]) for summary in summaries}) > 1
    assert sum(summary["tokens"]["host hit"] for summary in summaries) > 0


@pytest.mark.parametrize("max_delay_us", [0.0, 300.0])
def test_real_threads_serve_every_byte(max_delay_us: float) -> None:
    """R34: copies on worker threads, with and without random delays: really asynchronous, and every byte is right."""
    config = small(streams="threads", requests=16)
    summary = serve_fine(config, streams=lambda _, rank: ThreadStreams(seed=rank, max_delay_us=max_delay_us))
    assert summary["backups"]["committed"] > 0


@pytest.mark.parametrize("cp_size", [1, 2, 3, 4])
def test_every_number_of_ranks_agrees(cp_size: int) -> None:
    """R20, R21: with 1 to 4 ranks there is at most one collective a tick and none to reserve, evict or defer; short nodes leave
    ranks that own nothing, which still take part."""
    summary = serve_fine(small(cp_size=cp_size))
    agreement = summary["agreement"]
    assert 0 < agreement["collectives"] == agreement["ticks with something in flight"] <= agreement["ticks"]
    assert agreement["collectives elsewhere (to reserve, evict, defer)"] == 0
    assert (summary["seen"]["zero-owned operations"] > 0) is (cp_size > 1)


def test_a_trace_in_the_public_form_is_served(tmp_path: Path) -> None:
    """R28, R24: a Mooncake-form trace: equal hash ids are equal tokens, so what comes again is a device hit when it comes soon, and
    a host hit when others have pushed it out of the device meanwhile."""
    lines = []
    for index, ids in enumerate(([1, 2], [1, 2, 3], [10, 11, 12, 13], [20, 21, 22, 23], [30, 31, 32, 33], [1, 2, 3, 4])):
        request = {"timestamp": 3000 * index, "input_length": BLOCK_TOKENS * len(ids), "output_length": 64, "hash_ids": ids}
        lines.append(json.dumps({**request, "user": "ignored"}))
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(lines) + "\n\n", encoding="utf-8")
    config = small(trace=trace, requests=None, device_tokens=192, abort_rate=0.0, retract_rate=0.0)
    summary = serve_fine(config)
    assert summary["requests"]["finished"] == 6
    block = round(BLOCK_TOKENS * config.scale)
    assert summary["tokens"]["device hit"] == 2 * block
    assert summary["tokens"]["host hit"] == 3 * block
    assert serve(small(trace=trace, requests=2, device_tokens=192))["requests"]["finished"] <= 2


def test_sampled_and_switched_off_checks_compare_less() -> None:
    """R30: ``verify`` sample compares fewer bytes than all, off none; the run itself is the same."""

    def serve_with(verify: str) -> Summary:
        return serve(small(verify=verify), streams=lambda config, rank: VirtualStreams())

    everything, sample, nothing = (serve_with(verify) for verify in ("all", "sample", "off"))
    assert_fine(everything)
    assert 0 < sample["checks"]["bytes compared"] < everything["checks"]["bytes compared"]
    assert nothing["checks"]["bytes compared"] == 0
    assert everything["backups"] == sample["backups"] == nothing["backups"]
