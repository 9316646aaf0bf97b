"""The local half without bytes: copies are intervals of a virtual clock, host slots are counts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from cphicache.spaces.types import LogicalPage
from cphicache.transfer.port import CopyStatus, LoadItem, OpKey


@dataclass(slots=True)
class Clock:
    """Virtual microseconds. ``now``: the scheduler's; ``compute``: when everything that the forward pass holds so far has been done."""

    now: float = 0.0
    compute: float = 0.0


@dataclass(slots=True)
class _Backup:
    pages: int
    kept_pages: int = 0
    end_us: float = 0.0


@dataclass(slots=True)
class _Load:
    pages: int
    end_us: float | None = None


class Link:
    """One direction of a rank's host link: one copy at a time, in the order of submission. ``busy_us``: time in which it copied."""

    __slots__ = ("_bytes_per_us", "busy_us", "free_us", "moved_bytes")

    def __init__(self, bytes_per_us: float) -> None:
        self._bytes_per_us = bytes_per_us
        self.free_us = self.busy_us = self.moved_bytes = 0.0

    def copy(self, size_bytes: float, ready_us: float) -> float:
        """Queue a copy that can start at ``ready_us``; returns when it ends."""
        took_us = size_bytes / self._bytes_per_us
        self.busy_us += took_us
        self.moved_bytes += size_bytes
        self.free_us = max(self.free_us, ready_us) + took_us
        return self.free_us


class MetadataTransfer:
    """Implements :class:`~cphicache.transfer.port.TransferPort` for one of ``cp_size`` ranks that all do alike.

    ``layers``: layers by payload. ``layer_page_bytes``: bytes of one page in one layer, of every payload. Each rank copies its share,
    1 / ``cp_size`` of every extent.
    """

    def __init__(
        self, clock: Clock, layers: Mapping[str, int], layer_page_bytes: float, d2h: Link, h2d: Link, *, cp_size: int = 1
    ) -> None:
        self.clock = clock
        self.d2h = d2h
        self.h2d = h2d
        self.used_pages = 0
        """Host pages in use over all ranks, to be held against the ledger's account."""
        self._layers = dict(layers)
        self._share_bytes = layer_page_bytes / cp_size
        self._layer_ends: dict[int, dict[tuple[str, int], float]] = {}
        self._backups: dict[OpKey, _Backup] = {}
        self._nodes: dict[int, int] = {}
        self._loads: dict[int, _Load] = {}
        self._queued: list[_Load] = []
        self._producers = 0

    def next_end_us(self) -> float | None:
        """When the next copy that is under way ends; None when none is."""
        ends = [backup.end_us for backup in self._backups.values()]
        ends += [load.end_us for load in self._loads.values() if load.end_us is not None]
        return min((end for end in ends if end > self.clock.now), default=None)

    # -- backup -------------------------------------------------------------------------------------------------------------
    def reserve(self, op: OpKey, pages: Sequence[LogicalPage]) -> None:
        """See the port. The ledger has the room."""
        self._backups[op] = _Backup(len(pages))
        self.used_pages += len(pages)

    def submit_layers(self, ops: Iterable[OpKey], payload: str, layers: Sequence[int]) -> None:
        """See the port: one copy for all, after what the forward holds now."""
        backups = [self._backups[op] for op in ops]
        size_bytes = sum(backup.pages for backup in backups) * self._share_bytes * len(layers)
        end_us = self.d2h.copy(size_bytes, self.clock.compute)
        for backup in backups:
            backup.end_us = end_us

    def status(self, op: OpKey) -> CopyStatus:
        """See the port."""
        return CopyStatus(self._backups[op].end_us <= self.clock.now, False)

    def wait_backup(self, op: OpKey) -> None:
        """See the port: time goes on until then."""
        self.clock.now = max(self.clock.now, self._backups[op].end_us)

    def shrink(self, op: OpKey, head_pages: int, *, free_now: bool) -> None:
        """See the port."""
        backup = self._backups[op]
        backup.pages -= head_pages
        if free_now:
            self.used_pages -= head_pages
        else:
            backup.kept_pages += head_pages

    def commit(self, op: OpKey) -> None:
        """See the port."""
        backup = self._backups.pop(op)
        self.used_pages -= backup.kept_pages
        self._nodes[op.node] = backup.pages

    def release(self, op: OpKey) -> None:
        """See the port."""
        backup = self._backups.pop(op)
        self.used_pages -= backup.pages + backup.kept_pages

    # -- committed nodes ----------------------------------------------------------------------------------------------------
    def free_node(self, node: int) -> None:
        """See the port."""
        self.used_pages -= self._nodes.pop(node)

    def split_node(self, node: int, head: int, head_pages: int) -> None:
        """See the port."""
        self._nodes[head] = head_pages
        self._nodes[node] -= head_pages

    # -- load-back ----------------------------------------------------------------------------------------------------------
    def queue_load(self, load: int, items: Sequence[LoadItem]) -> None:
        """See the port."""
        queued = self._loads[load] = _Load(sum(len(item.pages) for item in items))
        self._queued.append(queued)

    def start_loads(self) -> int:
        """See the port: layer after layer, all queued loads together."""
        if not self._queued:
            return -1
        started, self._queued = self._queued, []
        producer, self._producers = self._producers, self._producers + 1
        pages = sum(load.pages for load in started)
        ends = self._layer_ends[producer] = {}
        for payload, layers in self._layers.items():
            for layer in range(layers):
                ends[payload, layer] = self.h2d.copy(pages * self._share_bytes, self.clock.now)
        for load in started:
            load.end_us = self.h2d.free_us
        return producer

    def load_status(self, load: int) -> CopyStatus:
        """See the port."""
        end_us = self._loads[load].end_us
        return CopyStatus(end_us is not None and end_us <= self.clock.now, False)

    def wait_load(self, load: int) -> None:
        """See the port."""
        if self._loads[load].end_us is None:
            self.start_loads()
        self.clock.now = max(self.clock.now, self._loads[load].end_us or 0.0)

    def end_load(self, load: int) -> None:
        """See the port."""
        del self._loads[load]
        if not self._loads:
            self._layer_ends.clear()

    # -- the forward pass ---------------------------------------------------------------------------------------------------
    def before_store(self, pages: Sequence[LogicalPage]) -> None:
        """See the port: pages come free when their copies have ended, so that nothing is left to wait for."""

    def wait_layer(self, producer: int, payload: str, layer: int) -> None:
        """See the port."""
        end_us = self._layer_ends.get(producer, {}).get((payload, layer), 0.0)
        self.clock.compute = max(self.clock.compute, end_us)

    # -- the outside --------------------------------------------------------------------------------------------------------
    def free_slots(self) -> dict[str, int]:
        """Nothing is kept by rank here: the ledger is the account."""
        return {}
