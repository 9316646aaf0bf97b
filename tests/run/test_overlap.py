"""Copies overlap the forward that makes their KV: seen in the order of log and submissions, and in virtual time."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from cphicache.agree.local import SingleReducer
from cphicache.events import read_events
from cphicache.run.trace import TraceRequest
from cphicache.run.world import COPY_OVER_COMPUTE, RankWorld
from cphicache.transfer.streams.virtual import VirtualStreams
from tests.run.stream_wrappers import RecordingStreams
from tests.run.worlds import small

PROMPT_TOKENS = 200
CHUNK_TOKENS = 64


class Recorded(NamedTuple):
    """One long prompt, served alone: its work items and its log."""

    streams: RecordingStreams
    events: list[dict[str, Any]]

    def steps(self, trigger: str, **fields: Any) -> list[dict[str, Any]]:
        """Lifecycle steps of that trigger whose fields have these values."""
        return [
            event
            for event in self.events
            if event.get("trigger") == trigger and all(event.get(name) == value for name, value in fields.items())
        ]

    def prefills(self) -> list[int]:
        """Ticks in which a chunk was reserved before its forward."""
        return [step["tick"] for step in self.steps("reserve", reason="before_forward")]

    def after_last_store_us(self, tick: int) -> float:
        """Virtual time from the end of the last store of a tick's forward to the end of the last of its copies."""
        stored_us = max(item.done_us for item in self.streams.of("compute", tick))
        return max(item.done_us for item in self.streams.of("write", tick)) - stored_us


def serve_one(tmp_path: Path, **changed: Any) -> Recorded:
    """A prompt of four chunks on one rank, on a virtual clock without jitter."""
    options: dict[str, Any] = {"cp_size": 1, "chunk_tokens": CHUNK_TOKENS, "abort_rate": 0.0, "retract_rate": 0.0}
    log = tmp_path / "log"
    config = small(log=log, log_level="ops", **{**options, **changed})
    request = TraceRequest(0, 0, PROMPT_TOKENS, 2, (1,), block_size_tokens=PROMPT_TOKENS)
    streams = RecordingStreams(VirtualStreams())
    world = RankWorld(config, 0, [request], SingleReducer(), streams=streams)
    streams.log_position = lambda: (-1 if world.log is None else world.log.seq, world.cache.state.tick)
    result = world.run()
    assert result.served.finished == 1
    assert result.verdict.mismatches == 0
    assert result.leaks == 0
    return Recorded(streams, list(read_events(log)))


def test_reserve_comes_before_the_first_store(tmp_path: Path) -> None:
    """R12: each chunk is reserved before layer 0's store of its forward is submitted, and its first copy comes after that store."""
    run = serve_one(tmp_path)
    reserved = run.steps("reserve", reason="before_forward")
    assert len(reserved) == -(-PROMPT_TOKENS // CHUNK_TOKENS)
    for step in reserved:
        stores, copies = run.streams.of("compute", step["tick"]), run.streams.of("write", step["tick"])
        assert step["seq"] <= stores[0].seq
        assert stores[0].seq < copies[0].seq
        assert all(copy.seq > step["seq"] for copy in copies)


def test_the_first_copy_is_submitted_before_the_last_store(tmp_path: Path) -> None:
    """R10: layer by layer: store, copy, store, copy: each layer's copy is submitted before the next layer's store, draft included,
    and starts before the forward has ended."""
    run = serve_one(tmp_path, layers=4, draft_layers=2)
    for tick in run.prefills():
        order = [item.stream for item in run.streams.items if item.tick == tick]
        assert order == ["compute", "write"] * 6
        stores, copies = run.streams.of("compute", tick), run.streams.of("write", tick)
        assert copies[0].submitted_us < stores[-1].done_us
        assert all(copy.done_us > store.done_us for store, copy in zip(stores, copies, strict=True))


def test_without_overlap_every_copy_comes_after_the_last_store(tmp_path: Path) -> None:
    """R11: the twin: with ``--no-overlap`` all copies of a payload are submitted after the last store of its forward."""
    run = serve_one(tmp_path, layers=4, draft_layers=2, overlap=False)
    for tick in run.prefills():
        order = [item.stream for item in run.streams.items if item.tick == tick]
        assert order == ["compute"] * 4 + ["write"] * 4 + ["compute"] * 2 + ["write"] * 2


def test_the_next_chunk_is_in_flight_while_the_last_one_still_is(tmp_path: Path) -> None:
    """R15: chunk 2's first layer is submitted while chunk 1 is still in flight, by the log and by the clock, and each chunk commits
    after the one before it."""
    run = serve_one(tmp_path)
    nodes = [step["node"] for step in run.steps("reserve", reason="before_forward")]
    commits = [event for event in run.events if event.get("after") == "COMMITTED" != event.get("before")]
    assert [event["node"] for event in commits] == nodes
    overlapping = 0
    for first, second in pairwise(nodes):
        submitted = run.steps("layer_stored", node=second, before="RESERVED")[0]
        committed = next(event for event in commits if event["node"] == first)
        assert submitted["seq"] < committed["seq"]
        before, after = run.steps("layer_stored", node=first)[0]["tick"], submitted["tick"]
        overlapping += run.streams.of("write", after)[0].submitted_us < run.streams.of("write", before)[-1].done_us
    assert overlapping > 0


def test_what_is_left_after_the_last_store_is_a_tenth_at_most(tmp_path: Path) -> None:
    """R10: with 32 layers, copies no longer than compute and no draft, the time from a forward's last store to the end of its copies
    is at most a tenth of what it is with ``--no-overlap``, for every chunk."""
    assert COPY_OVER_COMPUTE <= 1.0
    runs = [serve_one(tmp_path, layers=32, draft_layers=0, overlap=overlap) for overlap in (True, False)]
    overlapped, late = ([run.after_last_store_us(tick) for tick in run.prefills()] for run in runs)
    assert len(overlapped) == len(late) == -(-PROMPT_TOKENS // CHUNK_TOKENS)
    for mine, theirs in zip(overlapped, late, strict=True):
        assert 0.0 < mine <= theirs / 10.0
    for run in runs:
        lengths = {len(run.streams.of("write", tick)) for tick in run.prefills()}
        assert lengths == {32}
