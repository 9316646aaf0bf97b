"""Layers reported and copied, the end of the forward, and this rank's completions (R10, R11, R21, R22)."""

from __future__ import annotations

from itertools import permutations

import pytest

from cphicache.lifecycle import Input, LifecycleError, Trigger
from tests.lifecycle.recorder import ALL_LAYERS
from tests.lifecycle.scenarios.book import B, C, L, N, R, Worlds, columns, is_blank, scenario


@scenario
def happy_path(worlds: Worlds) -> None:
    """R10: reserve, four layers one by one, one number, agreement, commit; every call once and in this order."""
    world = worlds()
    record = world.record()
    world.fire(record, Trigger.RESERVE)
    for payload, layer in ALL_LAYERS:
        assert world.store(record, payload, layer) is None
        assert record.state is L
    world.fire(record, Trigger.FORWARD_ENDED)
    world.fire(record, Trigger.COPY_DONE)
    assert (record.state, record.number, record.agreed) == (L, 0, False)
    world.fire(record, Trigger.AGREED)
    assert (record.state, record.number, record.agreed) == (C, 0, True)
    assert record.watermarks() == [(3, 3), (1, 1)]
    assert world.took() == [
        "reserve_slots 1",
        "copy_layers 1 0 0",
        "copy_layers 1 0 1",
        "copy_layers 1 0 2",
        "copy_layers 1 1 0",
        "take_number 1",
        "commit 1",
        "commit_children 1",
        "wake 1",
    ]


@scenario
def all_layers_at_once(worlds: Worlds) -> None:
    """R11: KV that is stored already takes the same path with all layers of a payload in one report."""
    world = worlds()
    record = world.at(R)
    world.store_all(record)
    world.fire(record, Trigger.FORWARD_ENDED)
    assert world.took() == ["copy_layers 1 0 0 1 2", "copy_layers 1 1 0", "take_number 1"]
    assert (record.state, record.submitted) == (L, (0b111, 0b1))


@scenario
def layers_in_any_order(worlds: Worlds) -> None:
    """R11: the order of the reports does not matter: each order submits each layer once and ends complete."""
    for order in permutations(ALL_LAYERS):
        world = worlds()
        record = world.at(R)
        for payload, layer in order:
            world.store(record, payload, layer)
        world.fire(record, Trigger.FORWARD_ENDED)
        assert (record.state, record.submitted) == (L, (0b111, 0b1))
        assert world.took() == [f"copy_layers 1 {payload} {layer}" for payload, layer in order] + ["take_number 1"]


@scenario
def layer_twice_is_a_no_op(worlds: Worlds) -> None:
    """R11: a layer that was submitted already answers layer_twice; the draft's layer 0 is not the target's."""
    world = worlds()
    record = world.at(R)
    world.store(record, 0, 0)
    assert world.store(record, 0, 0) == "layer_twice"
    assert world.store(record, 1, 0) is None
    assert world.store(record, 1, 0) == "layer_twice"
    assert world.took() == ["copy_layers 1 0 0", "copy_layers 1 1 0"]
    assert record.watermarks() == [(1, 0), (1, 0)]


@scenario
def layer_again_among_new_ones(worlds: Worlds) -> None:
    """R11: of a report that repeats a layer beside new ones, only the new ones are copied."""
    world = worlds()
    record = world.at(R)
    world.store(record, 0, 1)
    world.store(record, 0, 0, 1, 2)
    assert world.took() == ["copy_layers 1 0 1", "copy_layers 1 0 0 2"]
    assert record.submitted == (0b111, 0)


@scenario
def layer_too_late(worlds: Worlds) -> None:
    """R7: a layer for a backup that is not pending any more (or yet) is stale under its own name and copies nothing."""
    for state, name in ((N, "not_pending"), (C, "already_committed"), (B, "rolled_back")):
        world = worlds()
        record = world.at(state, numbered=state is B)
        assert world.store(record, 0, 1) == name
        assert (record.state, world.took()) == (state, [])


@scenario
def no_layer_by_the_end_of_the_forward(worlds: Worlds) -> None:
    """R14: a reservation without any layer takes no number and is freed in the step in which its forward ends."""
    world = worlds()
    record = world.at(R)
    world.fire(record, Trigger.FORWARD_ENDED)
    assert world.took() == ["lose_children 1", "drain_now 1", "release 1", "wake 1"]
    assert is_blank(record)
    assert world.next_number == 0


@scenario
def draft_missing_at_the_end_of_the_forward(worlds: Worlds) -> None:
    """R11: without the draft's layers the backup rolls back under the next number and is never committed."""
    world = worlds()
    record = world.at(R)
    world.store(record, 0, 0, 1, 2)
    world.fire(record, Trigger.FORWARD_ENDED)
    assert (record.state, record.number) == (B, 0)
    world.fire(record, Trigger.AGREED)
    assert is_blank(record)
    assert world.took() == ["copy_layers 1 0 0 1 2", "take_number 1", "lose_children 1", "release 1", "wake 1"]


@scenario
def forward_ends_once(worlds: Worlds) -> None:
    """R21: the number is taken once; a second end of the forward is our bug, a late one after a rollback is stale."""
    world = worlds()
    record = world.at(L, numbered=True)
    for _ in range(2):
        with pytest.raises(LifecycleError, match="ends once"):
            world.fire(record, Trigger.FORWARD_ENDED)
    assert (record.number, world.count("take_number")) == (0, 1)
    world.fire(record, Trigger.ABORT)
    assert world.fire(record, Trigger.FORWARD_ENDED) == "rolled_back"
    assert (record.number, world.count("take_number")) == (0, 1)
    assert world.fire(world.record(2), Trigger.FORWARD_ENDED) == "not_pending"


@scenario
def numbers_follow_the_ends_of_the_forwards(worlds: Worlds) -> None:
    """R21: numbers are given where the forward ends, whatever the order in which reservations and layers came."""
    world = worlds()
    first, second, third = (world.at(R, node_id=node_id) for node_id in (1, 2, 3))
    world.store_all(third)
    world.store_all(first)
    world.store(second, 0, 0)
    for record in (first, second, third):
        world.fire(record, Trigger.FORWARD_ENDED)
    assert [record.number for record in (first, second, third)] == [0, 1, 2]
    assert [record.state for record in (first, second, third)] == [L, B, L]


@scenario
def a_copy_done_here_decides_nothing(worlds: Worlds) -> None:
    """R21: this rank's completion is remembered for the next sample and changes neither state, number nor agreement."""
    for state, agreed in ((L, False), (L, True), (B, False)):
        world = worlds()
        record = world.at(state, numbered=True, agreed=agreed)
        assert record.confirmed == (0, 0)
        assert world.fire(record, Trigger.COPY_DONE) is None
        assert (record.state, record.number, record.agreed, world.took()) == (state, 0, agreed, [])
        assert record.watermarks() == [(3, 3), (1, 1)]


@scenario
def a_copy_done_before_the_rest_is_submitted(worlds: Worlds) -> None:
    """R10: what is confirmed is what was submitted by then; a later layer is confirmed by its own completion."""
    world = worlds()
    record = world.at(L, partly=True)
    world.fire(record, Trigger.COPY_DONE)
    world.store(record, 0, 1)
    assert record.watermarks() == [(2, 1), (0, 0)]
    world.fire(record, Trigger.COPY_DONE)
    assert record.watermarks() == [(2, 2), (0, 0)]


@scenario
def a_copy_failed_here_decides_nothing(worlds: Worlds) -> None:
    """R22: this rank's failure is only remembered: layers go on, the number is taken, and the ranks decide."""
    world = worlds()
    record = world.at(L, partly=True)
    world.fire(record, Trigger.COPY_FAILED)
    assert (record.state, record.failed_here) == (L, True)
    world.store(record, 0, 1, 2)
    world.store(record, 1, 0)
    world.fire(record, Trigger.FORWARD_ENDED)
    assert (record.state, record.number, record.failed_here) == (L, 0, True)
    assert world.took() == ["copy_layers 1 0 1 2", "copy_layers 1 1 0", "take_number 1"]


@scenario
def a_copy_failed_here_while_rolled_back(worlds: Worlds) -> None:
    """R22: a failure during the drain is remembered too, and forgotten with the operation."""
    world = worlds()
    record = world.at(B, numbered=True)
    world.fire(record, Trigger.COPY_FAILED)
    assert (record.state, record.failed_here, world.took()) == (B, True, [])
    world.fire(record, Trigger.AGREED)
    assert is_blank(record)


@scenario
def a_completion_of_an_older_generation(worlds: Worlds) -> None:
    """R18: a completion after the operation's end has a name and changes nothing."""
    for trigger in (Trigger.COPY_DONE, Trigger.COPY_FAILED):
        world = worlds()
        record = world.at(B, numbered=True)
        world.fire(record, Trigger.AGREED)
        before = columns(record)
        world.took()
        assert world.fire(record, trigger, Input(reason="late")) == "stale_generation"
        assert (columns(record), world.took()) == (before, [])
