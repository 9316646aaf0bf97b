"""CUDA streams on a real GPU: orders that events ask for come about, and orders that nobody asked for do not."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch

from cphicache.transfer.port import Wait
from cphicache.transfer.streams.cuda import CudaStreams
from tests.gpu import NEEDS_GPU, hold_current_stream

pytestmark = NEEDS_GPU


@pytest.fixture
def streams() -> Iterator[CudaStreams]:
    made = CudaStreams()
    yield made
    made.close()


@pytest.fixture
def buffers() -> tuple[torch.Tensor, torch.Tensor]:
    """A device buffer of zeros and a pinned host buffer of sevens."""
    device = torch.zeros(1 << 20, dtype=torch.uint8, device="cuda")
    host = torch.full((1 << 20,), 7, dtype=torch.uint8).pin_memory()
    torch.cuda.synchronize()
    return device, host


@pytest.mark.parametrize("wait", [True, False])
def test_a_copy_waits_for_the_store(streams: CudaStreams, buffers: tuple[torch.Tensor, torch.Tensor], wait: bool) -> None:
    """R34: with the event the copy takes what the held store writes; without it, what was there before."""
    device, host = buffers
    compute, write = streams.stream("compute"), streams.stream("write")
    compute.submit(hold_current_stream)
    compute.submit(partial(device.fill_, 1))
    if wait:
        write.wait(compute.record(), Wait.STORE_TO_COPY)
    write.submit(partial(host.copy_, device, non_blocking=True))
    streams.synchronize(write.record())
    assert host.unique().tolist() == [1 if wait else 0]


@pytest.mark.parametrize("wait", [True, False])
def test_a_store_waits_for_the_copy(streams: CudaStreams, buffers: tuple[torch.Tensor, torch.Tensor], wait: bool) -> None:
    """R34: with the event a page is written again only after a held copy of it; without it the copy takes the new bytes."""
    device, host = buffers
    compute, write = streams.stream("compute"), streams.stream("write")
    write.submit(hold_current_stream)
    write.submit(partial(host.copy_, device, non_blocking=True))
    if wait:
        compute.wait(write.record(), Wait.COPY_TO_REUSE)
    compute.submit(partial(device.fill_, 1))
    streams.synchronize(write.record())
    assert host.unique().tolist() == [0 if wait else 1]


@pytest.mark.parametrize("wait", [True, False])
def test_a_read_waits_for_the_load(streams: CudaStreams, buffers: tuple[torch.Tensor, torch.Tensor], wait: bool) -> None:
    """R34: with the event the forward reads what a held load brings; without it, what was there before."""
    device, host = buffers
    read = torch.empty_like(device)
    torch.cuda.synchronize()
    compute, load = streams.stream("compute"), streams.stream("load")
    load.submit(hold_current_stream)
    load.submit(partial(device.copy_, host, non_blocking=True))
    if wait:
        compute.wait(load.record(), Wait.LOAD_TO_READ)
    compute.submit(partial(read.copy_, device))
    streams.synchronize(compute.record())
    assert read.unique().tolist() == [7 if wait else 0]


def test_nothing_blocks_the_scheduler_thread(streams: CudaStreams, buffers: tuple[torch.Tensor, torch.Tensor]) -> None:
    """R34: submit, record, wait and query come back while the device is held: the event behind it all is not complete yet."""
    device, host = buffers
    compute, write = streams.stream("compute"), streams.stream("write")
    compute.submit(hold_current_stream)
    write.wait(compute.record(), Wait.STORE_TO_COPY)
    for _ in range(64):
        write.submit(partial(host.copy_, device, non_blocking=True))
    event = write.record()
    assert not streams.query(event, Wait.DRAIN_TO_FREE)
    streams.synchronize(event)
    assert streams.query(event, Wait.DRAIN_TO_FREE)


def test_compute_is_the_stream_of_the_forward() -> None:
    """R34: streams made under a stream of the model runner take that one as ``compute``; the others are new."""
    forward = torch.cuda.Stream()
    with torch.cuda.stream(forward):
        streams = CudaStreams()
    assert streams.stream("compute").device_stream == forward
    assert len({streams.stream(name).device_stream.cuda_stream for name in ("compute", "write", "load")}) == 3  # type: ignore[attr-defined]
    streams.close()
