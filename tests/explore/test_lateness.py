"""What explore does not follow, or does not tell apart, and that nothing is lost by that."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cphicache.explore import RequestScript, World
from cphicache.explore.lateness import Standing, Together, latest, latest_together, may_become, together
from tests.explore.worlds import CHAIN, LOAD_BACK, SPLIT, run, single, tiny, two_ranks

FLYING = Standing(True, False, False, False)
ENDED = Standing(False, False, True, False)
FAILING = Standing(True, True, False, True)
FAILED = Standing(False, True, True, True)

DRAINING = two_ranks("write-back", outside="evict")
WORLDS: dict[str, World] = {
    "chain": tiny(CHAIN, outside="abort", insert_early=True, one_forward=False),
    "chain, waits do not fail": tiny(CHAIN, outside="reset", insert_early=True, one_forward=False, wait_may_fail=False),
    "reset and shutdown": tiny(CHAIN, outside="reset shutdown", insert_early=True, one_forward=False, max_faults=2),
    "siblings, one fault": tiny(single("a", 1), single("b", 2), max_faults=1),
    "two ranks": replace(two_ranks("chain-disjoint"), max_faults=2),
    "one of two ranks lacks slots": replace(two_ranks("chain-1"), max_faults=2),
    "a parked insert": replace(SPLIT, outside=frozenset(), max_faults=1),
    "an abort of what others wait for": replace(SPLIT, outside=frozenset({"abort"}), max_faults=0),
    "load-back": replace(LOAD_BACK, max_faults=1),
    "load-back, two ranks": replace(two_ranks("load-back", "evict"), max_faults=0),
    "a draft that does not come": tiny(
        CHAIN, outside="reset", draft_may_lack=True, config={"payloads": (("target", 1), ("draft", 1))}, max_faults=1
    ),
    "three chunks": tiny(
        RequestScript(rid="a", pages=(1, 2, 3), chunks=(1, 2, 3), batches=(0, 1, 2)), outside="abort", max_faults=1
    ),
    "host room for one": tiny(
        single("a", 1, 2), single("b", 3, 4, batch=1), outside="evict reset", config={"host_slots": 2}, max_faults=0
    ),
    "drain rounds": replace(DRAINING, config=replace(DRAINING.config, payloads=(("target", 1),)), max_faults=1),
}


@pytest.mark.parametrize("name", WORLDS)
def test_nothing_is_lost(name: str) -> None:
    """R20, R21, R30: with and without what explore leaves out (copies that end unseen, failures after a rollback, reductions that say
    nothing, what only calls that cannot come would read) a world has the same logical states, in all of which the same has happened,
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


# -- all ranks together -----------------------------------------------------------------------------------------------------------------
COPYING = Together(flying=True, done=False, failed=False, failed_here=False)
DONE = Together(flying=False, done=True, failed=False, failed_here=False)
FAILS = Together(flying=True, done=False, failed=True, failed_here=True)
HAS_FAILED = Together(flying=False, done=True, failed=True, failed_here=True)
UNTOLD = Together(flying=False, done=False, failed=True, failed_here=False)


@pytest.mark.parametrize(
    ("standings", "expected"),
    [
        ((FLYING, ENDED), COPYING),
        ((ENDED, FLYING), COPYING),
        ((FLYING, FLYING), COPYING),
        ((ENDED, ENDED), DONE),
        ((FLYING, FAILED), FAILS),
        ((FAILING, ENDED), FAILS),
        ((FAILED, ENDED), HAS_FAILED),
        ((Standing(False, True, False, False, void=True), Standing(False, False, False, False)), UNTOLD),
    ],
)
def test_how_an_operation_stands_on_all_ranks(standings: tuple[Standing, ...], expected: Together) -> None:
    """R18, R21: whether any copies, whether all are done, whether any fails; on which rank, or on how many, tells nothing apart."""
    assert together(standings) == expected


@pytest.mark.parametrize(
    ("kept", "dropped", "if_waits_fail", "if_not"),
    [
        (COPYING, DONE, True, True),
        (FAILS, HAS_FAILED, True, True),
        (COPYING, FAILS, True, False),
        (COPYING, HAS_FAILED, True, False),
        (COPYING, UNTOLD, False, False),
        (COPYING, COPYING._replace(failed=True), False, False),
        (FAILS, COPYING, False, False),
        (FAILS, DONE, False, False),
        (DONE, COPYING, False, False),
        (DONE, HAS_FAILED, False, False),
        (UNTOLD, HAS_FAILED, False, False),
    ],
)
def test_which_of_two_is_followed(kept: Together, dropped: Together, *, if_waits_fail: bool, if_not: bool) -> None:
    """R21: the one in which copies go on, if all that the other can do may still come of it; else both."""
    for wait_may_fail, alone in ((True, if_waits_fail), (False, if_not)):
        for order in ((0, 1), (1, 0)):
            states = [(((kept,), (dropped,))[at], 0) for at in order]
            followed = [order[index] for index in latest_together(states, wait_may_fail=wait_may_fail)]
            assert (1 not in followed) is alone


def test_a_state_with_more_faults_stands_for_none_with_fewer() -> None:
    """R21, R22: it may have fewer of them from there on; and rest is to be reached without. Of equal ones that with fewest is followed."""
    assert latest_together([((COPYING,), 1), ((DONE,), 0)], wait_may_fail=True) == [0, 1]
    assert latest_together([((COPYING,), 1), ((DONE,), 1)], wait_may_fail=True) == [0]
    assert latest_together([((DONE,), 1), ((DONE,), 0), ((DONE,), 0)], wait_may_fail=True) == [1]
    assert latest_together([((COPYING, DONE), 0), ((DONE, COPYING), 0)], wait_may_fail=True) == [0, 1]
