"""The operations of a log: each call with what was answered during it and what followed from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

from cphicache.agree.port import NO_FAILURE
from cphicache.engine import CacheConfig
from cphicache.events import EventReadError, Line, read_lines
from cphicache.events.types import END, ENGINE, EVENTS, HEADER, LOST, OP
from cphicache.reexecute.local import Answers, Lost
from cphicache.reexecute.player import config_of
from cphicache.transfer.port import CopyStatus, OpKey

PROGRESS_LINES = 1 << 12
"""``on_progress`` is called once in so many lines."""
OnProgress = Callable[[int], None]


class Refused(ValueError):
    """The log cannot be executed. The text is one line: which log, why, and the remedy if there is one."""


@dataclass(slots=True)
class Recorded:
    """One call: its line, the lines of the engine's events that follow it up to the next call, and what the engine was answered."""

    at: int
    """Which call it is, from 0."""
    line: Line
    call: dict[str, Any]
    followed: list[Line] = field(default_factory=list)
    answers: Answers = field(default_factory=Answers)


class RecordedLog:
    """The operations of the log at ``path``, one rank's. It is read once as a whole before anything is executed.

    Raises :class:`Refused` for a log of another level than ``ops``, or one that is not whole.
    """

    def __init__(self, path: Path, *, on_progress: OnProgress | None = None) -> None:
        self.path = path
        self._on_progress = on_progress
        self._read = 0
        self.rank = 0
        self.operations = 0
        config: Mapping[str, Any] | None = None
        first, ended = True, False
        try:
            for line in self._lines():
                event, name = line.event, line.event["event"]
                if first:
                    first = False
                    self.rank = event.get("rank", 0)
                    if event.get("level") != "ops":
                        raise self._refused(
                            f"of level {event.get('level')!r}: only a log of level ops can be executed (--log-level ops)"
                        )
                elif name == LOST:
                    raise self._refused(
                        f"{event.get('lost')} events are lost at line {line.number}: a log with losses cannot be executed"
                    )
                elif name == OP:
                    self.operations += 1
                    if event.get("call") == "restore":
                        raise self._refused(f"line {line.number}: the engine's state was replaced (restore), and is not in the log")
                elif name == ENGINE:
                    if config is not None:
                        raise self._refused(f"line {line.number}: a second engine; give the log of one")
                    config = event.get("config")
                ended = ended or name == END
        except EventReadError as error:
            raise Refused(f"{error}; a log that is not whole cannot be executed") from error
        if not ended:
            raise self._refused("it has no end, its writer was stopped: a log that is cut cannot be executed")
        if config is None or not self.operations:
            raise self._refused("no operations are recorded in it: it was written by an older version; record it again")
        try:
            self.config: CacheConfig = config_of(config)
        except (TypeError, ValueError, KeyError) as error:
            raise self._refused(f"its engine's configuration is not known here ({error})") from error

    def _refused(self, why: str) -> Refused:
        return Refused(f"event log {self.path}: {why}")

    def _lines(self) -> Iterator[Line]:
        for line in read_lines(self.path):
            self._read += 1
            if self._on_progress is not None and self._read % PROGRESS_LINES == 0:
                self._on_progress(line.end_byte)
            yield line

    def before(self) -> list[Line]:
        """Events of the engine before the first call."""
        return [line for line in takewhile(lambda line: line.event["event"] != OP, read_lines(self.path)) if _is_engines(line)]

    def __iter__(self) -> Iterator[Recorded]:
        """The calls in order, streamed. Raises :class:`Refused` at an event that does not say what it should."""
        current: Recorded | None = None
        at = 0
        for line in self._lines():
            if line.event["event"] == OP:
                if current is not None:
                    yield current
                current = Recorded(at, line, _call_of(line))
                at += 1
            elif current is not None and _is_engines(line):
                current.followed.append(line)
                try:
                    _answer(current.answers, line.event)
                except (KeyError, TypeError) as error:
                    raise self._refused(f"line {line.number}: a field is missing or is no number ({error})") from error
        if current is not None:
            yield current


def _is_engines(line: Line) -> bool:
    return line.event["event"] in EVENTS and line.event["event"] not in (HEADER, END, LOST)


def _call_of(line: Line) -> dict[str, Any]:
    return {name: value for name, value in line.event.items() if name not in ("event", "seq", "rank", "wall", "tick", "local")}


def _answer(answers: Answers, event: dict[str, Any]) -> None:
    match event["event"]:
        case "reduction":
            failed = event["first_failed"]
            answers.reductions.append((int(event["count"]), NO_FAILURE if failed is None else int(failed)))
        case "group_lost":
            answers.reductions.append(Lost(event["reason"], tuple(event["ranks"]), event["excluded"]))
        case "copy_status":
            operation = int(event["load"]) if "load" in event else OpKey(int(event["node"]), int(event["generation"]))
            answers.statuses.append((operation, CopyStatus(event["drained"], event["failed"])))
        case "local_reserve_failed":
            answers.no_slots[int(event["node"])] = event["reason"]
