"""Digests of what must be equal on every rank, by part, so that a divergence can be named. Cheap next to a forward pass: O(nodes)."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b
from typing import NamedTuple

from cphicache.engine.records import Backup, Load
from cphicache.engine.state import CacheState

DIGEST_BYTES = 7
"""Fits a signed 64-bit integer."""


class StateDigest(NamedTuple):
    """One digest a part. What only one rank knows (ends of its own copies, its failed reservations) is in none of them."""

    tree: int
    """Keys, shape, device pages, locks and holds."""
    states: int
    """Backups, load-backs and the sequence."""
    ledger: int
    """Host slots in use by rank."""
    allocator: int
    """Free device pages."""


def digest_state(state: CacheState) -> StateDigest:
    """Digests of an engine between two calls. Equal states have equal digests; different ones almost never."""
    return StateDigest(
        _digest(_tree(state)), _digest(_states(state)), _digest(iter((state.ledger.snapshot(),))), _digest(_allocator(state))
    )


def _digest(values: Iterator[object]) -> int:
    digest = blake2b(digest_size=DIGEST_BYTES)
    for value in values:
        digest.update(repr(value).encode())
        digest.update(b"\n")
    return int.from_bytes(digest.digest(), "big")


def _tree(state: CacheState) -> Iterator[object]:
    for node in state.tree.nodes():
        parent = None if node.parent is None else node.parent.id
        pages = None if node.pages is None else list(node.pages)
        yield node.id, parent, node.key.extra_key, node.key.data, pages, node.lock_ref, node.host_ref


def _states(state: CacheState) -> Iterator[object]:
    yield state.resolved, state.next_number, state.next_generation, state.next_load_id, state.outstanding
    for node in state.tree.nodes():
        yield node.id, str(node.backup.state), node.backup.hits, node.loading
    for record in state.pending.values():
        yield _record(record)
    for number, operation in state.numbered.items():
        yield number, (operation.load_id if isinstance(operation, Load) else operation.node_id)
    for load in state.loads.values():
        yield load.load_id, load.last.id, load.pages, load.number, str(load.state), load.doomed, sorted(load.readers)
    yield list(state.waiters), list(state.parked), list(state.retries), state.quarantined is not None


def _record(record: Backup) -> object:
    return (
        record.node_id,
        record.generation,
        str(record.state),
        record.number,
        record.bound,
        record.agreed,
        record.submitted,
        record.need,
        record.wasted_need,
    )


def _allocator(state: CacheState) -> Iterator[object]:
    for lists in state.alloc.snapshot():
        yield [list(lane) for lane in lists]
