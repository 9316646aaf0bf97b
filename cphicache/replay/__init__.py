"""Reading event logs back: every lifecycle re-stepped through the transition table, ranks compared, a timeline for Perfetto (R37)."""

from cphicache.replay.findings import Filter, Finding, Kind
from cphicache.replay.replay import UnusableLogs, replay
from cphicache.replay.report import Report
from cphicache.replay.trace import write_trace

__all__ = ["Filter", "Finding", "Kind", "Report", "UnusableLogs", "replay", "write_trace"]
