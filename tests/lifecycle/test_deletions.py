"""R6: whatever is deleted from the table, a named test notices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

import pytest

from cphicache.lifecycle import ROWS, Row, State, TableError, Trigger, validate
from tests.lifecycle.scenarios import SCENARIOS, Worlds, worlds_of

SHORT = {
    State.DEVICE_VALID_HOST_NONE: "N",
    State.RESERVED: "R",
    State.LAYERS_IN_FLIGHT: "L",
    State.COMMITTED: "C",
    State.ROLLED_BACK: "B",
}


FORMS = pytest.mark.parametrize("stock", [False, True], ids=["compiled", "stock"])


@dataclass(frozen=True, slots=True)
class Deletion:
    """A table with one thing less."""

    name: str
    cell: tuple[State, Trigger]
    rows: tuple[Row, ...]


def _name(row: Row) -> str:
    when = f"[{' '.join(row.when)}]" if row.when else ""
    end = SHORT[row.dest] if row.dest else (row.stale or "error")
    return f"{SHORT[row.source]}-{row.trigger}{when}-{end}"


def _without(index: int, row: Row | None, name: str) -> Deletion:
    put = () if row is None else (row,)
    return Deletion(name, (ROWS[index].source, ROWS[index].trigger), (*ROWS[:index], *put, *ROWS[index + 1 :]))


def _rows(*, edges: bool) -> Iterator[Deletion]:
    for index, row in enumerate(ROWS):
        if row.is_edge is edges:
            yield _without(index, None, _name(row))


def _callbacks() -> Iterator[Deletion]:
    for index, row in enumerate(ROWS):
        for at, name in enumerate(row.before):
            yield _without(index, replace(row, before=row.before[:at] + row.before[at + 1 :]), f"{_name(row)}-before-{name}")
        for at, name in enumerate(row.after):
            yield _without(index, replace(row, after=row.after[:at] + row.after[at + 1 :]), f"{_name(row)}-after-{name}")


def _guards() -> Iterator[Deletion]:
    for index, row in enumerate(ROWS):
        for at, name in enumerate(row.when):
            yield _without(index, replace(row, when=row.when[:at] + row.when[at + 1 :]), f"{_name(row)}-guard-{name}")


def _params(deletions: Iterator[Deletion]) -> list[object]:
    return [pytest.param(deletion, id=deletion.name) for deletion in deletions]


def _fails(name: str, worlds: Worlds) -> bool:
    try:
        SCENARIOS[name](worlds)
    except (Exception, pytest.fail.Exception):  # whatever the mutated table makes of the scenario is a rejection
        return True
    return False


@cache
def _cells_of_scenarios() -> dict[str, frozenset[tuple[State, Trigger]]]:
    """The cells that each scenario fires on the real table. One that fails there is no judge (and fails as a test of its own)."""
    worlds, found = worlds_of(ROWS), {}
    for name in SCENARIOS:
        touched = worlds().touched
        touched.clear()
        if not _fails(name, worlds):
            found[name] = frozenset(touched)
    return found


def _caught_by(deletion: Deletion, stock: bool) -> tuple[list[str], list[str]]:
    """(scenarios that fire the cell, those of them that fail). Others run on the same rows as before and need not be run."""
    worlds = worlds_of(deletion.rows, stock=stock)
    tried = [name for name, cells in _cells_of_scenarios().items() if deletion.cell in cells]
    return tried, [name for name in tried if _fails(name, worlds)]


def _rejected_by_the_validator(deletion: Deletion) -> bool:
    try:
        validate(deletion.rows)
    except TableError:
        return True
    return False


@FORMS
@pytest.mark.parametrize("deletion", _params(_rows(edges=True)))
def test_deleted_edge(deletion: Deletion, stock: bool) -> None:
    """R6: without any one edge a scenario fails, and the validator refuses the table at start-up as well."""
    tried, caught = _caught_by(deletion, stock)
    assert caught, f"nobody misses {deletion.name}; tried: {', '.join(tried) or 'no scenario fires the cell'}"
    assert _rejected_by_the_validator(deletion), (
        f"the validator accepts a table without {deletion.name}; caught by {', '.join(caught)}"
    )


@FORMS
@pytest.mark.parametrize("deletion", _params(_callbacks()))
def test_deleted_callback(deletion: Deletion, stock: bool) -> None:
    """R6: without any one callback of any one edge a scenario fails."""
    tried, caught = _caught_by(deletion, stock)
    assert caught, f"nobody misses {deletion.name}; tried: {', '.join(tried) or 'no scenario fires the cell'}"


@FORMS
@pytest.mark.parametrize("deletion", _params(_guards()))
def test_deleted_guard(deletion: Deletion, stock: bool) -> None:
    """R6: without any one guard rows overlap, which the validator refuses, or a scenario fails: no guard is redundant."""
    tried, caught = _caught_by(deletion, stock)
    by_validator = ["validate"] if _rejected_by_the_validator(deletion) else []
    assert by_validator + caught, f"nobody misses {deletion.name}; tried: {', '.join(tried) or 'no scenario fires the cell'}"


@pytest.mark.parametrize("deletion", _params(_rows(edges=False)))
def test_deleted_answer(deletion: Deletion) -> None:
    """R7: without any one stale name or error its cell is undecided, which the validator refuses."""
    assert _rejected_by_the_validator(deletion), f"the validator accepts a table without {deletion.name}"


def test_ids_are_unique() -> None:
    """R6: each deletion is a test of its own name."""
    names = [d.name for d in (*_rows(edges=True), *_callbacks(), *_guards(), *_rows(edges=False))]
    assert len(names) == len(set(names))


def test_the_table_as_it_is_passes() -> None:
    """R6: the judges are fair: on the undeleted table the validator and every scenario are content."""
    validate(ROWS)
    worlds = worlds_of(ROWS)
    assert [name for name in SCENARIOS if _fails(name, worlds)] == []
