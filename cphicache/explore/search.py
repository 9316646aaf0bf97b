"""Breadth first through a world: every state once, the shortest way to each, and what the finished graph shows."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from cphicache.explore.audit import TakeCensus
from cphicache.explore.graph import Graph, Problem, find_dead_end, find_livelock
from cphicache.explore.product import Answers, Product, WorldState
from cphicache.explore.script import World

PROGRESS_STATES = 500
"""States between two reports of progress."""


@dataclass(frozen=True, slots=True)
class Happening:
    """One event of a way through a world, with the answers of the environment by rank."""

    event: str
    answers: Answers


@dataclass(frozen=True, slots=True)
class Violation:
    """``what`` is broken, and the shortest way to it. ``cycle``: events that then repeat for ever (livelock)."""

    what: str
    way: tuple[Happening, ...]
    cycle: tuple[Happening, ...] = ()


@dataclass(slots=True)
class Report:
    """What an exploration has seen. ``complete``: every state was expanded; if not, ``expanded`` of them were, and every history of up to
    ``followed`` events was tried. ``logical``: distinct logical halves. ``steps``: calls of the engines, each of them made once and
    used for every edge that it is part of. ``cpu_seconds``: processor time. ``seen``: the engine's counters that were not 0 somewhere,
    so that a world shows that it is not empty of what it is about."""

    world: str
    states: int = 0
    edges: int = 0
    depth: int = 0
    logical: int = 0
    steps: int = 0
    expanded: int = 0
    followed: int = 0
    cpu_seconds: float = 0.0
    complete: bool = False
    ended_by: str = ""
    seen: tuple[str, ...] = ()
    violation: Violation | None = None


@dataclass(slots=True)
class _Seen:
    """States by number in order of discovery, with the move by which each was found."""

    states: list[WorldState] = field(default_factory=list)
    parents: array[int] = field(default_factory=lambda: array("l"))
    arrivals: list[Happening] = field(default_factory=list)
    depths: array[int] = field(default_factory=lambda: array("l"))

    def add(self, state: WorldState, parent: int, arrival: Happening) -> None:
        self.states.append(state)
        self.parents.append(parent)
        self.arrivals.append(arrival)
        self.depths.append(0 if parent < 0 else self.depths[parent] + 1)

    def way(self, number: int) -> tuple[Happening, ...]:
        way: list[Happening] = []
        while self.parents[number] >= 0:
            way.append(self.arrivals[number])
            number = self.parents[number]
        return tuple(reversed(way))


def explore(
    world: World,
    take_census: TakeCensus,
    *,
    max_states: int | None = None,
    max_cpu_seconds: float | None = None,
    on_progress: Callable[[Report], None] | None = None,
    exact: bool = False,
) -> Report:
    """Explore ``world`` until every state is expanded, a violation is found, or a bound is reached.

    ``max_states``, ``max_cpu_seconds`` (processor time): bounds; with them the report may be incomplete, and says so.
    KeyboardInterrupt ends the exploration with what was seen so far. ``on_progress`` hears of it now and then. ``exact``: tell apart
    what :mod:`~cphicache.explore.lateness` and the engine's ``Outlook`` show to be alike, and follow all of it.
    """
    return _Search(Product(world, take_census, exact=exact), max_states, max_cpu_seconds, on_progress).run()


class _Search:
    def __init__(
        self,
        product: Product,
        max_states: int | None,
        max_cpu_seconds: float | None,
        on_progress: Callable[[Report], None] | None,
    ) -> None:
        self._product = product
        self._max_states = max_states
        self._max_cpu_seconds = max_cpu_seconds
        self._on_progress = on_progress
        self._seen = _Seen()
        self._numbers: dict[Hashable, int] = {}
        self._graph = Graph()
        self._report = Report(product.world.name)
        self._started = time.process_time()

    def run(self) -> Report:
        report = self._report
        try:
            self._enter(self._product.first, -1, Happening("", ()))
            self._expand_all()
        except KeyboardInterrupt:
            report.ended_by = "interrupted"
        self._count()
        return report

    def _expand_all(self) -> None:
        report = self._report
        number = 0
        while number < len(self._seen.states):
            if self._max_states is not None and len(self._seen.states) > self._max_states:
                report.ended_by = f"more than {self._max_states} states"
                return
            if self._max_cpu_seconds is not None and time.process_time() - self._started > self._max_cpu_seconds:
                report.ended_by = f"more than {self._max_cpu_seconds:g} s of processor time"
                return
            if not self._expand(number):
                report.ended_by = "violation"
                return
            number += 1
            if self._on_progress is not None and number % PROGRESS_STATES == 0:
                self._count()
                self._on_progress(report)
        report.complete = True
        problem = find_dead_end(self._graph) or find_livelock(self._graph)
        if problem is not None:
            report.violation = self._violation(problem)
            report.ended_by = "violation"

    def _expand(self, number: int) -> bool:
        for move in self._product.moves(self._seen.states[number]):
            if move.state is None:
                way = (*self._seen.way(number), Happening(move.event, move.answers))
                self._report.violation = Violation(move.broken or "", way)
                return False
            target = self._enter(move.state, number, Happening(move.event, move.answers))
            self._graph.add_edge(target, move.marks)
        self._graph.end_state(at_rest=self._product.is_at_rest(self._seen.states[number]))
        return True

    def _enter(self, state: WorldState, parent: int, arrival: Happening) -> int:
        key = self._product.key(state)
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self._numbers)
            self._seen.add(state, parent, arrival)
        return number

    def _violation(self, problem: Problem) -> Violation:
        """The way to a problem of the graph, and the cycle's events: found again, since edges keep no answers."""
        cycle: list[Happening] = []
        for source, target in zip(problem.cycle, (*problem.cycle[1:], *problem.cycle[:1]), strict=True):
            moves = self._product.moves(self._seen.states[source])
            reached = ((move, move.state) for move in moves if move.state is not None)
            move = next(move for move, state in reached if self._numbers[self._product.key(state)] == target)
            cycle.append(Happening(move.event, move.answers))
        return Violation(problem.what, self._seen.way(problem.state), tuple(cycle))

    def _count(self) -> None:
        report = self._report
        report.states = len(self._seen.states)
        report.edges = self._graph.edges
        report.depth = max(self._seen.depths, default=0)
        report.logical = len(self._product.forms)
        report.steps = self._product.steps
        report.seen = tuple(sorted(self._product.ranks[0].seen))
        report.expanded = self._graph.states
        # In order of discovery: those with fewer events than the next one to expand have all been expanded.
        report.followed = report.depth if report.expanded >= report.states else self._seen.depths[report.expanded]
        report.cpu_seconds = time.process_time() - self._started
