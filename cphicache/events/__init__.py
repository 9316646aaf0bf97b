"""The event log: one JSON line for every lifecycle step (R36). The schema is described in ``docs/events.md``."""

from cphicache.events.hashes import page_hashes
from cphicache.events.log import EventLog, EventLogError
from cphicache.events.reader import EventReadError, read_events
from cphicache.events.types import LOCAL_FIELDS, LOCAL_TRIGGERS, SCHEMA_VERSION, Level, logical_view

__all__ = [
    "LOCAL_FIELDS",
    "LOCAL_TRIGGERS",
    "SCHEMA_VERSION",
    "EventLog",
    "EventLogError",
    "EventReadError",
    "Level",
    "logical_view",
    "page_hashes",
    "read_events",
]
