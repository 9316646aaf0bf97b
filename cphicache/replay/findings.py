"""What replay can find wrong, and where."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

FINDINGS_KEPT = 1000
"""Findings kept with their text; further ones are counted."""


class Kind(StrEnum):
    """What is wrong. The value is its name in JSON."""

    # -- the file
    CUT = "cut"  # the log does not come to its end
    LOST = "lost"  # events that the writer had no room for
    GAP = "gap"  # sequence numbers are missing or out of order
    UNREADABLE = "unreadable"  # a line is not an event; replay goes up to it
    WRONG_RANK = "wrong_rank"  # an event of another rank
    TICK_BACK = "tick_back"  # the tick goes back
    # -- the lifecycle
    ILLEGAL_EDGE = "illegal_edge"  # the transition table has no such step
    STATE_BEFORE = "state_before"  # the state before is not the last state after
    COLUMN = "column"  # bound, agreed or the number is not what the step makes of it
    GENERATION = "generation"  # not the generation that the backup has, or not a new one
    NEVER_ENDED = "never_ended"  # a backup, or a load-back, is pending at the end
    # -- copies
    WATERMARK = "watermark"  # submitted or confirmed layers are not what the steps make of them
    CONFIRMED_EARLY = "confirmed_early"  # more layers confirmed than submitted
    COMMIT_INCOMPLETE = "commit_incomplete"  # committed with layers missing
    PARENT_UNCOMMITTED = "parent_uncommitted"  # committed under a parent that is not
    PARENT_FREED = "parent_freed"  # the host copy of a parent went before its child's
    # -- accounts
    SLOTS = "slots"  # host slots of a backup change in a step that does not change them
    SLOTS_LEAKED = "slots_leaked"  # the ledger has more in use than the backups hold
    SLOTS_TWICE = "slots_twice"  # the ledger has less in use: released twice
    LOCK_LEAKED = "lock_leaked"  # a device lock was not released, or taken once too often
    LOCK_TWICE = "lock_twice"  # a device lock was released that was not held, or not taken
    # -- agreement
    NUMBER = "number"  # a number is given twice, skipped or missing
    AGREED_EARLY = "agreed_early"  # agreed before a reduction passed it
    AGREED_ORDER = "agreed_order"  # agreed out of order
    NOT_AGREED = "not_agreed"  # passed by the reduction, and no step says so
    REDUCTION = "reduction"  # counts going backwards, or ahead of the numbers given
    # -- ranks
    RANKS_DISAGREE = "ranks_disagree"  # the logical events of two ranks differ


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong. ``node``, ``tick`` and ``seq`` are None where there is none."""

    kind: Kind
    text: str
    rank: int | None
    node: int | None
    generation: int | None
    request: str | None
    tick: int | None
    seq: int | None
    path: Path
    line: int

    def describe(self) -> str:
        """One line."""
        about = [f"rank {self.rank}" if self.rank is not None else "", f"tick {self.tick}" if self.tick is not None else ""]
        about += [f"seq {self.seq}" if self.seq is not None else "", f"node {self.node}" if self.node is not None else ""]
        return f"{self.path}:{self.line}: {self.kind}: {', '.join(part for part in about if part)}: {self.text}"

    def as_json(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "kind": self.kind.value, "text": self.text, "rank": self.rank, "node": self.node, "generation": self.generation,
            "request": self.request, "tick": self.tick, "seq": self.seq, "path": str(self.path), "line": self.line,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Filter:
    """Which part of a log is asked for. Replay reads and checks all of it; what is reported is only what matches."""

    node: int | None = None
    request: str | None = None
    since_tick: int | None = None

    @property
    def narrows(self) -> bool:
        """Whether a node or a request was chosen."""
        return self.node is not None or self.request is not None

    def takes(self, node: int | None, request: str | None, tick: int | None) -> bool:
        """Whether something about this node and request at this tick was asked for."""
        if self.since_tick is not None and tick is not None and tick < self.since_tick:
            return False
        if self.node is not None and node != self.node:
            return False
        return self.request is None or request == self.request


class Findings:
    """Findings of all logs, those of the filter apart from the others, in the order in which they were made."""

    def __init__(self, chosen: Filter) -> None:
        self._filter = chosen
        self.kept: list[Finding] = []
        self.counts: Counter[Kind] = Counter()
        self.elsewhere: Counter[Kind] = Counter()
        self.first: Finding | None = None
        self.before_first: list[str] = []

    @property
    def total(self) -> int:
        """Findings that match the filter."""
        return self.counts.total()

    def add(self, finding: Finding, before: Callable[[], list[str]]) -> None:
        """Count a finding. ``before()``: the events before it, asked for the first one only."""
        if not self._filter.takes(finding.node, finding.request, finding.tick):
            self.elsewhere[finding.kind] += 1
            return
        self.counts[finding.kind] += 1
        if len(self.kept) < FINDINGS_KEPT:
            self.kept.append(finding)
        if self.first is None:
            self.first = finding
            self.before_first = before()
