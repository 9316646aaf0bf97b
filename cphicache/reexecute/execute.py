"""Execution of a log: its operations on a real engine, whose events must be those of the log."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from cphicache.agree.port import GroupBroken
from cphicache.engine import CpHiRadixCache
from cphicache.events import Line
from cphicache.events.types import DEVICE
from cphicache.reexecute.local import RecordedReducer, ReplayTransfer
from cphicache.reexecute.player import NO_RESULT, EngineFactory, Player, Result
from cphicache.reexecute.recorded import Recorded, RecordedLog

_UNCOMPARED = frozenset({"seq", "rank", "wall"})
Event = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Difference:
    """Where execution and log part. ``line`` is the line of the event that was expected, ``at`` the operation during which it was.

    ``expected`` None: the log has no event here; ``found`` None: the engine has none. ``error``: what the engine raised instead.
    """

    at: int
    line: Line
    expected: Event | None
    found: Event | None
    error: str | None = None

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of the fields that differ."""
        expected, found = self.expected or {}, self.found or {}
        return tuple(name for name in dict.fromkeys([*expected, *found]) if expected.get(name) != found.get(name))

    def __str__(self) -> str:
        where = f"{self.line.path}, line {self.line.number} (operation {self.at}"
        where += f", tick {self.line.event['tick']})" if "tick" in self.line.event else ")"
        if self.error is not None:
            return f"{where}: the engine raised {self.error}"
        different = self.fields
        if self.expected is None or self.found is None or not {"event", "trigger"}.isdisjoint(different) or len(different) > 4:
            return f"{where}: expected {_told(self.expected)}, found {_told(self.found)}"
        parts = [f"{name} {self.expected.get(name)!r}, found {self.found.get(name)!r}" for name in different]
        return f"{where}: {_told(self.expected)}: expected {'; expected '.join(parts)}"


def _told(event: Event | None) -> str:
    if event is None:
        return "no further event"
    parts = [str(event.get("call") or event.get("trigger") or event["event"])]
    for name in ("node", "generation", "load", "request"):
        if name in event:
            parts.append(f"{name} {event[name]}")
    if "before" in event:
        parts.append(f"{event['before']} -> {event.get('after')}")
    if "reason" in event:
        parts.append(f"({event['reason']})")
    return " ".join(parts)


def comparable(event: Mapping[str, Any]) -> Event:
    """What of an event must be the same when it is executed."""
    return {name: value for name, value in event.items() if name not in _UNCOMPARED}


class Execution:
    """Executes ``log``. Iterate over :meth:`steps`; ``difference`` is set when execution and log part, and nothing follows then."""

    def __init__(
        self, log: RecordedLog, *, engine: EngineFactory = CpHiRadixCache, on_call: Callable[[Recorded], None] | None = None
    ) -> None:
        self._log = log
        self.on_call = on_call
        self.transfer = ReplayTransfer()
        self._reducer = RecordedReducer()
        self.player = Player(log.config, self.transfer, self._reducer, rank=log.rank, engine=engine)
        self.difference: Difference | None = None
        self.error: Exception | None = None
        """What the engine raised, if that is the difference."""
        self.failing: Recorded | None = None
        """The operation during which they part."""
        self.found: list[Event] = []
        """The engine's events of the last operation."""
        self.executed = 0
        self.events = 0

    def steps(self) -> Iterator[tuple[Recorded, Result]]:
        """Execute; yields each operation when it has been executed and has been found to be as recorded."""
        before = self._log.before()
        if before:
            self._compare(0, before, before[-1], self.player.log.take()[1:])
        if self.difference is not None:
            return
        for recorded in self._log:
            result = self._execute(recorded)
            if self.difference is not None:
                self.failing = recorded
                return
            self.executed += 1
            yield recorded, result

    def run(self) -> Difference | None:
        """Execute everything."""
        for _ in self.steps():
            pass
        return self.difference

    def _execute(self, recorded: Recorded) -> Result:
        answers = recorded.answers
        if self.on_call is not None:
            self.on_call(recorded)
        self.transfer.begin(recorded.at, answers.statuses, answers.no_slots.items())
        self._reducer.coming.extend(answers.reductions)
        result = NO_RESULT
        error: Exception | None = None
        try:
            result = self.player.play(recorded.call)
        except GroupBroken as broken:
            error = None if any(line.event["event"] == "group_lost" for line in recorded.followed) else broken
        except Exception as raised:  # whatever a broken engine raises is what we are here to tell
            error = raised
        last = recorded.followed[-1] if recorded.followed else recorded.line
        found = self.found = self.player.log.take()
        self._compare(recorded.at, [recorded.line, *recorded.followed], last, found, raised=error)
        if error is not None and (self.difference is None or self.difference.found is None):
            self.error = error
            line = last if self.difference is None else self.difference.line
            expected = None if self.difference is None else self.difference.expected
            text = " ".join(str(error).split())
            self.difference = Difference(recorded.at, line, expected, None, f"{type(error).__name__}: {text}")
        return result

    def _compare(self, at: int, lines: list[Line], last: Line, found: list[Event], *, raised: Exception | None = None) -> None:
        self.events += len(found)
        lines = [line for line in lines if line.event["event"] != DEVICE]  # a server's allocator is not executed
        found = [event for event in found if event["event"] != DEVICE]
        for index, line in enumerate(lines):
            expected = comparable(line.event)
            event = comparable(found[index]) if index < len(found) else None
            if expected != event:
                self.difference = Difference(at, line, expected, event)
                return
        if len(found) > len(lines):
            self.difference = Difference(at, last, None, comparable(found[len(lines)]))
