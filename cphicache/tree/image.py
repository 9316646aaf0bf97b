"""The tree as data: plain snapshots, and a canonical form for comparing states."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any

from cphicache.spaces.types import LogicalPage
from cphicache.tree.eviction import Policy
from cphicache.tree.keys import RadixKey
from cphicache.tree.node import ROOT_ID, B, Node, TreeInternalError

_CLOCKS = ("last_access", "created")


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


def load_nodes(
    empty: RadixKey, rows: list[tuple[Any, ...]], load_backup: Callable[[Node[B], Any], B]
) -> tuple[Node[B], dict[int, Node[B]]]:
    """New nodes from :func:`dump_nodes`: the root, and the nodes below it by id, parents first. ``empty`` is the root's key."""
    built: dict[int, Node[B]] = {}
    for row in rows:
        node_id, parent_id, data, extra_key, is_bigram, pages, lock_ref, host_ref, last_access, created, hits, priority, *rest = row
        loading, backup = rest
        page_bytes = (2 if is_bigram else 1) * 8 * empty.page_size
        key = RadixKey(data, empty.page_size, extra_key, is_bigram, len(data) // page_bytes, page_bytes)
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


def canonical_form(
    root: Node[B],
    policy: Policy,
    backup_canonical: Callable[[Node[B]], Hashable] | None,
    page_name: Callable[[LogicalPage], Hashable] | None = None,
) -> tuple[dict[int, int], Hashable]:
    """Positions by node id, in a traversal that depends on keys only, and the canonical form (without backups if None; with the names
    of pages in place of their numbers if ``page_name`` is given)."""
    ordered: list[Node[B]] = []
    stack = [root]
    while stack:
        node = stack.pop()
        ordered.append(node)
        stack.extend(sorted(node.children.values(), key=_key_order, reverse=True))
    positions = {node.id: position for position, node in enumerate(ordered)}
    columns: list[list[int]] = []
    for field in policy.reads:
        values: list[int] = [getattr(node, field) for node in ordered[1:]]
        if field in _CLOCKS:
            ranks = {value: rank for rank, value in enumerate(sorted(set(values)))}
            values = [ranks[value] for value in values]
        columns.append(values)
    rows: list[Hashable] = [None if backup_canonical is None else backup_canonical(root)]
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
                None if backup_canonical is None else backup_canonical(node),
            )
        )
    return positions, tuple(rows)
