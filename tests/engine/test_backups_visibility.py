"""What a backup in flight looks like from outside: a device hit, and nothing else until it is committed."""

from __future__ import annotations

import pytest

from tests.engine.rig import C, L, N, R, Rig


def assert_device_hit(rig: Rig, text: str, host_node: str | None) -> None:
    """All of ``text`` is a device hit, nothing of it a host hit; the last host node is that of ``host_node`` (None: the root)."""
    found = rig.match(text)
    assert len(found.device_pages) == len(text)
    assert found.device_node is rig.node(text)
    assert (found.host_nodes, found.host_hit_tokens) == ([], 0)
    assert found.last_host_node is (rig.cache.state.tree.root if host_node is None else rig.node(host_node))


def test_a_node_without_host_copy_is_a_device_hit() -> None:
    """R8: a node that is valid on the device and missing on the host stays a device hit, with host hit length 0."""
    rig = Rig(policy="write_through_selective")
    rig.serve("r1", "abcd")
    assert rig.state("abcd") is N
    assert_device_hit(rig, "abcd", None)
    rig.rest()


def test_a_node_in_flight_is_a_device_hit_until_the_agreed_tick() -> None:
    """R8: LAYERS_IN_FLIGHT stays a device hit and is no host node, also when this rank's copies are done; after commit it is one."""
    rig = Rig()
    rig.hold()
    rig.serve("r1", "abcd")
    assert rig.state("abcd") is L
    assert_device_hit(rig, "abcd", None)
    rig.finish_all()
    rig.tick()
    assert rig.state("abcd") is L
    assert_device_hit(rig, "abcd", None)
    rig.tick()
    assert rig.state("abcd") is C
    assert_device_hit(rig, "abcd", "abcd")
    rig.rest()


def test_the_last_host_node_is_the_parent_of_what_is_in_flight() -> None:
    """R8: below a committed node, one in flight moves the last host node only with its commit."""
    rig = Rig()
    rig.serve("r1", "ab")
    rig.settle()
    rig.hold()
    rig.serve("r2", "abcd")
    assert rig.states("ab", "abcd") == [C, L]
    assert_device_hit(rig, "abcd", "ab")
    rig.finish_all()
    rig.tick(2)
    assert_device_hit(rig, "abcd", "abcd")
    rig.rest()


def test_a_reserved_extent_is_not_in_the_tree_and_its_node_is_a_device_hit() -> None:
    """R8: RESERVED is nothing but a reservation: unmatched before its insert, and a device hit without host length after it."""
    rig = Rig()
    rig.begin("r1", "ab")
    rig.chunk("r1")
    assert rig.op("r1").state is R
    assert not rig.has("a")
    rig.insert("r1", chunked=True)  # bound before any layer was reported
    assert rig.state("ab") is R
    assert_device_hit(rig, "ab", None)
    rig.forward()
    assert rig.state("ab") is L
    rig.settle()
    assert_device_hit(rig, "ab", "ab")
    rig.rest()


def test_pending_nodes_keep_their_device_pages() -> None:
    """R8, R30: an eviction passes over nodes in flight; once committed they become host-only and a host hit."""
    rig = Rig()
    rig.hold()
    rig.serve("r1", "abcd")
    assert rig.evict(1000).num_tokens_evicted == 0
    assert_device_hit(rig, "abcd", None)
    rig.finish_all()
    rig.tick(2)
    result = rig.evict(1000)
    assert (result.num_tokens_evicted, result.num_tokens_dropped) == (8, 0)
    found = rig.match("abcd")
    assert (found.device_pages, found.host_hit_tokens) == ([], 8)
    assert found.last_host_node is rig.node("abcd")
    rig.rest()


@pytest.mark.parametrize("reclaim", [False, True])
def test_host_slots_are_taken_from_committed_nodes_only(reclaim: bool) -> None:
    """R8, R16: a full host pool takes nothing from nodes in flight, whatever the switch says; once committed (and host-only) it does."""
    rig = Rig(host_slots=8, reclaim_device_valid=reclaim)
    rig.hold()
    rig.serve("r1", "abcdefgh")  # all 8 slots of both ranks
    rig.serve("r2", "xy")
    assert rig.states("abcdefgh", "xy") == [L, N]
    rig.finish_all()
    rig.hold(False)
    rig.tick(2)
    rig.evict(16)
    assert rig.match("abcdefgh").host_hit_tokens == 16
    rig.serve("r3", "xy")
    assert not rig.has("a")
    assert rig.state("xy") is L
    rig.rest()


def test_a_committed_backup_gives_back_its_lock() -> None:
    """R13: the device lock is held from bind to commit and released exactly once."""
    rig = Rig()
    rig.hold()
    rig.serve("r1", "ab")
    assert rig.node("ab").lock_ref == 1
    assert (rig.cache.evictable_size(), rig.cache.protected_size()) == (0, 4)
    rig.finish_all()
    rig.tick(2)
    assert rig.node("ab").lock_ref == 0
    assert (rig.cache.evictable_size(), rig.cache.protected_size()) == (4, 0)
    rig.tick(3)
    assert rig.node("ab").lock_ref == 0
    rig.rest()


def test_how_long_a_backup_takes_to_be_visible_is_counted_in_ticks() -> None:
    """R13, R37: from the end of its forward, or from the hit that backs it up, to its commit; from tick 0 on."""
    rig = Rig()
    rig.serve("at once", "ab")
    rig.tick(2)
    rig.hold()
    rig.serve("slow", "cd")
    rig.tick(3)
    rig.finish_all()
    rig.tick(2)
    assert rig.states("ab", "cd") == [C, C]
    assert rig.cache.counters.ticks_to_visible == {2: 1, 5: 1}
    rig.rest()


def test_only_a_committed_node_has_a_host_copy() -> None:
    """R13: whoever asks a record hears of a host copy exactly while every rank has it."""
    rig = Rig(cp_size=1, host_slots=4, reclaim_device_valid=True)
    rig.hold()
    rig.serve("r", "ab")
    record = rig.node("ab").backup
    assert (record.state, record.has_host_copy) == (L, False)
    rig.finish_all()
    rig.settle()
    assert (record.state, record.has_host_copy) == (C, True)
    assert rig.begin("needs", "xy")
    assert rig.chunk("needs")
    assert (record.state, record.has_host_copy) == (N, False)
    rig.rest()
