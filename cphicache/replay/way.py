"""The way of one node through the state machine, as a log tells it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from cphicache.events import EventReadError, read_lines
from cphicache.events.types import STEP
from cphicache.lifecycle import State, Trigger
from cphicache.replay.replay import UnusableLogs, pass_over


class WayStep(NamedTuple):
    """A kind of step. ``refused``: whether it was a reservation that was not granted."""

    before: State
    trigger: Trigger
    after: State
    refused: bool


@dataclass(frozen=True, slots=True)
class Way:
    """``steps``: the ticks of each kind of step that the node took, in all of its generations; stale no-ops are not steps."""

    node: int
    rank: int
    steps: Mapping[WayStep, list[int]]


def node_way(path: Path, node: int) -> Way:
    """Read the way of ``node`` from the log at ``path``, up to the cut of a log that is cut.

    Raises :class:`~cphicache.replay.replay.UnusableLogs` for a log that cannot be read, has no step of the node, or a step that nobody
    knows.
    """
    rank: int | None = None
    steps: dict[WayStep, list[int]] = {}
    try:
        for line in read_lines(path, on_gap=pass_over):
            event = line.event
            rank = event["rank"] if rank is None else rank
            if event["event"] != STEP or event["node"] != node or "stale" in event:
                continue
            try:
                step = WayStep(State(event["before"]), Trigger(event["trigger"]), State(event["after"]), bool(event.get("refused")))
            except ValueError as error:
                raise UnusableLogs(
                    f"{path}:{line.number}: not a step that is known ({error}); see cphicache replay {path}"
                ) from error
            steps.setdefault(step, []).append(event["tick"])
    except EventReadError as error:
        if rank is None:
            raise UnusableLogs(str(error)) from error
    if rank is None or not steps:
        raise UnusableLogs(f"{path}: no step of node {node} is in it; give another --node, or the log that has it")
    return Way(node, rank, steps)
