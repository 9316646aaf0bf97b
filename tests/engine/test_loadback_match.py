"""Matching: what is promised, from where, and that asking changes nothing (R24, R8, R28)."""

from __future__ import annotations

from itertools import combinations

import pytest

from cphicache.engine import Refusal
from cphicache.lifecycle import State
from tests.engine.rig import Rig
from tests.engine.rig_extra import ALL_TOKENS, ask_load, back_up, frozen, to_host

N, L, C = State.DEVICE_VALID_HOST_NONE, State.LAYERS_IN_FLIGHT, State.COMMITTED


def zoo() -> Rig:
    """A chain on the device, host-only behind it, and other nodes in flight, loading and not backed up."""
    rig = Rig(usable_pages=64)
    to_host(rig, "ab", "abcd", "abcdef", "pq", "pqrs")
    assert rig.begin("keeps", "ab")  # loaded, and kept
    rig.start_loads()
    rig.settle()
    rig.hold()
    rig.serve("flies", "mnop")
    rig.forward()
    assert rig.begin("loads", "pqrs")
    assert rig.states("ab", "abcdef", "mnop", "pqrs") == [C, C, L, C]
    return rig


def test_a_match_is_device_then_host() -> None:
    """R24: a match gives the device pages, then the host-only chain behind them with its tokens, and the last node of each kind."""
    rig = zoo()
    found = rig.match("abcdefx")
    ab, abcd, abcdef = rig.node("ab"), rig.node("abcd"), rig.node("abcdef")
    assert found.device_pages == ab.pages
    assert found.device_node is ab
    assert found.host_nodes == [abcd, abcdef]
    assert found.host_tail_pages == 2
    assert found.host_hit_tokens == 8
    assert found.last_host_node is abcdef
    rig.rest()


def test_pending_nodes_are_device_hits_only() -> None:
    """R8: a node whose backup is in flight is a device hit with host length 0, and never the last host node."""
    rig = zoo()
    found = rig.match("mnop")
    assert found.device_node is rig.node("mnop")
    assert len(found.device_pages) == 4
    assert (found.host_nodes, found.host_hit_tokens) == ([], 0)
    assert found.last_host_node is rig.cache.state.tree.root
    rig.rest()


def test_a_loading_node_is_a_device_hit() -> None:
    """R25, R24: a node is published when its load-back is queued: the next match finds it on the device, to read behind its layers."""
    rig = zoo()
    found = rig.match("pqrs")
    assert found.device_pages == rig.row("loads")
    assert found.device_node is rig.node("pqrs")
    assert found.host_nodes == []
    rig.rest()


def test_a_match_stops_at_the_first_gap() -> None:
    """R24: behind a node that can neither be read nor loaded (its load-back has failed) nothing is promised, host copies included."""
    rig = Rig()
    to_host(rig, "ab", "abcd", "abcdef")
    rig.hold()
    assert rig.begin("reads", "abcd")
    rig.start_loads()
    (load_id,) = rig.cache.state.loads
    rig.local(1).fail(load_id, drained=False)
    rig.tick(2)
    found = rig.match("abcdef")
    assert (found.device_pages, found.host_nodes, found.host_hit_tokens) == ([], [], 0)
    assert found.device_node is found.last_host_node is rig.cache.state.tree.root
    rig.finish_all()
    rig.rest()


def test_matching_is_pure() -> None:
    """R24: asking changes nothing, whatever is asked: the tree, the accounts and the eviction order are the same afterwards."""
    rig = zoo()
    before = frozen(rig)
    texts = ["".join(some) for size in range(5) for some in combinations("abcdmnpqrs", size)]
    for text in [*texts, "abcdefgh", "abcx", "mnopq", "mnx", "pqrst"]:
        for tail in (0, 1):
            rig.match(text, tail)
    assert frozen(rig) == before
    rig.rest()


@pytest.mark.parametrize("asked", [1, 2, 3])
def test_a_match_inside_a_device_node_returns_it_whole_with_cut_pages(asked: int) -> None:
    """R24, R28: a match that ends inside a node returns that node with the pages cut; locking it holds all of it, a later split keeps
    the object as the tail, and what was locked is unlocked exactly, in every fragment."""
    rig = Rig()
    back_up(rig, "abcd")
    node = rig.node("abcd")
    pages = list(node.pages or ())
    found = rig.match("abcd"[:asked])
    assert (found.device_node, found.device_pages) == (node, pages[:asked])
    assert rig.begin("inside", "abcd"[:asked])
    assert (node.lock_ref, rig.cache.protected_size()) == (1, 8)
    rig.serve("splits", "abcd"[:asked] + "xy")
    head = rig.node("abcd"[:asked])
    assert head is not node
    assert rig.node("abcd") is node
    assert (head.lock_ref, node.lock_ref) == (2, 1), "the head also keeps what was inserted below it"
    rig.settle()
    assert (head.lock_ref, node.lock_ref) == (1, 1)
    rig.evict(ALL_TOKENS)
    assert head.pages == pages[:asked]
    assert node.pages == pages[asked:]
    rig.abort("inside")
    assert (head.lock_ref, node.lock_ref) == (0, 0)
    assert rig.cache.evictable_size() == 8
    rig.rest()


def test_a_lock_survives_several_splits() -> None:
    """R28: a handle into a node that is divided again and again holds every fragment, once, and lets all of them go."""
    rig = Rig()
    back_up(rig, "abcdef")
    assert rig.begin("inside", "abcde")
    for text in ("abcdx", "abx", "ax", "abcx"):
        rig.serve(text, text)
    rig.settle()
    fragments = [rig.node("abcdef"[:end]) for end in (1, 2, 3, 4, 6)]
    assert [node.length_pages for node in fragments] == [1, 1, 1, 1, 2]
    assert [node.lock_ref for node in fragments] == [1] * 5
    rig.abort("inside")
    assert [node.lock_ref for node in fragments] == [0] * 5
    rig.rest()


@pytest.mark.parametrize("asked", [1, 2, 3])
def test_a_match_inside_a_host_only_node_is_cut_by_the_load_back(asked: int) -> None:
    """R24, R25: a host-only node matched in part is promised in part and stays whole while asked; the load-back divides it and brings
    the head alone."""
    rig = Rig()
    to_host(rig, "abcd")
    node, owners = rig.node("abcd"), rig.node("abcd").backup.owners
    found = rig.match("abcd"[:asked] + "x")
    assert (found.host_nodes, found.host_tail_pages, found.host_hit_tokens) == ([node], asked, 2 * asked)
    assert node.length_pages == 4
    assert rig.begin("reads", "abcd"[:asked] + "x")
    head = rig.node("abcd"[:asked])
    assert rig.row("reads") == head.pages
    assert rig.node("abcd") is node
    assert node.pages is None
    assert (head.backup.owners, node.backup.owners) == (owners[:asked], owners[asked:])
    assert rig.states("abcd"[:asked], "abcd") == [C, C]
    rig.start_loads()
    rig.settle()
    rig.rest()


@pytest.mark.parametrize(("threshold", "promised"), [(8, 8), (9, 0)])
def test_only_what_passes_the_threshold_is_promised(threshold: int, promised: int) -> None:
    """R24, R25: a host hit below the threshold is promised as 0 and a load-back of it is refused as such; the request computes it."""
    rig = Rig(load_back_threshold=threshold)
    to_host(rig, "abcd")
    found = rig.match("abcd")
    assert found.host_hit_tokens == promised
    assert found.host_nodes == [rig.node("abcd")]
    if not promised:
        assert ask_load(rig, "asks", "abcd").refused is Refusal.BELOW_THRESHOLD
        assert rig.begin("computes", "abcd")
        assert rig.row("computes") == []
    rig.rest()


def test_nothing_on_the_host_is_nothing_to_load() -> None:
    """R25: a load-back of a match without host-only nodes is refused as having nothing to load, and changes nothing."""
    rig = Rig()
    back_up(rig, "ab")
    before = frozen(rig)
    assert ask_load(rig, "asks", "ab").refused is Refusal.NOTHING_TO_LOAD
    assert frozen(rig)[0][1] == before[0][1]
    assert not rig.events("load_back_refused")
    rig.rest()


def test_namespaces_do_not_match_each_other() -> None:
    """R28, R24: the same tokens under another extra key are another prefix."""
    rig = Rig()
    back_up(rig, "abcd")
    key = rig.cache.key(rig.tokens("abcd"), extra_key="adapter")
    assert rig.each(lambda side: side.cache.match_prefix(key)).device_pages == []
    rig.rest()
