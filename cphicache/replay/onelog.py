"""Replay of one log, event by event: the lifecycles, the reductions, the figures, and how the log ended."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cphicache.events import EventReadError, Line, Trouble, logical_view, read_lines
from cphicache.events.types import CACHE, END, HEADER, LOST, STEP
from cphicache.lifecycle import PENDING
from cphicache.replay.findings import Filter, Finding, Findings, Kind
from cphicache.replay.live import Live, describe_event
from cphicache.replay.sequence import Tell
from cphicache.replay.stepper import NotAStep, Stepper
from cphicache.replay.tally import Tally

EVENTS_BEFORE = 12
"""Last events that are shown before the first divergence, besides those of its node."""
STORY_KEPT = 500
"""Events of a chosen node or request that are shown."""

_CUT_KINDS = {Trouble.CUT: Kind.CUT, Trouble.NOT_JSON: Kind.UNREADABLE, Trouble.UNREADABLE: Kind.UNREADABLE}
Given = tuple[Line, dict[str, Any]]


class OneLog:
    """Replays the log at ``path``. Reading its header is part of the construction.

    Raises :class:`~cphicache.events.EventReadError` for a file that cannot be replayed at all: not there, empty, without header, of a
    newer schema. Whatever comes later is a finding.
    """

    def __init__(self, path: Path, findings: Findings, chosen: Filter) -> None:
        self.path = path
        self._findings = findings
        self._filter = chosen
        self._lines = read_lines(path, on_gap=self._on_gap)
        self._gaps: list[EventReadError] = []
        self._header_line = next(self._lines)
        self.header = self._header_line.event
        self.rank: int = self.header["rank"]
        self.schema: int = self.header["schema"]
        self.stepper = Stepper(self.schema)
        self.tally = Tally()
        self.story: list[str] = []
        self.story_left_out = 0
        self.has_node = False
        """The node of the filter is in the log, at whatever tick."""
        self.has_request = False
        self.events = 1
        self.lost = 0
        self.incomplete = False
        """Events are missing between those that were replayed."""
        self.first_tick: int | None = None
        self.last_tick: int | None = None
        self.last = self._header_line
        self.end: str | None = None
        """How the log ended: ``closed``, ``exit``, or None: it was cut."""
        self.cut: str | None = None
        self.bytes_read = self._header_line.end_byte
        self._recent: deque[Line] = deque([self._header_line], maxlen=EVENTS_BEFORE)
        self._token_bytes = self.header.get("config", {}).get("token_layer_bytes")  # as the caller of the log gave it: anything
        if self._gaps:
            self._missing()

    # -- events, one by one -----------------------------------------------------------------------------------------------------
    def views(self, *, compared: bool) -> Iterator[Given]:
        """Replay to the end. Yields each event that all ranks must have, with its logical view (empty unless it is to be ``compared``),
        right after it was replayed."""
        try:
            for line in self._lines:
                if self._gaps:
                    self._missing()
                self._take(line)
                view = logical_view(line.event, self.schema) if compared else {}
                if view is not None:
                    yield line, view
        except EventReadError as error:
            kind = _CUT_KINDS.get(error.trouble, Kind.UNREADABLE)
            if self._gaps:
                self._missing()
            self.cut = f"line {error.line}: {error.what}"
            self._add(kind, f"{error.what}; replayed up to here", None, error.path, error.line)
        self._finish()

    def _on_gap(self, error: EventReadError) -> None:
        self._gaps.append(error)

    def _missing(self) -> None:
        """Events are missing before the line that comes now."""
        for gap in self._gaps:
            if gap.trouble is Trouble.FIELD:
                named = (gap.event or {}).get("node")
                node = named if type(named) is int else None
                self.has_node = self.has_node or node == self._filter.node
                self._add(Kind.UNREADABLE, gap.what, node, gap.path, gap.line)
            else:
                self._add(Kind.GAP, gap.what, None, gap.path, gap.line)
        self._gaps.clear()
        self._lose_track()

    def _lose_track(self) -> None:
        self.incomplete = True
        self.stepper.lose_track()

    def _take(self, line: Line) -> None:
        event = line.event
        name = event["event"]
        self.events += 1
        self.last, self.bytes_read = line, line.end_byte
        if event["rank"] != self.rank:
            text = f"an event of rank {event['rank']} in the log of rank {self.rank}"
            self._add(Kind.WRONG_RANK, text, event.get("node"), line.path, line.number, line)
        if "tick" in event:
            self._follow_tick(event["tick"], line)
        live: Live | None = None
        if name == STEP:
            live = self._step(line)
        elif name == LOST:
            self.lost += event["lost"]
            text = f"{event['lost']} events are missing, from seq {event['first']} on: the buffer was full"
            self._add(Kind.LOST, text, None, line.path, line.number, line)
            self._lose_track()
        elif name == END:
            self.end = event.get("reason", "closed")
        elif name != HEADER:
            self._fact(name, line)
        self._recent.append(line)
        self._tell_story(line, live)

    def _follow_tick(self, tick: int, line: Line) -> None:
        if self.last_tick is not None and tick < self.last_tick:
            text = f"tick {tick} after tick {self.last_tick}"
            self._add(Kind.TICK_BACK, text, line.event.get("node"), line.path, line.number, line)
        self.first_tick = tick if self.first_tick is None else self.first_tick
        self.last_tick = tick if self.last_tick is None else max(tick, self.last_tick)

    def _step(self, line: Line) -> Live | None:
        event = line.event
        node = event["node"]
        before_step = self.stepper.live.get(node)
        try:
            live, before = self.stepper.step(line, self._teller(line, before_step))
        except NotAStep as error:
            self._add(Kind.UNREADABLE, str(error), node, line.path, line.number, line)
            return None
        if self._filter.takes(live.node, live.request, event["tick"]):
            self.tally.step(live, before, event)
        if before is not live.state:
            live.since_tick, live.since_wall = event["tick"], event.get("wall")
        return live

    def _fact(self, name: str, line: Line) -> None:
        event = line.event
        tell = self._teller(line, None)
        if name == CACHE:
            self.stepper.layers = dict(event["payloads"])
            told = self._token_bytes
            if isinstance(told, dict) and all(type(size) is int for size in told.values()):
                total = sum(layers * told.get(payload, 0) for payload, layers in self.stepper.layers.items())
                self.tally.token_bytes = total / max(event["cp_size"], 1)
        elif name == "reduction":
            self._overdue(self.stepper.sequence.reduce(event["count"], event["first_failed"], tell), line)
        elif name == "load_back":
            self.stepper.sequence.give(event["number"], None, tell)
        if self._filter.takes(event.get("node"), event.get("request"), event.get("tick")):
            if name == "refused" and self.schema < 2:
                self.tally.refused_before_2(event)
            else:
                self.tally.fact(event)

    # -- the end ----------------------------------------------------------------------------------------------------------------
    def _finish(self) -> None:
        if self._gaps:
            self._missing()
        line = self.last
        if self.cut is None and self.end != "closed" and self.schema >= 2:
            why = "its process ended before it was closed" if self.end else "it has no end: its writer was stopped"
            self.cut = f"line {line.number}: {why}"
            self._add(Kind.CUT, f"{why}; replayed up to here", None, line.path, line.number, line)
        if self.cut is not None:
            return
        self._overdue(self.stepper.sequence.overdue(), line)
        for live in list(self.stepper.live.values()):
            if live.state in PENDING or live.loading:
                what = f"it is {live.state} at the end of the log" if live.state in PENDING else "a load-back of it has not ended"
                self._add_live(Kind.NEVER_ENDED, what, live)

    def open_at_cut(self) -> list[str]:
        """Backups that were pending where the log was cut."""
        return [f"node {live.node}.{live.generation} {live.state}" for live in self.stepper.live.values() if live.state in PENDING]

    def _overdue(self, left: list[tuple[int, tuple[int, str]]], line: Line) -> None:
        for number, (node, where) in left:
            text = f"number {number} (taken at {where}) was passed by the reduction, and no step has agreed it"
            self._add(Kind.NOT_AGREED, text, node, line.path, line.number, line)

    # -- telling ----------------------------------------------------------------------------------------------------------------
    def _teller(self, line: Line, live: Live | None) -> Tell:
        def tell(kind: Kind, text: str) -> None:
            self._add(kind, text, line.event.get("node"), line.path, line.number, line, live)

        return tell

    def _add(  # noqa: PLR0917 - what a finding consists of
        self, kind: Kind, text: str, node: int | None, path: Path, number: int, line: Line | None = None, live: Live | None = None
    ) -> None:
        event = {} if line is None else line.event
        live = live if live is not None or node is None else self.stepper.live.get(node)
        request = event.get("request") or (None if live is None else live.request)
        generation = event.get("generation") if event.get("node") == node else None
        finding = Finding(kind, text, self.rank, node, generation, request, event.get("tick"), event.get("seq"), path, number)
        self._findings.add(finding, lambda: self._before(live))

    def _add_live(self, kind: Kind, text: str, live: Live) -> None:
        tick, seq, number = live.last
        finding = Finding(kind, text, self.rank, live.node, live.generation, live.request, tick, seq, self.last.path, number)
        self._findings.add(finding, lambda: self._before(live))

    def _before(self, live: Live | None) -> list[str]:
        """The last events of the node, and the last ones of all, in order and each once."""
        lines = {line.event["seq"]: line for line in (*(() if live is None else live.history), *self._recent)}
        return [describe_event(lines[seq]) for seq in sorted(lines)]

    def _tell_story(self, line: Line, live: Live | None) -> None:
        chosen, event = self._filter, line.event
        if not chosen.narrows:
            return
        chain = event.get("nodes")  # of an event that is not known it may be anything
        nodes = [event.get("node"), event.get("head"), *(chain if isinstance(chain, list) else ())]
        request = event.get("request") or (None if live is None else live.request)
        self.has_node = self.has_node or chosen.node in nodes
        self.has_request = self.has_request or request == chosen.request
        node = chosen.node if chosen.node in nodes else event.get("node")
        if chosen.takes(node, request, event.get("tick")) and event["event"] not in (HEADER, END):
            if len(self.story) < STORY_KEPT:
                self.story.append(describe_event(line))
            else:
                self.story_left_out += 1
