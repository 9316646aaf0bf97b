"""The machine's form: one shared ``transitions`` machine, records that cost it nothing, a package that imports no world."""

from __future__ import annotations

import ast
import weakref
from dataclasses import FrozenInstanceError, fields, replace
from pathlib import Path
from typing import Any

import pytest
from transitions import Machine

import cphicache.lifecycle
from cphicache.lifecycle import NO_INPUT, ROWS, BackupRecord, Input, LifecycleError, Row, State, Trigger, table_hash
from tests.lifecycle.recorder import World
from tests.lifecycle.scenarios.book import B, C, L, N, R

PACKAGE = Path(cphicache.lifecycle.__file__).parent
MAY_IMPORT = {"__future__", "collections", "dataclasses", "enum", "hashlib", "itertools", "transitions", "typing"}


class WeakRecord(BackupRecord):
    """A record whose end can be seen."""

    __slots__ = ("__weakref__",)


@pytest.fixture(params=[False, True], ids=["compiled", "stock"])
def stock(request: pytest.FixtureRequest) -> bool:
    """Both forms of the machine."""
    return bool(request.param)


def _stock(world: World) -> Any:
    (machine,) = [value for value in vars(world.machine).values() if isinstance(value, Machine)]
    return machine


def test_the_machine_is_the_transitions_package(stock: bool) -> None:
    """R6: one stock machine with the table's states and edges, no model, no automatic transitions and no queue."""
    machine = _stock(World(stock=stock))
    assert type(machine) is Machine
    assert machine.models == []
    assert list(machine.states) == [state.value for state in State]
    assert set(machine.events) == {row.trigger.value for row in ROWS if row.is_edge}
    assert sum(len(event.transitions[state]) for event in machine.events.values() for state in event.transitions) == sum(
        row.is_edge for row in ROWS
    )
    assert not machine.has_queue


def test_records_are_never_registered(stock: bool) -> None:
    """R6: stepping records leaves nothing in the machine: no model is added, and a record ends with its last user."""
    world = World(stock=stock)
    machine = _stock(world)
    attributes = set(vars(machine))
    ends = []
    for node_id in range(50):
        record = WeakRecord(node_id, 2, bound=True)
        world.fire(record, Trigger.RESERVE)
        world.store_all(record)
        world.fire(record, Trigger.FORWARD_ENDED)
        world.fire(record, Trigger.AGREED)
        assert record.state is C
        ends.append(weakref.ref(record))
        del record
    assert [end() for end in ends] == [None] * 50
    assert machine.models == []
    assert set(vars(machine)) == attributes


def test_records_have_no_dict(stock: bool) -> None:
    """R6: a record has its slots and nothing else, so the package cannot bind methods to it."""
    record = World(stock=stock).at(L, numbered=True)
    assert not hasattr(record, "__dict__")
    with pytest.raises(AttributeError):
        record.trigger = None  # type: ignore[attr-defined]
    with pytest.raises(FrozenInstanceError):
        Input().pages = 3  # type: ignore[misc]


@pytest.mark.parametrize(("state", "numbered"), [(N, False), (R, False), (L, True), (C, True), (B, True)])
def test_the_state_stays_an_enumeration(state: State, numbered: bool, stock: bool) -> None:
    """R6: after every step, taken, stale or refused, the state is a member of State, not the package's plain string."""
    world = World(stock=stock)
    for trigger in Trigger:
        record = world.at(state, numbered=numbered, agreed=state is C)
        assert type(record.state) is State
        try:
            world.fire(record, trigger)
        except LifecycleError:
            assert record.state is state
        assert type(record.state) is State


def test_an_error_names_everything(stock: bool) -> None:
    """R7: the error of our bug names trigger, state, why, node, generation and layers, in one line, and is an assertion."""
    world = World(stock=stock)
    record = world.at(L, bound=False, numbered=True, node_id=12)
    with pytest.raises(LifecycleError) as error:
        world.fire(record, Trigger.DEVICE_EVICT)
    assert str(error.value) == (
        "device_evict in LAYERS_IN_FLIGHT: evicted while its copy reads the pages; "
        "node 12 generation 1 LAYERS_IN_FLIGHT number 0 layers 3/0 1/0"
    )
    assert isinstance(error.value, AssertionError)


def test_describe_tells_the_columns(stock: bool) -> None:
    """R36: the one line of a record has node, generation, state, number, flags and both watermarks by payload."""
    world = World(stock=stock)
    assert world.record(4).describe() == "node 4 generation 0 DEVICE_VALID_HOST_NONE bound layers 0/0 0/0"
    committed = world.at(C)
    assert committed.describe() == "node 1 generation 1 COMMITTED number 0 bound agreed layers 3/0 1/0"
    assert committed.watermarks() == [(3, 0), (1, 0)]


@pytest.mark.parametrize("state", [N, C])
def test_both_halves_of_a_split_live_on(state: State, stock: bool) -> None:
    """R17: the upper half takes over state, bind, generation and hits but no number, and each half then ends by itself."""
    world = World(stock=stock)
    tail, head = world.at(state), world.record(2, bound=False)
    world.fire(tail, Trigger.HIT)
    tail.fork_into(head)
    assert (head.state, head.bound, head.generation, head.hits) == (state, True, tail.generation, 1)
    assert (head.number, head.agreed) == (None, False)
    for record in (head, tail):
        assert world.fire(record, Trigger.RESET) == (None if state is C else "nothing_held")
        assert record.state is N
    assert world.took() == (["release_host 2", "release_host 1"] if state is C else [])


def _changed(row: Row) -> list[Row]:
    """The row with each field changed, and with its lists reordered or moved."""
    other_state = N if row.source is not N else R
    changes: list[dict[str, object]] = [
        {"source": other_state},
        {"trigger": Trigger.HIT if row.trigger is not Trigger.HIT else Trigger.SPLIT},
        {"when": (*row.when, "room")},
        {"before": (*row.before, "wake")},
        {"after": (*row.after, "wake")},
    ]
    if row.dest:
        changes.append({"dest": N if row.dest is not N else R})
    if row.stale:
        changes += [{"stale": row.stale + "_"}, {"stale": None, "error": row.stale}]
    if row.error:
        changes += [{"error": row.error + "!"}, {"error": None, "stale": row.error}]
    if len(row.before) > 1:
        changes.append({"before": row.before[::-1]})
    if len(row.after) > 1:
        changes.append({"after": row.after[::-1]})
    if row.before:
        changes.append({"before": row.before[:-1], "after": (row.before[-1], *row.after)})
    return [replace(row, **change) for change in changes]  # type: ignore[arg-type]


def test_the_hash_changes_with_every_row() -> None:
    """R39: any change of any field of any row, and any row left out, gives another hash; the same table the same one."""
    real = table_hash(ROWS)
    assert real == table_hash() == table_hash(list(ROWS))
    assert len(real) == 12
    seen = {real}
    for index, row in enumerate(ROWS):
        without = (*ROWS[:index], *ROWS[index + 1 :])
        for rows in (without, *((*ROWS[:index], changed, *ROWS[index + 1 :]) for changed in _changed(row))):
            digest = table_hash(rows)
            assert digest not in seen, (row, rows[index])
            seen.add(digest)


def test_every_field_of_a_row_is_hashed() -> None:
    """R39: the changes tried above cover all fields of a row, so that a new field is not forgotten by the hash."""
    assert {field.name for field in fields(Row)} == {"source", "trigger", "dest", "stale", "error", "when", "before", "after"}


@pytest.mark.parametrize("path", sorted(PACKAGE.glob("*.py")), ids=lambda path: path.stem)
def test_the_package_imports_no_world(path: Path) -> None:
    """R6: lifecycle imports itself, ``transitions`` and a few pure modules: no torch, thread, clock, random or logging."""
    roots = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            roots |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            assert node.module is not None
            if not node.module.startswith("cphicache.lifecycle"):
                roots.add(node.module.split(".")[0])
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id != "__import__"
    assert roots <= MAY_IMPORT


def test_only_the_machine_writes_a_state() -> None:
    """R6: in the package a state is written by the machine and by the record's constructor, nowhere else."""
    writers = set()
    for path in PACKAGE.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
            if any(isinstance(target, ast.Attribute) and target.attr == "state" for target in targets):
                writers.add(path.stem)
    assert writers == {"machine", "record"}


def test_a_hole_in_an_unchecked_table_is_our_bug(stock: bool) -> None:
    """R7: where no row's guards hold, and for a trigger without any row, the step is an internal error and changes nothing."""
    hole = next(row for row in ROWS if (row.source, row.trigger) == (N, Trigger.RESERVE) and "!fit" in row.when)
    world = World([row for row in ROWS if row is not hole and row.trigger is not Trigger.QUARANTINED], stock=stock)
    world.fit_is = False
    record = world.record()
    for trigger in (Trigger.RESERVE, Trigger.QUARANTINED):
        with pytest.raises(LifecycleError, match=f"^{trigger} in {N}: no edge's guards hold; "):
            world.fire(record, trigger)
        assert record.state is N
        assert world.calls == []


def test_an_input_that_says_nothing() -> None:
    """R6: what a step is not told is neutral: the first payload, no layers, no pages, nobody."""
    given = Input()
    assert (given.payload, given.layers, given.layers_mask, given.pages) == (0, (), 0, 0)
    assert given == NO_INPUT


def test_the_mask_of_layers_follows_from_them() -> None:
    """R6: the mask is made from the layers, cannot be given beside them, and is not printed."""
    assert Input(layers=(0, 2)).layers_mask == 0b101
    with pytest.raises(TypeError, match="layers_mask"):
        Input(layers_mask=1)  # type: ignore[call-arg]
    assert "mask" not in repr(Input(layers=(0, 2)))


def test_a_new_record_remembers_nothing() -> None:
    """R6: a record begins without layers, number, agreement, failure, hits and waste."""
    record = BackupRecord(1, 2, bound=False)
    assert (record.state, record.bound, record.number, record.agreed, record.failed_here) == (N, False, None, False, False)
    assert (record.submitted, record.confirmed, record.hits, record.wasted_pages) == ((0, 0), (0, 0), 0, 0)


def test_the_package_itself_can_be_asked_for_a_step() -> None:
    """R6: the stock step of a trigger takes the edge that the compiled one takes; a trigger without an edge has none."""
    world = World()
    record = world.record()
    assert world.machine.stock_trigger(Trigger.HIT)(record, NO_INPUT)
    assert (record.hits, record.state) == (1, N)
    with pytest.raises(KeyError):
        World([row for row in ROWS if row.trigger is not Trigger.QUARANTINED]).machine.stock_trigger(Trigger.QUARANTINED)


def test_reported_layers_are_a_mask_too() -> None:
    """R36: a report's mask has the bits of its layers and no others; without layers it is empty."""
    assert [Input(layers=layers).layers_mask for layers in ((), (0,), (1,), (0, 2))] == [0, 1, 2, 5]
    assert [Input(layers=layers).layers_mask for layers in (range(0), range(3), range(1, 3), range(0, 5, 2))] == [0, 7, 6, 21]
