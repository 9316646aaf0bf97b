"""Copy jobs of one rank: what is copied where, which pages copies touch, and the work that a stream runs for one layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from cphicache.spaces.metadata import CpHiCacheNodeMetadata
from cphicache.spaces.types import LogicalPage
from cphicache.transfer.backends.port import PageSlots
from cphicache.transfer.faults import CopyFault, CopyFaults, Direction
from cphicache.transfer.pools.device import DevicePool
from cphicache.transfer.pools.host import HostKVPool
from cphicache.transfer.pools.slots import HostPageAllocator
from cphicache.transfer.port import HostSlotsExhausted, OpKey
from cphicache.transfer.streams.port import Event, Stream

PAYLOADS = ("target", "draft")
"""Copy order: the target forward comes before the draft model's own."""


class CopyJob:
    """One backup or load-back on this rank: ``device_pages[i]`` (physical) pairs with ``host_pages[payload][i]``.

    ``error`` is written by the stream thread before the copy's event completes; everything else belongs to the scheduler thread.
    """

    __slots__ = ("batch", "device_pages", "ended", "error", "host_pages", "key", "owned_pages")

    def __init__(
        self,
        key: OpKey | int,
        owned_pages: Sequence[LogicalPage],
        device_pages: Sequence[int],
        host_pages: Mapping[str, Sequence[int]],
    ) -> None:
        self.key = key
        self.owned_pages = owned_pages
        self.device_pages = device_pages
        self.host_pages = host_pages
        self.batch: CopyBatch | None = None
        """The last one that was submitted with copies of this job."""
        self.error: Exception | None = None
        self.ended = False

    @property
    def last_event(self) -> Event | None:
        """After the last submitted copy; None while there is none."""
        return None if self.batch is None else self.batch.event


class BackupJob(CopyJob):
    """A backup: its metadata, what a shrink left to its end, and the layers submitted by payload (one bit a layer)."""

    __slots__ = ("kept_host_pages", "kept_pages", "metadata", "submitted")

    def __init__(
        self,
        key: OpKey,
        owned_pages: Sequence[LogicalPage],
        device_pages: Sequence[int],
        metadata: CpHiCacheNodeMetadata,
        host_pages: Mapping[str, Sequence[int]],
    ) -> None:
        super().__init__(key, owned_pages, device_pages, host_pages)
        self.metadata = metadata
        self.kept_pages: list[LogicalPage] = []
        self.kept_host_pages: dict[str, list[int]] = {}
        self.submitted = dict.fromkeys(host_pages, 0)


class LoadJob(CopyJob):
    """A load-back: the nodes whose host slots it reads, and its producer once it was started."""

    __slots__ = ("nodes", "producer")

    def __init__(
        self,
        key: int,
        owned_pages: Sequence[LogicalPage],
        device_pages: Sequence[int],
        host_pages: Mapping[str, Sequence[int]],
        nodes: Iterable[int],
    ) -> None:
        super().__init__(key, owned_pages, device_pages, host_pages)
        self.nodes = set(nodes)
        self.producer: int | None = None


def host_pages_by_payload(metadata: CpHiCacheNodeMetadata, payloads: Iterable[str]) -> dict[str, Sequence[int]]:
    """Host pages by payload. Raises ValueError when ``payloads`` has a draft and the metadata has none (R5)."""
    owned = metadata.owned_pages
    found: dict[str, Sequence[int]] = {}
    for payload in payloads:
        pages = owned.draft if payload == "draft" else owned.host
        if pages is None:
            raise ValueError("draft pages are None but a draft pool is configured: reserve target and draft slots together")
        found[payload] = pages
    return found


class Producer:
    """One start of load-backs: an event by (payload, layer), none when this rank owns nothing; loads that have not ended."""

    __slots__ = ("events", "open_loads")

    def __init__(self, open_loads: int) -> None:
        self.events: dict[tuple[str, int], Event] = {}
        self.open_loads = open_loads


class SlotBook:
    """Host slots of all payloads of one rank, by whole pages: taken together or not at all."""

    __slots__ = ("_allocators", "_faults", "_page_size")

    def __init__(
        self, host_pools: Mapping[str, HostKVPool], payloads: Sequence[str], page_size: int, faults: CopyFaults | None
    ) -> None:
        self._allocators = {payload: HostPageAllocator(host_pools[payload].slots // page_size) for payload in payloads}
        self._page_size = page_size
        self._faults = faults

    def take(self, op: OpKey, pages: int) -> dict[str, Sequence[int]]:
        """So many host pages of every payload. Raises :class:`HostSlotsExhausted` with none taken."""
        taken: dict[str, Sequence[int]] = {}
        try:
            for payload, allocator in self._allocators.items():
                if pages and self._faults is not None:
                    self._faults.check_reserve(payload, op)
                got = allocator.allocate(pages)
                if got is None:
                    needed, free = (count * self._page_size for count in (pages, allocator.free_pages))
                    raise HostSlotsExhausted(f"reserve {op}: {needed} {payload} host slots needed, {free} free")
                taken[payload] = got
        except HostSlotsExhausted:
            self.free(taken)
            raise
        return taken

    def free(self, pages: Mapping[str, Sequence[int]]) -> None:
        """Give pages back, by payload."""
        for payload, numbers in pages.items():
            self._allocators[payload].free(numbers)

    def free_slots(self) -> dict[str, int]:
        """Free token slots by payload."""
        return {payload: allocator.free_pages * self._page_size for payload, allocator in self._allocators.items()}


class PageUsers:
    """Which jobs' copies touch an owned logical page, until those jobs end."""

    __slots__ = ("_first", "_more")

    def __init__(self) -> None:
        self._first: dict[LogicalPage, CopyJob] = {}
        self._more: dict[LogicalPage, list[CopyJob]] = {}
        """The later ones of pages that several jobs touch, which is rare."""

    def add(self, job: CopyJob) -> None:
        """Enter a job under all its pages, each of which it has once."""
        pages = job.owned_pages
        if self._first.keys().isdisjoint(pages):
            self._first.update(dict.fromkeys(pages, job))
            return
        for page in pages:
            if self._first.setdefault(page, job) is not job:
                self._more.setdefault(page, []).append(job)

    def remove(self, job: CopyJob, pages: Sequence[LogicalPage]) -> None:
        """Forget the job under ``pages``, where it was entered."""
        for page in pages:
            later = self._more.get(page) if self._more else None
            if later is None:
                del self._first[page]
                continue
            if self._first[page] is job:
                self._first[page] = later.pop(0)
            else:
                later.remove(job)
            if not later:
                del self._more[page]

    def events(self, pages: Iterable[LogicalPage]) -> list[Event]:
        """The last event of every job that touches one of ``pages`` and has submitted copies; each once, oldest entry first."""
        found: dict[int, Event] = {}
        for page in pages:
            first = self._first.get(page)
            if first is None:
                continue
            for job in (first, *self._more.get(page, ())):
                if job.last_event is not None:
                    found[id(job.last_event)] = job.last_event
        return list(found.values())


class _Part(NamedTuple):
    job: CopyJob
    host_pages: Sequence[int]
    device_pages: Sequence[int]


class CopyBatch:
    """The pages of several jobs for one payload, as they were at submission: a later shrink does not change them.

    ``host`` and ``device`` pair page by page. ``event`` comes after its last submitted copy (:meth:`submitted`).
    """

    __slots__ = ("device", "event", "host", "parts", "payload")

    def __init__(self, payload: str, parts: Sequence[_Part], page_size: int) -> None:
        self.payload = payload
        self.parts = parts
        if len(parts) == 1:
            (_, host, device), *_ = parts
        else:
            host = [page for part in parts for page in part.host_pages]
            device = [page for part in parts for page in part.device_pages]
        self.host = PageSlots(host, page_size)
        self.device = PageSlots(device, page_size)
        self.event: Event | None = None

    def submitted(self, event: Event) -> None:
        """Copies of its jobs have been submitted, after which ``event`` comes. Nothing is done for each job but the first time."""
        if self.event is None:
            for part in self.parts:
                part.job.batch = self
        self.event = event

    @classmethod
    def of(cls, payload: str, jobs: Iterable[CopyJob], page_size: int) -> CopyBatch:
        """The batch of ``jobs``, none of which owns nothing; there may be none."""
        return cls(payload, [_Part(job, job.host_pages[payload], job.device_pages) for job in jobs], page_size)

    def only(self, parts: Sequence[_Part]) -> CopyBatch:
        """The batch without the other parts."""
        return self if len(parts) == len(self.parts) else CopyBatch(self.payload, parts, self.host.page_size)

    @property
    def tokens(self) -> int:
        """Token slots on either side."""
        return len(self.host.pages) * self.host.page_size


class LayerCopier:
    """Copies of one direction. One work item copies a layer, or several, for a whole batch, and never raises into the stream.

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
        self._token_bytes = {payload: sum(by_layer) for payload, by_layer in self._layer_bytes.items()}
        self.copied_bytes = 0
        self.copies = 0
        self.failures = 0
        self.stale = 0

    def queue(self, stream: Stream, batch: CopyBatch, layers: Sequence[int]) -> None:
        """Submit the copies of ``layers`` of a batch: as one item where the stream takes several layers whole, else one each; their
        virtual durations follow from bytes and bandwidth."""
        if len(layers) > 1 and stream.takes_whole:
            stream.submit(partial(self._run_layers, batch, layers))
            return
        layer_bytes, submit, run = self._layer_bytes[batch.payload], stream.submit, self._run
        tokens, bytes_per_us = batch.tokens, self._bytes_per_us
        for layer in layers:
            submit(partial(run, batch, layer), cost_us=tokens * layer_bytes[layer] / bytes_per_us)

    def _run_layers(self, batch: CopyBatch, layers: Sequence[int]) -> None:
        """Copy several layers: by one call where all layers of a backup go and no fault is planned, else layer by layer."""
        every_layer = len(layers) == len(self._layer_bytes[batch.payload])
        if self._direction != "d2h" or self._faults is not None or not every_layer:
            for layer in layers:
                self._run(batch, layer)
            return
        live = [part for part in batch.parts if part.job.error is None]
        if live:
            self._attempt(batch.only(live), layers, self._host_pools[batch.payload].backup_from_device_all_layer)
        self.stale += len(layers) * _ended(batch)

    def _run(self, batch: CopyBatch, layer: int) -> None:
        live = [part for part in batch.parts if self._may_copy(part.job, batch.payload, layer)]
        if live:
            self._copy(batch.only(live), layer)
        self.stale += _ended(batch)

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
        self._attempt(batch, (layer,), copy, layer)

    def _attempt(self, batch: CopyBatch, layers: Sequence[int], copy: Callable[..., None], *layer: int) -> None:
        """Call ``copy`` for ``layers``: one, which it is given, or all of the payload."""
        try:
            copy(self._device_pools[batch.payload], batch.host, batch.device, *layer, self._io_backend)
        except Exception as error:  # whatever a copy raises is that copy's failure (R22): remembered, reported by status()
            for part in batch.parts:
                self._fail(part.job, error)
        else:
            by_layer = self._layer_bytes[batch.payload]
            self.copied_bytes += batch.tokens * (by_layer[layer[0]] if layer else self._token_bytes[batch.payload])
            self.copies += len(batch.parts) * len(layers)

    def _fail(self, job: CopyJob, error: Exception) -> None:
        job.error = error
        self.failures += 1


def _ended(batch: CopyBatch) -> int:
    count = 0
    for part in batch.parts:
        count += part.job.ended
    return count
