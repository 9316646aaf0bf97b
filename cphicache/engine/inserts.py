"""Inserts: a request's KV enters the tree, and its reservations are bound to the nodes that they become (R12).

An insert that would divide a pending node, or that passes a load-back in flight, is declined without touching the tree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from cphicache.engine.backups import Backups
from cphicache.engine.config import WritePolicy
from cphicache.engine.holds import Holds
from cphicache.engine.matching import blocks_split, loading_on
from cphicache.engine.records import ALIVE, Backup, Request
from cphicache.engine.state import CacheState
from cphicache.lifecycle import Input
from cphicache.lifecycle.names import (
    BIND,
    BIND_DUPLICATE_PART,
    BIND_DUPLICATE_WHOLE,
    DEVICE_VALID_HOST_NONE,
    HIT,
    PARENT_LOST,
    ROLLED_BACK,
)
from cphicache.spaces.types import LogicalPage
from cphicache.tree import Node, RadixKey, Walk


class Declined(NamedTuple):
    """Why an insert was not made: the pending node that it would divide, or the load-back that it passes."""

    node: Node[Backup] | None
    load: int | None


class Inserted(NamedTuple):
    """``row``: the tree's pages for the whole key. ``node``: where it ends (an opaque handle)."""

    row: list[LogicalPage]
    node: Node[Backup]


@dataclass(slots=True)
class _Chain:
    """New nodes below ``parent``, from page ``at`` of the key on."""

    parent: Node[Backup]
    key: RadixKey
    row: Sequence[LogicalPage]
    at: int
    now: int
    priority: int
    created: list[Node[Backup]] = field(default_factory=list)


class Inserts:
    """Inserts keys and counts hits."""

    def __init__(self, state: CacheState, backups: Backups, holds: Holds, refresh: Callable[[Node[Backup]], None]) -> None:
        self._state = state
        self._backups = backups
        self._holds = holds
        self._refresh = refresh

    def insert(self, request: Request, key: RadixKey, row: Sequence[LogicalPage], *, chunked: bool) -> Inserted | Declined:
        """Insert ``key`` on the first ``key.pages`` pages of ``row``; pages that turn out to be duplicates are freed, once.

        The request's reservations are bound or given up; its lock is the caller's to move.
        """
        state = self._state
        walk = state.tree.walk(key)
        declined = _why_declined(key, walk)
        if declined is not None:
            return declined
        now = state.now()
        path = list(walk.path)
        if walk.partial_pages and (key.pages > walk.matched_pages or path[-1].pages is None):
            path[-1] = self._backups.split(path[-1], walk.partial_pages)
        self._take_over(request, path, row, walk.matched_pages)
        parent = path[-1] if path else state.tree.root
        self._settle_duplicates(request, walk.matched_pages, parent)
        for node in path:
            if node.priority < request.priority:
                state.tree.set_priority(node, request.priority)
        path.extend(self._add_nodes(request, _Chain(parent, key, row, walk.matched_pages, now, request.priority), key.pages))
        state.tree.touch(path, now)
        for node in path:
            self._refresh(node)
        if not chunked:
            self._hit(request, path, key.pages)
        pages = [page for node in path for page in node.pages or ()][: key.pages]
        return Inserted(pages, path[-1] if path else state.tree.root)

    def is_declined(self, key: RadixKey) -> bool:
        """Whether :meth:`insert` would be declined now."""
        return _why_declined(key, self._state.tree.walk(key)) is not None

    def _take_over(self, request: Request, path: list[Node[Backup]], row: Sequence[LogicalPage], matched: int) -> None:
        """What the tree has already: host-only nodes adopt the request's pages, the other duplicates are freed."""
        state, at = self._state, 0
        duplicates: list[LogicalPage] = []
        for node in path:
            end = min(at + node.length_pages, matched)
            if node.pages is None:
                self._holds.adopt(node, row[at:end])
                state.counters.adopted_tokens += node.length_tokens
            else:
                duplicates.extend(row[max(at, request.protected_pages) : end])
            at = end
        if duplicates:
            state.counters.duplicate_tokens += len(duplicates) * state.config.page_size
            state.alloc.free(duplicates)

    def _settle_duplicates(self, request: Request, matched: int, parent: Node[Backup]) -> None:
        """Reservations for KV that somebody else inserted meanwhile are cut, or given up; what follows them hangs on the tree then."""
        for op in request.ops:
            if op.state not in ALIVE or op.start_page >= matched:
                continue
            self._state.counters.duplicate_binds += 1
            if op.end_page <= matched:
                for heir in list(op.heirs):
                    self._holds.hang(heir, parent)
                self._backups.fire(op, BIND_DUPLICATE_WHOLE, Input(reason="duplicate"))
            else:
                self._backups.fire(op, BIND_DUPLICATE_PART, Input(reason="duplicate", pages=matched - op.start_page))

    def _add_nodes(self, request: Request, chain: _Chain, end: int) -> list[Node[Backup]]:
        """Add what is new: one node for each reservation, and one for each stretch without."""
        alive = [op for op in request.ops if op.state in ALIVE]
        request.ops.clear()
        for op in alive:
            if op.state is ROLLED_BACK or op.state is DEVICE_VALID_HOST_NONE:
                continue  # lost with the one before it; it may still drain under its id, so its KV gets a node with another
            if op.start_page < chain.at or op.end_page > end:
                raise AssertionError(
                    f"insert of {request.rid}: expected an extent in pages {chain.at}..{end}, "
                    f"found {op.start_page}..{op.end_page}: {op.describe()}"
                )
            if op.start_page > chain.at:
                self._add(chain, op.start_page, self._state.new_node_id())
            self._bind(op, self._add(chain, op.end_page, op.node_id))
        if chain.at < end:
            self._add(chain, end, self._state.new_node_id())
        return chain.created

    def _add(self, chain: _Chain, end: int, node_id: int) -> Node[Backup]:
        segment, pages = chain.key.slice(chain.at, end), chain.row[chain.at : end]
        node = self._state.tree.add_child(chain.parent, segment, pages, node_id, chain.now, priority=chain.priority)
        self._state.kv_event(stored=True, medium="device", node=node)
        chain.created.append(node)
        chain.parent, chain.at = node, end
        return node

    def _bind(self, op: Backup, node: Node[Backup]) -> None:
        parent = node.parent
        if parent is None:
            raise AssertionError(f"bind of {op.describe()}: expected a node of the tree, found {node}")
        self._holds.hang(op, parent)
        self._backups.fire(op, BIND, Input(reason=op.request, target=node))
        if not parent.is_root and parent.backup.state in (DEVICE_VALID_HOST_NONE, ROLLED_BACK):
            self._backups.fire(op, PARENT_LOST, Input(reason="bound_under_unbacked_parent"))

    def _hit(self, request: Request, path: list[Node[Backup]], key_pages: int) -> None:
        """Count one hit a request and node, and back up what the policy says is worth it, parents first (R19)."""
        state, at, stopped = self._state, 0, False
        for node in path:
            at += node.length_pages
            if at <= request.hit_pages:
                continue
            record = node.backup
            self._backups.fire(record, HIT)
            state.tree.count_hit(node)
            if stopped or record.state is not DEVICE_VALID_HOST_NONE:
                continue
            if self._is_due(record):
                self._backups.reserve_stored(record, "hit")  # refused below a refused one, too: so it is tried again after it (R15)
            elif record.tried_tick < state.tick:
                stopped = True  # not worth it yet by the policy, nor is what follows
        request.hit_pages = max(request.hit_pages, min(at, key_pages))

    def _is_due(self, record: Backup) -> bool:
        config = self._state.config
        if record.tried_tick >= self._state.tick or config.policy is WritePolicy.WRITE_BACK:
            return False
        return config.policy is WritePolicy.WRITE_THROUGH or record.hits >= config.selective_hits


def _why_declined(key: RadixKey, walk: Walk[Backup]) -> Declined | None:
    """A load-back that the request itself reads is on its path, too, and stays there until the request has gone if it has failed."""
    blocker, load = blocks_split(walk, key), loading_on(walk)
    return None if blocker is None and load is None else Declined(blocker, load)
