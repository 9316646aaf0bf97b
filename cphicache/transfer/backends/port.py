"""The copy backend ports, and what passes through them: buffers of one pool pair, and which rows go where."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol, TypeAlias

import torch

from cphicache.spaces.tensors import tokens_of


class RowPair(NamedTuple):
    """Source and destination of one copy: uint8, each ``[rows, item_bytes]`` or ``[pages, page_size, item_bytes]`` (row ``r`` is
    then at ``[r // page_size, r % page_size]``), dense in the last dimension, any other strides."""

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


class PageSlots:
    """Token slots of whole pages, page by page: what a vector of slots says, in page numbers. The vector is made when it is asked for."""

    __slots__ = ("_slots", "page_size", "pages")

    def __init__(self, pages: Sequence[int], page_size: int) -> None:
        self.pages = pages
        self.page_size = page_size
        self._slots: torch.Tensor | None = None

    @property
    def slots(self) -> torch.Tensor:
        """The slots, int64 on the CPU."""
        if self._slots is None:
            self._slots = tokens_of(self.pages, self.page_size)
        return self._slots


Indices: TypeAlias = torch.Tensor | PageSlots
"""Token slots: an int64 CPU vector, or whole pages."""


class RowPlan:
    """Which rows go where: row ``source_rows[i]`` to ``destination_rows[i]`` (int64, CPU), and the same as maximal ``runs``: rows that
    are neighbours on both sides."""

    __slots__ = ("_by_page", "_destination", "_moved", "_runs", "_source")

    def __init__(self, source: Indices, destination: Indices, runs: tuple[Run, ...] | None = None) -> None:
        """``runs`` may be left out for whole pages on both sides: they are made for whoever asks."""
        self._source = source
        self._destination = destination
        self._runs = runs
        self._by_page: dict[int, RowPlan] | None = None
        self._moved: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] | None = None

    @property
    def source_rows(self) -> torch.Tensor:
        """Rows of the source."""
        return self._source.slots if isinstance(self._source, PageSlots) else self._source

    @property
    def destination_rows(self) -> torch.Tensor:
        """The row of the destination for each of them."""
        return self._destination.slots if isinstance(self._destination, PageSlots) else self._destination

    @property
    def runs(self) -> tuple[Run, ...]:
        """Maximal runs, in the order of the rows."""
        if self._runs is None:
            if not isinstance(self._source, PageSlots) or not isinstance(self._destination, PageSlots):
                raise TypeError("runs are left out of a plan of slots: give them, or whole pages on both sides")
            self._runs = _page_runs(self._source.pages, self._destination.pages, self._source.page_size)
        return self._runs

    @property
    def row_count(self) -> int:
        """Rows that are copied."""
        source = self._source
        return len(source.pages) * source.page_size if isinstance(source, PageSlots) else source.numel()

    def by_page(self, page_size: int) -> RowPlan:
        """The same plan in pages of ``page_size`` rows. Raises ValueError unless both sides are whole pages, aligned."""
        if self._by_page is None:
            self._by_page = {}
        known = self._by_page.get(page_size)
        if known is None:
            known = self._by_page[page_size] = self._pages(page_size)
        return known

    def _pages(self, page_size: int) -> RowPlan:
        source, destination = self._source, self._destination
        if isinstance(source, PageSlots) and isinstance(destination, PageSlots) and source.page_size == page_size:
            return RowPlan(PageSlots(source.pages, 1), PageSlots(destination.pages, 1))
        return _planned(
            _whole_pages("source", self.source_rows, page_size), _whole_pages("destination", self.destination_rows, page_size)
        )

    def by_whole_pages(self, page_size: int) -> RowPlan | None:
        """As :meth:`by_page`; None unless both sides are whole pages."""
        try:
            return self.by_page(page_size)
        except ValueError:
            return None

    def on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Source and destination rows on ``device``, moved once, in stream order (through pinned memory: nothing synchronises)."""
        if device.type == "cpu":
            return self.source_rows, self.destination_rows
        if self._moved is None:
            self._moved = {}
        known = self._moved.get(device)
        if known is None:
            source, destination = (
                rows.pin_memory().to(device, non_blocking=True) for rows in (self.source_rows, self.destination_rows)
            )
            known = self._moved[device] = source, destination
        return known


def plan_rows(source_rows: torch.Tensor, destination_rows: torch.Tensor, source_slots: int, destination_slots: int) -> RowPlan:
    """Check the indices and merge neighbours. Raises ValueError for other than two equally long int64 vectors on the CPU, or for a
    destination row that is written twice, and IndexError for a row outside its buffer (a negative one would wrap around)."""
    for name, rows, slots in (("source", source_rows, source_slots), ("destination", destination_rows, destination_slots)):
        if rows.dtype != torch.int64 or rows.dim() != 1 or rows.device.type != "cpu":
            raise ValueError(f"{name} rows are {rows.dtype} {list(rows.shape)} on {rows.device}: give a vector of int64 on the CPU")
        if rows.numel():
            low, high = (int(bound) for bound in torch.aminmax(rows))
            if low < 0 or high >= slots:
                raise IndexError(f"{name} rows {low}..{high} leave the buffer's slots 0..{slots - 1}")
    if destination_rows.numel() != source_rows.numel():
        raise ValueError(f"{source_rows.numel()} source rows for {destination_rows.numel()} destination rows: give equally many")
    ordered = destination_rows.sort().values
    twice = ordered[1:][ordered[1:] == ordered[:-1]]
    if twice.numel():
        raise ValueError(f"destination row {int(twice[0])} is given twice: a copy writes each row once")
    return _planned(source_rows, destination_rows)


def plan_pages(source: PageSlots, destination: PageSlots, source_slots: int, destination_slots: int) -> RowPlan:
    """:func:`plan_rows` for whole pages of one size, in page numbers only. Raises as that does."""
    size = source.page_size
    if destination.page_size != size:
        raise ValueError(f"source pages of {size} tokens, destination pages of {destination.page_size}: give one size")
    at, to = source.pages, destination.pages
    if len(at) != len(to):
        raise ValueError(f"{len(at)} source pages for {len(to)} destination pages: give equally many")
    if at:
        for name, pages, slots in (("source", at, source_slots), ("destination", to, destination_slots)):
            if min(pages) < 0 or (max(pages) + 1) * size > slots:
                raise IndexError(
                    f"{name} pages {min(pages)}..{max(pages)} of {size} tokens leave the buffer's slots 0..{slots - 1}"
                )
        if len(set(to)) != len(to):
            twice = next(page for page, count in Counter(to).items() if count > 1)
            raise ValueError(f"destination page {twice} is given twice: a copy writes each row once")
    return RowPlan(source, destination)


def _page_runs(source: Sequence[int], destination: Sequence[int], size: int) -> tuple[Run, ...]:
    """Pages as maximal runs of rows, ``size`` a page."""
    runs: list[Run] = []
    first = to = count = 0
    for page, target in zip(source, destination, strict=True):
        if count and page == first + count and target == to + count:
            count += 1
            continue
        if count:
            runs.append(Run(first * size, to * size, count * size))
        first, to, count = page, target, 1
    if count:
        runs.append(Run(first * size, to * size, count * size))
    return tuple(runs)


def _planned(source_rows: torch.Tensor, destination_rows: torch.Tensor) -> RowPlan:
    rows_count = source_rows.numel()
    if not rows_count:
        return RowPlan(source_rows, destination_rows, ())
    broken = (torch.diff(source_rows) != 1) | (torch.diff(destination_rows) != 1)
    starts = [0, *(torch.nonzero(broken).flatten() + 1).tolist()]
    lengths = [end - start for start, end in zip(starts, [*starts[1:], rows_count], strict=True)]
    sources = source_rows[starts].tolist()
    destinations = destination_rows[starts].tolist()
    return RowPlan(source_rows, destination_rows, tuple(map(Run, sources, destinations, lengths)))


def _whole_pages(name: str, rows: torch.Tensor, page_size: int) -> torch.Tensor:
    firsts = rows[::page_size]
    whole = firsts.numel() * page_size == rows.numel() and not (firsts % page_size).any()
    if not whole or not torch.equal(rows, (firsts[:, None] + torch.arange(page_size)).reshape(-1)):
        raise ValueError(f"{name} rows are not whole pages of {page_size} tokens: this copy goes by page, give whole pages")
    return firsts // page_size


@dataclass(frozen=True)
class CopyGroup:
    """Buffers that are copied together, of one device pool and one host pool: one component, or K and V of one size.

    ``device``: by component, by local layer: uint8 ``[rows, item_bytes]``, dense. ``host``: by component, uint8:
    ``layer_first`` ``[layers, rows, item_bytes]``, ``page_first`` ``[rows, layers, item_bytes]``, ``page_first_direct``
    ``[pages, layers, page_rows, item_bytes]``. ``layers``: the payload's layers that have the component; local layer ``i`` is
    ``layers[i]``. A row is a token slot, or a whole page when ``by_page`` (``page_rows`` is 1 then, else the page size).
    """

    components: tuple[str, ...]
    layers: tuple[int, ...]
    device: tuple[tuple[torch.Tensor, ...], ...]
    host: tuple[torch.Tensor, ...]
    layout: str
    item_bytes: int
    page_rows: int
    by_page: bool

    @cached_property
    def device_tables(self) -> tuple[torch.Tensor, ...]:
        """By component: addresses of the layers' device buffers, uint64 ``[layers]``, where a kernel on that device reads them."""
        return tuple(_table(layers, layers[0].device) for layers in self.device)

    @cached_property
    def host_tables(self) -> tuple[torch.Tensor, ...]:
        """The same of a ``layer_first`` host buffer. Pinned memory has one address for the host and the device."""
        return tuple(_table(host.unbind(0), self.device[0][0].device) for host in self.host)

    def host_rows(self, component: int, layer: int) -> torch.Tensor:
        """The rows of one local layer of a host buffer, as :class:`RowPair` has them."""
        host = self.host[component]
        return host[layer] if self.layout == "layer_first" else host[:, layer]


def _table(buffers: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    return torch.tensor([buffer.data_ptr() for buffer in buffers], dtype=torch.uint64, device=device)


class RowBackend(Protocol):
    """Moves rows between two buffers. Runs on a stream's own thread: it keeps no state of a call."""

    @property
    def name(self) -> str:
        """The value of the option ``io_backend``."""

    def check_pair(self, pair: RowPair) -> None:
        """Raise ValueError, naming what is wrong, unless rows can be copied between the two buffers."""

    def copy_rows(self, pairs: Sequence[RowPair], plan: RowPlan) -> None:
        """Apply one plan to every pair of buffers. Destination rows are distinct. Touches exactly the planned rows."""


class CopyBackend(Protocol):
    """Moves layers of a group. ``layer`` is a local layer of the group, ``plan`` in rows of the group, from source to destination.
    Runs on a stream's own thread, touches exactly the planned rows, and never synchronises with a GPU."""

    @property
    def name(self) -> str:
        """The value of the option ``io_backend``."""

    def check(self, group: CopyGroup) -> None:
        """Raise ValueError, naming what is wrong, unless this backend can copy the group."""

    def backup_layer(self, group: CopyGroup, layer: int, plan: RowPlan) -> None:
        """D2H of one layer."""

    def backup_layers(self, group: CopyGroup, plan: RowPlan) -> None:
        """D2H of every layer of the group."""

    def load_layer(self, group: CopyGroup, layer: int, plan: RowPlan) -> None:
        """H2D of one layer."""
