"""Where a reservation before the forward starts and ends, and what becomes of the part that somebody else inserted meanwhile (R12)."""

from __future__ import annotations

import pytest

from tests.engine.rig import B, C, L, N, R, Rig
from tests.engine.rig_extra import fail_backup


def extent(rig: Rig, rid: str, index: int = -1) -> tuple[int, int]:
    op = rig.op(rid, index)
    assert op.pages == rig.row(rid)[op.start_page : op.end_page]
    return op.start_page, op.end_page


def assert_tokens(rig: Rig, *, committed: int, wasted: int) -> None:
    """Everything has ended, and submitted = committed + wasted with these parts."""
    rig.settle()
    counters = rig.cache.counters
    assert (counters.tokens_committed, counters.tokens_wasted) == (committed, wasted)
    assert counters.tokens_submitted == committed + wasted


def test_an_extent_starts_after_the_last_committed_node() -> None:
    """R12: what is committed is not copied again; the extent is the rest of the prompt, up to the last whole page."""
    rig = Rig()
    rig.serve("r1", "ab")
    rig.settle()
    rig.begin("r2", "abcde", tail=1)
    rig.chunk("r2")
    assert extent(rig, "r2") == (2, 5)
    rig.forward()
    rig.finish("r2")
    assert_tokens(rig, committed=10, wasted=0)
    rig.rest()


def test_an_extent_starts_after_the_last_pending_node() -> None:
    """R12, R15: what is in flight counts like what is committed, and the extent overlaps with it."""
    rig = Rig()
    rig.hold()
    rig.serve("r1", "ab")
    rig.serve("r2", "abcd")
    assert rig.states("ab", "abcd") == [L, L]
    rig.begin("r3", "abcdef")
    rig.chunk("r3")
    assert extent(rig, "r3") == (4, 6)
    rig.forward()
    rig.finish("r3")
    assert rig.states("ab", "abcd", "abcdef") == [L, L, L]
    rig.finish_all()
    assert_tokens(rig, committed=12, wasted=0)
    rig.rest()


def test_host_only_nodes_count_although_they_are_computed_again() -> None:
    """R12: the uncut match says where the extent starts: a host-only prefix that is not loaded back is recomputed, adopted by its node,
    and not backed up twice."""
    rig = Rig(load_back_threshold=100)
    rig.serve("r1", "ab")
    rig.settle()
    rig.evict(100)
    rig.begin("r2", "abcd")
    assert rig.row("r2") == []
    rig.chunk("r2")
    assert extent(rig, "r2") == (2, 4)
    assert rig.node("ab").host_ref == 1  # the extent hangs on it
    rig.forward()
    rig.finish("r2")
    assert rig.node("ab").host_ref == 0
    assert rig.cache.counters.adopted_tokens == 4
    assert_tokens(rig, committed=8, wasted=0)
    rig.rest()


def test_nothing_is_reserved_behind_a_node_without_backup() -> None:
    """R12, R15: a prefix that is neither committed nor pending ends the extent before it starts; its hit backs up both, parents first."""
    rig = Rig(host_slots=8)
    rig.hold()
    rig.serve("r0", "stuvwxyz")
    rig.serve("r1", "ab")  # no slots
    assert rig.state("ab") is N
    rig.begin("r2", "abcd")
    assert rig.chunk("r2") is False
    assert rig.cache.counters.refused["parent_not_backed"] == 1
    assert rig.cache.state.requests["r2"].ops == []
    rig.rest()


def test_chunk_two_is_in_flight_while_chunk_one_still_is() -> None:
    """R12, R15: each chunk is reserved behind the one before and copied while that is in flight; they commit in order."""
    rig = Rig()
    rig.hold()
    rig.begin("r1", "abcdef")
    rig.chunk("r1", 4)
    first = rig.op("r1")
    assert extent(rig, "r1") == (0, 2)
    rig.forward()
    rig.insert("r1", chunked=True)
    assert rig.chunk("r1", 8)
    second = rig.op("r1")
    assert extent(rig, "r1") == (2, 4)
    rig.layer(0, 0)
    assert (first.state, second.state) == (L, L)
    assert rig.local(0).in_flight() == [first.key, second.key]
    rig.forward()
    rig.insert("r1", chunked=True)
    rig.chunk("r1")
    rig.forward()
    rig.finish("r1")
    assert rig.states("ab", "abcd", "abcdef") == [L, L, L]
    rig.finish_copies(second.key)
    rig.tick(3)
    assert rig.states("ab", "abcd", "abcdef") == [L, L, L]
    rig.finish_copies(first.key)
    rig.tick(2)
    assert rig.states("ab", "abcd", "abcdef") == [C, C, L]
    rig.finish_all()
    assert_tokens(rig, committed=12, wasted=0)
    rig.rest()


def test_the_next_reservation_starts_where_the_last_one_ended() -> None:
    """R12: with no insert in between (it was declined), chunk two is reserved at the end of chunk one's reservation, and one insert
    binds both, one node for each."""
    rig = Rig()
    rig.begin("r1", "abcdef")
    rig.chunk("r1", 4)
    rig.forward()
    rig.chunk("r1", 6)
    rig.forward()
    rig.chunk("r1")
    rig.forward()
    assert [extent(rig, "r1", index) for index in range(3)] == [(0, 2), (2, 3), (3, 6)]
    ids = [rig.op("r1", index).node_id for index in range(3)]
    rig.insert("r1")
    assert [rig.node(text).id for text in ("ab", "abc", "abcdef")] == ids
    assert_tokens(rig, committed=12, wasted=0)
    rig.rest()


def test_a_chunk_border_inside_a_page() -> None:
    """R12: an extent ends at the last whole page; the page that the border divides goes with the next chunk, whose forward completes it."""
    rig = Rig()
    rig.begin("r1", "abc", tail=1)
    assert rig.chunk("r1", 1)  # no whole page: nothing to reserve
    rig.forward()
    rig.insert("r1", chunked=True)
    rig.chunk("r1", 3)
    assert extent(rig, "r1") == (0, 1)
    rig.forward()
    rig.insert("r1", chunked=True)
    rig.chunk("r1")
    assert extent(rig, "r1") == (1, 3)
    assert len(rig.row("r1")) == 4
    rig.forward()
    rig.finish("r1")
    assert [node.length_pages for node in rig.match("abc").walk.path] == [1, 2]
    assert_tokens(rig, committed=6, wasted=0)
    rig.rest()


@pytest.mark.parametrize("chunk_tokens", [2, 3, 5, 8])
def test_a_long_chunked_prompt_is_backed_up_whole(chunk_tokens: int) -> None:
    """R12, R19: whatever the chunks, every whole page of the prompt is committed once, and is a host hit after an eviction."""
    text = "abcdefghijkl"
    rig = Rig()
    rig.begin("r1", text, tail=1)
    for upto in [*range(chunk_tokens, 25, chunk_tokens), 25]:
        assert rig.chunk("r1", upto)
        rig.forward()
        rig.insert("r1", chunked=upto < 25)
        rig.tick()
    rig.finish("r1")
    assert_tokens(rig, committed=24, wasted=0)
    assert all(node.backup.state is C for node in rig.match(text).walk.path)
    rig.evict(1000)
    assert rig.match(text, tail=1).host_hit_tokens == 24
    rig.rest()


def test_two_equal_prompts_in_one_batch_make_one_backup() -> None:
    """R12, R13: the second one's reservation is a whole duplicate: it rolls back, its slots come back at its agreed end on all ranks,
    its tokens count as wasted, its own device pages are freed once."""
    rig = Rig()
    rig.hold()
    for rid in ("r1", "r2"):
        rig.begin(rid, "abcd")
        rig.chunk(rid)
    rig.forward()
    second = rig.op("r2").key
    assert rig.free_slots() == [56, 56]
    rig.finish("r1")
    rig.insert("r2")
    assert rig.row("r2") == rig.node("abcd").pages
    assert rig.cache.counters.duplicate_binds == 1
    assert rig.free_slots() == [56, 56]
    rig.finish_all(0)
    rig.tick(3)
    assert rig.free_slots() == [56, 56]
    rig.finish_all()
    rig.tick()
    assert rig.free_slots() == [56, 56]
    rig.tick()
    assert rig.free_slots() == [60, 60]
    assert rig.state("abcd") is C
    assert all(side.transfer.called("release") == [(second,)] for side in rig.sides)
    assert_tokens(rig, committed=8, wasted=8)
    rig.rest()


def test_a_part_duplicate_in_flight_keeps_its_slots_to_the_agreed_end() -> None:
    """R12, R13: the head that is in the tree by then is cut, its slots return when the operation is agreed, the rest stays one backup
    and commits below the other's node."""
    rig = Rig()
    rig.hold()
    rig.begin("r1", "ab")
    rig.begin("r2", "abcd")
    rig.chunk("r1")
    rig.chunk("r2")
    rig.forward()
    assert rig.free_slots() == [58, 58]
    rig.finish("r1")
    op = rig.op("r2")
    rig.insert("r2")
    assert (op.start_page, op.end_page, op.wasted_need) == (2, 4, (2, 2))
    assert rig.node("abcd").backup is op
    assert rig.free_slots() == [58, 58]
    rig.finish_all()
    rig.tick()
    assert rig.free_slots() == [58, 58]
    rig.tick()
    assert rig.states("ab", "abcd") == [C, C]
    assert rig.free_slots() == [60, 60]
    assert_tokens(rig, committed=8, wasted=4)
    rig.rest()


def test_a_part_duplicate_that_is_agreed_frees_its_head_at_the_bind() -> None:
    """R12, R13: agreed before it is bound, nothing is in flight anywhere: the cut head's slots return with the insert, and the rest
    commits in it."""
    rig = Rig()
    rig.begin("r1", "ab")
    rig.begin("r2", "abcd")
    rig.chunk("r1")
    rig.chunk("r2")
    rig.forward()
    rig.settle()
    rig.finish("r1")
    assert rig.state("ab") is C
    rig.insert("r2")
    assert rig.state("abcd") is C
    assert rig.free_slots() == [60, 60]
    assert_tokens(rig, committed=8, wasted=4)
    rig.rest()


def test_a_part_duplicate_that_is_only_reserved_frees_its_head_at_once() -> None:
    """R12: nothing was submitted, so nothing is wasted and nothing has to drain."""
    rig = Rig()
    rig.hold()
    rig.begin("r1", "ab")
    rig.chunk("r1")
    rig.forward()
    rig.begin("r2", "abcd")
    rig.chunk("r2")
    assert rig.free_slots() == [58, 58]
    rig.finish("r1")
    rig.insert("r2", chunked=True)
    assert rig.state("abcd") is R
    assert rig.free_slots() == [60, 60]
    rig.forward()
    rig.finish_all()
    assert_tokens(rig, committed=8, wasted=0)
    assert rig.states("ab", "abcd") == [C, C]
    rig.rest()


def test_a_whole_duplicate_that_is_only_reserved_is_freed_at_once() -> None:
    """R12, R14: with no layer submitted it takes no number and its slots return in that step."""
    rig = Rig()
    rig.hold()
    rig.begin("r1", "ab")
    rig.chunk("r1")
    rig.forward()
    rig.begin("r2", "ab")
    rig.chunk("r2")
    rig.finish("r1")
    rig.insert("r2", chunked=True)
    assert rig.free_slots() == [62, 62]
    assert (rig.cache.state.next_number, rig.cache.counters.rolled_back) == (1, {"bind_duplicate_whole": 1})
    rig.forward()
    rig.finish_all()
    assert_tokens(rig, committed=4, wasted=0)
    rig.rest()


@pytest.mark.parametrize("held", [False, True])
def test_what_follows_a_whole_duplicate_hangs_on_the_node_that_is_there(held: bool) -> None:
    """R12, R15: chunk one of the second request is a whole duplicate, chunk two is new: it is bound below the first one's node and
    commits after that."""
    rig = Rig()
    rig.hold(held)
    for rid, text in (("r1", "ab"), ("r2", "abcd")):
        rig.begin(rid, text)
        rig.chunk(rid, 4)
    rig.forward()
    rig.chunk("r2")
    rig.forward()
    assert rig.op("r2").parent is rig.op("r2", 0)
    rig.finish("r1")
    rig.insert("r2")
    assert rig.node("abcd").parent is rig.node("ab")
    assert rig.states("ab", "abcd") == [L, L]
    rig.finish_all()
    assert_tokens(rig, committed=8, wasted=4)
    assert rig.states("ab", "abcd") == [C, C]
    rig.rest()


def test_two_prompts_that_part_inside_a_reservation() -> None:
    """R12, R17: the second insert would divide a pending node, so it is declined and its reservation stays; once that is committed
    the node is divided, the head of the reservation is a duplicate and the rest is bound."""
    rig = Rig()
    rig.hold()
    rig.begin("r1", "abxy")
    rig.begin("r2", "abcd")
    rig.chunk("r1")
    rig.chunk("r2")
    rig.forward()
    rig.finish("r1")
    assert rig.insert("r2") is None
    rig.finish_all()
    rig.tick(2)
    assert rig.insert("r2") is not None
    assert rig.states("ab", "abxy", "abcd") == [C, C, C]
    assert_tokens(rig, committed=12, wasted=4)
    rig.rest()


def test_what_follows_a_lost_extent_gets_a_node_without_it() -> None:
    """R12, R15: of three chunks in one insert the first is in the tree without a host copy, so that the second is lost when it is bound
    there, and the third with it: its KV enters the tree all the same, under another id."""
    rig = Rig()
    rig.hold()
    assert rig.begin("r1", "ab")
    assert rig.begin("r2", "abcdef")
    for upto in (4, 8, 12):
        rig.chunk("r2", upto)
    first, second, third = (rig.op("r2", index).node_id for index in range(3))
    rig.forward()
    rig.grow("r1")
    rig.insert("r1", chunked=True)
    assert rig.insert("r2", chunked=True) == rig.row("r2")
    assert rig.states("ab", "abcd", "abcdef") == [N, B, N]
    assert rig.node("abcd").id == second
    assert rig.node("abcdef").id not in (first, second, third)
    assert rig.cache.counters.rolled_back == {"bind_duplicate_whole": 1, "parent_lost": 2}
    rig.abort("r1")
    rig.finish_all()
    rig.settle()
    rig.hold(False)
    rig.finish("r2")
    rig.settle()
    assert rig.states("ab", "abcd", "abcdef") == [C, C, C]
    rig.rest()


def test_a_reservation_that_was_lost_is_no_duplicate() -> None:
    """R12, R37: a backup that has failed when somebody else's insert of the same KV is met has nothing left to give up: it is counted as
    what it was, and no step is taken too late."""
    rig = Rig()
    rig.hold()
    for rid in ("fails", "other"):
        assert rig.begin(rid, "abcd")
        rig.chunk(rid)
    rig.forward()
    lost = rig.op("fails")
    fail_backup(rig, lost.key, 0)
    rig.tick(2)
    assert lost.state is N
    assert rig.insert("other", chunked=True)
    assert rig.insert("fails", chunked=True) == rig.row("other")
    counters = rig.cache.counters
    assert (counters.duplicate_binds, counters.duplicate_tokens, counters.rolled_back) == (0, 8, {"agreed_failed": 1})
    rig.abort("fails")
    rig.finish_all()
    rig.finish("other")
    rig.settle()
    assert rig.state("abcd") is C
    rig.rest()


def test_what_was_reserved_after_a_lost_extent_may_be_a_duplicate_all_the_same() -> None:
    """R12, R15: the first chunk's backup has failed, but the second chunk was reserved behind KV that others have brought meanwhile. It
    does not fall with the first, and when that KV is in the tree as well, it is given up as the duplicate that it is."""
    rig = Rig()
    rig.hold()
    assert rig.begin("r", "abcdef")
    rig.chunk("r", 4)
    rig.forward()
    lost = rig.op("r")
    fail_backup(rig, lost.key, 0)
    rig.tick(2)
    rig.hold(False)
    rig.serve("other", "abcd")
    rig.settle()
    assert rig.chunk("r")
    rig.forward()
    assert (lost.state, extent(rig, "r")) == (N, (4, 6))
    rig.serve("another", "abcdef")
    assert rig.insert("r") == [page for text in ("abcd", "abcdef") for page in rig.node(text).pages or ()]
    counters = rig.cache.counters
    assert (counters.duplicate_binds, counters.rolled_back) == (1, {"agreed_failed": 1, "bind_duplicate_whole": 1})
    rig.finish("r")
    rig.settle()
    assert rig.states("abcd", "abcdef") == [C, C]
    rig.rest()


def test_a_bound_extent_is_its_parents_child_and_nothing_else() -> None:
    """R12, R15: once it has a node, an extent is found by the tree alone, so that it loses its parent once."""
    rig = Rig(max_retries=0)
    rig.hold()
    rig.begin("r1", "abcd")
    rig.chunk("r1", 4)
    rig.forward()
    rig.insert("r1", chunked=True)
    rig.chunk("r1")
    rig.forward()
    rig.insert("r1")
    parent, child = rig.node("ab").backup, rig.node("abcd").backup
    assert rig.states("ab", "abcd") == [L, L]
    assert (parent.heirs, child.parent, child.hold) == ([], None, None)
    rig.fail_copies(parent.key, 0)
    rig.finish_all()
    rig.settle()
    assert rig.states("ab", "abcd") == [N, N]
    assert [event["node"] for event in rig.events("step", trigger="parent_lost")] == [child.node_id]
    assert not rig.cache.counters.stale
    rig.rest()
