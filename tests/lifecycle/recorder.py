"""A small world for the lifecycle: it answers the guards as it is told, writes every call down and carries out what follows."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from cphicache.lifecycle import NO_INPUT, PENDING, ROWS, BackupRecord, Input, LifecycleMachine, Row, State, Trigger

LAYERS = (3, 1)
"""Layers of the two payloads: target and draft."""

ALL_LAYERS = ((0, 0), (0, 1), (0, 2), (1, 0))
"""Every (payload, layer) of the world, in the order in which the two forward passes store them."""

FOLLOW_UPS_AT_MOST = 50


class PortFault(RuntimeError):
    """What the port raises where a scenario injects a fault."""


class World:
    """The port, the machine and the notes.

    Guards answer from the ``..._is`` attributes (the parent of an adopted child answers for itself). Each call becomes one line of
    ``calls``: its name, the node id, what came along. Calls of the kind ``after`` queue their follow-ups; :meth:`fire` carries them
    out once the outermost step is over, as the engine does (not with ``automatic`` off).
    """

    def __init__(self, rows: Sequence[Row] = ROWS, *, stock: bool = False) -> None:
        self.machine: LifecycleMachine[BackupRecord] = LifecycleMachine(self, rows, check=rows is ROWS, stock=stock)
        self.touched: set[tuple[State, Trigger]] = set()
        self.clear()

    def clear(self) -> None:
        """Forget everything but the machine and the cells touched (building a machine costs more than a whole scenario)."""
        self.fit_is = True
        self.room_is = True
        self.victims_suffice_is = True
        self.eviction_makes_room = True
        self.parent_committed_is = True
        self.on_device_is = True
        self.automatic = True
        self.faults: set[str] = set()
        self.calls: list[str] = []
        self.answers: list[str] = []
        self.next_number = 0
        self._seen = 0
        self._follow_ups: deque[tuple[BackupRecord, Trigger]] = deque()
        self._parents: dict[int, BackupRecord] = {}
        self._children: dict[int, list[BackupRecord]] = {}

    # -- for scenarios ------------------------------------------------------------------------------------------------------
    def record(self, node_id: int = 1, *, bound: bool = True) -> BackupRecord:
        """A new record with both payloads."""
        return BackupRecord(node_id, len(LAYERS), bound=bound)

    def adopt(self, parent: BackupRecord, child: BackupRecord) -> None:
        """Make one record the child of another."""
        self._parents[child.node_id] = parent
        self._children.setdefault(parent.node_id, []).append(child)

    def fire(self, record: BackupRecord, trigger: Trigger, given: Input = NO_INPUT) -> str | None:
        """One step and what follows from it. Returns the answer of the outermost step; those of the others go to ``answers``."""
        answer = self._step(record, trigger, given)
        for _ in range(FOLLOW_UPS_AT_MOST):
            if not (self.automatic and self._follow_ups):
                break
            answered = self._step(*self._follow_ups.popleft(), NO_INPUT)
            if answered is not None:
                self.answers.append(answered)
        else:
            raise AssertionError(f"more than {FOLLOW_UPS_AT_MOST} follow-ups of {trigger} on {record.describe()}")
        return answer

    def store(self, record: BackupRecord, payload: int, *layers: int) -> str | None:
        """Report stored layers of a payload."""
        return self.fire(record, Trigger.LAYER_STORED, Input(payload=payload, layers=layers))

    def store_all(self, record: BackupRecord) -> None:
        """Report all layers of all payloads at once, a payload a report."""
        for payload, layers in enumerate(LAYERS):
            self.store(record, payload, *range(layers))

    def at(
        self,
        state: State,
        *,
        bound: bool = True,
        numbered: bool = False,
        agreed: bool = False,
        partly: bool = False,
        node_id: int = 1,
    ) -> BackupRecord:
        """A record brought to a state by firing alone; the calls on the way are taken.

        An unnumbered record in LAYERS_IN_FLIGHT has submitted all layers, or with ``partly`` only layer 0 of payload 0. ROLLED_BACK
        is caught before what follows, so that it is seen unnumbered and agreed, too.
        """
        record = self.record(node_id, bound=bound)
        before = (self.automatic, self.parent_committed_is)
        self.automatic, self.parent_committed_is = False, state is State.COMMITTED
        path: list[Trigger] = []
        if state is not State.DEVICE_VALID_HOST_NONE:
            path += [Trigger.RESERVE]
        if state is State.COMMITTED:
            numbered = agreed = True
        if numbered:
            path += [Trigger.FORWARD_ENDED]
        if agreed:
            path += [Trigger.AGREED]
        if state is State.ROLLED_BACK:
            path += [Trigger.ABORT]
        for trigger in path:
            if trigger is Trigger.FORWARD_ENDED:
                self.store_all(record)
            self.fire(record, trigger)
        if state is State.LAYERS_IN_FLIGHT and not numbered:
            if partly:
                self.store(record, 0, 0)
            else:
                self.store_all(record)
        self._follow_ups.clear()
        self.automatic, self.parent_committed_is = before
        self.took()
        assert (record.state, record.bound, record.number is not None, record.agreed) == (state, bound, numbered, agreed)
        return record

    def took(self) -> list[str]:
        """The calls since the last time that they were taken."""
        new = self.calls[self._seen :]
        self._seen = len(self.calls)
        return new

    def count(self, name: str, node_id: int = 1) -> int:
        """How often a call was made for a node."""
        return sum(call.split()[:2] == [name, str(node_id)] for call in self.calls)

    def _step(self, record: BackupRecord, trigger: Trigger, given: Input) -> str | None:
        self.touched.add((State(record.state), trigger))
        return self.machine.fire(record, trigger, given)

    def _note(self, name: str, record: BackupRecord, *more: object) -> None:
        if name in self.faults:
            raise PortFault(name)
        self.calls.append(" ".join((name, str(record.node_id), *map(str, more))))

    # -- questions ----------------------------------------------------------------------------------------------------------
    def fit(self, record: BackupRecord) -> bool:
        return self.fit_is

    def room(self, record: BackupRecord) -> bool:
        return self.room_is

    def victims_suffice(self, record: BackupRecord) -> bool:
        return self.victims_suffice_is

    def parent_committed(self, record: BackupRecord) -> bool:
        parent = self._parents.get(record.node_id)
        return self.parent_committed_is if parent is None else parent.state == State.COMMITTED

    def on_device(self, record: BackupRecord) -> bool:
        return self.on_device_is

    def layers_of(self, payload: int) -> int:
        return LAYERS[payload]

    # -- work before the state changes ----------------------------------------------------------------------------------------
    def refuse(self, record: BackupRecord, given: Input) -> None:
        self._note("refuse", record, *filter(None, [given.reason]))

    def reserve_slots(self, record: BackupRecord, given: Input) -> None:
        self._note("reserve_slots", record)
        record.generation += 1

    def evict_host(self, record: BackupRecord, given: Input) -> None:
        self._note("evict_host", record)
        self.room_is = self.eviction_makes_room

    def copy_layers(self, record: BackupRecord, given: Input) -> None:
        self._note("copy_layers", record, given.payload, *given.layers)

    def take_number(self, record: BackupRecord) -> int:
        self._note("take_number", record)
        self.next_number += 1
        return self.next_number - 1

    def commit(self, record: BackupRecord) -> None:
        self._note("commit", record)

    def release(self, record: BackupRecord) -> None:
        self._note("release", record)

    def release_host(self, record: BackupRecord, given: Input) -> None:
        self._note("release_host", record)

    def attach(self, record: BackupRecord, given: Input) -> None:
        self._note("attach", record, *filter(None, [given.target]))

    def shrink(self, record: BackupRecord, pages: int, *, free_now: bool) -> None:
        self._note("shrink", record, pages, "now" if free_now else "at_end")

    def defer_split(self, record: BackupRecord, given: Input) -> None:
        self._note("defer_split", record, given.who)

    def fork(self, record: BackupRecord, given: Input) -> None:
        self._note("fork", record, given.pages)

    def drop_device(self, record: BackupRecord) -> None:
        self._note("drop_device", record)

    def begin_load(self, record: BackupRecord, given: Input) -> None:
        self._note("begin_load", record)

    def end_load(self, record: BackupRecord) -> None:
        self._note("end_load", record)

    def fail_load(self, record: BackupRecord) -> None:
        self._note("fail_load", record)

    def undo_load(self, record: BackupRecord) -> None:
        self._note("undo_load", record)

    # -- what follows when the state has changed --------------------------------------------------------------------------------
    def reserve_again(self, record: BackupRecord) -> None:
        self._note("reserve_again", record)
        self._follow_ups.append((record, Trigger.RESERVE_RETRY))

    def commit_children(self, record: BackupRecord) -> None:
        self._note("commit_children", record)
        self._tell_children(record, Trigger.PARENT_COMMITTED)

    def lose_children(self, record: BackupRecord) -> None:
        self._note("lose_children", record)
        self._tell_children(record, Trigger.PARENT_LOST)

    def drain_now(self, record: BackupRecord) -> None:
        self._note("drain_now", record)
        self._follow_ups.append((record, Trigger.DRAINED))

    def wake(self, record: BackupRecord) -> None:
        self._note("wake", record)

    def _tell_children(self, record: BackupRecord, trigger: Trigger) -> None:
        pending = (child for child in self._children.get(record.node_id, ()) if child.state in PENDING)
        self._follow_ups.extend((child, trigger) for child in pending)
