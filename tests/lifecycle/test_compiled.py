"""The compiled form does what the package does, step by step, and refuses what it would not do."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from transitions import Machine
from transitions.core import Condition, Event, Transition
from transitions.core import State as MachineState

from cphicache.lifecycle import ROWS, BackupRecord, Input, LifecycleError, LifecycleMachine, State, Trigger
from cphicache.lifecycle.callbacks import CALLBACKS, GUARDS
from cphicache.lifecycle.compiled import Ask, Bound, Leaf, Unsupported, compile_machine
from tests.lifecycle.recorder import ALL_LAYERS, PortFault, World
from tests.lifecycle.scenarios.book import C, N, R, columns

STEPS = 20_000
ANSWERS = ("fit_is", "room_is", "victims_suffice_is", "eviction_makes_room", "parent_committed_is", "on_device_is")
FAULTS = (
    "refuse", "reserve_slots", "evict_host", "copy_layers", "take_number", "commit", "release", "release_host", "attach", "shrink",
    "defer_split", "fork", "drop_device", "begin_load", "end_load", "fail_load", "undo_load", "commit_children", "lose_children",
    "drain_now", "wake", "reserve_again",
)  # fmt: skip
USUAL = (
    Trigger.RESERVE, Trigger.LAYER_STORED, Trigger.LAYER_STORED, Trigger.LAYER_STORED, Trigger.FORWARD_ENDED, Trigger.AGREED,
    Trigger.BIND, Trigger.COPY_DONE, Trigger.PARENT_COMMITTED,
)  # fmt: skip
"""What lets a walk get anywhere; all triggers come, too."""


def _outcome(world: World, record: BackupRecord, trigger: Trigger, given: Input) -> tuple[object, ...]:
    answer: object
    try:
        answer = world.fire(record, trigger, given)
    except (LifecycleError, PortFault) as error:
        answer = (type(error), str(error))
    if type(record.state) is not State:  # the package leaves its plain name when an `after` callback fails
        record.state = State(record.state)
    return answer, columns(record), world.took(), list(world.answers)


@pytest.mark.parametrize("seed", range(4))
def test_random_walk(seed: int) -> None:
    """R6: over 20,000 random steps in all, with faults in every call, both forms give the same answers, errors, states, columns and
    calls, in the same order; every trigger comes and every state is left."""
    random = Random(seed)
    worlds = World(), World(stock=True)
    seen: set[State] = set()
    fired: set[Trigger] = set()
    records = [world.record(bound=False) for world in worlds]
    for _ in range(STEPS // 4):
        if random.random() < 0.02:
            bound = random.random() < 0.5
            records = [world.record(bound=bound) for world in worlds]
        trigger = random.choice(USUAL if random.random() < 0.6 else list(Trigger))
        layers = tuple(layer for payload, layer in ALL_LAYERS if payload == 0 and random.random() < 0.5)
        payload = int(random.random() < 0.3)
        given = Input(
            reason=random.choice(("", "why")),
            payload=payload,
            layers=(0,) if payload else layers,
            pages=random.randrange(4),
            who="r1",
        )
        facts = {name: random.random() < 0.75 for name in ANSWERS}
        faults = {random.choice(FAULTS)} if random.random() < 0.1 else set()
        outcomes = []
        for world, record in zip(worlds, records, strict=True):
            for name, value in facts.items():
                setattr(world, name, value)
            world.faults = faults
            world._follow_ups.clear()  # what a failed step had queued
            outcomes.append(_outcome(world, record, trigger, given))
        assert outcomes[0] == outcomes[1], (trigger, given, facts, faults)
        seen.add(records[0].state)
        fired.add(trigger)
    assert seen == set(State)
    assert fired == set(Trigger)


@pytest.mark.parametrize("stock", [False, True], ids=["compiled", "stock"])
def test_a_step_of_a_batch_is_a_step_of_each(stock: bool) -> None:
    """R6: one call for many records does what a call for each does, in their order: edges, stale no-ops, columns, calls and the first
    error, behind which nothing is stepped."""
    random = Random(7)
    seen = set()
    worlds = World(stock=stock), World(stock=stock)
    for _ in range(200):
        trigger = random.choice((Trigger.LAYER_STORED, Trigger.COPY_DONE, Trigger.ABORT, Trigger.PARENT_COMMITTED))
        states = [random.choice(list(State)) for _ in range(4)]
        given = Input(layers=(random.randrange(2),))
        outcomes = []
        for at_once, world in enumerate(worlds):
            world.clear()
            records = [world.at(state, numbered=state is not R and state is not N) for state in states]
            answer: object
            try:
                if at_once:
                    answer = world.machine.fire_each(records, trigger, given)
                else:
                    answer = [stale for record in records if (stale := world.machine.fire(record, trigger, given)) is not None]
            except LifecycleError as error:
                answer = str(error)
            seen.add(type(answer))
            outcomes.append((answer, [columns(record) for record in records], world.took()))
        assert outcomes[0] == outcomes[1], (trigger, states)
    assert seen == {list, str}


def test_the_state_is_a_member_inside_after_callbacks() -> None:
    """R6: work that follows sees the new state as a member of State, so that `is` can be asked."""
    found: list[object] = []

    class Watching(World):
        def wake(self, record: BackupRecord) -> None:
            found.append(record.state)

    world = Watching()
    world.fire(world.at(State.LAYERS_IN_FLIGHT, numbered=True), Trigger.AGREED)
    assert found == [C]
    assert type(found[0]) is State


def test_a_guard_is_asked_once_a_step() -> None:
    """R6: no guard is asked twice, and none that does not matter any more."""
    asked: list[str] = []

    class Asked(World):
        def fit(self, record: BackupRecord) -> bool:
            asked.append("fit")
            return super().fit(record)

        def room(self, record: BackupRecord) -> bool:
            asked.append("room")
            return super().room(record)

        def victims_suffice(self, record: BackupRecord) -> bool:
            asked.append("victims_suffice")
            return super().victims_suffice(record)

    world = Asked()
    for fit, room, expected in (
        (False, True, ["fit"]),
        (True, True, ["fit", "room"]),
        (True, False, ["fit", "room", "victims_suffice"]),
    ):
        asked.clear()
        world.fit_is, world.room_is, world.automatic = fit, room, False
        world.fire(world.record(), Trigger.RESERVE)
        assert asked == expected


def _machine(**options: Any) -> Machine:
    transition = {"trigger": "reserve", "source": N.value, "dest": R.value}
    given = {
        "model": None, "states": [state.value for state in State], "initial": N.value, "transitions": [transition],
        "auto_transitions": False, "send_event": True,
    }  # fmt: skip
    return Machine(**(given | options))


def _nothing(*_: object) -> None:
    """A callback that is none of ours."""


class OtherEvent(Event):  # type: ignore[misc]
    """An event class that is not the package's own."""


class OtherTransition(Transition):  # type: ignore[misc]
    """A transition class that is not the package's own."""


class OtherCondition(Condition):  # type: ignore[misc]
    """A condition class that is not the package's own."""


class OtherState(MachineState):  # type: ignore[misc]
    """A state class that is not the package's own."""


class OtherMachine(Machine):  # type: ignore[misc]
    """A machine with classes of its own."""

    event_cls = OtherEvent


def _changed(change: Callable[[Machine], object]) -> Callable[[], Machine]:
    def build() -> Machine:
        machine = _machine()
        change(machine)
        return machine

    return build


def _edge_with(**fields: object) -> Callable[[], Machine]:
    return lambda: _machine(transitions=[{"trigger": "reserve", "source": N.value, "dest": R.value, **fields}])


def _swap_event(machine: Machine) -> None:
    machine.events["reserve"] = OtherEvent("reserve", machine)


def _swap_transition(machine: Machine) -> None:
    machine.events["reserve"].transitions[N.value] = [OtherTransition(N.value, R.value)]


def _swap_condition(machine: Machine) -> None:
    machine.events["reserve"].transitions[N.value][0].conditions = [OtherCondition(Bound(GUARDS["fit"], None))]


REFUSED: dict[str, tuple[Callable[[], Machine], str]] = {
    "another machine": (lambda: OtherMachine(model=None, initial=None), "a OtherMachine"),
    "another event": (_changed(_swap_event), "event reserve: a OtherEvent"),
    "another transition": (_changed(_swap_transition), f"transition {N} -> {R}: a OtherTransition"),
    "another condition": (_changed(_swap_condition), f"transition {N} -> {R}: a OtherCondition"),
    "another state": (lambda: _machine(states=[OtherState(state.value) for state in State]), f"state {N}: has on_enter"),
    "invalid triggers of a state ignored": (
        lambda: _machine(states=[MachineState(state.value, ignore_invalid_triggers=state is C) for state in State]),
        f"state {C}: has on_enter",
    ),
    "queued": (lambda: _machine(queued=True), "queued=True"),
    "plain arguments": (lambda: _machine(send_event=False), "send_event=False"),
    "invalid triggers ignored": (lambda: _machine(ignore_invalid_triggers=True), "ignore_invalid_triggers"),
    "another attribute": (lambda: _machine(model_attribute="phase"), "model_attribute 'phase'"),
    "on_enter": (_changed(lambda machine: machine.get_state(R.value).add_callback("enter", _nothing)), f"state {R}: has on_enter"),
    "on_exit": (_changed(lambda machine: machine.get_state(N.value).add_callback("exit", _nothing)), f"state {N}: has on_enter"),
    "final": (
        lambda: _machine(states=[MachineState(state.value, final=state is C) for state in State]),
        f"state {C}: has on_enter",
    ),
    **{
        hook: (lambda hook=hook: _machine(**{hook: _nothing}), f"{hook} of the machine is set")
        for hook in ("before_state_change", "after_state_change", "prepare_event", "finalize_event", "on_exception", "on_final")
    },
    "prepare": (_edge_with(prepare=[_nothing]), f"transition {N} -> {R}: has prepare"),
    "internal": (_edge_with(dest=None), f"transition {N} -> None: is internal"),
    "condition of another": (_edge_with(conditions=[_nothing]), f"transition {N} -> {R}: calls <function _nothing"),
    "unless of another": (_edge_with(unless=["fit"]), f"transition {N} -> {R}: calls 'fit'"),
    "before of another": (_edge_with(before=[_nothing]), f"transition {N} -> {R}: calls <function _nothing"),
    "after of another": (_edge_with(after=["wake"]), f"transition {N} -> {R}: calls 'wake'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses(name: str) -> None:
    """R6: a machine that uses what the compiled form does not have is refused, with the name of it and the remedy."""
    build, text = REFUSED[name]
    with pytest.raises(Unsupported) as refusal:
        compile_machine(build(), {}, GUARDS)
    assert str(refusal.value).startswith(text)
    assert "stock=True" in str(refusal.value)


def test_compiles_guards_of_both_signs() -> None:
    """R6: conditions and unless of ours become one question each, whose answers lead to the edges that want them."""
    fit, refuse = Bound(GUARDS["fit"], None), Bound(CALLBACKS["refuse"], None)
    machine = _machine(
        transitions=[
            {"trigger": "reserve", "source": N.value, "dest": R.value, "conditions": [fit]},
            {"trigger": "reserve", "source": N.value, "dest": N.value, "unless": [fit], "before": [refuse]},
        ]
    )
    ask = compile_machine(machine, {}, GUARDS)[Trigger.RESERVE][N]
    assert isinstance(ask, Ask)
    assert isinstance(ask.yes, Leaf)
    assert isinstance(ask.no, Leaf)
    assert (ask.guard, ask.yes.dest, ask.no.dest, ask.no.before) == (fit.call, R, N, (refuse.call,))


def test_every_edge_is_compiled() -> None:
    """R6: the leaves of all cells are the rows of the table, no more and no less."""
    world = World()
    decisions = world.machine._decisions
    assert decisions is not None
    leaves: set[int] = set()

    def collect(decision: Any) -> None:
        if isinstance(decision, Ask):
            collect(decision.yes)
            collect(decision.no)
        elif decision is not None:
            leaves.add(id(decision))

    for of_trigger in decisions.values():
        for decision in of_trigger.values():
            collect(decision)
    assert len(leaves) == len(ROWS)


def test_steps_are_compiled_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """R6: a machine takes its steps without the package unless the stock form is asked for."""

    def never(*_: object) -> bool:
        raise AssertionError("the package was asked for a step")

    monkeypatch.setattr(Event, "trigger", never)
    record = BackupRecord(1, 2, bound=True)
    assert LifecycleMachine(World()).fire(record, Trigger.HIT) is None
    assert record.hits == 1
    with pytest.raises(AssertionError, match="the package was asked"):
        LifecycleMachine(World(), stock=True).fire(record, Trigger.HIT)
