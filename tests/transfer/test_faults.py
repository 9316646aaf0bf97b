"""Copies and reservations that fail: remembered, reported by status, and exactly theirs."""

from __future__ import annotations

import pytest

from cphicache.spaces.layout import CpSharedKVLayout
from cphicache.transfer.backends.port import Indices
from cphicache.transfer.faults import CopyCall, CopyFault, CopyFaults
from cphicache.transfer.pools.device import DevicePool
from cphicache.transfer.pools.host import LayerFirstHostPool
from cphicache.transfer.pools.slots import TransferInternalError
from cphicache.transfer.port import CopyStatus, HostSlotsExhausted, LoadItem, OpKey
from cphicache.transfer.rank import RankTransfer
from cphicache.transfer.streams.virtual import VirtualStreams
from tests.transfer.rigs import Rig, assert_same, copied, fill, pages, shape_of, snapshot
from tests.transfer.test_pools import STREAMS

LAYOUT = CpSharedKVLayout(4, 1, 0)
FIRST, SECOND = OpKey(1, 0), OpKey(2, 0)


@pytest.mark.parametrize("stream_kind", STREAMS)
def test_a_failing_copy_is_remembered_and_only_its_own_operation_fails(stream_kind: str) -> None:
    """R22: the first of two operations fails in target layer 1: its later layers are still accepted, the other operation of the
    same submission gets every byte, and nothing is raised into the stream."""
    streams = STREAMS[stream_kind]()
    faults = CopyFaults()
    faults.fail_copy("d2h", "target", 1)
    rig = Rig.of(streams, LAYOUT, faults=faults)
    host = snapshot(rig.host["target"])
    device = snapshot(rig.device["target"])
    rig.rank.reserve(FIRST, pages(1))
    rig.rank.reserve(SECOND, pages(2))
    rig.submit_all(FIRST, SECOND)
    rig.rank.wait_backup(FIRST)
    assert rig.rank.status(FIRST) == CopyStatus(drained=True, failed=True)
    assert rig.rank.status(SECOND) == CopyStatus(drained=True, failed=False)
    assert isinstance(rig.rank.failure(FIRST), CopyFault)
    assert rig.rank.failure(SECOND) is None
    host = copied(host, device, range(8), range(4, 12), [0])
    assert_same(snapshot(rig.host["target"]), copied(host, device, range(4, 8), range(8, 12), [1, 2]))
    assert faults.fired == [CopyCall("d2h", "target", 1, 0, FIRST)]
    assert (rig.rank.counters.copies, rig.rank.counters.failed_copies) == (6, 1)
    with pytest.raises(TransferInternalError, match="every copy to succeed"):
        rig.rank.commit(FIRST)
    rig.rank.release(FIRST)
    rig.rank.commit(SECOND)
    streams.close()


def test_the_nth_copy_of_a_layer_fails() -> None:
    """R22: a fault is planned by direction, payload, layer and count; the same copy of another operation succeeds."""
    faults = CopyFaults()
    faults.fail_copy("d2h", "draft", 0, nth=1)
    rig = Rig.of(VirtualStreams(), LAYOUT, faults=faults)
    for op, page in ((FIRST, 1), (SECOND, 2)):
        rig.rank.reserve(op, pages(page))
        rig.submit_all(op)
    rig.rank.wait_backup(SECOND)
    assert [rig.rank.status(op).failed for op in (FIRST, SECOND)] == [False, True]


def test_a_failing_load_fails_alone() -> None:
    """R22, R25: of two load-backs in one producer the one that a predicate picks fails and drains; the other has all its bytes."""
    faults = CopyFaults()
    faults.fail_copies_where(lambda call: call.direction == "h2d" and call.job == 8 and call.layer == 1)
    rig = Rig.of(VirtualStreams(), LAYOUT, faults=faults)
    before = snapshot(rig.device["target"])
    rig.back_up(1, pages(1))
    rig.back_up(2, pages(2))
    rig.rank.queue_load(8, [LoadItem(1, pages(5))])
    rig.rank.queue_load(9, [LoadItem(2, pages(6))])
    rig.rank.start_loads()
    assert rig.rank.load_status(8) == CopyStatus(drained=False, failed=False)
    rig.rank.wait_load(8)
    assert rig.rank.load_status(8) == CopyStatus(drained=True, failed=True)
    assert rig.rank.load_status(9) == CopyStatus(drained=True, failed=False)
    expected = copied(before, before, range(24, 28), range(8, 12), [0, 1, 2])
    assert_same(snapshot(rig.device["target"]), copied(expected, before, range(20, 24), range(4, 8), [0]))
    rig.rank.end_load(8)
    rig.rank.end_load(9)
    rig.rank.free_node(1)


@pytest.mark.parametrize("payload", ["target", "draft"])
def test_a_reservation_fault_takes_nothing(payload: str) -> None:
    """R16: a reservation that fails at the port, against the ledger, leaves every slot free; the next one succeeds. An operation
    that owns nothing makes no call."""
    faults = CopyFaults()
    faults.fail_reserve(payload)
    rig = Rig.of(VirtualStreams(), CpSharedKVLayout(4, 2, 0), faults=faults)
    rig.rank.reserve(OpKey(0, 0), pages(2))
    with pytest.raises(HostSlotsExhausted, match=f"reservation 0 of {payload}"):
        rig.rank.reserve(FIRST, pages(1))
    assert rig.rank.free_slots() == {"target": 40, "draft": 40}
    assert faults.fired_reserves == [(FIRST, payload)]
    rig.rank.reserve(FIRST, pages(1))
    assert rig.rank.free_slots() == {"target": 36, "draft": 36}


class BrokenHostPool(LayerFirstHostPool):
    """A host pool whose driver refuses layer 1."""

    def backup_from_device_per_layer(
        self, device_pool: DevicePool, host_indices: Indices, device_indices: Indices, layer_id: int, io_backend: str
    ) -> None:
        if layer_id == 1:
            raise OSError("invalid device address")
        super().backup_from_device_per_layer(device_pool, host_indices, device_indices, layer_id, io_backend)


def test_whatever_a_copy_raises_is_its_operations_failure() -> None:
    """R22: an error of the copy itself fails every operation whose bytes it moved, and never reaches the stream."""
    shape, streams = shape_of("mla", 2), VirtualStreams()
    device, host = DevicePool(shape, 16), BrokenHostPool(shape, 16, 4)
    fill(device, 1)
    rank = RankTransfer(LAYOUT, {"target": device}, {"target": host}, streams)
    rank.reserve(FIRST, pages(1))
    rank.reserve(SECOND, pages(2))
    rank.submit_layers([FIRST, SECOND], "target", [0])
    rank.submit_layers([FIRST], "target", [1])
    streams.close()
    assert rank.status(FIRST) == CopyStatus(drained=True, failed=True)
    assert rank.status(SECOND) == CopyStatus(drained=True, failed=False)
    assert str(rank.failure(FIRST)) == "invalid device address"
    rank.release(FIRST)
    assert rank.free_slots() == {"target": 12}
