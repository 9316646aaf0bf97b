"""Editing logs, to plant faults in them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import orjson

Event = dict[str, Any]


def events_of(path: Path) -> list[Event]:
    """All events of a log, as they stand there."""
    return [orjson.loads(line) for line in path.read_bytes().splitlines()]


def write(path: Path, events: Sequence[Event], *, renumber: bool = True) -> Path:
    """Write events; ``renumber`` hides from the sequence numbers that some were taken out or moved."""
    numbered = [{**event, "seq": at} for at, event in enumerate(events)] if renumber else events
    path.write_bytes(b"".join(orjson.dumps(event) + b"\n" for event in numbered))
    return path


def find(events: Sequence[Event], wanted: Callable[[Event], bool], *, nth: int = 0, start: int = 0) -> int:
    """Index of an event."""
    return [at for at in range(start, len(events)) if wanted(events[at])][nth]


def step(trigger: str, **fields: Any) -> Callable[[Event], bool]:
    """Is it a step of this trigger, with these values?"""
    wanted = {"event": "step", "trigger": trigger, **fields}
    return lambda event: all(event.get(name) == value for name, value in wanted.items())
