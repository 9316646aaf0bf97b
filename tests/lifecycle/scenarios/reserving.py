"""Reservations, refusals and hits (R9, R15, R16, R19)."""

from __future__ import annotations

import pytest

from cphicache.lifecycle import Input, LifecycleError, Trigger
from tests.lifecycle.scenarios.book import B, C, L, N, R, Worlds, columns, scenario


@scenario
def reserve_queues_no_copy(worlds: Worlds) -> None:
    """R9: a reservation takes slots and a generation, and neither copies nor takes a number."""
    world = worlds()
    record = world.record()
    assert world.fire(record, Trigger.RESERVE) is None
    assert record.state is R
    assert world.took() == ["reserve_slots 1"]
    assert (record.generation, record.number, record.watermarks()) == (1, None, [(0, 0), (0, 0)])


@scenario
def host_full_evict_and_retry_succeeds(worlds: Worlds) -> None:
    """R16: without room, victims that suffice are evicted and the second reservation succeeds."""
    world = worlds()
    world.room_is = False
    record = world.record()
    world.fire(record, Trigger.RESERVE)
    assert world.took() == ["evict_host 1", "reserve_again 1", "reserve_slots 1"]
    assert (record.state, record.generation) == (R, 1)


@scenario
def host_full_second_try_fails(worlds: Worlds) -> None:
    """R16: when the second reservation fails as well (a fault at the port), the node stays as it was, refused once."""
    world = worlds()
    world.room_is = world.eviction_makes_room = False
    record = world.record()
    before = columns(record)
    world.fire(record, Trigger.RESERVE)
    assert world.took() == ["evict_host 1", "reserve_again 1", "refuse 1"]
    assert columns(record) == before


@scenario
def host_full_reservation_fails_after_eviction(worlds: Worlds) -> None:
    """R16: a fault of the second reservation itself leaves DEVICE_VALID_HOST_NONE and nothing to release."""
    world = worlds()
    world.room_is = world.automatic = False
    record = world.record()
    world.fire(record, Trigger.RESERVE)
    world.faults = {"reserve_slots"}
    with pytest.raises(RuntimeError, match="reserve_slots"):
        world.fire(record, Trigger.RESERVE_RETRY)
    assert (record.state, record.generation) == (N, 0)
    assert world.took() == ["evict_host 1", "reserve_again 1"]


@scenario
def refused_when_unfit(worlds: Worlds) -> None:
    """R15: a node that may not be backed up now is refused without asking for room, evicting or reserving."""
    for room in (True, False):
        world = worlds()
        world.fit_is, world.room_is = False, room
        record = world.record()
        world.fire(record, Trigger.RESERVE, Input(reason="parent_not_backed"))
        assert world.took() == ["refuse 1 parent_not_backed"]
        assert (record.state, record.generation) == (N, 0)


@scenario
def refused_without_victims(worlds: Worlds) -> None:
    """R16: when the victims together do not suffice, nothing is evicted and the refusal is logged once."""
    world = worlds()
    world.room_is = world.victims_suffice_is = False
    record = world.record()
    world.fire(record, Trigger.RESERVE, Input(reason="host_full"))
    assert world.took() == ["refuse 1 host_full"]
    assert record.state is N


@scenario
def refused_and_tried_again(worlds: Worlds) -> None:
    """R15: a refused or rolled-back node can be reserved again, each time under a new generation."""
    world = worlds()
    record = world.record()
    world.fit_is = False
    world.fire(record, Trigger.RESERVE)
    world.fit_is = True
    world.fire(record, Trigger.RESERVE)
    world.fire(record, Trigger.ABORT)
    world.fire(record, Trigger.RESERVE)
    assert (record.state, record.generation) == (R, 2)
    assert world.count("refuse") == 1
    assert world.count("reserve_slots") == 2


@scenario
def reserve_once_only(worlds: Worlds) -> None:
    """R7: a pending reservation is not reserved again; a committed or draining node answers why it is not."""
    for state in (R, L):
        world = worlds()
        record = world.at(state)
        with pytest.raises(LifecycleError, match="reserved once already"):
            world.fire(record, Trigger.RESERVE)
        assert world.took() == []
    world = worlds()
    assert world.fire(world.at(C), Trigger.RESERVE) == "already_backed"
    assert world.fire(world.at(B, numbered=True), Trigger.RESERVE) == "still_draining"
    assert world.took() == []


@scenario
def hits_are_counted_in_every_state(worlds: Worlds) -> None:
    """R19: a hit raises the hit count and starts nothing, whatever the backup is doing; the count outlives the backup."""
    for state, numbered in ((N, False), (R, False), (L, False), (L, True), (C, True), (B, True)):
        world = worlds()
        record = world.at(state, numbered=numbered, agreed=state is C)
        for hits in (1, 2):
            assert world.fire(record, Trigger.HIT) is None
            assert (record.state, record.hits) == (state, hits)
        assert world.took() == []
    world.fire(record, Trigger.AGREED)
    assert (record.state, record.hits) == (N, 2)
