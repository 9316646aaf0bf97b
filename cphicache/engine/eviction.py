"""Who loses its device pages. The order is the tree's; what an eviction does is the lifecycle's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from cphicache.engine.backups import Backups
from cphicache.engine.config import WriteBackShort, WritePolicy
from cphicache.engine.records import Backup
from cphicache.engine.state import CacheState
from cphicache.events import EventLog
from cphicache.lifecycle import PENDING
from cphicache.lifecycle.names import COMMITTED, DEVICE_EVICT, DEVICE_VALID_HOST_NONE
from cphicache.tree import Node

WRITE_BACK_SCAN = 256
"""Victims without a host copy that an eviction passes over, at most, to find one that has one."""
WRITE_BACK_AHEAD = 8
"""Of those, the first that are backed up for the next eviction."""


@dataclass(frozen=True, slots=True)
class EvictResult:
    """``num_tokens_evicted``: device tokens freed. ``num_tokens_dropped``: those of them that had no host copy."""

    num_tokens_evicted: int
    num_tokens_dropped: int


@dataclass(slots=True)
class _Demand:
    """``met(evicted tokens)``: is it enough? ``tokens``: about how many it takes. ``counted``: whoever asks counted these tokens among
    the evictable ones, and has nothing to fall back on."""

    met: Callable[[int], bool]
    tokens: int
    counted: bool
    evicted: int = 0
    dropped: int = 0


class DeviceEviction:
    """Frees device pages: host-backed nodes become host-only, the others go (R27), or are written back first (R19)."""

    def __init__(self, state: CacheState, backups: Backups, drain_round: Callable[[], None], log: EventLog | None) -> None:
        self._state = state
        self._backups = backups
        self._drain_round = drain_round
        self._log = log

    def evict_tokens(self, tokens: int) -> EvictResult:
        """Evict until ``tokens`` device tokens are free, or no victim is left."""
        return self._evict(_Demand(lambda evicted: evicted >= tokens, tokens, counted=True))

    def evict_for_lanes(self, shortage: Callable[[], tuple[int, ...]]) -> EvictResult:
        """Evict until no lane is short of pages, or no victim is left (R4)."""
        config = self._state.config
        tokens = max(shortage()) * config.cp_size * config.page_size
        return self._evict(_Demand(lambda evicted: not any(shortage()), tokens, counted=False))

    def _evict(self, demand: _Demand) -> EvictResult:
        if self._state.config.policy is WritePolicy.WRITE_BACK:
            self._evict_written_back(demand)
        else:
            self._take(demand)
        if self._log is not None and demand.evicted:
            self._log.note(self._state.tick, "device_evicted", tokens=demand.evicted, dropped=demand.dropped)
        return EvictResult(demand.evicted, demand.dropped)

    def _take(self, demand: _Demand, accept: Callable[[Node[Backup]], bool] | None = None) -> None:
        """Evict in order what ``accept`` takes until the demand is met."""
        while not demand.met(demand.evicted):
            node = self._state.tree.next_device_victim(accept)
            if node is None:
                return
            self._take_node(demand, node)

    def _take_backed_up(self, demand: _Demand) -> list[Node[Backup]]:
        """Evict in order what has a host copy, until the demand is met or so many without one were passed over; returns those."""
        aside: list[Node[Backup]] = []
        passed = 0

        def ends_search(node: Node[Backup]) -> bool:
            nonlocal passed
            passed += not _is_backed_up(node)
            return _is_backed_up(node) or passed > WRITE_BACK_SCAN

        while not demand.met(demand.evicted):
            node = self._state.tree.next_device_victim(ends_search, aside)
            if node is None or not _is_backed_up(node):
                break
            self._take_node(demand, node)
        self._state.tree.put_back(aside)
        return aside

    def _take_node(self, demand: _Demand, node: Node[Backup]) -> None:
        tokens, kept = node.length_tokens, _is_backed_up(node)
        self._backups.fire(node.backup, DEVICE_EVICT)
        demand.evicted += tokens
        demand.dropped += 0 if kept else tokens

    def _evict_written_back(self, demand: _Demand) -> None:
        """Nodes that have a host copy go first. The others are backed up: for the next eviction if those sufficed; for this one, with
        a wait, if so configured; else they are dropped. What a backup in flight keeps is waited for also then, if whoever asks has
        counted it: it could be evicted until an eviction before this one started that backup."""
        aside = self._take_backed_up(demand)
        if demand.met(demand.evicted):
            self._write_back(aside[:WRITE_BACK_AHEAD])
        elif self._state.config.write_back_short is WriteBackShort.DROP:
            self._take(demand)
            if demand.counted and not demand.met(demand.evicted):
                self._wait_for(self._kept_by_copies())
                self._take(demand)
            self._write_back(self._next_victims(demand.tokens))
        else:
            self._wait_and_take(demand)

    def _wait_and_take(self, demand: _Demand) -> None:
        while not demand.met(demand.evicted):
            victims = self._next_victims(demand.tokens)
            if victims:
                self._wait_for(self._write_back(victims))
            else:
                victims = self._kept_by_copies()
                self._wait_for(victims)
            before, ids = demand.evicted, {node.id for node in victims}
            # What still has no host copy was refused, or its copy failed: it goes without.
            self._take(demand, partial(_may_go, ids))
            if demand.evicted == before:
                return

    def _wait_for(self, nodes: list[Node[Backup]]) -> None:
        """Drain rounds until none of these is pending; counted and logged, if there are any."""
        if not nodes:
            return
        self._state.counters.write_back_waits += 1
        if self._log is not None:
            self._log.note(self._state.tick, "write_back_wait", nodes=[node.id for node in nodes])
        while any(node.backup.state in PENDING for node in nodes):
            self._drain_round()

    def _kept_by_copies(self) -> list[Node[Backup]]:
        """Nodes whose backup is in flight, if the end of those gives a page back: some of them have no lock but their backup's own."""
        nodes = [record.node for record in self._state.pending.values() if record.node is not None]
        return nodes if any(node.lock_ref == 1 for node in nodes) else []

    def _next_victims(self, tokens: int) -> list[Node[Backup]]:
        """The first victims in order that make up ``tokens``; nothing is taken."""
        victims: list[Node[Backup]] = []
        looked_at = 0

        def passes_enough(node: Node[Backup]) -> bool:
            nonlocal looked_at
            enough = looked_at >= tokens
            looked_at += node.length_tokens
            return enough

        self._state.tree.next_device_victim(passes_enough, victims)
        self._state.tree.put_back(victims)
        return victims

    def _write_back(self, nodes: list[Node[Backup]]) -> list[Node[Backup]]:
        """Start the backups of nodes that are about to be evicted, ancestors first; returns those that are pending now."""
        for node in nodes:
            chain: list[Node[Backup]] = []
            at: Node[Backup] | None = node
            while at is not None and not at.is_root and at.backup.state is DEVICE_VALID_HOST_NONE:
                chain.append(at)
                at = at.parent
            for member in reversed(chain):
                if member.backup.tried_tick >= self._state.tick or not self._backups.reserve_stored(member.backup, "write_back"):
                    break
        return [node for node in nodes if node.backup.state in PENDING]


def _may_go(without_copy: set[int], node: Node[Backup]) -> bool:
    return _is_backed_up(node) or node.id in without_copy


def _is_backed_up(node: Node[Backup]) -> bool:
    return node.backup.state is COMMITTED
