"""The event log: one JSON line for every lifecycle step (R36). The schema is described in ``docs/events.md``."""

from cphicache.events.hashes import page_hashes
from cphicache.events.log import EventLog, EventLogError, rank_log_path
from cphicache.events.reader import EventReadError, Line, Trouble, read_events, read_lines
from cphicache.events.types import EVENTS, FIELDS, LOCAL_FIELDS, LOCAL_TRIGGERS, SCHEMA_VERSION, Level, logical_view

__all__ = [
    "EVENTS",
    "FIELDS",
    "LOCAL_FIELDS",
    "LOCAL_TRIGGERS",
    "SCHEMA_VERSION",
    "EventLog",
    "EventLogError",
    "EventReadError",
    "Level",
    "Line",
    "Trouble",
    "logical_view",
    "page_hashes",
    "rank_log_path",
    "read_events",
    "read_lines",
]
