"""Reading event logs back: every lifecycle re-stepped through the transition table, ranks compared, a timeline for Perfetto, a page (R37)."""

from cphicache.replay.findings import Filter, Finding, Kind
from cphicache.replay.page import page_data, page_text, write_page
from cphicache.replay.replay import UnusableLogs, replay
from cphicache.replay.report import Report
from cphicache.replay.trace import write_trace

__all__ = ["Filter", "Finding", "Kind", "Report", "UnusableLogs", "page_data", "page_text", "replay", "write_page", "write_trace"]
