"""Each wait of R34 removed from a whole run, alone: wrong bytes; kept: none. And two orders that are not waits of a stream.

Which part of the run sees it depends on the wait:

* STORE_TO_COPY, LOAD_TO_READ, DRAIN_TO_FREE: the comparison of reused KV.
* READ_TO_LOAD: the same, with a scheduler that runs ahead of the device. The embedded one waits for each forward before it schedules
  the next, so that a load-back never meets a forward that still runs.
* COPY_TO_REUSE: the bytes of copies themselves. A page is given on while its copy is in flight only by an operation that rolls back or
  lost the page to a duplicate (everything else keeps its pages locked until the copies have drained), and such a copy's bytes are never
  read. They are compared here before their slots are freed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from cphicache.agree.local import SingleReducer
from cphicache.check.reference import ReferenceKV, first_difference
from cphicache.engine import CpHiRadixCache
from cphicache.run import world as world_module
from cphicache.run.config import RunConfig
from cphicache.run.jobs import load_requests, make_jobs
from cphicache.run.world import RankWorld
from cphicache.spaces.tensors import tokens_of
from cphicache.spaces.types import LogicalPage
from cphicache.transfer.port import OpKey, Wait
from cphicache.transfer.streams.port import Streams
from cphicache.transfer.streams.virtual import VirtualStreams
from tests.run.stream_wrappers import RecordingStreams, RunAheadStreams
from tests.run.worlds import assert_fine, serve, small
from tests.streams.dropping import DroppingStreams

SEEDS = range(8)
JITTER = 5.0
"""Long tails: now and then a copy outlasts many steps."""


def clock(config: RunConfig, rank: int) -> VirtualStreams:
    return VirtualStreams(seed=config.seed * 7 + rank, jitter=JITTER)


def pressed(seed: int) -> RunConfig:
    """One rank, so that nothing but its own streams orders its work; pools so small that much is loaded back soon after its backup."""
    return small(cp_size=1, seed=seed, device_tokens=384, host_tokens=512)


def one_rank(config: RunConfig, streams: Streams) -> RankWorld:
    return RankWorld(config, 0, load_requests(config), SingleReducer(), streams=streams)


@pytest.mark.parametrize("depth", [0, 4])
def test_no_byte_is_wrong_with_every_wait(depth: int) -> None:
    """R34: the green twin: with long tails of copies, and with a scheduler four steps ahead of the device, every byte is right."""
    for seed in SEEDS:
        assert_fine(serve(pressed(seed), streams=lambda config, rank: RunAheadStreams(clock(config, rank), depth)))


@pytest.mark.parametrize(
    ("why", "depth"),
    [(Wait.STORE_TO_COPY, 0), (Wait.LOAD_TO_READ, 0), (Wait.DRAIN_TO_FREE, 0), (Wait.READ_TO_LOAD, 4)],
)
def test_bytes_are_wrong_without_the_wait(why: Wait, depth: int) -> None:
    """R34: with this one wait removed, and all others kept, reused KV differs from what the model would have written, for at least one
    of the seeds that are right above."""

    def mismatches(seed: int) -> int:
        dropping = DroppingStreams(clock(pressed(seed), 0), why)
        summary = serve(pressed(seed), streams=lambda config, rank: RunAheadStreams(dropping, depth))
        return int(summary["checks"]["mismatches"])

    assert any(mismatches(seed) > 0 for seed in SEEDS)


# -- copies whose bytes nobody reads ---------------------------------------------------------------------------------------------


def audit_released(world: RankWorld, config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """One entry for each copied layer of each reservation that ended without commit: did its slots hold its request's KV?"""
    reference = ReferenceKV(config.seed)
    hashes = {job.rid: job.hashes for job in make_jobs(config, load_requests(config), reference)}
    release, right = world.transfer.release, []

    def audited(op: OpKey) -> None:
        job, record = world.transfer._backups[op], world.cache.state.pending[op.node]
        positions = np.arange(record.start_page * config.page_size, (record.start_page + len(record.pages)) * config.page_size)
        for payload, mask in job.submitted.items() if record.request else ():
            pool = world.host_pools[payload]
            for layer in (layer for layer in range(pool.shape.layers) if mask >> layer & 1):
                ((component, found),) = pool.read(layer, tokens_of(job.host_pages[payload], pool.page_size)).items()
                expected = reference.expected(
                    hashes[record.request][positions],
                    positions,
                    payload=payload,
                    layer=layer,
                    component=component,
                    item_bytes=pool.shape.item_bytes(component),
                )
                right.append(first_difference(expected, found) is None)
        release(op)

    monkeypatch.setattr(world.transfer, "release", audited)
    return right


@pytest.mark.parametrize("drop", [False, True])
def test_copies_carry_wrong_bytes_when_their_pages_are_reused(drop: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """R34: an aborted request's pages are given on at once. With COPY_TO_REUSE every copy that was submitted still carries what its page
    held then; without it some carry what the next owner stored."""
    right: list[bool] = []
    dropped = 0
    for seed in SEEDS[:4]:
        config = small(cp_size=1, seed=seed, abort_rate=0.4)
        streams = DroppingStreams(clock(config, 0), Wait.COPY_TO_REUSE)
        world = one_rank(config, streams if drop else clock(config, 0))
        audited = audit_released(world, config, monkeypatch)
        assert world.run().verdict.mismatches == 0  # nobody reads them
        right += audited
        dropped += streams.dropped
    assert len(right) > 0
    assert (dropped > 0) is drop
    assert all(right) is not drop


def watch_slots(world: RankWorld, recording: RecordingStreams, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """One entry for each reservation that gets a slot which a copy has used before: is the last such copy still in flight?"""
    reserve, in_flight = world.transfer.reserve, []
    last_use_us: dict[tuple[str, int], float] = {}
    seen = 0

    def watched(op: OpKey, pages: Sequence[LogicalPage]) -> None:
        nonlocal seen
        reserve(op, pages)
        for item in recording.items[seen:]:
            if item.batch is not None:
                for key in ((item.batch.payload, slot) for slot in item.batch.host.slots.tolist()):
                    last_use_us[key] = max(item.done_us, last_use_us.get(key, 0.0))
        seen = len(recording.items)
        for payload, owned in world.transfer._backups[op].host_pages.items():
            slots = tokens_of(owned, world.cache.config.page_size).tolist()
            used = [last_use_us[payload, slot] for slot in slots if (payload, slot) in last_use_us]
            if used:
                in_flight.append(max(used) > recording.now_us)

    monkeypatch.setattr(world.transfer, "reserve", watched)
    return in_flight


@pytest.mark.parametrize("drop", [False, True])
def test_host_slots_are_reused_only_after_the_drain(drop: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """R14, R18: no reservation gets a host slot that a copy in flight still writes or reads, although most slots have been used before.
    Without DRAIN_TO_FREE some do."""
    reused = taken_early = 0
    for seed in SEEDS[:4]:
        config = small(cp_size=1, seed=seed, host_tokens=256, reclaim_device_valid=True, abort_rate=0.2)
        recording = RecordingStreams(clock(config, 0))
        world = one_rank(config, DroppingStreams(recording, Wait.DRAIN_TO_FREE) if drop else recording)
        users = watch_slots(world, recording, monkeypatch)
        world.run()
        reused += len(users)
        taken_early += sum(users)
    assert reused > 0
    assert (taken_early > 0) is drop


# -- the draft's own forward -----------------------------------------------------------------------------------------------------


class _EarlyDraft(CpHiRadixCache):
    """Submits the draft's layers at the end of the target's pass."""

    def end_payload(self, batch_id: int, payload: int) -> None:
        super().end_payload(batch_id, payload)
        if payload == 0:
            super().end_payload(batch_id, 1)


@pytest.mark.parametrize("overlap", [False, True])
def test_draft_layers_submitted_with_the_target_are_wrong(overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """R10, R11: an engine that submits the draft's layers when the target's forward has ended backs up what the draft's own forward has
    not stored yet: wrong draft bytes, right target bytes. The engine as it is: none (R34's green twin, and here)."""
    config = small(cp_size=1, overlap=overlap, draft_layers=2)
    assert_fine(serve(config))
    monkeypatch.setattr(world_module, "CpHiRadixCache", _EarlyDraft)
    summary = serve(config)
    assert summary["checks"]["mismatches"] > 0
    assert all(" draft layer " in line for line in summary["evidence"])
