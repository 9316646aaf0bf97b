"""CUDA streams on a fake device: which calls reach torch.cuda, in which order, and what the device makes of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cphicache.transfer.port import Wait
from cphicache.transfer.streams.cuda import CudaStreams, CudaUnavailable
from cphicache.transfer.streams.errors import StreamError
from cphicache.transfer.streams.port import Streams
from tests.streams.dropping import DroppingStreams
from tests.streams.fake_cuda import FakeCuda, LaunchingStreams
from tests.streams.programs import PROGRAMS, Program, drive, is_legal, predecessors
from tests.transfer.test_rank_waits import CASES

Story = Callable[[Streams], bool]


def test_compute_is_the_current_stream_and_the_others_are_own() -> None:
    """R34: ``compute`` is the stream that is current when the streams are made (or the one given), ``write`` and ``load`` are new."""
    cuda = FakeCuda()
    given = cuda.Stream()
    with cuda.stream(given):
        streams = CudaStreams(cuda=cuda)
    assert streams.stream("compute").device_stream is given
    own = [streams.stream(name).device_stream for name in ("write", "load")]
    assert own[0] is not own[1]
    assert given not in own
    assert CudaStreams(cuda=cuda, compute=own[0]).stream("compute").device_stream is own[0]
    assert CudaStreams(cuda=cuda).stream("compute").device_stream is cuda.forward


def test_a_copy_is_ordered_after_the_store_by_an_event() -> None:
    """R34: submit makes the stream current, record and wait become one event on one stream each, and no call waits for the device."""
    cuda = FakeCuda()
    streams = CudaStreams(cuda=cuda)
    compute, write = streams.stream("compute"), streams.stream("write")
    compute.submit(lambda: cuda.launch(lambda: None))
    write.wait(compute.record(), Wait.STORE_TO_COPY)
    for _ in range(2):
        write.submit(lambda: cuda.launch(lambda: None))
    done = write.record()
    assert streams.query(done, Wait.DRAIN_TO_FREE) is False
    assert cuda.calls == [
        "forward.launch",
        "forward.record event1",
        "side1.wait event1",
        "side1.launch",
        "side1.launch",
        "side1.record event2",
        "event2.query",
    ]
    assert cuda.current_stream() is cuda.forward


def test_only_synchronize_and_close_wait_for_the_device() -> None:
    """R34: in steady state nothing blocks the scheduler thread; synchronize waits for one event, close for every stream, once."""
    cuda = FakeCuda()
    streams = CudaStreams(cuda=cuda)
    for name in ("compute", "write"):
        streams.stream(name).submit(lambda: cuda.launch(lambda: None))
    event = streams.stream("write").record()
    streams.pause(1000.0)
    assert streams.now_us is None
    assert not any("synchronize" in call for call in cuda.calls)
    streams.synchronize(event)
    streams.close()
    streams.close()
    assert [call for call in cuda.calls if "synchronize" in call] == [
        "event1.synchronize",
        "forward.synchronize",
        "side1.synchronize",
    ]


@pytest.mark.parametrize("call", ["submit", "query", "synchronize", "close"])
def test_work_that_raises_is_told_once_by_the_next_call(call: str) -> None:
    """R34: the submit whose work raises returns; the next submit, query, synchronize or close raises it, once, and the stream goes on."""
    cuda = FakeCuda()
    streams = CudaStreams(cuda=cuda)
    stream, ran = streams.stream("write"), list[str]()

    def failing_work() -> None:
        raise ValueError("bad copy")

    stream.submit(failing_work)
    event = stream.record()
    calls: dict[str, Callable[[], object]] = {
        "submit": lambda: stream.submit(lambda: ran.append("refused")),
        "query": lambda: streams.query(event, Wait.DRAIN_TO_FREE),
        "synchronize": lambda: streams.synchronize(event),
        "close": streams.close,
    }
    with pytest.raises(StreamError, match=r"stream 'write': work .*failing_work raised ValueError: bad copy") as caught:
        calls[call]()
    assert isinstance(caught.value.__cause__, ValueError)
    assert cuda.current_stream() is cuda.forward
    if call != "close":
        stream.submit(lambda: ran.append("later"))
    streams.close()
    assert ran == ([] if call == "close" else ["later"])


def test_work_must_not_call_its_streams() -> None:
    """R34: work that calls its own streams is told so, by every call of the port."""
    cuda = FakeCuda()
    streams = CudaStreams(cuda=cuda)
    stream = streams.stream("write")
    event = stream.record()
    calls: list[Callable[[], object]] = [
        lambda: stream.submit(lambda: None),
        stream.record,
        lambda: stream.wait(event, Wait.COPY_TO_REUSE),
        lambda: streams.query(event, Wait.DRAIN_TO_FREE),
        lambda: streams.synchronize(event),
        lambda: streams.stream("load"),
        streams.close,
    ]
    for call in calls:
        stream.submit(call)  # type: ignore[arg-type]
        with pytest.raises(StreamError, match="only the scheduler thread may"):
            streams.query(event, Wait.DRAIN_TO_FREE)
    streams.close()


def test_without_a_gpu_the_error_says_what_to_do() -> None:
    """R35: without a GPU the streams are refused when they are made, with one line that names the way out."""
    with pytest.raises(CudaUnavailable, match=r"no GPU: .*--streams threads"):
        CudaStreams(cuda=FakeCuda(available=False))


@settings(derandomize=True, max_examples=60, deadline=None)
@given(program=PROGRAMS, seed=st.integers(0, 1000))
def test_every_run_on_an_eager_device_is_a_legal_order(program: Program, seed: int) -> None:
    """R34: over random programs and devices that run ahead at random, effects take an order that FIFO and events allow."""
    streams, order = LaunchingStreams(FakeCuda(seed)), list[int]()
    events = drive(streams, program, order.append)
    for event, before in zip(events, predecessors(program)[1], strict=True):
        if streams.query(event, Wait.DRAIN_TO_FREE):
            assert before <= set(order)
    streams.close()
    assert is_legal(program, order)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(("why", "story"), CASES)
def test_bytes_are_right_in_every_order_that_the_events_allow(why: Wait, story: Story, seed: int) -> None:
    """R34: the copies of a rank over CUDA streams leave right bytes in whatever order the device takes what no event orders."""
    assert story(LaunchingStreams(FakeCuda(seed))), why


@pytest.mark.parametrize(("why", "story"), CASES)
def test_bytes_are_wrong_without_the_event(why: Wait, story: Story) -> None:
    """R34: without this one wait there is an order of the device that leaves wrong bytes."""
    orders = [DroppingStreams(LaunchingStreams(FakeCuda(seed)), why) for seed in range(40)]
    right = [story(streams) for streams in orders]
    assert not all(right)
    assert all(streams.dropped for streams in orders)
