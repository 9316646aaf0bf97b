"""Ranks side by side: their logical events must be the same, one by one, up to where a rank leaves the group. The first that is not is
named."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from cphicache.events.types import QUARANTINE
from cphicache.replay.findings import Finding, Findings, Kind
from cphicache.replay.live import describe_event
from cphicache.replay.onelog import Given, OneLog

_ENDED: dict[str, Any] = {"event": "(the end of the log)"}


def replay_together(
    logs: Sequence[OneLog], findings: Findings, on_step: Callable[[], None]
) -> tuple[dict[str, Any] | None, list[str]]:
    """Replay all logs, as far as they agree one logical event of each at a time.

    Returns the first disagreement, or None, and why ranks were not compared to the end. Equal sequences are in the same order of ticks,
    so this merges the logs by tick; only one event of each is in memory.
    """
    runs: dict[OneLog, Iterator[Given]] = {log: log.views(compared=len(logs) > 1) for log in logs}
    disagreement: dict[str, Any] | None = None
    told: list[str] = []
    together = list(logs)
    while disagreement is None and len(together) > 1:
        following = {log: next(runs[log], None) for log in together}
        on_step()
        if all(one is None for one in following.values()):
            break
        gone = next((log for log in together if log.incomplete), None)
        if gone is not None:
            told.append(f"the ranks are compared up to tick {gone.last_tick} only: events are missing from {gone.path}")
            break
        given = {log: one for log, one in following.items() if one is not None or log.cut is None}  # a cut is told already
        for log in _winding_down(given):
            told.append(
                f"rank {log.rank} is compared up to tick {log.last_tick} only: there it gave the host tier up, and what it did to "
                "end is its own business"
            )
            del given[log]
        together = list(given)
        disagreement = _compare(together, list(given.values()), findings) if len(together) > 1 else None
    for run in runs.values():
        for _ in run:
            on_step()
    return disagreement, told


def _winding_down(given: Mapping[OneLog, Given | None]) -> list[OneLog]:
    """Ranks that give the host tier up here, unless all do at once: without a group each rank ends, or goes on, by itself, and an
    interrupt finds each at a place of its own. Those that do at once go on alike."""
    leaving = {log: one[0].event.get("tick") for log, one in given.items() if one is not None and one[1]["event"] == QUARANTINE}
    at_once = len(leaving) == len(given) and len(set(leaving.values())) == 1
    return [] if at_once else list(leaving)


def _compare(logs: Sequence[OneLog], given: Sequence[Given | None], findings: Findings) -> dict[str, Any] | None:
    """Whom most ranks contradict is named; of two, the second."""
    views = [_ENDED if one is None else one[1] for one in given]
    votes = [sum(view == other for other in views) for view in views]
    right = votes.index(max(votes))
    at = next((at for at, view in enumerate(views) if view != views[right]), None)
    if at is None:
        return None
    here, there = views[at], views[right]
    names = dict.fromkeys([*there, *here])
    fields = {name: {"here": here.get(name), "there": there.get(name)} for name in names if here.get(name) != there.get(name)}
    told = (
        f"{name} is {_short(value['here'])} where rank {logs[right].rank} has {_short(value['there'])}"
        for name, value in fields.items()
    )
    one = given[at]
    line = logs[at].last if one is None else one[0]
    event = {} if one is None else line.event
    node, tick = event.get("node", there.get("node")), event.get("tick", there.get("tick"))
    finding = Finding(
        Kind.RANKS_DISAGREE, ", ".join(told), logs[at].rank, node, event.get("generation"), event.get("request"), tick,
        event.get("seq"), line.path, line.number,
    )  # fmt: skip
    findings.add(finding, lambda: [f"rank {log.rank}: {describe_event(log.last)}" for log in logs])
    return {
        "rank": logs[at].rank, "against": logs[right].rank, "tick": tick, "seq": event.get("seq"), "node": node, "line": line.number,
        "fields": fields,
    }  # fmt: skip


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
