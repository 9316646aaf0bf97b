"""A run as a timeline for Perfetto or ``chrome://tracing``: the JSON trace-event format.

One process a rank; tracks for the lifecycle, for the forward's stores (compute), and for writes and loads by payload. Time is the wall
clock when the log has it; else a tick is a millisecond, in which the events of the tick are spread in their order.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from cphicache.events import EventReadError, read_lines
from cphicache.events.types import CACHE, END, HEADER, LOST, STEP
from cphicache.files import whole_file
from cphicache.lifecycle import State, Trigger
from cphicache.replay.replay import UnusableLogs, pass_over

TICK_US = 1000.0
"""Length of a tick on a timeline without wall time."""
WALL_SLOT_US = 1.0
"""Room of an event on a timeline with wall times, at least."""
LIFECYCLE, COMPUTE, FIRST_PAYLOAD = 0, 1, 2
"""Numbers of the tracks of a rank; payload *p* writes on ``FIRST_PAYLOAD + 2 p`` and loads on the one after that."""

TraceEvent = dict[str, Any]


def write_trace(paths: Sequence[Path], out: Path, *, on_progress: Callable[[int], None] | None = None) -> int:
    """Write the timeline of these logs (one a rank) to ``out``; returns the number of trace events.

    A log that is cut is drawn up to the cut. Streams. Raises :class:`~cphicache.replay.replay.UnusableLogs` for what cannot be read
    or written.
    """
    count, read = 0, 0
    if any(out.exists() and path.exists() and out.samefile(path) for path in paths):
        raise UnusableLogs(f"{out}: is one of the logs to read; name another file with -o")
    try:
        with whole_file(out) as place, place.open("w", encoding="utf-8") as file:
            file.write('{"displayTimeUnit":"ms","traceEvents":[')
            for path in paths:
                track = _RankTrack(path)
                for event in track.events():
                    file.write(("\n" if not count else ",\n") + json.dumps(event, separators=(",", ":")))
                    count += 1
                    if on_progress is not None and count % 4096 == 0:
                        on_progress(read + track.bytes_read)
                read += track.bytes_read
            file.write("\n]}\n")
    except OSError as error:
        raise UnusableLogs(f"{out}: cannot be written ({error.strerror or error}); name another file with -o") from error
    return count


class _RankTrack:
    """Trace events of one log. ``pending``: by node, what of its backup is drawn and has not ended."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.bytes_read = 0
        self._rank = 0
        self._payloads: list[str] = []
        self._states: dict[int, tuple[str, str]] = {}
        self._copies: dict[int, str] = {}
        self._flows: dict[int, list[str]] = {}
        self._loads: dict[int, tuple[str, int]] = {}
        self._start: float | None = None
        self._now = 0.0
        self._slot = 1.0

    def events(self) -> Iterator[TraceEvent]:
        """In the order of time."""
        tick: int | None = None
        waiting: list[dict[str, Any]] = []
        for event in self._read():
            if event["event"] == HEADER:
                self._rank = event["rank"]
                yield self._meta("process_name", 0, f"rank {self._rank}")
                yield self._meta("thread_name", LIFECYCLE, "lifecycle")
                yield self._meta("thread_name", COMPUTE, "compute")
            elif event["event"] not in (END, LOST):
                if event.get("tick") != tick:
                    yield from self._draw_tick(waiting)
                    waiting, tick = [], event.get("tick")
                waiting.append(event)
        yield from self._draw_tick(waiting)
        for node in list(self._states):  # what is there at the end has no end of its own
            yield from self._end_state(node)
        for node in list(self._copies):
            yield self._async("e", "copies", "copy", self._copies.pop(node))

    def _read(self) -> Iterator[dict[str, Any]]:
        seen = False
        try:
            for line in read_lines(self._path, on_gap=pass_over):
                seen = True
                self.bytes_read = line.end_byte
                yield line.event
        except EventReadError as error:
            if not seen:
                raise UnusableLogs(str(error)) from error

    def _draw_tick(self, events: list[dict[str, Any]]) -> Iterator[TraceEvent]:
        for index, event in enumerate(events):
            if "wall" in event:
                self._slot = WALL_SLOT_US
                if self._start is None:
                    self._start = event["wall"]
                else:  # the steps of one stored layer have one wall time: they are drawn one after the other
                    self._now = max((event["wall"] - self._start) * 1e6, self._now + self._slot)
            else:
                self._slot = TICK_US / (len(events) + 1)
                self._now = event["tick"] * TICK_US + index * self._slot
            yield from self._draw(event)

    def _draw(self, event: dict[str, Any]) -> Iterator[TraceEvent]:
        name = event["event"]
        if name == STEP:
            yield from self._draw_step(event)
        elif name == CACHE:
            yield from self._name_payloads(list(event["payloads"]))
        elif name == "load_back":
            yield from self._draw_load(event)
        elif name == "reduction":
            args = {"count": event["count"], "first_failed": event["first_failed"]}
            yield self._slice("reduction", LIFECYCLE, args)
            yield from self._end_loads(event["count"])
        else:
            args = {
                key: value for key, value in event.items() if key not in ("rank", "seq", "event", "tick", "wall", "keys", "pages")
            }
            yield {"name": name, "ph": "i", "s": "t", "cat": "fact", **self._at(LIFECYCLE), "args": args}

    def _draw_step(self, event: dict[str, Any]) -> Iterator[TraceEvent]:
        node, trigger, before, after = event["node"], event["trigger"], event["before"], event["after"]
        if event.get("stale") is not None:
            return
        if trigger == Trigger.LAYER_STORED:
            yield from self._draw_layers(event)
        elif trigger == Trigger.COPY_DONE and node in self._copies:
            yield self._async("e", "copies", "copy", self._copies.pop(node))
        if before == after:
            return
        yield from self._end_state(node)
        args: TraceEvent = {
            key: event[key] for key in ("trigger", "number", "slots", "reason", "request", "parent") if key in event
        }
        if after != State.DEVICE_VALID_HOST_NONE:
            name = f"r{self._rank}.n{node}.g{event['generation']}"
            self._states[node] = (after, name)
            yield self._async("b", after, "backup", name, {"node": node, **args})
        yield self._slice(f"{trigger} {node}", LIFECYCLE, {"node": node, "before": before, "after": after, **args})
        if after == State.COMMITTED:
            for flow in self._flows.pop(node, ()):
                yield {"name": "layer", "ph": "f", "bp": "e", "cat": "flow", "id": flow, **self._at(LIFECYCLE)}
        elif after != State.LAYERS_IN_FLIGHT:
            self._flows.pop(node, None)
        if "used" in event:
            yield {"name": "host slots", "ph": "C", **self._at(LIFECYCLE), "args": {"used": event["used"]}}

    def _draw_layers(self, event: dict[str, Any]) -> Iterator[TraceEvent]:
        """Each layer: a store on the compute track, the submission of its copy on the write track, and a flow on to the commit."""
        node, payload, layers = event["node"], event.get("payload", "target"), event.get("layers", [])
        if payload not in self._payloads:
            yield from self._name_payloads([*self._payloads, payload])
        track = FIRST_PAYLOAD + 2 * self._payloads.index(payload)
        name = f"r{self._rank}.n{node}.g{event['generation']}"
        if node not in self._copies:
            self._copies[node] = name
            yield self._async("b", "copies", "copy", name, {"node": node})
        now, slot = self._now, self._slot
        for index, layer in enumerate(layers):
            self._now, self._slot = now + index * slot / len(layers), slot / len(layers)
            flow = f"{name}.{payload}.{layer}"
            self._flows.setdefault(node, []).append(flow)
            args = {"node": node, "generation": event["generation"], "payload": payload, "layer": layer}
            yield self._slice(f"store {payload} {layer}", COMPUTE, args)
            yield {"name": "layer", "ph": "s", "cat": "flow", "id": flow, **self._at(COMPUTE)}
            yield self._slice(f"copy {payload} {layer}", track, args)
            yield {"name": "layer", "ph": "t", "cat": "flow", "id": flow, **self._at(track)}
        self._now, self._slot = now, slot

    def _draw_load(self, event: dict[str, Any]) -> Iterator[TraceEvent]:
        name = f"r{self._rank}.load{event['load']}"
        args: TraceEvent = {key: event[key] for key in ("load", "request", "tokens", "nodes", "number") if key in event}
        self._loads[event["load"]] = (name, event["number"])
        yield self._async("b", "load", "load", name, args)
        for index, payload in enumerate(self._payloads):
            yield self._slice(f"load {payload}", FIRST_PAYLOAD + 2 * index + 1, args)

    def _end_loads(self, count: int) -> Iterator[TraceEvent]:
        for load, (name, number) in list(self._loads.items()):
            if number < count:
                del self._loads[load]
                yield self._async("e", "load", "load", name)

    def _end_state(self, node: int) -> Iterator[TraceEvent]:
        if node in self._states:
            state, name = self._states.pop(node)
            yield self._async("e", state, "backup", name)

    def _name_payloads(self, payloads: list[str]) -> Iterator[TraceEvent]:
        self._payloads = payloads
        for index, payload in enumerate(payloads):
            yield self._meta("thread_name", FIRST_PAYLOAD + 2 * index, f"write {payload}")
            yield self._meta("thread_name", FIRST_PAYLOAD + 2 * index + 1, f"load {payload}")

    # -- trace events -------------------------------------------------------------------------------------------------------------
    def _at(self, track: int) -> TraceEvent:
        return {"pid": self._rank, "tid": track, "ts": round(self._now, 3)}

    def _slice(self, name: str, track: int, args: TraceEvent) -> TraceEvent:
        return {"name": name, "ph": "X", "cat": "step", "dur": round(self._slot * 0.9, 3), **self._at(track), "args": args}

    def _async(self, phase: str, name: str, category: str, identity: str, args: TraceEvent | None = None) -> TraceEvent:
        event: TraceEvent = {"name": name, "ph": phase, "cat": category, "id": identity, **self._at(LIFECYCLE)}
        return event if args is None else {**event, "args": args}

    def _meta(self, name: str, track: int, value: str) -> TraceEvent:
        return {"name": name, "ph": "M", "pid": self._rank, "tid": track, "ts": 0, "args": {"name": value}}
