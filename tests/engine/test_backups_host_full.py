"""A full host pool: who makes room, who must not, and what a refusal says (R16)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from cphicache.engine.host_eviction import HostEviction, Victims
from cphicache.ledger import Need
from tests.engine.rig import B, C, L, N, Rig


def store(rig: Rig, text: str, owners: Sequence[int] | None = None, prefix: str = "") -> int:
    """Commit ``text`` (behind ``prefix``) on pages of these owners and return its node's id."""
    rig.serve(f"store {prefix}{text}", prefix + text, owners)
    rig.settle()
    return rig.node(prefix + text).id


def to_host(rig: Rig) -> None:
    """Everything goes off the device."""
    rig.evict(10_000)
    assert rig.cache.evictable_size() == 0


def freed(rig: Rig, rank: int = 0) -> list[object]:
    """Nodes whose host copies were taken, in order."""
    return [args[0] for args in rig.local(rank).called("free_node")]


def refusals(rig: Rig) -> list[dict[str, Any]]:
    return rig.events("refused", reason="no_host_slots")


def pages_of_one_token(**options: Any) -> Rig:
    return Rig(page_size=1, **options)


def test_three_go_in_order_for_a_rank_that_needs_three() -> None:
    """R16: rank 0 needs 3, candidates in order A (1 slot), B (owns 0), C (4 slots): all three go, 5 are freed, one more reservation."""
    rig = pages_of_one_token(host_slots=5)
    nodes = [store(rig, "A", [0]), store(rig, "B", [1]), store(rig, "CDEF", [0, 0, 0, 0])]
    to_host(rig)
    assert rig.free_slots() == [0, 4]
    rig.begin("r1", "xyz")
    rig.grow("r1", owners=[0, 0, 0])
    assert rig.reserve("r1")
    assert freed(rig) == nodes
    assert [rig.cache.state.tree.find(node) for node in nodes] == [None] * 3
    assert rig.free_slots() == [2, 5]  # 5 freed on rank 0, 3 of them taken
    op = rig.op("r1").node_id
    assert [event["trigger"] for event in rig.events("step", node=op)] == ["reserve", "reserve_retry"]
    counters = rig.cache.counters
    assert (counters.host_evictions, counters.host_evicted_tokens, counters.eviction_retries_succeeded) == (3, 6, 1)
    rig.rest()


def test_a_node_that_owns_one_of_four_positions_frees_one_slot() -> None:
    """R16: node of length 4, this rank has position 1 of it, need 1: one slot is freed, the host-only node and its machine are gone."""
    rig = pages_of_one_token(cp_size=4, host_slots=1)
    node = store(rig, "abcd", [1, 0, 2, 3])
    to_host(rig)
    record = rig.node("abcd").backup
    assert rig.free_slots() == [0, 0, 0, 0]
    rig.begin("r1", "x")
    rig.grow("r1", owners=[0])
    assert rig.reserve("r1")
    assert freed(rig) == [node]
    assert (rig.has("a"), rig.cache.state.tree.find(node), record.state) == (False, None, N)
    assert rig.free_slots() == [0, 1, 1, 1]
    rig.rest()


@pytest.mark.parametrize("wanted", [1, 2, 3])
def test_eviction_stops_when_the_slots_suffice(wanted: int) -> None:
    """R16: victims go in eviction order, oldest first, and no more than needed."""
    rig = pages_of_one_token(cp_size=1, host_slots=4)
    nodes = [store(rig, text) for text in "abcd"]
    to_host(rig)
    rig.serve("r1", "xyz"[:wanted])
    assert freed(rig) == nodes[:wanted]
    assert rig.cache.counters.refused == {}
    assert [rig.has(text) for text in "abcd"] == [False] * wanted + [True] * (4 - wanted)
    rig.rest()


def test_victims_are_looked_for_once_for_each_reservation(monkeypatch: pytest.MonkeyPatch) -> None:
    """R16: a search may pass over every host copy; a reservation makes one, whether it finds room or is refused."""
    searches = []
    plan = HostEviction.plan

    def counted(self: HostEviction, need: Need, may_reclaim: bool) -> Victims | None:
        searches.append(need)
        return plan(self, need, may_reclaim)

    monkeypatch.setattr(HostEviction, "plan", counted)
    rig = Rig(ranks=[0], cp_size=1, host_slots=4)
    store(rig, "ab")
    to_host(rig)
    assert rig.begin("finds room", "x")
    assert rig.chunk("finds room")
    assert searches == [(2,)]
    assert rig.begin("is refused", "stuv")
    assert not rig.chunk("is refused")
    assert searches == [(2,), (8,)]
    rig.rest()


def test_a_parent_joins_when_it_has_become_a_leaf() -> None:
    """R16: a chain on the host goes from its end: child first, then its parent."""
    rig = pages_of_one_token(cp_size=1, host_slots=4)
    parent = store(rig, "ab")
    child = store(rig, "cd", prefix="ab")
    to_host(rig)
    rig.serve("r1", "wxyz")
    assert freed(rig) == [child, parent]
    assert rig.state("wxyz") is L
    rig.rest()


def test_short_on_one_rank_means_nothing_is_evicted() -> None:
    """R16: the victims would do for rank 0 and not for rank 1: none goes, and the refusal says needed, free, evictable, pinned and in
    flight by rank."""
    rig = pages_of_one_token(host_slots=4)
    store(rig, "ab", [0, 0])
    to_host(rig)
    rig.hold()
    rig.serve("busy", "pqr", [1, 1, 1])
    rig.begin("r1", "uvwxyz")
    rig.grow("r1", owners=[0, 0, 0, 1, 1, 1])
    assert not rig.reserve("r1")
    assert freed(rig) == []
    assert rig.has("ab")
    (refusal,) = refusals(rig)
    found = {name: refusal[name] for name in ("request", "needed", "free", "evictable", "pinned_tokens", "in_flight")}
    assert found == {
        "request": "r1",
        "needed": [3, 3],
        "free": [2, 1],
        "evictable": [2, 0],
        "pinned_tokens": 0,
        "in_flight": 1,
    }
    assert rig.cache.counters.refused == {"no_host_slots": 1}
    rig.rest()


def test_every_attempt_is_a_step_and_details_are_limited_by_node() -> None:
    """R16: each refused attempt is logged as a step, and leaves nothing reserved at the node; its numbers are noted again only after some
    ticks for the same node."""
    rig = Rig(host_slots=4)
    rig.hold()
    rig.serve("full", "wxyz")
    rig.serve("r0", "ab")
    node = rig.node("ab").id
    for attempt in range(1, 20):
        rig.tick()
        rig.serve(f"r{attempt}", "ab")
    assert len(rig.events("step", node=node, trigger="reserve")) == 20
    assert [event["tick"] for event in refusals(rig) if event["node"] == node] == [0, 16]
    # Before the first forward, and at each insert; once the node is there, the next prompt is refused before its forward for its sake.
    assert rig.cache.counters.refused == {"no_host_slots": 1 + 20, "parent_not_backed": 19}
    refused = rig.node("ab").backup
    assert (refused.pages, refused.need, refused.generation) == ([], (0, 0), 0)
    rig.rest()


# -- who is no candidate ------------------------------------------------------------------------------------------------------------
def test_what_the_extent_hangs_on_is_no_candidate() -> None:
    """R16: the host-only ancestors of the extent being reserved are not evicted for it; another host-only node is."""
    rig = Rig(host_slots=8, load_back_threshold=1000)
    store(rig, "abcdef")
    to_host(rig)
    rig.begin("r1", "abcdefghij")  # two pages free, four needed
    assert not rig.chunk("r1")
    assert (freed(rig), rig.has("abcdef")) == ([], True)
    rig.abort("r1")
    rig.serve("other", "xy")
    rig.settle()
    to_host(rig)
    other = rig.node("xy").id
    rig.begin("r2", "abcdefgh")
    assert rig.chunk("r2")
    assert freed(rig) == [other]
    rig.rest()


def test_an_unbound_reservation_below_keeps_a_node() -> None:
    """R16: a host-only node on which a reservation of another request hangs is no candidate; once that is given up it is."""
    rig = Rig(host_slots=8, load_back_threshold=1000)
    node = store(rig, "abcd")
    to_host(rig)
    rig.begin("r1", "abcdef")
    assert rig.chunk("r1")
    rig.begin("r2", "wxyz")
    assert not rig.chunk("r2")
    assert freed(rig) == []
    rig.abort("r2")
    rig.abort("r1")
    rig.begin("r3", "stuvwx")
    assert rig.chunk("r3")
    assert freed(rig) == [node]
    rig.rest()


@pytest.mark.parametrize("text", ["uvwxyz", "st"])
def test_pending_nodes_are_no_candidates(text: str) -> None:
    """R16: neither in flight, nor reserved, nor rolling back; also with the switch on."""
    rig = Rig(host_slots=6, reclaim_device_valid=True)
    rig.hold()
    rig.serve("in flight", "ab")
    rig.serve("rolling back", "cd")
    rig.fail_copies(rig.node("cd").backup.key, 0, drained=False)
    rig.tick(2)
    rig.begin("reserved", "ef")
    rig.chunk("reserved")
    rig.insert("reserved", chunked=True)
    assert rig.states("ab", "cd") == [L, B]
    rig.begin("r1", text)
    assert not rig.chunk("r1")
    assert freed(rig) == []
    rig.rest()


@pytest.mark.parametrize("bound", [False, True])
def test_a_pending_child_keeps_its_parents_host_copy(bound: bool) -> None:
    """R16: with the switch on, a committed node on the device with a pending child, or an unbound reservation below, is not reclaimed;
    once the child has ended in a rollback it is."""
    rig = Rig(host_slots=8, reclaim_device_valid=True)
    store(rig, "ab")
    rig.hold()
    rig.begin("child", "abcd")
    rig.chunk("child")
    rig.layer(0, 0)
    if bound:
        rig.insert("child", chunked=True)
    rig.begin("r1", "stuvwxyz")
    assert not rig.chunk("r1")
    assert rig.state("ab") is C
    rig.abort("r1")
    rig.end_forward()  # incomplete: rolls back
    rig.finish_all()
    rig.tick(2)
    rig.begin("r2", "stuvwxyz")
    assert rig.chunk("r2")
    assert rig.state("ab") is N
    rig.rest()


def test_loading_nodes_are_no_candidates() -> None:
    """R16: a node that is being loaded back is pinned on the host, with the switch on, too, until the load-back is agreed."""
    rig = Rig(host_slots=4, reclaim_device_valid=True)
    store(rig, "abcd")
    to_host(rig)
    rig.hold()
    rig.begin("reader", "abcd")
    rig.start_loads()
    assert rig.node("abcd").loading is not None
    rig.begin("r1", "xy")
    assert not rig.chunk("r1")
    (refusal,) = refusals(rig)
    assert (refusal["pinned_tokens"], refusal["in_flight"]) == (8, 0)
    assert freed(rig) == []
    rig.abort("r1")
    rig.finish_all()
    rig.tick(2)
    rig.begin("r2", "xy")
    assert rig.chunk("r2")
    assert (rig.state("abcd"), freed(rig)) == (N, [rig.node("abcd").id])
    rig.rest()


# -- the switch -----------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("reclaim", [False, True])
def test_copies_of_nodes_on_the_device_are_reclaimed_only_if_so_configured(reclaim: bool) -> None:
    """R16: off: refused and nothing changes; on: the copy goes (COMMITTED -> DEVICE_VALID_HOST_NONE), the node stays a device hit."""
    rig = Rig(host_slots=4, reclaim_device_valid=reclaim)
    node = store(rig, "abcd")
    rig.begin("r1", "wxyz")
    assert rig.chunk("r1") is reclaim
    assert rig.state("abcd") is (N if reclaim else C)
    assert len(rig.match("abcd").device_pages) == 4
    assert rig.cache.counters.reclaims == reclaim
    assert freed(rig) == ([node] if reclaim else [])
    assert rig.cache.counters.host_evictions == 0
    rig.rest()


def test_reclaim_comes_last_and_children_go_before_parents() -> None:
    """R16: host-only nodes first, then copies of nodes on the device, of which a child goes before its parent."""
    rig = Rig(cp_size=1, host_slots=12, reclaim_device_valid=True)
    host_only = store(rig, "pq")
    to_host(rig)
    parent, child = store(rig, "ab"), store(rig, "cd", prefix="ab")
    rig.begin("r1", "x")
    rig.grow("r1")
    assert rig.reserve("r1")
    assert freed(rig) == [host_only]
    rig.begin("r2", "uvwxy")
    assert rig.chunk("r2")
    assert freed(rig) == [host_only, child, parent]
    assert rig.states("ab", "abcd") == [N, N]
    rig.rest()


def test_what_is_taken_from_the_host_alone_is_not_reclaimed_as_well() -> None:
    """R16: where both are needed, a node that has left the device gives its slots once, and the rest is reclaimed."""
    rig = Rig(cp_size=1, host_slots=12, reclaim_device_valid=True)
    host_only = store(rig, "pq")
    to_host(rig)
    parent, child = store(rig, "ab"), store(rig, "cd", prefix="ab")
    rig.begin("r1", "uvwxy")
    assert rig.chunk("r1")
    assert freed(rig) == [host_only, child, parent]
    assert (rig.cache.counters.host_evictions, rig.cache.counters.reclaims) == (1, 2)
    rig.rest()


def test_a_pinned_host_copy_is_not_reclaimed() -> None:
    """R16, R27: a pin keeps the host copy of a node on the device, too, until it expires."""
    rig = Rig(cp_size=1, host_slots=4, reclaim_device_valid=True)
    store(rig, "ab")
    rig.each(lambda side: side.cache.pin_host(rig.key("ab"), 2))
    rig.begin("r1", "xy")
    assert not rig.chunk("r1")
    assert (rig.state("ab"), freed(rig)) == (C, [])
    rig.tick(2)
    rig.begin("r2", "xy")
    assert rig.chunk("r2")
    assert rig.state("ab") is N
    rig.rest()


@pytest.mark.parametrize("threshold", [2, 1000])
def test_what_is_on_the_device_again_is_reclaimed_again(threshold: int) -> None:
    """R16, R27: a node that was host-only when a reservation looked for copies to reclaim is one of them when it has been loaded back, or
    computed again."""
    rig = Rig(cp_size=1, host_slots=4, reclaim_device_valid=True, load_back_threshold=threshold)
    node = store(rig, "ab")
    to_host(rig)
    rig.each(lambda side: side.cache.pin_host(rig.key("ab"), 1))
    rig.begin("r1", "xy")
    assert not rig.chunk("r1")
    rig.abort("r1")
    rig.tick()
    rig.serve("again", "ab")
    rig.settle()
    assert (rig.state("ab"), rig.cache.counters.load_backs) == (C, threshold == 2)
    rig.begin("r2", "xy")
    assert rig.chunk("r2")
    assert (rig.state("ab"), freed(rig)) == (N, [node])
    rig.rest()


def test_a_node_with_a_host_backed_child_is_not_reclaimed() -> None:
    """R16: a parent whose only child is host-only keeps its copy as long as the child does."""
    rig = Rig(cp_size=1, host_slots=8, reclaim_device_valid=True)
    store(rig, "ab")
    child = store(rig, "cd", prefix="ab")
    rig.evict(4)
    assert rig.node("abcd").pages is None
    rig.serve("r1", "xy")
    rig.settle()
    assert freed(rig) == [child]
    assert (rig.has("abcd"), rig.state("ab")) == (False, C)
    rig.rest()


# -- the second reservation -------------------------------------------------------------------------------------------------------
def test_the_second_reservation_fails_at_one_rank_s_port() -> None:
    """R16, R22: room was made, and then one rank finds no slots after all: the others go on, the backup rolls back on all at the agreed
    tick, nothing is leaked, and the node can be backed up again."""
    rig = Rig(host_slots=4)
    node = store(rig, "abcd")
    to_host(rig)
    rig.begin("r1", "wxyz")
    rig.local(1).fail_reserve_next = True
    assert rig.chunk("r1")
    assert freed(rig) == [node]
    assert rig.local(1).free_slots() == {"target": 4, "draft": 4}
    assert rig.free_slots() == [0, 0]
    rig.forward()
    rig.finish("r1")
    rig.tick(2)
    assert rig.state("wxyz") is N
    assert rig.free_slots() == [4, 4]
    rig.serve("r2", "wxyz")
    rig.settle()
    assert rig.state("wxyz") is C
    rig.rest()
