"""Eviction order: policies, heap costs, and plans for the host."""

from __future__ import annotations

import pytest

from cphicache.spaces.types import LogicalPage
from cphicache.tree import POLICIES, Node, RadixKey, RadixTree, policy_named
from cphicache.tree.eviction import Candidates

LEAVES = 100_000


def wide_tree(leaves: int, policy: str = "lru") -> tuple[RadixTree[None], list[Node[None]]]:
    """Leaves 1..n under the root, one page each, made in that order."""
    tree: RadixTree[None] = RadixTree(1, policy, lambda node: None)
    nodes = [tree.add_child(tree.root, RadixKey.of([i], 1), [LogicalPage(i)], i, i) for i in range(1, leaves + 1)]
    return tree, nodes


def chain(tree: RadixTree[None], lengths: list[int], first_id: int, token: int) -> list[Node[None]]:
    """Host-only nodes below each other."""
    nodes: list[Node[None]] = []
    parent = tree.root
    for at, length in enumerate(lengths):
        segment = RadixKey.of([token * 100 + at] * length, 1)
        parent = tree.add_child(parent, segment, [LogicalPage(1)] * length, first_id + at, first_id + at)
        nodes.append(parent)
    for node in reversed(nodes):
        tree.drop_device(node)
    return nodes


def test_unknown_policy_is_refused_with_the_known_names() -> None:
    """R27, R35: an unknown policy is an error that lists the known ones."""
    with pytest.raises(ValueError, match="unknown eviction policy 'arc': use one of lru, lfu, fifo, mru, priority"):
        RadixTree(1, "arc", lambda node: None)
    assert {name: policy_named(name) for name in POLICIES} == POLICIES


def test_heap_operations_per_victim_do_not_grow_with_the_leaves() -> None:
    """R27: with 1e5 leaves, a device victim and a host victim cost a small constant number of heap operations (each O(log n))."""
    tree, _ = wide_tree(LEAVES)
    assert tree.heap_operations == LEAVES
    before = tree.heap_operations
    for expected in range(1, 1001):
        victim = tree.next_device_victim()
        assert victim is not None
        assert victim.id == expected
        tree.drop_device(victim)
    assert tree.heap_operations - before <= 3 * 1000
    before = tree.heap_operations
    for expected in range(1, 501):
        plan = tree.plan_host_victims(lambda node: True, lambda node: True)
        assert plan is not None
        assert [node.id for node in plan] == [expected]
        tree.remove(plan[0])
    assert tree.heap_operations - before <= 4 * 500
    before = tree.heap_operations
    left = iter(range(99, -1, -1))
    plan = tree.plan_host_victims(lambda node: next(left) == 0, lambda node: True)
    assert plan is not None
    assert [node.id for node in plan] == list(range(501, 601))
    assert tree.heap_operations - before <= 3 * 100


@pytest.mark.parametrize("policy", ["lru", "mru", "lfu"])
def test_touching_is_charged_to_the_touch(policy: str) -> None:
    """R27: touched candidates cost at most a few heap operations a touch in all, and the heap never holds more than twice the live
    entries and a constant."""
    leaves, touches = 2_000, 20_000
    tree, nodes = wide_tree(leaves, policy)
    before = tree.heap_operations
    for now in range(touches):
        node = nodes[now * 7919 % leaves]
        tree.touch([node], leaves + now)
        tree.count_hit(node)
    expected = sorted(nodes, key=tree.eviction_order)
    for node in expected:
        assert tree.next_device_victim() is node
        tree.drop_device(node)
    assert tree.heap_operations - before <= 6 * (touches + leaves)


def test_stale_entries_are_compacted() -> None:
    """R27: candidates that come and go leave a bounded number of stale heap entries behind."""
    tree, nodes = wide_tree(1_000)
    candidates: Candidates[None] = Candidates(policy_named("mru"))
    candidates.add_all(nodes)
    for now in range(5_000):
        node = nodes[now % 1_000]
        if now % 3 == 0:
            candidates.discard(node)
        else:
            candidates.add(node)
            node.last_access = 2_000 + now
            candidates.refresh(node)
        assert candidates.heap_entries <= 2 * len(candidates) + 64
    assert candidates.operations <= 6 * 5_000
    live = [node for node in nodes if node in candidates]
    popped = []
    while (best := candidates.pop()) is not None:
        popped.append(best)
    assert popped == sorted(live, key=candidates.order)
    assert len(candidates) == candidates.heap_entries == 0
    assert tree.node_count == 1_000


def test_rejected_candidates_are_put_back_even_if_the_caller_raises() -> None:
    """R27: asking for a victim changes nothing, whatever ``accept`` and ``enough`` do."""
    tree, nodes = wide_tree(5)
    held = chain(tree, [1, 1], 10, 1)

    def explode(node: Node[None]) -> bool:
        if node in {nodes[2], held[0]}:
            raise RuntimeError("from the caller")
        return node in held

    with pytest.raises(RuntimeError, match="from the caller"):
        tree.next_device_victim(explode)
    with pytest.raises(RuntimeError, match="from the caller"):
        tree.plan_host_victims(lambda node: False, explode)
    assert tree.next_device_victim() is nodes[0]
    assert tree.plan_host_victims(lambda node: node is held[0], lambda node: True) == held[::-1]


def test_set_aside_candidates_are_not_looked_at_again() -> None:
    """R27: a caller that evicts for one lane looks at each rejected leaf once, and what has changed meanwhile is respected."""
    tree, nodes = wide_tree(100)
    aside: list[Node[None]] = []
    looked_at: list[int] = []

    def odd(node: Node[None]) -> bool:
        looked_at.append(node.id)
        return node.id % 2 == 1

    while (victim := tree.next_device_victim(odd, aside)) is not None:
        tree.remove(victim)
    assert sorted(looked_at) == list(range(1, 101))
    tree.lock(nodes[1])
    tree.remove(nodes[3])
    tree.put_back(aside)
    assert tree.next_device_victim() is nodes[5]


def test_victim_stays_a_candidate_until_the_caller_acts() -> None:
    """R27: a victim that is named and not evicted is not lost; a locked one is no candidate until it is unlocked."""
    tree, nodes = wide_tree(2)
    assert tree.next_device_victim() is tree.next_device_victim() is nodes[0]
    tree.lock(nodes[0])
    assert tree.next_device_victim() is nodes[1]
    tree.unlock(nodes[0])
    assert tree.next_device_victim() is nodes[0]


def test_parent_joins_the_plan_when_its_last_child_has() -> None:
    """R16, R27: a host-only parent becomes a victim after all its children, in policy order among the other leaves."""
    tree: RadixTree[None] = RadixTree(1, "lru", lambda node: None)
    parent, child = chain(tree, [2, 1], 1, 1)
    (other,) = chain(tree, [4], 5, 2)
    tree.touch([parent], 50)
    tree.touch([other], 60)
    order: list[int] = []

    def all_of_it(node: Node[None]) -> bool:
        order.append(node.id)
        return len(order) == 3

    before = tree.snapshot(lambda backup: backup)
    assert tree.plan_host_victims(all_of_it, lambda node: True) == [child, parent, other]
    assert tree.snapshot(lambda backup: backup) == before
    assert tree.plan_host_victims(lambda node: False, lambda node: True) is None
    assert tree.plan_host_victims(lambda node: True, lambda node: node is not child) == [other]
    assert tree.plan_host_victims(lambda node: node is parent, lambda node: node is not child) is None


@pytest.mark.parametrize("kept_by", ["hold", "lock", "loading", "device", "child"])
def test_parent_that_something_else_keeps_never_joins(kept_by: str) -> None:
    """R16: a parent that is held, locked, loading, on the device or has another child does not become a victim."""
    tree: RadixTree[None] = RadixTree(1, "lru", lambda node: None)
    parent, child = chain(tree, [2, 1], 1, 1)
    if kept_by == "hold":
        tree.hold_host(parent, 2)
    elif kept_by == "lock":
        tree.lock(parent)
    elif kept_by == "loading":
        tree.set_loading(parent, 7)
    else:
        tree.set_device(parent, [LogicalPage(1), LogicalPage(2)])
        if kept_by == "child":
            sibling = tree.add_child(parent, RadixKey.of([1], 1), [LogicalPage(3)], 9, 9)
            tree.drop_device(sibling)
            tree.drop_device(parent)
            tree.set_loading(sibling, 7)
    assert tree.plan_host_victims(lambda node: node is parent, lambda node: True) is None
    assert tree.plan_host_victims(lambda node: node is child, lambda node: True) == [child]


def test_compaction_catches_up_after_many_pops() -> None:
    """R27: pops leave stale entries in the majority, which the next candidate that is added or improved, or goes, clears away."""

    def many_stale() -> tuple[Candidates[None], list[Node[None]]]:
        _, nodes = wide_tree(100, "mru")
        candidates: Candidates[None] = Candidates(policy_named("mru"))
        candidates.add_all(nodes)
        for node in nodes:  # the newest in the order of their ranks stay on top of the stale ones
            node.last_access += 1_000
            candidates.refresh(node)
        for _ in range(80):
            candidates.pop()
        assert candidates.heap_entries > 2 * len(candidates) + 64, "what is to be cleared away"
        return candidates, nodes

    candidates, nodes = many_stale()
    candidates.add(nodes[99])
    assert candidates.heap_entries == len(candidates) == 21
    candidates, nodes = many_stale()
    candidates.discard(nodes[0])
    assert candidates.heap_entries == len(candidates) == 19
    candidates, nodes = many_stale()
    nodes[0].last_access += 1_000
    candidates.refresh(nodes[0])
    assert candidates.heap_entries == len(candidates) == 20


def test_costs_are_counted_entry_by_entry() -> None:
    """R27: each push and pop of the heap counts, and only a rank that fell makes an entry."""
    _, nodes = wide_tree(3)
    candidates: Candidates[None] = Candidates(policy_named("lru"))
    assert candidates.operations == 0
    candidates.add_all(nodes)
    candidates.refresh(nodes[0])
    nodes[1].last_access = 99
    candidates.refresh(nodes[1])
    assert (candidates.operations, candidates.heap_entries) == (3, 3)
    candidates.discard(nodes[0])
    assert (candidates.operations, candidates.heap_entries) == (3, 3)
    assert candidates.peek() is nodes[2]
    assert (candidates.operations, candidates.heap_entries) == (6, 2), "a stale entry went, and one was replaced"
    assert candidates.pop() is nodes[2]
    assert (candidates.operations, candidates.heap_entries) == (7, 1)


@pytest.mark.parametrize(("name", "protected_hits"), [("slru-1", 1), ("slru", 2), ("slru-3", 3)])
def test_segmented_lru_keeps_what_was_hit_often(name: str, protected_hits: int) -> None:
    """R27: under segmented LRU nodes with enough hits go after all others; inside each of the two parts the oldest goes first."""
    tree: RadixTree[None] = RadixTree(1, name, lambda node: None)
    for node_id, hits in ((1, protected_hits), (2, protected_hits - 1), (3, protected_hits + 5), (4, 0)):
        node = tree.add_child(tree.root, RadixKey.of([node_id], 1), [LogicalPage(node_id)], node_id, now=node_id)
        for _ in range(hits):
            tree.count_hit(node)
    order = []
    while (victim := tree.next_device_victim()) is not None:
        order.append(victim.id)
        tree.remove(victim)
    assert order == [2, 4, 1, 3]


def test_a_parent_that_joins_waits_for_its_turn() -> None:
    """R27: a parent whose last child is in the plan comes behind a leaf that is older; costs count what joins and leaves."""
    tree: RadixTree[None] = RadixTree(1, "lru", lambda node: None)
    parent, child = chain(tree, [2, 1], 1, 1)
    (other,) = chain(tree, [4], 5, 2)
    tree.touch([other], 60)
    tree.touch([parent], 70)
    left = iter([2, 1, 0])
    assert tree.plan_host_victims(lambda node: next(left) == 0, lambda node: True) == [child, other, parent]
    assert [candidate.id for candidate in (child, other, parent)] == [2, 5, 1]
    before = tree.heap_operations
    assert tree.plan_host_victims(lambda node: node is parent, lambda node: True) == [child, other, parent]
    assert tree.heap_operations - before == 6, "two leaves are taken and put back, the parent joins and leaves"


def test_forgotten_candidates_leave_nothing_behind() -> None:
    """R27: after clear there is neither a candidate nor a stale entry."""
    _, nodes = wide_tree(3)
    candidates: Candidates[None] = Candidates(policy_named("lru"))
    candidates.add_all(nodes)
    candidates.clear()
    assert (len(candidates), candidates.heap_entries, candidates.peek()) == (0, 0, None)
    candidates.add(nodes[1])
    assert (len(candidates), candidates.heap_entries, candidates.peek()) == (1, 1, nodes[1])


@pytest.mark.parametrize("leaves", [100, 101])
def test_stale_entries_are_cleared_away_at_the_bound_and_not_before(leaves: int) -> None:
    """R27: the heap may hold twice the candidates and 64 entries more."""
    _, nodes = wide_tree(leaves)
    candidates: Candidates[None] = Candidates(policy_named("lru"))
    candidates.add_all(nodes)
    for node in nodes[:82]:
        candidates.discard(node)
    assert candidates.heap_entries == leaves
    candidates.discard(nodes[82])
    assert candidates.heap_entries == len(candidates) == leaves - 83
    assert candidates.operations == leaves + (leaves - 83), "what is kept is moved"


def test_costs_of_a_tree_are_those_of_both_media() -> None:
    """R27: a node that is made a candidate on the device and then on the host costs a heap entry each."""
    tree, nodes = wide_tree(3)
    assert tree.heap_operations == 3
    tree.drop_device(nodes[0])
    assert tree.heap_operations == 4


@pytest.mark.parametrize("name", ["slru-", "slru-0", "slru-x", "lru-2"])
def test_unknown_segments_are_refused(name: str) -> None:
    """R35: a policy name with a number that cannot be meant is refused, with the known names."""
    with pytest.raises(ValueError, match="unknown eviction policy"):
        policy_named(name)
