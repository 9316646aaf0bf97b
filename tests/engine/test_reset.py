"""Abort, reset, flush and shutdown at any moment: one release path, nothing left, numbers never restart (R18, R14)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest

from cphicache.lifecycle import State
from cphicache.transfer.port import OpKey
from tests.engine.rig import Rig
from tests.engine.rig_extra import back_up, next_numbers, to_host
from tests.engine_fakes import FakeTransfer

N, R, L, C, B = (
    State.DEVICE_VALID_HOST_NONE,
    State.RESERVED,
    State.LAYERS_IN_FLIGHT,
    State.COMMITTED,
    State.ROLLED_BACK,
)
Do = Callable[[Rig], object]


@dataclass(frozen=True)
class Part:
    """A part of a request's way. The forward's parts come whether the request is still there or not: a forward cannot be stopped."""

    name: str
    do: Do
    of_request: bool = False


def way(chunks: int) -> list[Part]:
    """The way of request ``r`` in so many chunks of 4 pages, each of them copied while the next is computed."""
    parts: list[Part] = []
    for chunk in range(chunks):
        last = chunk == chunks - 1
        parts.append(Part(f"reserve {chunk}", partial(Rig.chunk, rid="r", upto=8 * (chunk + 1)), of_request=True))
        parts.append(Part(f"start of loads {chunk}", Rig.start_loads))
        for payload, (name, layers) in enumerate((("target", 3), ("draft", 2))):
            parts += [Part(f"{name} {layer} of {chunk}", layer_of(payload, layer)) for layer in range(layers)]
            parts.append(Part(f"end of {name} {chunk}", partial(Rig.end_payload, payload=payload)))
        parts.append(Part(f"end of forward {chunk}", Rig.end_forward))
        parts.append(Part(f"insert {chunk}", partial(Rig.insert, rid="r", chunked=not last), of_request=True))
    return [
        *parts,
        Part("copies end", Rig.finish_all),
        Part("sample", Rig.tick),
        Part("apply", Rig.tick),
        Part("finish", partial(Rig.finish, rid="r"), of_request=True),
    ]


def layer_of(payload: int, layer: int) -> Do:
    return lambda rig: rig.layer(payload, layer)


CUTS = [(chunks, cut) for chunks in (1, 2) for cut in range(len(way(chunks)))]
NAMES = [f"{chunks} chunks, before {way(chunks)[cut].name}" for chunks, cut in CUTS]
TEXT = {1: "abcd", 2: "abcdefgh"}


def busy(rig: Rig) -> None:
    """A load-back in flight with a reader that has been computed, a parked insert, a deferred request, and a backup in flight."""
    to_host(rig, "uvw")
    rig.hold()
    for rid, text in {"first": "pqrs", "parks": "pqxy", "loads": "uvwz"}.items():
        assert rig.begin(rid, text)
        rig.chunk(rid)
    rig.start_loads()
    rig.forward()
    rig.finish("first")
    assert not rig.finish("parks")
    assert not rig.begin("waits", "pz")
    assert rig.insert("loads") is None
    assert rig.cache.state.loads


def alone(rig: Rig) -> None:
    """Nothing else is there."""
    rig.hold()


def loading(rig: Rig) -> None:
    """The request's own prefix is on the host: it begins with a load-back."""
    to_host(rig, "ab")
    rig.hold()


def nothing_pending(rig: Rig) -> None:
    """No operation of any kind is left, and every slot that is in use holds committed bytes (in the ledger and in the pools, which the
    checker has compared)."""
    state = rig.cache.state
    assert not state.pending
    assert not state.numbered
    assert not state.loads
    assert not state.outstanding
    assert not any(side.transfer.in_flight() for side in rig.sides)
    used = [0] * rig.config.cp_size
    for node in state.tree.nodes():
        assert node.backup.state in (N, C)
        assert node.host_ref == 0
        for rank, slots in enumerate(node.backup.need):
            used[rank] += slots
    assert rig.free_slots() == [rig.config.host_slots - slots for slots in used]


def no_locks(rig: Rig) -> None:
    assert not rig.cache.protected_size()
    assert all(not node.lock_ref for node in rig.cache.state.tree.nodes())


def keys(transfer: FakeTransfer, name: str) -> list[OpKey]:
    """The operations that these calls were about, in order."""
    found = [args[0] for args in transfer.called(name)]
    assert all(isinstance(key, OpKey) for key in found)
    return [key for key in found if isinstance(key, OpKey)]


def ended_once(rig: Rig) -> None:
    """Every operation that was ever reserved has ended once, by commit or by release, under a generation that nobody had before."""
    for side in rig.sides:
        reserved = keys(side.transfer, "reserve")
        ended = keys(side.transfer, "commit") + keys(side.transfer, "release")
        assert sorted(ended) == sorted(reserved)
        generations = [key.generation for key in reserved]
        assert generations == sorted(set(generations))


def end_all(rig: Rig) -> None:
    for rid in dict.fromkeys([*rig.prompts, *rig.cache.state.parked, *rig.cache.state.waiters]):
        rig.abort(rid)


def abort(rig: Rig) -> None:
    ops = list(rig.cache.state.requests["r"].ops)
    rig.abort("r")
    assert all(op.state in (B, N) for op in ops)


def reset(rig: Rig) -> None:
    rig.together(lambda side: side.cache.reset_backups())
    nothing_pending(rig)


def reset_then_flush(rig: Rig) -> None:
    rig.together(lambda side: side.cache.reset_backups())
    nothing_pending(rig)
    end_all(rig)
    no_locks(rig)
    rig.together(lambda side: side.cache.flush())
    nothing_pending(rig)
    assert rig.cache.state.tree.node_count == 0
    assert rig.free_slots() == [rig.config.host_slots] * 2
    assert rig.cache.available_size() == rig.config.usable_pages * 2


def end_then_flush(rig: Rig) -> None:
    end_all(rig)
    rig.together(lambda side: side.cache.flush())
    nothing_pending(rig)
    no_locks(rig)
    assert rig.cache.state.tree.node_count == 0


def shutdown(rig: Rig) -> None:
    rig.together(lambda side: side.cache.shutdown())
    nothing_pending(rig)
    assert not rig.cache.state.parked
    end_all(rig)
    no_locks(rig)


ACTIONS = {
    "abort": abort,
    "reset": reset,
    "reset, then flush": reset_then_flush,
    "flush": end_then_flush,
    "shutdown": shutdown,
}


@pytest.mark.parametrize("action", ["abort", "reset", "reset, then flush", "shutdown"])
@pytest.mark.parametrize("around", [alone, loading, busy])
@pytest.mark.parametrize(("chunks", "cut"), CUTS, ids=NAMES)
def test_at_any_point_of_a_request(chunks: int, cut: int, around: Callable[[Rig], None], action: str) -> None:
    """R18, R14: between any two layer reports, and at every other point of a request's way, with one chunk and with two in flight,
    alone, on a prefix that is being loaded, and with a load-back, a parked insert and a deferred request around: abort, reset, flush
    and shutdown are legal, leave nothing pending and every account exact; the forward runs on to its end, numbers never restart, and
    the next request is served."""
    rig = Rig()
    around(rig)
    assert rig.begin("r", TEXT[chunks])
    parts = way(chunks)
    for part in parts[:cut]:
        part.do(rig)
    before = next_numbers(rig)
    ACTIONS[action](rig)
    for part in parts[cut:]:
        if not part.of_request or "r" in rig.prompts:
            part.do(rig)
    rig.hold(False)
    rig.finish_all()
    rig.tick()
    rig.settle()
    end_all(rig)
    rig.settle()
    assert all(old <= new for old, new in zip(before, next_numbers(rig), strict=True))
    nothing_pending(rig)
    no_locks(rig)
    back_up(rig, TEXT[chunks])
    rig.tick(2)
    rig.settle()
    assert rig.match(TEXT[chunks]).last_host_node is rig.node(TEXT[chunks])
    assert rig.state(TEXT[chunks]) is C
    rig.rest()
    ended_once(rig)


# -- each state -----------------------------------------------------------------------------------------------------------------------
def unbound(*parts: Do) -> Do:
    """An extent of request ``r`` after these steps of its forward."""

    def build(rig: Rig) -> None:
        assert rig.begin("r", "abcd")
        rig.chunk("r")
        for part in parts:
            part(rig)

    return build


def bound_early(rig: Rig) -> None:
    """Bound while RESERVED: inserted before its forward stores a layer."""
    unbound()(rig)
    rig.insert("r")


def bound_between_layers(rig: Rig) -> None:
    unbound(layer_of(0, 0), layer_of(0, 1))(rig)
    rig.insert("r")


def bound_in_flight(rig: Rig) -> None:
    unbound(Rig.forward)(rig)
    rig.insert("r")


def agreed_unbound(rig: Rig) -> None:
    unbound(Rig.forward, Rig.finish_all, partial(Rig.tick, ticks=2))(rig)


def agreed_under_a_pending_parent(rig: Rig) -> None:
    """The child's forward has ended and is agreed; the parent's has not: it is bound and waits for its last layers."""
    assert rig.begin("r", "abcdef")
    rig.chunk("r", upto=4)
    rig.layer(0, 0)
    rig.insert("r", chunked=True)
    rig.batch += 1
    rig.chunk("r")
    rig.forward()
    rig.insert("r")
    rig.finish_copies(rig.node("abcdef").backup.key)
    rig.tick(2)
    rig.batch = 1
    assert rig.node("abcdef").backup.agreed
    assert rig.states("ab", "abcdef") == [L, L]


def draining(rig: Rig) -> None:
    bound_in_flight(rig)
    key = rig.node("abcd").backup.key
    rig.fail_copies(key, 1, drained=False)
    rig.tick(2)


def committed(rig: Rig) -> None:
    bound_in_flight(rig)
    rig.finish_all()
    rig.settle()


def not_backed(rig: Rig) -> None:
    assert rig.begin("r", "abcd")
    rig.grow("r")
    rig.insert("r")
    rig.together(lambda side: side.cache.reset_backups())


STATES: dict[str, tuple[Callable[[Rig], object], State]] = {
    "reserved": (unbound(), R),
    "reserved, bound": (bound_early, R),
    "in flight": (unbound(layer_of(0, 0)), L),
    "in flight, bound": (bound_between_layers, L),
    "numbered": (unbound(Rig.forward), L),
    "numbered, bound": (bound_in_flight, L),
    "agreed": (agreed_unbound, L),
    "agreed, parent pending": (agreed_under_a_pending_parent, L),
    "draining": (draining, B),
    "committed": (committed, C),
    "not backed up": (not_backed, N),
}


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("state", STATES)
def test_in_each_state(state: str, action: str) -> None:
    """R18, R14, R7: in every state of the lifecycle, bound or not, numbered or not, agreed or not: abort, reset, flush and shutdown end
    what is pending exactly once; a committed copy survives a reset and an abort, and a flush frees it."""
    rig = Rig()
    rig.hold()
    build, expected = STATES[state]
    build(rig)
    records = [*rig.cache.state.pending.values()] or [rig.node("abcd").backup]
    assert records[-1].state is expected
    before = next_numbers(rig)
    ACTIONS[action](rig)
    if expected is C and action in ("abort", "reset", "shutdown"):
        assert rig.state("abcd") is C
        assert rig.free_slots() == [60, 60]
    elif action != "abort":
        assert all(record.state is N for record in records)
        assert rig.free_slots() == [64, 64]
    rig.end_forward()
    rig.finish_all()
    rig.tick(2)
    rig.settle()
    assert all(old <= new for old, new in zip(before, next_numbers(rig), strict=True))
    rig.batch += 2
    rig.rest()
    ended_once(rig)
