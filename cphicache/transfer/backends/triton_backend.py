"""Backend ``triton``: an own kernel that moves token rows of any layout, and reads and writes pinned host memory itself.

It is the one backend that copies a single layer from ``layer_first`` device buffers to a ``page_first`` host buffer in one launch
(sgl-kernel has no such operator). The package triton is imported at the first copy.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from math import gcd
from threading import Lock
from typing import Any, NamedTuple

import torch

from cphicache.transfer.backends.port import RowPair, RowPlan

MAX_PROGRAMS = 64
"""Programs of one launch. The host link, not the number of programs, bounds a copy; the rest of the GPU stays with the forward."""
MAX_TOKENS_A_ROW = 1024
"""Most neighbouring tokens that are moved as one row."""

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
_INTERPRETER = Lock()
"""Triton's interpreter replaces parts of ``triton.language`` while a kernel runs: one launch at a time in a process."""


class TritonUnavailable(RuntimeError):
    """Backend ``triton`` cannot run here; the text says what is missing and what to do."""


class _Side(NamedTuple):
    """One buffer in words: row ``r`` begins at ``r // page * page_words + r % page * slot_words``."""

    words: torch.Tensor
    page: int
    page_words: int
    slot_words: int
    item_words: int

    @classmethod
    def of(cls, rows: torch.Tensor, word_bytes: int) -> _Side:
        words = rows.view(_WORDS[word_bytes])
        if words.dim() == 2:
            return cls(words, 1, words.stride(0), words.stride(0), words.shape[1])
        return cls(words, words.shape[1], words.stride(0), words.stride(1), words.shape[2])

    def joinable(self, tokens: int) -> int:
        """Of ``tokens`` neighbours, how many lie in memory without a gap: a divisor of ``tokens``."""
        if self.slot_words != self.item_words:
            return 1
        dense_pages = self.page == 1 or self.page_words == self.page * self.slot_words
        return tokens if dense_pages else gcd(tokens, self.page)


class TritonBackend:
    """Copies with an own Triton kernel: from and to GPU buffers and pinned host buffers, one launch a pair of buffers.

    ``interpret``: run in Triton's interpreter on CPU buffers (slow, for tests); None: as ``TRITON_INTERPRET`` says at the first copy.
    ``max_programs``: programs of one launch, which bounds how much of the GPU a copy takes. Raises ValueError below 1.
    """

    name = "triton"

    def __init__(self, *, interpret: bool | None = None, max_programs: int = MAX_PROGRAMS) -> None:
        if max_programs < 1:
            raise ValueError(f"max_programs={max_programs}: a launch has at least one program")
        self._interpret = interpret
        self._max_programs = max_programs
        self._kernel: Any = None
        self._kernels: Any = None

    def require_available(self) -> None:
        """Raise :class:`TritonUnavailable` unless triton can be imported. Imports it."""
        if self._kernel is not None:
            return
        try:
            from cphicache.transfer.backends import triton_kernels
        except ImportError as error:
            raise TritonUnavailable(
                f"io_backend 'triton' needs the package triton ({error}): pip install 'cphicache[triton]', or choose another io_backend"
            ) from error
        if self._interpret is None:
            self._interpret = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "y", "on")
        self._kernels = triton_kernels
        self._kernel = triton_kernels.interpreted() if self._interpret else triton_kernels.compiled()

    def check_pair(self, pair: RowPair) -> None:
        """Raise ValueError for buffers that a kernel cannot reach, :class:`TritonUnavailable` without triton."""
        self.require_available()
        self._device(pair)

    def copy_rows(self, pairs: Sequence[RowPair], plan: RowPlan) -> None:
        """Apply one plan to every pair of buffers; touches exactly the planned rows.

        A buffer is uint8, ``[slots, item_bytes]`` or ``[pages, page_size, item_bytes]``, dense in the last dimension, any other
        stride. Raises ValueError for buffers that a kernel cannot reach, :class:`TritonUnavailable` without triton.
        """
        if not plan.runs or not pairs:
            return
        self.require_available()
        devices = [self._device(pair) for pair in pairs]
        neighbours = gcd(*(number for run in plan.runs for number in run))
        rows_by_step: dict[tuple[torch.device, int], tuple[torch.Tensor, torch.Tensor]] = {}
        for pair, device in zip(pairs, devices, strict=True):
            word_bytes = _word_bytes(pair)
            source, destination = (_Side.of(rows, word_bytes) for rows in pair)
            tokens = gcd(source.joinable(neighbours), destination.joinable(neighbours), MAX_TOKENS_A_ROW)
            rows = rows_by_step.get((device, tokens))
            if rows is None:
                rows = _to(device, plan.source_rows[::tokens]), _to(device, plan.destination_rows[::tokens])
                rows_by_step[device, tokens] = rows
            self._launch(device, source, destination, rows, words=source.item_words * tokens)

    def _launch(
        self, device: torch.device, source: _Side, destination: _Side, rows: tuple[torch.Tensor, torch.Tensor], *, words: int
    ) -> None:
        source_rows, destination_rows = rows
        tile_words = self._kernels.TILE_WORDS
        block_words = min(1 << (words - 1).bit_length(), tile_words)
        block_rows = tile_words // block_words
        count = source_rows.numel()
        tiles = -(-count // block_rows) * -(-words // block_words)
        options = {} if self._interpret else self._kernels.OPTIONS
        with _INTERPRETER if self._interpret else torch.cuda.device(device):
            self._kernel[(min(tiles, self._max_programs),)](
                source.words,
                destination.words,
                source_rows,
                destination_rows,
                count,
                words,
                source.page_words,
                source.slot_words,
                destination.page_words,
                destination.slot_words,
                SOURCE_PAGE=source.page,
                DESTINATION_PAGE=destination.page,
                BLOCK_ROWS=block_rows,
                BLOCK_WORDS=block_words,
                **options,
            )

    def _device(self, pair: RowPair) -> torch.device:
        """Where the kernel runs for this pair. Raises ValueError when it cannot reach both buffers."""
        if pair.source.shape[-1] != pair.destination.shape[-1]:
            raise ValueError(f"item_bytes {pair.source.shape[-1]} and {pair.destination.shape[-1]}: use the same for both buffers")
        on_gpu = {rows.device for rows in pair if rows.device.type == "cuda"}
        if self._interpret:
            if on_gpu:
                raise ValueError(f"buffer on {on_gpu.pop()}: Triton's interpreter copies CPU buffers; unset TRITON_INTERPRET")
            return torch.device("cpu")
        if not on_gpu:
            raise ValueError(
                "both buffers are on the CPU: io_backend 'triton' needs a GPU (or TRITON_INTERPRET=1, for tests); use io_backend 'torch'"
            )
        if len(on_gpu) > 1:
            raise ValueError(f"buffers on {sorted(map(str, on_gpu))}: a copy is between one GPU and the host")
        for rows in pair:
            if rows.device.type != "cuda" and not rows.is_pinned():
                raise ValueError("the host buffer is not pinned: a kernel reaches pinned host memory only; pin the host pool")
        return on_gpu.pop()


def _word_bytes(pair: RowPair) -> int:
    """The widest word (8, 4, 2 or 1 bytes) that sizes, strides and addresses of both buffers are multiples of."""
    sizes = [number for rows in pair for number in (rows.shape[-1], rows.storage_offset(), rows.data_ptr(), *rows.stride()[:-1])]
    return gcd(8, *sizes)


def _to(device: torch.device, rows: torch.Tensor) -> torch.Tensor:
    """Rows where the kernel reads them. Pageable memory would make the copy wait for the GPU: they go through pinned memory."""
    rows = rows.contiguous()
    return rows if device.type == "cpu" else rows.pin_memory().to(device, non_blocking=True)
