"""Parents first: committing, rolling back and trying again along a chain (R13, R15)."""

from __future__ import annotations

import pytest

from tests.engine.rig import B, C, L, N, Rig
from tests.engine.rig_extra import back_up, fail_backup, to_host


def committed_in_order(rig: Rig) -> list[int]:
    """Nodes by the order of their steps into COMMITTED."""
    return [event["node"] for event in rig.events("step", after=C.value) if event["before"] != C.value]


def chain(rig: Rig) -> None:
    """Two nodes in flight, ``cd`` below ``ab``: numbers 0 and 1."""
    rig.hold()
    rig.serve("p", "ab")
    rig.serve("c", "abcd")


def fill(rig: Rig, text: str, rid: str) -> None:
    """Commit ``text`` and make it host-only."""
    rig.serve(rid, text)
    rig.settle()
    rig.evict(len(text) * rig.config.page_size)


def test_a_child_with_the_lower_number_commits_after_its_parent() -> None:
    """R13, R15, R21: the child's batch ends first, so its number is passed first; it stays in flight (agreed) until the parent commits,
    then commits in the same tick, after it."""
    rig = Rig()
    rig.begin("p", "ab")
    rig.chunk("p")
    rig.insert("p", chunked=True)
    rig.batch = 2
    rig.begin("c", "abcd")
    rig.chunk("c")
    rig.forward()  # batch 2
    rig.finish("c")
    rig.settle()
    child = rig.node("abcd").backup
    assert (child.state, child.number, child.agreed) == (L, 0, True)
    assert rig.match("abcd").last_host_node is rig.cache.state.tree.root
    rig.batch = 1
    rig.forward()
    rig.tick(2)
    assert rig.states("ab", "abcd") == [C, C]
    assert committed_in_order(rig) == [rig.node("ab").id, rig.node("abcd").id]
    rig.rest()


def test_an_agreed_reservation_commits_with_its_bind() -> None:
    """R13: agreed on every rank but not yet inserted, it is in flight and invisible; the insert commits it in that step."""
    rig = Rig()
    rig.begin("r1", "ab")
    rig.chunk("r1")
    rig.forward()
    rig.tick(3)
    op = rig.op("r1")
    assert (op.state, op.agreed, op.bound) == (L, True, False)
    assert rig.cache.state.numbered == {}
    rig.insert("r1")
    assert rig.state("ab") is C
    assert rig.node("ab").backup is op
    rig.rest()


def test_agreed_reservations_of_one_request_commit_parents_first() -> None:
    """R13: three agreed reservations are bound by one insert: each commits in its turn."""
    rig = Rig()
    rig.begin("r1", "abcdef")
    for upto in (4, 8, 12):
        rig.chunk("r1", upto)
        rig.forward()
    rig.settle()
    ids = [rig.op("r1", index).node_id for index in range(3)]
    rig.finish("r1")
    assert committed_in_order(rig) == ids
    assert rig.states("ab", "abcd", "abcdef") == [C, C, C]
    rig.rest()


def test_a_bind_under_a_pending_parent_commits_with_the_parent() -> None:
    """R13, R15: agreed and bound, it waits for the parent it hangs on in the tree."""
    rig = Rig()
    rig.begin("p", "ab")
    rig.chunk("p")
    rig.insert("p", chunked=True)  # batch 1 goes on
    rig.batch = 2
    rig.begin("c", "abcd")
    rig.chunk("c")
    rig.forward()
    rig.settle()
    assert rig.op("c").agreed
    rig.insert("c")
    assert rig.state("abcd") is L
    rig.batch = 1
    rig.forward()
    rig.settle()
    assert rig.states("ab", "abcd") == [C, C]
    rig.rest()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_failed_parent_takes_its_child_along_and_a_hit_backs_up_both(rank: int) -> None:
    """R15, R22: the parent fails on one rank: both roll back on all, each until its own copies have drained; the next hit backs up
    both in one step, parent first."""
    rig = Rig()
    chain(rig)
    rig.fail_copies(rig.node("ab").backup.key, rank)
    rig.finish_copies(rig.node("ab").backup.key, 1 - rank)
    rig.tick(2)
    assert rig.states("ab", "abcd") == [N, B]
    assert rig.free_slots() == [62, 62]
    rig.finish_all()
    rig.hold()
    rig.serve("again", "abcd")
    assert rig.states("ab", "abcd") == [L, B]  # it still drains: not reserved again before that is agreed
    rig.tick(2)
    assert rig.states("ab", "abcd") == [L, N]
    rig.serve("once_more", "abcd")
    assert rig.states("ab", "abcd") == [L, L]
    rig.finish_all()
    rig.settle()
    assert rig.states("ab", "abcd") == [C, C]
    assert rig.cache.state.retries == {}  # nobody waits to be tried again any more
    counters = rig.cache.counters
    assert counters.rolled_back == {"agreed_failed": 1, "parent_lost": 1}
    assert counters.tokens_submitted == counters.tokens_committed + counters.tokens_wasted == 16
    rig.rest()


@pytest.mark.parametrize("rank", [0, 1])
def test_an_extent_that_is_bound_below_a_lost_node_is_lost_with_all_that_follow(rank: int) -> None:
    """R12, R15: somebody else's node, whose backup failed, is where the extent was to begin: what is left of it rolls back at its bind,
    and so does the next one, which is not bound; their KV is in the tree, and the insert's hit backs all of it up, parents first."""
    rig = Rig()
    rig.begin("p", "ab")
    rig.begin("c", "abcdef")
    rig.chunk("p")
    rig.chunk("c", 8)
    rig.local(rank).fail_copy_next = True  # the whole batch's first copy: of p's only
    rig.forward()
    rig.chunk("c")
    rig.forward()
    lost = [rig.op("c", 0), rig.op("c", 1)]
    rig.settle()
    rig.insert("p", chunked=True)
    assert rig.state("ab") is N
    rig.insert("c", chunked=True)
    assert [op.state for op in lost] == [N, N]
    assert rig.states("ab", "abcdef") == [N, N]
    assert rig.free_slots() == [64, 64]
    rig.insert("c")
    rig.settle()
    assert all(node.backup.state is C for node in rig.match("abcdef").walk.path)
    counters = rig.cache.counters
    assert counters.rolled_back == {"agreed_failed": 1, "parent_lost": 2}
    assert counters.tokens_submitted == counters.tokens_committed + counters.tokens_wasted
    rig.rest()


def test_freed_slots_bring_back_the_parent_then_the_child() -> None:
    """R15: neither is lost: the parent is tried again on the slots of its child's rollback, the child, whose own slots do not count, on
    those of a third one."""
    rig = Rig()
    chain(rig)
    rig.fail_copies(rig.node("ab").backup.key, 1)
    rig.finish_all()
    rig.tick(2)
    assert rig.states("ab", "abcd") == [N, B]
    rig.tick()
    assert rig.states("ab", "abcd") == [L, N]
    rig.finish_all()
    rig.tick(4)
    assert rig.states("ab", "abcd") == [C, N]
    rig.begin("third", "pq")
    rig.chunk("third")
    rig.abort("third")
    rig.tick()
    assert rig.states("ab", "abcd") == [C, L]
    assert rig.cache.counters.retries == 2
    rig.finish_all()
    rig.settle()
    assert rig.states("ab", "abcd") == [C, C]
    rig.rest()


def test_refused_nodes_of_a_chain_are_tried_again_in_one_tick() -> None:
    """R15: a parent and its child that found no slots are both reserved in the tick in which there are some, the parent first."""
    rig = Rig(host_slots=8)
    rig.hold()
    rig.serve("full", "stuvwxyz")
    rig.serve("r1", "abcd")
    rig.tick()
    rig.serve("r2", "abcdef")  # hits both
    assert rig.states("abcd", "abcdef") == [N, N]
    assert rig.cache.counters.refused["parent_not_backed"] == 2  # before its forward, and at its insert
    rig.fail_copies(rig.node("stuvwxyz").backup.key, 0)
    rig.finish_all()
    rig.tick(2)
    assert rig.states("stuvwxyz", "abcd", "abcdef") == [N, L, L]
    assert (rig.node("abcd").backup.number, rig.node("abcdef").backup.number) == (1, 2)
    assert rig.cache.counters.retries == 2
    rig.finish_all()
    rig.settle()
    assert rig.states("abcd", "abcdef") == [C, C]
    assert list(rig.cache.state.retries) == [rig.node("stuvwxyz").id]
    rig.rest()


def test_nothing_is_reserved_below_a_parent_that_drains() -> None:
    """R15: below a node that is rolling back an extent is refused before its forward, and so is its node's hit; when both have slots
    again a hit backs up the parent, then the child."""
    rig = Rig()
    rig.hold()
    rig.serve("r1", "ab")
    rig.fail_copies(rig.node("ab").backup.key, 0, drained=False)
    rig.tick(2)
    assert rig.state("ab") is B
    rig.begin("r2", "abcd")
    assert not rig.chunk("r2")
    rig.forward()
    rig.finish("r2")
    assert rig.states("ab", "abcd") == [B, N]
    assert rig.cache.counters.refused == {"parent_rolling_back": 2}
    rig.finish_all()
    rig.tick(2)
    assert rig.states("ab", "abcd") == [N, N]
    rig.hold(False)
    rig.serve("r3", "abcd")
    rig.settle()
    assert rig.states("ab", "abcd") == [C, C]
    rig.rest()


def test_its_own_freed_slots_are_no_reason_to_try_again() -> None:
    """R15: a backup that failed alone is not tried again on the slots of its own rollback, however many ticks go by."""
    rig = Rig()
    rig.hold()
    rig.serve("r1", "ab")
    rig.fail_copies(rig.node("ab").backup.key, 0)
    rig.finish_all()
    rig.tick(12)
    assert rig.state("ab") is N
    assert rig.cache.counters.retries == 0
    rig.begin("other", "xy")
    rig.chunk("other")
    rig.abort("other")
    rig.tick()
    assert rig.state("ab") is L
    assert rig.cache.counters.retries == 1
    rig.rest()


def test_a_reclaim_is_no_reason_to_try_again() -> None:
    """R15: a refused node stays refused when somebody else's reclaim makes room; slots of a host eviction bring it back, once."""
    rig = Rig(cp_size=1, host_slots=8, reclaim_device_valid=True)
    rig.serve("big", "uvwxy")  # more than the pool has
    assert rig.state("uvwxy") is N
    rig.serve("r1", "abcd")
    rig.settle()
    rig.serve("r2", "pq")  # reclaims
    rig.settle()
    rig.tick(3)
    assert rig.cache.counters.reclaims == 1
    assert (rig.states("abcd", "pq"), rig.cache.counters.retries) == ([N, C], 0)
    rig.serve("r3", "mnop")
    rig.settle()
    assert (rig.cache.counters.host_evictions, rig.cache.counters.retries) == (0, 0)
    rig.rest()


@pytest.mark.parametrize("max_retries", [0, 1, 3])
def test_a_node_is_tried_again_a_bounded_number_of_times(max_retries: int) -> None:
    """R15: a copy that always fails is tried ``max_retries`` times on freed slots, then only on its next hit."""
    rig = Rig(max_retries=max_retries)
    rig.hold()
    rig.serve("r1", "ab")
    for attempt in range(max_retries + 3):
        op = rig.node("ab").backup
        if op.state is L:
            rig.fail_copies(op.key, 1)
            rig.finish_all()
        rig.tick(2)
        assert rig.state("ab") is N
        rig.begin(f"other{attempt}", "xy")
        rig.chunk(f"other{attempt}")
        rig.abort(f"other{attempt}")
        rig.tick()
    assert rig.cache.counters.retries == max_retries
    assert rig.state("ab") is N
    rig.serve("r2", "ab")
    assert rig.state("ab") is L
    rig.rest()


@pytest.mark.parametrize("max_retries", [0, 2])
def test_a_node_that_is_refused_again_and_again_is_left_alone(max_retries: int) -> None:
    """R15: a node that finds no room is tried ``max_retries`` times on slots that others freed."""
    rig = Rig(host_slots=4, max_retries=max_retries)
    rig.serve("big", "uvwxyz")
    for attempt in range(max_retries + 2):
        rig.begin(f"other{attempt}", "ab")
        rig.chunk(f"other{attempt}")
        rig.abort(f"other{attempt}")
        rig.tick(2)
    assert (rig.state("uvwxyz"), rig.cache.counters.retries) == (N, max_retries)
    rig.rest()


def test_at_most_one_attempt_a_tick() -> None:
    """R15: hits of several requests in one tick try a refused node once; the next tick's hit tries again."""
    rig = Rig(host_slots=8)
    rig.hold()
    rig.serve("full", "stuvwxyz")
    rig.serve("r1", "ab")
    node = rig.node("ab").id

    def attempts() -> int:
        return len(rig.events("step", node=node, trigger="reserve"))

    assert attempts() == 1
    rig.serve("r2", "ab")
    rig.serve("r3", "ab")
    assert (attempts(), rig.node("ab").backup.hits) == (1, 3)
    rig.tick()
    rig.serve("r4", "ab")
    rig.serve("r5", "ab")
    assert attempts() == 2
    rig.rest()


def test_a_retry_never_reclaims() -> None:
    """R15, R16: with the switch on, a retry that finds the pool full of nodes on the device is refused; a hit reclaims."""
    rig = Rig(cp_size=1, host_slots=8, reclaim_device_valid=True)
    rig.hold()
    rig.serve("r1", "ab")
    rig.fail_copies(rig.node("ab").backup.key, 0)
    rig.tick(2)
    assert rig.state("ab") is N
    rig.hold(False)
    rig.serve("r2", "wxyz")
    rig.settle()
    rig.begin("other", "q")
    assert rig.chunk("other")  # reclaims all of wxyz, and leaves room for three pages
    rig.serve("r3", "mno")
    rig.settle()
    assert rig.states("wxyz", "mno") == [N, C]
    rig.abort("other")  # one page is free, and slots were freed: a retry is due
    reclaims = rig.cache.counters.reclaims
    rig.tick()
    assert rig.cache.counters.retries == 1
    assert rig.cache.counters.reclaims == reclaims
    assert rig.states("ab", "mno") == [N, C]
    rig.tick()
    rig.serve("r4", "ab")
    assert rig.states("ab", "mno") == [L, N]
    rig.rest()


def test_a_retry_does_not_reclaim_in_place_of_what_is_pinned() -> None:
    """R15, R16: nor does a retry for which host-only nodes would suffice, if they were not pinned."""
    rig = Rig(cp_size=1, host_slots=12, reclaim_device_valid=True)
    to_host(rig, "wx")
    rig.each(lambda side: side.cache.pin_host(rig.key("wx"), 1000))
    rig.hold()
    rig.serve("r1", "ab")
    fail_backup(rig, rig.node("ab").backup.key, 0)
    rig.tick(2)
    rig.hold(False)
    back_up(rig, "cd", "m")
    rig.begin("other", "q")
    assert rig.chunk("other")
    assert (rig.states("wx", "ab", "cd"), rig.free_slots()) == ([C, N, C], [0])
    rig.abort("other")
    rig.tick()
    assert (rig.cache.counters.retries, rig.cache.counters.reclaims) == (1, 0)
    assert (rig.states("wx", "ab", "cd"), rig.free_slots()) == ([C, N, C], [2])
    rig.rest()


def test_what_a_hit_has_backed_up_is_not_to_be_tried_again() -> None:
    """R15, R19: a node that was refused, and is reserved at its next hit, does not wait for slots any longer."""
    rig = Rig(cp_size=1, host_slots=4)
    back_up(rig, "wx")
    rig.serve("is refused", "ab")
    node = rig.node("ab").id
    assert list(rig.cache.state.retries) == [node]
    rig.evict(4)
    rig.tick()
    rig.serve("hits", "ab")
    assert (rig.state("ab"), rig.has("wx")) == (L, False)
    assert list(rig.cache.state.retries) == []
    rig.rest()
