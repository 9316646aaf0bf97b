"""Each named wait keeps bytes right, and its removal alone makes them wrong (the streams' part of R34)."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from cphicache.transfer.port import Wait
from cphicache.transfer.streams.port import Event, Streams
from cphicache.transfer.streams.threads import ThreadStreams
from cphicache.transfer.streams.virtual import VirtualStreams
from tests.streams.dropping import DroppingStreams

# The forward is the compute stream; D2H copies are the write stream; H2D copies are the load stream.
FIRST_THEN_SECOND = {
    Wait.STORE_TO_COPY: ("compute", "write"),
    Wait.COPY_TO_REUSE: ("write", "compute"),
    Wait.LOAD_TO_READ: ("load", "compute"),
    Wait.READ_TO_LOAD: ("compute", "load"),
}


class Bytes:
    """One device page, one host page, and what the forward has read."""

    def __init__(self) -> None:
        self.device = b"dev0"
        self.host = b"host"
        self.read = b""

    def store(self) -> None:
        self.device = b"dev1"

    def back_up(self) -> None:
        self.host = self.device

    def load(self) -> None:
        self.device = self.host

    def forward(self) -> None:
        self.read = self.device

    def works(self, why: Wait) -> tuple[Callable[[], None], Callable[[], None]]:
        """The two accesses that ``why`` orders."""
        return {
            Wait.STORE_TO_COPY: (self.store, self.back_up),
            Wait.COPY_TO_REUSE: (self.back_up, self.store),
            Wait.LOAD_TO_READ: (self.load, self.forward),
            Wait.READ_TO_LOAD: (self.forward, self.load),
        }[why]

    def right(self, why: Wait) -> bool:
        """Are the bytes those of the order first, then second?"""
        return {
            Wait.STORE_TO_COPY: self.host == b"dev1",
            Wait.COPY_TO_REUSE: self.host == b"dev0",
            Wait.LOAD_TO_READ: self.read == b"host",
            Wait.READ_TO_LOAD: self.read == b"dev0",
        }[why]


def submit_pair(streams: Streams, why: Wait, state: Bytes, gate: threading.Event | None) -> Event:
    """The two accesses with their wait; the first one is held by ``gate``. Returns the event behind the second."""
    first, second = (streams.stream(name) for name in FIRST_THEN_SECOND[why])
    first_work, second_work = state.works(why)

    def gated() -> None:
        if gate is not None:
            assert gate.wait(timeout=30.0)  # a red test must not hang
        first_work()

    first.submit(gated, cost_us=10.0)
    second.wait(first.record(), why)
    second.submit(second_work, cost_us=10.0)
    return second.record()


@pytest.mark.parametrize("why", FIRST_THEN_SECOND)
def test_a_wait_between_streams_is_needed_on_the_virtual_clock(why: Wait) -> None:
    """R34: over 40 adversarial orders bytes are always right with the wait, and wrong in some of them without."""

    def run(seed: int, drop: Wait | None) -> bool:
        inner, state = VirtualStreams(seed=seed, jitter=1.0), Bytes()
        streams = inner if drop is None else DroppingStreams(inner, drop)
        submit_pair(streams, why, state, None)
        streams.close()
        return state.right(why)

    assert all(run(seed, None) for seed in range(40))
    assert not all(run(seed, why) for seed in range(40))
    others = [other for other in Wait if other is not why]
    assert all(run(seed, other) for seed in range(40) for other in others)


@pytest.mark.parametrize("why", FIRST_THEN_SECOND)
def test_a_wait_between_streams_is_needed_by_threads(why: Wait) -> None:
    """R34: with the wait the second access comes after the first, held one; without it the second one overtakes: wrong bytes."""
    gate, state, streams = threading.Event(), Bytes(), ThreadStreams()
    end = submit_pair(streams, why, state, gate)
    assert not streams.query(end, Wait.DRAIN_TO_FREE)
    gate.set()
    streams.close()
    assert state.right(why)

    gate, state, dropping = threading.Event(), Bytes(), DroppingStreams(ThreadStreams(), why)
    dropping.synchronize(submit_pair(dropping, why, state, gate))
    gate.set()
    dropping.close()
    assert dropping.dropped == 1
    assert not state.right(why)


@pytest.mark.parametrize("make", [ThreadStreams, lambda: VirtualStreams(seed=0)])
@pytest.mark.parametrize("drop", [False, True])
def test_the_drain_before_a_free_is_needed(make: Callable[[], Streams], drop: bool) -> None:
    """R34: a host slot that is given on before its D2H copy has drained ends with the bytes of the old copy."""
    inner = make()
    streams: Streams = DroppingStreams(inner, Wait.DRAIN_TO_FREE) if drop else inner
    gate, state = threading.Event(), Bytes()

    def copy() -> None:
        if inner.now_us is None:
            assert gate.wait(timeout=30.0)  # a red test must not hang
        state.back_up()

    write = streams.stream("write")
    write.submit(copy, cost_us=10.0)
    event = write.record()
    drained = streams.query(event, Wait.DRAIN_TO_FREE)
    assert drained is drop
    if not drained:
        gate.set()
        streams.synchronize(event)
        assert streams.query(event, Wait.DRAIN_TO_FREE)
    state.host = b"next"  # the slot's next owner
    gate.set()
    streams.close()
    assert (state.host == b"next") is not drop


def test_dropping_forwards_everything_else() -> None:
    """R34: the helper changes nothing but the one wait: names, times, events and other waits are those of the inner streams."""
    inner = VirtualStreams()
    streams = DroppingStreams(inner, Wait.LOAD_TO_READ)
    compute, load = streams.stream("compute"), streams.stream("load")
    assert streams.stream("load") is load
    assert load.name == "load"
    load.submit(lambda: None, cost_us=10.0)
    event = load.record()
    compute.wait(event, Wait.READ_TO_LOAD)
    compute.submit(lambda: None, cost_us=1.0)
    assert inner.completion_us(compute.record()) == 11.0
    assert not streams.query(event, Wait.DRAIN_TO_FREE)
    streams.pause(4.0)
    assert streams.now_us == 4.0
    streams.synchronize(event)
    assert streams.now_us == 10.0
    assert streams.dropped == 0
    streams.close()
    assert streams.now_us == 11.0
