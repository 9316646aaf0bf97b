"""Digests of the engine's state: what of it each part tells, and what none does (R20)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from cphicache.engine.records import LoadState, Parked, Waiter
from cphicache.engine.state import CacheState
from cphicache.lifecycle import State
from cphicache.spaces.types import LogicalPage
from cphicache.tree import RadixKey
from tests.engine.test_image import cache_of, committed, extent, heir, load, pending, plain, put, put_state, rich_state

Change = Callable[[CacheState], object]
TREE, STATES, LEDGER, ALLOCATOR = "tree", "states", "ledger", "allocator"


def in_tree(change: Callable[[CacheState, Any], object]) -> Change:
    """A change that is told the node of the one that is on the device alone."""
    return lambda state: change(state, plain(state).node)


SHOWS: dict[str, tuple[str, Change]] = {
    "lock": (TREE, in_tree(lambda state, node: state.tree.lock(node))),
    "hold": (TREE, lambda state: state.tree.hold_host(committed(state).node, 1)),  # type: ignore[arg-type]
    "page": (TREE, in_tree(lambda state, node: node.pages.__setitem__(0, LogicalPage(9)))),
    "off the device": (TREE, lambda state: setattr(committed(state).node, "pages", None)),
    "tokens": (TREE, in_tree(lambda state, node: setattr(node, "key", RadixKey.of([8, 8], 2)))),
    "namespace": (TREE, in_tree(lambda state, node: setattr(node, "key", RadixKey.of([2, 2], 2, "other")))),
    "parent": (TREE, in_tree(lambda state, node: setattr(node, "parent", committed(state).node))),
    "backup state": (STATES, put(committed, "state", State.DEVICE_VALID_HOST_NONE)),
    "hits": (STATES, put(plain, "hits", 7)),
    "loading": (STATES, in_tree(lambda state, node: setattr(node, "loading", 1))),
    "generation": (STATES, put(extent, "generation", 9)),
    "number of a backup": (STATES, put(extent, "number", 9)),
    "bound": (STATES, put(heir, "bound", True)),
    "agreed": (STATES, put(extent, "agreed", True)),
    "submitted": (STATES, put(extent, "submitted", (0, 1))),
    "need": (STATES, put(extent, "need", (4, 0))),
    "wasted": (STATES, put(extent, "wasted_need", (2, 0))),
    "state of an extent": (STATES, put(heir, "state", State.ROLLED_BACK)),
    "node of an extent": (STATES, put(heir, "node_id", 77)),
    "numbered backup": (STATES, lambda state: state.numbered.pop(21)),
    "numbered other": (STATES, lambda state: state.numbered.update({21: pending(state)})),
    "numbered load-back": (STATES, lambda state: state.numbered.pop(22)),
    "resolved": (STATES, put_state("resolved", 19)),
    "next number": (STATES, put_state("next_number", 90)),
    "next generation": (STATES, put_state("next_generation", 90)),
    "next load-back": (STATES, put_state("next_load_id", 90)),
    "outstanding": (STATES, put_state("outstanding", True)),
    "quarantined": (STATES, put_state("quarantined", "rank 1 has gone")),
    "load-back": (STATES, put(load, "load_id", 9)),
    "last of a load-back": (STATES, lambda state: setattr(load(state), "last", committed(state).node)),
    "pages of a load-back": (STATES, put(load, "pages", 2)),
    "number of a load-back": (STATES, put(load, "number", 9)),
    "state of a load-back": (STATES, put(load, "state", LoadState.FAILED)),
    "doomed": (STATES, put(load, "doomed", True)),
    "readers": (STATES, put(load, "readers", {"q"})),
    "waiters": (STATES, lambda state: state.waiters.update(q=Waiter("q", 0, 44))),
    "parked": (STATES, lambda state: state.parked.update(q=Parked("q", RadixKey.of([6, 6], 2), [], 45))),
    "retries": (STATES, lambda state: state.retries.clear()),
    "slots": (LEDGER, lambda state: state.ledger.take((2, 0))),
    "slots of another rank": (LEDGER, lambda state: state.ledger.take((0, 2))),
    "free pages": (ALLOCATOR, lambda state: state.alloc.alloc(1, None)),
}
"""What ranks must have in common, and the part of the digest that tells it."""

LOCAL: dict[str, Change] = {
    "ended here": put(extent, "done_here", True),
    "failed here": put(extent, "failed_here", True),
    "without slots here": put(extent, "void", True),
    "load-back ended here": put(load, "done_here", True),
    "load-back failed here": put(load, "failed_here", True),
    "reason of the quarantine": put_state("quarantined", None),
    "order of readers": put(load, "readers", {"r"}),
}
"""What may differ between ranks."""


@pytest.mark.parametrize("name", SHOWS)
def test_a_difference_shows_in_its_part_and_in_no_other(name: str) -> None:
    """R20: ranks that differ in anything they share have different digests, and the part says where to look."""
    part, change = SHOWS[name]
    state = rich_state()
    before = cache_of(state).digest()
    assert before == cache_of(rich_state()).digest(), "equal states have equal digests"
    change(state)
    after = cache_of(state).digest()
    assert [each for each in before._fields if getattr(before, each) != getattr(after, each)] == [part]


@pytest.mark.parametrize("name", LOCAL)
def test_what_only_one_rank_knows_shows_in_none(name: str) -> None:
    """R20: how a rank's own copies fare is its own affair until it is agreed."""
    state = rich_state()
    before = cache_of(state).digest()
    LOCAL[name](state)
    assert cache_of(state).digest() == before


def test_why_the_host_tier_was_given_up_does_not_show() -> None:
    """R20, R22: each rank hears of a lost one in its own words."""
    digests = []
    for reason in ("rank 1 has gone", "rank 1 does not answer"):
        state = rich_state()
        state.quarantined = reason
        digests.append(cache_of(state).digest())
    assert digests[0] == digests[1]
