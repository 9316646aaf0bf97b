"""Steps records through the lifecycle: counts each step, writes its event, and takes the steps that follow from it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from cphicache.engine.records import Backup, Refusal
from cphicache.engine.state import CacheState
from cphicache.events import EventLog
from cphicache.events.render import Extra
from cphicache.lifecycle import NO_INPUT, Input, LifecycleMachine, LifecyclePort, Trigger
from cphicache.lifecycle.names import (
    AGREED,
    BIND,
    DEVICE_VALID_HOST_NONE,
    LAYER_STORED,
    LAYERS_IN_FLIGHT,
    PARENT_COMMITTED,
    RESERVE,
    RESERVE_RETRY,
    RESERVED,
    ROLLED_BACK,
    SPLIT,
    SPLIT_WANTED,
)

DETAILED = frozenset({
    RESERVE, RESERVE_RETRY, AGREED, PARENT_COMMITTED, BIND,
    SPLIT_WANTED, SPLIT,
})  # fmt: skip
"""Triggers whose events have fields of their own."""


class Steps:
    """Every trigger of every record comes through :meth:`fire`; what the edge calls for is ``port``'s work (:meth:`work_through`)."""

    def __init__(self, state: CacheState, log: EventLog | None) -> None:
        self.taken = 0
        """Steps so far: what was asked at one count holds until the next."""
        self._state = state
        self._log = log
        self._ledger = state.ledger
        self._follow: deque[tuple[Backup, Trigger]] = deque()
        self._refusal: Refusal | None = None

    def work_through(self, port: LifecyclePort[Backup]) -> None:
        """The edges' work goes through ``port``, which fires steps of its own and so is made after this object. Called once."""
        self._machine: LifecycleMachine[Backup] = LifecycleMachine(port)

    def fire(self, record: Backup, trigger: Trigger, given: Input = NO_INPUT) -> None:
        """Take a step and all steps that follow from it. Inside a step only host copies are evicted, from which nothing follows."""
        self._step(record, trigger, given)
        while self._follow:
            follower, following = self._follow.popleft()
            self._step(follower, following, NO_INPUT)

    def layers_stored(self, records: Iterable[Backup], given: Input) -> None:
        """Take this step with each pending one of these records, in order. Nothing follows from it."""
        step, stored, log = self._counted_step, LAYER_STORED, self._log
        reserved, in_flight = RESERVED, LAYERS_IN_FLIGHT  # compared by identity: a set would hash them in Python
        if log is None:
            self._step_each([r for r in records if (state := r.state) is in_flight or state is reserved], stored, given)
            return
        # the only place where this trigger is fired, and often: a step that changes neither numbers, slots nor locks
        tick, used, now, add = self._state.tick, self._ledger.used_by_rank, log.now(), log.add
        for record in records:
            before = record.state
            if before is in_flight or before is reserved:
                stale = step(record, stored, given)
                add((
                    now, tick, record.node_id, record.generation, stored, before, record.state, stale, record.number, record.bound,
                    record.agreed, record.submitted, record.confirmed, record.need, record.wasted_need, used, 0, given, (),
                ))  # fmt: skip

    def _step_each(self, records: Sequence[Backup], trigger: Trigger, given: Input) -> None:
        """Take the same step with each of these in one call: without a log, for steps from which nothing follows but a stale name."""
        stale_names = self._machine.fire_each(records, trigger, given)
        self.taken += len(records)
        if stale_names:
            self._state.counters.stale.update(stale_names)

    def _step(self, record: Backup, trigger: Trigger, given: Input) -> None:
        if self._log is not None:
            self._logged_step(record, trigger, given, self._log)
        else:
            self._counted_step(record, trigger, given)

    def _counted_step(self, record: Backup, trigger: Trigger, given: Input) -> str | None:
        before = record.state
        stale = self._machine.fire(record, trigger, given)
        self.taken += 1
        if stale is None and record.state is before and trigger is not RESERVE_RETRY:
            return None  # the usual step, a layer's, changes no counter
        counters = self._state.counters
        if stale is not None:
            counters.stale[stale] += 1
        elif record.state is ROLLED_BACK:
            counters.rolled_back[trigger] += 1
        elif trigger is RESERVE_RETRY:
            if record.state is RESERVED:
                counters.eviction_retries_succeeded += 1
            else:
                counters.eviction_retries_failed += 1
        return stale

    def _logged_step(self, record: Backup, trigger: Trigger, given: Input, log: EventLog) -> None:
        before, number = record.state, record.number
        locks = 0 if record.node is None else record.node.lock_ref
        stale = self._counted_step(record, trigger, given)
        node = record.node
        log.add(
            (
                log.now(),
                self._state.tick,
                record.node_id,
                record.generation,
                trigger,
                before,
                record.state,
                stale,
                number if record.number is None else record.number,
                record.bound,
                record.agreed,
                record.submitted,
                record.confirmed,
                self._state.no_need
                if record.state is DEVICE_VALID_HOST_NONE
                else record.need,  # before it is reserved: what it would take
                record.wasted_need,
                self._ledger.used_by_rank,
                0 if node is None else node.lock_ref - locks,
                given.reason,
                self._details(record, trigger, given) if trigger in DETAILED else (),
            )
        )

    def _details(self, record: Backup, trigger: Trigger, given: Input) -> Extra:
        """What the log tells of some steps only, so that whoever replays it can see the tree, the copies and the refusals."""
        if trigger is SPLIT_WANTED:
            return (("request", given.who),)
        parent = record.parent if record.node is None else None if record.node.parent is None else record.node.parent.backup
        details: Extra = (("parent", 0 if parent is None else parent.node_id),)
        if isinstance(given.target, Backup):  # a split's head
            return *details, ("head", given.target.node_id), ("head_slots", sum(given.target.need))
        if trigger in (RESERVE, RESERVE_RETRY):
            if not record.bound:
                details = (*details, ("request", record.request))
            refusal, self._refusal = self._refusal, None
            if refusal is not None:
                details = (*details, ("refused", refusal.value))
        return details

    # -- for the port ---------------------------------------------------------------------------------------------------------
    def follow(self, trigger: Trigger, records: Iterable[Backup]) -> None:
        """Take this step for each of these when the step that calls for it has ended."""
        self._follow.extend((record, trigger) for record in records)

    def refused(self, reason: Refusal) -> None:
        """The step in progress refuses a reservation: its event says why."""
        self._refusal = reason

    def forget_followers(self) -> None:
        """Another state is put in place: what a call that ended with an error left queued belongs to the old one."""
        self._follow.clear()
