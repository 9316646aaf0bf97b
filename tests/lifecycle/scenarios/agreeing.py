"""Agreement between the ranks, and parents first (R13, R14, R15, R21, R22)."""

from __future__ import annotations

from itertools import pairwise

import pytest

from cphicache.lifecycle import LifecycleError, Trigger
from tests.lifecycle.scenarios.book import COMMIT_CALLS, END_CALLS, B, C, L, N, R, Worlds, columns, is_blank, scenario


@scenario
def agreed_and_bound_commits(worlds: Worlds) -> None:
    """R13: a bound backup under a committed parent commits in the step in which it is agreed."""
    world = worlds()
    record = world.at(L, numbered=True)
    world.fire(record, Trigger.AGREED)
    assert (record.state, record.agreed, record.number) == (C, True, 0)
    assert world.took() == COMMIT_CALLS


@scenario
def agreed_under_a_pending_parent_waits(worlds: Worlds) -> None:
    """R13: an agreed backup under a pending parent stays in flight and commits with its parent."""
    world = worlds()
    world.parent_committed_is = False
    record = world.at(L, numbered=True)
    world.fire(record, Trigger.AGREED)
    assert (record.state, record.agreed, world.took()) == (L, True, [])
    world.fire(record, Trigger.PARENT_COMMITTED)
    assert (record.state, world.took()) == (C, COMMIT_CALLS)


@scenario
def agreed_before_it_is_bound_waits(worlds: Worlds) -> None:
    """R13: an agreed reservation that is not bound yet stays in flight, whatever its parent is."""
    for parent in (True, False):
        world = worlds()
        record = world.at(L, bound=False, numbered=True)
        world.parent_committed_is = parent
        world.fire(record, Trigger.AGREED)
        assert (record.state, record.agreed, world.took()) == (L, True, [])


@scenario
def parent_committed_comes_too_early(worlds: Worlds) -> None:
    """R15: the parent's commit alone commits nothing: not before agreement, not before the bind."""
    for bound in (True, False):
        for state, numbered in ((R, False), (L, False), (L, True)):
            world = worlds()
            record = world.at(state, bound=bound, numbered=numbered)
            assert world.fire(record, Trigger.PARENT_COMMITTED) == "not_agreed_yet"
            assert (record.state, world.took()) == (state, [])
    world = worlds()
    record = world.at(L, bound=False, numbered=True, agreed=True)
    assert world.fire(record, Trigger.PARENT_COMMITTED) == "not_bound_yet"
    assert (record.state, world.took()) == (L, [])


@scenario
def parent_committed_comes_too_late(worlds: Worlds) -> None:
    """R15: a node that is not pending, or draining, does not care; one that committed before its parent is our bug."""
    world = worlds()
    assert world.fire(world.at(N), Trigger.PARENT_COMMITTED) == "not_pending"
    assert world.fire(world.at(B, numbered=True), Trigger.PARENT_COMMITTED) == "rolled_back"
    with pytest.raises(LifecycleError, match="committed before its parent"):
        world.fire(world.at(C), Trigger.PARENT_COMMITTED)
    assert world.took() == []


@scenario
def a_chain_commits_parents_first(worlds: Worlds) -> None:
    """R15: chunks that are agreed before their parents commit after them, in one step, each once."""
    world = worlds()
    world.parent_committed_is = False
    records = [world.at(L, numbered=True, node_id=node_id) for node_id in (1, 2, 3)]
    for parent, child in pairwise(records):
        world.adopt(parent, child)
    world.fire(records[2], Trigger.AGREED)
    world.fire(records[1], Trigger.AGREED)
    assert world.took() == []
    world.parent_committed_is = True
    world.fire(records[0], Trigger.AGREED)
    assert [call for call in world.took() if call.startswith("commit ")] == ["commit 1", "commit 2", "commit 3"]
    assert {record.state for record in records} == {C}
    assert world.answers == []


@scenario
def a_lost_parent_loses_its_pending_children(worlds: Worlds) -> None:
    """R15: a rollback takes the whole pending chain below with it, each node once and each with a number of its own."""
    world = worlds()
    first = world.at(L, numbered=True, node_id=1)
    second = world.at(L, partly=True, node_id=2)
    third = world.at(R, node_id=3)
    world.adopt(first, second)
    world.adopt(second, third)
    world.fire(first, Trigger.AGREED_FAILED)
    assert [first.state, second.state, third.state] == [B, B, N]
    assert [first.number, second.number, third.number] == [0, 1, None]
    assert world.took() == [
        "lose_children 1",
        "take_number 2",
        "lose_children 2",
        "lose_children 3",
        "drain_now 3",
        "release 3",
        "wake 3",
    ]
    world.fire(first, Trigger.AGREED)
    world.fire(second, Trigger.AGREED)
    assert is_blank(first)
    assert is_blank(second)


@scenario
def failure_agreed_rolls_back(worlds: Worlds) -> None:
    """R22: a failure that the ranks agreed on rolls back under the number it has; slots return when that is passed."""
    for bound in (True, False):
        world = worlds()
        record = world.at(L, bound=bound, numbered=True)
        world.fire(record, Trigger.AGREED_FAILED)
        assert (record.state, record.number) == (B, 0)
        assert world.took() == ["lose_children 1"]
        assert world.fire(record, Trigger.AGREED_FAILED) == "already_rolled_back"
        world.fire(record, Trigger.AGREED)
        assert is_blank(record)
        assert world.took() == END_CALLS
        assert world.next_number == 1


@scenario
def failure_agreed_needs_an_open_number(worlds: Worlds) -> None:
    """R21: only an operation with a number that is not passed yet can be the first failed one."""
    world = worlds()
    numberless = [world.at(N), world.at(R), world.at(L)]
    passed = [world.at(L, numbered=True, agreed=True), world.at(C)]
    for records, text in ((numberless, "it has no number"), (passed, "its number was passed already")):
        for record in records:
            before = columns(record)
            with pytest.raises(LifecycleError, match=text):
                world.fire(record, Trigger.AGREED_FAILED)
            assert columns(record) == before
    assert world.took() == []


@scenario
def agreement_needs_an_open_number(worlds: Worlds) -> None:
    """R21: an operation is agreed once, and only with a number; else nothing changes and it is our bug."""
    for bound in (True, False):
        world = worlds()
        numberless = [world.at(N, bound=bound), world.at(R, bound=bound), world.at(L, bound=bound), world.at(B, bound=bound)]
        passed = [world.at(state, bound=bound, numbered=True, agreed=True) for state in (L, B)]
        for records, text in ((numberless, "it has no number"), (passed, "its number was passed already")):
            for record in records:
                before = columns(record)
                with pytest.raises(LifecycleError, match=text):
                    world.fire(record, Trigger.AGREED)
                assert columns(record) == before
        assert world.took() == []
    world = worlds()
    with pytest.raises(LifecycleError, match="its number was passed already"):
        world.fire(world.at(C), Trigger.AGREED)


@scenario
def a_rolled_back_backup_ends_when_agreed(worlds: Worlds) -> None:
    """R14: slots and hold of a rolled-back backup are released once, when every rank has passed its number."""
    for partly in (True, False):
        world = worlds()
        record = world.at(L, partly=partly)
        world.fire(record, Trigger.ABORT)
        world.fire(record, Trigger.COPY_DONE)
        assert (record.state, world.count("release")) == (B, 0)
        world.took()
        world.fire(record, Trigger.AGREED)
        assert is_blank(record)
        assert world.took() == END_CALLS
