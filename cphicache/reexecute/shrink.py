"""From a log that fails to the few operations that make it fail."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from cphicache.engine import CpHiRadixCache
from cphicache.reexecute.case import NO_EVENT, Gist, Trouble, compare_gists, error_kind, examine, gist, play
from cphicache.reexecute.execute import Difference, Execution
from cphicache.reexecute.player import NO_RESULT, EngineFactory, Unplayable
from cphicache.reexecute.recorded import Recorded, RecordedLog
from cphicache.reexecute.rows import Rows
from cphicache.reexecute.script import Scripted, Symbols, needs

MAX_TRIALS = 3_000
"""Most reduced scripts that are played; what has been found until then is good."""


class NothingFails(ValueError):
    """The log executes as it was recorded, or fails only as a whole. The text is one line."""


@dataclass(frozen=True, slots=True)
class Case:
    """A failing script. ``expected``: the gist of the last operation's events up to the one that
    differs, if that is what fails."""

    config: dict[str, Any]
    operations: tuple[Scripted, ...]
    expected: tuple[Gist, ...] | None
    fields: tuple[str, ...]
    """What that gist tells besides the usual: what differs is a number only."""
    text: str
    """What went wrong in the whole log."""
    recorded: int
    """Operations of the log up to the failing one."""
    trials: int = 0


def find_failure(
    log: RecordedLog, *, engine: EngineFactory = CpHiRadixCache, on_operation: Callable[[int], None] | None = None
) -> tuple[Case, Trouble]:
    """Execute the log, asking the outside checker after every operation; the script up to the first failure, and what it is.

    Raises :class:`NothingFails` when nothing fails, or when the script does not fail as the log does.
    """
    execution = Execution(log, engine=engine)
    symbols, rows = Symbols(execution.player, execution.transfer), Rows()
    script: list[dict[str, Any]] = []
    execution.on_call = lambda recorded: script.append(symbols.before(recorded))
    trouble: Trouble | None = None
    for recorded, result in execution.steps():
        symbols.after(recorded, script[-1], result)
        rows.take(recorded.call, result)
        trouble = examine(execution.player, rows)
        if trouble is not None:
            break
        if on_operation is not None:
            on_operation(len(script))
    expected: tuple[Gist, ...] | None = None
    fields: tuple[str, ...] = ()
    text = "" if trouble is None else trouble.text
    if trouble is None:
        difference, failing = execution.difference, execution.failing
        if difference is None:
            raise NothingFails(
                f"event log {log.path}: executes as recorded, and the checker finds nothing: there is nothing to shrink"
            )
        if failing is None:
            raise NothingFails(f"event log {log.path}: fails ({difference}) before its first call: there is no call to leave out")
        symbols.after(failing, script[-1], NO_RESULT)
        text = str(difference)
        trouble, expected, fields = _trouble_of(difference, failing, execution)
    case = Case(asdict(log.config), tuple(script), expected, fields, text, len(script))
    if not _fails(case, case.operations, trouble, engine):
        raise NothingFails(
            f"event log {log.path}: fails ({text}), but not when its calls are told without its numbers: cannot be shrunk"
        )
    return case, trouble


def _trouble_of(
    difference: Difference, failing: Recorded, execution: Execution
) -> tuple[Trouble, tuple[Gist, ...] | None, tuple[str, ...]]:
    if execution.error is not None:
        return Trouble(error_kind(execution.error, failing.call), str(difference)), None, ()
    fields: tuple[str, ...] = ()
    for _ in range(2):
        expected = tuple(gist(line.event, fields) for line in (failing.line, *failing.followed))
        found = tuple(gist(event, fields) for event in execution.found)
        if expected != found:
            break
        fields = difference.fields
    # What comes after the difference follows from what came before, which is about to be left out.
    same = next(
        (at for at, (one, other) in enumerate(zip(expected, found, strict=False)) if one != other), min(len(expected), len(found))
    )
    expected = (*expected, NO_EVENT)[: same + 1]
    trouble = compare_gists(expected, found)
    if trouble is None:
        raise NothingFails(f"event log {difference}: the two read alike: cannot be shrunk")
    return trouble, expected, fields


def shrink(
    log: RecordedLog,
    *,
    engine: EngineFactory = CpHiRadixCache,
    on_operation: Callable[[int], None] | None = None,
    on_trial: Callable[[int, int], None] | None = None,
) -> Case:
    """The smallest script found that fails as the log does: whole requests are left out first, then single operations. ``on_trial`` hears
    before each reduced script how many have been played, and how many operations are left."""
    case, trouble = find_failure(log, engine=engine, on_operation=on_operation)
    trials = _Trials(case, trouble, engine, on_trial)
    keep = frozenset(range(len(case.operations)))
    while True:
        before = keep
        keep = trials.reduce(keep, _by_request(case.operations, keep))
        keep = trials.reduce(keep, [[index] for index in sorted(keep)])
        if keep == before:
            break
    return replace(case, operations=tuple(case.operations[index] for index in sorted(keep)), trials=trials.count)


class _Trials:
    def __init__(
        self, case: Case, trouble: Trouble, engine: EngineFactory, on_trial: Callable[[int, int], None] | None = None
    ) -> None:
        self._case = case
        self._on_trial = on_trial
        self._trouble = trouble
        self._engine = engine
        self._needs = [needs(call) for call in case.operations]
        self.count = 0

    def reduce(self, keep: frozenset[int], groups: Sequence[Iterable[int]]) -> frozenset[int]:
        """Delta debugging: leave out as many of the groups as can be, many at once first."""
        left = [frozenset(group) for group in groups]
        parts = min(2, len(left))
        while left:
            size = -(-len(left) // parts)
            for start in range(0, len(left), size):
                if self.count >= MAX_TRIALS:
                    return keep
                dropped = frozenset().union(*left[start : start + size])
                candidate = self._close(keep - dropped)
                if candidate < keep and self._fails(candidate, len(keep)):
                    keep = candidate
                    left = [group for group in (*left[:start], *left[start + size :]) if group & keep]
                    parts = max(parts - 1, 1)
                    break
            else:
                if size == 1:
                    break
                parts = min(parts * 2, len(left))
        return keep

    def _close(self, keep: frozenset[int]) -> frozenset[int]:
        """Without the calls that need one that is left out."""
        closed: set[int] = set()
        for index in sorted(keep):
            if self._needs[index] <= closed:
                closed.add(index)
        return frozenset(closed)

    def _fails(self, keep: frozenset[int], left: int) -> bool:
        if self._on_trial is not None:
            self._on_trial(self.count, left)
        self.count += 1
        return _fails(self._case, [self._case.operations[index] for index in sorted(keep)], self._trouble, self._engine)


def _fails(case: Case, operations: Sequence[Scripted], trouble: Trouble, engine: EngineFactory) -> bool:
    """Whether the script fails in the same way. One that breaks the order of calls does not."""
    if not operations:
        return False
    try:
        found = play(case.config, operations, case.expected, fields=case.fields, engine=engine)
    except (Unplayable, ValueError):
        return False
    return found is not None and found.kind == trouble.kind and found.found == trouble.found


def _by_request(operations: Sequence[Scripted], keep: frozenset[int]) -> list[list[int]]:
    """The calls of each request; what those gave to others goes with them."""
    groups: dict[str, list[int]] = {}
    users: dict[int, set[str]] = {}
    for index in sorted(keep):
        call = operations[index]
        rid = call.get("request")
        if rid is None:
            continue
        groups.setdefault(rid, []).append(index)
        for used in needs(call):
            users.setdefault(used, set()).add(rid)
    for index in sorted(keep):
        of = users.get(index, set())
        if operations[index].get("request") is None and len(of) == 1:
            groups[next(iter(of))].append(index)
    return list(groups.values())
