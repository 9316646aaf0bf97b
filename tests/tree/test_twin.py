"""The tree against its naive twin on random histories."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cphicache.spaces.types import LogicalPage
from cphicache.tree import Node, RadixKey, RadixTree, child_key_of, depth
from tests.tree.twin import Path, Twin, pages_of

STEPS = (
    "insert",
    "insert",
    "walk",
    "lock",
    "unlock",
    "hold",
    "release",
    "drop",
    "load",
    "remove",
    "split",
    "hit",
    "rank",
    "loading",
)
Step = tuple[str, int, tuple[int, ...]]


class History:
    """Does every step to both; each choice is taken from the numbers of the step."""

    def __init__(self, page_size: int, policy: str, is_bigram: bool) -> None:
        self.tree: RadixTree[str] = RadixTree(page_size, policy, lambda node: f"record {node.id}")
        self.twin = Twin(page_size, policy)
        self.is_bigram = is_bigram
        self.now = 0
        self.next_id = 1
        self.next_page = 1
        self.locks: list[Node[str]] = []
        self.holds: list[tuple[Node[str], int]] = []

    def key(self, number: int, symbols: Sequence[int]) -> tuple[RadixKey, str | None, Path]:
        """Pages that differ in their last token only; the key's tail is less than a page."""
        space = (None, None, "a", "")[number % 4]
        size = self.tree.page_size
        tokens = [token for symbol in symbols for token in ([7] * (size - 1) + [symbol])] + [9] * (number % size)
        return RadixKey.of(tokens, size, space, self.is_bigram), space, pages_of(tokens, size, self.is_bigram)

    def pick(self, number: int) -> Node[str] | None:
        ids = sorted(self.twin.segments)
        return self.tree.find(ids[number % len(ids)]) if ids else None

    def new_pages(self, count: int) -> list[LogicalPage]:
        self.next_page += count
        return [LogicalPage(page) for page in range(self.next_page - count, self.next_page)]

    def step(self, name: str, number: int, symbols: tuple[int, ...]) -> None:
        self.now += 1
        if name in {"insert", "walk"}:
            self.insert(number, symbols, only_walk=name == "walk")
            return
        node = self.pick(number)
        if node is None:
            return
        segment = self.twin.segments[node.id]
        if name == "lock":
            before = self.tree.evictable_tokens
            assert self.tree.lock(node) == self.tree.evictable_tokens - before <= 0
            self.locks.append(node)
            self.twin.locks.append((segment.space, segment.path))
        elif name == "unlock" and self.locks:
            at = number % len(self.locks)
            before = self.tree.evictable_tokens
            assert self.tree.unlock(self.locks.pop(at)) == self.tree.evictable_tokens - before >= 0
            del self.twin.locks[at]
        elif name == "hold":
            pages, top = node.length_pages, node
            for _ in range(number % 3):
                if top.parent is not None and not top.parent.is_root:
                    top = top.parent
                    pages += top.length_pages
            self.tree.hold_host(node, pages)
            self.holds.append((node, pages))
            self.twin.holds.append((segment.space, segment.path, len(segment.path) - pages))
        elif name == "release" and self.holds:
            at = number % len(self.holds)
            self.tree.release_host(*self.holds.pop(at))
            del self.twin.holds[at]
        elif name == "drop":
            victim = self.tree.next_device_victim()
            if victim is not None:
                gone = self.twin.segments[victim.id]
                assert self.tree.drop_device(victim) == gone.pages
                gone.pages = None
        elif name == "load":
            parent = self.twin.parent(segment)
            if segment.pages is None and (parent is None or parent.pages is not None):
                segment.pages = list(self.new_pages(node.length_pages))
                self.tree.set_device(node, [LogicalPage(page) for page in segment.pages])
        elif name == "remove":
            if not (self.twin.below(segment) or segment.loading or self.twin.lock_ref(segment) or self.twin.host_ref(segment)):
                assert self.tree.remove(node) == (segment.pages or [])
                del self.twin.segments[node.id]
                assert self.tree.find(node.id) is None
        elif name == "split" and node.length_pages > 1:
            head_pages = 1 + number % (node.length_pages - 1)
            head = self.tree.split(node, head_pages, self.next_id, f"record {self.next_id}")
            self.twin.split(node.id, head_pages, head.id)
            self.next_id += 1
            assert node.parent is head
        elif name == "hit":
            segment.hits += 1
            assert self.tree.count_hit(node) == segment.hits
        elif name == "rank":
            segment.priority = number % 3
            self.tree.set_priority(node, segment.priority)
        elif name == "loading":
            segment.loading = None if segment.loading else self.now
            self.tree.set_loading(node, segment.loading)

    def insert(self, number: int, symbols: Sequence[int], *, only_walk: bool) -> None:
        key, space, path = self.key(number, symbols)
        before = self.tree.snapshot(str)
        walk = self.tree.walk(key)
        assert self.tree.snapshot(str) == before
        expected = self.twin.match(space, path)
        on_device: list[int] = []
        last = 0
        for segment, count in expected:
            if segment.pages is None:
                break
            on_device += segment.pages[:count]
            last = segment.id
        assert [node.id for node in walk.path] == [segment.id for segment, _ in expected]
        assert walk.matched_pages == sum(count for _, count in expected)
        cut = bool(expected) and expected[-1][1] < len(expected[-1][0].path) - expected[-1][0].start
        assert walk.partial_pages == (expected[-1][1] if cut else 0)
        assert walk.device_pages == on_device
        assert walk.last_device_node.id == last
        if only_walk or any(segment.pages is None for segment, _ in expected):
            self.tree.touch(walk.path, self.now)
            for segment, _ in expected:
                segment.last_access = self.now
            return
        ids = [self.next_id, self.next_id + 1]
        self.next_id += 2
        pages = self.new_pages(key.pages)
        self.twin.insert(space, path, ids, list(pages), now=self.now, priority=number % 3)
        parent = walk.path[-1] if walk.path else self.tree.root
        if walk.partial_pages:
            parent = self.tree.split(parent, walk.partial_pages, ids[0])
        if walk.matched_pages < key.pages:
            rest = key.slice(walk.matched_pages, key.pages)
            self.tree.add_child(parent, rest, pages[: rest.pages], ids[1], self.now, priority=number % 3)

    def compare(self) -> None:
        tree, twin = self.tree, self.twin
        nodes = {node.id: node for node in tree.nodes()}
        assert nodes.keys() == twin.segments.keys()
        assert tree.node_count == len(nodes)
        for node in nodes.values():
            segment = twin.segments[node.id]
            parent = twin.parent(segment)
            assert node.parent is (tree.root if parent is None else nodes[parent.id])
            assert node.parent.children[child_key_of(node)] is node
            assert node.child_key == child_key_of(node)
            assert node.device_children == sum(child.on_device for child in node.children.values())
            assert (node.length_pages, node.pages) == (len(segment.path) - segment.start, segment.pages)
            assert node.length_tokens == node.length_pages * tree.page_size
            assert (node.lock_ref, node.host_ref) == (twin.lock_ref(segment), twin.host_ref(segment))
            assert (node.hits, node.priority, node.loading) == (segment.hits, segment.priority, segment.loading)
            assert (node.last_access, node.created) == (segment.last_access, segment.created)
            assert tree.eviction_order(node) == (twin.order(segment)[:-1], node.id)
            assert node.backup == f"record {node.id}"
            assert depth(node) == 1 + depth(node.parent)
        assert tree.evictable_tokens == twin.tokens(locked=False)
        assert tree.protected_tokens == twin.tokens(locked=True)
        assert tree.device_tokens == tree.evictable_tokens + tree.protected_tokens
        self.compare_victims(tree)
        twin_tree: RadixTree[str] = RadixTree(tree.page_size, tree.policy.name, lambda node: "")
        image = tree.snapshot(lambda backup: backup)
        twin_tree.restore(image, lambda node, data: data)
        assert twin_tree.snapshot(lambda backup: backup) == image
        assert twin_tree.canonical(lambda node: node.backup) == tree.canonical(lambda node: node.backup)
        assert (twin_tree.evictable_tokens, twin_tree.protected_tokens) == (tree.evictable_tokens, tree.protected_tokens)
        self.compare_victims(twin_tree)

    def compare_victims(self, tree: RadixTree[str]) -> None:
        leaves = [leaf.id for leaf in self.twin.device_leaves()]
        for refused in (set(), set(leaves[::2])):
            allowed = [leaf for leaf in leaves if leaf not in refused]
            victim = tree.next_device_victim(lambda node, refused=refused: node.id not in refused)  # type: ignore[misc]
            assert (victim and victim.id) == (allowed[0] if allowed else None)
        aside: list[Node[str]] = []
        assert tree.next_device_victim(lambda _: False, aside) is None
        assert [node.id for node in aside] == leaves
        assert tree.next_device_victim() is None
        tree.put_back(aside)
        for tokens in (1, 3 * tree.page_size, 8 * tree.page_size, 10**6):
            for refused in (set(), {leaf.id for leaf in self.twin.host_leaves()[::2]}):
                left = [tokens]

                def enough(node: Node[str], left: list[int] = left) -> bool:
                    left[0] -= node.length_tokens
                    return left[0] <= 0

                plan = tree.plan_host_victims(enough, lambda node, refused=refused: node.id not in refused)  # type: ignore[misc]
                assert (None if plan is None else [node.id for node in plan]) == self.twin.plan(tokens, refused)


def steps(max_size: int) -> st.SearchStrategy[list[Step]]:
    symbols = st.lists(st.integers(0, 2), min_size=1, max_size=7).map(tuple)
    return st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 10**6), symbols), min_size=12, max_size=max_size)


@pytest.mark.parametrize("is_bigram", [False, True])
@pytest.mark.parametrize(("page_size", "policy"), [(1, "lru"), (4, "lfu"), (16, "fifo"), (1, "mru"), (4, "priority")])
def test_random_histories_agree_with_the_naive_twin(page_size: int, policy: str, is_bigram: bool) -> None:
    """R24, R27, R28, R30: walks, inserts, splits, locks, holds, counters and the order of victims are those of the naive twin."""

    @settings(derandomize=True, max_examples=25, deadline=None, database=None)
    @given(history=steps(40))
    def run(history: list[Step]) -> None:
        both = History(page_size, policy, is_bigram)
        for name, number, symbols in history:
            both.step(name, number, symbols)
            both.compare()

    run()


@pytest.mark.parametrize("seed", range(12))
def test_long_random_histories_agree_with_the_naive_twin(seed: int) -> None:
    """R24, R27, R28, R30: as above, in long histories in which nodes are split and held again and again."""
    draw = Random(seed)
    both = History((1, 4, 16)[seed % 3], ("lru", "mru", "lfu", "fifo", "priority")[seed % 5], seed % 2 == 1)
    for _ in range(120):
        both.step(draw.choice(STEPS), draw.randrange(10**6), tuple(draw.randrange(3) for _ in range(draw.randint(1, 7))))
        both.compare()
    assert both.tree.node_count > 3
    assert max(depth(node) for node in both.tree.nodes()) > 1


@settings(derandomize=True, max_examples=20, deadline=None, database=None)
@given(history=steps(60), policy=st.sampled_from(["lru", "mru", "lfu", "fifo", "priority"]))
def test_a_drained_tree_is_empty_and_its_plan_is_removable_in_order(history: list[Step], policy: str) -> None:
    """R27, R30: when all locks, holds and loads are gone, dropping every device leaf and removing the host plan in its order
    empties the tree and all counters."""
    both = History(1, policy, False)
    for name, number, symbols in history:
        both.step(name, number, symbols)
    tree = both.tree
    for node in both.locks:
        tree.unlock(node)
    for held in both.holds:
        tree.release_host(*held)
    for node in list(tree.nodes()):
        assert (node.lock_ref, node.host_ref) == (0, 0)
        tree.set_loading(node, None)
    while (victim := tree.next_device_victim()) is not None:
        tree.drop_device(victim)
    assert tree.device_tokens == 0
    everything = {node.id for node in tree.nodes()}
    seen: set[int] = set()

    def enough(node: Node[str]) -> bool:
        seen.add(node.id)
        return seen == everything

    for node in tree.plan_host_victims(enough, lambda _: True) or []:
        tree.remove(node)
    assert tree.node_count == 0
    assert tree.root.children == {}


def test_victims_come_in_policy_order_with_ties_to_the_lower_id() -> None:
    """R27: each policy names its victims in its own order, and equal nodes go by id, so that all ranks agree."""
    expected = {"lru": [3, 4, 1, 2], "mru": [1, 2, 3, 4], "fifo": [1, 2, 3, 4], "lfu": [3, 4, 2, 1], "priority": [4, 3, 1, 2]}
    for policy, order in expected.items():
        tree: RadixTree[None] = RadixTree(1, policy, lambda node: None)
        nodes = [
            tree.add_child(tree.root, RadixKey.of([i], 1), [LogicalPage(i)], i, 5 + i // 3, priority=4 - i // 4)
            for i in range(1, 5)
        ]
        tree.touch(nodes[:2], 20)
        tree.count_hit(nodes[0])
        tree.set_priority(nodes[3], 1)
        victims = []
        while (node := tree.next_device_victim()) is not None:
            victims.append(node)
            tree.remove(node)
        assert [node.id for node in victims] == order
        assert all(tree.policy.rank(a) <= tree.policy.rank(b) for a, b in pairwise(victims))
