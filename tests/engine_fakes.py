"""A local half without tensors: accounts host slots by owner arithmetic, and lets tests decide when copies end.

It checks its caller: whatever the contract of :class:`cphicache.transfer.port.TransferPort` forbids raises :class:`ContractBroken`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from cphicache.engine import CacheConfig
from cphicache.spaces import LogicalPage
from cphicache.transfer.port import CopyStatus, HostSlotsExhausted, LoadItem, OpKey, OwnerMismatch


class ContractBroken(AssertionError):
    """The engine asked for something that the port's contract forbids."""


class Call(NamedTuple):
    """One call of the port, in order."""

    name: str
    args: tuple[object, ...]


@dataclass(slots=True)
class _Copies:
    """Progress of a backup or a load-back on this rank."""

    in_flight: bool = False
    failed: bool = False


@dataclass(slots=True)
class _Op:
    owners: list[int]
    kept_slots: int = 0
    submitted: dict[str, set[int]] = field(default_factory=dict)
    copies: _Copies = field(default_factory=_Copies)


@dataclass(slots=True)
class _Load:
    nodes: list[int]
    owned_pages: int
    producer: int | None = None
    copies: _Copies = field(default_factory=_Copies)


class FakeTransfer:
    """Implements :class:`~cphicache.transfer.port.TransferPort` for one rank.

    Copies complete when they are submitted, unless :meth:`hold` was called: then they stay in flight until :meth:`finish`,
    :meth:`fail` or :meth:`finish_all`. ``fail_reserve_next`` / ``fail_copy_next``: the next reserve that needs slots (the next
    submission or start of loads that copies something) fails, once. What this rank owns nothing of has no copy and cannot fail.
    """

    def __init__(self, config: CacheConfig, rank: int = 0) -> None:
        self.config = config
        self.rank = rank
        self.fail_reserve_next = False
        self.fail_copy_next = False
        self.calls: list[Call] = []
        self._layout = config.layout(rank)
        self._layers = dict(config.payloads)
        self._free = dict.fromkeys(self._layers, config.host_slots)
        self._ops: dict[OpKey, _Op] = {}
        self._nodes: dict[int, list[int]] = {}
        self._loads: dict[int, _Load] = {}
        self._next_producer = 0
        self._holding = False

    # -- what a test decides --------------------------------------------------------------------------------------------------
    def hold(self, holding: bool = True) -> None:
        """From now on copies stay in flight (or, with False, complete when they are submitted)."""
        self._holding = holding

    def in_flight(self) -> list[OpKey | int]:
        """Backups (by key) and load-backs (by id) with copies in flight, in order of reservation."""
        return [key for key, copies in self._all_copies().items() if copies.in_flight]

    def finish(self, op: OpKey | int) -> None:
        """All copies of a backup (by key) or of a load-back (by id) that are in flight have ended."""
        self._flying(op, "finish").in_flight = False

    def fail(self, op: OpKey | int, *, drained: bool = True) -> None:
        """A copy in flight fails; the others have ended too, or (``drained=False``) go on until :meth:`finish`."""
        copies = self._flying(op, "fail")
        copies.failed = True
        copies.in_flight = not drained

    def finish_all(self) -> None:
        """Everything in flight has ended."""
        for copies in self._all_copies().values():
            copies.in_flight = False

    def called(self, name: str) -> list[tuple[object, ...]]:
        """Arguments of all calls of that name so far."""
        return [call.args for call in self.calls if call.name == name]

    # -- backup -----------------------------------------------------------------------------------------------------------------
    def reserve(self, op: OpKey, pages: Sequence[LogicalPage]) -> None:
        self._record("reserve", op, tuple(pages))
        self._require(op not in self._ops, f"reserve {op}", "a new operation", "it in flight")
        self._require(op.node not in self._nodes, f"reserve {op}", "a node that is not backed up", "its committed copy")
        owners = list(self._layout.owners(pages))
        slots = self._slots(owners)
        if slots and self.fail_reserve_next:
            self.fail_reserve_next = False
            raise HostSlotsExhausted(f"reserve {op}: {slots} slots wanted, told to fail")
        if slots > min(self._free.values()):
            raise HostSlotsExhausted(f"reserve {op}: {slots} slots wanted, {self._free} free on rank {self.rank}")
        self._take(slots)
        self._ops[op] = _Op(owners, submitted={payload: set() for payload in self._layers})

    def submit_layers(self, ops: Iterable[OpKey], payload: str, layers: Sequence[int]) -> None:
        ops = list(ops)
        self._record("submit_layers", tuple(ops), payload, tuple(layers))
        self._require(payload in self._layers, "submit_layers", f"a payload of {list(self._layers)}", payload)
        for key in ops:
            op = self._op(key, "submit_layers")
            for layer in layers:
                fits = 0 <= layer < self._layers[payload] and layer not in op.submitted[payload]
                self._require(fits, f"submit_layers {key} {payload}", "a layer that exists, once", layer)
                op.submitted[payload].add(layer)
            if layers:
                self._start(op.copies, self._slots(op.owners))

    def status(self, op: OpKey) -> CopyStatus:
        copies = self._op(op, "status").copies
        return CopyStatus(not copies.in_flight, copies.failed)

    def wait_backup(self, op: OpKey) -> None:
        self._record("wait_backup", op)
        self._op(op, "wait_backup").copies.in_flight = False

    def shrink(self, op: OpKey, head_pages: int, *, free_now: bool) -> None:
        self._record("shrink", op, head_pages, free_now)
        cut = self._op(op, "shrink")
        self._require(0 < head_pages < len(cut.owners), f"shrink {op}", f"a cut inside {len(cut.owners)} pages", head_pages)
        slots = self._slots(cut.owners[:head_pages])
        if free_now:
            self._require_drained(cut.copies, f"shrink {op} with free_now")
            self._give(slots)
        else:
            cut.kept_slots += slots
        cut.owners = cut.owners[head_pages:]

    def commit(self, op: OpKey) -> None:
        self._record("commit", op)
        ended = self._end(op, "commit")
        self._require(op.node not in self._nodes, f"commit {op}", "no committed copy of the node", "one")
        self._require(not ended.copies.failed, f"commit {op}", "every copy to succeed", "a failed one")
        for payload, layers in self._layers.items():
            found = ended.submitted[payload]
            self._require(found == set(range(layers)), f"commit {op}", f"{layers} {payload} layers", sorted(found))
        self._nodes[op.node] = ended.owners

    def release(self, op: OpKey) -> None:
        self._record("release", op)
        self._give(self._slots(self._end(op, "release").owners))

    # -- committed nodes --------------------------------------------------------------------------------------------------------
    def free_node(self, node: int) -> None:
        self._record("free_node", node)
        owners = self._node(node, "free_node")
        readers = [load for load, job in self._loads.items() if node in job.nodes]
        self._require(not readers, f"free_node {node}", "no load-back of it", readers)
        del self._nodes[node]
        self._give(self._slots(owners))

    def split_node(self, node: int, head: int, head_pages: int) -> None:
        self._record("split_node", node, head, head_pages)
        owners = self._node(node, "split_node")
        self._require(head not in self._nodes, f"split_node {node}", f"no committed copy of {head}", "one")
        self._require(0 < head_pages < len(owners), f"split_node {node}", f"a cut inside {len(owners)} pages", head_pages)
        self._nodes[head], self._nodes[node] = owners[:head_pages], owners[head_pages:]
        for job in self._loads.values():
            if node in job.nodes:
                job.nodes.append(head)

    # -- load-back --------------------------------------------------------------------------------------------------------------
    def queue_load(self, load: int, items: Sequence[LoadItem]) -> None:
        self._record("queue_load", load, tuple((item.node, tuple(item.pages)) for item in items))
        self._require(load not in self._loads, f"queue_load {load}", "a new load-back", "it queued")
        owned = 0
        for item in items:
            owners = list(self._layout.owners(item.pages))
            if owners != self._node(item.node, "queue_load"):
                raise OwnerMismatch(f"load-back of node {item.node}: owners {self._nodes[item.node]}, pages of owners {owners}")
            owned += owners.count(self.rank)
        self._loads[load] = _Load([item.node for item in items], owned)

    def start_loads(self) -> int:
        self._record("start_loads")
        queued = [job for job in self._loads.values() if job.producer is None]
        return self._start_jobs(queued) if queued else -1

    def load_status(self, load: int) -> CopyStatus:
        job = self._load(load, "load_status")
        return CopyStatus(job.producer is not None and not job.copies.in_flight, job.copies.failed)

    def wait_load(self, load: int) -> None:
        self._record("wait_load", load)
        job = self._load(load, "wait_load")
        if job.producer is None:
            self._start_jobs([job])
        job.copies.in_flight = False

    def end_load(self, load: int) -> None:
        self._record("end_load", load)
        job = self._load(load, "end_load")
        self._require(job.producer is not None, f"end_load {load}", "a started load-back", "it queued")
        self._require_drained(job.copies, f"end_load {load}")
        del self._loads[load]

    # -- the forward pass, and the outside ----------------------------------------------------------------------------------------
    def before_store(self, pages: Sequence[LogicalPage]) -> None:
        self._record("before_store", tuple(pages))

    def wait_layer(self, producer: int, payload: str, layer: int) -> None:
        self._record("wait_layer", producer, payload, layer)
        self._require(-1 <= producer < self._next_producer, "wait_layer", f"a producer below {self._next_producer}", producer)
        self._require(0 <= layer < self._layers.get(payload, 0), "wait_layer", f"a layer of {self._layers}", (payload, layer))

    def free_slots(self) -> dict[str, int]:
        return dict(self._free)

    # -- inner parts ----------------------------------------------------------------------------------------------------------------
    def _record(self, name: str, *args: object) -> None:
        self.calls.append(Call(name, args))

    @staticmethod
    def _require(holds: bool, where: str, expected: str, found: object) -> None:
        if not holds:
            raise ContractBroken(f"{where}: expected {expected}, found {found}")

    def _require_drained(self, copies: _Copies, where: str) -> None:
        self._require(not copies.in_flight, where, "its copies to have ended", "some in flight")

    def _slots(self, owners: Sequence[int]) -> int:
        return owners.count(self.rank) * self.config.page_size

    def _take(self, slots: int) -> None:
        for payload in self._free:
            self._free[payload] -= slots

    def _give(self, slots: int) -> None:
        for payload in self._free:
            self._free[payload] += slots
        self._require(max(self._free.values()) <= self.config.host_slots, "free", f"at most {self.config.host_slots}", self._free)

    def _start(self, copies: _Copies, slots: int) -> None:
        if slots:
            if self.fail_copy_next:
                self.fail_copy_next, copies.failed = False, True
            copies.in_flight = copies.in_flight or self._holding

    def _start_jobs(self, jobs: Sequence[_Load]) -> int:
        for job in jobs:
            job.producer = self._next_producer
            self._start(job.copies, job.owned_pages)
        self._next_producer += 1
        return self._next_producer - 1

    def _end(self, key: OpKey, where: str) -> _Op:
        op = self._op(key, where)
        self._require_drained(op.copies, f"{where} {key}")
        del self._ops[key]
        self._give(op.kept_slots)
        return op

    def _all_copies(self) -> dict[OpKey | int, _Copies]:
        backups: dict[OpKey | int, _Copies] = {key: op.copies for key, op in self._ops.items()}
        return backups | {load: job.copies for load, job in self._loads.items()}

    def _flying(self, op: OpKey | int, where: str) -> _Copies:
        copies = self._all_copies().get(op)
        if copies is None or not copies.in_flight:
            raise ContractBroken(f"{where} {op}: expected copies in flight, found {self.in_flight()}")
        return copies

    def _op(self, key: OpKey, where: str) -> _Op:
        op = self._ops.get(key)
        if op is None:
            raise ContractBroken(f"{where} {key}: expected an operation in flight, found none of that generation")
        return op

    def _load(self, load: int, where: str) -> _Load:
        job = self._loads.get(load)
        if job is None:
            raise ContractBroken(f"{where} {load}: expected a load-back in flight, found none")
        return job

    def _node(self, node: int, where: str) -> list[int]:
        owners = self._nodes.get(node)
        if owners is None:
            raise ContractBroken(f"{where} {node}: expected a committed node, found none")
        return owners
