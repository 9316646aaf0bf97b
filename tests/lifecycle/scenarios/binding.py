"""The insert binds a reservation to its node, in whole or in part (R12, R13)."""

from __future__ import annotations

import pytest

from cphicache.lifecycle import Input, LifecycleError, Trigger
from tests.lifecycle.scenarios.book import COMMIT_CALLS, END_CALLS, B, C, L, N, R, Worlds, columns, is_blank, scenario

BINDS = (Trigger.BIND, Trigger.BIND_DUPLICATE_PART, Trigger.BIND_DUPLICATE_WHOLE)
NODE_7 = Input(target="node7", pages=2)


@scenario
def bound_while_reserved(worlds: Worlds) -> None:
    """R12: a bind before the first layer attaches the node and leaves the backup reserved; the rest goes on."""
    world = worlds()
    record = world.at(R, bound=False)
    world.fire(record, Trigger.BIND, NODE_7)
    assert (record.state, record.bound) == (R, True)
    assert world.took() == ["attach 1 node7"]
    world.store_all(record)
    world.fire(record, Trigger.FORWARD_ENDED)
    world.fire(record, Trigger.AGREED)
    assert record.state is C


@scenario
def bound_in_flight(worlds: Worlds) -> None:
    """R12: a bind between layers, or after the number, attaches the node and does not commit."""
    for numbered in (False, True):
        for parent in (False, True):
            world = worlds()
            record = world.at(L, bound=False, numbered=numbered)
            world.parent_committed_is = parent
            world.fire(record, Trigger.BIND, NODE_7)
            assert (record.state, record.bound, record.agreed) == (L, True, False)
            assert world.took() == ["attach 1 node7"]


@scenario
def bound_after_agreement_commits(worlds: Worlds) -> None:
    """R13: an agreed reservation commits with its bind, attached first."""
    world = worlds()
    record = world.at(L, bound=False, numbered=True, agreed=True)
    world.fire(record, Trigger.BIND, NODE_7)
    assert (record.state, record.bound) == (C, True)
    assert world.took() == ["attach 1 node7", *COMMIT_CALLS]


@scenario
def bound_after_agreement_under_a_pending_parent(worlds: Worlds) -> None:
    """R13: bound and agreed, it still waits for its parent, and commits with it."""
    world = worlds()
    record = world.at(L, bound=False, numbered=True, agreed=True)
    world.parent_committed_is = False
    world.fire(record, Trigger.BIND, NODE_7)
    assert (record.state, record.bound) == (L, True)
    assert world.took() == ["attach 1 node7"]
    world.fire(record, Trigger.PARENT_COMMITTED)
    assert (record.state, world.took()) == (C, COMMIT_CALLS)


@scenario
def bound_after_the_rollback(worlds: Worlds) -> None:
    """R12: a bind of a rolled-back reservation is stale: no hold is taken and its end stays the same."""
    for trigger in (Trigger.BIND, Trigger.BIND_DUPLICATE_PART):
        world = worlds()
        record = world.at(B, bound=False, numbered=True)
        assert world.fire(record, trigger, NODE_7) == "rolled_back"
        assert (record.state, record.bound, world.took()) == (B, False, [])
    assert world.fire(record, Trigger.BIND_DUPLICATE_WHOLE) == "already_rolled_back"
    world.fire(record, Trigger.AGREED)
    assert world.took() == END_CALLS


@scenario
def bound_once_only(worlds: Worlds) -> None:
    """R12: a reservation has one node: a second bind of any kind is our bug, and takes no second hold."""
    for trigger in BINDS:
        world = worlds()
        for record in (world.at(R), world.at(L), world.at(L, numbered=True), world.at(L, numbered=True, agreed=True), world.at(C)):
            before = columns(record)
            with pytest.raises(LifecycleError, match="bound once already"):
                world.fire(record, trigger, NODE_7)
            assert (columns(record), world.took()) == (before, [])
        with pytest.raises(LifecycleError, match="nothing is reserved"):
            world.fire(world.at(N, bound=False), trigger, NODE_7)


@scenario
def duplicate_part_while_reserved(worlds: Worlds) -> None:
    """R12: the head that is in the tree already is freed at once while nothing is copied; the rest stays one backup."""
    world = worlds()
    record = world.at(R, bound=False)
    world.fire(record, Trigger.BIND_DUPLICATE_PART, Input(pages=2))
    assert (record.state, record.bound, record.wasted_pages) == (R, False, 0)
    assert world.took() == ["shrink 1 2 now"]


@scenario
def duplicate_part_in_flight(worlds: Worlds) -> None:
    """R12: in flight the head's slots drain with the operation and count as wasted, once for each cut."""
    for numbered in (False, True):
        world = worlds()
        record = world.at(L, bound=False, numbered=numbered)
        world.fire(record, Trigger.BIND_DUPLICATE_PART, Input(pages=2))
        world.fire(record, Trigger.BIND_DUPLICATE_PART, Input(pages=1))
        assert (record.state, record.bound, record.wasted_pages) == (L, False, 3)
        assert world.took() == ["shrink 1 2 at_end", "shrink 1 1 at_end"]
        world.fire(record, Trigger.ABORT)
        world.fire(record, Trigger.AGREED)
        assert is_blank(record)


@scenario
def duplicate_part_after_agreement(worlds: Worlds) -> None:
    """R12: after agreement no copy is in flight, so the head's slots are freed at once; then the rest is bound."""
    world = worlds()
    record = world.at(L, bound=False, numbered=True, agreed=True)
    world.fire(record, Trigger.BIND_DUPLICATE_PART, Input(pages=2))
    assert (record.state, record.bound, record.wasted_pages) == (L, False, 0)
    world.fire(record, Trigger.BIND, NODE_7)
    assert record.state is C
    assert world.took() == ["shrink 1 2 now", "attach 1 node7", *COMMIT_CALLS]
