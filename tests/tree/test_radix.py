"""The tree: worked cases, and what it refuses."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from cphicache.spaces.types import LogicalPage
from cphicache.tree import Node, RadixKey, RadixTree, TreeInternalError, child_key_of, depth


def make(page_size: int = 1, policy: str = "lru") -> RadixTree[str]:
    return RadixTree(page_size, policy, lambda node: f"record {node.id}")


def key(text: str, page_size: int = 1, extra_key: str | None = None) -> RadixKey:
    return RadixKey.of([ord(letter) for letter in text], page_size, extra_key)


def pages(*numbers: int) -> list[LogicalPage]:
    return [LogicalPage(number) for number in numbers]


def one_node(tree: RadixTree[str]) -> Node[str]:
    return tree.add_child(tree.root, key("abcdef"), pages(1, 2, 3, 4, 5, 6), 1, 1)


def test_missing_child_raises_and_creates_nothing() -> None:
    """R28: ``children`` is a plain dict; asking for a missing key raises KeyError and leaves the tree as it is."""
    tree = make()
    assert (tree.root.created, tree.root.last_access) == (0, 0)
    node = one_node(tree)
    assert type(node.children) is dict
    for at in (tree.root, node):
        with pytest.raises(KeyError):
            at.children[b"missing"]
        assert b"missing" not in at.children
    assert tree.walk(key("xyz")).path == []
    assert tree.walk(key("abcdefgh")).matched_pages == 6
    assert (tree.node_count, node.children) == (1, {})


def test_namespaces_share_no_node() -> None:
    """R28: the same tokens under other extra keys are other nodes, and a walk sees its own namespace only."""
    tree = make(2)
    for node_id, extra_key in enumerate((None, "", "lora-a", "lora-b"), start=1):
        assert tree.walk(key("abcd", 2, extra_key)).matched_pages == 0
        node = tree.add_child(tree.root, key("abcd", 2, extra_key), pages(node_id * 2, node_id * 2 + 1), node_id, node_id)
        assert tree.root.children[child_key_of(node)] is node
    assert tree.node_count == 4
    for node_id, extra_key in enumerate((None, "", "lora-a", "lora-b"), start=1):
        assert tree.walk(key("abcdxx", 2, extra_key)).device_pages == [node_id * 2, node_id * 2 + 1]
    head = tree.split(tree.walk(key("abcd", 2, "lora-a")).path[0], 1, 9)
    assert tree.root.children[child_key_of(head)] is head
    with pytest.raises(ValueError, match="namespace 'lora-b'"):
        tree.add_child(head, key("zz", 2, "lora-b"), pages(1), 10, 10)


def test_bigram_and_plain_keys_part_at_the_root() -> None:
    """R28: EAGLE bigram keys are matched by pairs and never meet plain keys."""
    tree = make(2)
    bigram = RadixKey.of([1, 2, 3, 4, 5], 2, None, True)
    tree.add_child(tree.root, bigram, pages(1, 2), 1, 1)
    assert tree.walk(RadixKey.of([1, 2, 3, 4, 5], 2)).matched_pages == 0
    walk = tree.walk(RadixKey.of([1, 2, 3, 4, 9], 2, None, True))
    assert (walk.matched_pages, walk.partial_pages, walk.device_pages) == (1, 1, [1])
    assert tree.walk(RadixKey.of([1, 2, 9], 2, None, True)).matched_pages == 0


def test_walk_stops_its_device_part_at_the_first_gap() -> None:
    """R24: device pages end at the first node that is not on the device, and a match inside a node is cut at its end."""
    tree = make()
    a = tree.add_child(tree.root, key("ab"), pages(1, 2), 1, 1)
    b = tree.add_child(a, key("cd"), pages(3, 4), 2, 2)
    c = tree.add_child(b, key("efg"), pages(5, 6, 7), 3, 3)
    walk = tree.walk(key("abcdefx"))
    assert walk == ([a, b, c], 2, 6, [1, 2, 3, 4, 5, 6], c)
    tree.drop_device(c)
    tree.drop_device(b)
    assert tree.walk(key("abcdefx")) == ([a, b, c], 2, 6, [1, 2], a)
    assert tree.walk(key("a")) == ([a], 1, 1, [1], a)
    assert tree.walk(key("abcd")) == ([a, b], 0, 4, [1, 2], a)
    tree.drop_device(a)
    assert tree.walk(key("ab")) == ([a], 0, 2, [], tree.root)
    assert tree.walk(key("")) == ([], 0, 0, [], tree.root)


def test_split_keeps_the_object_as_tail_and_copies_what_others_rely_on() -> None:
    """R28, R24: locks, holds, hits, priority, times and the load-back are on both halves; the holder's node is the tail."""
    tree = make()
    node = tree.add_child(tree.root, key("abcdef"), pages(1, 2, 3, 4, 5, 6), 1, 3, priority=2)
    below = tree.add_child(node, key("xy"), pages(7, 8), 2, 4)
    tree.lock(below)
    tree.lock(node)
    tree.hold_host(node, 6)
    tree.count_hit(node)
    tree.touch([node], 9)
    tree.set_loading(node, 5)
    head = tree.split(node, 2, 3, "mine")
    assert (head.pages, node.pages, head.key, node.key) == ([1, 2], [3, 4, 5, 6], key("ab"), key("cdef"))
    for half in (head, node):
        assert (half.lock_ref, half.host_ref, half.hits, half.priority) == (2, 1, 1, 2)
        assert (half.last_access, half.created, half.loading) == (9, 3, 5)
    assert (head.backup, node.backup) == ("mine", "record 1")
    assert (tree.evictable_tokens, tree.protected_tokens) == (0, 8)
    assert node.parent is head
    assert head.parent is tree.root
    assert below.parent is node
    assert tree.root.children[child_key_of(head)] is head
    assert head.children[child_key_of(node)] is node
    assert [depth(n) for n in (tree.root, head, node, below)] == [0, 1, 2, 3]
    assert tree.split(node, 1, 4).backup == "record 4"
    tree.unlock(node)
    tree.unlock(below)
    assert {n.lock_ref for n in tree.nodes()} == {0}
    assert (tree.evictable_tokens, tree.protected_tokens) == (8, 0)


def test_hold_is_released_from_every_fragment() -> None:
    """R28: a release walks every fragment made since the hold, and no node above the range."""
    tree = make()
    top = tree.add_child(tree.root, key("ab"), pages(1, 2), 1, 1)
    middle = tree.add_child(top, key("cdef"), pages(3, 4, 5, 6), 2, 2)
    low = tree.add_child(middle, key("ghi"), pages(7, 8, 9), 3, 3)
    tree.hold_host(low, 7)
    tree.hold_host(middle, 6)
    tree.split(low, 1, 4)
    quarter = tree.split(tree.split(middle, 3, 5), 1, 6)
    tree.split(top, 1, 7)
    assert {n.id: n.host_ref for n in tree.nodes()} == {7: 1, 1: 1, 6: 2, 5: 2, 2: 2, 4: 1, 3: 1}
    tree.release_host(low, 7)
    assert {n.id: n.host_ref for n in tree.nodes()} == {7: 1, 1: 1, 6: 1, 5: 1, 2: 1, 4: 0, 3: 0}
    tree.release_host(middle, 6)
    assert not any(n.host_ref for n in tree.nodes())
    with pytest.raises(TreeInternalError, match=r"expected host_ref >= 1, found <node 2 "):
        tree.release_host(middle, 1)
    with pytest.raises(ValueError, match="hold or release whole nodes"):
        tree.hold_host(quarter, 0)
    for count in (1, 20):
        with pytest.raises(ValueError, match=f"{count} pages up from"):
            tree.hold_host(low, count)
    assert not any(n.host_ref for n in tree.nodes())


def test_lock_tells_what_it_took_from_the_evictable_tokens() -> None:
    """R25, R30: locking protects whole nodes up to the root, once, and says how many tokens it took; unlocking gives them back."""
    tree = make(4)
    a = tree.add_child(tree.root, key("abcd", 4), pages(1), 1, 1)
    b = tree.add_child(a, key("efghijkl", 4), pages(2, 3), 2, 2)
    assert tree.lock(a) == -4
    assert tree.lock(b) == -8
    assert tree.lock(tree.root) == tree.unlock(tree.root) == 0
    assert (tree.evictable_tokens, tree.protected_tokens, tree.device_tokens) == (0, 12, 12)
    assert tree.unlock(b) == 8
    assert tree.unlock(a) == 4
    with pytest.raises(TreeInternalError, match=r"unlock: expected lock_ref >= 1, found <node 2 device pages=2 .* lock=0 "):
        tree.unlock(b)
    assert (a.lock_ref, b.lock_ref, tree.evictable_tokens) == (0, 0, 12)


def test_locked_host_node_counts_when_it_comes_back() -> None:
    """R30: a host-only node has no device tokens whatever its locks; published pages count as protected if it is locked."""
    tree = make()
    node = one_node(tree)
    assert tree.drop_device(node) == [1, 2, 3, 4, 5, 6]
    tree.lock(node)
    assert tree.device_tokens == 0
    tree.set_device(node, pages(11, 12, 13, 14, 15, 16))
    assert (tree.evictable_tokens, tree.protected_tokens) == (0, 6)
    tree.unlock(node)
    assert tree.remove(node) == [11, 12, 13, 14, 15, 16]
    assert (tree.device_tokens, tree.node_count, tree.find(1)) == (0, 0, None)


def test_what_breaks_a_rule_of_the_tree_is_refused_and_changes_nothing() -> None:
    """R27, R30: eviction of locked, held, loading or inner nodes, gaps on the device and stale nodes are internal errors."""
    tree = make()
    a = one_node(tree)
    b = tree.add_child(a, key("xyz"), pages(7, 8, 9), 2, 2)
    gone = tree.add_child(a, key("q"), pages(10), 3, 3)
    tree.remove(gone)
    tree.lock(b)
    before = tree.snapshot(lambda backup: backup)
    for broken in (
        lambda: tree.drop_device(a),
        lambda: tree.drop_device(b),
        lambda: tree.drop_device(tree.root),
        lambda: tree.remove(a),
        lambda: tree.remove(b),
        lambda: tree.remove(gone),
        lambda: tree.remove(tree.root),
        lambda: tree.set_device(b, pages(1, 2, 3)),
        lambda: tree.add_child(a, key("x"), pages(11), 4, 4),
        lambda: tree.add_child(gone, key("x"), pages(11), 4, 4),
        lambda: tree.split(tree.root, 1, 4),
        lambda: tree.split(gone, 1, 4),
        lambda: tree.lock(gone),
        lambda: tree.unlock(gone),
        lambda: tree.hold_host(gone, 1),
    ):
        with pytest.raises(TreeInternalError, match="expected"):
            broken()
    assert tree.snapshot(lambda backup: backup) == before
    tree.unlock(b)
    tree.drop_device(b)
    tree.drop_device(a)
    with pytest.raises(TreeInternalError, match="expected a host-only node under a device node"):
        tree.set_device(b, pages(1, 2, 3))
    with pytest.raises(TreeInternalError, match="on the device"):
        tree.add_child(b, key("x"), pages(11), 4, 4)
    tree.hold_host(b, 3)
    with pytest.raises(TreeInternalError, match=r"without lock, hold or load-back, found <node 2 .* hold=1 "):
        tree.remove(b)
    tree.release_host(b, 3)
    tree.set_loading(b, 1)
    with pytest.raises(TreeInternalError, match=r"without lock, hold or load-back, found <node 2 .* loading=1>"):
        tree.remove(b)
    tree.set_loading(b, None)
    assert tree.remove(b) == []


def test_wrong_arguments_are_refused_with_the_value() -> None:
    """R28: page counts, page sizes, cuts and ids that cannot be are ValueErrors that name them."""
    tree = make(2)
    node = tree.add_child(tree.root, key("abcd", 2), pages(1, 2), 1, 1)
    for message, wrong in (
        ("1 pages for a segment of 2", lambda: tree.add_child(node, key("efgh", 2), pages(3), 2, 2)),
        ("0 pages for a segment of 0", lambda: tree.add_child(node, key("e", 2), [], 2, 2)),
        ("key of page size 4 in a tree of page size 2", lambda: tree.walk(key("abcd", 4))),
        ("node id 1 is taken", lambda: tree.add_child(node, key("ef", 2), pages(3), 1, 2)),
        ("node id 0 is taken or not positive", lambda: tree.split(node, 1, 0)),
        ("split after 0 of 2 pages", lambda: tree.split(node, 0, 2)),
        ("split after 2 of 2 pages", lambda: tree.split(node, 2, 2)),
        ("1 pages for <node 1 ", lambda: tree.set_device(node, pages(1))),
    ):
        with pytest.raises(ValueError, match=message):
            wrong()
    assert tree.node_count == 1
    with pytest.raises(ValueError, match=r"page_size 1025 is not in 1\.\.1024"):
        make(1025)


def test_host_leaf_needs_nobody() -> None:
    """R16, R27: a host-only node is a host leaf only without lock, hold and load-back; the root is no leaf of any kind."""
    tree = make()
    node = one_node(tree)
    assert (node.is_device_leaf, node.is_host_leaf) == (True, False)
    tree.drop_device(node)
    assert (node.is_device_leaf, node.is_host_leaf) == (False, True)
    tree.lock(node)
    assert not node.is_host_leaf
    tree.unlock(node)
    tree.hold_host(node, 6)
    assert not node.is_host_leaf
    tree.release_host(node, 6)
    tree.set_loading(node, 4)
    assert not node.is_host_leaf
    tree.set_loading(node, None)
    assert tree.plan_host_victims(lambda _: True, lambda _: True) == [node]
    assert (tree.root.is_device_leaf, tree.root.is_host_leaf, tree.root.on_device) == (False, False, True)


def test_device_parent_of_host_only_children_is_a_device_leaf() -> None:
    """R27: a node whose children are all host-only may go next; when a child is loaded back it may not."""
    tree = make()
    a = one_node(tree)
    b = tree.add_child(a, key("x"), pages(7), 2, 2)
    assert tree.next_device_victim() is b
    tree.drop_device(b)
    assert tree.next_device_victim() is a
    tree.set_device(b, pages(8))
    assert tree.next_device_victim() is b


def test_canonical_form_forgets_ids_clocks_and_insertion_order() -> None:
    """R30: two trees that will behave alike have one canonical form; another access order, lock or page makes another."""

    def build(order: str, first_id: int, clock: int) -> RadixTree[str]:
        tree = make()
        for at, letter in enumerate(order):
            tree.add_child(tree.root, key(letter + "z"), pages(ord(letter), ord(letter)), first_id + at, clock + at)
        for at, letter in enumerate("bca"):
            tree.touch(tree.walk(key(letter)).path, clock + 10 * (at + 1))
        return tree

    def form(tree: RadixTree[str]) -> object:
        return tree.canonical(lambda node: node.is_root)

    one, two = build("abc", 1, 5), build("cab", 40, 700)
    assert form(one) == form(two)
    assert hash(form(one)) == hash(form(two))
    assert form(build("ab", 1, 5)) == form(build("ba", 40, 700))
    assert [node.id for node in one.key_order()] == [0, 1, 2, 3]
    assert [node.id for node in two.key_order()] == [0, 41, 42, 40]
    node = two.walk(key("b")).path[0]
    two.lock(node)
    assert form(one) != form(two)
    two.unlock(node)
    two.count_hit(node)
    assert form(one) == form(two)
    two.touch([node], 10_000)
    assert form(one) != form(two)
    assert one.canonical(lambda node: 0) != one.canonical(lambda node: 1)


def test_only_nodes_that_may_compete_are_compared() -> None:
    """R30: which of two is used last shows unless one is above the other, which goes after it in any case."""

    def form(used: list[str], letters: str = "ab", alone: str = "") -> object:
        tree = make()
        for at, letter in enumerate(alone):
            tree.add_child(tree.root, key(letter), pages(900 + at), 900 + at, 900 + at)
        for at, letter in enumerate(letters):
            top = tree.add_child(tree.root, key(letter), pages(3 * at + 1), 2 * at + 1, at + 1)
            tree.add_child(top, key("y"), pages(3 * at + 2), 2 * at + 2, at + 1)
        for now, text in enumerate(used, 1000):
            tree.touch([tree.walk(key(text)).path[-1]], now)
        return tree.canonical(lambda node: 0)

    assert form(["a", "ay", "b"]) == form(["ay", "a", "b"])
    assert form(["a", "ay", "b", "by"]) == form(["ay", "a", "by", "b"])
    seen = {
        form(used) for used in (["a", "b"], ["b", "a"], ["ay", "b", "a"], ["a", "by", "b"], ["b", "ay", "by"], ["a", "by", "ay"])
    }
    assert len(seen) == 6
    # of many, each two are compared, which costs less: the first part has 64 nodes, the second 65
    many = "".join(map(chr, range(256, 256 + 32)))
    assert form([many[0], many[0] + "y"], many) == form([many[0] + "y", many[0]], many)
    assert form([many[0], many[0] + "y"], many, "z") != form([many[0] + "y", many[0]], many, "z")


def test_snapshot_is_plain_and_restores_into_its_like_only() -> None:
    """R30: a snapshot shares nothing with the tree, keeps backups through the given functions, and fits a like tree only."""
    tree = make()
    node = one_node(tree)
    tree.hold_host(node, 6)
    image = tree.snapshot(lambda backup: backup.upper())
    tree.split(node, 3, 2)
    other = make()
    for at, letter in enumerate("pq", start=5):
        stale = other.add_child(other.root, key(letter), pages(at), at, at)
    other.drop_device(stale)
    other.restore(image, lambda node, data: f"{node.id}:{data}")
    (restored,) = other.nodes()
    assert (restored.pages, restored.host_ref, restored.backup) == ([1, 2, 3, 4, 5, 6], 1, "1:RECORD 1")
    assert other.root.backup == "0:RECORD 0"
    assert other.find(0) is other.root
    assert other.find(1) is restored
    assert other.next_device_victim() is restored
    assert other.evictable_tokens == 6
    other.release_host(restored, 6)
    other.drop_device(restored)
    assert other.next_device_victim() is None
    assert other.plan_host_victims(lambda node: node is not restored, lambda _: True) is None
    assert other.plan_host_victims(lambda _: True, lambda _: True) == [restored]
    with pytest.raises(TreeInternalError, match="removed or belongs to another"):
        other.lock(node)
    for unlike in (make(2), make(1, "fifo")):
        with pytest.raises(ValueError, match="restore into its like"):
            unlike.restore(image, lambda node, data: "")


def test_only_a_leaf_of_this_tree_can_be_removed() -> None:
    """R27, R30: the root, a node with children though nobody holds it, and a node of another tree stay; parents become leaves again."""
    tree, other = make(), make()
    parent, foreign = one_node(tree), one_node(other)
    child = tree.add_child(parent, key("x"), pages(7), 2, 2)
    for of in (tree.root, parent, foreign):
        with pytest.raises(TreeInternalError, match="expected a leaf of the tree"):
            tree.remove(of)
    with pytest.raises(TreeInternalError, match="expected a leaf of the tree"):
        make().remove(make().root)
    empty = make()
    with pytest.raises(TreeInternalError, match="expected a leaf of the tree"):
        empty.remove(empty.root)
    assert (tree.node_count, other.node_count) == (2, 1)
    assert tree.remove(child) == pages(7)
    assert tree.next_device_victim() is parent


def test_a_restored_tree_gives_its_parents_free() -> None:
    """R30: after a restore a node is a device leaf once its last child on the device is gone, as before."""
    tree, again = make(), make()
    tree.add_child(one_node(tree), key("x"), pages(7), 2, 2)
    again.restore(tree.snapshot(lambda backup: backup), lambda node, backup: backup)
    order = []
    while (victim := again.next_device_victim()) is not None:
        order.append(victim.id)
        again.drop_device(victim)
    assert order == [2, 1]


def test_a_removed_node_keeps_its_key() -> None:
    """R30: the key under which a node stood below another is the same when it has left the tree."""
    tree = make()
    child = tree.add_child(one_node(tree), key("xy"), pages(7, 8), 2, 2)
    stood_under = child_key_of(child)
    tree.remove(child)
    assert child_key_of(child) == stood_under


def test_a_parent_without_its_last_host_child_can_go() -> None:
    """R27: removing a host-only child makes its host-only parent a leaf of the host, without anything else being asked."""
    tree = make()
    parent = one_node(tree)
    child = tree.add_child(parent, key("x"), pages(7), 2, 2)
    tree.drop_device(child)
    tree.drop_device(parent)
    assert tree.plan_host_victims(lambda node: True, lambda node: True) == [child]
    tree.remove(child)
    assert tree.plan_host_victims(lambda node: True, lambda node: True) == [parent]


def test_a_child_has_the_tree_s_page_size_and_no_priority_of_its_own() -> None:
    """R28: a segment of another page size is refused and nothing is added; a node's priority is 0 unless one is given."""
    tree = make()
    with pytest.raises(ValueError, match="page"):
        tree.add_child(tree.root, key("ab", page_size=2), pages(1), 1, 1)
    assert (tree.node_count, tree.root.children) == (0, {})
    assert one_node(tree).priority == 0
    assert tree.add_child(tree.root, key("x"), pages(7), 2, 2, priority=3).priority == 3


def test_canonical_form_tells_first_nodes_apart() -> None:
    """R30: trees that differ in their first or in their last node only have different canonical forms."""
    forms = set()
    for first, last in (("ab", "yz"), ("ac", "yz"), ("ab", "yx")):
        tree = make()
        tree.add_child(tree.root, key(first), pages(1, 2), 1, 1)
        tree.add_child(tree.root, key(last), pages(3, 4), 2, 2)
        forms.add(tree.canonical(lambda node: node.backup))
    assert len(forms) == 3


def test_canonical_form_sorts_namespaces_by_name() -> None:
    """R28, R30: equal tokens in several namespaces stand in the order of the names, whichever was inserted first; what has no namespace
    stands apart from all of them."""
    spaces = {"b": 1, "a": 2, None: 3, "": 4}

    def form(order: Iterable[str | None]) -> tuple[object, list[int]]:
        tree = make()
        for space in order:
            tree.add_child(tree.root, RadixKey.of([7], 1, space), pages(spaces[space]), spaces[space], 1)
        return tree.canonical(lambda node: node.is_root), [node.id for node in tree.key_order()]

    assert form(spaces) == form(reversed(spaces)) == form(["a", "", None, "b"])


def test_a_node_of_another_tree_is_neither_extended_nor_divided() -> None:
    """R30: nodes of two trees may look alike; each tree changes its own only."""
    tree, other = make(), make()
    own, foreign = one_node(tree), one_node(other)
    before = [each.snapshot(lambda backup: backup) for each in (tree, other)]
    for broken in (lambda: tree.add_child(foreign, key("x"), pages(7), 2, 2), lambda: tree.split(foreign, 1, 2)):
        with pytest.raises(TreeInternalError, match="expected"):
            broken()
    assert [each.snapshot(lambda backup: backup) for each in (tree, other)] == before
    assert tree.split(own, 1, 2).length_pages == 1


@pytest.mark.parametrize(("policy", "first"), [("lru", "b"), ("mru", "a"), ("priority", "b")])
def test_what_is_on_the_host_only_keeps_its_place_in_the_order(policy: str, first: str) -> None:
    """R27: an access, or a change of priority, moves a host-only node among the host's victims at once, upwards and downwards."""
    tree = make(policy=policy)
    nodes = {
        letter: tree.add_child(tree.root, key(letter), pages(at), at, at, priority=5) for at, letter in enumerate("ab", start=1)
    }
    for node in nodes.values():
        tree.drop_device(node)
    tree.touch([nodes["a"]], 10)
    tree.set_priority(nodes["b"], 1)
    assert tree.plan_host_victims(lambda _: True, lambda _: True) == [nodes[first]]
