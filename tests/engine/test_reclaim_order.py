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
