"""Small worlds are exhausted: every state is sound, rest is always within reach, and nothing turns for ever."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cphicache.explore import WORLDS, Report, World
from cphicache.explore.driver import Driver, Phase
from tests.explore.worlds import CHAIN, LOAD_BACK, SPLIT, run, single, tiny, two_ranks

SMALL: dict[str, tuple[World, set[str]]] = {
    "one request": (
        tiny(outside="abort reset shutdown evict flush", reserve_may_fail=True),
        {"rolled_back:reset", "rolled_back:abort"},
    ),
    "parent and child": (
        tiny(CHAIN, outside="abort", insert_early=True, one_forward=False),
        {"rolled_back:parent_lost", "rolled_back:agreed_failed", "retries"},
    ),
    "split": (
        replace(SPLIT, outside=frozenset(), max_faults=1),
        {"splits", "deferred_splits", "deferrals_expired", "declined_inserts", "parked_inserts", "parked_dropped"},
    ),
    "load-back": (replace(LOAD_BACK, outside=frozenset({"evict"})), {"load_backs", "load_backs_failed", "device_evictions"}),
    "host room for one": (
        tiny(single("a", 1, 2), single("b", 3, 4), outside="evict", config={"host_slots": 2}),
        {"host_evictions", "eviction_retries_succeeded", "refused:no_host_slots", "retries"},
    ),
    "a load-back that is divided": (
        tiny(LOAD_BACK.requests[0], LOAD_BACK.requests[1], single("c", 1, 4, batch=2, after=("a",)), outside="evict", max_faults=0),
        {"splits", "load_backs"},
    ),
    "a load-back that is drained": (
        replace(LOAD_BACK, outside=frozenset({"evict", "shutdown"}), max_faults=1),
        {"drain_reductions", "load_backs_failed", "rolled_back:reset"},
    ),
    "two ranks": (two_ranks("chain-disjoint"), {"committed", "rolled_back:agreed_failed"}),
    "drain rounds of two ranks": (two_ranks("write-back", "evict"), {"write_back_waits", "drain_reductions"}),
}
"""Worlds, and what must have happened in each, so that none is empty of what it is about."""


@pytest.mark.parametrize("name", SMALL)
def test_a_small_world_is_exhausted(name: str) -> None:
    """R7, R8, R13, R15, R17, R18, R20, R21, R30: in every order of events all rules hold, everything can come to rest, no livelock."""
    world, happens = SMALL[name]
    report = run(world)
    assert report.violation is None
    assert report.complete
    assert happens <= set(report.seen), f"{happens - set(report.seen)} never happened"
    assert report.edges > report.states > report.depth > 0
    assert 0 < report.logical <= report.states


@pytest.mark.parametrize(
    ("reason", "phase", "world"),
    [
        ("no_pages", Phase.RUNNING, tiny(CHAIN, single("b", 3, 4), one_forward=False, config={"usable_pages": 3}, max_faults=0)),
        ("retract", Phase.RUNNING, replace(LOAD_BACK, outside=frozenset({"evict"}))),
        ("flush", Phase.WAITING, replace(SPLIT, outside=frozenset({"flush"}), max_faults=0)),
        ("shutdown", Phase.WAITING, replace(SPLIT, max_faults=0)),
        ("abort", Phase.PARKED, replace(SPLIT, max_faults=0)),
    ],
)
def test_requests_end_early(reason: str, phase: Phase, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """R13, R17, R25: in some order a request gets no pages, reads a load-back that fails, or is ended while it waits or is parked; all
    rules hold in what follows."""
    ended: set[tuple[str, Phase]] = set()
    end = Driver._end

    def noted(self: Driver, rid: str, why: str) -> None:
        ended.add((why, self._requests[rid].phase))
        end(self, rid, why)

    monkeypatch.setattr(Driver, "_end", noted)
    report = run(world)
    assert (report.violation, report.complete) == (None, True)
    assert (reason, phase) in ended


def numbers(report: Report) -> tuple[object, ...]:
    return report.states, report.edges, report.depth, report.logical, report.steps, report.complete, report.violation


def test_an_exploration_is_repeatable() -> None:
    """R20: the same world gives the same states, edges and engine calls each time."""
    world = SMALL["two ranks"][0]
    assert numbers(run(world, max_states=300)) == numbers(run(world, max_states=300))


def test_bounds_end_an_exploration() -> None:
    """R30: an exploration that meets its bound says so and claims nothing."""
    report = run(WORLDS["split"], max_states=50)
    assert not report.complete
    assert report.ended_by == "more than 50 states"
    assert 50 < report.states < 200
    assert 0 < report.expanded < report.states
    assert 0 < report.followed <= report.depth
    assert run(WORLDS["split"], max_cpu_seconds=0).ended_by == "more than 0 s of processor time"


def test_fewer_faults_reach_fewer_states() -> None:
    """R22: the number of failing copies in a history can be bounded; without any nothing rolls back by itself."""
    world = tiny()
    states = [run(replace(world, max_faults=faults)).states for faults in (0, 1)]
    assert states[0] < states[1]


def test_fewer_ticks_are_fewer_orders() -> None:
    """R11: ticks between the layers of a forward are events of their own, which a world may leave out."""
    world = tiny(config={"payloads": (("target", 2),)})
    between, after = run(world), run(replace(world, tick_in_forward=False))
    assert (between.violation, after.violation) == (None, None)
    assert after.edges < between.edges


def test_every_world_begins() -> None:
    """R30: all worlds of the command are sound as far as a few events go."""
    for world in WORLDS.values():
        assert run(world, max_states=60).violation is None


def test_an_interrupt_keeps_what_was_seen() -> None:
    """R30: an interrupted exploration reports its numbers so far."""

    def interrupt(report: Report) -> None:
        raise KeyboardInterrupt

    report = run(WORLDS["chain-2"], on_progress=interrupt)
    assert report.ended_by == "interrupted"
    assert not report.complete
    assert report.states > report.expanded == 500
    assert 0 < report.followed <= report.depth


def test_how_far_a_bounded_exploration_came() -> None:
    """R30: breadth first, so the number of events up to which every history was followed grows with the bound, to the depth of all."""
    whole = run(tiny())
    assert whole.complete
    assert (whole.expanded, whole.followed) == (whole.states, whole.depth)
    bounded = [run(tiny(), max_states=bound) for bound in range(1, whole.states)]
    assert not any(report.complete for report in bounded)
    followed = [report.followed for report in bounded]
    assert followed == sorted(followed)
    assert followed[0] == 1
    assert followed[-1] in (whole.depth - 1, whole.depth)
