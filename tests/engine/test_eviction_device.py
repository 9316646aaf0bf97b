"""What an eviction does to nodes and accounts, how far it goes, and in which order (R27, R4)."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from cphicache.engine import EvictResult
from cphicache.lifecycle import State
from cphicache.tree.eviction import POLICIES
from tests.engine.rig import Rig
from tests.engine.rig_extra import ALL_TOKENS, back_up, host_only_slots, kv_events, to_host

N, L, C = State.DEVICE_VALID_HOST_NONE, State.LAYERS_IN_FLIGHT, State.COMMITTED


def unbacked(rig: Rig, *texts: str) -> None:
    """Prompts that are on the device and have no host copy: there was no slot for them."""
    for text in texts:
        rig.serve(f"plain:{text}", text)
        rig.settle()
        assert rig.state(text) is N


def on_device(rig: Rig, *texts: str) -> list[bool]:
    return [rig.has(text) and rig.node(text).pages is not None for text in texts]


def test_backed_up_nodes_become_host_only_and_others_are_dropped() -> None:
    """R27: an evicted node with a host copy stays in the tree, host-only; one without is gone. The result tells both amounts."""
    rig = Rig(host_slots=4)
    back_up(rig, "abcd")
    unbacked(rig, "pq")
    assert rig.evict(ALL_TOKENS) == EvictResult(12, 4)
    assert rig.has("abcd")
    assert rig.node("abcd").pages is None
    assert rig.state("abcd") is C
    assert not rig.has("p")
    assert rig.cache.state.host_only_need == host_only_slots(rig) == [4, 4]
    assert rig.cache.available_size() == 64
    counters = rig.cache.counters
    assert (counters.device_evictions, counters.device_evicted_tokens, counters.device_dropped_tokens) == (2, 12, 4)
    assert [(e["tokens"], e["dropped"]) for e in rig.events("device_evicted")] == [(12, 4)]
    rig.rest()


@pytest.mark.parametrize(("tokens", "evicted"), [(0, 0), (1, 4), (4, 4), (5, 8), (100, 12)])
def test_an_eviction_takes_whole_nodes_until_it_is_enough(tokens: int, evicted: int) -> None:
    """R27: whole nodes go, least recently used first, until the tokens asked for are free or no victim is left; asking always gets a
    result."""
    rig = Rig()
    back_up(rig, "ab", "cd", "ef")
    assert rig.evict(tokens) == EvictResult(evicted, 0)
    assert on_device(rig, "ab", "cd", "ef") == [index >= evicted // 4 for index in range(3)]
    rig.rest()


def test_children_go_before_their_parents() -> None:
    """R27: only leaves are victims: a chain is taken from its end, and a node with a child on the device stays."""
    rig = Rig()
    back_up(rig, "ab", "abcd", "abcdef", "abx")
    assert rig.begin("holds", "abx")
    rig.evict(4)
    assert on_device(rig, "ab", "abcd", "abcdef", "abx") == [True, True, False, True]
    rig.evict(ALL_TOKENS)
    assert on_device(rig, "ab", "abcd", "abx") == [True, False, True]
    rig.abort("holds")
    rig.evict(ALL_TOKENS)
    assert on_device(rig, "ab", "abx") == [False, False]
    rig.rest()


def test_the_root_is_never_evicted() -> None:
    """R27: neither an eviction of everything nor a flush takes the root; an empty tree evicts nothing."""
    rig = Rig()
    root = rig.cache.state.tree.root
    assert rig.evict(ALL_TOKENS) == EvictResult(0, 0)
    assert rig.events("device_evicted") == [], "what takes nothing is not noted"
    back_up(rig, "ab")
    rig.evict(ALL_TOKENS)
    assert rig.evict(ALL_TOKENS) == EvictResult(0, 0)
    rig.together(lambda side: side.cache.flush())
    assert rig.cache.state.tree.root is root
    assert rig.match("ab").device_node is root
    rig.serve("again", "ab")
    rig.settle()
    assert rig.state("ab") is C
    rig.rest()


def test_locked_and_pending_nodes_are_no_victims() -> None:
    """R27, R30: what a request reads or a copy reads is not evicted; it is when they have let go."""
    rig = Rig()
    back_up(rig, "ab")
    rig.hold()
    rig.serve("flies", "cd")
    assert rig.begin("reads", "ab")
    assert (rig.cache.evictable_size(), rig.cache.protected_size()) == (0, 8)
    assert rig.evict(ALL_TOKENS) == EvictResult(0, 0)
    rig.finish_all()
    rig.settle()
    assert rig.evict(ALL_TOKENS) == EvictResult(4, 0)
    assert on_device(rig, "ab", "cd") == [True, False]
    rig.abort("reads")
    assert rig.evict(ALL_TOKENS) == EvictResult(4, 0)
    rig.rest()


def lanes(rig: Rig, *nodes: Sequence[int]) -> list[str]:
    """Fill the device: for each of these owner patterns one node with that many pages of these owners."""
    texts = []
    for index, owners in enumerate(nodes):
        text = chr(ord("a") + index) * len(owners)
        rig.serve(text, text, owners=owners)
        rig.settle()
        texts.append(text)
    return texts


def test_an_eviction_for_lanes_goes_on_until_each_has_enough() -> None:
    """R4: an allocation that lacks pages of one owner evicts, in order, past victims that give none of that owner, until each lane has
    what it needs; then it succeeds."""
    rig = Rig(cp_size=2, usable_pages=12)
    texts = lanes(rig, [0, 0], [0], [1, 0, 0], [1, 1, 1, 1], [0, 1])
    assert rig.cache.state.alloc.lane_free() == (0, 0)
    assert rig.begin("needs", "wxyz")
    rig.grow("needs")
    assert on_device(rig, *texts) == [False, False, False, False, True]
    assert [rig.cache.state.owners(rig.row("needs")).count(rank) for rank in (0, 1)] == [2, 2]
    rig.rest()


def test_an_eviction_for_lanes_ends_when_no_victim_is_left() -> None:
    """R4, R29: when no victim is left and a lane is still short, the allocation is refused with nothing taken; what was evicted stays
    evicted."""
    rig = Rig(cp_size=2, usable_pages=8)
    texts = lanes(rig, [0, 0], [0, 1])
    assert rig.begin("locked", "xxx")
    rig.grow("locked", owners=[1, 1, 1])
    assert rig.each(lambda side: side.cache.alloc(4, None)) is None
    assert on_device(rig, *texts) == [False, False]
    assert rig.cache.state.alloc.lane_free() == (4, 1)
    rig.rest()


def test_kv_events_by_medium() -> None:
    """R27: stores and removals are told by medium: device on insert, load-back and eviction, host on commit and host eviction."""
    rig = Rig(cp_size=1, host_slots=8)
    rig.serve("one", "abcd")
    node = rig.node("abcd").id
    assert kv_events(rig) == [(True, "device", node, 4)]
    rig.settle()
    assert kv_events(rig) == [(True, "host", node, 4)]
    rig.evict(ALL_TOKENS)
    assert kv_events(rig) == [(False, "device", node, 4)]
    assert rig.begin("reads", "abcd")
    assert kv_events(rig) == [(True, "device", node, 4)]
    rig.start_loads()
    rig.settle()
    rig.abort("reads")
    rig.evict(ALL_TOKENS)
    kv_events(rig)
    assert rig.begin("two", "pq")
    rig.chunk("two")
    assert kv_events(rig) == [(False, "host", node, 4)]
    assert not rig.has("a")
    rig.forward()
    rig.finish("two")
    rig.settle()
    other = rig.node("pq").id
    assert kv_events(rig) == [(True, "device", other, 2), (True, "host", other, 2)]
    rig.together(lambda side: side.cache.flush())
    assert kv_events(rig) == [(False, "host", other, 2), (False, "device", other, 2)]
    rig.rest()


def test_a_dropped_node_leaves_no_retry_behind() -> None:
    """R27, R15: a node that waited to be tried again and was evicted meanwhile is forgotten, whatever comes free."""
    rig = Rig(host_slots=4)
    back_up(rig, "abcd")
    unbacked(rig, "pq")
    assert rig.cache.state.retries
    rig.evict(ALL_TOKENS)
    assert not rig.cache.state.retries
    rig.tick(2)
    assert not rig.has("pq")
    rig.rest()


def hit(rig: Rig, text: str, times: int) -> None:
    """Requests that insert the same again: hits that also touch it."""
    for index in range(times):
        rig.serve(f"hit{index}:{text}", text)


ORDERS = {
    "lru": ["bb", "cc", "aa", "dd"],
    "mru": ["dd", "aa", "cc", "bb"],
    "fifo": ["aa", "bb", "cc", "dd"],
    "lfu": ["dd", "bb", "cc", "aa"],
    "priority": ["bb", "dd", "cc", "aa"],
}
"""Made in the order aa, bb, cc, dd; used bb, then cc twice, then aa thrice, then dd looked at; priorities aa 2, cc 1, others 0."""


def used(rig: Rig) -> None:
    back_up(rig, "aa", "bb", "cc", "dd")
    for index, text in enumerate(["bb", "cc", "aa"], start=1):
        hit(rig, text, index)
    assert rig.begin("looks", "dd")  # an access, no hit
    rig.abort("looks")
    for text, priority in (("aa", 2), ("cc", 1)):
        rig.each(lambda side, text=text, priority=priority: side.cache.state.tree.set_priority(side.node(rig.key(text)), priority))  # type: ignore[misc]


def test_every_policy_has_an_order() -> None:
    """R27: every policy of the tree is tested here."""
    assert ORDERS.keys() == POLICIES.keys()


@pytest.mark.parametrize("policy", ORDERS)
def test_device_victims_go_in_the_order_of_the_policy(policy: str) -> None:
    """R27: LRU, LFU, FIFO, MRU and priority through the engine: device pages are taken in that order."""
    rig = Rig(eviction_policy=policy)
    used(rig)
    taken = []
    while rig.evict(1).num_tokens_evicted:
        taken += [text for text in ORDERS[policy] if text not in taken and not on_device(rig, text)[0]]
    assert taken == ORDERS[policy]
    rig.rest()


@pytest.mark.parametrize("policy", ORDERS)
def test_host_victims_go_in_the_order_of_the_policy(policy: str) -> None:
    """R27, R16: host-only leaves lose their host copies in that same order, one at a time, as room is needed."""
    rig = Rig(cp_size=1, eviction_policy=policy, host_slots=16)
    used(rig)
    rig.evict(ALL_TOKENS)
    taken: list[str] = []
    for index in range(4):
        assert rig.begin(f"keeps{index}", "pqrs"[index] * 2)
        rig.chunk(f"keeps{index}")  # its reservation needs the slots of one node, and keeps them
        taken += [text for text in ORDERS[policy] if text not in taken and not rig.has(text)]
        assert len(taken) == index + 1
    assert taken == ORDERS[policy]
    assert rig.cache.counters.host_evictions == 4
    rig.rest()


def test_host_only_nodes_stay_until_room_is_needed() -> None:
    """R27: taking device pages takes no host copy, and a host-only parent stays while a child of it is host-only."""
    rig = Rig(cp_size=1, host_slots=16)
    to_host(rig, "ab", "abcd")
    assert rig.states("ab", "abcd") == [C, C]
    assert rig.free_slots() == [8]
    assert rig.begin("new", "pqrstu")
    rig.chunk("new")
    assert rig.has("ab")
    assert not rig.has("abc"), "the leaf went first, and sufficed"
    rig.rest()
