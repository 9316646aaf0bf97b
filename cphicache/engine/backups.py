"""Drives backups through the lifecycle and does the work that its transitions call for: the engine's side of the lifecycle port.

Every trigger of every record goes through :meth:`Backups.fire`, which steps the machine, writes the event and then takes the steps
that follow (children of a committed or lost parent, the retry after an eviction, the end of a rollback).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from cphicache.engine.host_eviction import HostEviction, Victims
from cphicache.engine.records import Backup, Batch, Load, Refusal
from cphicache.engine.state import CacheState, add_need, sub_need
from cphicache.events import EventLog
from cphicache.events.render import Extra, StepRecord
from cphicache.lifecycle import NO_INPUT, Input, LifecycleMachine, State, Trigger
from cphicache.spaces.types import LogicalPage
from cphicache.transfer.port import HostSlotsExhausted, TransferPort
from cphicache.tree import Node

N, R, L, C, B = (
    State.DEVICE_VALID_HOST_NONE,
    State.RESERVED,
    State.LAYERS_IN_FLIGHT,
    State.COMMITTED,
    State.ROLLED_BACK,
)
DETAILED = frozenset({
    Trigger.RESERVE, Trigger.RESERVE_RETRY, Trigger.AGREED, Trigger.PARENT_COMMITTED, Trigger.BIND,
    Trigger.SPLIT_WANTED, Trigger.SPLIT,
})  # fmt: skip
"""Triggers whose events have fields of their own."""
REFUSAL_NOTE_TICKS = 16
"""A node's refusals are noted in detail at most once in so many ticks; each attempt is logged as a step anyway."""


class Backups:
    """Implements :class:`~cphicache.lifecycle.port.LifecyclePort` for :class:`~cphicache.engine.records.Backup`."""

    def __init__(self, state: CacheState, transfer: TransferPort, log: EventLog | None, host_eviction: HostEviction) -> None:
        self._state = state
        self._transfer = transfer
        self._log = log
        self._host_eviction = host_eviction
        self._machine: LifecycleMachine[Backup] = LifecycleMachine(self)
        self._layers = [layers for _, layers in state.config.payloads]
        self._names = state.config.payload_names
        self._follow: deque[tuple[Backup, Trigger]] = deque()
        self._depth = 0
        self._steps = 0
        self._planned: tuple[Backup, int, Victims | None] | None = None
        self._copying: list[Backup] = []
        self._refusal: Refusal | None = None

    # -- stepping -----------------------------------------------------------------------------------------------------------
    def fire(self, record: Backup, trigger: Trigger, given: Input = NO_INPUT) -> str | None:
        """Take a step and all steps that follow from it. Returns the name of a stale no-op, ``None`` if an edge was taken."""
        stale = self._step(record, trigger, given)
        if self._follow and not self._depth:
            self._depth += 1
            try:
                while self._follow:
                    follower, following = self._follow.popleft()
                    self._step(follower, following, NO_INPUT)
            finally:
                self._depth -= 1
        return stale

    def _step(self, record: Backup, trigger: Trigger, given: Input) -> str | None:
        if self._log is not None:
            return self._logged_step(record, trigger, given, self._log)
        return self._counted_step(record, trigger, given)

    def _counted_step(self, record: Backup, trigger: Trigger, given: Input) -> str | None:
        before = record.state
        self._depth += 1
        try:
            stale = self._machine.fire(record, trigger, given)
        finally:
            self._depth -= 1
        self._steps += 1
        if stale is None and record.state is before and trigger is not Trigger.RESERVE_RETRY:
            return None  # the usual step, a layer's, changes no counter
        counters = self._state.counters
        if stale is not None:
            counters.stale[stale] += 1
        elif record.state is B and before is not B:
            counters.rolled_back[trigger] += 1
        elif trigger is Trigger.RESERVE_RETRY:
            if record.state is R:
                counters.eviction_retries_succeeded += 1
            else:
                counters.eviction_retries_failed += 1
        return stale

    def _logged_step(self, record: Backup, trigger: Trigger, given: Input, log: EventLog) -> str | None:
        before, generation, number = record.state, record.generation, record.number
        locks = 0 if record.node is None else record.node.lock_ref
        stale = self._counted_step(record, trigger, given)
        node = record.node
        log.add(
            (
                log.now(),
                self._state.tick,
                record.node_id,
                record.generation or generation,
                trigger,
                before,
                record.state,
                stale,
                number if record.number is None else record.number,
                record.bound,
                record.agreed,
                tuple(record.submitted),
                tuple(record.confirmed),
                self._state.no_need if record.state is N else record.need,  # before it is reserved: what it would take
                record.wasted_need,
                self._state.ledger.used_by_rank,
                0 if node is None else node.lock_ref - locks,
                given if trigger is Trigger.LAYER_STORED else given.reason,
                self._details(record, trigger, given) if trigger in DETAILED else (),
            )
        )
        return stale

    def _details(self, record: Backup, trigger: Trigger, given: Input) -> Extra:
        """What the log tells of some steps only, so that whoever replays it can see the tree, the copies and the refusals."""
        if trigger is Trigger.SPLIT_WANTED:
            return (("request", given.who),)
        parent = record.parent if record.node is None else None if record.node.parent is None else record.node.parent.backup
        details: Extra = (("parent", 0 if parent is None else parent.node_id),)
        if trigger is Trigger.SPLIT and isinstance(given.target, Backup):
            return *details, ("head", given.target.node_id), ("head_slots", sum(given.target.need))
        if trigger in (Trigger.RESERVE, Trigger.RESERVE_RETRY):
            if record.request and not record.bound:
                details = (*details, ("request", record.request))
            refusal, self._refusal = self._refusal, None
            if refusal is not None:
                details = (*details, ("refused", refusal.value))
        return details

    def forget_queued(self) -> None:
        """Another state is put in place: what a call that ended with an error left queued belongs to the old one."""
        self._follow.clear()
        self._copying.clear()
        self._planned = None

    # -- whole operations ---------------------------------------------------------------------------------------------------
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
        self.fire(record, Trigger.RESERVE, Input(reason="before_forward"))
        if record.state is not R:
            self._unlink(record)
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
        self.fire(record, Trigger.RESERVE, Input(reason=reason))
        if record.state is not R:
            record.pages = []
            return False
        for payload, layers in enumerate(self._layers):
            self.layers_stored([record], payload, range(layers))
        self.forward_ended([record])
        return True

    def layers_stored(self, records: Iterable[Backup], payload: int, layers: Sequence[int]) -> None:
        """These layers' stores have been issued: submit their copies, one submission a layer for all records."""
        given, stored, step = Input(payload=payload, layers=layers), Trigger.LAYER_STORED, self._counted_step
        if self._log is None:
            for record in records:
                state = record.state
                if state is L or state is R:
                    step(record, stored, given)  # nothing follows from it
        else:  # a step that changes neither slots nor locks, and many of them at once
            tick, used, now = self._state.tick, self._state.ledger.used_by_rank, self._log.now()
            events: list[StepRecord] = []
            for record in records:
                before = record.state
                if before is L or before is R:
                    stale = step(record, stored, given)
                    events.append((
                        now, tick, record.node_id, record.generation, stored, before, record.state, stale, record.number, record.bound,
                        record.agreed, (*record.submitted,), (*record.confirmed,), record.need, record.wasted_need, used, 0, given, (),
                    ))  # fmt: skip
            self._log.add_all(events)
        copying, self._copying = self._copying, []
        if copying:
            self._transfer.submit_layers([record.key for record in copying if not record.void], self._names[payload], layers)

    def missing_layers(self, record: Backup, payload: int) -> tuple[int, ...]:
        """Layers of a payload that were not reported yet."""
        return tuple(layer for layer in range(self._layers[payload]) if not record.submitted[payload] >> layer & 1)

    def forward_ended(self, records: Iterable[Backup]) -> None:
        """No further layer comes for these: number them in this order, or roll back what lacks layers."""
        for record in records:
            if record.state is R or record.state is L:
                record.stored_tick = self._state.tick
                self.fire(record, Trigger.FORWARD_ENDED, NO_INPUT if record.state is L else Input(reason="nothing_stored"))

    def hang(self, record: Backup, node: Node[Backup]) -> None:
        """An extent that is about to be bound hangs on this node, which need not be what it was reserved behind: that was divided, or
        somebody else's KV is there now."""
        self._unlink(record)
        if not node.is_root:
            record.parent = node.backup
            node.backup.heirs.append(record)

    def split(self, node: Node[Backup], head_pages: int) -> Node[Backup]:
        """Divide a node that is not pending; returns the new node with its first pages. The object stays as the tail."""
        head = Backup(self._state.new_node_id(), len(self._layers), bound=True, no_need=self._state.no_need)
        self.fire(node.backup, Trigger.SPLIT, Input(pages=head_pages, target=head))
        if head.node is None:
            raise AssertionError(f"split of {node}: expected a new node for the first {head_pages} pages, found none")
        self._state.counters.splits += 1
        return head.node

    def _set_extent(self, record: Backup, pages: Sequence[LogicalPage]) -> None:
        record.pages = list(pages)
        record.owners = self._state.owners(pages)
        record.need = self._state.need(record.owners)

    # -- questions ----------------------------------------------------------------------------------------------------------
    def fit(self, record: Backup) -> bool:
        """See the port."""
        return self._unfit(record) is None

    def _unfit(self, record: Backup) -> Refusal | None:
        if self._state.quarantined is not None:
            return Refusal.QUARANTINED
        parent = self._parent_state(record)
        if parent is B:
            return Refusal.PARENT_ROLLING_BACK
        if parent is N:
            return Refusal.PARENT_NOT_BACKED
        if record.bound and record.node_id in self._state.waiting_for:
            return Refusal.SPLIT_AWAITED
        return None

    def _parent_state(self, record: Backup) -> State:
        if record.node is not None:
            parent = record.node.parent
            return C if parent is None or parent.is_root else parent.backup.state
        return C if record.parent is None else record.parent.state

    def room(self, record: Backup) -> bool:
        """See the port."""
        return self._state.ledger.fits(record.need)

    def victims_suffice(self, record: Backup) -> bool:
        """See the port."""
        return self._victims(record) is not None

    def _victims(self, record: Backup) -> Victims | None:
        # Asked up to three times inside one step, during which nothing changes.
        if self._planned is None or self._planned[0] is not record or self._planned[1] != self._steps:
            anchor = self._host_anchor(record)
            if anchor is not None:
                self._state.tree.hold_host(*anchor)
            victims = self._host_eviction.plan(record.need, not record.retrying)
            if anchor is not None:
                self._state.tree.release_host(*anchor)
            self._planned = (record, self._steps, victims)
        return self._planned[2]

    def _host_anchor(self, record: Backup) -> tuple[Node[Backup], int] | None:
        """The node that the extent hangs on: it must not lose its host copy for the extent's sake, or before it is bound."""
        parent = record.node.parent if record.node is not None else None if record.parent is None else record.parent.node
        return None if parent is None or parent.is_root else (parent, parent.length_pages)

    def parent_committed(self, record: Backup) -> bool:
        """See the port."""
        return self._parent_state(record) is C

    def on_device(self, record: Backup) -> bool:
        """See the port."""
        return record.node is not None and record.node.pages is not None

    def layers_of(self, payload: int) -> int:
        """See the port."""
        return self._layers[payload]

    # -- reserving ------------------------------------------------------------------------------------------------------------
    def refuse(self, record: Backup, given: Input) -> None:
        """See the port."""
        state, ledger = self._state, self._state.ledger
        reason = self._refusal = self._unfit(record) or Refusal.NO_HOST_SLOTS
        need, record.need = record.need, state.no_need
        state.counters.refused[reason] += 1
        record.refused_epoch = ledger.freed_epoch
        if record.bound and record.retries < state.config.max_retries:
            state.retries[record.node_id] = record
        if self._log is not None and state.tick - record.refused_tick >= REFUSAL_NOTE_TICKS:
            record.refused_tick = state.tick
            self._log.note(
                state.tick,
                "refused",
                node=record.node_id,
                request=record.request,
                reason=reason.value,
                needed=list(need),
                free=[min(ledger.free(rank, name) for name in self._names) for rank in range(state.config.cp_size)],
                evictable=list(state.host_only_need),
                pinned_tokens=sum(load.tokens for load in state.loads.values()),
                in_flight=len(state.pending),
            )

    def reserve_slots(self, record: Backup, given: Input) -> None:
        """See the port."""
        state = self._state
        state.ledger.take(record.need)
        record.generation = state.next_generation
        state.next_generation += 1
        record.order = state.next_order
        state.next_order += 1
        record.done_here = record.void = False
        try:
            self._transfer.reserve(record.key, record.pages)
        except HostSlotsExhausted as error:
            # Only this rank lacks the slots: it goes on as if it had them and reports a failed operation (R22).
            record.void = True
            if self._log is not None:
                self._log.note(state.tick, "local_reserve_failed", node=record.node_id, local=True, reason=str(error))
        if record.bound:
            self._hold_device(record)
        else:
            record.hold = self._host_anchor(record)
            if record.hold is not None:
                state.tree.hold_host(*record.hold)
        state.pending[record.node_id] = record
        state.retries.pop(record.node_id, None)
        state.counters.reserved += 1

    def evict_host(self, record: Backup, given: Input) -> None:
        """See the port."""
        for node, trigger in self._victims(record) or ():
            self.fire(node.backup, trigger, Input(reason="host_full"))
            if trigger is Trigger.HOST_EVICT:
                self._state.tree.remove(node)

    def reserve_again(self, record: Backup) -> None:
        """See the port."""
        self._follow.append((record, Trigger.RESERVE_RETRY))

    # -- copying ----------------------------------------------------------------------------------------------------------------
    def copy_layers(self, record: Backup, given: Input) -> None:
        """See the port: the submission itself is one for all records of the batch."""
        if record.state is R:
            self._state.counters.tokens_submitted += self._tokens(record)
        self._copying.append(record)

    def take_number(self, record: Backup) -> int:
        """See the port."""
        return self.number(record)

    def number(self, operation: Backup | Load) -> int:
        """The next number, for a backup or a load-back."""
        number = self._state.next_number
        self._state.next_number += 1
        self._state.numbered[number] = operation
        return number

    # -- ending -----------------------------------------------------------------------------------------------------------------
    def commit(self, record: Backup) -> None:
        """See the port."""
        state, node = self._state, record.node
        if node is None or record.void:
            raise AssertionError(f"commit: expected a bound backup with slots, found {record.describe()}")
        self._transfer.commit(record.key)
        self._give_wasted(record)
        self._release_device(record)
        del state.pending[record.node_id]
        record.retries = 0
        counters = state.counters
        counters.committed += 1
        counters.tokens_committed += self._tokens(record)
        if record.stored_tick >= 0:
            counters.ticks_to_visible[state.tick - record.stored_tick] += 1
        state.kv_event(stored=True, medium="host", node=node)
        record.pages = []
        self._host_eviction.file(node)

    def release(self, record: Backup) -> None:
        """See the port."""
        state = self._state
        if not record.void:
            self._transfer.release(record.key)
        submitted = any(record.submitted)
        if submitted:
            state.counters.tokens_wasted += self._tokens(record)
        state.ledger.give(record.need)
        self._give_wasted(record)
        record.refused_epoch = state.ledger.freed_epoch  # slots freed by its own rollback do not count (R15)
        record.need = state.no_need
        if record.bound:
            self._release_device(record)
            self._file_parent(record)
            if record.retries < state.config.max_retries:
                state.retries[record.node_id] = record
        else:
            self._unlink(record)
        del state.pending[record.node_id]
        record.pages = []

    def _give_wasted(self, record: Backup) -> None:
        if any(record.wasted_need):
            self._state.counters.tokens_wasted += sum(record.wasted_need)
            self._state.ledger.give(record.wasted_need)
            record.wasted_need = self._state.no_need

    def release_host(self, record: Backup, given: Input) -> None:
        """See the port."""
        state, node = self._state, record.node
        if node is None:
            raise AssertionError(f"host eviction: expected a node, found {record.describe()}")
        self._transfer.free_node(record.node_id)
        reclaimed = node.pages is not None
        state.ledger.give(record.need, counts_for_retry=not reclaimed)
        if not reclaimed:
            self._count_host_only(record, -1)
        tokens = node.length_tokens
        if given.reason == "host_full":
            if reclaimed:
                state.counters.reclaims += 1
            else:
                state.counters.host_evictions += 1
                state.counters.host_evicted_tokens += tokens
        record.need = state.no_need
        state.kv_event(stored=False, medium="host", node=node)
        self._file_parent(record)

    def attach(self, record: Backup, given: Input) -> None:
        """See the port."""
        node = given.target
        if not isinstance(node, Node):
            raise AssertionError(f"bind: expected the node that the extent became, found {node!r}")
        self._unlink(record)
        record.node = node
        node.backup = record
        self._hold_device(record)

    def shrink(self, record: Backup, pages: int, *, free_now: bool) -> None:
        """See the port."""
        state = self._state
        if not record.void:
            self._transfer.shrink(record.key, pages, free_now=free_now)
        cut = state.need(record.owners[:pages])
        record.need = sub_need(record.need, cut)
        if free_now:
            if any(record.submitted):
                state.counters.tokens_wasted += sum(cut)
            state.ledger.give(cut)
        else:
            record.wasted_need = add_need(record.wasted_need, cut)
        record.start_page += pages
        record.pages = record.pages[pages:]
        record.owners = record.owners[pages:]

    def defer_split(self, record: Backup, given: Input) -> None:
        """See the port."""
        waiter = self._state.waiters.get(given.who)
        if waiter is None or waiter.node_id != record.node_id:
            raise AssertionError(f"split deferral: expected {given.who} among the waiters for {record.describe()}, found {waiter}")
        self._state.waiting_for.setdefault(record.node_id, []).append(given.who)
        waiter.woken = False

    def fork(self, record: Backup, given: Input) -> None:
        """See the port."""
        state, node, head = self._state, record.node, given.target
        if node is None or not isinstance(head, Backup):
            raise AssertionError(f"split: expected a node and a record for its head, found {record.describe()} and {head!r}")
        head.node = state.tree.split(node, given.pages, head.node_id, head)
        record.fork_into(head)
        if record.state is C:
            self._transfer.split_node(record.node_id, head.node_id, given.pages)
            head.owners, record.owners = record.owners[: given.pages], record.owners[given.pages :]
            head.need, record.need = state.need(head.owners), state.need(record.owners)
            self._host_eviction.file(head.node)
        head.retries = record.retries
        if record.node_id in state.retries:
            head.refused_epoch = record.refused_epoch
            state.retries[head.node_id] = head
        if record.node_id in state.waiting_for:  # somebody who was woken and has not come yet may want to split either half
            state.waiting_for[head.node_id] = list(state.waiting_for[record.node_id])

    def _count_host_only(self, record: Backup, sign: int) -> None:
        for rank, slots in enumerate(record.need):
            self._state.host_only_need[rank] += sign * slots

    # -- device pages -----------------------------------------------------------------------------------------------------------
    def drop_device(self, record: Backup) -> None:
        """See the port."""
        state, node = self._state, record.node
        if node is None:
            raise AssertionError(f"device eviction: expected a node, found {record.describe()}")
        state.counters.device_evictions += 1
        state.counters.device_evicted_tokens += node.length_tokens
        state.kv_event(stored=False, medium="device", node=node)
        if record.state is C:
            state.alloc.free(state.tree.drop_device(node))
            self._count_host_only(record, 1)
        else:
            state.counters.device_dropped_tokens += node.length_tokens
            state.retries.pop(record.node_id, None)
            state.alloc.free(state.tree.remove(node))

    def adopt(self, node: Node[Backup], pages: Sequence[LogicalPage]) -> None:
        """A host-only node gets device pages: recomputed ones, or those that a load-back will fill."""
        self._state.tree.set_device(node, pages)
        self._count_host_only(node.backup, -1)
        self._state.kv_event(stored=True, medium="device", node=node)
        self._host_eviction.file(node)

    def _file_parent(self, record: Backup) -> None:
        if record.node is not None and record.node.parent is not None:
            self._host_eviction.file(record.node.parent)

    def _hold_device(self, record: Backup) -> None:
        if record.node is not None:
            self._state.tree.lock(record.node)

    def _release_device(self, record: Backup) -> None:
        if record.node is not None:
            self._state.tree.unlock(record.node)

    def release_host_hold(self, node: Node[Backup], pages: int) -> None:
        """Give a hold on host copies back: they may be taken again, or reclaimed."""
        self._state.tree.release_host(node, pages)
        self._host_eviction.file(node)

    def _unlink(self, record: Backup) -> None:
        """An extent is bound, or gone: it keeps its parent's host copy no longer."""
        if record.hold is not None:
            self.release_host_hold(*record.hold)
            record.hold = None
        if record.parent is not None:
            record.parent.heirs.remove(record)
            record.parent = None

    # -- load-back ----------------------------------------------------------------------------------------------------------------
    def begin_load(self, record: Backup, given: Input) -> None:
        """See the port."""
        if record.node is None or not isinstance(given.target, tuple):
            raise AssertionError(f"load-back: expected a node and its pages, found {record.describe()} and {given.target!r}")
        load_id, pages = given.target
        self.adopt(record.node, pages)
        self._state.tree.set_loading(record.node, load_id)

    def end_load(self, record: Backup) -> None:
        """See the port."""
        self._loading_over(record)

    def fail_load(self, record: Backup) -> None:
        """See the port: the load's state says so; its nodes stay locked until every rank has drained."""
        if record.node is None or record.node.loading is None:
            raise AssertionError(f"failed load-back: expected a loading node, found {record.describe()}")

    def undo_load(self, record: Backup) -> None:
        """See the port."""
        self._loading_over(record)
        self.drop_device(record)

    def _loading_over(self, record: Backup) -> None:
        if record.node is None or record.node.loading is None:
            raise AssertionError(f"load-back: expected a loading node, found {record.describe()}")
        self._state.tree.set_loading(record.node, None)
        self._host_eviction.file(record.node)

    # -- what follows -------------------------------------------------------------------------------------------------------------
    def commit_children(self, record: Backup) -> None:
        """See the port."""
        if record.node is not None:
            self._follow.extend(
                (child.backup, Trigger.PARENT_COMMITTED) for child in record.node.children.values() if child.backup.state == L
            )

    def lose_children(self, record: Backup) -> None:
        """See the port. In reservation order, in which they take numbers and give slots back."""
        children = [] if record.node is None else [child.backup for child in record.node.children.values()]
        pending = [child for child in (*children, *record.heirs) if child.state in (R, L)]
        self._follow.extend((child, Trigger.PARENT_LOST) for child in sorted(pending, key=_reservation_order))
        if not record.bound:
            self._unlink(record)  # its parent may lose its host copy, and go, while it drains

    def drain_now(self, record: Backup) -> None:
        """See the port."""
        self._follow.append((record, Trigger.DRAINED))

    def wake(self, record: Backup) -> None:
        """See the port."""
        for rid in self._state.waiting_for.get(record.node_id, ()):
            self._state.waiters[rid].woken = True

    def _tokens(self, record: Backup) -> int:
        return len(record.pages) * self._state.config.page_size


def _reservation_order(record: Backup) -> int:
    return record.order
