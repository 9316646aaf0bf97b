"""The tree as data: plain snapshots, and a canonical form for comparing states."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import lru_cache
from typing import Any

from cphicache.spaces.types import LogicalPage
from cphicache.tree.eviction import Policy
from cphicache.tree.keys import RadixKey
from cphicache.tree.node import ROOT_ID, B, Node, TreeInternalError

_CLOCKS = ("last_access", "created")
_RIVALS = 64
"""Nodes up to which the canonical form says of each two whether one goes before the other."""


def dump_nodes(root: Node[B], below: Iterable[Node[B]], dump_backup: Callable[[B], object]) -> list[tuple[object, ...]]:
    """The root and the nodes ``below`` it (parents first) as one tuple a node, in that order."""
    return [
        (
            node.id,
            ROOT_ID if node.parent is None else node.parent.id,
            node.key.data,
            node.key.extra_key,
            node.key.is_bigram,
            None if node.pages is None else tuple(node.pages),
            node.lock_ref,
            node.host_ref,
            node.last_access,
            node.created,
            node.hits,
            node.priority,
            node.loading,
            dump_backup(node.backup),
        )
        for node in (root, *below)
    ]


@lru_cache(maxsize=1024)
def _segment(data: bytes, page_size: int, extra_key: str | None, is_bigram: bool) -> RadixKey:
    """A node's key; whoever restores the same images again and again shares them."""
    page_bytes = (2 if is_bigram else 1) * 8 * page_size
    return RadixKey(data, page_size, extra_key, is_bigram, len(data) // page_bytes, page_bytes)


def load_nodes(
    empty: RadixKey, rows: list[tuple[Any, ...]], load_backup: Callable[[Node[B], Any], B]
) -> tuple[Node[B], dict[int, Node[B]]]:
    """New nodes from :func:`dump_nodes`: the root, and the nodes below it by id, parents first. ``empty`` is the root's key."""
    built: dict[int, Node[B]] = {}
    for row in rows:
        node_id, parent_id, data, extra_key, is_bigram, pages, lock_ref, host_ref, last_access, created, hits, priority, *rest = row
        loading, backup = rest
        key = _segment(data, empty.page_size, extra_key, is_bigram)
        parent = None if node_id == ROOT_ID else built[parent_id]
        child_key = key.child_key(0, at_root=parent.is_root) if parent is not None else empty.data
        node: Node[B] = Node(
            node_id, parent, key, child_key, None if pages is None else list(pages), now=created, priority=priority
        )
        node.lock_ref, node.host_ref, node.hits = lock_ref, host_ref, hits
        node.last_access = last_access
        node.loading = loading
        node.backup = load_backup(node, backup)
        if parent is not None:
            parent.children[child_key] = node
            parent.device_children += node.pages is not None
        built[node_id] = node
    root = built.pop(ROOT_ID)
    return root, built


def _key_order(node: Node[B]) -> tuple[bool, str, bytes]:
    extra_key = node.key.extra_key
    return extra_key is not None, extra_key or "", node.key.page(0)


def key_order(root: Node[B]) -> list[Node[B]]:
    """The root and all nodes below it in a traversal that depends on keys only, parents first."""
    ordered: list[Node[B]] = []
    stack = [root]
    while stack:
        node = stack.pop()
        ordered.append(node)
        children = node.children.values()
        stack.extend(children if len(children) < 2 else sorted(children, key=_key_order, reverse=True))
    return ordered


def _among_rivals(nodes: Sequence[Node[B]], values: Sequence[int]) -> list[Hashable]:
    """For each node, which of the nodes before it (in :func:`key_order`) that are neither above nor below it have a lower value.

    Only such nodes ever compete: a node becomes a candidate when nothing is left below it. Their values differ, as those of nodes with
    one value lie on one path. Many nodes are compared by rank, all with all, which tells states apart that are alike but is cheap.
    """
    if len(nodes) > _RIVALS:
        ranks = {value: rank for rank, value in enumerate(sorted(set(values)))}
        return [ranks[value] for value in values]
    path: list[int] = []  # places of the nodes above the next one
    below: list[Hashable] = []
    for at, node in enumerate(nodes):
        while path and nodes[path[-1]] is not node.parent:
            path.pop()
        value = values[at]
        below.append(tuple([values[other] < value for other in range(at) if other not in path]) if len(path) < at else ())
        path.append(at)
    return below


def canonical_form(
    ordered: Sequence[Node[B]],
    policy: Policy,
    backup_canonical: Callable[[Node[B]], Hashable],
    page_name: Callable[[LogicalPage], Hashable] | None = None,
) -> Hashable:
    """The canonical form of nodes in :func:`key_order` (with the names of pages in place of their numbers if ``page_name`` is given)."""
    positions = {node.id: position for position, node in enumerate(ordered)}
    columns: list[list[Hashable]] = []
    for field in policy.reads:
        values: list[int] = [getattr(node, field) for node in ordered[1:]]
        columns.append(_among_rivals(ordered[1:], values) if field in _CLOCKS else list(values))
    rows: list[Hashable] = [backup_canonical(ordered[0])]
    for index, node in enumerate(ordered[1:]):
        if node.parent is None:
            raise TreeInternalError(f"canonical: expected a parent, found none for {node}")
        rows.append(
            (
                positions[node.parent.id],
                (node.key.data, node.key.extra_key, node.key.is_bigram),
                None if node.pages is None else tuple(node.pages if page_name is None else map(page_name, node.pages)),
                (node.lock_ref, node.host_ref, node.loading is not None),
                tuple(column[index] for column in columns),
                backup_canonical(node),
            )
        )
    return tuple(rows)
