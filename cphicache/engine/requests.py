"""Requests from their admission to their end: locks on their prefix, inserts of what they stored, parked inserts, aborts."""

from __future__ import annotations

from collections.abc import Sequence

from cphicache.engine.backups import Backups
from cphicache.engine.host_eviction import HostEviction
from cphicache.engine.inserts import Declined, Inserted, Inserts
from cphicache.engine.loadback import LoadBacks
from cphicache.engine.oplog import OpLog
from cphicache.engine.records import Backup, LoadState, Parked, Request
from cphicache.engine.state import CacheState
from cphicache.engine.waiting import Waiting
from cphicache.events import EventLog
from cphicache.lifecycle import Input
from cphicache.lifecycle.names import ABORT
from cphicache.spaces.types import LogicalPage
from cphicache.tree import Node, RadixKey


class Requests:
    """The running requests and the inserts of ended ones that could not be made yet."""

    def __init__(
        self,
        state: CacheState,
        *,
        backups: Backups,
        loads: LoadBacks,
        inserts: Inserts,
        waiting: Waiting,
        host_eviction: HostEviction,
        log: EventLog | None,
        ops: OpLog | None,
    ) -> None:
        self._state = state
        self._backups = backups
        self._loads = loads
        self._inserts = inserts
        self._waiting = waiting
        self._host_eviction = host_eviction
        self._log = log
        self._ops = ops

    def admit(self, rid: str, node: Node[Backup], protected_pages: int, priority: int) -> None:
        """Lock the prefix that ends in ``node``; it is used now."""
        self._waiting.stop(rid)
        self._state.tree.lock(node)
        request = Request(rid, node, protected_pages, 0, priority=priority)
        self._state.requests[rid] = request
        self._read_loads(request)
        self.touch(node)

    def touch(self, node: Node[Backup]) -> None:
        """The prefix that ends in ``node`` is used now."""
        at: Node[Backup] | None = node
        path = []
        while at is not None and not at.is_root:
            path.append(at)
            at = at.parent
        self._touch(path)

    def _read_loads(self, request: Request) -> None:
        request.loads = self._loads.readers_of(request.lock)
        for load_id in request.loads:
            load = self._state.loads[load_id]
            load.readers.add(request.rid)
            if load.state is not LoadState.QUEUED:  # it failed since the match was made
                request.poisoned = True

    def _touch(self, nodes: list[Node[Backup]]) -> None:
        self._state.tree.touch(nodes, self._state.now())
        for node in nodes:
            self._host_eviction.refresh(node)

    # -- inserting ------------------------------------------------------------------------------------------------------------
    def insert_unfinished(
        self, request: Request, key: RadixKey, row: Sequence[LogicalPage], *, chunked: bool
    ) -> list[LogicalPage] | None:
        """Insert what a running request has stored: the tree's pages for it, or ``None``: declined."""
        result = self._insert(request, self._whole(request, key), row, chunked=chunked)
        if isinstance(result, Declined):
            self._decline(request, result)
            return None
        return result.row

    def finish(self, request: Request, key: RadixKey, row: Sequence[LogicalPage]) -> bool:
        """Insert the KV of a request that has ended, free what is left of its row. False: the insert is parked."""
        key = self._whole(request, key)
        self._state.alloc.free(list(row[key.pages :]))
        result = self._insert(request, key, row, chunked=False)
        if isinstance(result, Declined):
            self._decline(request, result)
            self._park(request, key, row, result)
            return False
        self._leave(request)
        return True

    @staticmethod
    def _whole(request: Request, key: RadixKey) -> RadixKey:
        """The part of the key whose KV has all payloads."""
        if request.whole_pages is None or key.pages <= request.whole_pages:
            return key
        return key.slice(0, max(request.whole_pages, request.protected_pages))

    def _insert(self, request: Request, key: RadixKey, row: Sequence[LogicalPage], *, chunked: bool) -> Inserted | Declined:
        if self._ops is not None:
            self._ops.note("insert", request=request.rid, keys=self._ops.pages(key), pages=list(row[: key.pages]), chunked=chunked)
        result = self._inserts.insert(request, key, row, chunked=chunked)
        if isinstance(result, Inserted):
            self._state.tree.lock(result.node)
            self._state.tree.unlock(request.lock)
            request.lock = result.node
            request.protected_pages = key.pages
        return result

    def _decline(self, request: Request, why: Declined) -> None:
        self._state.counters.declined_inserts += 1
        if self._log is not None:
            self._log.note(
                self._state.tick,
                "insert_declined",
                request=request.rid,
                node=None if why.node is None else why.node.id,
                load=why.load,
                reason="poisoned" if request.poisoned else "pending_node" if why.node is not None else "load_in_flight",
            )

    def _park(self, request: Request, key: RadixKey, row: Sequence[LogicalPage], why: Declined) -> None:
        state = self._state
        deadline = state.tick + state.config.max_deferral_ticks
        state.parked[request.rid] = Parked(request.rid, key, list(row[: key.pages]), deadline)
        state.counters.parked_inserts += 1
        if why.node is not None:
            self._waiting.wait_for(request.rid, why.node, deadline, "insert")

    # -- parked inserts -------------------------------------------------------------------------------------------------------
    def insert_parked(self) -> tuple[list[str], list[str]]:
        """Try parked inserts whose wait is over, oldest first; give up those that waited too long."""
        inserted, dropped = [], []
        for rid, parked in list(self._state.parked.items()):
            request = self._state.requests[rid]
            if request.poisoned:
                self.drop_parked(rid, "load_failed")
                dropped.append(rid)
                continue
            waiter = self._state.waiters.get(rid)
            expired = self._state.tick >= parked.deadline_tick
            if not expired and ((waiter is not None and not waiter.woken) or request.loads):
                continue
            self._waiting.stop(rid)
            result = self._insert(request, parked.key, parked.row, chunked=False)
            if isinstance(result, Inserted):
                del self._state.parked[rid]
                self._leave(request)
                inserted.append(rid)
            elif expired:
                self.drop_parked(rid, "waited_too_long")
                dropped.append(rid)
            elif result.node is not None:
                self._waiting.wait_for(rid, result.node, parked.deadline_tick, "insert")
        return inserted, dropped

    def drop_parked(self, rid: str, reason: str) -> None:
        """Give a parked insert up: its KV is freed."""
        self._waiting.give_up_parked(rid, reason)
        self.end(rid, (), reason)

    # -- ending ---------------------------------------------------------------------------------------------------------------
    def end(self, rid: str, row: Sequence[LogicalPage], reason: str) -> None:
        """Abort or retract: reservations roll back, the request's own pages are freed. One never admitted only stops waiting."""
        self._waiting.stop(rid)
        parked = self._state.parked.pop(rid, None)
        request = self._state.requests.get(rid)
        if request is None:
            return
        for op in request.ops:
            self._backups.fire(op, ABORT, Input(reason=reason))
        request.ops.clear()
        own = parked.row if parked is not None else row
        self._state.alloc.free(list(own[request.protected_pages :]))
        self._leave(request)
        self._loads.undo_drained()

    def _leave(self, request: Request) -> None:
        """The request is gone: its lock and what it waits for go with it."""
        if request.ops:
            raise AssertionError(f"{request.rid} ends: expected no reservation left, found {request.ops[0].describe()}")
        self._waiting.stop(request.rid)
        self._state.tree.unlock(request.lock)
        for load_id in request.loads:
            self._state.loads[load_id].readers.discard(request.rid)
        del self._state.requests[request.rid]
