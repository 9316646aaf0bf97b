"""A rank is lost: what is told, what is waited for, and what ends in which call (R22)."""

from __future__ import annotations

import pytest

from cphicache.agree.port import Excluded, GroupBroken
from cphicache.engine import Refusal, WriteBackShort, WritePolicy
from cphicache.engine.records import LoadState
from tests.engine.rig import B, C, L, N, Rig
from tests.engine.rig_extra import ALL_TOKENS, ask_load, load_of, to_host


def lose(rig: Rig, error: GroupBroken) -> None:
    """From now on the only rank of this rig is alone: whoever waits for the group hears of it. (A broken group is not used again.)"""

    def wait() -> tuple[int, int]:
        raise error

    rig.sides[0].tap.wait = wait  # type: ignore[method-assign]


def one_rank(**options: object) -> Rig:
    return Rig(ranks=[0], cp_size=1, **options)  # type: ignore[arg-type]


GONE = GroupBroken("rank 1 has gone", (1,))
EXCLUDED = Excluded("rank 0 was excluded", (0,))


@pytest.mark.parametrize("error", [GONE, EXCLUDED], ids=["gone", "excluded"])
def test_the_caller_hears_what_was_waited_for(error: GroupBroken) -> None:
    """R22: with a part of the KV gone the error goes on to the caller, as what it was, with the number and the backup that the group was
    waited for; the log has who has gone, and whether that is this rank."""
    rig = one_rank()
    rig.hold()
    rig.serve("flies", "ab")
    lose(rig, error)
    rig.cache.begin_tick()
    what = rig.node("ab").backup.describe()
    with pytest.raises(type(error)) as caught:
        rig.cache.begin_tick()
    assert str(caught.value) == f"{error}; waiting for number 0 ({what})"
    assert caught.value.ranks == error.ranks
    (told,) = rig.events("group_lost")
    excluded = isinstance(error, Excluded)
    assert (told["local"], told["ranks"], told["excluded"], told["reason"]) == (True, list(error.ranks), excluded, str(error))
    assert rig.cache.quarantined == str(caught.value)
    assert len(rig.sides[0].tap.issued) == 1
    rig.check()
    rig.rest()
    assert len(rig.sides[0].tap.issued) == 1, "a broken group is not used again"


def test_a_load_back_is_named_as_such() -> None:
    """R22: so is a load-back that was waited for."""
    rig = one_rank()
    to_host(rig, "ab")
    rig.hold()
    assert ask_load(rig, "asks", "ab").pages
    rig.start_loads()
    lose(rig, GONE)
    rig.cache.begin_tick()
    with pytest.raises(GroupBroken, match=r"rank 1 has gone; waiting for number 1 \(load-back 1\)"):
        rig.cache.begin_tick()
    rig.rest()


@pytest.mark.parametrize(("error", "goes_on"), [(GONE, True), (EXCLUDED, False)])
def test_who_has_all_of_the_kv_goes_on_unless_it_was_excluded(error: GroupBroken, goes_on: bool) -> None:
    """R22, R23: with replicated KV the tick goes on from the device; a rank without which the others have gone on stops."""
    rig = one_rank(kv_replicated=True)
    rig.hold()
    rig.serve("flies", "ab")
    lose(rig, error)
    rig.cache.begin_tick()
    if goes_on:
        assert rig.cache.begin_tick().tick == 2
    else:
        with pytest.raises(Excluded):
            rig.cache.begin_tick()
    assert (rig.state("ab"), rig.cache.quarantined is None) == (N, False)
    rig.serve("after", "abcd")
    assert (len(rig.match("abcd").device_pages), rig.state("abcd")) == (4, N)
    rig.rest()


def test_a_load_back_that_the_group_was_asked_to_confirm_is_not_right() -> None:
    """R22, R25: a request that ends at once asks the others about what it has read; with them gone it may have failed there."""
    rig = one_rank(kv_replicated=True)
    to_host(rig, "ab")
    rig.hold()
    assert rig.begin("reads", "abc")
    rig.start_loads()
    lose(rig, GONE)
    assert not rig.cache.confirm_loads("reads")
    assert rig.cache.quarantined is not None
    rig.rest()


@pytest.mark.parametrize("replicated", [False, True])
def test_a_load_back_that_was_making_room_is_not_made(replicated: bool) -> None:
    """R22, R25: an eviction that waits (R19) hears of the loss while it makes room for a load-back: that is refused, or the error goes on;
    either way nothing is held, locked or loading, and the host copy stays."""
    rig = one_rank(
        policy=WritePolicy.WRITE_BACK, write_back_short=WriteBackShort.WAIT, usable_pages=8, kv_replicated=replicated
    )  # fmt: skip
    rig.serve("one", "ab")
    rig.evict(ALL_TOKENS)
    rig.serve("fills", "mnopqrst")
    assert (rig.state("ab"), rig.cache.available_size()) == (C, 0)
    lose(rig, GONE)
    if replicated:
        assert ask_load(rig, "asks", "ab").refused is Refusal.QUARANTINED
    else:
        with pytest.raises(GroupBroken, match="rank 1 has gone"):
            ask_load(rig, "asks", "ab")
    node = rig.node("ab")
    assert (node.host_ref, node.lock_ref, node.loading, node.pages) == (0, 0, None, None)
    assert (rig.state("ab"), rig.cache.state.loads) == (C, {})
    rig.check()
    rig.rest()


def test_a_quarantine_ends_everything_in_the_order_of_its_numbers() -> None:
    """R14, R18, R22: what has a number is waited for on this rank and ends in that order, a rank that has no slots of it excepted; what has
    none ends at once, as it was reserved. No number is open then."""
    rig = Rig()
    to_host(rig, "pq")
    rig.hold()
    rig.serve("flies", "ab")
    rig.local(1).fail_reserve_next = True
    rig.serve("nowhere on rank 1", "cd")
    assert rig.begin("reads", "pqr")
    rig.start_loads()
    rig.tick()
    assert rig.cache.state.outstanding
    for rid, text in {"second": "ef", "third": "gh"}.items():
        assert rig.begin(rid, text)
        rig.chunk(rid)
    keys = [rig.node(text).backup.key for text in ("ab", "cd")]
    rig.each(lambda side: side.cache.quarantine("rank 2 has gone"))
    for side in rig.sides:
        waited = [args[0] for args in side.transfer.called("wait_backup")]
        assert waited == (keys if side.rank == 0 else keys[:1])
        assert side.transfer.called("wait_load") == [(1,)]
        state = side.cache.state
        assert (state.resolved, state.numbered, state.pending, state.outstanding) == (state.next_number, {}, {}, False)
    (told,) = rig.events("quarantine")
    assert (told["pending"], told["loads"]) == (4, 1)
    (why,) = rig.events("group_broken")
    assert (why["reason"], why["local"]) == ("rank 2 has gone", True)
    resets = [event["node"] for event in rig.events("step", trigger="reset")]
    assert resets == [rig.node("ab").id, rig.node("cd").id, rig.op("second").node_id, rig.op("third").node_id]
    assert {event["reason"] for event in rig.events("step", trigger="reset")} == {"quarantine"}
    assert rig.tick().poisoned == ["reads"], "it may have failed where nobody can be asked"
    assert load_of(rig, 1).state is LoadState.DRAINED
    rig.abort("reads")
    assert (rig.cache.state.loads, rig.node("pq").pages) == ({}, None)
    rig.rest()


def test_a_second_quarantine_changes_nothing() -> None:
    """R22: the first reason stays, and nothing is told twice."""
    rig = Rig()
    rig.hold()
    rig.serve("flies", "ab")
    for reason in ("first", "second"):
        rig.each(lambda side, reason=reason: side.cache.quarantine(reason))  # type: ignore[misc]
    assert [side.cache.quarantined for side in rig.sides] == ["first", "first"]
    assert [len(rig.events(event)) for event in ("quarantine", "group_broken")] == [1, 1]
    rig.rest()


def test_only_what_is_on_the_host_is_refused_for_the_quarantine() -> None:
    """R22, R25: a load-back of what has a host copy is refused as quarantined, and logged; where there is none there is nothing to load, as
    ever."""
    rig = Rig()
    to_host(rig, "ab")
    rig.each(lambda side: side.cache.quarantine("over"))
    assert [ask_load(rig, text, text).refused for text in ("ab", "xy")] == [Refusal.QUARANTINED, Refusal.NOTHING_TO_LOAD]
    assert [(event["request"], event["reason"]) for event in rig.events("load_back_refused")] == [("ab", "quarantined")]
    rig.rest()


def test_a_rollback_that_drains_ends_with_it() -> None:
    """R14, R22: a backup that was rolled back before, and has copies in flight, is drained here and gives its slots back in that call."""
    rig = Rig()
    rig.hold()
    assert rig.begin("gone", "ab")
    rig.chunk("gone")
    rig.forward()
    op = rig.op("gone")
    rig.abort("gone")
    assert (op.state, rig.free_slots()) == (B, [62, 62])
    rig.each(lambda side: side.cache.quarantine("over"))
    assert (op.state, rig.free_slots()) == (N, [64, 64])
    assert L not in {record.state for record in rig.cache.state.pending.values()}
    rig.rest()
