"""The copy backend port: move token rows between two byte buffers, and touch nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch


class RowPair(NamedTuple):
    """Source and destination of one copy: uint8 ``[slots, item_bytes]``, dense in the last dimension, any row stride."""

    source: torch.Tensor
    destination: torch.Tensor

    def reversed(self) -> RowPair:
        """The same buffers, the other way."""
        return RowPair(self.destination, self.source)


class Run(NamedTuple):
    """``length`` rows that are neighbours on both sides."""

    source: int
    destination: int
    length: int


@dataclass(frozen=True, slots=True)
class RowPlan:
    """Which rows go where: row ``source_rows[i]`` to ``destination_rows[i]`` (int64, CPU), and the same as maximal ``runs``."""

    source_rows: torch.Tensor
    destination_rows: torch.Tensor
    runs: tuple[Run, ...]


def plan_rows(source_rows: torch.Tensor, destination_rows: torch.Tensor, source_slots: int, destination_slots: int) -> RowPlan:
    """Check the indices and merge neighbours. Raises ValueError for other than two equally long int64 vectors on the CPU, and
    IndexError for a row outside its buffer (a negative one would otherwise wrap around)."""
    for name, rows, slots in (("source", source_rows, source_slots), ("destination", destination_rows, destination_slots)):
        if rows.dtype != torch.int64 or rows.dim() != 1 or rows.device.type != "cpu":
            raise ValueError(f"{name} rows are {rows.dtype} {list(rows.shape)} on {rows.device}: give a vector of int64 on the CPU")
        if rows.numel():
            low, high = (int(bound) for bound in torch.aminmax(rows))
            if low < 0 or high >= slots:
                raise IndexError(f"{name} rows {low}..{high} leave the buffer's slots 0..{slots - 1}")
    rows_count = source_rows.numel()
    if destination_rows.numel() != rows_count:
        raise ValueError(f"{rows_count} source rows for {destination_rows.numel()} destination rows: give equally many")
    if not rows_count:
        return RowPlan(source_rows, destination_rows, ())
    broken = (torch.diff(source_rows) != 1) | (torch.diff(destination_rows) != 1)
    starts = [0, *(torch.nonzero(broken).flatten() + 1).tolist()]
    lengths = [end - start for start, end in zip(starts, [*starts[1:], rows_count], strict=True)]
    sources = source_rows[starts].tolist()
    destinations = destination_rows[starts].tolist()
    return RowPlan(source_rows, destination_rows, tuple(map(Run, sources, destinations, lengths)))


class CopyBackend(Protocol):
    """Moves rows. Runs on a stream's own thread: it keeps no state of a call."""

    @property
    def name(self) -> str:
        """The value of the option ``io_backend``."""

    def copy_rows(self, pairs: Sequence[RowPair], plan: RowPlan) -> None:
        """Apply one plan to every pair of buffers. Destination rows are distinct. Touches exactly the planned rows."""
