"""Small random stream programs, and two deliberately simple models of what they may do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import permutations
from typing import NamedTuple

from hypothesis import strategies as st

from cphicache.transfer.port import Wait
from cphicache.transfer.streams.port import Event, Streams

STREAMS = ("compute", "write", "load")


class Submit(NamedTuple):
    stream: str
    cost_us: int


class Record(NamedTuple):
    stream: str


class WaitFor(NamedTuple):
    """Wait for the ``event``-th recorded event (modulo their number; nothing when there is none)."""

    stream: str
    event: int


class Pause(NamedTuple):
    duration_us: int


Step = Submit | Record | WaitFor | Pause
Program = Sequence[Step]

_names = st.sampled_from(STREAMS)
PROGRAMS: st.SearchStrategy[Program] = st.lists(
    st.one_of(
        st.builds(Submit, _names, st.integers(0, 5)),
        st.builds(Record, _names),
        st.builds(WaitFor, _names, st.integers(0, 7)),
        st.builds(Pause, st.integers(0, 6)),
    ),
    max_size=24,
)


def drive(streams: Streams, program: Program, effect: Callable[[int], None]) -> list[Event]:
    """Make the program's calls; the work of step ``i`` is ``effect(i)``. Returns the recorded events."""
    events: list[Event] = []
    for index, step in enumerate(program):
        match step:
            case Submit(stream, cost_us):
                streams.stream(stream).submit(lambda index=index: effect(index), cost_us=cost_us)  # type: ignore[misc]
            case Record(stream):
                events.append(streams.stream(stream).record())
            case WaitFor(stream, event):
                if events:
                    streams.stream(stream).wait(events[event % len(events)], Wait.STORE_TO_COPY)
            case Pause(duration_us):
                streams.pause(duration_us)
    return events


def predecessors(program: Program) -> tuple[dict[int, set[int]], list[set[int]]]:
    """Steps that must have taken effect before each submitted step, and before each recorded event. Sets, no times."""
    before: dict[str, set[int]] = {name: set() for name in STREAMS}
    of_step: dict[int, set[int]] = {}
    of_event: list[set[int]] = []
    for index, step in enumerate(program):
        match step:
            case Submit(stream, _):
                of_step[index] = set(before[stream])
                before[stream].add(index)
            case Record(stream):
                of_event.append(set(before[stream]))
            case WaitFor(stream, event):
                if of_event:
                    before[stream] |= of_event[event % len(of_event)]
    return of_step, of_event


def is_legal(program: Program, order: Sequence[int]) -> bool:
    """Every submitted step once, none before one of its predecessors."""
    of_step, _ = predecessors(program)
    seen: set[int] = set()
    for index in order:
        if index in seen or not of_step[index] <= seen:
            return False
        seen.add(index)
    return seen == set(of_step)


def legal_orders(program: Program) -> set[tuple[int, ...]]:
    """All orders, by trying every permutation."""
    of_step, _ = predecessors(program)
    return {order for order in permutations(of_step) if is_legal(program, order)}


def simulate(program: Program) -> tuple[list[tuple[int, int]], list[int]]:
    """Brute force without jitter, one microsecond after the other.

    Returns ``(time, step)`` of all effects in order, and the completion time of every event.
    """
    entries: list[tuple[int, str, str, int]] = []  # (submission time, stream, kind, cost or event)
    steps: list[int] = []
    now = events = 0
    for index, step in enumerate(program):
        match step:
            case Submit(stream, cost_us):
                entries.append((now, stream, "work", cost_us))
                steps.append(index)
            case Record(stream):
                entries.append((now, stream, "record", events))
                steps.append(index)
                events += 1
            case WaitFor(stream, event):
                if events:
                    entries.append((now, stream, "wait", event % events))
                    steps.append(index)
            case Pause(duration_us):
                now += duration_us
    done: dict[int, int] = {}  # entry -> end
    started: dict[int, int] = {}
    completed: dict[int, int] = {}  # event -> time
    effects: list[tuple[int, int]] = []
    time = 0
    while len(done) < len(entries):
        progress = True
        finished_now: list[int] = []
        while progress:
            progress = False
            for number, (submitted, stream, kind, argument) in enumerate(entries):
                earlier_done = all(other in done for other in range(number) if entries[other][1] == stream)
                if number in done or submitted > time or not earlier_done:
                    continue
                if kind == "wait" and argument not in completed:
                    continue
                if kind == "work":
                    started.setdefault(number, time)
                    if time < started[number] + argument:
                        continue
                    finished_now.append(steps[number])
                if kind == "record":
                    completed[argument] = time
                done[number] = time
                progress = True
        effects += [(time, step) for step in sorted(finished_now)]
        time += 1
    return effects, [completed[event] for event in range(events)]
