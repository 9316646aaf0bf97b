"""What replay remembers of a backup that has not ended, or whose host copy is there."""

from __future__ import annotations

from collections import deque
from typing import Any

from cphicache.events import Line
from cphicache.lifecycle import State

STEPS_KEPT = 8
"""Last steps that are remembered of each live backup, for the first divergence."""


class Live:
    """One backup. ``submitted``: masks of layers by payload, or None when the log does not say which layers they were."""

    __slots__ = (
        "agreed",
        "bound",
        "confirmed",
        "copy_wall",
        "generation",
        "history",
        "last",
        "loading",
        "locks",
        "node",
        "number",
        "parent",
        "request",
        "since_tick",
        "since_wall",
        "slots",
        "state",
        "submitted",
    )

    def __init__(self, node: int, *, bound: bool) -> None:
        self.node = node
        self.state = State.DEVICE_VALID_HOST_NONE
        self.generation = 0
        self.bound = bound
        self.number: int | None = None
        self.agreed = False
        self.submitted: dict[str, int] = {}
        self.confirmed: dict[str, int] = {}
        self.slots = 0
        self.locks = 0
        self.parent: int | None = None
        self.request: str | None = None
        self.loading = False
        self.since_tick = 0
        self.since_wall: float | None = None
        self.copy_wall: float | None = None
        self.last: tuple[int, int, int] = (0, 0, 0)  # tick, seq, line
        self.history: deque[Line] = deque(maxlen=STEPS_KEPT)


def describe_event(line: Line) -> str:
    """An event in one line, as a person reads it."""
    event = line.event
    head = f"line {line.number} seq {event.get('seq')} tick {event.get('tick', '-')}"
    if event["event"] == "step":
        return f"{head} node {event['node']}.{event['generation']} {_describe_step(event)}"
    known = {"rank", "seq", "tick", "event", "wall", "config", "versions", "keys", "pages"}
    rest = " ".join(f"{name}={value}" for name, value in event.items() if name not in known)
    return f"{head} {event['event']} {rest}".rstrip()


def _describe_step(event: dict[str, Any]) -> str:
    before, after, stale = event["before"], event["after"], event.get("stale")
    way = f"stays {before} ({stale})" if stale else f"stays {before}" if before == after else f"{before} -> {after}"
    marks = " ".join(f"{name} {count}/{event['confirmed'].get(name)}" for name, count in event["submitted"].items())
    extras = [f"number {event['number']}" if "number" in event else "", f"slots {event['slots']}", f"layers {marks}"]
    extras += [f"refused {event['refused']}" if "refused" in event else "", f"({event['reason']})" if event.get("reason") else ""]
    return f"{event['trigger']}: {way} {' '.join(part for part in extras if part)}"
