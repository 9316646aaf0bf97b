"""Reservations before the forward: what they take, what they queue (nothing), and what happens when the local half has no slots."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cphicache.engine import CacheConfig
from cphicache.transfer.faults import CopyFaults
from cphicache.transfer.rank import RankTransfer
from cphicache.transfer.streams.virtual import VirtualStreams
from tests.engine.rig import B, C, L, N, R, Rig, RigOver, rig_config
from tests.transfer.rigs import Rig as Pools

HOST_PAGES = 10


def real_rig(cp_size: int, faults: dict[int, CopyFaults]) -> RigOver[RankTransfer]:
    """Engines over real pools: pages of 2 tokens, three target layers and two draft layers, copies on a virtual clock."""
    config = rig_config(cp_size=cp_size, usable_pages=8 * cp_size, host_slots=HOST_PAGES * 2)

    def make(config: CacheConfig, rank: int) -> RankTransfer:
        streams = VirtualStreams(seed=rank)
        return Pools.of(
            streams, config.layout(rank), host_pages=HOST_PAGES, draft_host_pages=HOST_PAGES, faults=faults.get(rank)
        ).rank

    return RigOver(config, make)


@pytest.mark.parametrize("payload", ["draft", "target"])
def test_slots_of_both_payloads_or_of_none_and_nothing_queued(payload: str) -> None:
    """R5, R22: target is reserved and the draft fails on one rank: its target slots are free again and no copy is queued there, the
    logical state goes on as elsewhere, and at one agreed tick the backup rolls back on all ranks."""
    faults = CopyFaults()
    faults.fail_reserve(payload)
    rig = real_rig(2, {1: faults})
    assert rig.begin("r1", "abcd")
    assert rig.chunk("r1")
    key = rig.op("r1").key
    assert faults.fired_reserves == [(key, payload)]
    whole, half = {"target": 20, "draft": 20}, {"target": 16, "draft": 16}
    assert [side.transfer.free_slots() for side in rig.sides] == [half, whole]
    assert [side.cache.state.pending[key.node].void for side in rig.sides] == [False, True]
    assert rig.free_slots() == [16, 16]
    rig.forward()
    rig.insert("r1")
    assert rig.state("abcd") is L
    assert rig.free_slots() == [16, 16]
    failed = rig.sides[1].transfer
    assert (failed.counters.copies, failed.free_slots()) == (0, whole)
    for side in rig.sides:
        if side.rank == 0:
            side.transfer.wait_backup(key)
    rig.tick()
    assert rig.state("abcd") is L
    rig.tick()
    assert rig.state("abcd") is N
    assert rig.free_slots() == [20, 20]
    assert rig.cache.counters.rolled_back == {"agreed_failed": 1}
    assert (rig.cache.counters.tokens_submitted, rig.cache.counters.tokens_wasted) == (8, 8)
    rig.serve("r2", "abcd")  # the next hit backs it up
    assert rig.state("abcd") is L
    rig.rest()


def test_a_local_fault_changes_nothing_before_its_agreed_tick() -> None:
    """R22: with and without slots on one rank, every rank gives the same answers, numbers and ledger up to the tick at which all of
    them roll back; what hangs below rolls back with it, and both are backed up at the next hit."""
    rig = Rig()
    rig.begin("r1", "abcdef")
    rig.local(1).fail_reserve_next = True
    assert rig.chunk("r1", 4)
    rig.forward()
    rig.insert("r1", chunked=True)
    assert rig.chunk("r1")
    rig.forward()
    rig.insert("r1")
    assert rig.states("ab", "abcdef") == [L, L]
    assert [side.cache.state.next_number for side in rig.sides] == [2, 2]
    rig.tick()
    assert [side.tap.issued for side in rig.sides] == [[(2, None)], [(2, 0)]]
    rig.tick()
    assert rig.states("ab", "abcdef") == [N, B]
    assert rig.free_slots() == [60, 60]
    rig.tick()
    assert rig.states("ab", "abcdef") == [L, N]  # the child's slots are free: its parent is tried again
    assert not rig.local(1).called("submit_layers")[0][0]  # its layer went without it
    rig.finish("r1")
    rig.serve("r2", "abcdef")
    rig.settle()
    assert rig.states("ab", "abcdef") == [C, C]
    rig.rest()


def test_a_reservation_queues_no_copy() -> None:
    """R9: reserving takes slots, on every rank's ledger alike, and asks for no copy; the copies come with the layers."""
    rig = Rig()
    rig.hold()
    rig.begin("r1", "abc")
    assert rig.chunk("r1")
    assert rig.op("r1").state is R
    assert rig.free_slots() == [60, 62]
    for side in rig.sides:
        assert [call.name for call in side.transfer.calls if call.name != "status"] == ["reserve"]
        assert side.transfer.in_flight() == []
    rig.tick(3)
    assert rig.op("r1").state is R
    assert rig.cache.state.next_number == 0
    rig.layer(0, 0)
    assert rig.op("r1").state is L
    assert all(side.transfer.in_flight() == [rig.op("r1").key] for side in rig.sides)
    rig.rest()


def test_a_rank_that_owns_nothing_completes_once_at_submit() -> None:
    """R9: three of four ranks own nothing of a one-page extent: reserving succeeds and completes nothing, the first submission of
    many completes once, and every rank counts the same operation."""
    rig = real_rig(4, {})
    rig.begin("r1", "a")
    assert rig.chunk("r1")

    def completions() -> list[int]:
        return [side.transfer.counters.noop_completions for side in rig.sides]

    assert completions() == [0, 0, 0, 0]
    rig.tick(2)
    assert completions() == [0, 0, 0, 0]
    rig.layer(0, 0)
    assert completions() == [0, 1, 1, 1]
    rig.layer(0, 1, 2)
    rig.end_payload(0)
    rig.layer(1, 0)
    rig.end_payload(1)
    rig.end_forward()
    assert completions() == [0, 1, 1, 1]
    assert [side.cache.state.next_number for side in rig.sides] == [1, 1, 1, 1]
    rig.insert("r1")
    rig.sides[0].transfer.wait_backup(rig.node("a").backup.key)
    rig.tick(2)
    assert [side.node(rig.key("a")).backup.state for side in rig.sides] == [C] * 4
    assert [side.cache.counters.committed for side in rig.sides] == [1] * 4
    assert [side.transfer.counters.copies for side in rig.sides] == [5, 0, 0, 0]
    rig.rest()


def test_as_many_operations_on_every_rank_whoever_owns_them() -> None:
    """R9, R20: extents of one to five pages over four ranks take the same numbers and generations everywhere."""
    rig = Rig(cp_size=4, usable_pages=64)
    for index, text in enumerate(("a", "bc", "def", "ghij", "klmno")):
        rig.serve(f"r{index}", text)
    assert [side.cache.state.next_number for side in rig.sides] == [5] * 4
    assert [side.cache.state.next_generation for side in rig.sides] == [6] * 4
    assert [len(side.transfer.called("reserve")) for side in rig.sides] == [5] * 4
    rig.settle()
    assert [len(side.transfer.called("commit")) for side in rig.sides] == [5] * 4
    rig.rest()


def reserve_refused(rig: Rig) -> bool:
    rig.begin("r1", "abcdefgh")
    return rig.chunk("r1")


def reserve_empty(rig: Rig) -> bool:
    rig.begin("r1", "a", tail=1)
    return rig.chunk("r1", 1)  # no whole page yet


@pytest.mark.parametrize(("reserve", "answer"), [(reserve_refused, False), (reserve_empty, True)])
def test_a_reservation_answers_with_a_value(reserve: Callable[[Rig], bool], answer: bool) -> None:
    """R9: refused (no slots on some rank) and nothing to reserve are values, alike on all ranks; neither takes or queues anything."""
    rig = Rig(host_slots=6)
    assert reserve(rig) is answer
    assert rig.cache.state.requests["r1"].ops == []
    assert rig.free_slots() == [6, 6]
    assert all(not side.transfer.called("reserve") for side in rig.sides)
    rig.rest()
