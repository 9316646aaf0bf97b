"""What a replay has found: as plain data, and as text for people."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cphicache.replay.findings import Filter, Findings
from cphicache.replay.onelog import OneLog

FINDINGS_SHOWN = 20
OPEN_SHOWN = 10


@dataclass(frozen=True, slots=True)
class Report:
    """The result of a replay. ``disagreement``: the first of several ranks' logs, None without one."""

    logs: list[OneLog]
    findings: Findings
    disagreement: dict[str, Any] | None
    warnings: list[str]
    chosen: Filter

    @property
    def is_clean(self) -> bool:
        """Whether nothing (that matches the filter) is wrong."""
        return not self.findings.total

    def as_json(self) -> dict[str, Any]:
        """As plain data, for machines."""
        first = self.findings.first
        return {
            "clean": self.is_clean,
            "findings_total": self.findings.total,
            "findings_by_kind": {kind.value: count for kind, count in self.findings.counts.items()},
            "findings_outside_the_filter": self.findings.elsewhere.total(),
            "findings": [finding.as_json() for finding in self.findings.kept],
            "first_divergence": None if first is None else {**first.as_json(), "before": self.findings.before_first},
            "disagreement": self.disagreement,
            "warnings": self.warnings,
            "logs": [_log_json(log) for log in self.logs],
        }

    def text(self) -> str:
        """For people."""
        parts = [*(f"warning: {warning}" for warning in self.warnings), *(_log_text(log) for log in self.logs)]
        parts += self._finding_lines()
        for log in self.logs:
            if log.story:
                left_out = f"\n  ... and {log.story_left_out} more" if log.story_left_out else ""
                parts.append(f"what the log of rank {log.rank} says:\n" + "\n".join(f"  {line}" for line in log.story) + left_out)
        tally = self.logs[0].tally.as_json()
        parts.append(_figures(tally, f"rank {self.logs[0].rank}" if len(self.logs) > 1 else ""))
        elsewhere = self.findings.elsewhere.total()
        if elsewhere:
            parts.append(f"{elsewhere} findings do not match the filter")
        parts.append("nothing is wrong" if self.is_clean else f"{self.findings.total} findings")
        return "\n".join(part for part in parts if part)

    def _finding_lines(self) -> list[str]:
        first, lines = self.findings.first, []
        if first is not None:
            lines.append(f"first divergence: {first.describe()}")
            lines += [f"  {before}" for before in self.findings.before_first]
        for finding in self.findings.kept[1:FINDINGS_SHOWN]:
            lines.append(finding.describe())
        if self.findings.total > FINDINGS_SHOWN:
            kinds = ", ".join(f"{count} {kind}" for kind, count in self.findings.counts.most_common())
            lines.append(f"... in all: {kinds}")
        return lines


def _log_json(log: OneLog) -> dict[str, Any]:
    return {
        "path": str(log.path),
        "rank": log.rank,
        "schema": log.schema,
        "level": log.header.get("level"),
        "events": log.events,
        "lost": log.lost,
        "first_tick": log.first_tick,
        "last_tick": log.last_tick,
        "end": log.end,
        "cut": log.cut,
        "open_at_cut": log.open_at_cut() if log.cut else [],
        "story": log.story,
        **log.tally.as_json(),
    }


def _log_text(log: OneLog) -> str:
    ticks = "no tick" if log.last_tick is None else f"ticks {log.first_tick} to {log.last_tick}"
    lines = [f"{Path(log.path)}: rank {log.rank}, {log.events} events, {ticks}" + (f", {log.lost} lost" if log.lost else "")]
    if log.cut:
        seq = log.last.event.get("seq")
        lines.append(f"  cut at {log.cut}; the last whole event is seq {seq} at tick {log.last_tick}")
        pending = log.open_at_cut()
        if pending:
            more = f" and {len(pending) - OPEN_SHOWN} more" if len(pending) > OPEN_SHOWN else ""
            lines.append(f"  pending there: {', '.join(pending[:OPEN_SHOWN])}{more}")
    return "\n".join(lines)


def _figures(tally: Mapping[str, Any], whose: str) -> str:
    lines = []
    for title, name in (
        ("backups", "outcomes"),
        ("rolled back by", "rolled_back"),
        ("refused", "refused"),
        ("deferred", "deferred"),
        ("load-backs refused", "load_back_refused"),
        ("stale no-ops", "stale"),
    ):
        if tally[name]:
            lines.append(f"{title}: " + ", ".join(f"{count} {reason}" for reason, count in sorted(tally[name].items())))
    for unit, name in (("ticks", "ticks_in_state"), ("us", "wall_us_in_state")):
        for state, spread in tally[name].items():
            figures = ", ".join(f"{key} {spread[key]}" for key in ("p50", "p95", "p99", "most"))
            lines.append(f"{unit} in {state}: {figures} ({spread['count']} times)")
    speed = tally["copy_kib_per_s"]
    if speed is not None:
        lines.append(
            f"device to host, by backup from its first layer's store to the tick that saw its copies done: p50 {speed['p50']} KiB/s, "
            f"p99 {speed['p99']} KiB/s; {tally['copied_bytes']} bytes in all"
        )
    if whose and lines:
        lines.insert(0, f"figures of {whose}")
    return "\n".join(lines)
