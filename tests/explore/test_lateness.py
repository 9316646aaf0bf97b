"""Copies that end unseen are not followed, and nothing is lost by that."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cphicache.explore import World
from cphicache.explore.lateness import Standing, latest, may_become
from tests.explore.worlds import CHAIN, run, single, tiny, two_ranks

FLYING = Standing(True, False, False, False)
ENDED = Standing(False, False, True, False)
FAILING = Standing(True, True, False, True)
FAILED = Standing(False, True, True, True)

DRAINING = two_ranks("write-back", outside="evict")
WORLDS: dict[str, World] = {
    "chain": tiny(CHAIN, outside="abort", insert_early=True, one_forward=False),
    "chain, waits do not fail": tiny(CHAIN, outside="reset", insert_early=True, one_forward=False, wait_may_fail=False),
    "siblings, one fault": tiny(single("a", 1), single("b", 2), max_faults=1),
    "two ranks": replace(two_ranks("chain-disjoint"), max_faults=2),
    "drain rounds": replace(DRAINING, config=replace(DRAINING.config, payloads=(("target", 1),)), max_faults=1),
}


@pytest.mark.parametrize("name", WORLDS)
def test_nothing_is_lost(name: str) -> None:
    """R20, R21, R30: with and without copies that end unseen a world has the same logical states, in all of which the same has happened,
    and the same verdict; without, fewer states hold them."""
    exact, reduced = run(WORLDS[name], exact=True), run(WORLDS[name])
    assert exact.complete
    assert reduced.complete
    assert (reduced.logical, reduced.seen, reduced.violation) == (exact.logical, exact.seen, exact.violation)
    assert reduced.states < exact.states
    assert reduced.edges < exact.edges


@pytest.mark.parametrize(
    ("kept", "dropped", "if_waits_fail", "if_not"),
    [
        (FLYING, ENDED, True, True),
        (FAILING, FAILED, True, True),
        (FLYING, FAILING, True, False),
        (FLYING, FAILED, True, False),
        (FLYING, FLYING, True, True),
        (ENDED, FLYING, False, False),
        (ENDED, FAILED, False, False),
        (FAILING, FLYING, False, False),
        (FAILING, ENDED, False, False),
        (FLYING, Standing(False, True, True, True, void=True), False, False),
    ],
)
def test_copies_end_later_and_never_earlier(kept: Standing, dropped: Standing, *, if_waits_fail: bool, if_not: bool) -> None:
    """R21: a copy in flight may end or fail at the next look; unless that is a wait which fails nothing. What has ended stays so."""
    assert may_become([(kept,)], [(dropped,)], wait_may_fail=True) is if_waits_fail
    assert may_become([(kept,)], [(dropped,)], wait_may_fail=False) is if_not


def test_the_latest_are_kept() -> None:
    """R21: of states that may become each other one is kept; those that differ otherwise are all kept, in their order."""
    first, second = [(ENDED, FLYING), (FLYING, FLYING)], [(FLYING, FLYING), (ENDED, FLYING)]
    both = [(FLYING, FLYING), (FLYING, FLYING)]
    apart = [(ENDED, FAILED), (ENDED, ENDED)]
    assert latest([first, second], wait_may_fail=True) == [0, 1]
    assert latest([first, apart, second, both], wait_may_fail=False) == [1, 3]
    assert latest([both, first, both], wait_may_fail=True) == [0]
