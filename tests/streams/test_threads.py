"""What only worker threads do."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

import pytest

from cphicache.transfer.port import Wait
from cphicache.transfer.streams.errors import StreamError
from cphicache.transfer.streams.threads import ThreadStreams

PATIENCE_S = 30.0
"""A red test must not hang."""


def held_by(gate: threading.Event) -> Callable[[], None]:
    def hold() -> None:
        assert gate.wait(timeout=PATIENCE_S)

    return hold


def test_work_runs_off_the_scheduler_thread_on_one_daemon_worker_a_stream() -> None:
    """R34: each stream has one named daemon worker of its own; close ends it."""
    streams = ThreadStreams()
    workers: list[threading.Thread] = []
    for name in ("compute", "write", "compute"):
        stream = streams.stream(name)
        stream.submit(lambda: workers.append(threading.current_thread()))
        streams.synchronize(stream.record())
    assert [worker.name for worker in workers] == ["stream-compute", "stream-write", "stream-compute"]
    assert workers[0] is workers[2]
    assert all(worker.daemon for worker in workers)
    streams.close()
    assert not any(worker.is_alive() for worker in workers)


def test_two_streams_run_at_the_same_time() -> None:
    """R34: streams are truly asynchronous: two work items that meet each other both end."""
    streams = ThreadStreams()
    meeting, met = threading.Barrier(2), list[bool]()

    def meet() -> None:
        meeting.wait(timeout=PATIENCE_S)
        met.append(True)

    for name in ("compute", "write"):
        streams.stream(name).submit(meet)
    streams.close()
    assert met == [True, True]


def test_waits_do_not_block_the_scheduler_thread() -> None:
    """R34: a wait blocks the worker only: the scheduler goes on submitting and the waiting stream has run nothing."""
    streams = ThreadStreams()
    gate, ran = threading.Event(), list[bool]()
    compute, write = streams.stream("compute"), streams.stream("write")
    compute.submit(held_by(gate))
    write.wait(compute.record(), Wait.STORE_TO_COPY)
    write.submit(lambda: ran.append(True))
    assert not streams.query(write.record(), Wait.DRAIN_TO_FREE)
    assert ran == []
    gate.set()
    streams.close()
    assert ran == [True]


def test_waits_count_towards_the_queue_limit() -> None:
    """R34: a wait that holds the worker is an entry of its bounded queue; a wait for a completed event is none."""
    streams = ThreadStreams(queue_limit=2)
    gate = threading.Event()
    compute, write = streams.stream("compute"), streams.stream("write")
    done = compute.record()
    compute.submit(held_by(gate))
    for _ in range(5):
        write.wait(done, Wait.STORE_TO_COPY)
    for _ in range(2):
        write.wait(compute.record(), Wait.STORE_TO_COPY)
    with pytest.raises(StreamError, match="'write': expected at most 2 queued entries"):
        write.wait(compute.record(), Wait.STORE_TO_COPY)
    gate.set()
    streams.close()


def test_delays_hold_work_back_and_close_cuts_them_short() -> None:
    """R34: with a delay drawn from an hour a copy has not run when it is queried; close runs it without sitting the hour out."""
    streams = ThreadStreams(seed=0, max_delay_us=3.6e9)
    ran: list[int] = []
    stream = streams.stream("write")
    for index in range(3):
        stream.submit(lambda index=index: ran.append(index))  # type: ignore[misc]
    brisk = ThreadStreams()  # its hundreds of round trips give a worker without delay every chance to run
    for _ in range(300):
        brisk.stream("compute").submit(lambda: None)
        brisk.synchronize(brisk.stream("compute").record())
    brisk.close()
    assert not streams.query(stream.record(), Wait.DRAIN_TO_FREE)
    assert ran == []
    streams.close()
    assert ran == [0, 1, 2]


def test_a_worker_outlives_even_a_system_exit() -> None:
    """R34: work that tries to end its thread is reported, and what is queued behind it still runs."""
    streams = ThreadStreams()
    ran: list[bool] = []

    def leave() -> None:
        gate.wait(timeout=PATIENCE_S)
        raise SystemExit(3)

    gate = threading.Event()
    stream = streams.stream("write")
    stream.submit(leave)
    stream.submit(lambda: ran.append(True))
    gate.set()
    with pytest.raises(StreamError, match=r"leave raised SystemExit: 3"):
        streams.close()
    assert ran == [True]


def test_work_is_let_go_after_it_ran() -> None:
    """R34: an idle worker holds no reference to the last work, so the tensors in it are free."""

    class Payload:
        pass

    streams = ThreadStreams()
    payload = Payload()
    gone = threading.Event()
    weakref.finalize(payload, gone.set)
    stream = streams.stream("write")
    stream.submit(lambda held=payload: None)  # type: ignore[misc]
    del payload
    streams.synchronize(stream.record())
    assert gone.wait(timeout=PATIENCE_S)
    streams.close()


def test_real_streams_have_no_virtual_time() -> None:
    """R34: now_us is None and a pause changes nothing."""
    streams = ThreadStreams()
    streams.pause(1e12)
    assert streams.now_us is None
    streams.close()


@pytest.mark.parametrize("delay_us", [-1.0, float("inf"), float("nan")])
def test_impossible_delays_are_refused(delay_us: float) -> None:
    """R35: a delay that cannot be waited for fails at construction and names its value."""
    with pytest.raises(ValueError, match=f"max_delay_us is {delay_us}"):
        ThreadStreams(max_delay_us=delay_us)
