"""R7: every (state, trigger) cell, under every value of every guard, against a table written by hand from the requirements."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from itertools import product

import pytest

from cphicache.lifecycle import BackupRecord, Input, LifecycleError, State, Trigger
from tests.lifecycle.recorder import LAYERS, World
from tests.lifecycle.scenarios.book import B, C, L, N, R, columns

T = Trigger

# Columns: N (device valid, host none), R (reserved), L (layers in flight), C (committed), B (rolled back).
# A cell has alternatives, split by "|", of which exactly one applies: conditions, then what happens: "=> X" the edge to X,
# ". name" the stale no-op of that name, "!" our bug. Conditions ("-" negates): fit, room, victims, parent (is committed),
# device (it has its pages), new (a reported layer was not submitted yet), complete (all layers of all payloads are submitted),
# bound, numbered, agreed.
_ROLLS_BACK = "-numbered => B | numbered -agreed => B | agreed => B"
_UNBOUND_ROLLS_BACK = "bound ! | -bound -numbered => B | -bound numbered -agreed => B | -bound agreed => B"
_OPEN_NUMBER_AGREED = "-numbered ! | agreed ! | numbered -agreed"
EXPECTED: dict[Trigger, tuple[str, str, str, str, str]] = {
    T.RESERVE: (
        "-fit => N | fit room => R | fit -room victims => N | fit -room -victims => N",
        *("!", "!", ". already_backed", ". still_draining"),
    ),
    T.RESERVE_RETRY: ("room => R | -room => N", "!", "!", "!", "!"),
    T.HIT: ("=> N", "=> R", "=> L", "=> C", "=> B"),
    T.LAYER_STORED: (". not_pending", "=> L", "new => L | -new . layer_twice", ". already_committed", ". rolled_back"),
    T.FORWARD_ENDED: (
        ". not_pending",
        "=> B",
        "numbered ! | -numbered complete => L | -numbered -complete => B",
        *("!", ". rolled_back"),
    ),
    T.COPY_DONE: (". stale_generation", "!", "=> L", "!", "=> B"),
    T.COPY_FAILED: (". stale_generation", "!", "=> L", "!", "=> B"),
    T.AGREED: (
        *("!", "!"),
        f"{_OPEN_NUMBER_AGREED} bound parent => C | numbered -agreed bound -parent => L | numbered -agreed -bound => L",
        *("!", f"{_OPEN_NUMBER_AGREED} => N"),
    ),
    T.AGREED_FAILED: ("!", "!", f"{_OPEN_NUMBER_AGREED} => B", "!", ". already_rolled_back"),
    T.PARENT_COMMITTED: (
        *(". not_pending", ". not_agreed_yet"),
        "-agreed . not_agreed_yet | agreed -bound . not_bound_yet | agreed bound => C",
        *("!", ". rolled_back"),
    ),
    T.PARENT_LOST: (". nothing_held", "=> B", _ROLLS_BACK, "!", ". already_rolled_back"),
    T.BIND: (
        *("!", "bound ! | -bound => R"),
        "bound ! | -bound agreed parent => C | -bound agreed -parent => L | -bound -agreed => L",
        *("!", ". rolled_back"),
    ),
    T.BIND_DUPLICATE_PART: ("!", "bound ! | -bound => R", "bound ! | -bound => L", "!", ". rolled_back"),
    T.BIND_DUPLICATE_WHOLE: ("!", "bound ! | -bound => B", _UNBOUND_ROLLS_BACK, "!", ". already_rolled_back"),
    T.ABORT: (". nothing_held", "=> B", _ROLLS_BACK, ". already_committed", ". already_rolled_back"),
    T.RESET: (". nothing_held", "=> B", _ROLLS_BACK, "=> N", ". already_rolled_back"),
    T.DRAINED: ("!", "!", "!", "!", "-numbered => N | agreed => N | numbered -agreed !"),
    T.QUARANTINED: ("!", "!", "!", "!", "-numbered ! | agreed ! | numbered -agreed => N"),
    T.SPLIT_WANTED: (". splits_at_once", "=> R", "=> L", ". splits_at_once", "=> B"),
    T.SPLIT: ("=> N", "!", "!", "=> C", "!"),
    T.DEVICE_EVICT: ("=> N", "!", "!", "=> C", "!"),
    T.HOST_EVICT: ("!", "!", "!", "-device => N | device !", "!"),
    T.RECLAIM: ("!", "!", "!", "device => N | -device !", "!"),
    T.LOAD_QUEUED: ("!", "!", "!", "=> C", "!"),
    T.LOAD_AGREED: ("!", "!", "!", "=> C", "!"),
    T.LOAD_FAILED: ("!", "!", "!", "=> C", "!"),
    T.LOAD_DRAINED: ("!", "!", "!", "=> C", "!"),
}
STATES = (N, R, L, C, B)
OURS = {"N": N, "R": R, "L": L, "C": C, "B": B}

ANSWERS = {
    "fit": "fit_is",
    "room": "room_is",
    "victims": "victims_suffice_is",
    "parent": "parent_committed_is",
    "device": "on_device_is",
}
CELLS = [pytest.param(state, trigger, id=f"{state}-{trigger}") for trigger in Trigger for state in STATES]


@dataclass(frozen=True, slots=True)
class Alternative:
    """One alternative of a cell: ``kind`` is ``=>``, ``.`` or ``!``; ``what`` the state's letter or the stale name."""

    when: tuple[str, ...]
    kind: str
    what: str

    def applies(self, facts: dict[str, bool]) -> bool:
        """Whether its conditions hold."""
        return all(facts[name.removeprefix("-")] is not name.startswith("-") for name in self.when)


def _alternatives(cell: str) -> list[Alternative]:
    found = []
    for text in cell.split("|"):
        words = text.split()
        at = next(index for index, word in enumerate(words) if word in ("=>", ".", "!"))
        found.append(Alternative(tuple(words[:at]), words[at], " ".join(words[at + 1 :])))
    return found


@cache
def _world(stock: bool) -> World:
    world = World(stock=stock)
    world.automatic = False
    return world


@cache
def _records(state: State, stock: bool) -> tuple[BackupRecord, ...]:
    """The state under every combination of columns that firing reaches."""
    world = _world(stock)
    found = []
    for bound, (numbered, agreed, partly) in product(
        (True, False), ((False, False, False), (False, False, True), (True, False, False), (True, True, False))
    ):
        reachable = {
            N: not (numbered or partly),
            R: not (numbered or partly),
            L: True,
            C: bound and agreed,
            B: not partly,
        }[state]
        if reachable:
            found.append(world.at(state, bound=bound, numbered=numbered, agreed=agreed, partly=partly))
    return tuple(found)


def _inputs(trigger: Trigger) -> tuple[Input, ...]:
    if trigger is not T.LAYER_STORED:
        return (Input(pages=1),)
    return tuple(Input(payload=payload, layers=(layer,)) for payload, layer in ((0, 0), (0, 2), (1, 0)))


def _facts(record: BackupRecord, given: Input, answers: dict[str, bool]) -> dict[str, bool]:
    submitted = [
        {layer for layer in range(total) if mask >> layer & 1} for mask, total in zip(record.submitted, LAYERS, strict=True)
    ]
    return answers | {
        "new": not set(given.layers) <= submitted[given.payload],
        "complete": [len(layers) for layers in submitted] == list(LAYERS),
        "bound": record.bound,
        "numbered": record.number is not None,
        "agreed": record.agreed,
    }


@pytest.mark.parametrize("stock", [False, True], ids=["compiled", "stock"])
@pytest.mark.parametrize(("state", "trigger"), CELLS)
def test_cell(state: State, trigger: Trigger, stock: bool) -> None:
    """R7: the machine takes the edge, names the no-op or raises, as written by hand, and only an edge changes or calls anything."""
    alternatives = _alternatives(EXPECTED[trigger][STATES.index(state)])
    taken: set[Alternative] = set()
    world = _world(stock)
    for base, given, values in product(_records(state, stock), _inputs(trigger), product((False, True), repeat=len(ANSWERS))):
        answers = dict(zip(ANSWERS, values, strict=True))
        facts = _facts(base, given, answers)
        applying = [alternative for alternative in alternatives if alternative.applies(facts)]
        assert len(applying) == 1, (facts, applying)
        (expected,) = applying
        taken.add(expected)

        world.clear()
        world.automatic = False
        for name, value in answers.items():
            setattr(world, ANSWERS[name], value)
        record = deepcopy(base)
        before = columns(record)
        if expected.kind == "!":
            with pytest.raises(LifecycleError, match=trigger):
                world.fire(record, trigger, given)
        else:
            answer = world.fire(record, trigger, given)
            assert answer == (expected.what if expected.kind == "." else None), facts
        if expected.kind == "=>":
            assert record.state is OURS[expected.what], facts
        else:
            assert (columns(record), world.took()) == (before, []), facts
    assert taken == set(alternatives), "an alternative is never reached"


def test_the_expectation_covers_every_cell() -> None:
    """R7: the hand-written table has a line for each trigger and a cell for each state, with known words only."""
    assert set(EXPECTED) == set(Trigger)
    assert len(CELLS) == len(State) * len(Trigger) == 135
    words = {*ANSWERS, "new", "complete", "bound", "numbered", "agreed"}
    for cells in EXPECTED.values():
        for alternative in (alternative for cell in cells for alternative in _alternatives(cell)):
            assert {name.removeprefix("-") for name in alternative.when} <= words
            assert alternative.kind != "=>" or alternative.what in OURS
