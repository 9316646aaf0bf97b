"""Copy jobs of one rank: what is copied where, which pages copies touch, and the work that a stream runs for one layer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from cphicache.spaces.metadata import CpHiCacheNodeMetadata
from cphicache.spaces.types import LogicalPage
from cphicache.transfer.faults import CopyFault, CopyFaults, Direction
from cphicache.transfer.pools.device import DevicePool
from cphicache.transfer.pools.host import HostKVPool
from cphicache.transfer.pools.slots import HostSlotAllocator
from cphicache.transfer.port import HostSlotsExhausted, OpKey
from cphicache.transfer.streams.port import Event, Stream

PAYLOADS = ("target", "draft")
"""Copy order: the target forward comes before the draft model's own."""


class CopyJob:
    """One backup or load-back on this rank: ``device_rows[i]`` pairs with ``host_rows[payload][i]`` (int64 token slots, CPU).

    ``error`` is written by the stream thread before the copy's event completes; everything else belongs to the scheduler thread.
    """

    __slots__ = ("device_rows", "ended", "error", "host_rows", "key", "last_event", "owned_pages")

    def __init__(
        self,
        key: OpKey | int,
        owned_pages: Sequence[LogicalPage],
        device_rows: torch.Tensor,
        host_rows: Mapping[str, torch.Tensor],
    ) -> None:
        self.key = key
        self.owned_pages = list(owned_pages)
        self.device_rows = device_rows
        self.host_rows = dict(host_rows)
        self.last_event: Event | None = None
        self.error: Exception | None = None
        self.ended = False


class BackupJob(CopyJob):
    """A backup: its metadata, what a shrink left to its end, and the layers submitted by payload (one bit a layer)."""

    __slots__ = ("kept_pages", "kept_slots", "metadata", "submitted")

    def __init__(
        self,
        key: OpKey,
        owned_pages: Sequence[LogicalPage],
        device_rows: torch.Tensor,
        metadata: CpHiCacheNodeMetadata,
        payloads: Sequence[str],
    ) -> None:
        super().__init__(key, owned_pages, device_rows, host_rows_by_payload(metadata, payloads))
        self.metadata = metadata
        self.kept_pages: list[LogicalPage] = []
        self.kept_slots: dict[str, list[int]] = {payload: [] for payload in payloads}
        self.submitted = dict.fromkeys(payloads, 0)


class LoadJob(CopyJob):
    """A load-back: the nodes whose host slots it reads, and its producer once it was started."""

    __slots__ = ("nodes", "producer")

    def __init__(
        self,
        key: int,
        owned_pages: Sequence[LogicalPage],
        device_rows: torch.Tensor,
        host_rows: Mapping[str, torch.Tensor],
        nodes: Iterable[int],
    ) -> None:
        super().__init__(key, owned_pages, device_rows, host_rows)
        self.nodes = set(nodes)
        self.producer: int | None = None


def host_rows_by_payload(metadata: CpHiCacheNodeMetadata, payloads: Iterable[str]) -> dict[str, torch.Tensor]:
    """Host slots (int64, CPU) by payload. Raises ValueError when ``payloads`` has a draft and the metadata has none (R5)."""
    return {payload: metadata.require_draft() if payload == "draft" else metadata.host_indices for payload in payloads}


class Producer:
    """One start of load-backs: an event by (payload, layer), none when this rank owns nothing; loads that have not ended."""

    __slots__ = ("events", "open_loads")

    def __init__(self, open_loads: int) -> None:
        self.events: dict[tuple[str, int], Event] = {}
        self.open_loads = open_loads


class SlotBook:
    """Host slots of all payloads of one rank: taken together or not at all."""

    __slots__ = ("_allocators", "_faults")

    def __init__(self, host_pools: Mapping[str, HostKVPool], payloads: Sequence[str], faults: CopyFaults | None) -> None:
        self._allocators = {
            payload: HostSlotAllocator(host_pools[payload].slots, host_pools[payload].page_size) for payload in payloads
        }
        self._faults = faults

    def take(self, op: OpKey, slots: int) -> dict[str, list[int]]:
        """``slots`` host slots of every payload. Raises :class:`HostSlotsExhausted` with none taken."""
        taken: dict[str, list[int]] = {}
        try:
            for payload, allocator in self._allocators.items():
                if slots and self._faults is not None:
                    self._faults.check_reserve(payload, op)
                got = allocator.allocate(slots)
                if got is None:
                    raise HostSlotsExhausted(f"reserve {op}: {slots} {payload} host slots needed, {allocator.free_slots} free")
                taken[payload] = got
        except HostSlotsExhausted:
            self.free(taken)
            raise
        return taken

    def free(self, slots: Mapping[str, Sequence[int]]) -> None:
        """Give slots back, by payload."""
        for payload, numbers in slots.items():
            self._allocators[payload].free(numbers)

    def free_slots(self) -> dict[str, int]:
        """Free token slots by payload."""
        return {payload: allocator.free_slots for payload, allocator in self._allocators.items()}

    def reset(self) -> None:
        """Every slot is free."""
        for allocator in self._allocators.values():
            allocator.reset()


class PageUsers:
    """Which jobs' copies touch an owned logical page, until those jobs end."""

    __slots__ = ("_jobs",)

    def __init__(self) -> None:
        self._jobs: dict[LogicalPage, list[CopyJob]] = {}

    def add(self, job: CopyJob) -> None:
        """Enter a job under all its pages."""
        for page in job.owned_pages:
            self._jobs.setdefault(page, []).append(job)

    def remove(self, job: CopyJob, pages: Sequence[LogicalPage]) -> None:
        """Forget the job under ``pages``, where it was entered."""
        for page in pages:
            jobs = self._jobs[page]
            jobs.remove(job)
            if not jobs:
                del self._jobs[page]

    def events(self, pages: Iterable[LogicalPage]) -> list[Event]:
        """The last event of every job that touches one of ``pages`` and has submitted copies; each once, oldest entry first."""
        found: dict[int, Event] = {}
        for page in pages:
            for job in self._jobs.get(page, ()):
                if job.last_event is not None:
                    found[id(job.last_event)] = job.last_event
        return list(found.values())

    def clear(self) -> None:
        """Forget everything."""
        self._jobs.clear()


class _Part(NamedTuple):
    job: CopyJob
    host_rows: torch.Tensor
    device_rows: torch.Tensor


@dataclass(frozen=True, slots=True)
class CopyBatch:
    """The rows of several jobs for one payload, as they were at submission: a later shrink does not change them."""

    payload: str
    parts: tuple[_Part, ...]
    host_rows: torch.Tensor
    device_rows: torch.Tensor

    @classmethod
    def of(cls, payload: str, jobs: Iterable[CopyJob]) -> CopyBatch:
        """The batch of ``jobs``, none of which owns nothing; there may be none."""
        return cls._joined(payload, tuple(_Part(job, job.host_rows[payload], job.device_rows) for job in jobs))

    def only(self, parts: Sequence[_Part]) -> CopyBatch:
        """The batch without the other parts."""
        return self if len(parts) == len(self.parts) else self._joined(self.payload, tuple(parts))

    @classmethod
    def _joined(cls, payload: str, parts: tuple[_Part, ...]) -> CopyBatch:
        if not parts:
            return cls(payload, parts, torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64))
        host_rows = torch.cat([part.host_rows for part in parts])
        return cls(payload, parts, host_rows, torch.cat([part.device_rows for part in parts]))


class LayerCopier:
    """Copies of one direction. One work item copies one layer for a whole batch and never raises into the stream.

    Its counters are written on the stream's thread only: ``copied_bytes``, ``copies`` and ``failures`` by (job, layer), and
    ``stale``: copies that ended after their job had been forgotten.
    """

    def __init__(
        self,
        direction: Direction,
        *,
        device_pools: Mapping[str, DevicePool],
        host_pools: Mapping[str, HostKVPool],
        io_backend: str,
        bytes_per_us: float,
        faults: CopyFaults | None,
    ) -> None:
        self._direction = direction
        self._device_pools = device_pools
        self._host_pools = host_pools
        self._io_backend = io_backend
        self._bytes_per_us = bytes_per_us
        self._faults = faults
        self._layer_bytes = {
            payload: tuple(pool.shape.bytes_in_layer(layer) for layer in range(pool.shape.layers))
            for payload, pool in host_pools.items()
        }
        self.copied_bytes = 0
        self.copies = 0
        self.failures = 0
        self.stale = 0

    def queue(self, stream: Stream, batch: CopyBatch, layers: Iterable[int]) -> None:
        """Submit the copies of ``layers`` of a batch, one each; their virtual durations follow from bytes and bandwidth."""
        layer_bytes, submit, run = self._layer_bytes[batch.payload], stream.submit, self._run
        tokens, bytes_per_us = batch.host_rows.numel(), self._bytes_per_us
        for layer in layers:
            submit(partial(run, batch, layer), cost_us=tokens * layer_bytes[layer] / bytes_per_us)

    def _run(self, batch: CopyBatch, layer: int) -> None:
        live = [part for part in batch.parts if self._may_copy(part.job, batch.payload, layer)]
        if live:
            self._copy(batch.only(live), layer)
        self.stale += sum(part.job.ended for part in batch.parts)

    def _may_copy(self, job: CopyJob, payload: str, layer: int) -> bool:
        if job.error is not None:
            return False
        if self._faults is not None:
            try:
                self._faults.check_copy(self._direction, payload, layer, job.key)
            except CopyFault as fault:
                self._fail(job, fault)
                return False
        return True

    def _copy(self, batch: CopyBatch, layer: int) -> None:
        host_pool = self._host_pools[batch.payload]
        copy = host_pool.backup_from_device_per_layer if self._direction == "d2h" else host_pool.load_to_device_per_layer
        try:
            copy(self._device_pools[batch.payload], batch.host_rows, batch.device_rows, layer, self._io_backend)
        except Exception as error:  # whatever a copy raises is that copy's failure (R22): remembered, reported by status()
            for part in batch.parts:
                self._fail(part.job, error)
        else:
            self.copied_bytes += batch.host_rows.numel() * self._layer_bytes[batch.payload][layer]
            self.copies += len(batch.parts)

    def _fail(self, job: CopyJob, error: Exception) -> None:
        job.error = error
        self.failures += 1
