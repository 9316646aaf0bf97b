"""Whole operations on backups: reserve, report layers, end the forward, divide a node. What each step then does is in ``effects``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cphicache.engine.effects import Effects
from cphicache.engine.holds import Holds
from cphicache.engine.host_eviction import HostEviction
from cphicache.engine.records import ALIVE, Backup, Batch, Load
from cphicache.engine.state import CacheState
from cphicache.engine.steps import Steps
from cphicache.events import EventLog
from cphicache.lifecycle import NO_INPUT, Input, Trigger
from cphicache.lifecycle.names import FORWARD_ENDED, LAYERS_IN_FLIGHT, RESERVE, RESERVED, SPLIT
from cphicache.spaces.types import LogicalPage
from cphicache.transfer.port import TransferPort
from cphicache.tree import Node

_BEFORE_FORWARD = Input(reason="before_forward")
_NOTHING_STORED = Input(reason="nothing_stored")


class Backups:
    """The operations of one engine's backups. All of them end in :meth:`fire`."""

    def __init__(
        self, state: CacheState, transfer: TransferPort, log: EventLog | None, host_eviction: HostEviction, holds: Holds
    ) -> None:
        self._state = state
        self._transfer = transfer
        self._holds = holds
        self._steps = Steps(state, log)
        self._effects = Effects(state, transfer, log=log, host_eviction=host_eviction, holds=holds, steps=self._steps)
        self._steps.work_through(self._effects)
        self._layers = [layers for _, layers in state.config.payloads]
        self._names = state.config.payload_names

    def fire(self, record: Backup, trigger: Trigger, given: Input = NO_INPUT) -> None:
        """Take a step and all steps that follow from it."""
        self._steps.fire(record, trigger, given)

    def forget_queued(self) -> None:
        """Another state is put in place: what a call that ended with an error left queued belongs to the old one."""
        self._steps.forget_followers()
        self._effects.forget_queued()

    def fit(self, record: Backup) -> bool:
        """May it be backed up now? See the port."""
        return self._effects.fit(record)

    # -- reserving ------------------------------------------------------------------------------------------------------------
    def reserve_extent(
        self, batch: Batch, request: str, start_page: int, pages: Sequence[LogicalPage], parent: Backup | None
    ) -> Backup | None:
        """Reserve host slots for KV that the batch's forward is about to store (R12). ``None``: refused, and logged."""
        state = self._state
        record = Backup(state.new_node_id(), len(self._layers), bound=False, no_need=state.no_need)
        record.request, record.parent, record.start_page = request, parent, start_page
        if parent is not None:
            parent.heirs.append(record)
        self._set_extent(record, pages)
        self.fire(record, RESERVE, _BEFORE_FORWARD)
        if record.state is not RESERVED:
            self._holds.unlink(record)
            return None
        batch.ops.append(record)
        return record

    def reserve_stored(self, record: Backup, reason: str, *, retry: bool = False) -> bool:
        """Back up a node whose KV is stored already: reserve, then all layers reported at once (R11). False: refused, and logged."""
        node = record.node
        if node is None or node.pages is None:
            raise AssertionError(f"backup of stored KV: expected a node on the device, found {record.describe()}")
        for batch in self._state.batches.values():
            if record in batch.ops:  # rolled back while its forward goes on: what that stores belongs to the generation before
                batch.ops.remove(record)
        record.tried_tick = self._state.tick
        record.retrying = retry
        self._set_extent(record, node.pages)
        self.fire(record, RESERVE, Input(reason=reason))
        if record.state is not RESERVED:
            record.pages = []
            return False
        for payload, layers in enumerate(self._layers):
            self.layers_stored([record], payload, range(layers))
        self.forward_ended([record])
        return True

    def _set_extent(self, record: Backup, pages: Sequence[LogicalPage]) -> None:
        record.pages = list(pages)
        record.owners = self._state.owners(pages)
        record.need = self._state.need(record.owners)

    # -- the forward ----------------------------------------------------------------------------------------------------------
    def layers_stored(self, records: Iterable[Backup], payload: int, layers: Sequence[int]) -> None:
        """These layers' stores have been issued: submit their copies, one submission a layer for all records."""
        self._steps.layers_stored(records, Input(payload=payload, layers=layers))
        copying = self._effects.take_copying()
        if copying:
            self._transfer.submit_layers([record.key for record in copying if not record.void], self._names[payload], layers)

    def submit_missing(self, records: Iterable[Backup], payload: int) -> None:
        """Submit the layers of a payload that were not reported: one submission for all records that lack the same ones."""
        by_missing: dict[int, list[Backup]] = {}
        every = (1 << self._layers[payload]) - 1
        for record in records:
            missing = every & ~record.submitted[payload]
            if missing:
                by_missing.setdefault(missing, []).append(record)
        for missing, lacking in by_missing.items():
            layers = range(self._layers[payload]) if missing == every else _layers_of(missing)  # all, as usual: quicker as a range
            self.layers_stored(lacking, payload, layers)

    def forward_ended(self, records: Iterable[Backup]) -> None:
        """No further layer comes for these: number them in this order, or roll back what lacks layers."""
        for record in records:
            if record.state in ALIVE:
                record.stored_tick = self._state.tick
                self.fire(record, FORWARD_ENDED, NO_INPUT if record.state is LAYERS_IN_FLIGHT else _NOTHING_STORED)

    def number(self, operation: Backup | Load) -> int:
        """The next number, for a backup or a load-back."""
        return self._effects.number(operation)

    # -- the tree -------------------------------------------------------------------------------------------------------------
    def split(self, node: Node[Backup], head_pages: int) -> Node[Backup]:
        """Divide a node that is not pending; returns the new node with its first pages. The object stays as the tail."""
        head = Backup(self._state.new_node_id(), len(self._layers), bound=True, no_need=self._state.no_need)
        self.fire(node.backup, SPLIT, Input(pages=head_pages, target=head))
        if head.node is None:
            raise AssertionError(f"split of {node}: expected a new node for the first {head_pages} pages, found none")
        self._state.counters.splits += 1
        return head.node


def _layers_of(mask: int) -> tuple[int, ...]:
    """The layers of a bit mask, ascending."""
    return tuple(layer for layer in range(mask.bit_length()) if mask >> layer & 1)
