"""What the transition table says of a step, as far as a log can know the guards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cphicache.lifecycle import ROWS, Row, State, Trigger
from cphicache.lifecycle.table import cells

_CELLS = cells(ROWS)


@dataclass(frozen=True, slots=True)
class Verdict:
    """``row``: the row that the step took, None if there is none. ``wrong``: what is wrong with it, empty if nothing is.

    ``against``: guards of the row that the log contradicts.
    """

    row: Row | None
    wrong: str = ""
    against: tuple[str, ...] = ()


def judge(before: State, trigger: Trigger, after: State, stale: str | None, guards: Mapping[str, bool]) -> Verdict:
    """Find the row of a step. ``guards``: those whose value the log gives; the others may have been anything."""
    members = _CELLS[before, trigger]
    ending = [row for row in members if (row.stale == stale if stale is not None else row.dest == after)]
    best: Verdict | None = None
    for row in ending:
        against = tuple(name for name in row.when if _contradicts(name, guards))
        if not against:
            return Verdict(row) if stale is None or before == after else Verdict(row, f"a no-op ({stale}) cannot change the state")
        if best is None or len(against) < len(best.against):
            what = f"{trigger} in {before} gives {_outcome(after, stale)} only with {', '.join(row.when)}; not so: {', '.join(against)}"
            best = Verdict(row, what, against)
    if best is not None:
        return best
    return Verdict(None, f"{trigger} in {before} gives {_outcome(after, stale)}, the table says: {_options(members)}")


def _contradicts(literal: str, guards: Mapping[str, bool]) -> bool:
    value = guards.get(literal.removeprefix("!"))
    return value is not None and value is literal.startswith("!")


def _outcome(after: State, stale: str | None) -> str:
    return f"the no-op {stale}" if stale is not None else after.value


def _options(members: tuple[Row, ...]) -> str:
    answers = dict.fromkeys(
        f"the no-op {row.stale}" if row.stale else f"an error ({row.error})" if row.error else str(row.dest) for row in members
    )
    return " or ".join(answers)
