"""Host memory for KV pools: one address range a buffer, touched and pinned in chunks.

A buffer must be one range, because copies address it by base and stride. Touching and pinning it in one call can take minutes for
hundreds of GiB, without a sign of life and with nothing to give back when it fails half way; chunk by chunk it is bounded, and a
failure unpins what was pinned. A copy may cross chunks: CUDA asks only that the whole range be registered.
"""

from __future__ import annotations

from typing import Protocol

import torch

CHUNK_BYTES = 1 << 30
ALIGNMENT = 4096
"""Buffers and chunks begin at pages of the operating system, so that no page belongs to two registrations."""


class HostMemoryError(RuntimeError):
    """Host memory could not be had or pinned. One line: how much, how far it came, what to do. Nothing stays pinned."""


class Pin(Protocol):
    """Registers host memory with the device driver."""

    def register(self, address: int, size_bytes: int) -> None:
        """Page-lock a range and make it known to the device. Raises RuntimeError."""

    def unregister(self, address: int) -> None:
        """Undo :meth:`register`."""


class CudaPin:
    """The CUDA runtime's ``cudaHostRegister``, portable to every context of the process."""

    _PORTABLE = 1

    def register(self, address: int, size_bytes: int) -> None:
        """See :class:`Pin`."""
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        self._check(runtime.cudaHostRegister(address, size_bytes, self._PORTABLE))

    def unregister(self, address: int) -> None:
        """See :class:`Pin`."""
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        self._check(runtime.cudaHostUnregister(address))

    @staticmethod
    def _check(status: object) -> None:
        if int(status) != 0:  # type: ignore[call-overload]
            raise RuntimeError(f"CUDA answers {status!r}")


class HostMemory:
    """Buffers of one rank's host pools. ``pin``: None for pageable memory. ``chunk_bytes``: touched and pinned at a time.

    Raises ValueError for a chunk that is not a positive multiple of 4096 bytes.
    """

    def __init__(self, pin: Pin | None = None, chunk_bytes: int = CHUNK_BYTES) -> None:
        if chunk_bytes < ALIGNMENT or chunk_bytes % ALIGNMENT:
            raise ValueError(f"chunk_bytes={chunk_bytes}: give a positive multiple of {ALIGNMENT}")
        self._pin = pin
        self._chunk_bytes = chunk_bytes
        self._pinned: list[int] = []

    @classmethod
    def for_device(cls, device: torch.device | str) -> HostMemory:
        """Memory that copies from and to ``device`` want: pinned for a GPU, else pageable."""
        return cls(CudaPin() if torch.device(device).type == "cuda" else None)

    @property
    def pinned_chunks(self) -> int:
        """Chunks that are pinned now."""
        return len(self._pinned)

    def allocate(self, size_bytes: int) -> torch.Tensor:
        """A zeroed uint8 vector on the CPU that begins at a page. Raises :class:`HostMemoryError` with nothing of it pinned."""
        if size_bytes < 1:
            raise ValueError(f"size_bytes={size_bytes}: a buffer has at least one byte")
        # Whole pages belong to this buffer alone; the first one begins within the extra page.
        whole = -(-size_bytes // ALIGNMENT) * ALIGNMENT
        try:
            backing = torch.empty(whole + ALIGNMENT, dtype=torch.uint8)
        except RuntimeError as error:
            raise HostMemoryError(
                f"host pool buffer of {size_bytes} bytes: the system has not that much memory; make the host pool smaller"
            ) from error
        skip = -backing.data_ptr() % ALIGNMENT
        buffer = backing[skip : skip + whole]
        mine: list[int] = []
        for start in range(0, whole, self._chunk_bytes):
            chunk = buffer[start : start + self._chunk_bytes].zero_()
            if self._pin is not None:
                try:
                    self._pin.register(chunk.data_ptr(), chunk.numel())
                except RuntimeError as error:
                    self._unpin(mine)
                    raise HostMemoryError(
                        f"pinning {size_bytes} bytes of host memory failed at byte {start} ({error}): make the host pool smaller, "
                        "or raise the limit of locked memory (ulimit -l, the container's memory limit)"
                    ) from error
                mine.append(chunk.data_ptr())
        self._pinned += mine
        return buffer[:size_bytes]

    def close(self) -> None:
        """Unpin everything. No copy may be in flight; the buffers stay usable as pageable memory. Idempotent."""
        pinned, self._pinned = self._pinned, []
        self._unpin(pinned)

    def _unpin(self, addresses: list[int]) -> None:
        if self._pin is not None:
            for address in reversed(addresses):
                self._pin.unregister(address)
