"""What is reserved again, and how often: after a commit, behind a node that is matched in part, and when a request ends in its forward."""

from __future__ import annotations

from tests.engine.rig import B, C, L, N, R, Rig
from tests.engine.rig_extra import back_up, fail_backup, to_host


def test_a_committed_node_may_be_tried_as_often_as_a_new_one() -> None:
    """R15: the tries that a backup took until it was committed do not count when its host copy has been taken and it is refused anew."""
    rig = Rig(cp_size=1, host_slots=4, max_retries=1, reclaim_device_valid=True)
    rig.hold()
    rig.serve("full", "xy")
    rig.serve("waits", "ab")
    assert rig.state("ab") is N
    fail_backup(rig, rig.node("xy").backup.key, 0)
    rig.hold(False)
    rig.tick(2)
    rig.settle()
    assert (rig.state("ab"), rig.cache.counters.retries) == (C, 1)
    rig.tick(2)
    rig.evict(4)
    assert not rig.has("xy"), "which waited for slots, too"
    rig.hold()
    assert rig.begin("takes it", "cd")
    assert rig.chunk("takes it")
    rig.serve("hits", "ab")
    assert rig.state("ab") is N
    rig.hold(False)
    rig.abort("takes it")
    rig.end_forward()
    rig.finish_all()
    rig.settle()
    rig.tick()
    rig.settle()
    assert rig.state("ab") is C
    rig.rest()


def test_the_first_slots_that_ever_come_free_are_tried_for_in_the_next_tick() -> None:
    """R15: a node that was refused is tried again when slots came free since, also when they are the first, and no tick came between."""
    rig = Rig(cp_size=1, host_slots=4)
    assert rig.begin("full", "ab")
    assert rig.chunk("full")
    assert rig.begin("waits", "xy")
    rig.grow("waits")
    assert rig.insert("waits")
    assert rig.state("xy") is N
    rig.abort("full")
    rig.tick()
    assert (rig.state("xy"), rig.cache.counters.retries) == (L, 1)
    rig.settle()
    rig.rest()


def test_a_round_of_retries_ends_with_the_first_that_finds_no_room() -> None:
    """R15: who stands behind a node that is refused once more is tried when further slots come free, not before, and comes first then."""
    rig = Rig(cp_size=1, host_slots=8)
    for rid, text in {"one": "ab", "two": "cd"}.items():
        assert rig.begin(rid, text)
        assert rig.chunk(rid)
    for rid, text in {"large": "mnop", "small": "x"}.items():
        assert rig.begin(rid, text)
        rig.grow(rid)
        assert rig.insert(rid)
    rig.abort("two")
    rig.tick(2)
    assert (rig.states("mnop", "x"), rig.cache.counters.retries, rig.free_slots()) == ([N, N], 1, [4])
    rig.abort("one")
    rig.tick()
    assert (rig.states("mnop", "x"), rig.cache.counters.retries, rig.free_slots()) == ([N, L], 3, [6])
    rig.settle()
    rig.rest()


def test_a_node_is_tried_once_a_tick() -> None:
    """R15, R17: what a parked insert has hit, and was refused, is not tried again in that tick, though the end of another one has made room
    for it since, but in the next."""
    rig = Rig(cp_size=1, host_slots=24, max_deferral_ticks=2)
    rig.hold()
    for rid, text in {"one": "abcd", "two": "mnop", "inserted": "abxy", "dropped": "mnqr"}.items():
        assert rig.begin(rid, text)
    for rid in ("one", "two"):
        assert rig.chunk(rid)
    rig.forward()
    rig.grow("inserted")
    assert rig.chunk("dropped")
    assert [rig.finish(rid) for rid in ("one", "two", "inserted", "dropped")] == [True, True, False, False]
    rig.finish_copies(rig.node("abcd").backup.key)
    rig.tick()
    report = rig.tick()
    assert (report.inserted, report.dropped) == (["inserted"], ["dropped"])
    assert (rig.state("abxy"), rig.free_slots(), rig.cache.counters.retries) == (N, [8], 0)
    rig.tick()
    assert (rig.state("abxy"), rig.cache.counters.retries) == (L, 1)
    rig.finish_all()
    rig.settle()
    rig.rest()


def test_the_log_names_the_request_of_an_extent_and_of_no_node() -> None:
    """R36: a reservation before a forward is told with its request; when the node that it became is backed up again, nobody is named."""
    rig = Rig()
    rig.hold()
    rig.serve("r", "ab")
    fail_backup(rig, rig.node("ab").backup.key, 0)
    rig.tick(2)
    rig.serve("hits", "ab")
    told = [(event["reason"], event.get("request")) for event in rig.events("step", trigger="reserve", node=rig.node("ab").id)]
    assert told == [("before_forward", "r"), ("hit", None)]
    rig.finish_all()
    rig.settle()
    rig.rest()


def test_a_committed_node_has_its_pages_once() -> None:
    """R12: the pages that a copy reads are listed for it as long as it is in flight; after that the node alone has them."""
    rig = Rig(ranks=[0])
    rig.hold()
    rig.serve("r", "ab")
    node = rig.node("ab")
    assert (rig.state("ab"), node.backup.pages) == (L, node.pages)
    rig.finish_all()
    rig.settle()
    assert (rig.state("ab"), node.backup.pages) == (C, [])
    rig.rest()


def test_only_what_is_beyond_a_partly_matched_node_is_reserved() -> None:
    """R12, R24: behind whole nodes and a last one that is matched in part, a reservation begins at the first page that is nowhere."""
    rig = Rig()
    back_up(rig, "abc", "abcde")
    assert rig.begin("r", "abcdx")
    assert rig.chunk("r")
    op = rig.op("r")
    assert (op.start_page, len(op.pages)) == (4, 1)
    assert rig.free_slots() == [64 - 2 * 3 - 2, 64 - 2 * 2]
    rig.rest()


def test_a_reservation_follows_the_one_before_it_also_when_the_tree_has_that_kv() -> None:
    """R12, R15: of two equal prompts the one that has inserted first is in the tree; the other's next chunk still hangs on its own first
    one, and is lost with it."""
    rig = Rig()
    rig.hold()
    for rid in ("one", "two"):
        assert rig.begin(rid, "abcd")
        rig.chunk(rid, 4)
    rig.forward()
    assert rig.insert("one", chunked=True)
    assert rig.chunk("two")
    first, second = rig.cache.state.requests["two"].ops
    assert (second.start_page, second.state) == (2, R)
    rig.fail_copies(first.key, 1, drained=False)
    rig.tick(2)
    assert (first.state, second.state, rig.state("ab")) == (B, N, L)
    rig.rest()


def test_a_reservation_follows_the_tree_where_that_has_got_further() -> None:
    """R12: another request has inserted more of the same prompt meanwhile: the next chunk is reserved behind that, and what it has of it
    in flight is a duplicate."""
    rig = Rig()
    assert rig.begin("one", "abcdef")
    rig.chunk("one", 4)
    rig.forward()
    rig.serve("two", "abcd")
    assert rig.chunk("one")
    first, second = rig.cache.state.requests["one"].ops
    assert (first.end_page, second.start_page, len(second.pages)) == (2, 4, 2)
    assert second.parent is rig.node("abcd").backup
    rig.forward()
    assert rig.finish("one")
    rig.settle()
    assert rig.states("abcd", "abcdef") == [C, C]
    assert rig.free_slots() == [64 - 6, 64 - 6]
    rig.rest()


def test_a_forward_waits_on_for_a_request_that_ended_in_it() -> None:
    """R25: what a request that was aborted inside a forward reads is read by that forward to the end, so that the layers are waited for;
    another batch, none, and one that reads no load-back do not wait."""
    rig = Rig()
    to_host(rig, "abcd")
    rig.hold()
    assert rig.begin("reads", "abcdx")
    rig.chunk("reads")
    rig.start_loads()
    rig.abort("reads")
    for batch in (rig.batch, rig.batch + 1):
        for layer in (0, 2):
            rig.each(lambda side, batch=batch, layer=layer: side.cache.wait_layer(batch, "target", layer))  # type: ignore[misc]
    assert [side.transfer.called("wait_layer") for side in rig.sides] == [[(0, "target", 0), (0, "target", 2)]] * 2
    rig.end_forward()
    rig.finish_all()
    rig.settle()
    rig.rest()


def test_a_duplicate_of_one_page_gives_back_what_one_rank_has_of_it() -> None:
    """R12, R30: of two pages in flight the first turns out to be in the tree: its slots, which one rank alone has, are kept until the
    copies have ended, and then they are free."""
    rig = Rig()
    rig.hold()
    for rid, text, owners in (("one", "a", [0]), ("two", "ab", [0, 1])):
        assert rig.begin(rid, text)
        rig.chunk(rid, owners=owners)
    rig.forward()
    assert rig.free_slots() == [60, 62]
    assert rig.finish("one")
    assert rig.finish("two")
    assert rig.free_slots() == [60, 62], "a copy may still write there"
    rig.finish_all()
    rig.settle()
    assert rig.states("a", "ab") == [C, C]
    assert rig.free_slots() == [62, 62]
    rig.rest()


def test_what_was_lost_before_its_insert_is_not_nothing_to_reserve() -> None:
    """R12, R15: asked again for KV whose reservation has rolled back, the answer is a refusal, since nothing backs it up now; its insert
    does."""
    rig = Rig()
    rig.hold()
    assert rig.begin("r", "ab")
    assert rig.chunk("r")
    rig.forward()
    op = rig.op("r")
    fail_backup(rig, op.key, 0)
    rig.tick(2)
    rig.finish_all()
    rig.settle()
    assert op.state is N
    assert rig.reserve("r") is False
    assert rig.cache.counters.refused == {"parent_not_backed": 1}
    rig.hold(False)
    rig.forward()
    rig.finish("r")
    rig.settle()
    assert rig.state("ab") is C
    rig.rest()
