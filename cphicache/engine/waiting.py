"""Who waits for a backup to end: deferred requests, parked inserts, and nodes that are to be tried again. All bounded in ticks."""

from __future__ import annotations

from cphicache.engine.backups import Backups
from cphicache.engine.records import Backup, Pin, Refusal, Waiter
from cphicache.engine.state import CacheState
from cphicache.events import EventLog
from cphicache.lifecycle import Input
from cphicache.lifecycle.names import SPLIT_WANTED
from cphicache.tree import Node
from cphicache.tree.node import depth

IDLE_TICKS = 64
"""Of ticks in which nothing is computed, one in so many counts for the bounds on waits."""


class Waiting:
    """Deferrals and retries (R15, R17)."""

    def __init__(self, state: CacheState, backups: Backups, log: EventLog | None) -> None:
        self._state = state
        self._backups = backups
        self._log = log

    def wait_for(self, rid: str, node: Node[Backup], deadline_tick: int, why: str) -> None:
        """``rid`` waits until the backup of ``node`` has ended, at the latest until the deadline."""
        self.stop(rid)
        self._state.waiters[rid] = Waiter(rid, node.id, deadline_tick)
        self._backups.fire(node.backup, SPLIT_WANTED, Input(reason=why, who=rid))

    def is_waiting(self, rid: str) -> bool:
        """Whether a deferred request is to be passed over this round without asking again."""
        waiter = self._state.waiters.get(rid)
        return waiter is not None and not waiter.woken and self._state.tick < waiter.deadline_tick

    def deadline(self, rid: str, node: Node[Backup]) -> int:
        """Last tick of a wait for this node: a request that waits again for another node gets a new bound."""
        waiter = self._state.waiters.get(rid)
        if waiter is not None and waiter.node_id == node.id:
            return waiter.deadline_tick
        return self._state.tick + self._state.config.max_deferral_ticks

    def idle_tick(self) -> None:
        """Nothing was computed since the last tick: it does not count for those who wait, except for one in :data:`IDLE_TICKS`."""
        state = self._state
        if state.tick % IDLE_TICKS:
            for waiter in state.waiters.values():
                waiter.deadline_tick += 1
            for parked in state.parked.values():
                parked.deadline_tick += 1

    def stop(self, rid: str) -> None:
        """``rid`` waits no longer: it goes on, or has ended."""
        state = self._state
        if state.waiters.pop(rid, None) is None:
            return
        # Its node may have been divided since: then it waits for the halves.
        for node_id in [node_id for node_id, rids in state.waiting_for.items() if rid in rids]:
            others = state.waiting_for[node_id]
            others.remove(rid)
            if others:
                continue
            del state.waiting_for[node_id]
            record = state.retries.get(node_id)
            if record is not None:
                record.refused_epoch = -1  # it was not to be reserved while somebody waited to split it
                state.retried_epoch = -1

    def retry(self) -> None:
        """Try refused and rolled-back nodes again, parents first, when host slots were freed since (R15). Never reclaims."""
        state = self._state
        if not state.retries or state.retried_epoch == state.ledger.freed_epoch:
            return
        epoch = state.ledger.freed_epoch
        due = [record for record in state.retries.values() if record.refused_epoch < epoch]
        nodes = [record.node for record in due if record.node is not None and record.tried_tick < state.tick]
        for node in sorted(nodes, key=depth):  # equally deep ones in the order in which they were refused
            record = node.backup
            if not self._backups.fit(record):
                continue
            record.retries += 1
            state.counters.retries += 1
            del state.retries[record.node_id]
            if not self._backups.reserve_stored(record, "retry", retry=True):
                break
        if len(nodes) == len(due):  # else one that was refused in this tick, before slots came free, has its turn in the next
            state.retried_epoch = epoch

    def pin(self, nodes: list[Node[Backup]], ticks: int) -> int:
        """Keep the host copies of a chain of committed nodes from eviction for so many ticks; returns the tokens pinned."""
        pages = sum(node.length_pages for node in nodes)
        if not pages:
            return 0
        self._state.tree.hold_host(nodes[-1], pages)
        self._state.pins.append(Pin(nodes[-1], pages, self._state.tick + ticks))
        if self._log is not None:
            self._log.note(self._state.tick, "pinned", nodes=[node.id for node in nodes], ticks=ticks)
        return pages * self._state.config.page_size

    def unpin(self, *, everything: bool = False) -> None:
        """End the pins that have expired."""
        for pin in [pin for pin in self._state.pins if everything or pin.expires_tick <= self._state.tick]:
            self._state.pins.remove(pin)
            self._state.tree.release_host(pin.node, pin.pages)

    def give_up_parked(self, rid: str, reason: Refusal | str) -> None:
        """Note that a parked insert is dropped."""
        self._state.counters.parked_dropped += 1
        if self._log is not None:
            self._log.note(self._state.tick, "parked_dropped", request=rid, reason=str(reason))
