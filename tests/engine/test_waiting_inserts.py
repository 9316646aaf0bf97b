"""Inserts that would divide a node with a pending backup: declined while the request runs, parked when it has finished (R17)."""

from __future__ import annotations

from functools import partial

import pytest

from cphicache.engine import CacheMisuse
from cphicache.lifecycle import State
from tests.engine.rig import Rig
from tests.engine.rig_extra import back_up, fail_backup, frozen

N, L, C, B = State.DEVICE_VALID_HOST_NONE, State.LAYERS_IN_FLIGHT, State.COMMITTED, State.ROLLED_BACK


def together(rig: Rig, *texts: str) -> list[str]:
    """Requests that nobody could tell apart when they were admitted: one batch computes all of ``abcd`` and of these, and ``abcd`` is
    inserted first, so that the others' inserts would divide it while its backup is in flight. Returns the others' ids."""
    rig.hold()
    rids = {"first": "abcd"} | {f"r{index}": text for index, text in enumerate(texts)}
    for rid, text in rids.items():
        assert rig.begin(rid, text)
        rig.chunk(rid)
    rig.forward()
    assert rig.finish("first")
    assert rig.state("abcd") is L
    return list(rids)[1:]


def free_pages(rig: Rig) -> int:
    return sum(rig.cache.state.alloc.lane_free())


def test_a_running_request_keeps_its_row_and_tries_again() -> None:
    """R17: a running request's insert is declined without touching the tree; it keeps its own row, and its next insert point makes
    the insert, takes the tree's pages and frees its duplicates once."""
    rig = Rig()
    (rid,) = together(rig, "abxyz")
    row, free = list(rig.row(rid)), free_pages(rig)
    nodes = [side.census().nodes for side in rig.sides]
    assert rig.insert(rid) is None
    assert (rig.row(rid), free_pages(rig)) == (row, free)
    assert [side.census().nodes for side in rig.sides] == nodes
    assert rig.insert(rid) is None, "still pending"
    assert rig.cache.counters.declined_inserts == 2
    node = rig.node("abcd")
    assert [(e["node"], e["reason"]) for e in rig.events("insert_declined")] == [(node.id, "pending_node")] * 2
    assert not rig.cache.state.waiters, "a running request waits for nobody"
    key = rig.stored_key(rid)
    assert rig.each(lambda side: side.cache.is_declined(key)) is True
    assert rig.cache.counters.declined_inserts == 2, "asking is no try"
    rig.finish_all()
    rig.settle()
    assert rig.each(lambda side: side.cache.is_declined(key)) is False
    assert rig.insert(rid) is not None
    assert rig.row(rid) == [*(rig.node("ab").pages or ()), *row[2:]]
    assert free_pages(rig) == free + 2
    assert rig.cache.counters.duplicate_tokens == 4
    assert rig.states("ab", "abcd", "abxyz") == [C, C, C]
    assert rig.node("abxyz").length_pages == 3, "its reservation lost the part that is in the tree, the rest became one node"
    rig.rest()


def test_a_declined_chunk_is_made_up_for_by_the_next_one() -> None:
    """R17, R12: a chunk whose insert was declined is inserted with the next; both chunks' reservations become a node each."""
    rig = Rig()
    rig.hold()
    assert rig.begin("first", "abcd")
    rig.chunk("first")
    assert rig.begin("long", "abxyzw")
    rig.chunk("long", upto=8)
    rig.forward()
    rig.finish("first")
    assert rig.insert("long", chunked=True) is None
    assert rig.chunk("long")
    rig.forward()
    assert rig.insert("long") is None
    rig.finish_all()
    rig.settle()
    assert rig.insert("long") is not None
    assert rig.states("ab", "abxy", "abxyzw") == [C, C, C]
    rig.rest()


@pytest.mark.parametrize("ends", ["commits", "rolls back"])
def test_a_finished_request_is_parked_until_the_backup_ends(ends: str) -> None:
    """R17, R30: a finished request's insert is parked, its pages are accounted as parked, and it is inserted when the backup has ended,
    whether that committed or rolled back."""
    rig = Rig()
    (rid,) = together(rig, "abxyz")
    free = free_pages(rig)
    assert not rig.finish(rid)
    census = rig.sides[0].census()
    (parked,) = census.parked
    assert (parked.rid, len(parked.row), parked.protected_pages) == (rid, 5, 0)
    assert not census.requests
    assert free_pages(rig) == free
    rig.tick(2)
    assert rig.tick().inserted == []
    key = rig.node("abcd").backup.key
    if ends == "commits":
        rig.finish_all()
    else:
        fail_backup(rig, key, 1)
        rig.tick()
        assert rig.state("abcd") is L, "sampled, not yet applied"
        assert rig.cache.state.parked
        rig.finish_all()
    reports = [rig.tick(), rig.tick()]
    assert [rid for report in reports for rid in report.inserted] == [rid]
    assert not rig.cache.state.parked
    assert not rig.cache.state.requests
    assert not rig.cache.state.waiters
    assert rig.has("abxyz")
    assert free_pages(rig) == free + 2
    assert rig.cache.counters.parked_inserts == 1
    assert rig.cache.counters.parked_dropped == 0
    rig.hold(False)
    rig.finish_all()
    rig.settle()
    rig.tick()
    rig.settle()
    assert rig.states("ab", "abcd") == [C, C]
    rig.rest()


def test_what_is_left_of_the_row_is_freed_at_once() -> None:
    """R17, R30: when a finished request is parked, the pages behind its last whole page are free at once; the others are its own."""
    rig = Rig()
    rig.hold()
    assert rig.begin("first", "abcd")
    rig.chunk("first")
    assert rig.begin("tail", "abxy", tail=1)
    rig.chunk("tail")
    rig.forward()
    rig.finish("first")
    free = free_pages(rig)
    assert not rig.finish("tail")
    assert free_pages(rig) == free + 1
    rig.finish_all()
    rig.settle()
    assert rig.has("abxy")
    rig.rest()


def test_parked_inserts_go_oldest_first() -> None:
    """R17: when the backup ends, parked inserts are made in the order in which their requests finished, in that same tick."""
    rig = Rig()
    one, two, three = together(rig, "abxy", "abxz", "apqr")
    for rid in (two, three, one):
        assert not rig.finish(rid)
    rig.finish_all()
    rig.tick()
    report = rig.tick()
    assert (report.inserted[:2], report.dropped) == ([two, three], [])
    inserted = report.inserted + rig.tick().inserted + rig.tick().inserted
    assert inserted == [two, three, one], "the last one waits for the node that the first has made"
    rig.settle()
    assert all(rig.has(text) for text in ("abcd", "abxy", "abxz", "apqr"))
    rig.rest()


def test_a_parked_insert_that_waits_on_keeps_no_other() -> None:
    """R17: the younger of two parked inserts is made as soon as its own wait is over, though the older one's is not."""
    rig = Rig()
    rig.hold()
    for rid, text in {"one": "mnop", "two": "abcd", "older": "abxy", "younger": "mnxy"}.items():
        assert rig.begin(rid, text)
        rig.chunk(rid)
    rig.forward()
    assert [rig.finish(rid) for rid in ("one", "two", "older", "younger")] == [True, True, False, False]
    rig.finish_copies(rig.node("mnop").backup.key)
    rig.tick()
    assert rig.tick().inserted == ["younger"]
    assert list(rig.cache.state.parked) == ["older"]
    rig.finish_all()
    rig.settle()
    assert rig.has("abxy")
    rig.rest()


def test_parked_then_deferred_then_retries() -> None:
    """R17: when a backup ends, parked inserts go first, then the deferred requests, and only then the node is tried again: neither
    half of what the parked insert has divided is reserved before the deferred request has divided it, too."""
    rig = Rig()
    (rid,) = together(rig, "abxy")
    assert not rig.finish(rid)
    assert not rig.begin("deferred", "aq")
    fail_backup(rig, rig.node("abcd").backup.key, 1)
    rig.finish_all()
    rig.hold(False)
    rig.tick()
    assert rig.tick().inserted == [rid]
    rig.tick(2)
    assert rig.states("ab", "abcd") == [N, N]
    assert not rig.cache.is_waiting("deferred")
    assert rig.begin("deferred", "aq")
    rig.chunk("deferred")
    rig.forward()
    assert rig.insert("deferred") is not None
    rig.tick()
    rig.settle()
    assert rig.states("a", "ab", "abcd", "aq") == [C] * 4
    rig.serve("hits", "abxy")
    rig.settle()
    assert rig.state("abxy") is C
    assert not rig.cache.state.waiting_for
    rig.rest()


@pytest.mark.parametrize("bound", [0, 2])
def test_a_parked_insert_is_bounded_and_then_dropped(bound: int) -> None:
    """R17: past ``max_deferral_ticks`` a parked insert is dropped: its pages are free, its reservation rolls back, its lock is gone."""
    rig = Rig(max_deferral_ticks=bound)
    (rid,) = together(rig, "abxyz")
    free = free_pages(rig)
    op = rig.op(rid)
    assert not rig.finish(rid)
    for _ in range(bound - 1):
        assert rig.tick().dropped == []
    assert rig.tick().dropped == [rid]
    assert op.state is B
    assert free_pages(rig) == free + 5
    assert not rig.cache.state.parked
    assert not rig.cache.state.requests
    assert not rig.cache.state.waiters
    assert rig.cache.counters.parked_dropped == 1
    assert [e["reason"] for e in rig.events("parked_dropped", request=rid)] == ["waited_too_long"]
    rig.finish_all()
    rig.settle()
    assert rig.states("abcd") == [C]
    assert rig.node("abcd").length_pages == 4
    rig.rest()


def test_a_parked_insert_that_waits_for_another_node_keeps_its_bound() -> None:
    """R17: a parked insert that meets a second pending node waits for that one, but not longer than it was allowed to in all."""
    rig = Rig(max_deferral_ticks=6)
    one, two = together(rig, "abxy", "abxz")
    assert not rig.finish(one)
    assert not rig.finish(two)
    deadline = rig.cache.state.parked[two].deadline_tick
    # Only the first node's backup ends: the one that `one` becomes stays in flight.
    rig.finish_copies(rig.node("abcd").backup.key)
    rig.tick(2)
    assert not rig.cache.state.parked.get(one)
    waiter = rig.cache.state.waiters[two]
    assert waiter.node_id == rig.node("abxy").id
    assert waiter.deadline_tick == rig.cache.state.parked[two].deadline_tick == deadline
    while rig.cache.state.parked:
        report = rig.tick()
    assert (report.dropped, report.tick) == ([two], deadline)
    rig.finish_all()
    rig.settle()
    assert rig.has("abxy")
    rig.rest()


def test_ticks_in_which_nothing_is_computed_hardly_count_for_the_bound() -> None:
    """R17: of idle ticks, which take next to no time, one in 64 counts for the bound on a wait; it ends all the same."""
    rig = Rig(max_deferral_ticks=2)
    _, two = together(rig, "abxy", "abxz")
    assert not rig.finish(two)
    assert rig.cache.state.tick < 64
    while two in rig.cache.state.parked:
        rig.each(lambda side: side.cache.begin_tick(idle=True))
        assert rig.cache.state.tick <= 128
    assert rig.cache.state.tick == 128, "the second tick that counts"
    rig.finish_all()
    rig.settle()
    rig.rest()


def test_an_abort_drops_a_parked_insert() -> None:
    """R17, R14: aborting a request whose insert is parked drops the insert: pages free, reservation rolled back, nobody waits."""
    rig = Rig()
    (rid,) = together(rig, "abxyz")
    free, op = free_pages(rig), rig.op(rid)
    assert not rig.finish(rid)
    rig.abort(rid)
    assert op.state is B
    assert free_pages(rig) == free + 5
    assert not rig.cache.state.parked
    assert not rig.cache.state.waiters
    assert not rig.cache.state.waiting_for
    rig.finish_all()
    assert rig.tick(3).inserted == []
    assert not rig.has("abxyz")
    rig.rest()


def test_a_parked_insert_keeps_its_prefix_and_its_lock() -> None:
    """R17, R30: while it is parked a request goes on locking the prefix that its row begins with; only its own pages are parked."""
    rig = Rig(max_deferral_ticks=8)
    back_up(rig, "mn")
    rig.hold()
    for rid, text in {"first": "mnabcd", "second": "mnabxy"}.items():
        assert rig.begin(rid, text)
        rig.chunk(rid)
    rig.forward()
    rig.finish("first")
    assert not rig.finish("second")
    (parked,) = rig.sides[0].census().parked
    assert parked.protected_pages == 2
    assert parked.row[:2] == tuple(rig.node("mn").pages or ())
    rig.evict(1000)
    assert rig.node("mn").pages is not None
    rig.finish_all()
    rig.settle()
    assert rig.states("mnab", "mnabxy") == [C, C]
    rig.rest()


def test_a_binding_that_would_divide_a_pending_node_is_declined_too() -> None:
    """R17, R12: a reservation whose extent begins inside a pending node is bound only when that has ended; meanwhile it is copied,
    agreed and stays in flight, and it is bound to one node under the divided parent."""
    rig = Rig()
    (rid,) = together(rig, "abxyz")
    op = rig.op(rid)
    assert rig.insert(rid) is None
    rig.finish_copies(op.key)
    rig.tick(2)
    assert (op.state, op.agreed) == (L, False), "the first node's number comes before"
    rig.finish_copies(rig.node("abcd").backup.key)
    rig.tick(2)
    assert (op.state, op.agreed, op.bound) == (L, True, False)
    assert rig.insert(rid) is not None
    assert (op.state, op.bound, op.node) == (C, True, rig.node("abxyz"))
    assert rig.cache.counters.tokens_wasted == 4
    rig.rest()


def test_parked_inserts_go_before_retries() -> None:
    """R17, R15: in the tick in which a backup ends, a parked insert is made, and what it hits is backed up, before a node that was
    refused for want of slots is tried again with those that came free."""
    rig = Rig(host_slots=8)
    (rid,) = together(rig, "abxy")
    assert not rig.finish(rid)
    rig.serve("refused", "mn")
    assert rig.state("mn") is N
    fail_backup(rig, rig.node("abcd").backup.key, 1)
    rig.tick()
    seen = len(rig.sides[0].log.events)
    assert rig.tick().inserted == [rid]
    reserved = [(e["node"], e["reason"]) for e in rig.sides[0].log.events[seen:] if e.get("after") == "RESERVED"]
    assert reserved[0] == (rig.node("ab").id, "hit")
    assert (rig.node("mn").id, "retry") in reserved[1:]
    rig.hold(False)
    rig.finish_all()
    rig.settle()
    rig.rest()


def test_both_halves_of_a_refused_node_are_tried_again() -> None:
    """R17, R15: a split of a node that waits to be tried again leaves neither half out: both are, parents first, when slots come free."""
    rig = Rig(host_slots=8)
    rig.hold()
    rig.serve("full", "mnopqrst")
    rig.serve("refused", "abcd")
    assert rig.begin("splits", "abxyz")
    rig.chunk("splits", upto=6)
    rig.forward()
    assert rig.insert("splits", chunked=True) is not None, "no hit"
    assert rig.states("ab", "abcd") == [N, N]
    rig.hold(False)
    fail_backup(rig, rig.node("mnopqrst").backup.key, 0)
    rig.tick(2)
    retried = [e["node"] for e in rig.events("step", after="RESERVED", reason="retry")]
    assert retried[:2] == [rig.node("ab").id, rig.node("abcd").id]
    rig.settle()
    assert rig.states("ab", "abcd") == [C, C]
    rig.rest()


def test_who_waited_for_a_node_that_was_divided_waits_for_neither_half_in_the_end() -> None:
    """R17, R15: two requests wait for a node, which somebody else divides when its backup has rolled back; when both have gone, both halves
    are backed up."""
    rig = Rig()
    (rid,) = together(rig, "abxy")
    assert not rig.begin("one", "aq")
    assert not rig.begin("two", "ar")
    fail_backup(rig, rig.node("abcd").backup.key, 1)
    rig.finish_all()
    rig.hold(False)
    rig.tick(2)
    assert rig.insert(rid, chunked=True)
    rig.abort("one")
    rig.tick()
    assert rig.states("ab", "abcd") == [N, N], "the other may still divide them"
    rig.abort("two")
    assert not rig.cache.state.waiting_for
    rig.tick()
    rig.settle()
    assert rig.states("ab", "abcd") == [C, C]
    rig.rest()


@pytest.mark.parametrize("ends", [False, True])
def test_a_chunk_that_was_reserved_must_be_inserted_whole(*, ends: bool) -> None:
    """R12: an insert that ends before a reservation of its request does is the caller's mistake: one clear line, nothing changed, and
    the whole can be inserted afterwards."""
    rig = Rig()
    rig.hold()
    assert rig.begin("r", "abcd")
    rig.chunk("r", 4)
    rig.forward()
    rig.chunk("r")
    before = frozen(rig)
    insert = rig.cache.finish if ends else partial(rig.cache.insert_unfinished, chunked=True)
    with pytest.raises(
        CacheMisuse, match="insert of 2 pages of request 'r', for which pages up to 4 are reserved: insert a chunk before"
    ):
        insert("r", rig.key("ab"), rig.row("r"))
    assert frozen(rig) == before
    rig.forward()
    assert rig.finish("r")
    assert rig.states("ab", "abcd") == [L, L]
    rig.rest()


def test_a_chunk_whose_reservation_was_lost_does_not_keep_the_one_before_it_out() -> None:
    """R12, R14: the backup of a chunk fails, and that of the next one is lost with it and drains: the first chunk can be inserted alone."""
    rig = Rig()
    rig.hold()
    assert rig.begin("r", "abcd")
    rig.chunk("r", 4)
    rig.forward()
    rig.chunk("r")
    rig.layer(0, 0)
    first, second = rig.op("r", 0), rig.op("r", 1)
    rig.fail_copies(first.key, 0, drained=False)
    rig.tick(2)
    assert (first.state, second.state, second.end_page) == (B, B, 4)
    rig.prompts["r"].upto = 4
    assert rig.insert("r", chunked=True) == rig.row("r")[:2]
    rig.prompts["r"].upto = 8
    rig.forward()
    assert rig.finish("r")
    rig.finish_all()
    rig.settle()
    assert rig.has("abcd")
    rig.rest()
