"""What only the finished graph shows: states from which nothing comes to rest, and cycles on which nothing gets on."""

from __future__ import annotations

import pytest

from cphicache.explore.graph import Graph, find_dead_end, find_livelock
from cphicache.explore.rank import Mark

NOTHING = Mark(0)


def graph(*states: dict[int, Mark], at_rest: tuple[int, ...] = ()) -> Graph:
    """Each state as its edges: target and marks."""
    made = Graph()
    for number, edges in enumerate(states):
        for target, marks in edges.items():
            made.add_edge(target, marks)
        made.end_state(at_rest=number in at_rest)
    return made


def test_rest_is_within_reach() -> None:
    """R13: a graph in which every state leads to one at rest has no dead end, however long the way is."""
    assert find_dead_end(graph({1: NOTHING}, {2: NOTHING}, {}, at_rest=(2,))) is None


@pytest.mark.parametrize("only_way", [Mark.OUTSIDE, Mark.FAULT, Mark.OUTSIDE | Mark.PROGRESS])
@pytest.mark.parametrize("stuck", [0, 1])
def test_help_from_outside_and_faults_do_not_count(only_way: Mark, stuck: int) -> None:
    """R13: a state that only an event from outside or a fault leads on from is a dead end; the first such state is told."""
    ways = [NOTHING, NOTHING]
    ways[stuck] = only_way
    problem = find_dead_end(graph({1: ways[0]}, {2: ways[1]}, {}, at_rest=(2,)))
    assert problem is not None
    assert problem.state == 0
    assert find_dead_end(graph({}, {2: ways[1]}, {}, at_rest=(0, 2))) == (None if stuck == 0 else problem._replace(state=1))


@pytest.mark.parametrize("turning", [Mark.RETRY, Mark.RECLAIM, Mark.DEFERRAL, Mark.ROLLBACK])
def test_a_cycle_without_progress_is_a_livelock(turning: Mark) -> None:
    """R15: a cycle of retries, reclaims, deferrals or rollbacks is found with the states on it; with progress on it, it is none."""
    problem = find_livelock(graph({1: NOTHING}, {2: turning}, {1: NOTHING}))
    assert problem is not None
    assert turning.name is not None
    assert turning.name.lower() in problem.what
    assert sorted(problem.cycle) == [1, 2]
    assert find_livelock(graph({1: NOTHING}, {2: turning}, {1: Mark.PROGRESS})) is None
    assert find_livelock(graph({1: NOTHING}, {2: turning}, {})) is None
