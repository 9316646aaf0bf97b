"""The one machine that all records of an engine share: the ``transitions`` package, fed by the table.

Records are never registered with it (``model=None``): an edge is fired through ``machine.events[trigger].trigger(record)``, which
costs nothing per record. Stale and error cells are answered before the machine, because the package knows neither.

By default steps walk the machine's transitions in a compiled form (see ``compiled.py``), which does the same in a fraction of the time;
``stock=True`` takes every step with the package itself and is the reference that the compiled form is tested against.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

from transitions import Machine

from cphicache.lifecycle.callbacks import CALLBACKS, GUARDS
from cphicache.lifecycle.compiled import Ask, Bound, Decision, compile_machine
from cphicache.lifecycle.port import LifecyclePort
from cphicache.lifecycle.record import NO_INPUT, BackupRecord, Input
from cphicache.lifecycle.table import ROWS, Row, State, Trigger, cells
from cphicache.lifecycle.validate import validate

R = TypeVar("R", bound=BackupRecord)


class LifecycleError(AssertionError):
    """Our bug: a trigger came in a state where the table calls it an error. Nothing was changed."""


class LifecycleMachine(Generic[R]):
    """Steps records through the table and issues the work of the edges through the port."""

    def __init__(self, port: LifecyclePort[R], rows: Sequence[Row] = ROWS, *, check: bool = True, stock: bool = False) -> None:
        if check:
            validate(rows)
        self._port = port
        self._machine = Machine(
            model=None,
            states=[state.value for state in State],
            initial=State.DEVICE_VALID_HOST_NONE.value,
            transitions=[self._transition(row) for row in rows if row.is_edge],
            auto_transitions=False,
            send_event=True,
        )
        self._fire: dict[Trigger, Callable[..., bool]] = {
            trigger: self._machine.events[trigger.value].trigger for trigger in Trigger if trigger.value in self._machine.events
        }
        self._answers: dict[tuple[State, Trigger], tuple[Row, ...]] = {
            cell: answers for cell, members in cells(rows).items() if (answers := tuple(row for row in members if not row.is_edge))
        }
        self._decisions: dict[Trigger, dict[str, Decision]] | None = (
            None if stock else compile_machine(self._machine, self._answers, GUARDS)
        )

    def fire(self, record: R, trigger: Trigger, given: Input = NO_INPUT) -> str | None:
        """Take one step.

        Returns ``None`` when an edge was taken, or the name of the stale no-op. Raises :class:`LifecycleError` for an error cell; an
        exception of a ``before`` callback passes through with the state unchanged.
        """
        decisions = self._decisions
        if decisions is None:
            return self._fire_stock(record, trigger, given)
        port = self._port
        decision = decisions[trigger][record.state]
        while type(decision) is Ask:
            decision = decision.yes if decision.guard(record, port, given) else decision.no
        if decision is None:
            raise LifecycleError(f"{trigger} in {record.state}: no edge's guards hold; {record.describe()}")
        dest = decision.dest
        if dest is None:
            if decision.error is not None:
                raise LifecycleError(f"{trigger} in {record.state}: {decision.error}; {record.describe()}")
            return decision.stale
        for callback in decision.before:
            callback(record, port, given)
        record.state = dest
        for callback in decision.after:
            callback(record, port, given)
        return None

    def fire_each(self, records: Iterable[R], trigger: Trigger, given: Input) -> list[str]:
        """Take the same step for each record, in order, as :meth:`fire` does; returns the names of the stale no-ops among them.

        For a batch's layers: what does not depend on the record is done once. Records behind one that raises are not stepped.
        """
        decisions = self._decisions
        stale_names: list[str] = []
        by_state = {} if decisions is None else decisions[trigger]
        port = self._port
        for record in records:
            decision = by_state.get(record.state)
            while type(decision) is Ask:
                decision = decision.yes if decision.guard(record, port, given) else decision.no
            if decision is None or decision.dest is None:  # the stock machine, or no edge: rare, and answered there
                stale = self.fire(record, trigger, given)
                if stale is not None:
                    stale_names.append(stale)
                continue
            for callback in decision.before:
                callback(record, port, given)
            record.state = decision.dest
            for callback in decision.after:
                callback(record, port, given)
        return stale_names

    def stock_trigger(self, trigger: Trigger) -> Callable[..., bool]:
        """The package's own step for a trigger, called with (record, input): what steps are measured against. KeyError for none."""
        return self._fire[trigger]

    def _fire_stock(self, record: R, trigger: Trigger, given: Input) -> str | None:
        for row in self._answers.get((record.state, trigger), ()):
            if all(self._holds(name, record, given) for name in row.when):
                if row.stale is not None:
                    return row.stale
                raise LifecycleError(f"{trigger} in {record.state}: {row.error}; {record.describe()}")
        fire = self._fire.get(trigger)
        if fire is None or not fire(record, given):
            raise LifecycleError(f"{trigger} in {record.state}: no edge's guards hold; {record.describe()}")
        record.state = State(record.state)  # the package writes the plain name
        return None

    def _holds(self, name: str, record: R, given: Input) -> bool:
        return GUARDS[name.removeprefix("!")](record, self._port, given) is not name.startswith("!")

    def _transition(self, row: Row) -> dict[str, Any]:
        assert row.dest is not None
        return {
            "trigger": row.trigger.value,
            "source": row.source.value,
            "dest": row.dest.value,
            "conditions": [Bound(GUARDS[name], self._port) for name in row.when if not name.startswith("!")],
            "unless": [Bound(GUARDS[name[1:]], self._port) for name in row.when if name.startswith("!")],
            "before": [Bound(CALLBACKS[name], self._port) for name in row.before],
            "after": [Bound(CALLBACKS[name], self._port) for name in row.after],
        }
