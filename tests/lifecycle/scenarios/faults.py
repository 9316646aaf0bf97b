"""Work that fails before the state changes leaves everything as it was (R14, R16, R22), one scenario for each call and edge."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from cphicache.lifecycle import NO_INPUT, BackupRecord, Input, State, Trigger
from tests.lifecycle.recorder import PortFault, World
from tests.lifecycle.scenarios.book import COMMIT_CALLS, B, C, L, N, R, Worlds, columns, enter, scenario


@dataclass(frozen=True, slots=True)
class Fault:
    """A call that fails on an edge out of a state, reached with the columns; the world answers ``world``."""

    call: str
    state: State
    trigger: Trigger
    given: Input = NO_INPUT
    bound: bool = True
    numbered: bool = False
    agreed: bool = False
    partly: bool = False
    world: dict[str, bool] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The scenario's name."""
        marks = [mark for mark in ("numbered", "agreed", "partly") if getattr(self, mark)]
        answers = [f"{'' if value else 'not_'}{name.removesuffix('_is')}" for name, value in self.world.items()]
        return "_".join(["fault_in", self.call, "on", self.trigger, "in", self.state.lower(), *marks, *answers])

    def start(self, worlds: Worlds) -> tuple[World, BackupRecord]:
        """A world with the record in place."""
        world = worlds()
        record = world.at(self.state, bound=self.bound, numbered=self.numbered, agreed=self.agreed, partly=self.partly)
        for name, value in self.world.items():
            setattr(world, name, value)
        return world, record


T = Trigger
ROLLBACKS = (T.ABORT, T.RESET, T.PARENT_LOST, T.BIND_DUPLICATE_WHOLE)

FAULTS = (
    Fault("refuse", N, T.RESERVE, world={"fit_is": False}),
    Fault("refuse", N, T.RESERVE, world={"room_is": False, "victims_suffice_is": False}),
    Fault("refuse", N, T.RESERVE_RETRY, world={"room_is": False}),
    Fault("reserve_slots", N, T.RESERVE),
    Fault("reserve_slots", N, T.RESERVE_RETRY),
    Fault("evict_host", N, T.RESERVE, world={"room_is": False}),
    Fault("copy_layers", R, T.LAYER_STORED, Input(payload=0, layers=(0,))),
    Fault("copy_layers", L, T.LAYER_STORED, Input(payload=0, layers=(0, 1)), partly=True),
    Fault("take_number", L, T.FORWARD_ENDED),
    Fault("take_number", L, T.FORWARD_ENDED, partly=True),
    *(Fault("take_number", L, trigger, bound=False, partly=True) for trigger in ROLLBACKS),
    Fault("commit", L, T.AGREED, numbered=True),
    Fault("commit", L, T.PARENT_COMMITTED, numbered=True, agreed=True),
    Fault("release", B, T.AGREED, numbered=True),
    Fault("release", B, T.DRAINED),
    Fault("release", B, T.DRAINED, numbered=True, agreed=True),
    Fault("attach", R, T.BIND, bound=False),
    Fault("attach", L, T.BIND, bound=False),
    Fault("attach", L, T.BIND, bound=False, numbered=True, agreed=True),
    Fault("attach", L, T.BIND, bound=False, numbered=True, agreed=True, world={"parent_committed_is": False}),
    Fault("shrink", R, T.BIND_DUPLICATE_PART, Input(pages=2), bound=False),
    Fault("shrink", L, T.BIND_DUPLICATE_PART, Input(pages=2), bound=False),
    Fault("shrink", L, T.BIND_DUPLICATE_PART, Input(pages=2), bound=False, numbered=True, agreed=True),
    Fault("defer_split", R, T.SPLIT_WANTED),
    Fault("defer_split", L, T.SPLIT_WANTED),
    Fault("defer_split", B, T.SPLIT_WANTED, numbered=True),
    Fault("fork", N, T.SPLIT),
    Fault("fork", C, T.SPLIT),
    Fault("drop_device", N, T.DEVICE_EVICT),
    Fault("drop_device", C, T.DEVICE_EVICT),
    Fault("release_host", C, T.RESET),
    Fault("release_host", C, T.HOST_EVICT, world={"on_device_is": False}),
    Fault("release_host", C, T.RECLAIM),
    Fault("begin_load", C, T.LOAD_QUEUED),
    Fault("end_load", C, T.LOAD_AGREED),
    Fault("fail_load", C, T.LOAD_FAILED),
    Fault("undo_load", C, T.LOAD_DRAINED),
)


def _scenario(fault: Fault) -> None:
    def failing(worlds: Worlds) -> None:
        """R14: a failing call changes neither state nor columns, nothing follows, and the step succeeds when it is repeated."""
        world, record = fault.start(worlds)
        before = columns(record)
        world.faults = {fault.call}
        with pytest.raises(PortFault, match=fault.call):
            world.fire(record, fault.trigger, fault.given)
        assert (columns(record), world.took()) == (before, [])
        world.faults = set()
        assert world.fire(record, fault.trigger, fault.given) is None
        assert world.took()[0].startswith(fault.call)

    enter(fault.name, failing)


for _fault in FAULTS:
    _scenario(_fault)


@scenario
def fault_in_commit_on_bind(worlds: Worlds) -> None:
    """R13: when the commit of a late bind fails, the bind stands (its hold is taken) and the parent's word commits later."""
    world = worlds()
    record = world.at(L, bound=False, numbered=True, agreed=True)
    world.faults = {"commit"}
    with pytest.raises(PortFault, match="commit"):
        world.fire(record, Trigger.BIND)
    assert (record.state, record.bound, world.took()) == (L, True, ["attach 1"])
    world.faults = set()
    world.fire(record, Trigger.PARENT_COMMITTED)
    assert (record.state, world.took()) == (C, COMMIT_CALLS)
