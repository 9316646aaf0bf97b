"""Rollbacks: by abort, reset, a lost parent or a whole duplicate, and how they end (R12, R14, R15, R18)."""

from __future__ import annotations

import pytest

from cphicache.lifecycle import LifecycleError, State, Trigger
from tests.lifecycle.recorder import ALL_LAYERS
from tests.lifecycle.scenarios.book import END_CALLS, B, C, L, N, R, Worlds, columns, enter, is_blank, scenario

AT_ONCE = ["lose_children 1", "drain_now 1", *END_CALLS]

# state, numbered, agreed, partly submitted -> the calls of the step, and the state after it
PENDING_COLUMNS: tuple[tuple[State, bool, bool, bool, list[str], State], ...] = (
    (R, False, False, False, AT_ONCE, N),
    (L, False, False, True, ["take_number 1", "lose_children 1"], B),
    (L, False, False, False, ["take_number 1", "lose_children 1"], B),
    (L, True, False, False, ["lose_children 1"], B),
    (L, True, True, False, AT_ONCE, N),
)


def _gives_up(trigger: Trigger, bounds: tuple[bool, ...], worlds: Worlds) -> None:
    for bound in bounds:
        for state, numbered, agreed, partly, calls, end in PENDING_COLUMNS:
            world = worlds()
            record = world.at(state, bound=bound, numbered=numbered, agreed=agreed, partly=partly)
            assert world.fire(record, trigger) is None
            assert world.took() == calls
            if end is B:
                assert (record.state, record.number) == (B, 0)
                world.fire(record, Trigger.AGREED)
                assert world.took() == END_CALLS
            assert is_blank(record)
            assert record.bound is bound
            assert world.count("release") == world.count("wake") == 1
            assert world.next_number == (0 if state is R else 1)


@scenario
def abort_in_each_state(worlds: Worlds) -> None:
    """R14: an abort ends a pending backup at once when no copy can be in flight, else under its number; else it is stale."""
    _gives_up(Trigger.ABORT, (True, False), worlds)
    world = worlds()
    assert world.fire(world.at(N), Trigger.ABORT) == "nothing_held"
    assert world.fire(world.at(C), Trigger.ABORT) == "already_committed"
    assert world.fire(world.at(B, numbered=True), Trigger.ABORT) == "already_rolled_back"
    assert world.took() == []


@scenario
def parent_lost_in_each_state(worlds: Worlds) -> None:
    """R15: a pending child of a lost parent rolls back in every combination of columns; a committed one is our bug."""
    _gives_up(Trigger.PARENT_LOST, (True, False), worlds)
    world = worlds()
    assert world.fire(world.at(N), Trigger.PARENT_LOST) == "nothing_held"
    assert world.fire(world.at(B, numbered=True), Trigger.PARENT_LOST) == "already_rolled_back"
    with pytest.raises(LifecycleError, match="committed under a parent that is not"):
        world.fire(world.at(C), Trigger.PARENT_LOST)
    assert world.took() == []


@scenario
def reset_in_each_state(worlds: Worlds) -> None:
    """R18: a reset releases whatever is held through the one release path, a committed copy included."""
    _gives_up(Trigger.RESET, (True, False), worlds)
    world = worlds()
    assert world.fire(world.at(N), Trigger.RESET) == "nothing_held"
    assert world.fire(world.at(B, numbered=True), Trigger.RESET) == "already_rolled_back"
    committed = world.at(C)
    assert world.fire(committed, Trigger.RESET) is None
    assert world.took() == ["release_host 1"]
    assert is_blank(committed)


@scenario
def duplicate_whole_in_each_state(worlds: Worlds) -> None:
    """R12: a reservation whose whole extent is in the tree already rolls back, in every combination of columns."""
    _gives_up(Trigger.BIND_DUPLICATE_WHOLE, (False,), worlds)


def _between_any_two_layers(trigger: Trigger) -> None:
    def between(worlds: Worlds) -> None:
        """R14: legal between any two layer reports: later layers are stale, one number is taken, everything returns once."""
        for reports in range(len(ALL_LAYERS) + 1):
            world = worlds()
            record = world.at(R, bound=False)
            for payload, layer in ALL_LAYERS[:reports]:
                world.store(record, payload, layer)
            world.fire(record, trigger)
            copied = world.count("copy_layers")
            late = {world.store(record, payload, layer) for payload, layer in ALL_LAYERS[reports:]}
            assert late <= {"rolled_back" if reports else "not_pending"}
            assert world.fire(record, Trigger.FORWARD_ENDED) == ("rolled_back" if reports else "not_pending")
            assert world.count("copy_layers") == copied == reports
            assert world.count("take_number") == (1 if reports else 0)
            if reports:
                world.fire(record, Trigger.COPY_DONE)
                assert (record.state, world.count("release")) == (B, 0)
                world.fire(record, Trigger.AGREED)
            assert is_blank(record)
            assert world.count("release") == world.count("wake") == world.count("lose_children") == 1

    enter(f"{trigger}_between_any_two_layers", between)


for _trigger in (Trigger.ABORT, Trigger.RESET, Trigger.PARENT_LOST, Trigger.BIND_DUPLICATE_WHOLE):
    _between_any_two_layers(_trigger)


@scenario
def drained_without_a_number(worlds: Worlds) -> None:
    """R14: a rollback of which nothing was submitted ends by itself, with or without the world's help."""
    for bound in (True, False):
        world = worlds()
        record = world.at(B, bound=bound)
        world.fire(record, Trigger.DRAINED)
        assert world.took() == END_CALLS
        assert is_blank(record)


@scenario
def drained_after_agreement(worlds: Worlds) -> None:
    """R14: a rollback of an agreed operation has no copy left anywhere, and ends by itself."""
    world = worlds()
    record = world.at(B, numbered=True, agreed=True)
    world.fire(record, Trigger.DRAINED)
    assert world.took() == END_CALLS
    assert is_blank(record)


@scenario
def drained_before_agreement(worlds: Worlds) -> None:
    """R14: slots return at the agreed tick, never at the local one: a drain before it is our bug and frees nothing."""
    world = worlds()
    record = world.at(B, numbered=True)
    before = columns(record)
    with pytest.raises(LifecycleError, match="in flight on another rank"):
        world.fire(record, Trigger.DRAINED)
    assert (columns(record), world.took()) == (before, [])


@scenario
def quarantined_ends_what_the_group_will_not(worlds: Worlds) -> None:
    """R14, R22: with the group gone a rollback that waits for its number ends by the same release, once, bound or not."""
    for bound in (True, False):
        world = worlds()
        record = world.at(B, numbered=True, bound=bound)
        assert world.fire(record, Trigger.QUARANTINED) is None
        assert world.took() == END_CALLS
        assert is_blank(record)


@scenario
def quarantined_elsewhere_is_our_bug(worlds: Worlds) -> None:
    """R22: a quarantine rolls back first; what has ended, or ends in its own step, is not drained again."""
    for state, columns_of in (
        (N, {}),
        (R, {}),
        (L, {"numbered": True}),
        (C, {}),
        (B, {}),
        (B, {"numbered": True, "agreed": True}),
    ):
        world = worlds()
        record = world.at(state, **columns_of)
        before = columns(record)
        with pytest.raises(LifecycleError):
            world.fire(record, Trigger.QUARANTINED)
        assert (columns(record), world.took()) == (before, [])


@scenario
def released_once(worlds: Worlds) -> None:
    """R14: whoever comes late to a rollback, slots and hold are released once and the waiters are woken once."""
    late = (Trigger.ABORT, Trigger.RESET, Trigger.PARENT_LOST)
    world = worlds()
    record = world.at(L, partly=True)
    world.fire(record, Trigger.ABORT)
    for trigger in (*late, Trigger.AGREED_FAILED, Trigger.BIND_DUPLICATE_WHOLE):
        assert world.fire(record, trigger) == "already_rolled_back"
    assert world.count("release") == world.count("wake") == 0
    world.fire(record, Trigger.AGREED)
    for trigger in late:
        assert world.fire(record, trigger) == "nothing_held"
    assert world.count("release") == world.count("wake") == world.count("take_number") == 1


@scenario
def woken_exactly_when_the_backup_ends(worlds: Worlds) -> None:
    """R17: every end (commit by agreement, parent or bind; release by agreement or drain) wakes once, no other step does."""
    ends: tuple[tuple[State, dict[str, bool], Trigger], ...] = (
        (L, {"numbered": True}, Trigger.AGREED),
        (L, {"numbered": True, "agreed": True}, Trigger.PARENT_COMMITTED),
        (L, {"numbered": True, "agreed": True, "bound": False}, Trigger.BIND),
        (R, {}, Trigger.ABORT),
        (B, {"numbered": True}, Trigger.AGREED),
        (B, {"numbered": True, "agreed": True}, Trigger.DRAINED),
    )
    for state, columns_of, trigger in ends:
        world = worlds()
        record = world.at(state, **columns_of)
        assert world.count("wake") == 0
        world.fire(record, trigger)
        assert world.count("wake") == 1
        assert record.state in (C, N)
        assert world.took()[-1] == "wake 1"
