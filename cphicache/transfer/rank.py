"""One rank's host book and copies: the implementation of :class:`cphicache.transfer.port.TransferPort` over pools and streams.

Streams: ``compute`` (the forward pass), ``write`` (D2H), ``load`` (H2D). It translates logical pages to physical locs with
:class:`CpSharedKVLayout` and decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from cphicache.spaces.layout import CpSharedKVLayout
from cphicache.spaces.metadata import CpHiCacheNodeMetadata, OwnedPages
from cphicache.spaces.types import LogicalPage
from cphicache.transfer.faults import CopyFaults
from cphicache.transfer.jobs import (
    PAYLOADS,
    BackupJob,
    CopyBatch,
    CopyJob,
    LayerCopier,
    LoadJob,
    PageUsers,
    Producer,
    SlotBook,
    host_pages_by_payload,
)
from cphicache.transfer.pools.device import DevicePool
from cphicache.transfer.pools.host import HostKVPool, check_pools
from cphicache.transfer.pools.slots import TransferInternalError
from cphicache.transfer.port import CopyStatus, LoadItem, OpKey, OwnerMismatch, Wait
from cphicache.transfer.streams.port import Event, Streams

DEFAULT_BYTES_PER_US = 50_000.0
"""50 GB/s, one direction of a PCIe 5.0 x16 link in practice. Virtual clock only."""


class TransferCounters(NamedTuple):
    """Totals since construction. ``copies`` and ``failed_copies``: by job, payload and layer. ``noop_completions``: backups and
    load-backs of which this rank owns nothing. ``stale_completions``: copies that ended after their job was forgotten (our bug)."""

    d2h_bytes: int
    h2d_bytes: int
    copies: int
    failed_copies: int
    noop_completions: int
    stale_completions: int


class _Submitted(NamedTuple):
    ops: list[OpKey]
    jobs: list[BackupJob]
    batch: CopyBatch


class RankTransfer:
    """Copies and host slots of one rank; see :class:`TransferPort` for the contract of its methods.

    ``device_pools`` and ``host_pools``: by payload, ``target`` and optionally ``draft`` (same physical locs, own layers).
    ``d2h_bytes_per_us`` / ``h2d_bytes_per_us``: bandwidth on the virtual clock. Raises ValueError for pools that do not fit each
    other or the layout, and :class:`UnsupportedCombination` for a pool kind, layout and backend that do not work together.
    """

    def __init__(
        self,
        layout: CpSharedKVLayout,
        device_pools: Mapping[str, DevicePool],
        host_pools: Mapping[str, HostKVPool],
        streams: Streams,
        *,
        io_backend: str = "torch",
        d2h_bytes_per_us: float = DEFAULT_BYTES_PER_US,
        h2d_bytes_per_us: float = DEFAULT_BYTES_PER_US,
        faults: CopyFaults | None = None,
    ) -> None:
        check_pools(device_pools, host_pools, layout.page_size, io_backend)
        for option, value in (("d2h_bytes_per_us", d2h_bytes_per_us), ("h2d_bytes_per_us", h2d_bytes_per_us)):
            if not value > 0:
                raise ValueError(f"{option}={value}: a bandwidth is greater than 0")
        self._layout = layout
        self._payloads = tuple(payload for payload in PAYLOADS if payload in host_pools)
        self._layers = {payload: host_pools[payload].shape.layers for payload in self._payloads}
        self._all_layers = {payload: (1 << layers) - 1 for payload, layers in self._layers.items()}
        self._device_slots = min(pool.slots for pool in device_pools.values())
        self._streams = streams
        copier = partial(LayerCopier, device_pools=device_pools, host_pools=host_pools, io_backend=io_backend, faults=faults)
        self._writer = copier("d2h", bytes_per_us=d2h_bytes_per_us)
        self._loader = copier("h2d", bytes_per_us=h2d_bytes_per_us)
        self._slots = SlotBook(host_pools, self._payloads, layout.page_size, faults)
        self._backups: dict[OpKey, BackupJob] = {}
        self._nodes: dict[int, CpHiCacheNodeMetadata] = {}
        self._loads: dict[int, LoadJob] = {}
        self._producers: dict[int, Producer] = {}
        self._next_producer = 0
        self._readers = PageUsers()
        self._writers = PageUsers()
        self._noop_completions = 0
        self._last_batch: _Submitted | None = None
        """The last submission: the next layer's operations and rows are the same unless one was cut or has ended."""

    # -- backup: reserve, submit, end ---------------------------------------------------------------------------------------
    def reserve(self, op: OpKey, pages: Sequence[LogicalPage]) -> None:
        """Take host slots for the owned part of ``pages``, all payloads or none; compute metadata and physical locs.

        Raises :class:`HostSlotsExhausted` with nothing taken. Queues nothing.
        """
        if op in self._backups:
            raise TransferInternalError(f"reserve {op}: expected a new operation, found it in flight")
        owners = self._layout.owners(pages)
        places, owned, device_pages = self._owned(owners, pages, "reserve", op)
        host_pages = self._slots.take(op, len(places))
        metadata = CpHiCacheNodeMetadata.of_pages(
            owners, self._layout.page_size, OwnedPages(places, host_pages["target"], host_pages.get("draft"))
        )
        job = self._backups[op] = BackupJob(op, owned, device_pages, metadata, host_pages)
        self._readers.add(job)

    def submit_layers(self, ops: Iterable[OpKey], payload: str, layers: Sequence[int]) -> None:
        """Queue the D2H copies of ``layers`` of ``payload`` for all ``ops``, after everything that the compute stream holds now."""
        ops = list(ops)
        mask = self._mask(payload, layers, "submit_layers")
        last = self._last_batch
        known = last is not None and last.ops == ops
        jobs = last.jobs if last is not None and known else [self._backup(op, "submit_layers") for op in ops]
        self._mark_submitted(jobs, payload, mask, first=not known)
        if last is not None and known and last.batch.payload == payload:
            batch = last.batch
        else:
            batch = CopyBatch.of(payload, [job for job in jobs if job.device_pages], self._layout.page_size)
            if mask:
                self._last_batch = _Submitted(ops, jobs, batch)
        if not batch.parts or not layers:
            return
        write = self._streams.stream("write")
        write.wait(self._streams.stream("compute").record(), Wait.STORE_TO_COPY)
        self._writer.queue(write, batch, layers)
        batch.submitted(write.record())

    def status(self, op: OpKey) -> CopyStatus:
        """Local progress of a backup; never blocks."""
        job = self._backup(op, "status")
        return CopyStatus(drained=self._drained(job), failed=job.error is not None)

    def failure(self, op: OpKey) -> Exception | None:
        """What the first failing copy of a backup raised, ``None`` while none has failed."""
        return self._backup(op, "failure").error

    def last_copy_event(self, op: OpKey) -> Event | None:
        """The event after the backup's last submitted copy, for measurements; ``None`` when it has none."""
        return self._backup(op, "last_copy_event").last_event

    def wait_backup(self, op: OpKey) -> None:
        """Block until every copy of ``op`` that was submitted has ended (drain rounds only)."""
        event = self._backup(op, "wait_backup").last_event
        if event is not None:
            self._streams.synchronize(event)

    def shrink(self, op: OpKey, head_pages: int, *, free_now: bool) -> None:
        """Cut the first ``head_pages`` pages from the operation: their slots are freed now, or when the operation ends.

        ``free_now`` with a copy in flight is our bug. Copies submitted before still write the kept slots; later ones do not.
        """
        job = self._backup(op, "shrink")
        if free_now:
            self._require_drained(job, "shrink with free_now")
        head, tail = job.metadata.split(head_pages * self._layout.page_size)
        cut = len(head.owned_pages.places)
        cut_pages = job.owned_pages[:cut]
        if free_now:
            self._free(head)
            self._readers.remove(job, cut_pages)
        else:
            job.kept_pages.extend(cut_pages)
            for payload, kept in host_pages_by_payload(head, self._payloads).items():
                job.kept_host_pages.setdefault(payload, []).extend(kept)
        self._last_batch = None
        job.metadata = tail
        job.host_pages = host_pages_by_payload(tail, self._payloads)
        job.device_pages = job.device_pages[cut:]
        job.owned_pages = job.owned_pages[cut:]

    def commit(self, op: OpKey) -> None:
        """The operation's metadata becomes that of node ``op.node``; slots kept from :meth:`shrink` are freed."""
        job = self._backup(op, "commit")
        if op.node in self._nodes:
            raise TransferInternalError(f"commit {op}: expected no committed copy of node {op.node}, found one")
        if job.error is not None:
            raise TransferInternalError(f"commit {op}: expected every copy to succeed, found {job.error!r}")
        if job.submitted != self._all_layers:
            payload = next(payload for payload, mask in self._all_layers.items() if job.submitted[payload] != mask)
            raise TransferInternalError(
                f"commit {op}: expected all {self._layers[payload]} {payload} layers submitted, found mask "
                f"{job.submitted[payload]:#b}"
            )
        self._end_backup(op, job, "commit")
        self._nodes[op.node] = job.metadata

    def release(self, op: OpKey) -> None:
        """Free every host slot of an operation that ended without commit. Its copies have drained (our bug if not)."""
        job = self._backup(op, "release")
        self._end_backup(op, job, "release")
        self._free(job.metadata)

    # -- committed nodes ----------------------------------------------------------------------------------------------------
    def free_node(self, node: int) -> None:
        """Free the host slots of a committed node. A load-back that still reads it is our bug."""
        metadata = self._node(node, "free_node")
        for load, job in self._loads.items():
            if node in job.nodes:
                raise TransferInternalError(f"free_node {node}: expected no load-back of it, found load {load}")
        del self._nodes[node]
        self._free(metadata)

    def split_node(self, node: int, head: int, head_pages: int) -> None:
        """Divide the metadata of committed ``node``: its first ``head_pages`` pages become ``head``, the rest stays ``node``."""
        metadata = self._node(node, "split_node")
        if head in self._nodes:
            raise TransferInternalError(f"split_node {node}: expected no committed copy of node {head}, found one")
        self._nodes[head], self._nodes[node] = metadata.split(head_pages * self._layout.page_size)
        for job in self._loads.values():
            if node in job.nodes:
                job.nodes.add(head)

    # -- load-back ----------------------------------------------------------------------------------------------------------
    def queue_load(self, load: int, items: Sequence[LoadItem]) -> None:
        """Remember a load-back; no copy starts. Raises :class:`OwnerMismatch` before anything is queued."""
        if load in self._loads:
            raise TransferInternalError(f"queue_load {load}: expected a new load-back, found it queued")
        nodes = [self._node(item.node, f"queue_load {load}") for item in items]
        all_owners: list[int] = []
        for item, metadata in zip(items, nodes, strict=True):
            owners = self._layout.owners(item.pages)
            all_owners += owners
            try:
                metadata.check_owners(owners)
            except ValueError as error:
                raise OwnerMismatch(f"load-back of node {item.node}: {error}") from error
        pages = [page for item in items for page in item.pages]
        _, owned, device_pages = self._owned(all_owners, pages, "queue_load", load)
        by_node = [host_pages_by_payload(metadata, self._payloads) for metadata in nodes]
        host_pages = {payload: [page for found in by_node for page in found[payload]] for payload in self._payloads}
        job = self._loads[load] = LoadJob(load, owned, device_pages, host_pages, (item.node for item in items))
        self._writers.add(job)

    def start_loads(self) -> int:
        """Start the H2D copies of all queued loads as one producer; its index (never reused), or -1 when nothing is queued."""
        queued = [job for job in self._loads.values() if job.producer is None]
        return self._start(queued) if queued else -1

    def load_status(self, load: int) -> CopyStatus:
        """Local progress of a load-back (not drained before it was started)."""
        job = self._load(load, "load_status")
        return CopyStatus(drained=job.producer is not None and self._drained(job), failed=job.error is not None)

    def wait_load(self, load: int) -> None:
        """Block until a load-back has ended (drain rounds only). One that was never started is started first, alone."""
        job = self._load(load, "wait_load")
        if job.producer is None:
            self._start([job])
        if job.last_event is not None:
            self._streams.synchronize(job.last_event)

    def end_load(self, load: int) -> None:
        """Forget a load-back that has drained on every rank."""
        job = self._load(load, "end_load")
        if job.producer is None:
            raise TransferInternalError(f"end_load {load}: expected a started load-back, found it queued")
        self._require_drained(job, "end_load")
        del self._loads[load]
        job.ended = True
        self._writers.remove(job, job.owned_pages)
        producer = self._producers[job.producer]
        producer.open_loads -= 1
        if not producer.open_loads:
            del self._producers[job.producer]

    # -- the forward pass ---------------------------------------------------------------------------------------------------
    def before_store(self, pages: Sequence[LogicalPage]) -> None:
        """The forward is about to write ``pages``: make the compute stream wait for copies that still read (or load) them."""
        compute = self._streams.stream("compute")
        for event in [*self._readers.events(pages), *self._writers.events(pages)]:
            compute.wait(event, Wait.COPY_TO_REUSE)

    def wait_layer(self, producer: int, payload: str, layer: int) -> None:
        """Make the compute stream wait for a producer's H2D copy of one layer. ``-1`` and finished producers wait for nothing."""
        if not -1 <= producer < self._next_producer:
            raise TransferInternalError(f"wait_layer: expected a producer in [-1, {self._next_producer}), found {producer}")
        self._mask(payload, (layer,), "wait_layer")
        started = self._producers.get(producer)
        if started is not None and started.events:
            self._streams.stream("compute").wait(started.events[payload, layer], Wait.LOAD_TO_READ)

    # -- the outside --------------------------------------------------------------------------------------------------------
    def free_slots(self) -> dict[str, int]:
        """Free host slots of this rank by payload (tokens)."""
        return self._slots.free_slots()

    @property
    def counters(self) -> TransferCounters:
        """Totals so far. Exact once everything has drained."""
        write, load = self._writer, self._loader
        return TransferCounters(
            d2h_bytes=write.copied_bytes,
            h2d_bytes=load.copied_bytes,
            copies=write.copies + load.copies,
            failed_copies=write.failures + load.failures,
            noop_completions=self._noop_completions,
            stale_completions=write.stale + load.stale,
        )

    # -- inside -------------------------------------------------------------------------------------------------------------
    def _start(self, jobs: Sequence[LoadJob]) -> int:
        index = self._next_producer
        self._next_producer += 1
        producer = self._producers[index] = Producer(len(jobs))
        for job in jobs:
            job.producer = index
        owning = [job for job in jobs if job.device_pages]
        self._noop_completions += len(jobs) - len(owning)
        if not owning:
            return index
        stream = self._streams.stream("load")
        stream.wait(self._streams.stream("compute").record(), Wait.READ_TO_LOAD)
        for event in self._readers.events(page for job in owning for page in job.owned_pages):
            stream.wait(event, Wait.COPY_TO_REUSE)
        for payload in self._payloads:
            batch = CopyBatch.of(payload, owning, self._layout.page_size)
            for layer in range(self._layers[payload]):
                self._loader.queue(stream, batch, (layer,))
                producer.events[payload, layer] = stream.record()
            batch.submitted(stream.record())
        return index

    def _mark_submitted(self, jobs: Sequence[BackupJob], payload: str, mask: int, *, first: bool = True) -> None:
        """``first``: none of these may have been submitted before."""
        for job in jobs:
            marks = job.submitted
            submitted = marks[payload]
            if submitted & mask:
                layer = (submitted & mask).bit_length() - 1
                raise TransferInternalError(f"submit_layers {job.key}: expected {payload} layer {layer} once, found it twice")
            if first and not job.owned_pages and mask and not any(marks.values()):
                self._noop_completions += 1
            marks[payload] = submitted | mask

    def _mask(self, payload: str, layers: Sequence[int], where: str) -> int:
        """``layers`` as bits, each once and in the payload."""
        count = self._layers.get(payload)
        if count is None:
            raise TransferInternalError(f"{where}: expected a payload of {list(self._layers)}, found {payload!r}")
        if type(layers) is range and layers.step == 1 and 0 <= layers.start <= layers.stop <= count:
            return (1 << layers.stop) - (1 << layers.start)
        mask = 0
        for layer in layers:
            if not 0 <= layer < count:
                raise TransferInternalError(f"{where}: expected a {payload} layer in [0, {count}), found {layer}")
            if mask >> layer & 1:
                raise TransferInternalError(f"{where}: expected {payload} layer {layer} once, found it twice")
            mask |= 1 << layer
        return mask

    def _end_backup(self, op: OpKey, job: BackupJob, where: str) -> None:
        self._require_drained(job, where)
        del self._backups[op]
        self._last_batch = None
        job.ended = True
        self._readers.remove(job, job.owned_pages)
        if job.kept_pages:
            self._readers.remove(job, job.kept_pages)
            self._slots.free(job.kept_host_pages)

    def _free(self, metadata: CpHiCacheNodeMetadata) -> None:
        self._slots.free(host_pages_by_payload(metadata, self._payloads))

    def _drained(self, job: CopyJob) -> bool:
        return job.last_event is None or self._streams.query(job.last_event, Wait.DRAIN_TO_FREE)

    def _require_drained(self, job: CopyJob, where: str) -> None:
        if not self._drained(job):
            raise TransferInternalError(f"{where} {job.key}: expected its copies to have ended, found one queued or running")

    def _owned(
        self, owners: Sequence[int], pages: Sequence[LogicalPage], what: str, whose: OpKey | int
    ) -> tuple[Sequence[int], Sequence[LogicalPage], list[int]]:
        """The part of ``pages``, of these owners, that this rank stores: places among them, the pages, and where they lie in the device
        pools."""
        places: Sequence[int] = range(len(pages))
        owned: Sequence[LogicalPage] = list(pages)
        if self._layout.cp_size > 1:
            rank = self._layout.cp_rank
            places = [place for place, owner in enumerate(owners) if owner == rank]
            owned = [pages[place] for place in places]
        device_pages = self._layout.physical_pages(owned)
        if device_pages and (last := (max(device_pages) + 1) * self._layout.page_size - 1) >= self._device_slots:
            raise TransferInternalError(f"{what} {whose}: expected physical locs in [0, {self._device_slots}), found {last}")
        return places, owned, device_pages

    def _backup(self, op: OpKey, where: str) -> BackupJob:
        job = self._backups.get(op)
        if job is None:
            raise TransferInternalError(f"{where} {op}: expected an operation in flight, found none of that generation")
        return job

    def _load(self, load: int, where: str) -> LoadJob:
        job = self._loads.get(load)
        if job is None:
            raise TransferInternalError(f"{where} {load}: expected a load-back in flight, found none")
        return job

    def _node(self, node: int, where: str) -> CpHiCacheNodeMetadata:
        metadata = self._nodes.get(node)
        if metadata is None:
            raise TransferInternalError(f"{where} {node}: expected a committed node, found none")
        return metadata
