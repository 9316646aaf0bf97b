"""Ranks side by side: their logical events must be the same, one by one. The first that is not is named."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from cphicache.replay.findings import Finding, Findings, Kind
from cphicache.replay.live import describe_event
from cphicache.replay.onelog import Given, OneLog

_ENDED: dict[str, Any] = {"event": "(the end of the log)"}


def replay_together(logs: Sequence[OneLog], findings: Findings, on_step: Callable[[], None]) -> tuple[dict[str, Any] | None, str]:
    """Replay all logs, as far as they agree one logical event of each at a time.

    Returns the first disagreement, or None, and why the ranks were not compared to the end, or "". Equal sequences are in the same
    order of ticks, so this merges the logs by tick; only one event of each is in memory.
    """
    runs: list[Iterator[Given]] = [log.views(compared=len(logs) > 1) for log in logs]
    disagreement: dict[str, Any] | None = None
    why = ""
    while disagreement is None and not why:
        given = [next(run, None) for run in runs]
        on_step()
        if all(one is None for one in given):
            break
        gone = next((log for log in logs if log.incomplete), None)
        if gone is not None and len(logs) > 1:
            why = f"the ranks are compared up to tick {gone.last_tick} only: events are missing from {gone.path}"
            break
        if len(logs) > 1:
            disagreement = _compare(logs, given, findings)
    for run in runs:
        for _ in run:
            on_step()
    return disagreement, why


def _compare(logs: Sequence[OneLog], given: Sequence[Given | None], findings: Findings) -> dict[str, Any] | None:
    """Whom most ranks contradict is named; of two, the second. A log that was cut is left out: that it was cut is found already."""
    present = [at for at, one in enumerate(given) if one is not None or logs[at].cut is None]
    views = {at: _ENDED if (one := given[at]) is None else one[1] for at in present}
    votes = {at: sum(views[at] == other for other in views.values()) for at in present}
    right = max(present, key=lambda at: votes[at])
    at = next((at for at in present if views[at] != views[right]), None)
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
