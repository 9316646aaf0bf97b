"""Reading event logs back: every lifecycle re-stepped through the transition table, ranks compared, a timeline, a page (R37)."""

from cphicache.replay.findings import Filter, Finding, Kind
from cphicache.replay.page import page_data, page_text, write_page
from cphicache.replay.replay import UnusableLogs, replay
from cphicache.replay.report import Report
from cphicache.replay.trace import write_trace
from cphicache.replay.way import Way, WayStep, node_way

__all__ = [
    "Filter",
    "Finding",
    "Kind",
    "Report",
    "UnusableLogs",
    "Way",
    "WayStep",
    "node_way",
    "page_data",
    "page_text",
    "replay",
    "write_page",
    "write_trace",
]
