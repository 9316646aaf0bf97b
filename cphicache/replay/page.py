"""One self-contained HTML page of a run's logs: lifecycles, slow and failed backups, the state machine's counts, occupancy, ranks."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from cphicache.files import whole_file
from cphicache.replay.lifecycles import OUTCOMES, STATES, Lifecycles, Names
from cphicache.replay.onelog import OneLog
from cphicache.replay.replay import UnusableLogs, replay
from cphicache.replay.report import Report

FINDINGS_ON_PAGE = 200
"""Findings with their text on a page; the others are counted."""


def write_page(paths: Sequence[Path], out: Path, *, on_progress: Callable[[int], None] | None = None) -> Report:
    """Write the page of these logs (one a rank) to ``out``, as a whole or not at all; returns what the replay has found.

    Equal logs of equal names give equal pages. Raises :class:`~cphicache.replay.replay.UnusableLogs` for what cannot be read or written.
    """
    report = replay(paths, on_progress=on_progress)
    text = page_text(page_data(report))
    if any(out.exists() and path.exists() and out.samefile(path) for path in paths):
        raise UnusableLogs(f"{out}: is one of the logs to read; name another file with -o")
    try:
        with whole_file(out) as place:
            place.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UnusableLogs(f"{out}: cannot be written ({error.strerror or error}); name another file with -o") from error
    return report


def page_data(report: Report) -> dict[str, Any]:
    """What the page draws, as plain data: columns of numbers into lists of names (see :class:`Lifecycles`)."""
    names = Names()
    ranks = [_rank(log, names) for log in report.logs]
    findings = [finding.as_json() | {"path": finding.path.name} for finding in report.findings.kept[:FINDINGS_ON_PAGE]]
    return {
        "title": ", ".join(log.path.name for log in report.logs),
        "states": STATES,
        "outcomes": OUTCOMES,
        "names": list(names.all),
        "ranks": ranks,
        "findings": findings,
        "findings_total": report.findings.total,
        "disagreement": report.disagreement,
        "warnings": [_without_folders(warning, report.logs) for warning in report.warnings],
    }


def page_text(data: Mapping[str, Any]) -> str:
    """The page with these data in it."""
    template = files("cphicache.replay").joinpath("page.html").read_text(encoding="utf-8")
    compact = json.dumps(data, separators=(",", ":"), ensure_ascii=True)
    for sign in "<>&":  # inside a script element, nothing of the data may look like markup
        compact = compact.replace(sign, f"\\u{ord(sign):04x}")
    return template.replace("@TITLE@", escape(str(data["title"]))).replace("@DATA@", compact)


def _rank(log: OneLog, names: Names) -> dict[str, Any]:
    read = Lifecycles(log.path, names)
    tokens = log.header.get("config", {}).get("device_tokens")
    return {
        "rank": log.rank,
        "path": log.path.name,
        "events": log.events,
        "lost": log.lost,
        "cut": log.cut,
        "first_tick": log.first_tick or 0,
        "last_tick": read.last_tick,
        "host_slots": read.host_slots,
        "device_tokens": tokens if type(tokens) is int else None,  # the header's configuration is whatever the caller gave
        "backups": read.backups,
        "segments": read.segments,
        "steps": read.steps,
        "backups_left_out": read.backups_left_out,
        "steps_left_out": read.steps_left_out,
        "occupancy": read.curve(),
        "edges": [
            [STATES.index(before), trigger, STATES.index(after), count]
            for (before, trigger, after), count in sorted(log.tally.edges.items())
        ],
    }


def _without_folders(text: str, logs: Sequence[OneLog]) -> str:
    for log in logs:
        text = text.replace(str(log.path), log.path.name)
    return text
