"""Host memory of pools: aligned, touched and pinned chunk by chunk, and given back whole."""

from __future__ import annotations

import pytest
import torch

from cphicache.transfer.pools.host import make_host_pool
from cphicache.transfer.pools.memory import HostMemory, HostMemoryError
from tests.transfer.rigs import shape_of

CHUNK = 8192


class PinBook:
    """A driver that writes down what is registered, and refuses from the ``limit``-th chunk on."""

    def __init__(self, limit: int = 100) -> None:
        self.held: dict[int, int] = {}
        self.most_bytes = 0
        self._limit = limit

    def register(self, address: int, size_bytes: int) -> None:
        if len(self.held) >= self._limit:
            raise RuntimeError("out of locked memory")
        assert not any(start < address + size_bytes and address < start + size for start, size in self.held.items())
        self.held[address] = size_bytes
        self.most_bytes = max(self.most_bytes, size_bytes)

    def unregister(self, address: int) -> None:
        del self.held[address]


def test_a_buffer_is_one_zeroed_range_that_is_pinned_in_chunks() -> None:
    """R31: a buffer begins at a page, is zero, and every byte of it is pinned, at most a chunk in one call; close unpins all."""
    book = PinBook()
    memory = HostMemory(book, CHUNK)
    buffers = [memory.allocate(size) for size in (3 * CHUNK + 5, 1)]
    for buffer in buffers:
        assert buffer.data_ptr() % 4096 == 0
        assert not buffer.any()
    assert book.most_bytes == CHUNK
    assert memory.pinned_chunks == len(book.held) == 5
    for buffer in buffers:
        at = buffer.data_ptr()
        while at < buffer.data_ptr() + buffer.numel():
            at += book.held[at]
    memory.close()
    memory.close()
    assert not book.held
    assert not buffers[0].any()


def test_a_failure_half_way_gives_everything_back() -> None:
    """R31: when a chunk cannot be pinned, one line names size, place and remedy, what was pinned for it is not any more, and buffers
    from before stay pinned."""
    book = PinBook(limit=3)
    memory = HostMemory(book, CHUNK)
    memory.allocate(CHUNK)
    with pytest.raises(HostMemoryError, match=r"pinning 40960 bytes .* at byte 16384 \(out of locked memory\): .*ulimit -l"):
        memory.allocate(5 * CHUNK)
    assert memory.pinned_chunks == len(book.held) == 1


def test_pools_take_their_buffers_from_it() -> None:
    """R31: all buffers of a host pool come from the memory that it is given; without a device driver nothing is pinned."""
    book = PinBook()
    memory = HostMemory(book, CHUNK)
    pool = make_host_pool("page_first", shape_of("dsa", 3), 64, 16, memory=memory)
    assert {pool.buffer(name).data_ptr() for name in pool.shape.components} == set(book.held)
    plain = HostMemory.for_device("cpu")
    plain.allocate(10)
    assert plain.pinned_chunks == 0


@pytest.mark.parametrize(("size_bytes", "chunk_bytes", "message"), [(0, CHUNK, "size_bytes=0"), (1, 0, "chunk"), (1, 100, "chunk")])
def test_impossible_sizes_are_refused(size_bytes: int, chunk_bytes: int, message: str) -> None:
    """R35: a buffer of nothing and a chunk that is not whole pages are refused."""
    with pytest.raises(ValueError, match=message):
        HostMemory(PinBook(), chunk_bytes).allocate(size_bytes)


def test_more_than_there_is_is_one_line() -> None:
    """R31: memory that the system does not have is refused with the size and the remedy."""
    with pytest.raises(HostMemoryError, match=r"host pool buffer of \d+ bytes: .* make the host pool smaller"):
        HostMemory().allocate(1 << 55)


@pytest.mark.gpu
def test_cuda_pins_chunks_that_copies_may_cross() -> None:
    """R31: with a GPU, buffers are pinned chunk by chunk, torch sees them as pinned, and a copy crosses chunks."""
    if not torch.cuda.is_available():
        pytest.skip("no GPU: torch.cuda.is_available() is False")
    memory = HostMemory(HostMemory.for_device("cuda")._pin, CHUNK)
    buffer = memory.allocate(4 * CHUNK)
    assert buffer.is_pinned()
    device = torch.randint(0, 256, (4 * CHUNK,), dtype=torch.uint8, device="cuda")
    buffer.copy_(device, non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(buffer, device.cpu())
    memory.close()


class Runtime:
    """The CUDA runtime, which answers ``status``."""

    def __init__(self, status: int) -> None:
        self.calls: list[tuple[object, ...]] = []
        self._status = status

    def cudaHostRegister(self, *arguments: int) -> int:
        self.calls.append(("register", *arguments))
        return self._status

    def cudaHostUnregister(self, *arguments: int) -> int:
        self.calls.append(("unregister", *arguments))
        return self._status


@pytest.mark.parametrize("status", [0, 2])
def test_memory_for_a_gpu_is_registered_for_every_context(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """R31: each chunk is registered once, portably, and given back; what CUDA refuses is a failure that names its answer."""
    runtime = Runtime(status)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    memory = HostMemory.for_device("cuda")
    if status:
        with pytest.raises(HostMemoryError, match=r"at byte 0 \(CUDA answers 2\)"):
            memory.allocate(CHUNK)
        return
    buffer = memory.allocate(CHUNK)
    memory.close()
    assert runtime.calls == [("register", buffer.data_ptr(), CHUNK, 1), ("unregister", buffer.data_ptr())]
