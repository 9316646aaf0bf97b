"""What the transitions of a backup ask and do: the engine's side of the lifecycle port, in the order of a backup's life."""

from __future__ import annotations

from cphicache.engine.holds import Holds
from cphicache.engine.host_eviction import HostEviction, Victims
from cphicache.engine.records import ALIVE, Backup, Load, Refusal
from cphicache.engine.state import CacheState, add_need, sub_need
from cphicache.engine.steps import Steps
from cphicache.events import EventLog
from cphicache.lifecycle import Input, State
from cphicache.lifecycle.names import (
    COMMITTED,
    DEVICE_VALID_HOST_NONE,
    DRAINED,
    HOST_EVICT,
    LAYERS_IN_FLIGHT,
    PARENT_COMMITTED,
    PARENT_LOST,
    RESERVE_RETRY,
    RESERVED,
    ROLLED_BACK,
)
from cphicache.transfer.port import HostSlotsExhausted, TransferPort
from cphicache.tree import Node

REFUSAL_NOTE_TICKS = 16
"""A node's refusals are noted in detail at most once in so many ticks; each attempt is logged as a step anyway."""


class Effects:
    """Implements :class:`~cphicache.lifecycle.port.LifecyclePort` for :class:`~cphicache.engine.records.Backup`."""

    def __init__(
        self,
        state: CacheState,
        transfer: TransferPort,
        *,
        log: EventLog | None,
        host_eviction: HostEviction,
        holds: Holds,
        steps: Steps,
    ) -> None:
        self._state = state
        self._transfer = transfer
        self._log = log
        self._host_eviction = host_eviction
        self._holds = holds
        self._steps = steps
        self._layers = [layers for _, layers in state.config.payloads]
        self._names = state.config.payload_names
        self._planned: tuple[Backup, int, Victims | None] | None = None
        self._copying: list[Backup] = []

    def take_copying(self) -> list[Backup]:
        """Records whose layers were accepted since the last call: their copies are one submission."""
        copying, self._copying = self._copying, []
        return copying

    def forget_queued(self) -> None:
        """Another state is put in place: what a call that ended with an error left queued belongs to the old one."""
        self._copying.clear()

    # -- questions ----------------------------------------------------------------------------------------------------------
    def fit(self, record: Backup) -> bool:
        """See the port."""
        return self._unfit(record) is None

    def _unfit(self, record: Backup) -> Refusal | None:
        if self._state.quarantined is not None:
            return Refusal.QUARANTINED
        parent = self._parent_state(record)
        if parent is ROLLED_BACK:
            return Refusal.PARENT_ROLLING_BACK
        if parent is DEVICE_VALID_HOST_NONE:
            return Refusal.PARENT_NOT_BACKED
        if record.node_id in self._state.waiting_for:
            return Refusal.SPLIT_AWAITED
        return None

    def _parent_state(self, record: Backup) -> State:
        if record.node is not None:
            parent = record.node.parent
            return COMMITTED if parent is None or parent.is_root else parent.backup.state
        return COMMITTED if record.parent is None else record.parent.state

    def room(self, record: Backup) -> bool:
        """See the port."""
        return self._state.ledger.fits(record.need)

    def victims_suffice(self, record: Backup) -> bool:
        """See the port."""
        return self._victims(record) is not None

    def _victims(self, record: Backup) -> Victims | None:
        # Asked up to three times inside one step, during which nothing changes. A step that fails does not count; after it
        # nobody goes on but with another state, whose records are others.
        if self._planned is None or self._planned[0] is not record or self._planned[1] != self._steps.taken:
            anchor = self._holds.host_anchor(record)
            if anchor is not None:
                self._state.tree.hold_host(*anchor)
            victims = self._host_eviction.plan(record.need, not record.retrying)
            if anchor is not None:
                self._state.tree.release_host(*anchor)
            self._planned = (record, self._steps.taken, victims)
        return self._planned[2]

    def parent_committed(self, record: Backup) -> bool:
        """See the port."""
        return self._parent_state(record) is COMMITTED

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
        reason = self._unfit(record) or Refusal.NO_HOST_SLOTS
        self._steps.refused(reason)
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
        record.set_generation(state.next_generation)
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
            self._holds.hold_device(record)
        else:
            self._holds.hold_anchor(record)
        state.pending[record.node_id] = record
        state.retries.pop(record.node_id, None)
        state.counters.reserved += 1

    def evict_host(self, record: Backup, given: Input) -> None:
        """See the port."""
        for node, trigger in self._victims(record) or ():
            self._steps.fire(node.backup, trigger, Input(reason="host_full"))
            if trigger is HOST_EVICT:
                self._state.tree.remove(node)

    def reserve_again(self, record: Backup) -> None:
        """See the port."""
        self._steps.follow(RESERVE_RETRY, (record,))

    # -- copying ----------------------------------------------------------------------------------------------------------------
    def copy_layers(self, record: Backup, given: Input) -> None:
        """See the port: the submission itself is one for all records of the batch."""
        if record.state is RESERVED:
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
        self._holds.release_device(record)
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
            self._holds.release_device(record)
            if record.retries < state.config.max_retries:
                state.retries[record.node_id] = record
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
            self._holds.count_host_only(record, -1)
        tokens = node.length_tokens
        if given.reason == "host_full":
            if reclaimed:
                state.counters.reclaims += 1
            else:
                state.counters.host_evictions += 1
                state.counters.host_evicted_tokens += tokens
        record.need = state.no_need
        state.kv_event(stored=False, medium="host", node=node)

    # -- the tree -----------------------------------------------------------------------------------------------------------------
    def attach(self, record: Backup, given: Input) -> None:
        """See the port."""
        node = given.target
        if not isinstance(node, Node):
            raise AssertionError(f"bind: expected the node that the extent became, found {node!r}")
        self._holds.unlink(record)
        record.node = node
        node.backup = record
        self._holds.hold_device(record)

    def shrink(self, record: Backup, pages: int, *, free_now: bool) -> None:
        """See the port."""
        state = self._state
        if not record.void:
            self._transfer.shrink(record.key, pages, free_now=free_now)
        cut = state.need(record.owners[:pages])
        record.need = sub_need(record.need, cut)
        if free_now:
            if record.agreed:  # else nothing was submitted
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

    def fork(self, record: Backup, given: Input) -> None:
        """See the port."""
        state, node, head = self._state, record.node, given.target
        if node is None or not isinstance(head, Backup):
            raise AssertionError(f"split: expected a node and a record for its head, found {record.describe()} and {head!r}")
        head.node = state.tree.split(node, given.pages, head.node_id, head)
        record.fork_into(head)
        head.set_generation(record.generation)
        if record.state is COMMITTED:
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

    def drop_device(self, record: Backup) -> None:
        """See the port."""
        state, node = self._state, record.node
        if node is None:
            raise AssertionError(f"device eviction: expected a node, found {record.describe()}")
        state.counters.device_evictions += 1
        state.counters.device_evicted_tokens += node.length_tokens
        state.kv_event(stored=False, medium="device", node=node)
        if record.state is COMMITTED:
            state.alloc.free(state.tree.drop_device(node))
            self._holds.count_host_only(record, 1)
        else:
            state.counters.device_dropped_tokens += node.length_tokens
            state.retries.pop(record.node_id, None)
            state.alloc.free(state.tree.remove(node))

    # -- load-back ----------------------------------------------------------------------------------------------------------------
    def begin_load(self, record: Backup, given: Input) -> None:
        """See the port."""
        if record.node is None or not isinstance(given.target, tuple):
            raise AssertionError(f"load-back: expected a node and its pages, found {record.describe()} and {given.target!r}")
        load_id, pages = given.target
        self._holds.adopt(record.node, pages)
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

    # -- what follows -------------------------------------------------------------------------------------------------------------
    def commit_children(self, record: Backup) -> None:
        """See the port."""
        if record.node is not None:
            children = (child.backup for child in record.node.children.values())
            self._steps.follow(PARENT_COMMITTED, (child for child in children if child.state is LAYERS_IN_FLIGHT))

    def lose_children(self, record: Backup) -> None:
        """See the port. In reservation order, in which they take numbers and give slots back."""
        children = [] if record.node is None else [child.backup for child in record.node.children.values()]
        pending = [child for child in (*children, *record.heirs) if child.state in ALIVE]
        self._steps.follow(PARENT_LOST, sorted(pending, key=_reservation_order))
        if not record.bound:
            self._holds.unlink(record)  # its parent may lose its host copy, and go, while it drains

    def drain_now(self, record: Backup) -> None:
        """See the port."""
        self._steps.follow(DRAINED, (record,))

    def wake(self, record: Backup) -> None:
        """See the port."""
        for rid in self._state.waiting_for.get(record.node_id, ()):
            self._state.waiters[rid].woken = True

    def _tokens(self, record: Backup) -> int:
        return len(record.pages) * self._state.config.page_size


def _reservation_order(record: Backup) -> int:
    return record.order
