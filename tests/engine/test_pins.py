"""Pins: a prefix that stays on the host for some ticks, whoever needs the room."""

from __future__ import annotations

import pytest

from cphicache.engine import CacheMisuse
from tests.engine.rig import Rig
from tests.engine.rig_extra import to_host


def pin(rig: Rig, text: str, ticks: int) -> object:
    return rig.each(lambda side: side.cache.pin_host(rig.key(text), ticks))


def full_host() -> Rig:
    """Two host-only nodes fill the host pool; ``abcd`` is the older one, so it would go first."""
    rig = Rig(ranks=[0], cp_size=1, host_slots=16)
    to_host(rig, "abcd", "efgh")
    return rig


@pytest.mark.parametrize("ticks", [1, 2])
def test_a_pinned_prefix_is_no_victim_until_it_expires(ticks: int) -> None:
    """R27: host eviction passes over a pinned node, and takes it once the pin has expired by tick."""
    rig = full_host()
    assert pin(rig, "abcd", 1000) == 8
    rig.serve("r0", "ijkl")
    rig.settle()
    assert rig.has("abcd")
    assert not rig.has("efgh")
    rig.each(lambda side: side.cache.flush())

    rig = full_host()
    assert pin(rig, "abcd", ticks) == 8
    rig.tick(ticks)
    rig.serve("r0", "ijkl")
    rig.settle()
    assert not rig.has("abcd")
    assert rig.has("efgh")
    rig.rest()


def test_a_pin_that_leaves_too_little_refuses_the_reservation() -> None:
    """R16, R27: pinned nodes are in no candidate set; if the others do not suffice, nothing is evicted and the reason is logged."""
    rig = full_host()
    pin(rig, "abcd", 1000)
    pin(rig, "efgh", 1000)
    rig.serve("r0", "ijkl")
    assert rig.has("abcd")
    assert rig.has("efgh")
    assert rig.each(lambda side: side.cache.counters.refused.total()) > 0
    rig.each(lambda side: side.cache.flush())
    rig.rest()


def test_a_pin_outlasts_a_split_and_a_flush_ends_it() -> None:
    """R27, R28: both halves of a pinned node stay pinned; a flush, which forgets the node, forgets the pin."""
    rig = full_host()
    assert pin(rig, "abcd", 1000) == 8
    rig.serve("r0", "abxy")
    rig.settle()
    assert [node.host_ref for node in rig.each(lambda side: tuple(side.cache.match_prefix(rig.key("abcd")).walk.path))] == [1, 1]
    rig.each(lambda side: side.cache.flush())
    assert rig.cache.state.pins == []
    rig.rest()


def test_only_whole_committed_nodes_are_pinned() -> None:
    """R8, R27: what is not committed, or matched in part, has nothing on the host to pin."""
    rig = full_host()
    assert pin(rig, "abc", 5) == 0
    assert pin(rig, "zz", 5) == 0
    assert rig.cache.state.pins == []
    rig.serve("r0", "efghij")
    rig.settle()
    assert pin(rig, "efghi", 5) == 8, "of the two nodes on its path the first is matched whole"
    rig.tick(5)
    with pytest.raises(CacheMisuse, match="pin for 0 ticks: give at least 1"):
        rig.cache.pin_host(rig.key("abcd"), 0)


# -- prefixes that are asked for -------------------------------------------------------------------------------------------------------
def touch(rig: Rig, text: str) -> None:
    rig.each(lambda side: side.cache.touch(rig.node(text) if side is rig.sides[0] else side.node(rig.key(text))))


def test_a_prefix_that_is_asked_for_outlives_others_on_the_host() -> None:
    """R24, R27: a match changes no order of eviction; the touch of a request that waits for room does, for its whole prefix."""
    rig = full_host()
    rig.match("abcd")
    rig.serve("r0", "ij")
    rig.settle()
    assert not rig.has("abcd")
    rig.each(lambda side: side.cache.flush())

    rig = full_host()
    touch(rig, "abcd")
    rig.serve("r0", "ij")
    rig.settle()
    assert rig.has("abcd")
    assert not rig.has("efgh")
    rig.rest()


def test_a_prefix_that_is_asked_for_outlives_others_on_the_device() -> None:
    """R27: all nodes of the path count as used, so that none of them goes before what was used later than the path was inserted."""
    rig = Rig()
    for rid, text in (("r1", "ab"), ("r2", "abcd"), ("r3", "xy")):
        rig.serve(rid, text)
    rig.settle()
    touch(rig, "abcd")
    rig.evict(4)
    assert rig.node("xy").pages is None
    assert rig.node("abcd").pages is not None
    rig.evict(4)
    assert rig.node("abcd").pages is None
    assert rig.node("ab").pages is not None
    rig.rest()


def test_a_node_that_is_gone_cannot_be_asked_for() -> None:
    """R24: a handle from an old match is refused, and nothing changes."""
    rig = Rig(ranks=[0], cp_size=1)
    rig.serve("r1", "ab")
    node = rig.node("ab")
    rig.settle()
    rig.each(lambda side: side.cache.flush())
    with pytest.raises(CacheMisuse, match="match again"):
        rig.cache.touch(node)
    rig.cache.touch(rig.match("ab").device_node)  # a match of nothing ends in the root, which stays
    rig.rest()
