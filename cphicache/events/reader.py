"""The reader of event logs: strict, because a log with losses must not be taken for a whole one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import orjson

from cphicache.events.types import HEADER, SCHEMA_VERSION


class EventReadError(ValueError):
    """The file is not a whole event log that this version can read. The text is one line with the path and the line number."""


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """The events of a log in order, the header first.

    Raises :class:`EventReadError` when it comes to a line that is cut, is not JSON or does not follow the one before it; what was
    yielded until then is good. The whole file is never in memory.
    """
    try:
        with path.open("rb") as file:
            yield from _read(path, file)
    except OSError as error:
        raise EventReadError(f"event log {path}: cannot be read ({error.strerror})") from error


def _read(path: Path, lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    number = 0
    for number, line in enumerate(lines, start=1):
        where = f"event log {path}, line {number}"
        if not line.endswith(b"\n"):
            raise EventReadError(
                f"{where}: the line is cut short, its writer was stopped; the {number - 1} lines before it are whole"
            )
        try:
            event = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            raise EventReadError(f"{where}: not JSON ({error.msg})") from error
        if not isinstance(event, dict) or not isinstance(event.get("event"), str):
            raise EventReadError(f"{where}: not an event: an object with the field 'event' was expected")
        if number == 1:
            _check_header(where, event)
        if event.get("seq") != number - 1:
            raise EventReadError(f"{where}: sequence number {event.get('seq')} where {number - 1} was expected: lines are missing")
        yield event
    if number == 0:
        raise EventReadError(f"event log {path}: empty; a log starts with its header")


def _check_header(where: str, event: dict[str, Any]) -> None:
    if event["event"] != HEADER:
        raise EventReadError(f"{where}: {event['event']!r} where the header was expected: the start of the log is missing")
    schema = event.get("schema")
    if not isinstance(schema, int) or schema < 1:
        raise EventReadError(f"{where}: schema version {schema!r} where a number from 1 on was expected")
    if schema > SCHEMA_VERSION:
        raise EventReadError(f"{where}: schema version {schema}, newer than {SCHEMA_VERSION}: read it with a newer cphicache")
