"""Where scenarios are entered, and the words that they share."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cphicache.lifecycle import ROWS, BackupRecord, Row, State
from tests.lifecycle.recorder import World

Worlds = Callable[[], World]
"""Gives a fresh world, with the rows under test; the previous one is void."""

Scenario = Callable[[Worlds], None]

SCENARIOS: dict[str, Scenario] = {}

N, R, L, C, B = (
    State.DEVICE_VALID_HOST_NONE,
    State.RESERVED,
    State.LAYERS_IN_FLIGHT,
    State.COMMITTED,
    State.ROLLED_BACK,
)

COMMIT_CALLS = ["commit 1", "commit_children 1", "wake 1"]
END_CALLS = ["release 1", "wake 1"]


def scenario(function: Scenario) -> Scenario:
    """Enter a scenario under its own name."""
    enter(function.__name__, function)
    return function


def enter(name: str, function: Scenario) -> None:
    """Enter a scenario; every name is taken once and every docstring names its requirement."""
    assert name not in SCENARIOS, name
    assert (function.__doc__ or "").startswith("R"), name
    SCENARIOS[name] = function


def worlds_of(rows: Sequence[Row] = ROWS, *, stock: bool = False) -> Worlds:
    """One machine for all the worlds of a table."""
    world = World(rows, stock=stock)

    def fresh() -> World:
        world.clear()
        return world

    return fresh


def columns(record: BackupRecord) -> tuple[object, ...]:
    """Everything that a record holds, as a value."""
    return tuple(
        tuple(value) if isinstance(value, list) else value for value in (getattr(record, name) for name in BackupRecord.__slots__)
    )


def is_blank(record: BackupRecord) -> bool:
    """Whether nothing of an operation is left in a record."""
    return (
        record.state is N
        and record.number is None
        and not record.agreed
        and not record.failed_here
        and record.wasted_pages == 0
        and record.watermarks() == [(0, 0), (0, 0)]
    )
