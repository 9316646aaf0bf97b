"""The stock machine's transitions, read once and compiled into decision trees that a step walks without the package.

What a compiled step does is what ``machine.events[trigger].trigger(record, given)`` does, for machines that use nothing but guards
and ``before`` / ``after`` callbacks of ours; anything else is refused. Guards are questions without an effect, so that each is asked
at most once a step and only when the answer matters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

from transitions import Machine
from transitions.core import Condition, Event, Transition
from transitions.core import State as MachineState

from cphicache.lifecycle.table import Row, State, Trigger

Call = Callable[[Any, Any, Any], Any]
"""A guard or callback: (record, port, given)."""
_HOOKS = ("before_state_change", "after_state_change", "prepare_event", "finalize_event", "on_exception", "on_final")


class Unsupported(ValueError):
    """The machine uses something of the package that the compiled form does not have; build it with ``stock=True``."""


class Bound:
    """A guard or callback with its port, as the package calls it: with one ``EventData``. The compiled form takes ``call`` out."""

    __slots__ = ("call", "port")

    def __init__(self, call: Call, port: Any) -> None:
        self.call = call
        self.port = port

    def __call__(self, event: Any) -> Any:
        """Call it with what came with the event."""
        return self.call(event.model, self.port, event.args[0])


class Leaf:
    """What a cell does under one combination of guards: an edge (``dest`` set), or a stale name, or an error text."""

    __slots__ = ("after", "before", "dest", "error", "stale")

    def __init__(
        self,
        dest: State | None = None,
        *,
        before: tuple[Call, ...] = (),
        after: tuple[Call, ...] = (),
        stale: str | None = None,
        error: str | None = None,
    ) -> None:
        self.dest = dest
        self.before = before
        self.after = after
        self.stale = stale
        self.error = error


@final
class Ask:
    """One guard, and what follows from its answer. ``None``: no row is left."""

    __slots__ = ("guard", "no", "yes")

    def __init__(self, guard: Call, yes: Decision, no: Decision) -> None:
        self.guard = guard
        self.yes = yes
        self.no = no


Decision = Ask | Leaf | None
Literal = tuple[Call, bool]
"""A guard and the answer that a row wants."""


def compile_machine(
    machine: Machine, answers: Mapping[tuple[State, Trigger], Sequence[Row]], guards: Mapping[str, Call]
) -> dict[Trigger, dict[str, Decision]]:
    """The decision of every cell, by trigger and state: first the stale and error rows of ``answers``, then the machine's transitions.

    Raises :class:`Unsupported` for a machine that uses more than guards and ``before`` / ``after`` callbacks made as :class:`Bound`.
    """
    _require_plain(machine)
    compiled: dict[Trigger, dict[str, Decision]] = {}
    for trigger in Trigger:
        event = machine.events.get(trigger.value)
        of_trigger = compiled[trigger] = {}
        for state in State:
            rows = [
                ([_literal(name, guards) for name in row.when], Leaf(stale=row.stale, error=row.error))
                for row in answers.get((state, trigger), ())
            ]
            rows += [] if event is None else [_edge(transition) for transition in event.transitions.get(state.value, ())]
            of_trigger[state] = _decide(rows)
    return compiled


def _literal(name: str, guards: Mapping[str, Call]) -> Literal:
    return guards[name.removeprefix("!")], not name.startswith("!")


def _decide(rows: Sequence[tuple[list[Literal], Leaf]]) -> Decision:
    """The first row whose guards hold, as a tree: ask the first open guard of the first row, and go on with what is left."""
    if not rows:
        return None
    open_literals, leaf = rows[0]
    if not open_literals:
        return leaf
    guard = open_literals[0][0]
    branches = []
    for answer in (True, False):
        left = [
            ([literal for literal in literals if literal[0] is not guard], row_leaf)
            for literals, row_leaf in rows
            if (guard, not answer) not in literals
        ]
        branches.append(_decide(left))
    return Ask(guard, *branches)


def _edge(transition: Transition) -> tuple[list[Literal], Leaf]:
    where = f"transition {transition.source} -> {transition.dest}"
    if type(transition) is not Transition:
        raise Unsupported(f"{where}: a {type(transition).__name__}; use the package's own Transition, or stock=True")
    if transition.prepare:
        raise Unsupported(f"{where}: has prepare callbacks; name them before, or use stock=True")
    if not transition.dest:
        raise Unsupported(f"{where}: is internal; name the state it stays in, or use stock=True")
    literals = []
    for condition in transition.conditions:
        if type(condition) is not Condition:
            raise Unsupported(f"{where}: a {type(condition).__name__}; use the package's own Condition, or stock=True")
        literals.append((_ours(condition.func, where), bool(condition.target)))
    before, after = (tuple(_ours(call, where) for call in calls) for calls in (transition.before, transition.after))
    return literals, Leaf(State(transition.dest), before=before, after=after)


def _ours(call: object, where: str) -> Call:
    if type(call) is not Bound:
        raise Unsupported(f"{where}: calls {call!r}, which is none of the table's guards and callbacks; use stock=True")
    return call.call


def _require_plain(machine: Machine) -> None:
    if type(machine) is not Machine:
        raise Unsupported(f"a {type(machine).__name__}: only the package's own Machine is compiled; use stock=True")
    if machine.has_queue:
        raise Unsupported("queued=True: a compiled step is taken at once; use stock=True")
    if not machine.send_event:
        raise Unsupported("send_event=False: the table's callbacks take the event; use stock=True")
    if machine.ignore_invalid_triggers:
        raise Unsupported("ignore_invalid_triggers: the table decides every cell; use stock=True")
    if machine.model_attribute != "state":
        raise Unsupported(f"model_attribute {machine.model_attribute!r}: a record's state is in `state`; use stock=True")
    for hook in _HOOKS:
        if getattr(machine, hook):
            raise Unsupported(f"{hook} of the machine is set: a compiled step has no such hook; use stock=True")
    for state in machine.states.values():
        plain = type(state) is MachineState and not (
            state.on_enter or state.on_exit or state.final or state.ignore_invalid_triggers
        )
        if not plain:
            raise Unsupported(f"state {state.name}: has on_enter, on_exit, final or ignore_invalid_triggers; use stock=True")
    for event in machine.events.values():
        if type(event) is not Event:
            raise Unsupported(f"event {event.name}: a {type(event).__name__}; use the package's own Event, or stock=True")
