"""The sequence that all ranks agree on: sample local completions once a tick, apply what every rank has reached one tick later.

    0 <= resolved <= min over ranks(count) <= next_number

Numbers below ``resolved`` have been applied. A tick applies numbers in order up to ``min(count, first failed + 1)`` and no further
(R21): a second failure behind the first is not visible in a minimum, so nothing behind the first is passed on that sample.
"""

from __future__ import annotations

from collections.abc import Sequence

from cphicache.agree.port import NO_FAILURE, Excluded, GroupBroken, Reducer
from cphicache.engine.backups import Backups
from cphicache.engine.loadback import LoadBacks
from cphicache.engine.oplog import OpLog
from cphicache.engine.records import Backup, Load, LoadState
from cphicache.engine.state import CacheState
from cphicache.events import EventLog
from cphicache.events.types import QUARANTINE
from cphicache.lifecycle import Input
from cphicache.lifecycle.names import AGREED, AGREED_FAILED, COPY_DONE, COPY_FAILED, LAYERS_IN_FLIGHT, QUARANTINED, RESET
from cphicache.transfer.port import CopyStatus, OpKey, TransferPort


class Agreement:
    """One rank's part in the sequence."""

    def __init__(  # noqa: PLR0917 - the parts of one engine, wired once
        self,
        state: CacheState,
        backups: Backups,
        loads: LoadBacks,
        transfer: TransferPort,
        reducer: Reducer,
        log: EventLog | None,
        ops: OpLog | None,
    ) -> None:
        self._state = state
        self._backups = backups
        self._loads = loads
        self._transfer = transfer
        self._reducer = reducer
        self._log = log
        self._ops = ops

    def apply_outstanding(self) -> None:
        """Wait for the reduction issued one tick ago, if there is one, and apply it."""
        if self._state.outstanding:
            self._state.outstanding = False
            self._wait_and_apply()

    def issue(self) -> None:
        """Sample and start this tick's reduction, iff something is numbered and not yet agreed: a fact that all ranks share."""
        if not self._state.numbered:
            return
        self._state.counters.ticks_in_flight += 1
        self._state.counters.reductions += 1
        self._reducer.issue(*self.sample())
        self._state.outstanding = True

    def drain_round(self) -> None:
        """Wait for own copies, then one blocking reduction (R18: flush, shutdown and a write_back wait only)."""
        self.apply_outstanding()
        if not self._state.numbered:
            return
        for operation in self._state.numbered.values():
            if isinstance(operation, Load):
                self._transfer.wait_load(operation.load_id)
            elif not operation.void:
                self._transfer.wait_backup(operation.key)
        self._reduce_now()

    def agree_now(self) -> None:
        """Pass what has ended on every rank: by the reduction of this tick if that is outstanding, else by one that blocks."""
        if self._state.outstanding:
            self.apply_outstanding()
        elif self._state.numbered:
            self._reduce_now()

    def _reduce_now(self) -> None:
        self._state.counters.drain_reductions += 1
        self._reducer.issue(*self.sample())
        self._wait_and_apply()

    def settle_failures(self, loads: Sequence[Load]) -> None:
        """Wait for the copies of these load-backs here, then reduce until a failure of theirs would be known on every rank.

        A minimum names one failure at a time, so that each further round is for a failure that came before. All ranks call this at
        the same place, as they agree on who reads what.
        """
        self.apply_outstanding()
        while True:
            open_loads = [load for load in loads if load.number in self._state.numbered and load.state is LoadState.QUEUED]
            if not open_loads:
                return
            for load in open_loads:
                self._transfer.wait_load(load.load_id)
            self._state.counters.drain_reductions += 1
            self._reducer.issue(*self.sample())
            if self._wait_and_apply() >= max(load.number for load in open_loads):
                return  # what stands before the first failure has not failed anywhere

    def _wait_and_apply(self) -> int:
        """Apply the reduction and return its first failure. With the group gone the host tier is quarantined: where every rank has all
        of the KV it serves on from the device; where the ranks share it a part is gone, and the caller hears of it."""
        try:
            count, first_failed = self._reducer.wait()
        except GroupBroken as broken:
            if self._ops is not None:
                excluded = isinstance(broken, Excluded)
                self._ops.note("group_lost", local=True, ranks=list(broken.ranks), excluded=excluded, reason=str(broken))
            number, operation = next(iter(self._state.numbered.items()))
            what = f"load-back {operation.load_id}" if isinstance(operation, Load) else operation.describe()
            told = broken.while_waiting_for(f"number {number} ({what})")
            self.quarantine(str(told))
            if self._state.config.kv_replicated and not isinstance(broken, Excluded):
                return NO_FAILURE
            raise told from broken
        self.apply(count, first_failed)
        return first_failed

    def quarantine(self, reason: str) -> None:
        """The host tier is given up: everything pending rolls back, and what other ranks would have had to pass is drained here (R22).

        Committed copies stay where they are, so that the accounts balance; nothing is reserved or loaded back any more.
        """
        state = self._state
        if state.quarantined is not None:
            return
        state.quarantined = reason
        state.outstanding = False
        if self._log is not None:
            self._log.note(state.tick, QUARANTINE, pending=len(state.pending), loads=len(state.loads))
            self._log.note(state.tick, "group_broken", local=True, reason=reason)
        for record in sorted(state.pending.values(), key=lambda record: record.order):
            self._backups.fire(record, RESET, Input(reason="quarantine"))
        while state.numbered:
            number, operation = next(iter(state.numbered.items()))
            del state.numbered[number]
            state.resolved = number + 1
            self._end_alone(operation)

    def _end_alone(self, operation: Backup | Load) -> None:
        """No rank will pass its number any more: wait for this rank's copies, then give back what it holds.

        A load-back counts as failed even if it went well here: it may have failed on another rank, and nobody can be asked.
        """
        if isinstance(operation, Load):
            self._transfer.wait_load(operation.load_id)
            self._loads.failed(operation)
            self._loads.passed(operation)
        else:
            if not operation.void:
                self._transfer.wait_backup(operation.key)
            self._backups.fire(operation, QUARANTINED)

    def drain(self) -> None:
        """Drain rounds until nothing is numbered. Every round passes at least one number."""
        while self._state.numbered:
            before = self._state.resolved
            self.drain_round()
            if self._state.resolved == before:
                raise AssertionError(
                    f"drain round at tick {self._state.tick}: expected number {before} to be passed, found it open"
                )

    def sample(self) -> tuple[int, int]:
        """(operations finished here in sequence order, first failed one whose failure is not yet agreed)."""
        count, first_failed, gap = self._state.resolved, NO_FAILURE, False
        for number, operation in self._state.numbered.items():
            self._poll(operation)
            if not operation.done_here:
                gap = True
            elif not gap:
                count = number + 1
            if first_failed == NO_FAILURE and operation.failed_here and not self._failure_agreed(operation):
                first_failed = number
        return count, first_failed

    def completion(self, key: OpKey, status: CopyStatus) -> None:
        """A local completion of backup ``key``: remembered for the next sample. One for an older generation is a counted no-op."""
        record = self._state.pending.get(key.node)
        if record is None or record.generation != key.generation:
            self._state.counters.stale["stale_generation"] += 1
            if self._log is not None:
                self._log.note(self._state.tick, "stale_generation", node=key.node, generation=key.generation, local=True)
            return
        if status.failed and not record.failed_here:
            self._backups.fire(record, COPY_FAILED)
        if status.drained and record.number is not None and not record.done_here:  # before it has a number, layers may follow
            record.done_here = True
            self._backups.fire(record, COPY_DONE)

    def apply(self, count: int, first_failed: int) -> None:
        """Apply one agreed sample. The same on every rank."""
        state = self._state
        if self._log is not None:
            self._log.note(state.tick, "reduction", count=count, first_failed=None if first_failed == NO_FAILURE else first_failed)
        end = min(count, first_failed + 1)
        for number in range(state.resolved, end):
            operation = state.numbered.pop(number)
            state.resolved = number + 1
            if number == first_failed:
                self._fail(operation)
            self._pass(operation)
        if first_failed != NO_FAILURE and first_failed >= end:
            self._fail(state.numbered[first_failed])

    def _fail(self, operation: Backup | Load) -> None:
        if isinstance(operation, Load):
            self._loads.failed(operation)
        else:
            self._backups.fire(operation, AGREED_FAILED, Input(reason="copy_failed"))

    def _pass(self, operation: Backup | Load) -> None:
        if isinstance(operation, Load):
            self._loads.passed(operation)
        else:
            self._backups.fire(operation, AGREED)

    def _poll(self, operation: Backup | Load) -> None:
        if operation.done_here:
            return
        if isinstance(operation, Load):
            status = self._transfer.load_status(operation.load_id)
            if any(status):
                self._tell_status(status, load=operation.load_id)
            operation.done_here = status.drained
            operation.failed_here = status.failed
        else:
            status = CopyStatus(True, True) if operation.void else self._transfer.status(operation.key)
            if status.drained or status.failed:
                if not operation.void:
                    self._tell_status(status, node=operation.node_id, generation=operation.generation)
                self.completion(operation.key, status)

    def _tell_status(self, status: CopyStatus, **names: int) -> None:
        if self._ops is not None:
            self._ops.note("copy_status", local=True, **names, drained=status.drained, failed=status.failed)

    @staticmethod
    def _failure_agreed(operation: Backup | Load) -> bool:
        if isinstance(operation, Load):
            return operation.state is not LoadState.QUEUED
        return operation.state is not LAYERS_IN_FLIGHT
