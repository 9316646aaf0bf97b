"""Backend ``torch``: plain tensor copies, on any device that torch knows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from cphicache.transfer.backends.port import RowPair, RowPlan, Run

MIN_RUN_ROWS = 4
"""Mean run length from which one slice copy a run beats one gather and scatter of all rows (a slice copy costs about 0.5 us)."""


def _apart(pair: RowPair) -> bool:
    """Whether rows of a buffer, or of its pages, do not follow each other in memory."""
    return any(rows.stride(-2) != rows.shape[-1] for rows in pair)


def _widened(pair: RowPair) -> RowPair:
    """The pair as int64 where alignment allows: torch gathers wide elements about 5 times as fast as bytes."""
    for rows in pair:
        if (
            rows.shape[-1] % 8
            or any(stride % 8 for stride in rows.stride()[:-1])
            or rows.data_ptr() % 8
            or rows.storage_offset() % 8
        ):
            return pair
    return RowPair(pair.source.view(torch.int64), pair.destination.view(torch.int64))


class TorchBackend:
    """Runs of neighbours become slice copies; short runs between CPU buffers become one gather and one scatter.

    Between CPU buffers the slices are those of numpy's views of the same memory: a slice and its copy cost a fifth of torch's calls.
    """

    name = "torch"

    def check_pair(self, pair: RowPair) -> None:
        """torch copies between any two buffers, but rows that lie apart (``page_first``) only on the CPU: between a GPU and the host it
        would go through pageable memory, and the host would wait for the GPU at every copy. Raises ValueError."""
        if _apart(pair) and any(rows.device.type != "cpu" for rows in pair):
            raise ValueError(
                "io_backend 'torch' copies rows that lie apart, as in layout page_first, on the CPU only: with a GPU use io_backend "
                "kernel or triton, or layout layer_first or page_first_direct"
            )

    def copy_rows(self, pairs: Sequence[RowPair], plan: RowPlan) -> None:
        """Apply one plan to every pair of buffers; touches exactly the planned rows."""
        if not plan.runs:
            return
        long_runs = len(plan.runs) == 1 or plan.row_count >= MIN_RUN_ROWS * len(plan.runs)
        for pair in pairs:
            if any(rows.device.type != "cpu" for rows in pair):
                # Between a GPU and the host a gather would need the bytes on the host at once, which synchronises: slices only.
                _queue_runs(pair, plan.runs)
            elif long_runs:
                _copy_runs(pair, plan)
            else:
                source, destination = _widened(pair)
                destination[_index(destination, plan.destination_rows)] = source[_index(source, plan.source_rows)]


def _queue_runs(pair: RowPair, runs: Sequence[Run]) -> None:
    for run in runs:
        for source, destination, length in _pieces(run, pair):
            _slice(pair.destination, destination, length).copy_(_slice(pair.source, source, length), non_blocking=True)


def _copy_runs(pair: RowPair, plan: RowPlan) -> None:
    """On the CPU: a run is one slice, of rows or, where a buffer has pages, of pages."""
    page_rows = max(rows.shape[1] if rows.dim() == 3 else 0 for rows in pair)
    if page_rows:
        by_page = None if _apart(pair) else plan.by_whole_pages(page_rows)
        if by_page is None:
            _queue_runs(pair, plan.runs)
            return
        plan = by_page
    source, destination = (_elements(rows, page_rows) for rows in pair)
    for at, to, length in plan.runs:
        destination[to : to + length] = source[at : at + length]


def _elements(rows: torch.Tensor, page_rows: int) -> npt.NDArray[np.void]:
    """One opaque element a row, or a page where ``page_rows`` is not 0: numpy moves each as a block, also where they lie apart."""
    array = rows.numpy()
    if page_rows:
        pages = len(array) if array.ndim == 3 else len(array) // page_rows
        array = array if array.ndim == 3 else array[: pages * page_rows]
        array = array.reshape(pages, page_rows * array.shape[-1])
    elements: npt.NDArray[np.void] = array.view(np.dtype((np.void, array.shape[-1])))
    return elements[:, 0]


def _pieces(run: Run, pair: RowPair) -> Iterator[Run]:
    """The run, cut at the page borders of buffers that have pages."""
    pages = [rows.shape[1] if rows.dim() == 3 else 0 for rows in pair]
    at, to, left = run
    while left:
        length = min([left, *(page - row % page for page, row in zip(pages, (at, to), strict=True) if page)])
        yield Run(at, to, length)
        at, to, left = at + length, to + length, left - length


def _slice(rows: torch.Tensor, start: int, length: int) -> torch.Tensor:
    if rows.dim() == 2:
        return rows[start : start + length]
    page, offset = divmod(start, rows.shape[1])
    return rows[page, offset : offset + length]


def _index(rows: torch.Tensor, numbers: torch.Tensor) -> tuple[torch.Tensor, ...]:
    if rows.dim() == 2:
        return (numbers,)
    return numbers // rows.shape[1], numbers % rows.shape[1]
