"""Which host copies of nodes on the device are reclaimed first, after the nodes have been used (R16, R27)."""

from __future__ import annotations

import pytest

from tests.engine.rig import C, N, Rig
from tests.engine.rig_extra import back_up


def states_after_reclaim(rig: Rig) -> list[object]:
    """Somebody needs room for two pages; what has become of ``ab`` and ``cd`` then."""
    assert rig.begin("needs", "xy")
    assert rig.chunk("needs")
    return rig.states("ab", "cd")


@pytest.mark.parametrize(("policy", "states"), [("lru", [C, N]), ("mru", [N, C])])
def test_an_insert_is_a_use(policy: str, states: list[object]) -> None:
    """R16, R27: of two host copies, that of the node which an insert has passed last is the youngest: it stays longest under LRU, and goes
    first under MRU."""
    rig = Rig(cp_size=1, host_slots=8, reclaim_device_valid=True, eviction_policy=policy)
    back_up(rig, "ab", "cd")
    for rid, text in {"one": "ab", "two": "cd"}.items():
        assert rig.begin(rid, text)
        rig.grow(rid)
    rig.finish("one")
    rig.abort("two")
    assert states_after_reclaim(rig) == states
    rig.rest()


@pytest.mark.parametrize(("policy", "states"), [("lru", [C, N]), ("mru", [N, C])])
def test_an_admission_is_a_use(policy: str, states: list[object]) -> None:
    """R16, R27: so is a request that reads a prefix and inserts nothing."""
    rig = Rig(cp_size=1, host_slots=8, reclaim_device_valid=True, eviction_policy=policy)
    back_up(rig, "ab", "cd")
    assert rig.begin("reads", "ab")
    rig.abort("reads")
    assert states_after_reclaim(rig) == states
    rig.rest()


@pytest.mark.parametrize(("policy", "states"), [("lru", [C, N]), ("mru", [N, C])])
def test_a_touch_is_a_use(policy: str, states: list[object]) -> None:
    """R16, R24, R27: so is a request that asks for a prefix and is not admitted yet."""
    rig = Rig(cp_size=1, host_slots=8, reclaim_device_valid=True, eviction_policy=policy)
    back_up(rig, "ab", "cd")
    rig.each(lambda side: side.cache.touch(side.node(rig.key("ab"))))
    assert states_after_reclaim(rig) == states
    rig.rest()


def test_what_has_lost_its_host_copy_holds_no_slots() -> None:
    """R16, R30: the slots that nodes hold add up to those in use, after a host copy was reclaimed too."""
    rig = Rig(cp_size=1, host_slots=8, reclaim_device_valid=True)
    back_up(rig, "ab", "cd")
    assert states_after_reclaim(rig) == [N, C]
    assert [rig.node(text).backup.need for text in ("ab", "cd")] == [(0,), (4,)]
    assert rig.op("needs").need == (4,)
    assert list(rig.cache.state.ledger.used_by_rank) == [8]
    rig.rest()


def test_both_halves_of_a_divided_node_make_room_at_once() -> None:
    """R16, R28: a committed node on the device that was divided gives all of its slots to whoever needs them, the lower half first."""
    rig = Rig(cp_size=1, host_slots=8, reclaim_device_valid=True)
    back_up(rig, "abcd")
    assert rig.begin("divides", "aby")
    rig.grow("divides")
    rig.insert("divides", chunked=True)
    assert rig.states("ab", "abcd", "aby") == [C, C, N]
    assert rig.begin("needs", "stuv")
    assert rig.chunk("needs")
    assert rig.states("ab", "abcd") == [N, N]
    assert rig.local(0).called("free_node") == [(rig.node("abcd").id,), (rig.node("ab").id,)]
    rig.rest()


def test_a_refused_reservation_leaves_nothing_behind() -> None:
    """R12, R30: what finds no slots does not hang on the node that it was to follow, which can make room for others."""
    rig = Rig(cp_size=1, host_slots=4, reclaim_device_valid=True)
    back_up(rig, "ab")
    assert rig.begin("too much", "abcdef")
    assert not rig.chunk("too much")
    record = rig.node("ab").backup
    assert (record.heirs, record.state, rig.node("ab").host_ref) == ([], C, 0)
    rig.abort("too much")
    assert rig.begin("other", "xy")
    assert rig.chunk("other")
    assert record.state is N
    rig.rest()
