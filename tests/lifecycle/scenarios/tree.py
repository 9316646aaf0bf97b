"""Splits, eviction and load-back (R17, R16, R25, R27)."""

from __future__ import annotations

import pytest

from cphicache.lifecycle import Input, LifecycleError, Trigger
from tests.lifecycle.scenarios.book import B, C, L, N, R, Worlds, columns, is_blank, scenario

PENDING_COLUMNS = (
    (R, False, False),
    (L, False, False),
    (L, True, False),
    (L, True, True),
    (B, True, False),
)


@scenario
def split_wanted_while_pending_is_deferred(worlds: Worlds) -> None:
    """R17: the split of a pending node is noted with who waits, in every pending state, and changes nothing."""
    for state, numbered, agreed in PENDING_COLUMNS:
        world = worlds()
        record = world.at(state, numbered=numbered, agreed=agreed)
        before = columns(record)
        assert world.fire(record, Trigger.SPLIT_WANTED, Input(who="request-5")) is None
        assert world.took() == ["defer_split 1 request-5"]
        assert columns(record) == before


@scenario
def split_wanted_otherwise_splits_at_once(worlds: Worlds) -> None:
    """R17: a node that is not pending need not wait: the answer says so and nothing is deferred."""
    for state in (N, C):
        world = worlds()
        assert world.fire(world.at(state), Trigger.SPLIT_WANTED) == "splits_at_once"
        assert world.took() == []


@scenario
def split_forks_what_is_held(worlds: Worlds) -> None:
    """R17: a split divides what the node holds, before and after a backup, and keeps the state."""
    for state in (N, C):
        world = worlds()
        record = world.at(state)
        before = columns(record)
        assert world.fire(record, Trigger.SPLIT, Input(pages=3)) is None
        assert world.took() == ["fork 1 3"]
        assert columns(record) == before


@scenario
def split_while_pending_is_our_bug(worlds: Worlds) -> None:
    """R17: the tree is never divided under a pending backup."""
    for state, numbered, agreed in PENDING_COLUMNS:
        world = worlds()
        record = world.at(state, numbered=numbered, agreed=agreed)
        with pytest.raises(LifecycleError, match="split while"):
            world.fire(record, Trigger.SPLIT, Input(pages=3))
        assert (record.state, world.took()) == (state, [])


@scenario
def split_after_the_commit_that_woke_it(worlds: Worlds) -> None:
    """R17: deferred in flight, woken by the commit, the split then divides the committed copy."""
    world = worlds()
    record = world.at(L, numbered=True)
    world.fire(record, Trigger.SPLIT_WANTED, Input(who="request-5"))
    world.fire(record, Trigger.AGREED)
    world.fire(record, Trigger.SPLIT, Input(pages=1))
    assert record.state is C
    assert world.took() == ["defer_split 1 request-5", "commit 1", "commit_children 1", "wake 1", "fork 1 1"]


@scenario
def device_evicted(worlds: Worlds) -> None:
    """R27: device pages go from a node without a backup and from a committed one, which keeps its host copy."""
    for state in (N, C):
        world = worlds()
        record = world.at(state)
        before = columns(record)
        assert world.fire(record, Trigger.DEVICE_EVICT) is None
        assert world.took() == ["drop_device 1"]
        assert columns(record) == before


@scenario
def device_pages_of_a_pending_backup_stay(worlds: Worlds) -> None:
    """R27: pages that a copy reads (or will read) are never evicted."""
    for state, numbered, agreed in PENDING_COLUMNS:
        world = worlds()
        record = world.at(state, numbered=numbered, agreed=agreed)
        with pytest.raises(LifecycleError, match="evicted while its copy reads the pages"):
            world.fire(record, Trigger.DEVICE_EVICT)
        assert (record.state, world.took()) == (state, [])


@scenario
def host_evicted_when_host_only(worlds: Worlds) -> None:
    """R16: the host copy of a host-only node is evicted and nothing of the operation is left; on the device it is no victim."""
    world = worlds()
    record = world.at(C)
    with pytest.raises(LifecycleError, match="reclaimed, not evicted"):
        world.fire(record, Trigger.HOST_EVICT)
    assert (record.state, world.took()) == (C, [])
    world.on_device_is = False
    world.fire(record, Trigger.HOST_EVICT)
    assert world.took() == ["release_host 1"]
    assert is_blank(record)


@scenario
def reclaimed_when_on_the_device(worlds: Worlds) -> None:
    """R16: the host copy of a node that is on the device is reclaimed, and the node can be backed up again."""
    world = worlds()
    world.on_device_is = False
    record = world.at(C)
    with pytest.raises(LifecycleError, match="evicted, not reclaimed"):
        world.fire(record, Trigger.RECLAIM)
    assert (record.state, world.took()) == (C, [])
    world.on_device_is = True
    world.fire(record, Trigger.RECLAIM)
    assert is_blank(record)
    world.fire(record, Trigger.RESERVE)
    assert (record.state, record.generation) == (R, 2)
    assert world.took() == ["release_host 1", "reserve_slots 1"]


@scenario
def only_a_committed_copy_is_taken_or_loaded(worlds: Worlds) -> None:
    """R8: host eviction, reclaim and load-back see COMMITTED nodes only."""
    loads = (Trigger.LOAD_QUEUED, Trigger.LOAD_AGREED, Trigger.LOAD_FAILED, Trigger.LOAD_DRAINED)
    for trigger in (Trigger.HOST_EVICT, Trigger.RECLAIM, *loads):
        for on_device in (True, False):
            for state, numbered, agreed in ((N, False, False), *PENDING_COLUMNS):
                world = worlds()
                world.on_device_is = on_device
                record = world.at(state, numbered=numbered, agreed=agreed)
                with pytest.raises(LifecycleError, match=r"only a committed node is loaded|not committed|nothing on the host"):
                    world.fire(record, trigger)
                assert (record.state, world.took()) == (state, [])


@scenario
def loaded_back(worlds: Worlds) -> None:
    """R25: a load-back is published when queued and ended when every rank has passed it; the host copy stays."""
    world = worlds()
    record = world.at(C)
    before = columns(record)
    world.fire(record, Trigger.LOAD_QUEUED)
    assert world.took() == ["begin_load 1"]
    world.fire(record, Trigger.LOAD_AGREED)
    assert world.took() == ["end_load 1"]
    assert columns(record) == before


@scenario
def a_failed_load_drains(worlds: Worlds) -> None:
    """R25: a failed load keeps pages and pins until its drain is agreed; only then is it undone."""
    world = worlds()
    record = world.at(C)
    before = columns(record)
    world.fire(record, Trigger.LOAD_QUEUED)
    world.fire(record, Trigger.LOAD_FAILED)
    assert world.took() == ["begin_load 1", "fail_load 1"]
    world.fire(record, Trigger.LOAD_DRAINED)
    assert world.took() == ["undo_load 1"]
    assert columns(record) == before
