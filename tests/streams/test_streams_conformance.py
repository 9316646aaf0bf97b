"""What every implementation of the stream port keeps, whatever its notion of time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cphicache.transfer.port import Wait
from cphicache.transfer.streams.cuda import CudaStreams
from cphicache.transfer.streams.errors import FAILURES_KEPT, StreamError
from cphicache.transfer.streams.port import Event, Streams
from cphicache.transfer.streams.threads import ThreadStreams
from cphicache.transfer.streams.virtual import VirtualStreams
from tests.gpu import NEEDS_GPU, hold_current_stream
from tests.streams.fake_cuda import FakeCuda, LaunchingStreams
from tests.streams.programs import PROGRAMS, Program, drive, is_legal, predecessors

FACTORIES: dict[str, Callable[[int], Streams]] = {
    "threads": lambda seed: ThreadStreams(),
    "threads-delayed": lambda seed: ThreadStreams(seed=seed, max_delay_us=100.0),
    "virtual": lambda seed: VirtualStreams(seed=seed),
    "virtual-jitter": lambda seed: VirtualStreams(seed=seed, jitter=1.0),
    "cuda-fake": lambda seed: LaunchingStreams(FakeCuda()),
    "cuda": lambda seed: CudaStreams(),
}
PATIENCE_S = 30.0
MARKED = [pytest.param(kind, marks=NEEDS_GPU) if kind == "cuda" else kind for kind in FACTORIES]
KINDS = pytest.mark.parametrize("kind", MARKED)
# On CUDA the host side of work runs inside submit(); what that means for work that raises: test_cuda.py.
KINDS_THAT_RUN_WORK_LATER = pytest.mark.parametrize("kind", [kind for kind in FACTORIES if "cuda" not in kind])


@pytest.fixture(params=MARKED)
def streams(request: pytest.FixtureRequest) -> Iterator[Streams]:
    made = FACTORIES[request.param](1)
    yield made
    made.close()


class Gate:
    """Holds a stream back: a thread blocks on it, a GPU spins; on the virtual clock the item just lasts long, and a fake device is lazy
    anyway. A red test must not hang."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._open = threading.Event()

    def hold(self) -> None:
        if isinstance(self._streams, ThreadStreams):
            assert self._open.wait(timeout=PATIENCE_S)
        elif isinstance(self._streams, CudaStreams):
            hold_current_stream()

    def open(self) -> None:
        self._open.set()


def complete_at_once(streams: Streams, event: Event) -> bool:
    """An event with nothing before it; a GPU takes a moment to say so."""
    if isinstance(streams, CudaStreams):
        streams.synchronize(event)
    return streams.query(event, Wait.DRAIN_TO_FREE)


def fail(text: str) -> Callable[[], None]:
    def failing_work() -> None:
        raise ValueError(text)

    return failing_work


def test_one_stream_runs_in_submission_order(streams: Streams) -> None:
    """R34: work of one stream takes effect in submission order, whatever it costs."""
    stream = streams.stream("write")
    order: list[int] = []
    for index in range(50):
        stream.submit(lambda index=index: order.append(index), cost_us=(index * 7) % 5)  # type: ignore[misc]
    streams.synchronize(stream.record())
    assert order == list(range(50))


def test_streams_are_known_by_name(streams: Streams) -> None:
    """R34: one name is one stream; another name is another stream."""
    assert streams.stream("write") is streams.stream("write")
    assert streams.stream("write") is not streams.stream("load")
    assert streams.stream("write").name == "write"


def test_work_after_a_wait_sees_what_came_before_the_event(streams: Streams) -> None:
    """R34: a copy that waits for the event of its source's store reads the stored bytes."""
    compute, write = streams.stream("compute"), streams.stream("write")
    gate, device, host = Gate(streams), bytearray(4), bytearray(4)

    def store() -> None:
        gate.hold()
        device[:] = b"kvkv"

    def copy() -> None:
        host[:] = device

    compute.submit(store, cost_us=100.0)
    write.wait(compute.record(), Wait.STORE_TO_COPY)
    write.submit(copy, cost_us=1.0)
    gate.open()
    streams.synchronize(write.record())
    assert host == b"kvkv"


def test_events_order_a_chain_of_three_streams(streams: Streams) -> None:
    """R34: order through events is transitive: compute before write before load."""
    gate, order = Gate(streams), list[str]()
    names = ("compute", "write", "load")

    def work(name: str) -> Callable[[], None]:
        def run() -> None:
            if name == "compute":
                gate.hold()
            order.append(name)

        return run

    previous: Event | None = None
    for name, cost_us in zip(names, (50.0, 5.0, 1.0), strict=True):
        stream = streams.stream(name)
        if previous is not None:
            stream.wait(previous, Wait.STORE_TO_COPY)
        stream.submit(work(name), cost_us=cost_us)
        previous = stream.record()
    gate.open()
    assert previous is not None
    streams.synchronize(previous)
    assert order == ["compute", "write", "load"]


def test_query_is_false_before_and_true_after(streams: Streams) -> None:
    """R34: a query never blocks, answers False while work before the event has not ended and True once it has."""
    stream, gate = streams.stream("write"), Gate(streams)
    stream.submit(gate.hold, cost_us=10.0)
    event = stream.record()
    assert streams.query(event, Wait.DRAIN_TO_FREE) is False
    gate.open()
    streams.synchronize(event)
    assert streams.query(event, Wait.DRAIN_TO_FREE) is True


def test_an_event_covers_only_what_was_submitted_before_it(streams: Streams) -> None:
    """R34: later work of the stream does not hold back an earlier event."""
    stream, gate, order = streams.stream("write"), Gate(streams), list[str]()
    stream.submit(lambda: order.append("first"), cost_us=1.0)
    first = stream.record()
    stream.submit(gate.hold, cost_us=1000.0)
    last = stream.record()
    streams.synchronize(first)
    assert order == ["first"]
    assert streams.query(first, Wait.DRAIN_TO_FREE)
    assert not streams.query(last, Wait.DRAIN_TO_FREE)
    gate.open()


def test_event_of_an_empty_stream_is_complete(streams: Streams) -> None:
    """R34: an event with nothing before it is complete: query, synchronize and wait go on at once."""
    event = streams.stream("load").record()
    assert complete_at_once(streams, event)
    streams.synchronize(event)
    ran: list[bool] = []
    compute = streams.stream("compute")
    compute.wait(event, Wait.LOAD_TO_READ)
    compute.submit(lambda: ran.append(True))
    streams.synchronize(compute.record())
    assert ran == [True]


def test_event_after_a_bare_wait_completes_with_the_wait(streams: Streams) -> None:
    """R34: a wait is part of its stream: an event recorded behind it is not complete before what it waits for."""
    compute, write, gate = streams.stream("compute"), streams.stream("write"), Gate(streams)
    compute.submit(gate.hold, cost_us=10.0)
    write.wait(compute.record(), Wait.STORE_TO_COPY)
    event = write.record()
    assert not streams.query(event, Wait.DRAIN_TO_FREE)
    gate.open()
    streams.synchronize(event)
    assert complete_at_once(streams, compute.record())


def test_a_stream_may_wait_for_its_own_event(streams: Streams) -> None:
    """R34: a wait for one's own past is legal and holds nothing up."""
    stream, order = streams.stream("write"), list[int]()
    stream.submit(lambda: order.append(1), cost_us=3.0)
    stream.wait(stream.record(), Wait.COPY_TO_REUSE)
    stream.submit(lambda: order.append(2), cost_us=3.0)
    streams.synchronize(stream.record())
    assert order == [1, 2]


@pytest.mark.parametrize("call", ["submit", "query", "synchronize", "close"])
@KINDS_THAT_RUN_WORK_LATER
def test_an_exception_of_work_surfaces_once_at_the_next_call(kind: str, call: str) -> None:
    """R34: work that raised is told by the next submit, query, synchronize or close, once; the stream's queue goes on."""
    streams = FACTORIES[kind](1)
    ran: list[str] = []
    stream, other = streams.stream("write"), streams.stream("load")
    gate = Gate(streams)
    stream.submit(gate.hold, cost_us=10.0)  # nothing fails before everything is submitted
    stream.submit(fail("bad copy"), cost_us=1.0)
    failed = threading.Event()
    stream.submit(failed.set, cost_us=1.0)
    stream.submit(lambda: ran.append("later"), cost_us=1.0)
    gate.open()
    streams.pause(1_000_000.0)
    assert failed.wait(timeout=PATIENCE_S)  # the item behind the failing one has run, so the failure is known
    event = stream.record()
    calls: dict[str, Callable[[], object]] = {
        "submit": lambda: other.submit(lambda: ran.append("refused")),
        "query": lambda: streams.query(event, Wait.DRAIN_TO_FREE),
        "synchronize": lambda: streams.synchronize(event),
        "close": streams.close,
    }
    with pytest.raises(StreamError, match=r"stream 'write': work .*failing_work raised ValueError: bad copy") as caught:
        calls[call]()
    assert isinstance(caught.value.__cause__, ValueError)
    if call != "close":
        streams.synchronize(event)
        assert streams.query(event, Wait.DRAIN_TO_FREE)
    streams.close()
    assert ran == ["later"]


@KINDS_THAT_RUN_WORK_LATER
def test_a_failing_item_does_not_hang_those_who_wait_for_it(kind: str) -> None:
    """R34: an event behind work that raised completes, and waiting streams run on."""
    streams = FACTORIES[kind](1)
    write, compute, ran = streams.stream("write"), streams.stream("compute"), list[bool]()
    gate = Gate(streams)
    compute.submit(gate.hold, cost_us=1000.0)  # compute itself is held, so that the failure comes after all submissions
    write.wait(compute.record(), Wait.STORE_TO_COPY)
    write.submit(fail("bad copy"), cost_us=1.0)
    compute.wait(write.record(), Wait.COPY_TO_REUSE)
    compute.submit(lambda: ran.append(True), cost_us=1.0)
    gate.open()
    with pytest.raises(StreamError, match="bad copy"):
        streams.close()
    assert ran == [True]
    streams.close()


@KINDS_THAT_RUN_WORK_LATER
def test_many_failures_are_all_told_and_bounded(kind: str) -> None:
    """R34: the first failure is raised, further ones are its notes, and beyond the bound they are counted."""
    streams = FACTORIES[kind](1)
    gate, write = Gate(streams), streams.stream("write")
    write.submit(gate.hold, cost_us=1.0)
    for index in range(FAILURES_KEPT + 2):
        write.submit(fail(f"copy {index}"), cost_us=1.0)
    gate.open()
    with pytest.raises(StreamError, match="copy 0") as caught:
        streams.close()
    notes = caught.value.__notes__
    assert [note.split(": ")[-1] for note in notes[:-1]] == [f"copy {index}" for index in range(1, FAILURES_KEPT)]
    assert notes[-1] == "and 2 more"


@KINDS_THAT_RUN_WORK_LATER
def test_work_must_not_call_its_streams(kind: str) -> None:
    """R34: streams belong to the scheduler thread; work that calls them is told so instead of deadlocking."""
    streams = FACTORIES[kind](1)
    stream = streams.stream("write")
    stream.submit(lambda: streams.synchronize(stream.record()), cost_us=1.0)
    with pytest.raises(StreamError, match="only the scheduler thread may"):
        streams.close()


@KINDS
def test_close_drains_and_is_idempotent(kind: str) -> None:
    """R18: close runs everything queued on every stream, across waits, and a second close does nothing."""
    streams = FACTORIES[kind](1)
    order: list[str] = []
    compute, write = streams.stream("compute"), streams.stream("write")
    for index in range(5):
        compute.submit(lambda index=index: order.append(f"store {index}"), cost_us=20.0)  # type: ignore[misc]
        write.wait(compute.record(), Wait.STORE_TO_COPY)
        write.submit(lambda index=index: order.append(f"copy {index}"), cost_us=1.0)  # type: ignore[misc]
    last = write.record()
    streams.close()
    streams.close()
    assert sorted(order) == sorted(f"{kind} {index}" for index in range(5) for kind in ("store", "copy"))
    assert all(order.index(f"store {index}") < order.index(f"copy {index}") for index in range(5))
    assert streams.query(last, Wait.DRAIN_TO_FREE)
    streams.synchronize(last)


@KINDS
def test_closed_streams_take_nothing_more(kind: str) -> None:
    """R18: after close every call that would queue something is refused, naming the stream."""
    streams = FACTORIES[kind](1)
    stream = streams.stream("write")
    event = stream.record()
    streams.close()
    with pytest.raises(StreamError, match=r"'write': used after close"):
        stream.submit(lambda: None)
    with pytest.raises(StreamError, match=r"'write': used after close"):
        stream.wait(event, Wait.COPY_TO_REUSE)
    with pytest.raises(StreamError, match=r"'write': used after close"):
        stream.record()
    with pytest.raises(StreamError, match=r"'load': used after close"):
        streams.stream("load")


@KINDS
def test_an_event_of_closed_streams_holds_nothing_up(kind: str) -> None:
    """R18: after a restart of the streams, waits on events of the old ones go on at once."""
    old, new = FACTORIES[kind](1), FACTORIES[kind](2)
    stream = old.stream("write")
    stream.submit(lambda: None, cost_us=100.0)
    event = stream.record()
    old.close()
    ran: list[bool] = []
    new.stream("compute").wait(event, Wait.COPY_TO_REUSE)
    new.stream("compute").submit(lambda: ran.append(True))
    assert new.query(event, Wait.DRAIN_TO_FREE)
    new.synchronize(event)
    new.close()
    assert ran == [True]


def test_a_strange_event_is_refused(streams: Streams) -> None:
    """R34: an object that is no event of these streams is caller misuse, told by its type."""
    stream = streams.stream("write")
    for call in (
        lambda: streams.query(object(), Wait.DRAIN_TO_FREE),
        lambda: streams.synchronize(object()),
        lambda: stream.wait(object(), Wait.STORE_TO_COPY),
    ):
        with pytest.raises(TypeError, match="object is no event of"):
            call()


@pytest.mark.parametrize("make", [lambda n: ThreadStreams(queue_limit=n), lambda n: VirtualStreams(queue_limit=n)])
def test_the_queue_is_bounded(make: Callable[[int], Streams]) -> None:
    """R34: a stream takes as many entries as its limit says and refuses the next with expected and found; draining makes room."""
    streams = make(4)
    stream, gate, ran = streams.stream("write"), Gate(streams), list[int]()
    stream.submit(gate.hold, cost_us=10.0)
    for index in range(3):
        stream.submit(lambda index=index: ran.append(index), cost_us=1.0)  # type: ignore[misc]
    with pytest.raises(StreamError, match=r"'write': expected at most 4 queued entries, found 4 and one more"):
        stream.submit(lambda: ran.append(99), cost_us=1.0)
    gate.open()
    streams.synchronize(stream.record())
    stream.submit(lambda: ran.append(3), cost_us=1.0)
    streams.close()
    assert ran == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="queue_limit is 0"):
        make(0)


@KINDS
@settings(derandomize=True, max_examples=40, deadline=None)
@given(program=PROGRAMS, seed=st.integers(0, 1000))
def test_every_run_is_a_legal_order(kind: str, program: Program, seed: int) -> None:
    """R34: over random programs, effects take an order that FIFO and events allow, and a completed event's work has been done."""
    streams = FACTORIES[kind](seed)
    order: list[int] = []
    events = drive(streams, program, order.append)
    _, of_event = predecessors(program)
    for event, before in zip(events, of_event, strict=True):
        if streams.query(event, Wait.DRAIN_TO_FREE):
            assert before <= set(order)
    for event, before in zip(events, of_event, strict=True):
        streams.synchronize(event)
        assert before <= set(order)
    streams.close()
    assert is_legal(program, order)
