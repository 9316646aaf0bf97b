"""The finished graph of a world, and the two questions that only all of it answers: does everything come to rest, and does nothing
turn for ever?"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from cphicache.explore.rank import Mark

_TURNING = Mark.RETRY | Mark.RECLAIM | Mark.DEFERRAL | Mark.ROLLBACK


class Problem(NamedTuple):
    """``state``: where it shows. ``cycle``: states that follow each other for ever (livelock)."""

    what: str
    state: int
    cycle: tuple[int, ...] = ()


class Graph:
    """Edges of states 0, 1, 2, ... in the order in which the states are ended. Compact: some ten bytes an edge."""

    def __init__(self) -> None:
        self._starts = array("q", [0])
        self._targets = array("l")
        self._marks = array("H")
        self._at_rest = bytearray()

    @property
    def edges(self) -> int:
        """Edges so far."""
        return len(self._targets)

    @property
    def states(self) -> int:
        """States that have been ended."""
        return len(self._at_rest)

    def add_edge(self, target: int, marks: int) -> None:
        """An edge of the next state."""
        self._targets.append(target)
        self._marks.append(marks)

    def end_state(self, *, at_rest: bool) -> None:
        """All edges of the next state have been added."""
        self._starts.append(len(self._targets))
        self._at_rest.append(at_rest)

    def at_rest(self, state: int) -> bool:
        """Whether nothing is left to do in a state."""
        return bool(self._at_rest[state])

    def out(self, state: int, wanted: Callable[[int], bool]) -> list[tuple[int, int]]:
        """(target, marks) of a state's edges whose marks are ``wanted``."""
        return [
            (self._targets[at], self._marks[at])
            for at in range(self._starts[state], self._starts[state + 1])
            if wanted(self._marks[at])
        ]


def find_dead_end(graph: Graph) -> Problem | None:
    """The first state from which rest cannot be reached by events from inside, with no further fault."""
    before: list[list[int]] = [[] for _ in range(graph.states)]
    for state in range(graph.states):
        for target, _ in graph.out(state, lambda marks: not marks & (Mark.OUTSIDE | Mark.FAULT)):
            before[target].append(state)
    reached = bytearray(graph.states)
    todo = [state for state in range(graph.states) if graph.at_rest(state)]
    for state in todo:
        reached[state] = 1
    while todo:
        for state in before[todo.pop()]:
            if not reached[state]:
                reached[state] = 1
                todo.append(state)
    lost = reached.find(0)
    return None if lost < 0 else Problem("no state at rest can be reached from here any more", lost)


def find_livelock(graph: Graph) -> Problem | None:
    """A cycle of retries, reclaims, deferrals and rollbacks (and ticks in which nothing happens) on which nothing gets on."""
    component = _components(graph)
    for state in range(graph.states):
        for target, marks in graph.out(state, _is_inner):
            if marks & _TURNING and component[state] == component[target]:
                cycle = _cycle(graph, state, target)
                names = [mark.name.lower() for mark in Mark if mark & _marks_on(graph, cycle) and mark.name is not None]
                return Problem(f"a cycle on which nothing gets on: {', '.join(names)}", state, cycle)
    return None


def _is_inner(marks: int) -> bool:
    return not marks & (Mark.PROGRESS | Mark.OUTSIDE)


def _marks_on(graph: Graph, cycle: tuple[int, ...]) -> int:
    """Marks of the edges of a cycle, all together."""
    together = 0
    for state, following in zip(cycle, (*cycle[1:], cycle[0]), strict=True):
        for target, marks in graph.out(state, _is_inner):
            together |= marks if target == following else 0
    return together


def _cycle(graph: Graph, state: int, target: int) -> tuple[int, ...]:
    """States of a shortest cycle that begins with the edge from ``state`` to ``target``."""
    came_from = {target: state}
    queue = deque([target])
    while state not in came_from:  # there is a way: both are in one component
        at = queue.popleft()
        for following, _ in graph.out(at, _is_inner):
            if following not in came_from:
                came_from[following] = at
                queue.append(following)
    cycle = [state]
    at = came_from[state]
    while at != state:
        cycle.append(at)
        at = came_from[at]
    return (state, *reversed(cycle[1:]))


def _components(graph: Graph) -> array[int]:
    """The strongly connected component of every state by edges on which nothing gets on (Tarjan, without recursion)."""
    size = graph.states
    order, low, component = array("l", [-1] * size), array("l", [0] * size), array("l", [-1] * size)
    found = 0
    stack: list[int] = []
    for root in range(size):
        if order[root] >= 0:
            continue
        work: list[tuple[int, list[int]]] = []
        enter = root
        while True:
            if enter >= 0:
                order[enter] = low[enter] = found
                found += 1
                stack.append(enter)
                work.append((enter, [target for target, _ in graph.out(enter, _is_inner)]))
                enter = -1
            state, targets = work[-1]
            while targets:
                target = targets.pop()
                if order[target] < 0:
                    enter = target
                    break
                if component[target] < 0:
                    low[state] = min(low[state], order[target])
            if enter >= 0:
                continue
            work.pop()
            if work:
                low[work[-1][0]] = min(low[work[-1][0]], low[state])
            if low[state] == order[state]:
                while True:
                    member = stack.pop()
                    component[member] = state
                    if member == state:
                        break
            if not work:
                break
    return component
