"""Giving a pending backup up, at any point, and the one way in which its slots and its lock come back (R14, R18)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from cphicache.transfer.port import CopyStatus, OpKey
from tests.engine.rig import B, C, L, N, R, Rig


def test_with_a_layer_submitted_it_takes_the_next_number_at_once() -> None:
    """R14: an abort between two layer reports numbers the operation in that step, on every rank, ahead of its batch; its slots stay
    taken until that number is passed."""
    rig = Rig()
    rig.hold()
    for rid, text in (("r1", "ab"), ("r2", "cd")):
        rig.begin(rid, text)
        rig.chunk(rid)
    rig.layer(0, 0, 1)
    op = rig.op("r2")
    rig.abort("r2")
    assert (op.state, op.number) == (B, 0)
    assert [side.cache.state.next_number for side in rig.sides] == [1, 1]
    rig.forward()
    assert rig.op("r1").number == 1
    assert rig.free_slots() == [60, 60]
    rig.finish_all()
    rig.tick(2)
    assert op.state is N
    assert rig.free_slots() == [62, 62]
    rig.rest()


def test_no_layer_is_submitted_after_a_rollback() -> None:
    """R14: what is reported later of its batch goes without it, layers of both payloads and those that were never reported."""
    rig = Rig()
    for rid, text in (("r1", "ab"), ("r2", "cd")):
        rig.begin(rid, text)
        rig.chunk(rid)
    rig.layer(0, 0)
    key, other = rig.op("r2").key, rig.op("r1").key
    rig.abort("r2")
    done = len(rig.local(0).calls)
    rig.layer(0, 1)
    rig.end_payload(0)
    rig.end_payload(1)
    rig.end_forward()
    submitted = [call.args[0] for call in rig.local(0).calls[done:] if call.name == "submit_layers"]
    assert submitted == [(other,)] * 3
    assert rig.cache.counters.tokens_submitted == 8
    rig.settle()
    assert key in [args[0] for args in rig.local(0).called("release")]
    assert rig.cache.counters.tokens_wasted == 4
    rig.rest()


def reserved(rig: Rig) -> None:
    """Nothing was submitted."""


def agreed(rig: Rig) -> None:
    """All copies have ended on every rank."""
    rig.forward()
    rig.finish_all()
    rig.settle()


@pytest.mark.parametrize("before", [reserved, agreed])
def test_with_nothing_in_flight_anywhere_it_is_freed_in_that_step(before: Callable[[Rig], None]) -> None:
    """R14: a reservation with no layer submitted, or one that is agreed and not bound, gives its slots back at its abort."""
    rig = Rig()
    rig.hold()
    rig.begin("r1", "abcd")
    rig.chunk("r1")
    before(rig)
    op, numbers = rig.op("r1"), rig.cache.state.next_number
    assert rig.free_slots() == [60, 60]
    rig.abort("r1")
    assert op.state is N
    assert rig.free_slots() == [64, 64]
    assert rig.cache.state.next_number == numbers
    rig.rest()


def test_slots_come_back_at_the_agreed_tick_and_not_at_the_local_one() -> None:
    """R14, R20: ranks drain in different ticks; every ledger gets the slots back in the tick after the last one's sample."""
    rig = Rig(cp_size=4, usable_pages=32)
    rig.hold()
    rig.begin("r1", "abcd")
    rig.chunk("r1")
    rig.forward()
    rig.abort("r1")
    for rank in range(4):
        rig.tick()
        assert rig.free_slots() == [62] * 4
        rig.finish_all(rank)
        assert [side.transfer.free_slots() for side in rig.sides] == [{"target": 62, "draft": 62}] * 4
    rig.tick()
    assert rig.free_slots() == [62] * 4
    rig.tick()
    assert rig.free_slots() == [64] * 4
    assert [side.transfer.free_slots() for side in rig.sides] == [{"target": 64, "draft": 64}] * 4
    assert all(len(side.transfer.called("release")) == 1 for side in rig.sides)
    rig.rest()


def test_a_rolled_back_node_keeps_its_lock_until_it_has_drained() -> None:
    """R14: slots and lock go together, once, at the agreed drain; until then the node's device pages cannot be evicted."""
    rig = Rig()
    rig.hold()
    rig.serve("r1", "ab")
    key = rig.node("ab").backup.key
    rig.fail_copies(key, 1, drained=False)
    rig.tick(2)
    assert rig.state("ab") is B
    assert (rig.node("ab").lock_ref, rig.evict(100).num_tokens_evicted) == (1, 0)
    rig.finish_all()
    rig.tick()
    assert (rig.state("ab"), rig.node("ab").lock_ref) == (B, 1)
    rig.tick()
    assert (rig.state("ab"), rig.node("ab").lock_ref) == (N, 0)
    assert rig.free_slots() == [64, 64]
    rig.tick(3)
    assert rig.node("ab").lock_ref == 0
    assert rig.evict(100).num_tokens_dropped == 4
    rig.rest()


def abort(rig: Rig) -> None:
    rig.abort("r1", "abort")


def retract(rig: Rig) -> None:
    rig.abort("r1", "retract")


def reset(rig: Rig) -> None:
    rig.together(lambda side: side.cache.reset_backups())


@pytest.mark.parametrize("end", [abort, retract, reset])
@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("reports", range(8))
def test_it_may_end_between_any_two_layer_reports(end: Callable[[Rig], None], held: bool, reports: int) -> None:
    """R14, R18: abort, retraction and reset are legal before, between and after the reports of a batch (three target layers, two draft
    layers, two ends); what comes later is ignored, and nothing is left of the operation."""
    rig = Rig()
    rig.hold(held)
    rig.begin("r0", "xy")
    rig.begin("r1", "abcd")
    rig.chunk("r0")
    rig.chunk("r1")
    op = rig.op("r1")
    steps: list[Callable[[], None]] = [
        *(partial(rig.layer, 0, layer) for layer in range(3)),
        partial(rig.end_payload, 0),
        *(partial(rig.layer, 1, layer) for layer in range(2)),
        rig.end_forward,
    ]
    for index, step in enumerate(steps):
        if index == reports:
            end(rig)
        step()
    if reports == len(steps):
        end(rig)
    rig.finish_all()
    rig.settle()
    assert op.state is N
    counters = rig.cache.counters
    if end is not reset:
        rig.finish("r0")
        rig.settle()
        assert rig.state("xy") is C
    assert counters.tokens_submitted == counters.tokens_committed + counters.tokens_wasted
    rig.rest()


@pytest.mark.parametrize("draining", [False, True])
def test_a_reset_drains_what_is_pending_in_the_tree(draining: bool) -> None:
    """R18: with nodes in flight, reserved and rolling back, a reset ends them all through their release; nodes and requests stay, the
    committed ones stay committed."""
    rig = Rig()
    rig.serve("r0", "xy")
    rig.settle()
    rig.hold()
    rig.serve("r1", "ab")
    if draining:
        rig.fail_copies(rig.node("ab").backup.key, 0, drained=False)
        rig.tick(2)
        assert rig.state("ab") is B
    else:
        rig.tick()  # a reduction is outstanding
        assert rig.cache.state.outstanding
    rig.begin("r2", "pq")
    rig.chunk("r2")
    rig.insert("r2", chunked=True)
    assert rig.state("pq") is R
    reset(rig)
    assert rig.states("xy", "ab", "pq") == [C, N, N]
    assert rig.free_slots() == [62, 62]
    assert not rig.cache.state.pending
    assert rig.node("ab").lock_ref == 0
    rig.rest()


def test_numbers_and_generations_never_restart() -> None:
    """R18: a flush ends everything and begins nothing anew: numbers, generations and node ids go on, so nothing old can be taken for
    something new."""
    rig = Rig()
    rig.hold()
    rig.serve("r1", "ab")
    rig.serve("r2", "cd")
    old = rig.node("ab").backup.key
    rig.tick()
    rig.together(lambda side: side.cache.flush())
    assert rig.cache.state.tree.node_count == 0
    rig.serve("r3", "ab")
    new = rig.node("ab").backup
    assert (new.number, new.generation) == (2, 3)
    assert new.node_id > old.node
    rig.finish_all()
    rig.settle()
    assert rig.state("ab") is C
    rig.rest()


def test_a_stale_completion_is_counted_and_ignored() -> None:
    """R18: a completion of an older generation of the node, of a node that is over or of none at all changes nothing."""
    rig = Rig()
    rig.hold()
    rig.serve("r1", "ab")
    old = rig.node("ab").backup.key
    rig.fail_copies(old, 0)
    rig.finish_all()
    rig.tick(2)
    assert rig.state("ab") is N
    for side in rig.sides:
        side.cache.completion(old, CopyStatus(drained=True, failed=False))
    rig.serve("r2", "ab")
    new = rig.node("ab").backup
    assert (new.node_id, new.generation) == (old.node, old.generation + 1)
    for stale in (old, OpKey(old.node, 99), OpKey(99, 1)):
        for side in rig.sides:
            side.cache.completion(stale, CopyStatus(drained=True, failed=True))
    rig.check()
    assert rig.cache.counters.stale["stale_generation"] == 4
    noted = rig.events("stale_generation")
    assert [(event["node"], event["generation"]) for event in noted] == [old, old, (old.node, 99), (99, 1)]
    assert (new.state, new.done_here, new.failed_here) == (L, False, False)
    rig.tick(2)
    assert new.state is L
    rig.finish_all()
    rig.settle()
    assert new.state is C
    rig.rest()


def test_a_completion_that_comes_ahead_of_the_sample_is_part_of_it() -> None:
    """R18, R21: a completion of the current generation that is handed in counts for the next sample, once."""
    rig = Rig(cp_size=1)
    rig.hold()
    rig.serve("r1", "ab")
    key = rig.node("ab").backup.key
    rig.finish_all()
    for _ in range(2):
        rig.each(lambda side: side.cache.completion(key, CopyStatus(drained=True, failed=False)))
    assert len(rig.events("step", node=key.node, trigger="copy_done")) == 1
    rig.tick()
    assert rig.sides[0].tap.issued == [(1, None)]
    rig.tick()
    assert rig.state("ab") is C
    rig.rest()
