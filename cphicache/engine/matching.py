"""Matching: what of a key is on the device, and what a load-back could bring. Asking changes nothing (R24)."""

from __future__ import annotations

from cphicache.engine.records import Backup, LoadState, Match
from cphicache.engine.state import CacheState
from cphicache.lifecycle import PENDING
from cphicache.lifecycle.names import COMMITTED, LAYERS_IN_FLIGHT, RESERVED
from cphicache.tree import Node, RadixKey, Walk


def match(state: CacheState, key: RadixKey) -> Match:
    """Match the whole key."""
    return match_of(state, state.tree.walk(key))


def match_of(state: CacheState, walk: Walk[Backup]) -> Match:
    """What a walk (whole, or cut) offers. It stops at the first gap: a node whose load-back has failed."""
    device_end = host_tail = host_pages = 0
    device_node = last_host_node = state.tree.root
    host_nodes: list[Node[Backup]] = []
    last = len(walk.path) - 1
    for index, node in enumerate(walk.path):
        matched = walk.partial_pages if index == last and walk.partial_pages else node.length_pages
        if node.pages is not None:
            if node.loading is not None and state.loads[node.loading].state is not LoadState.QUEUED:
                break
            device_end += matched
            device_node = node
        else:
            host_nodes.append(node)
            host_tail = matched
            host_pages += matched
        if node.backup.state is COMMITTED:
            last_host_node = node
    tokens = host_pages * state.config.page_size
    if tokens < state.config.load_back_threshold or state.quarantined is not None:
        tokens = 0
    return Match(walk, walk.device_pages[:device_end], device_node, host_nodes, host_tail, tokens, last_host_node)


def cut_before_last(walk: Walk[Backup], root: Node[Backup]) -> Walk[Backup]:
    """The walk without its last, partly matched node: what is left when a request may not wait for that node any longer."""
    path = walk.path[:-1]
    matched = walk.matched_pages - walk.partial_pages
    device_pages = walk.device_pages[:matched]
    on_device = [node for node in path if node.pages is not None]
    return Walk(path, 0, matched, device_pages, on_device[-1] if on_device else root)


def blocks_split(walk: Walk[Backup], key: RadixKey) -> Node[Backup] | None:
    """The pending node that ``key`` would divide: it is matched in part, and the key goes on for at least a page (R17)."""
    if not walk.partial_pages or key.pages <= walk.matched_pages:
        return None
    node = walk.path[-1]
    return node if node.backup.state in PENDING else None


def loading_on(walk: Walk[Backup]) -> int | None:
    """A load-back in flight on the path, if there is one."""
    return next((node.loading for node in walk.path if node.loading is not None), None)


def backed_prefix(walk: Walk[Backup]) -> tuple[int, Backup | None, Backup | None]:
    """(pages, record of the last such node, blocker): how far the path is committed or pending, gap-free from the root.

    ``blocker`` is the first record after that which is neither, so that nothing may be backed up behind it yet (R15).
    """
    pages, record = 0, None
    last = len(walk.path) - 1
    for index, node in enumerate(walk.path):
        if node.backup.state not in (COMMITTED, RESERVED, LAYERS_IN_FLIGHT):
            return pages, record, node.backup
        pages += walk.partial_pages if index == last and walk.partial_pages else node.length_pages
        record = node.backup
    return pages, record, None
