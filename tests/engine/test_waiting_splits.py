"""Requests whose match would divide a node with a pending backup: deferred, woken, bounded (R17)."""

from __future__ import annotations

import pytest

from cphicache.engine import Refusal
from cphicache.lifecycle import State
from tests.engine.rig import Rig
from tests.engine.rig_extra import back_up, fail_backup, frozen

N, R, L, C, B = (
    State.DEVICE_VALID_HOST_NONE,
    State.RESERVED,
    State.LAYERS_IN_FLIGHT,
    State.COMMITTED,
    State.ROLLED_BACK,
)


def in_flight(rig: Rig, rid: str = "first", text: str = "abcd") -> None:
    """Serve a request whose backup stays in flight."""
    rig.hold()
    rig.serve(rid, text)
    assert rig.state(text) is L


def in_state(rig: Rig, state: State) -> None:
    """A node ``abcd`` whose backup is pending in that state."""
    rig.hold()
    assert rig.begin("first", "abcd")
    rig.chunk("first")
    if state is R:  # inserted before its forward has stored a layer
        rig.insert("first")
    else:
        rig.forward()
        rig.insert("first")
        if state is B:
            rig.fail_copies(rig.node("abcd").backup.key, 1, drained=False)
            rig.tick(2)
    assert rig.state("abcd") is state


def end_wait_for(rig: Rig, rid: str) -> None:
    """Give a deferral up, as a scheduler does when the client has gone."""
    rig.abort(rid)
    assert not rig.cache.state.waiters


def test_only_the_request_that_needs_the_split_is_deferred() -> None:
    """R17: of a batch only the request that would divide the pending node is deferred; the tree is not changed and nobody waits."""
    rig = Rig()
    in_flight(rig)
    before = rig.cache.match_prefix(rig.key("abcd")), [side.census().nodes for side in rig.sides]
    assert not rig.begin("splits", "abxy")
    assert (rig.cache.match_prefix(rig.key("abcd")), [side.census().nodes for side in rig.sides]) == before
    assert rig.cache.is_waiting("splits")
    assert rig.begin("other", "pq")
    assert rig.begin("longer", "abcdz")
    for rid in ("other", "longer"):
        rig.chunk(rid)
    rig.forward()
    assert rig.finish("other")
    assert rig.finish("longer")
    assert rig.has("abcdz")
    assert not rig.cache.is_waiting("other")
    assert rig.cache.is_waiting("splits")
    assert all(not side.transfer.called("wait_backup") for side in rig.sides)
    assert rig.cache.counters.deferred_splits == 1
    rig.finish_all()
    rig.settle()
    end_wait_for(rig, "splits")
    rig.rest()


@pytest.mark.parametrize("state", [R, L, B])
def test_every_pending_state_defers(state: State) -> None:
    """R17: reserved, in flight and rolled back but not drained are all pending: each defers the split, until the backup has ended."""
    rig = Rig()
    in_state(rig, state)
    assert not rig.begin("splits", "abxy")
    assert rig.cache.is_waiting("splits")
    rig.tick()
    assert rig.cache.is_waiting("splits")
    if state is R:
        rig.forward()
    rig.finish_all()
    rig.settle()
    assert not rig.cache.is_waiting("splits")
    rig.hold(False)
    assert rig.begin("splits", "abxy")
    assert len(rig.row("splits")) == 2
    rig.chunk("splits")
    rig.forward()
    rig.finish("splits")
    assert rig.node("ab").length_pages == 2
    rig.tick()
    rig.settle()
    assert rig.states("ab", "abcd", "abxy") == [C, C, C]
    rig.rest()


def test_a_backup_that_waits_for_its_parent_is_pending_too() -> None:
    """R17: a backup that is agreed but whose parent is not committed defers a split until it commits behind its parent."""
    rig = Rig()
    rig.hold()
    assert rig.begin("first", "abcdef")
    rig.chunk("first", upto=4)
    rig.layer(0, 0)
    parent = rig.op("first")
    rig.batch += 1
    rig.insert("first", chunked=True)
    rig.chunk("first")
    rig.forward()
    rig.insert("first")
    rig.finish_copies(rig.node("abcdef").backup.key)
    rig.tick(2)
    child = rig.node("abcdef").backup
    assert (child.state, child.agreed, parent.state) == (L, True, L)
    assert not rig.begin("splits", "abcx")
    rig.batch = 1
    rig.layer(0, 1, 2)
    rig.layer(1, 0, 1)
    rig.end_forward()
    rig.batch = 3
    rig.finish_all()
    rig.settle()
    assert rig.states("ab", "abcdef") == [C, C]
    assert not rig.cache.is_waiting("splits")
    assert rig.begin("splits", "abcx")
    assert rig.row("splits") == rig.row("first")[:3]
    rig.rest()


@pytest.mark.parametrize("cp_size", [1, 4])
def test_commit_wakes_and_the_split_divides_the_metadata(cp_size: int) -> None:
    """R17, R3: the commit wakes who waits, and the split then divides slots and owners page by page, on every rank and in the ledger."""
    rig = Rig(cp_size=cp_size)
    in_flight(rig, text="abcde")
    assert not rig.begin("splits", "abcxy")
    free, owners = rig.free_slots(), rig.node("abcde").backup.owners
    rig.finish_all()
    rig.tick()
    assert rig.cache.is_waiting("splits"), "sampled in this tick, applied in the next"
    rig.tick()
    assert rig.state("abcde") is C
    assert not rig.cache.is_waiting("splits")
    tail = rig.node("abcde")
    assert rig.begin("splits", "abcxy")
    rig.chunk("splits")
    rig.forward()
    owners_of_own_extent = rig.op("splits").owners
    rig.finish("splits")
    head = rig.node("abc")
    assert rig.node("abcde") is tail, "the object stays as the tail"
    assert (head.backup.owners, tail.backup.owners) == (owners[:3], owners[3:])
    assert [len(owners_of_own_extent), head.length_pages, tail.length_pages] == [2, 3, 2]
    for side in rig.sides:
        assert side.transfer.called("split_node") == [(tail.id, head.id, 3)]
    assert rig.states("abc", "abcde") == [C, C]
    (told,) = rig.events("step", trigger="split")
    assert (told["node"], told["head"], told["head_slots"]) == (tail.id, head.id, 2 * 3)
    assert [a - b for a, b in zip(free, rig.free_slots(), strict=True)] == [
        2 * owners_of_own_extent.count(rank) for rank in range(cp_size)
    ]
    rig.finish_all()
    rig.settle()
    rig.rest()


def test_rollback_wakes_and_both_halves_are_backed_up_again() -> None:
    """R17, R15: a rollback wakes too, once drained; the request divides the node, and the halves are tried again, parents first."""
    rig = Rig()
    in_flight(rig)
    assert not rig.begin("splits", "abxy")
    key = rig.node("abcd").backup.key
    rig.fail_copies(key, 1, drained=False)
    rig.tick(2)
    assert rig.state("abcd") is B
    assert rig.cache.is_waiting("splits"), "not drained"
    rig.finish_copies(key)
    rig.settle()
    assert rig.state("abcd") is N
    assert not rig.cache.is_waiting("splits")
    rig.hold(False)
    assert rig.begin("splits", "abxy")
    rig.chunk("splits")
    rig.forward()
    rig.finish("splits")
    rig.tick()
    rig.settle()
    assert rig.states("ab", "abcd", "abxy") == [C, C, C]
    reserved = [(event["node"], event["reason"]) for event in rig.events("step", trigger="reserve", after="RESERVED")]
    assert reserved[1:] == [(rig.node("ab").id, "hit"), (rig.node("abxy").id, "hit"), (rig.node("abcd").id, "retry")]
    rig.rest()


def test_an_awaited_node_is_not_reserved_again_before_the_wait_is_over() -> None:
    """R17: while somebody waits to split it, a rolled-back node is refused on its next hit and not retried, whatever slots come free;
    it is tried again when the waiting request has gone on."""
    rig = Rig()
    in_flight(rig)
    assert not rig.begin("splits", "abxy")
    key = rig.node("abcd").backup.key
    fail_backup(rig, key, 0)
    rig.settle()
    assert rig.state("abcd") is N
    rig.hold(False)
    rig.serve("hits", "abcd")
    assert rig.cache.counters.refused[Refusal.SPLIT_AWAITED] == 1
    for rid in ("gone", "gone too"):  # each gives its slots back, which makes others worth another try
        assert rig.begin(rid, "pq")
        rig.chunk(rid)
        rig.abort(rid)
        rig.tick()
        assert rig.state("abcd") is N
    assert rig.begin("splits", "abxy")
    rig.chunk("splits")
    rig.forward()
    rig.insert("splits")
    rig.tick()
    rig.settle()
    assert rig.states("ab", "abcd") == [C, C]
    rig.rest()


def test_an_awaited_node_keeps_no_other_from_being_tried() -> None:
    """R17, R15: a round of retries passes over a node that somebody waits to split, and goes on to who was refused after it."""
    rig = Rig(cp_size=1, host_slots=8)
    rig.hold()
    for rid, text in {"first": "abcd", "small": "mn", "large": "pqrs"}.items():
        rig.serve(rid, text)
    assert not rig.begin("splits", "abxy")
    for text in ("abcd", "mn"):
        assert rig.states("mn", "pqrs") == [N if text == "abcd" else L, N]
        fail_backup(rig, rig.node(text).backup.key, 0)
        rig.tick(2)
    assert rig.states("abcd", "mn", "pqrs") == [N, N, L]
    rig.finish_all()
    rig.settle()
    end_wait_for(rig, "splits")
    rig.rest()


def test_an_aborted_wait_frees_the_node_for_its_retry() -> None:
    """R17, R15: a request that gives its wait up leaves no waiter behind, and the node that rolled back is tried again, undivided."""
    rig = Rig()
    in_flight(rig)
    assert not rig.begin("splits", "abxy")
    fail_backup(rig, rig.node("abcd").backup.key, 1)
    rig.settle()
    rig.hold(False)
    rig.tick(2)
    assert rig.state("abcd") is N
    end_wait_for(rig, "splits")
    assert not rig.cache.state.waiting_for
    rig.tick()
    rig.settle()
    assert rig.state("abcd") is C
    assert rig.node("abcd").length_pages == 4
    rig.rest()


@pytest.mark.parametrize("bound", [0, 1, 5])
def test_a_deferral_is_bounded(bound: int) -> None:
    """R17: past ``max_deferral_ticks`` the request goes on with its match cut back to the start of the pending node."""
    rig = Rig(max_deferral_ticks=bound)
    back_up(rig, "ab")
    in_flight(rig, text="abcd")
    for _ in range(bound):
        assert not rig.begin("splits", "abcx")
        assert rig.cache.is_waiting("splits")
        rig.tick()
    assert not rig.cache.is_waiting("splits")
    assert rig.state("abcd") is L
    assert rig.begin("splits", "abcx")
    assert rig.row("splits") == list(rig.node("ab").pages or ())
    assert rig.cache.counters.deferrals_expired == 1
    assert not rig.cache.state.waiters
    rig.chunk("splits")
    rig.forward()
    assert rig.insert("splits") is None, "its insert would divide the node as well"
    rig.finish_all()
    rig.settle()
    assert rig.insert("splits") is not None
    assert rig.states("abc", "abcd", "abcx") == [C, C, C]
    rig.rest()


def test_idle_ticks_hardly_count_for_a_deferral() -> None:
    """R17: of ticks in which nothing is computed, one in 64 counts for the bound on a deferral as well."""
    rig = Rig(max_deferral_ticks=2)
    in_flight(rig)
    assert not rig.begin("splits", "abxy")
    assert rig.cache.state.tick < 64
    while rig.cache.is_waiting("splits"):
        rig.each(lambda side: side.cache.begin_tick(idle=True))
        assert rig.cache.state.tick <= 128
    assert rig.cache.state.tick == 128, "the second tick that counts"
    assert rig.begin("splits", "abxy")
    assert rig.cache.counters.deferrals_expired == 1
    rig.rest()


def test_a_match_that_is_cut_back_ends_in_the_node_above() -> None:
    """R17, R24: past the bound the match is what it would be if the pending node were not there: nodes, pages and the node they end in."""
    rig = Rig(max_deferral_ticks=0)
    back_up(rig, "ab")
    whole = rig.match("ab")
    in_flight(rig, text="abcd")
    found = rig.each(lambda side: side.cache.prepare("splits", rig.key("abcx")))
    assert found == whole
    assert found.walk.last_device_node is rig.node("ab")
    rig.finish_all()
    rig.settle()
    rig.rest()


@pytest.mark.parametrize(("text", "tail"), [("ab", 0), ("ab", 1), ("abcd", 0), ("abcd", 1), ("abcdx", 0)])
def test_a_key_that_does_not_go_on_inside_the_node_never_splits(text: str, tail: int) -> None:
    """R17: a key that lies wholly inside a pending node, or goes on for less than a page, or behind its end, is neither deferred nor
    declined, and the node stays whole."""
    rig = Rig()
    in_flight(rig)
    node = rig.node("abcd")
    assert rig.begin("inside", text, tail)
    assert rig.row("inside") == list(node.pages or ())[: len(text)]
    rig.chunk("inside")
    rig.forward()
    assert rig.finish("inside")
    assert node.length_pages == 4
    assert rig.cache.counters.splits == rig.cache.counters.deferred_splits == rig.cache.counters.declined_inserts == 0
    rig.finish_all()
    rig.settle()
    assert rig.state("abcd") is C
    rig.rest()


def test_what_will_be_inserted_decides_not_what_is_matched() -> None:
    """R17: a request that matches less than it will insert (its last token is always computed) is deferred for what it inserts."""
    rig = Rig()
    in_flight(rig)
    whole = rig.key("abx")
    assert rig.each(lambda side: side.cache.prepare("splits", rig.key("ab"), whole)) is None
    assert rig.cache.is_waiting("splits")
    inside = rig.each(lambda side: side.cache.prepare("inside", rig.key("ab"), rig.key("abc")))
    assert inside is not None
    assert len(inside.device_pages) == 2
    rig.finish_all()
    rig.settle()
    assert rig.each(lambda side: side.cache.prepare("splits", rig.key("ab"), whole)) is not None
    end_wait_for(rig, "splits")
    rig.rest()


def test_a_match_that_ends_above_the_pending_node_is_not_cut_back() -> None:
    """R17, R24: past the bound, a request that matches less than it will insert keeps a match that ends inside a node in front of the
    pending one: the cut is made where that begins, and no sooner."""
    rig = Rig(max_deferral_ticks=0)
    back_up(rig, "abcd")
    in_flight(rig, text="abcdefgh")
    found = rig.each(lambda side: side.cache.prepare("splits", rig.key("abc"), rig.key("abcdefx")))
    assert rig.cache.counters.deferrals_expired == 1
    assert found == rig.match("abc")
    assert len(found.device_pages) == 3
    rig.finish_all()
    rig.settle()
    rig.rest()


def test_several_waiters_on_one_node() -> None:
    """R17: all who wait for a node are woken together; the first divides it, and the others go on with what is there then."""
    rig = Rig()
    in_flight(rig)
    texts = {"one": "abxy", "two": "abxz", "three": "apq"}
    for rid, text in texts.items():
        assert not rig.begin(rid, text)
    assert rig.cache.state.waiting_for == {rig.node("abcd").id: ["one", "two", "three"]}
    rig.finish_all()
    rig.settle()
    assert [rig.cache.is_waiting(rid) for rid in texts] == [False] * 3
    rig.hold(False)
    for rid, text in texts.items():
        assert rig.begin(rid, text)
        rig.chunk(rid)
    rig.forward()
    for rid in texts:
        rig.finish(rid)
    rig.settle()
    rig.tick(2)
    rig.settle()
    assert all(rig.has(text) for text in ("abcd", *texts.values()))
    assert not rig.cache.state.waiting_for
    rig.rest()


def test_a_request_may_wait_for_one_node_after_the_other() -> None:
    """R17: a woken request that meets another pending node waits for that one, with a bound of its own."""
    rig = Rig(max_deferral_ticks=4)
    in_flight(rig)
    assert not rig.begin("late", "abxy")
    assert not rig.begin("early", "abxz")
    rig.finish_all()
    rig.settle()
    assert rig.begin("early", "abxz")
    rig.chunk("early")
    rig.forward()
    rig.finish("early")
    assert rig.state("abxz") is L
    assert not rig.cache.is_waiting("late"), "woken, but not asked again"
    assert not rig.begin("late", "abxy")
    assert rig.cache.counters.deferred_splits == 2
    assert rig.cache.state.waiting_for == {rig.node("abxz").id: ["late"]}
    rig.tick(3)
    assert rig.cache.is_waiting("late")
    rig.finish_all()
    rig.tick(2)
    assert rig.begin("late", "abxy")
    assert len(rig.row("late")) == 3
    assert rig.cache.counters.deferrals_expired == 0
    rig.rest()


def test_waiters_on_several_nodes_are_woken_one_by_one() -> None:
    """R17: each waits for its own node: the end of one backup wakes those of that node and nobody else."""
    rig = Rig()
    in_flight(rig, "first", "abcd")
    in_flight(rig, "second", "pqrs")
    assert not rig.begin("one", "abx")
    assert not rig.begin("two", "pqx")
    rig.finish_copies(rig.node("abcd").backup.key)
    rig.tick(2)
    assert [rig.cache.is_waiting("one"), rig.cache.is_waiting("two")] == [False, True]
    assert rig.begin("one", "abx")
    assert not rig.begin("two", "pqx")
    rig.finish_all()
    rig.settle()
    assert rig.begin("two", "pqx")
    rig.rest()


def test_asking_again_while_deferred_changes_nothing() -> None:
    """R17: a deferred request that asks before it is woken stays one waiter with the bound it has."""
    rig = Rig()
    in_flight(rig)
    assert not rig.begin("splits", "abxy")
    before = frozen(rig)
    assert not rig.begin("splits", "abxy")
    assert frozen(rig) == before
    assert rig.cache.counters.deferred_splits == 1
    rig.finish_all()
    rig.settle()
    assert rig.begin("splits", "abxy")
    rig.rest()
