"""What must hold in every explored state of a rank, beside the rules of the outside checker."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from cphicache.check.conservation import Census, require, require_quiet
from cphicache.engine import CpHiRadixCache
from cphicache.engine.state import CacheState
from cphicache.explore.driver import Driver
from cphicache.explore.transfer import RecordedTransfer
from cphicache.lifecycle import State
from cphicache.spaces.types import LogicalPage

TakeCensus: TypeAlias = Callable[
    [CpHiRadixCache, Mapping[str, Sequence[LogicalPage]], Mapping[str, int] | None, int],
    Census,
]
"""Reads an engine for the outside checker, see ``cphicache.run.census.take_census``."""


class RuleBroken(AssertionError):
    """Our bug: a state that must not be."""


def audit(cache: CpHiRadixCache, driver: Driver, census: Census) -> None:
    """Raise unless the outside checker's rules (R30) and visibility (R8) hold. At rest, and after a shutdown: also that nothing is
    left over. All that is asked of here follows from the logical half, but for what :func:`audit_local` asks of each rank."""
    require(census)
    _check_visibility(cache, driver)
    if driver.is_down or is_at_rest(cache.state, driver):
        require_quiet(census)


def check_loaded(state: CacheState, transfer: RecordedTransfer) -> None:
    """No node keeps the pages of a load-back that failed on this rank (R25). Asked after each call, of each rank."""
    garbage = set(transfer.garbage)
    for node in state.tree.nodes():
        kept = garbage.intersection(node.pages or ())
        if kept:
            raise RuleBroken(f"node {node.id}: expected no page of a load-back that failed, found {sorted(kept)}")


def audit_local(state: CacheState, transfer: RecordedTransfer, rank: int) -> None:
    """The local half holds what the logical half says: so it needs no place in a state's hash but for how its copies fare."""
    operations = {record.key: record.owners for record in state.pending.values() if not record.void}
    _same("operations of the local half", operations, {key: copies.owners for key, copies in transfer.backups.items()})
    committed = {node.id: node.backup.owners for node in state.tree.nodes() if node.backup.state is State.COMMITTED}
    _same("host copies of the local half", committed, transfer.nodes)
    _same("load-backs of the local half", set(state.loads), set(transfer.loads))
    for load_id, load in state.loads.items():
        if load.producer is not None and not transfer.loads[load_id].started:  # a drain round starts it without a producer
            raise RuleBroken(f"load-back {load_id}: expected it to have been started as producer {load.producer}, found it queued")
    not_taken = 0
    for record in state.pending.values():
        if record.void:
            not_taken += record.need[rank] + record.wasted_need[rank]
            continue
        copies = transfer.backups[record.key]
        _same(f"layers of node {record.node_id} submitted", record.submitted, copies.submitted)
        _same(f"slots kept for node {record.node_id}", record.wasted_need[rank], copies.kept_slots)
        if record.agreed and copies.flying:
            raise RuleBroken(f"node {record.node_id}: expected no copy in flight once every rank has passed it, found some")
    free = {name: state.ledger.free(rank, name) + not_taken for name in state.config.payload_names}
    _same(f"free slots in the pools of rank {rank}", free, transfer.free_slots())


def is_at_rest(state: CacheState, driver: Driver) -> bool:
    """Whether everybody has gone and nothing is in flight."""
    return driver.is_quiet() and not (state.pending or state.loads or state.numbered or state.outstanding or state.waiters)


def _check_visibility(cache: CpHiRadixCache, driver: Driver) -> None:
    """A node is a host hit, a last host node or a host victim only when it is committed (R8); a match stops at the first gap."""
    for key in driver.prompts():
        found = cache.match_prefix(key)
        for node in (*found.host_nodes, found.last_host_node):
            if not node.is_root and node.backup.state is not State.COMMITTED:
                raise RuleBroken(f"match: expected COMMITTED host nodes only, found node {node.id} in {node.backup.state}")
        on_device = [page for node in found.walk.path for page in node.pages or ()][: len(found.device_pages)]
        _same("matched device pages", on_device, found.device_pages)
    for node in cache.state.tree.nodes():
        if node.is_host_leaf and node.backup.state is not State.COMMITTED:
            raise RuleBroken(f"host victims: expected COMMITTED nodes only, found node {node.id} in {node.backup.state}")


def _same(what: str, expected: object, found: object) -> None:
    if expected != found:
        raise RuleBroken(f"{what}: expected {expected}, found {found}")
