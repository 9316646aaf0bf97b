"""Figures of one log: outcomes, refusals, deferrals, time in state, bandwidth."""

from __future__ import annotations

from collections import Counter
from typing import Any

from cphicache.lifecycle import PENDING, State, Trigger
from cphicache.replay.live import Live
from cphicache.replay.spread import Spread

MICROSECONDS = 1e6
COMMITTED, RESERVED, ROLLED_BACK, COPY_DONE, LAYER_STORED, SPLIT_WANTED = (
    State.COMMITTED,
    State.RESERVED,
    State.ROLLED_BACK,
    Trigger.COPY_DONE,
    Trigger.LAYER_STORED,
    Trigger.SPLIT_WANTED,
)  # looked up once: a member access through the enum is slow


class Tally:
    """Counts what a log tells. ``token_bytes``: bytes of a token's KV over all layers and payloads, None when the log does not say."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.rolled_back: Counter[str] = Counter()
        self.stale: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.deferred: Counter[str] = Counter()
        self.load_refused: Counter[str] = Counter()
        self.ticks: dict[str, Spread] = {}
        self.wall_us: dict[str, Spread] = {}
        self.kib_per_s = Spread()
        self.copied_bytes = 0
        self.token_bytes: float | None = None
        self.edges: Counter[tuple[str, str, str]] = Counter()

    def step(self, live: Live, before: State, event: dict[str, Any]) -> None:
        """A step was taken; ``live`` is how things are after it."""
        trigger, after, stale = event["trigger"], event["after"], event.get("stale")
        if stale is not None:
            self.stale[stale] += 1
        self.edges[before, trigger, after] += 1
        if "refused" in event:
            self.refused[event["refused"]] += 1
        elif trigger == SPLIT_WANTED and stale is None:
            self.deferred[event.get("reason") or "split_wanted"] += 1
        self._copies(live, before, event)
        if before == after:
            return
        if after == COMMITTED:
            self.outcomes["committed"] += 1
        elif after == RESERVED:
            self.outcomes["reserved"] += 1
        elif after == ROLLED_BACK:
            self.outcomes["rolled_back"] += 1
            self.rolled_back[trigger] += 1
        if before in PENDING or before is COMMITTED:
            self.ticks.setdefault(before, Spread()).add(event["tick"] - live.since_tick)
            if live.since_wall is not None and "wall" in event:
                self.wall_us.setdefault(before, Spread()).add(round((event["wall"] - live.since_wall) * MICROSECONDS))

    def _copies(self, live: Live, before: State, event: dict[str, Any]) -> None:
        wall = event.get("wall")
        if wall is None:
            return
        if event["trigger"] == LAYER_STORED and before is RESERVED:
            live.copy_wall = wall
        elif event["trigger"] == COPY_DONE and live.copy_wall is not None and self.token_bytes is not None:
            copied = live.slots * self.token_bytes
            self.copied_bytes += round(copied)
            self.kib_per_s.add(round(copied / 1024 / max(wall - live.copy_wall, 1e-6)))
            live.copy_wall = None

    def fact(self, event: dict[str, Any]) -> None:
        """Another event."""
        name, reason = event["event"], str(event.get("reason", "unknown"))
        if name == "refused" and "needed" not in event:  # those with figures are told by their step, too
            self.refused[reason] += 1
        elif name == "insert_declined":
            self.deferred[f"insert declined: {reason}"] += 1
        elif name == "parked_dropped":
            self.deferred[f"insert dropped: {reason}"] += 1
        elif name in ("load_back", "load_back_failed"):
            self.outcomes[name] += 1
        elif name == "load_back_refused":
            self.load_refused[reason] += 1

    def refused_before_2(self, event: dict[str, Any]) -> None:
        """A refusal in a log of schema version 1, whose steps do not tell it."""
        self.refused[str(event.get("reason", "unknown"))] += 1

    def as_json(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "outcomes": dict(self.outcomes),
            "rolled_back": dict(self.rolled_back),
            "refused": dict(self.refused),
            "deferred": dict(self.deferred),
            "load_back_refused": dict(self.load_refused),
            "stale": dict(self.stale),
            "ticks_in_state": {state: spread.summary() for state, spread in self.ticks.items()},
            "wall_us_in_state": {state: spread.summary() for state, spread in self.wall_us.items()},
            "copied_bytes": self.copied_bytes,
            "copy_kib_per_s": self.kib_per_s.summary() if self.kib_per_s.count else None,
        }
