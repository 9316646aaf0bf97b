"""A batch's forward: what is reserved before it, the layers that it reports, the load-backs that it waits for, its end."""

from __future__ import annotations

from collections.abc import Sequence

from cphicache.engine.backups import Backups
from cphicache.engine.config import WritePolicy
from cphicache.engine.matching import backed_prefix
from cphicache.engine.records import ALIVE, Backup, Batch, Refusal, Request
from cphicache.engine.state import CacheState
from cphicache.events import EventLog
from cphicache.lifecycle import Input
from cphicache.lifecycle.names import ABORT, ROLLED_BACK
from cphicache.spaces.types import LogicalPage
from cphicache.transfer.port import TransferPort
from cphicache.tree import RadixKey


class Forwards:
    """The batches whose forward has not ended."""

    def __init__(self, state: CacheState, backups: Backups, transfer: TransferPort, log: EventLog | None) -> None:
        self._state = state
        self._config = state.config
        self._backups = backups
        self._transfer = transfer
        self._log = log

    def batch(self, batch_id: int) -> Batch:
        """The batch of that id, begun by the first call."""
        batch = self._state.batches.get(batch_id)
        if batch is None:
            batch = self._state.batches[batch_id] = Batch(batch_id)
        return batch

    def stores(self, request: Request, batch_id: int, start_page: int) -> None:
        """The batch's forward stores (and reads) the request's KV from this page on."""
        self.batch(batch_id).stores[request.rid] = start_page

    def reserve(self, request: Request, batch_id: int, key: RadixKey, row: Sequence[LogicalPage]) -> bool:
        """Reserve the request's new extent (R12). True if host slots were reserved, or if there is nothing to reserve."""
        batch = self.batch(batch_id)
        if request.rid not in batch.stores:
            batch.stores[request.rid] = max(request.protected_pages, request.ops[-1].end_page if request.ops else 0)
        if request.whole_pages is not None:
            self._refused_before_forward(request.rid, None, Refusal.PAYLOAD_NOT_STORED)
            return False
        if self._config.policy is not WritePolicy.WRITE_THROUGH or request.poisoned:
            return True
        start, parent, blocker = backed_prefix(self._state.tree.walk(key))
        previous = request.ops[-1] if request.ops else None
        if previous is not None and previous.end_page >= start:
            start, parent = previous.end_page, previous
            blocker = None if previous.state in ALIVE else previous
        if start >= key.pages:
            return True
        if blocker is not None:
            rolling_back = blocker.state is ROLLED_BACK
            self._refused_before_forward(
                request.rid, blocker, Refusal.PARENT_ROLLING_BACK if rolling_back else Refusal.PARENT_NOT_BACKED
            )
            return False
        op = self._backups.reserve_extent(batch, request.rid, start, row[start : key.pages], parent)
        if op is not None:
            request.ops.append(op)
        return op is not None

    def wait_layer(self, batch_id: int, payload: str, layer: int) -> None:
        """Make the forward wait for the load-backs that the batch's requests read."""
        batch = self._state.batches.get(batch_id)
        if batch is None or not self._state.loads:
            return
        producers: set[int | None] = set()
        for rid in batch.stores:
            request = self._state.requests.get(rid)
            if request is None:
                # It ended inside this forward, which reads its prefix to the end all the same: any load-back may be one of its own.
                producers.update(load.producer for load in self._state.loads.values())
            elif request.loads:
                producers.update(self._state.loads[load].producer for load in request.loads)
        for producer in sorted(p for p in producers if p is not None):
            self._transfer.wait_layer(producer, payload, layer)

    def layer_stored(self, batch: Batch, payload: int, layer: int) -> None:
        """The forward has issued one layer's KV store: submit its copies."""
        stored = batch.stored_layers
        stored[payload] = stored.get(payload, 0) | 1 << layer
        if not batch.ops or not self._config.overlap:
            return
        self._backups.layers_stored(batch.ops, payload, (layer,))

    def end_payload(self, batch: Batch, payload: int) -> None:
        """The forward that stores a payload has ended: submit the layers that were not reported (R11)."""
        batch.stored_layers[payload] = (1 << self._config.payloads[payload][1]) - 1
        self._backups.submit_missing(batch.ops, payload)

    def end(self, batch: Batch) -> None:
        """All forwards of the batch have ended: number its backups, keep what lacks a payload out of the tree (R5, R11)."""
        del self._state.batches[batch.batch_id]
        self._backups.forward_ended(batch.ops)
        if any(batch.stored_layers.get(index) != (1 << layers) - 1 for index, (_, layers) in enumerate(self._config.payloads)):
            for rid, start in batch.stores.items():
                self._keep_out(rid, start)

    def _keep_out(self, rid: str, start_page: int) -> None:
        """The request's KV from this page on lacks a payload: it is never inserted, and what was reserved for it is given up."""
        request = self._state.requests.get(rid)
        if request is None:
            return
        request.whole_pages = start_page if request.whole_pages is None else min(start_page, request.whole_pages)
        for op in request.ops:
            if op.end_page > start_page:
                self._backups.fire(op, ABORT, Input(reason=Refusal.PAYLOAD_NOT_STORED))

    def _refused_before_forward(self, rid: str, blocker: Backup | None, reason: Refusal) -> None:
        self._state.counters.refused[reason] += 1
        if self._log is not None:
            self._log.note(
                self._state.tick, "refused", node=None if blocker is None else blocker.node_id, request=rid, reason=reason.value
            )
