"""Replay of one run: the logs of its ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

from cphicache.events import EventReadError, Trouble
from cphicache.lifecycle import table_hash
from cphicache.replay.compare import replay_together
from cphicache.replay.findings import Filter, Findings
from cphicache.replay.onelog import OneLog
from cphicache.replay.report import Report

PROGRESS_EVENTS = 1 << 12
"""``on_progress`` is called once in about so many logical events."""


class UnusableLogs(ValueError):
    """The logs cannot be replayed, or not together. The text is one line: which file, what is wrong, the remedy."""


def pass_over(gap: EventReadError) -> None:
    """For readers that draw what is there: missing events leave a gap in the picture, one that says something wrong is refused."""
    if gap.trouble is Trouble.FIELD:
        raise UnusableLogs(str(gap))


def replay(paths: Sequence[Path], chosen: Filter | None = None, *, on_progress: Callable[[int], None] | None = None) -> Report:
    """Re-step every lifecycle of the logs through the transition table and compare the ranks.

    ``paths``: one log a rank, of one run. ``chosen``: what is reported; all of it is checked. ``on_progress`` hears how many bytes have
    been read. The logs are streamed: memory follows the number of live host copies and pending backups, not the size of the logs.
    Raises :class:`UnusableLogs`, also for a node or a request that is in none of the logs.
    """
    chosen = chosen or Filter()
    findings = Findings(chosen)
    try:
        logs = sorted((OneLog(path, findings, chosen) for path in paths), key=lambda log: log.rank)
    except EventReadError as error:
        raise UnusableLogs(str(error)) from error
    warnings = _check_together(logs)
    done = 0

    def on_step() -> None:
        nonlocal done
        done += 1
        if on_progress is not None and done % PROGRESS_EVENTS == 0:
            on_progress(sum(log.bytes_read for log in logs))

    disagreement, told = replay_together(logs, findings, on_step)
    for name, asked, found in (
        ("node", chosen.node, any(log.has_node for log in logs)),
        ("request", chosen.request, any(log.has_request for log in logs)),
    ):
        if asked is not None and not found:
            where = logs[0].path if len(logs) == 1 else f"any of the {len(logs)} logs"
            raise UnusableLogs(f"--{name} {asked}: is not in {where}; give a {name} that is, or the log that has it")
    return Report(logs, findings, disagreement, [*warnings, *told], chosen)


def _check_together(logs: Sequence[OneLog]) -> list[str]:
    if not logs:
        raise UnusableLogs("no log was given: name the event logs of a run, one a rank")
    warnings = []
    for one, other in pairwise(logs):
        if one.rank == other.rank:
            raise UnusableLogs(f"{one.path} and {other.path} are both of rank {one.rank}: give one log a rank, of one run")
    first = logs[0]
    for other in logs[1:]:
        for name in ("table", "schema", "level"):
            if first.header.get(name) != other.header.get(name):
                raise UnusableLogs(
                    f"{first.path} has {name} {first.header.get(name)!r}, {other.path} has {other.header.get(name)!r}: "
                    "give the logs of one run"
                )
        if first.header.get("config") != other.header.get("config"):
            warnings.append(f"{first.path} and {other.path} were configured differently")
    if first.header.get("table") != table_hash():
        warnings.append(
            f"the logs were written under transition table {first.header.get('table')}, and are replayed under {table_hash()}"
        )
    if first.schema < 2:
        warnings.append(
            "schema version 1: locks, parents, refusals and the ledger's account are not in it, so they are not checked"
        )
    return warnings
