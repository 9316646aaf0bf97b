"""One rank's host book: worked numbers, reservations, shrink, split and load-backs."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from cphicache.spaces.layout import CpSharedKVLayout
from cphicache.spaces.metadata import CpHiCacheNodeMetadata, OwnedPages
from cphicache.transfer.faults import CopyFaults
from cphicache.transfer.jobs import host_pages_by_payload
from cphicache.transfer.pools.slots import TransferInternalError
from cphicache.transfer.port import CopyStatus, HostSlotsExhausted, LoadItem, OpKey, OwnerMismatch
from cphicache.transfer.streams.threads import ThreadStreams
from cphicache.transfer.streams.virtual import VirtualStream, VirtualStreams
from tests.transfer.rigs import Rig, assert_same, copied, pages, snapshot
from tests.transfer.test_pools import STREAMS

ALONE = CpSharedKVLayout(4, 1, 0)
OP = OpKey(7, 0)


def virtual_rig(layout: CpSharedKVLayout = ALONE, **options: int | None) -> Rig:
    return Rig.of(VirtualStreams(), layout, **options)  # type: ignore[arg-type]


def expect_loaded(rig: Rig, before: dict[str, dict[tuple[int, str], torch.Tensor]], to: list[int], at: list[int]) -> None:
    """Device slots ``to`` hold what ``at`` held before, in every layer and payload; no other device byte has changed."""
    for payload, pool in rig.device.items():
        layers = range(pool.shape.layers)
        assert_same(snapshot(pool), copied(before[payload], before[payload], to, at, layers))


# -- worked numbers -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("layout", "backed_up", "restored", "to"),
    [
        (CpSharedKVLayout(4, 4, 1), (1, 2, 3, 4), (17, 18, 19, 20), range(20, 24)),
        (CpSharedKVLayout(4, 4, 3), (1, 2, 3, 4), (17, 18, 19, 20), range(20, 24)),
        (CpSharedKVLayout(4, 4, 1), (1, 2, 3, 4), (13, 14, 15, 16), range(16, 20)),
        (CpSharedKVLayout(4, 4, 1, base=0), (4, 5, 6, 7), (16, 17, 18, 19), range(16, 20)),
    ],
)
@pytest.mark.parametrize("stream_kind", STREAMS)
def test_the_backup_of_16_tokens_is_restored_elsewhere(
    layout: CpSharedKVLayout, backed_up: tuple[int, ...], restored: tuple[int, ...], to: range, stream_kind: str
) -> None:
    """R4: this rank's part of logical 4..19 (base 0: 16..31), physical 4..7, goes to four host slots and back to its physical slots
    of the new pages; every other byte of both pools stays (R33)."""
    at = range(4, 8)
    rig = Rig.of(STREAMS[stream_kind](), layout, device_pages=6, kind="mha")
    device = {payload: snapshot(pool) for payload, pool in rig.device.items()}
    host = {payload: snapshot(pool) for payload, pool in rig.host.items()}
    rig.back_up(7, pages(*backed_up))
    assert rig.rank.free_slots() == {"target": 36, "draft": 36}
    for payload, pool in rig.host.items():
        layers = range(pool.shape.layers)
        assert_same(snapshot(pool), copied(host[payload], device[payload], range(4), at, layers))
    rig.load(0, 7, pages(*restored))
    expect_loaded(rig, device, list(to), list(at))
    rig.streams.close()


@pytest.mark.parametrize("restored", [(16, 17, 18, 19), (17, 18, 19), (17, 18, 19, 20, 21)])
def test_another_owner_pattern_is_refused_before_anything_is_queued(restored: tuple[int, ...]) -> None:
    """R4: the backup of 4..19 onto 64..79 (owners [3,0,1,2]), or onto fewer or more pages, is refused and queues nothing."""
    rig = virtual_rig(CpSharedKVLayout(4, 4, 1))
    rig.back_up(7, pages(1, 2, 3, 4))
    rig.back_up(8, pages(5))
    with pytest.raises(OwnerMismatch, match="node 7"):
        rig.rank.queue_load(0, [LoadItem(8, pages(13)), LoadItem(7, pages(*restored))])
    assert rig.rank.start_loads() == -1
    rig.load(0, 7, pages(17, 18, 19, 20))


def test_a_rank_that_owns_nothing_completes_without_a_copy() -> None:
    """R9, R25: on rank 3 a one-page backup takes no slot and is one no-op completion, at submit time; its load-back of 68..71
    copies nothing and is one completed acknowledgement, after the start."""
    rig = virtual_rig(CpSharedKVLayout(4, 4, 3))
    rig.rank.reserve(OP, pages(1))
    assert rig.rank.counters.noop_completions == 0
    rig.rank.submit_layers([OP], "target", [0])
    rig.rank.submit_layers([OP], "target", [1, 2])
    rig.rank.submit_layers([OP], "draft", [0, 1])
    assert rig.rank.counters.noop_completions == 1
    assert rig.rank.status(OP) == CopyStatus(drained=True, failed=False)
    assert rig.rank.last_copy_event(OP) is None
    rig.rank.wait_backup(OP)
    rig.rank.commit(OP)
    rig.rank.queue_load(0, [LoadItem(7, pages(17))])
    assert rig.rank.load_status(0) == CopyStatus(drained=False, failed=False)
    producer = rig.rank.start_loads()
    assert producer == 0
    assert rig.rank.load_status(0) == CopyStatus(drained=True, failed=False)
    rig.rank.wait_layer(producer, "target", 2)
    rig.rank.wait_load(0)
    rig.rank.end_load(0)
    assert rig.rank.free_slots() == {"target": 40, "draft": 40}
    counters = rig.rank.counters
    assert (counters.noop_completions, counters.copies, counters.d2h_bytes, counters.h2d_bytes) == (2, 0, 0, 0)


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("kind", ["mla", "mha"])
@pytest.mark.parametrize("stream_kind", STREAMS)
def test_two_backups_in_one_submission_go_there_and_back(stream_kind: str, kind: str, page_size: int) -> None:
    """R10, R33: copies of scattered pages, submitted layer by layer for two operations together, restore both onto other pages in
    one producer; every other byte of the device stays."""
    layout = CpSharedKVLayout(page_size, 2, 1)
    rig = Rig.of(STREAMS[stream_kind](), layout, device_pages=14, kind=kind)
    device = {payload: snapshot(pool) for payload, pool in rig.device.items()}
    first, second = OpKey(1, 0), OpKey(2, 5)
    rig.rank.reserve(first, pages(9, 2, 6, 4))
    rig.rank.reserve(second, pages(8, 1))
    for layer in (2, 0, 1):
        rig.rank.submit_layers([first, second], "target", [layer])
    rig.rank.submit_layers([second, first], "draft", [1, 0])
    for op in (first, second):
        rig.rank.wait_backup(op)
        assert rig.rank.status(op) == CopyStatus(drained=True, failed=False)
        rig.rank.commit(op)
    rig.rank.queue_load(3, [LoadItem(1, pages(11, 12, 14, 16))])
    rig.rank.queue_load(4, [LoadItem(2, pages(18, 21))])
    assert rig.rank.start_loads() == 0
    assert rig.rank.start_loads() == -1
    for load in (3, 4):
        rig.rank.wait_load(load)
        assert rig.rank.load_status(load) == CopyStatus(drained=True, failed=False)
        rig.rank.end_load(load)
    moved = {12: 2, 14: 6, 16: 4, 18: 8}
    to = [slot for page in moved for slot in rig.slots(page)]
    at = [slot for page in moved.values() for slot in rig.slots(page)]
    expect_loaded(rig, device, to, at)
    tokens_bytes = sum(pool.shape.layers * pool.shape.layer_bytes for pool in rig.device.values()) * 4 * page_size
    counters = rig.rank.counters
    assert (counters.d2h_bytes, counters.h2d_bytes, counters.copies) == (tokens_bytes, tokens_bytes, 20)
    assert (counters.failed_copies, counters.noop_completions, counters.stale_completions) == (0, 0, 0)
    rig.streams.close()


# -- reservations -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("host_pages", "draft_host_pages", "short"), [(4, 2, "draft"), (2, 4, "target")])
def test_slots_of_every_payload_or_none(host_pages: int, draft_host_pages: int, short: str) -> None:
    """R5: when the draft pool (or the target's) is too small nothing is taken, nothing is queued, and the key can be used again."""
    rig = virtual_rig(host_pages=host_pages, draft_host_pages=draft_host_pages)
    free = rig.rank.free_slots()
    with pytest.raises(HostSlotsExhausted, match=f"12 {short} host slots needed, 8 free"):
        rig.rank.reserve(OP, pages(1, 2, 3))
    assert rig.rank.free_slots() == free
    rig.rank.reserve(OP, pages(1, 2))
    assert rig.rank.free_slots() == {payload: slots - 8 for payload, slots in free.items()}
    rig.rank.release(OP)
    assert rig.rank.free_slots() == free


def test_a_pool_without_draft_has_one_payload() -> None:
    """R5: without a draft pool an operation has target slots and layers only."""
    rig = virtual_rig(draft_host_pages=None)
    rig.back_up(7, pages(1, 2))
    assert rig.rank.free_slots() == {"target": 32}
    with pytest.raises(TransferInternalError, match="'draft'"):
        rig.rank.wait_layer(-1, "draft", 0)


def test_missing_draft_metadata_raises() -> None:
    """R5: metadata without draft slots is refused where a draft pool is configured; nothing falls back to target-only."""
    metadata = CpHiCacheNodeMetadata.of_pages((0,), 4, OwnedPages([0], [5]))
    assert host_pages_by_payload(metadata, ["target"]) == {"target": [5]}
    with pytest.raises(ValueError, match="draft"):
        host_pages_by_payload(metadata, ["target", "draft"])


# -- shrink, split ------------------------------------------------------------------------------------------------------------
def test_a_shrink_before_any_copy_frees_at_once() -> None:
    """R12: the duplicate part of a RESERVED operation is freed now; the rest is backed up and restored as one."""
    rig = virtual_rig()
    before = {payload: snapshot(pool) for payload, pool in rig.device.items()}
    rig.rank.reserve(OP, pages(1, 2, 3))
    rig.rank.shrink(OP, 2, free_now=True)
    assert rig.rank.free_slots() == {"target": 36, "draft": 36}
    rig.submit_all(OP)
    rig.rank.wait_backup(OP)
    rig.rank.commit(OP)
    assert rig.rank.free_slots() == {"target": 36, "draft": 36}
    rig.load(0, 7, pages(8))
    expect_loaded(rig, before, rig.slots(8), rig.slots(3))


@pytest.mark.parametrize("committed", [True, False])
def test_a_shrink_in_flight_keeps_slots_to_the_end(committed: bool) -> None:
    """R12: slots that a copy in flight still writes are freed with the operation, once, by commit or by release; layers submitted
    later leave them out."""
    rig = virtual_rig()
    rig.rank.reserve(OP, pages(1, 2, 3))
    rig.rank.submit_layers([OP], "target", [0])
    rig.rank.shrink(OP, 1, free_now=False)
    rig.rank.shrink(OP, 0, free_now=False)
    host = snapshot(rig.host["target"])
    rig.rank.submit_layers([OP], "target", [1, 2])
    rig.rank.submit_layers([OP], "draft", [0, 1])
    assert rig.rank.free_slots() == {"target": 28, "draft": 28}
    rig.rank.wait_backup(OP)
    device = snapshot(rig.device["target"])
    host = copied(host, device, range(12), range(4, 16), [0])
    assert_same(snapshot(rig.host["target"]), copied(host, device, range(4, 12), range(8, 16), [1, 2]))
    if committed:
        rig.rank.commit(OP)
        assert rig.rank.free_slots() == {"target": 32, "draft": 32}
        rig.rank.free_node(7)
    else:
        rig.rank.release(OP)
    assert rig.rank.free_slots() == {"target": 40, "draft": 40}


def test_a_second_shrink_frees_what_the_first_one_kept_only_at_the_end() -> None:
    """R12: kept slots stay kept when an agreed operation is cut again with its slots freed now."""
    rig = virtual_rig()
    rig.rank.reserve(OP, pages(1, 2, 3))
    rig.submit_all(OP)
    rig.rank.shrink(OP, 1, free_now=False)
    with pytest.raises(TransferInternalError, match="shrink with free_now"):
        rig.rank.shrink(OP, 1, free_now=True)
    rig.rank.wait_backup(OP)
    rig.rank.shrink(OP, 1, free_now=True)
    assert rig.rank.free_slots() == {"target": 32, "draft": 32}
    rig.rank.commit(OP)
    assert rig.rank.free_slots() == {"target": 36, "draft": 36}


@pytest.mark.parametrize("tail_first", [True, False])
def test_both_halves_of_a_split_are_freed(tail_first: bool) -> None:
    """R3, R17: a split divides the committed metadata; each half is restored and freed alone, and nothing is freed twice."""
    rig = virtual_rig()
    before = {payload: snapshot(pool) for payload, pool in rig.device.items()}
    rig.back_up(7, pages(3, 1, 2))
    rig.rank.split_node(7, 70, 1)
    rig.load(0, 70, pages(9))
    rig.load(1, 7, pages(11, 8))
    to = [*rig.slots(9), *rig.slots(11), *rig.slots(8)]
    expect_loaded(rig, before, to, [*rig.slots(3), *rig.slots(1), *rig.slots(2)])
    first, second = ((7, 8), (70, 4)) if tail_first else ((70, 4), (7, 8))
    rig.rank.free_node(first[0])
    assert rig.rank.free_slots()["target"] == 28 + first[1]
    rig.rank.free_node(second[0])
    assert rig.rank.free_slots() == {"target": 40, "draft": 40}
    with pytest.raises(TransferInternalError, match="free_node 7"):
        rig.rank.free_node(7)


# -- producers ----------------------------------------------------------------------------------------------------------------
def test_producers_are_numbered_once_and_forgotten_with_their_loads() -> None:
    """R25: one producer for all queued loads, -1 when none is queued; indices are not reused; a finished one waits for nothing."""
    rig = virtual_rig()
    rig.back_up(1, pages(1))
    rig.back_up(2, pages(2))
    assert rig.rank.start_loads() == -1
    rig.rank.queue_load(0, [LoadItem(1, pages(5))])
    rig.rank.queue_load(1, [LoadItem(2, pages(6))])
    assert rig.rank.start_loads() == 0
    rig.rank.wait_load(0)
    rig.rank.end_load(0)
    rig.rank.wait_layer(0, "draft", 1)
    rig.rank.end_load(1)
    rig.rank.wait_layer(0, "draft", 1)
    rig.rank.wait_layer(-1, "target", 0)
    rig.rank.queue_load(2, [LoadItem(1, pages(7))])
    assert rig.rank.start_loads() == 1
    for producer, payload, layer in ((2, "target", 0), (-2, "target", 0), (1, "target", 3), (1, "indexer", 0)):
        with pytest.raises(TransferInternalError, match="wait_layer"):
            rig.rank.wait_layer(producer, payload, layer)


def test_waiting_for_a_queued_load_starts_it_alone() -> None:
    """R18: a drain round starts a load that was never started, and leaves the others to their batch's producer."""
    rig = virtual_rig()
    rig.back_up(1, pages(1))
    rig.rank.queue_load(0, [LoadItem(1, pages(5))])
    rig.rank.queue_load(1, [LoadItem(1, pages(6))])
    rig.rank.wait_load(0)
    assert rig.rank.load_status(0).drained
    assert not rig.rank.load_status(1).drained
    assert rig.rank.start_loads() == 1


def test_layers_of_a_producer_arrive_one_by_one_target_first() -> None:
    """R25: the forward can start after the first layer: layer i is there while later layers and the draft's are not."""
    rig = virtual_rig(layers=2)
    before = {payload: snapshot(pool) for payload, pool in rig.device.items()}
    rig.back_up(1, pages(1))
    rig.rank.queue_load(0, [LoadItem(1, pages(5))])
    layer_us = 4 * rig.device["target"].shape.layer_bytes
    rig.rank.start_loads()
    to, at = rig.slots(5), rig.slots(1)
    for step, (target_layers, draft_layers) in enumerate([((), ()), ((0,), ()), ((0, 1), ()), ((0, 1), (0,)), ((0, 1), (0, 1))]):
        if step:
            rig.streams.pause(layer_us)
        for payload, layers in (("target", target_layers), ("draft", draft_layers)):
            assert_same(snapshot(rig.device[payload]), copied(before[payload], before[payload], to, at, layers))
    assert rig.rank.load_status(0).drained


# -- several layers in one submission -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("layers", [range(3), (0, 2), range(1, 3), (2, 1, 0)])
@pytest.mark.parametrize("planned_fault", [False, True])
def test_layers_submitted_together_are_one_item_where_nobody_can_tell(layers: Sequence[int], planned_fault: bool) -> None:
    """R11: on streams of threads several layers are one work item, on the virtual clock one each; bytes, failures and counters are the
    same, also of all layers by one call."""
    found = []
    kinds: list[VirtualStreams | ThreadStreams] = [VirtualStreams(), ThreadStreams()]
    for streams in kinds:
        faults = CopyFaults()
        if planned_fault:
            faults.fail_copy("d2h", "target", 2)
        rig = Rig.of(streams, ALONE, draft_host_pages=None, faults=faults if planned_fault else None)
        write = streams.stream("write")
        for number in (1, 2):
            rig.rank.reserve(OpKey(number, 0), pages(number, number + 4))
        rig.rank.submit_layers([OpKey(1, 0), OpKey(2, 0)], "target", layers)
        items = write._queued if isinstance(write, VirtualStream) else write._submitted
        assert items == (1 if write.takes_whole else len(layers))
        streams.close()
        status = [rig.rank.status(OpKey(number, 0)) for number in (1, 2)]
        found.append((snapshot(rig.host["target"]), status, rig.rank.counters))
    assert_same(found[0][0], found[1][0])
    assert found[0][1:] == found[1][1:]
    assert any(status.failed for status in found[0][1]) is (planned_fault and 2 in layers)
