"""The reader of event logs. It streams: the whole file is never in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import orjson

from cphicache.events.shapes import ShapeCheck
from cphicache.events.sinks import part_path
from cphicache.events.types import HEADER, LOST, SCHEMA_VERSION

LINE_BYTES = 1 << 26
"""The longest line that is read. Of what is no event log, such as a device without line ends, more would never end."""
DAMAGED = "the file was damaged or edited, take it once more from where it was written"
"""What is to be done about a line that no writer writes."""


class Trouble(StrEnum):
    """What can be wrong with a file."""

    UNREADABLE = "unreadable"
    EMPTY = "empty"
    NO_HEADER = "no_header"
    SCHEMA = "schema"
    NOT_JSON = "not_json"
    CUT = "cut"
    GAP = "gap"
    FIELD = "field"


class EventReadError(ValueError):
    """The file is not a whole event log that this version can read. The text is one line with the path and the line number.

    ``line`` is that number, 0 for a file as a whole. ``event``: of :attr:`Trouble.FIELD`, what stands there.
    """

    def __init__(self, trouble: Trouble, path: Path, line: int, what: str, event: Mapping[str, Any] | None = None) -> None:
        super().__init__(f"event log {path}{f', line {line}' if line else ''}: {what}")
        self.trouble = trouble
        self.path = path
        self.line = line
        self.what = what
        self.event = event


class Line(NamedTuple):
    """One event and where it stands. ``end_byte``: bytes of the log up to and with this line, earlier parts included."""

    path: Path
    number: int
    event: dict[str, Any]
    end_byte: int


OnGap = Callable[[EventReadError], None]


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """The events of a log in order, the header first; those of all its parts, when it was rotated.

    Strict: raises :class:`EventReadError` when it comes to a line that is cut, is not JSON, has a field that is missing or of another
    type than the schema's, or does not follow the one before it, and for a log whose first part is gone; what was yielded until then is
    good. Events that were lost are no error: an event says so.
    """
    for line in read_lines(path):
        yield line.event


def read_lines(path: Path, *, on_gap: OnGap | None = None) -> Iterator[Line]:
    """Like :func:`read_events`, with the place of each event. With ``on_gap`` a gap is told to it, and reading goes on behind it.

    So is an event with a wrong field, unless it is the header that a file starts with: it is passed over. Of every event that is yielded
    the fields are of the types that :mod:`~cphicache.events.shapes` gives them.
    """
    check, parts = ShapeCheck(), log_parts(path)
    expected, offset = 0, 0
    for index, part in enumerate(parts):
        try:
            with part.open("rb") as file:
                for line in _read_part(part, file, offset):
                    event = line.event
                    wrong = check.wrong(event)
                    if wrong is not None:
                        error = EventReadError(Trouble.FIELD, part, line.number, f"{wrong}: {DAMAGED}", event)
                        _tell(None if line.number == 1 else on_gap, error)
                        expected = _seq_behind(event, expected)
                        continue
                    seq = event["seq"]
                    if line.number == 1 and (index or event.get("part", 1) > 1):
                        if not index:
                            _tell(on_gap, EventReadError(Trouble.GAP, part, 1, "the first parts of the log are gone"))
                            expected = seq
                            yield line
                        elif seq != expected - 1:
                            _tell(
                                on_gap,
                                EventReadError(Trouble.GAP, part, 1, f"follows event {seq} where {expected - 1} was the last"),
                            )
                        expected = seq + 1
                        continue
                    follows = event["first"] if event["event"] == LOST else seq
                    if follows != expected:
                        what = f"sequence number {follows} where {expected} was expected: lines are missing or out of order"
                        _tell(on_gap, EventReadError(Trouble.GAP, part, line.number, what))
                    expected = seq + 1
                    yield line
                offset += file.tell()
        except OSError as error:
            raise EventReadError(Trouble.UNREADABLE, part, 0, f"cannot be read ({error.strerror})") from error


def log_parts(path: Path) -> list[Path]:
    """The files that make up a log, oldest first: ``path`` last, before it as many closed parts as its header says and are there."""
    if not path.exists() and part_path(path, 1).exists():  # stopped between closing one part and opening the next
        last = 1
        while part_path(path, last + 1).exists():
            last += 1
        return [part_path(path, number) for number in range(1, last + 1)]
    parts = [path]
    try:
        with path.open("rb") as file:
            header = orjson.loads(file.readline(LINE_BYTES) or b"null")
    except (OSError, orjson.JSONDecodeError):
        return parts  # reading it tells
    last = header.get("part", 1) if isinstance(header, dict) else 1
    for number in range(last - 1 if isinstance(last, int) else 0, 0, -1):
        if not part_path(path, number).exists():
            break
        parts.insert(0, part_path(path, number))
    return parts


def _tell(on_gap: OnGap | None, error: EventReadError) -> None:
    if on_gap is None:
        raise error
    on_gap(error)


def _seq_behind(event: Mapping[str, Any], expected: int) -> int:
    """The next sequence number after an event of which some field is wrong, perhaps this one."""
    seq = event.get("seq")
    return seq + 1 if type(seq) is int and seq >= expected else expected + 1


def _read_part(path: Path, file: BinaryIO, offset: int) -> Iterator[Line]:
    number = 0
    for number, line in enumerate(iter(partial(file.readline, LINE_BYTES), b""), start=1):
        if not line.endswith(b"\n"):
            if len(line) == LINE_BYTES:
                raise EventReadError(Trouble.NOT_JSON, path, number, f"longer than {LINE_BYTES} bytes: not a line of an event log")
            what = f"the line is cut short, its writer was stopped; the {number - 1} lines before it are whole"
            raise EventReadError(Trouble.CUT, path, number, what)
        try:
            event = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            raise EventReadError(Trouble.NOT_JSON, path, number, f"not JSON ({error.msg})") from error
        if not isinstance(event, dict) or not isinstance(event.get("event"), str):
            raise EventReadError(Trouble.NOT_JSON, path, number, "not an event: an object with the field 'event' was expected")
        if number == 1:
            _check_header(path, event)
        offset += len(line)
        yield Line(path, number, event, offset)
    if number == 0:
        raise EventReadError(Trouble.EMPTY, path, 0, "empty; a log starts with its header")


def _check_header(path: Path, event: dict[str, Any]) -> None:
    if event["event"] != HEADER:
        what = f"{event['event']!r} where the header was expected: the start of the log is missing"
        raise EventReadError(Trouble.NO_HEADER, path, 1, what)
    schema = event.get("schema")
    if type(schema) is not int or schema < 1:
        raise EventReadError(Trouble.SCHEMA, path, 1, f"schema version {schema!r} where a number from 1 on was expected")
    if schema > SCHEMA_VERSION:
        what = f"schema version {schema}, newer than {SCHEMA_VERSION}: read it with a newer cphicache"
        raise EventReadError(Trouble.SCHEMA, path, 1, what)
