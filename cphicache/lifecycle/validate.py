"""Start-up check of a transition table: a misspelt name would otherwise be found when the edge is taken, under load."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import product

from cphicache.lifecycle.callbacks import CALLBACKS, GUARDS
from cphicache.lifecycle.table import IMPOSSIBLE, Row, State, Trigger, cells


class TableError(ValueError):
    """The transition table cannot be used; the text names the first row that is wrong."""


def validate(rows: Sequence[Row]) -> None:
    """Raise :class:`TableError` unless every name is known and every (state, trigger) cell is decided, once, for every guard value."""
    for row in rows:
        _check_names(row)
    by_cell = cells(rows)
    for state, trigger in product(State, Trigger):
        members = by_cell.get((state, trigger), ())
        if not members:
            raise TableError(f"cell ({state}, {trigger}) is not decided: add an edge, a stale name or an error")
        for assignment in assignments(members):
            chosen = [row for row in members if holds(row, assignment)]
            if len(chosen) != 1:
                values = ", ".join(f"{name}={value}" for name, value in assignment.items()) or "no guard"
                raise TableError(f"cell ({state}, {trigger}) with {values}: {len(chosen)} rows apply, exactly one must")


def _check_names(row: Row) -> None:
    where = f"row ({row.source}, {row.trigger})"
    if not isinstance(row.source, State) or not (row.dest is None or isinstance(row.dest, State)):
        raise TableError(f"{where}: unknown state {row.source!r} or {row.dest!r}; known: {', '.join(State)}")
    if not isinstance(row.trigger, Trigger):
        raise TableError(f"{where}: unknown trigger {row.trigger!r}; known: {', '.join(Trigger)}")
    if sum(kind is not None for kind in (row.dest, row.stale, row.error)) != 1:
        raise TableError(f"{where}: exactly one of dest, stale and error must be set")
    if not row.is_edge and (row.before or row.after):
        raise TableError(f"{where}: only an edge has callbacks")
    for name in row.when:
        if name.removeprefix("!") not in GUARDS:
            raise TableError(f"{where}: unknown guard {name!r}; known: {', '.join(sorted(GUARDS))}")
    for name in (*row.before, *row.after):
        if name not in CALLBACKS:
            raise TableError(f"{where}: unknown callback {name!r}; known: {', '.join(sorted(CALLBACKS))}")


def assignments(members: Iterable[Row]) -> Iterator[dict[str, bool]]:
    """Every possible value of the guards that the rows of one cell mention."""
    names = sorted({name.removeprefix("!") for row in members for name in row.when})
    for values in product((False, True), repeat=len(names)):
        assignment = dict(zip(names, values, strict=True))
        literals = {name if value else f"!{name}" for name, value in assignment.items()}
        if not any(forbidden <= literals for forbidden in IMPOSSIBLE):
            yield assignment


def holds(row: Row, assignment: dict[str, bool]) -> bool:
    """Whether a row's guards hold under an assignment of guard values."""
    return all(assignment[name.removeprefix("!")] is not name.startswith("!") for name in row.when)
