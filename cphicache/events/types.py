"""What an event is: levels, the schema's version, and which parts of an event differ between ranks that agree."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Any

from cphicache.lifecycle import Trigger

SCHEMA_VERSION = 1
"""Raised when a field changes its meaning or goes away; new fields do not raise it."""

HEADER = "header"
"""Name of the first event of a log."""
STEP = "step"
"""Name of the event of one lifecycle step."""


class Level(IntEnum):
    """How much is recorded. Each level includes the ones below it."""

    OFF = 0
    """Nothing, not even a header."""
    LIFECYCLE = 1
    """Every lifecycle step, and what explains it: refusals, evictions, deferrals, loads, reductions."""
    OPS = 2
    """Also what the cache was asked: inserts and matches, as chained keyed page hashes."""


FIELDS: Mapping[str, str] = {
    "rank": "which CP rank wrote the event",
    "seq": "position in this rank's log: 0 is the header, then one more an event, without a gap",
    "tick": "scheduler step (the header has none)",
    "event": "`header`, `step`, or the name of another fact",
    "local": "present and true: this rank's own business, other ranks may not have it",
    "wall": "wall time in seconds; absent when time is virtual; replay ignores it",
    "node": "id of the radix node (or of the extent that is to become one)",
    "generation": "which backup of that node",
    "trigger": "what happened (transition table)",
    "before": "state before the step",
    "after": "state after it",
    "stale": "name of the no-op, when the table answers the trigger so; `after` equals `before`",
    "number": "place in the sequence that all ranks agree on; absent before it has one",
    "bound": "the backup belongs to a node in the tree",
    "agreed": "every rank has passed its number",
    "submitted": "layers whose copies have been submitted, by payload",
    "confirmed": "layers whose copies are known to be done on this rank, by payload",
    "slots": "host slots that this rank holds for it",
    "reason": "why, in a few words; absent when there is nothing to say",
}
"""Fields that have one meaning wherever they occur. Other events add fields of their own (``docs/events.md``)."""

LOCAL_FIELDS = frozenset({"rank", "seq", "wall", "confirmed", "slots", "local"})
"""Fields whose values may differ between ranks that agree about everything."""

LOCAL_TRIGGERS = frozenset({Trigger.COPY_DONE, Trigger.COPY_FAILED})
"""Steps that only one rank takes, or takes at another tick than the others: its own copies' ends."""

WRITTEN_HERE = frozenset({"rank", "seq", "wall"})
"""Fields that the log itself sets; a caller that passes one is mistaken."""


def logical_view(event: Mapping[str, Any]) -> dict[str, Any] | None:
    """What of an event must be equal on every rank, or ``None`` for a header and for what concerns one rank only.

    Ranks that agree give equal sequences of logical views: compare them pairwise, in order.
    """
    if event["event"] == HEADER or event.get("local", False) or event.get("trigger") in LOCAL_TRIGGERS:
        return None
    return {name: value for name, value in event.items() if name not in LOCAL_FIELDS}
