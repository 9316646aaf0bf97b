"""The start-up validator refuses a table that cannot be used, and names the row or the cell."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest

from cphicache.lifecycle import ROWS, LifecycleMachine, Row, State, TableError, Trigger, validate
from tests.lifecycle.recorder import World
from tests.lifecycle.scenarios.book import C, L, N, R


def _index(source: State, trigger: Trigger, *when: str) -> int:
    (index,) = [i for i, row in enumerate(ROWS) if (row.source, row.trigger) == (source, trigger) and set(when) <= set(row.when)]
    return index


def _with(index: int, change: Callable[[Row], Row]) -> list[Row]:
    rows = list(ROWS)
    rows[index] = change(rows[index])
    return rows


def _misspelt(name: str) -> Any:
    return cast(Any, name)


FIRST_LAYER = _index(R, Trigger.LAYER_STORED)
LATE_LAYER = _index(C, Trigger.LAYER_STORED)
ROW_OF_FIRST_LAYER = "row (RESERVED, layer_stored): "
ROW_OF_LATE_LAYER = "row (COMMITTED, layer_stored): "

WRONG: dict[str, tuple[list[Row], str]] = {
    "unknown source": (
        _with(FIRST_LAYER, lambda row: replace(row, source=_misspelt("RESERVD"))),
        "row (RESERVD, layer_stored): unknown state",
    ),
    "unknown destination": (
        _with(FIRST_LAYER, lambda row: replace(row, dest=_misspelt("IN_FLIGHT"))),
        ROW_OF_FIRST_LAYER + "unknown state <State.RESERVED: 'RESERVED'> or 'IN_FLIGHT'; known: DEVICE_VALID_HOST_NONE, ",
    ),
    "unknown trigger": (
        _with(FIRST_LAYER, lambda row: replace(row, trigger=_misspelt("layer_sotred"))),
        "row (RESERVED, layer_sotred): unknown trigger 'layer_sotred'; known: reserve, ",
    ),
    "unknown guard": (
        _with(FIRST_LAYER, lambda row: replace(row, when=("bund",))),
        ROW_OF_FIRST_LAYER + "unknown guard 'bund'; known: agreed, bound, ",
    ),
    "unknown negated guard": (
        _with(FIRST_LAYER, lambda row: replace(row, when=("!bund",))),
        ROW_OF_FIRST_LAYER + "unknown guard '!bund'",
    ),
    "twice negated guard": (
        _with(FIRST_LAYER, lambda row: replace(row, when=("!!bound",))),
        ROW_OF_FIRST_LAYER + "unknown guard '!!bound'",
    ),
    "unknown callback before": (
        _with(FIRST_LAYER, lambda row: replace(row, before=("copy_layer",))),
        ROW_OF_FIRST_LAYER + "unknown callback 'copy_layer'; known: attach, ",
    ),
    "unknown callback after": (
        _with(FIRST_LAYER, lambda row: replace(row, after=("awake",))),
        ROW_OF_FIRST_LAYER + "unknown callback 'awake'",
    ),
    "edge and stale": (
        _with(LATE_LAYER, lambda row: replace(row, dest=C)),
        ROW_OF_LATE_LAYER + "exactly one of dest, stale and error must be set",
    ),
    "stale and error": (
        _with(LATE_LAYER, lambda row: replace(row, error="late")),
        ROW_OF_LATE_LAYER + "exactly one of dest, stale and error must be set",
    ),
    "no kind": (
        _with(LATE_LAYER, lambda row: replace(row, stale=None)),
        ROW_OF_LATE_LAYER + "exactly one of dest, stale and error must be set",
    ),
    "callback on a stale row": (
        _with(LATE_LAYER, lambda row: replace(row, before=("copy_layers",))),
        ROW_OF_LATE_LAYER + "only an edge has callbacks",
    ),
    "callback on an error row": (
        _with(_index(N, Trigger.DRAINED), lambda row: replace(row, after=("wake",))),
        "row (DEVICE_VALID_HOST_NONE, drained): only an edge has callbacks",
    ),
    "undecided cell": (
        [row for row in ROWS if row is not ROWS[LATE_LAYER]],
        "cell (COMMITTED, layer_stored) is not decided: add an edge, a stale name or an error",
    ),
    "same row twice": (
        [*ROWS, ROWS[FIRST_LAYER]],
        "cell (RESERVED, layer_stored) with no guard: 2 rows apply, exactly one must",
    ),
    "overlapping rows": (
        _with(_index(C, Trigger.HOST_EVICT, "!on_device"), lambda row: replace(row, when=())),
        "cell (COMMITTED, host_evict) with on_device=True: 2 rows apply, exactly one must",
    ),
    "missing guard combination": (
        [row for row in ROWS if row is not ROWS[_index(L, Trigger.BIND, "agreed", "!parent_committed")]],
        "cell (LAYERS_IN_FLIGHT, bind) with agreed=True, bound=False, parent_committed=False: 0 rows apply, exactly one must",
    ),
    "no row at all": ([], "cell (DEVICE_VALID_HOST_NONE, reserve) is not decided"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_table(name: str) -> None:
    """R6: a table with this mistake is refused with one line that names the row or cell and what is known instead."""
    rows, text = WRONG[name]
    with pytest.raises(TableError) as refusal:
        validate(rows)
    assert str(refusal.value).startswith(text)
    assert "\n" not in str(refusal.value)


def test_the_machine_validates_its_table() -> None:
    """R6: a machine is not built on a table that the validator refuses."""
    rows, text = WRONG["overlapping rows"]
    with pytest.raises(TableError) as refusal:
        LifecycleMachine(World(), rows)
    assert str(refusal.value).startswith(text)


def test_impossible_combinations_need_no_row() -> None:
    """R7: agreed without a number cannot be, so no row is asked for it; every other combination has exactly one."""
    validate(ROWS)
    drained = [row.when for row in ROWS if (row.source, row.trigger) == (State.ROLLED_BACK, Trigger.DRAINED)]
    assert sorted(drained) == [("!numbered",), ("agreed",), ("numbered", "!agreed")]
