"""Load-back: a chain of host-only nodes gets device pages again (R25). Decided and published at once, copied later, agreed in sequence."""

from __future__ import annotations

from cphicache.agree.port import GroupBroken
from cphicache.engine.backups import Backups
from cphicache.engine.eviction import DeviceEviction
from cphicache.engine.records import Backup, Load, LoadAnswer, LoadState, Match, Refusal
from cphicache.engine.state import CacheState
from cphicache.events import EventLog
from cphicache.lifecycle import Input
from cphicache.lifecycle.names import LOAD_AGREED, LOAD_DRAINED, LOAD_FAILED, LOAD_QUEUED
from cphicache.transfer.port import LoadItem, TransferPort
from cphicache.tree import Node


def load_back_quota(available_tokens: int, extend_tokens: int, host_hit_tokens: int, page_size: int) -> int:
    """Tokens that a load-back may bring at admission (R26): ``max(available - (real input + page_size), 0)``.

    ``available_tokens``: free tokens plus what may be evicted for this request. The real input is what is left to compute,
    ``extend_tokens - host_hit_tokens``, rounded up to whole pages.
    """
    real_input = -(-(extend_tokens - host_hit_tokens) // page_size) * page_size
    return max(available_tokens - (real_input + page_size), 0)


class LoadBacks:
    """Starts load-backs and ends them when every rank has passed their number."""

    def __init__(
        self, state: CacheState, backups: Backups, eviction: DeviceEviction, transfer: TransferPort, log: EventLog | None
    ) -> None:
        self._state = state
        self._backups = backups
        self._eviction = eviction
        self._transfer = transfer
        self._log = log

    def queue(self, rid: str, match: Match, extend_tokens: int) -> LoadAnswer:
        """Restore the host-only chain of ``match``: all promised tokens, or a refusal that changes nothing but eviction order.

        ``extend_tokens``: tokens of the request that are not on the device (the host hit included).
        """
        state, tree = self._state, self._state.tree
        hit = match.host_hit_tokens
        if state.quarantined is not None and match.host_nodes:
            return self._refuse(rid, match, Refusal.QUARANTINED)
        if not hit:
            reason = Refusal.BELOW_THRESHOLD if match.host_nodes else Refusal.NOTHING_TO_LOAD
            return self._refuse(rid, match, reason)
        available = state.alloc.available_size() + tree.evictable_tokens
        quota = load_back_quota(available, extend_tokens, hit, state.config.page_size)
        delta = tree.lock(match.device_node)  # the ancestor must stay while we evict
        try:
            if hit > quota + delta:
                return self._refuse(rid, match, Refusal.OVER_QUOTA)
            return self._queue_pinned(rid, match, hit)
        finally:
            tree.unlock(match.device_node)

    def _queue_pinned(self, rid: str, match: Match, hit: int) -> LoadAnswer:
        state, tree = self._state, self._state.tree
        chain = self._cut_chain(match)
        last, pages_needed = chain[-1], sum(node.length_pages for node in chain)
        tree.hold_host(last, pages_needed)
        owners = [owner for node in chain for owner in node.backup.owners]
        pages = state.alloc.alloc_for_owners(owners)
        evicted = False
        if pages is None:
            evicted = True
            try:
                result = self._eviction.evict_for_lanes(lambda: state.alloc.lane_shortage_for_owners(owners))
            except GroupBroken:
                tree.release_host(last, pages_needed)
                raise
            if state.quarantined is not None or self._is_unreadable(match.device_node):
                # The eviction has waited (R19), and meanwhile the group was lost or a load-back above failed.
                tree.release_host(last, pages_needed)
                return self._refuse(rid, match, Refusal.LOAD_ABOVE_FAILED if state.quarantined is None else Refusal.QUARANTINED)
            pages = state.alloc.alloc_for_owners(owners)
            if pages is None:
                tree.release_host(last, pages_needed)
                if self._log is not None:
                    self._log.note(
                        state.tick,
                        "load_back_failed",
                        request=rid,
                        node=last.id,
                        tokens=hit,
                        reason=state.alloc.out_of_memory_text(tree.evictable_tokens, result),
                    )
                return self._refuse(rid, match, Refusal.NO_DEVICE_PAGES)
        load = Load(state.next_load_id, last, pages_needed, hit, queued_tick=state.tick)
        state.next_load_id += 1
        items: list[LoadItem] = []
        at = 0
        for node in chain:
            items.append(LoadItem(node.id, pages[at : at + node.length_pages]))
            at += node.length_pages
        self._transfer.queue_load(load.load_id, items)
        for node, item in zip(chain, items, strict=True):
            self._backups.fire(node.backup, LOAD_QUEUED, Input(reason=rid, target=(load.load_id, item.pages)))
        tree.lock(last)
        state.loads[load.load_id] = load
        load.number = self._backups.number(load)
        self._count(hit, evicted)
        if self._log is not None:
            self._log.note(
                state.tick, "load_back", request=rid, load=load.load_id, number=load.number, tokens=hit, nodes=[n.id for n in chain]
            )
        return LoadAnswer(pages, last, None)

    def _count(self, hit: int, evicted: bool) -> None:
        counters = self._state.counters
        counters.load_backs += 1
        counters.load_back_tokens += hit
        counters.load_backs_under_eviction += evicted

    def _cut_chain(self, match: Match) -> list[Node[Backup]]:
        """The host-only nodes that the match promises; a last one that is only partly matched is divided (it is committed)."""
        chain = list(match.host_nodes)
        if match.host_tail_pages != chain[-1].length_pages:
            chain[-1] = self._backups.split(chain[-1], match.host_tail_pages)
        return chain

    def _refuse(self, rid: str, match: Match, reason: Refusal) -> LoadAnswer:
        self._state.counters.load_refused[reason] += 1
        if self._log is not None and reason not in (Refusal.NOTHING_TO_LOAD, Refusal.NO_DEVICE_PAGES):  # the latter has its warning
            self._log.note(
                self._state.tick, "load_back_refused", request=rid, reason=reason.value, node=match.host_nodes[-1].id,
                tokens=match.host_hit_tokens,
            )  # fmt: skip
        return LoadAnswer([], None, reason)

    def start(self) -> int:
        """The batch is ready: start all queued copies as one producer. -1: nothing was queued."""
        producer = self._transfer.start_loads()
        if producer >= 0:
            for load in self._state.loads.values():
                if load.producer is None:
                    load.producer = producer
        return producer

    def failed(self, load: Load) -> None:
        """Its failure is agreed. Pages and lock stay until it has drained; whoever read it is poisoned, and so is what hangs below."""
        state = self._state
        if load.state is not LoadState.QUEUED:
            return
        load.state = LoadState.FAILED
        state.counters.load_backs_failed += 1
        for node in self._nodes(load):
            self._backups.fire(node.backup, LOAD_FAILED, Input(reason="doomed" if load.doomed else "copy_failed"))
        for rid in load.readers:
            state.requests[rid].poisoned = True
        for other in list(state.loads.values()):
            if other.state is LoadState.QUEUED and self._is_below(other, load):
                other.doomed = True

    def passed(self, load: Load) -> None:
        """Every rank has passed its number: its pages are valid, or (failed) nobody writes them any more."""
        state = self._state
        if load.doomed:
            self.failed(load)
        if load.state is LoadState.QUEUED:
            for node in self._nodes(load):
                self._backups.fire(node.backup, LOAD_AGREED)
            state.tree.unlock(load.last)
            self._end(load)
        else:
            load.state = LoadState.DRAINED
            state.undoing.append(load.load_id)
        self.undo_drained()

    def undo_drained(self) -> None:
        """Failed load-backs that have drained end when nobody but them locks their nodes any more, deepest first."""
        state = self._state
        for load_id in sorted(state.undoing, reverse=True):
            load = state.loads[load_id]
            if self._nodes(load)[0].lock_ref > 1:  # readers, load-backs below it, a load-back that is making room
                continue
            state.tree.unlock(load.last)
            for node in reversed(self._nodes(load)):
                self._backups.fire(node.backup, LOAD_DRAINED)
            state.undoing.remove(load_id)
            self._end(load)

    def _end(self, load: Load) -> None:
        state = self._state
        state.tree.release_host(load.last, load.pages)
        self._transfer.end_load(load.load_id)
        del state.loads[load.load_id]
        for rid in load.readers:
            state.requests[rid].loads.discard(load.load_id)

    def _nodes(self, load: Load) -> list[Node[Backup]]:
        """The load's nodes, parents first, as they are now (splits included)."""
        nodes: list[Node[Backup]] = []
        left, node = load.pages, load.last
        while left > 0 and node.parent is not None:
            nodes.append(node)
            left -= node.length_pages
            node = node.parent
        nodes.reverse()
        return nodes

    def _is_below(self, other: Load, load: Load) -> bool:
        if other is load:
            return False
        top = {node.id for node in self._nodes(load)}
        node: Node[Backup] | None = other.last
        while node is not None:
            if node.id in top:
                return True
            node = node.parent
        return False

    def _is_unreadable(self, node: Node[Backup]) -> bool:
        return any(self._state.loads[load_id].state is not LoadState.QUEUED for load_id in self.readers_of(node))

    def readers_of(self, node: Node[Backup]) -> set[int]:
        """Load-backs that whoever reads the prefix ending in ``node`` depends on."""
        loads: set[int] = set()
        at: Node[Backup] | None = node
        while at is not None:
            if at.loading is not None:
                loads.add(at.loading)
            at = at.parent
        return loads
