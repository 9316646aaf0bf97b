"""A local half without tensors, as data: it counts host slots, checks its caller, and asks the environment how copies fare.

Copies are in flight from their submission on. How they fare is asked for when the engine looks (``status``, ``load_status``, and the
``wait_*`` of drain rounds), not before. That loses no behaviour: a completion changes nothing but what these calls answer, so one that
comes anywhere between two looks is the same as one that comes right before the second. Which layer of an operation ends first is
not seen by anybody either; that some have failed while others go on is (``FAILING``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

from cphicache.engine import CacheConfig
from cphicache.explore.environment import Environment, Fate
from cphicache.spaces.types import LogicalPage
from cphicache.transfer.port import CopyStatus, HostSlotsExhausted, LoadItem, OpKey, OwnerMismatch

Image: TypeAlias = tuple[Any, ...]
"""Plain immutable data."""

_LOOKS = {
    False: (Fate.FLYING, Fate.ENDED, Fate.FAILED, Fate.FAILING),
    True: (Fate.FLYING, Fate.ENDED),
}
"""What may have become of copies in flight, by whether one has failed before."""


class ContractBroken(AssertionError):
    """Our bug: the engine asked for something that the port's contract forbids."""


class BackupCopies(NamedTuple):
    """A backup on this rank. ``owners`` of its pages; ``submitted`` layers by payload (bit masks); ``kept_slots``: cut by a shrink,
    to be freed at its end."""

    owners: tuple[int, ...]
    submitted: tuple[int, ...]
    kept_slots: int = 0
    flying: bool = False
    failed: bool = False


class LoadCopies(NamedTuple):
    """A load-back on this rank. ``nodes``: those whose host slots it reads; ``pages``: those that it fills, ``owned_pages`` of them on
    this rank."""

    nodes: tuple[int, ...]
    pages: tuple[LogicalPage, ...]
    owned_pages: int
    started: bool = False
    flying: bool = False
    failed: bool = False


class RecordedTransfer:
    """Implements :class:`~cphicache.transfer.port.TransferPort` for one rank.

    Slots leave an operation by ``commit``, ``release``, ``shrink`` and ``free_node`` only, and each of these refuses while a copy
    that uses them is in flight: so no slot with a copy in flight is ever handed out. ``reserve_may_fail``: a local reservation is
    one more thing that the environment decides; ``wait_may_fail``: so is how copies end that are waited for.
    """

    def __init__(
        self,
        config: CacheConfig,
        rank: int,
        environment: Environment,
        *,
        reserve_may_fail: bool = False,
        wait_may_fail: bool = True,
    ) -> None:
        self._config = config
        self._rank = rank
        self._environment = environment
        self._reserve_may_fail = reserve_may_fail
        self._wait_may_fail = wait_may_fail
        self._layout = config.layout(rank)
        self._names = config.payload_names
        self._full = tuple((1 << layers) - 1 for _, layers in config.payloads)
        self._free = config.host_slots
        self._next_producer = 0
        self.backups: dict[OpKey, BackupCopies] = {}
        self.nodes: dict[int, tuple[int, ...]] = {}
        self.loads: dict[int, LoadCopies] = {}
        self.is_given_up: Callable[[OpKey], bool] = lambda op: False
        """Whether an operation was rolled back already: nobody asks whether it fails, only when it ends."""
        self.garbage: list[LogicalPage] = []
        """Pages of load-backs that have ended in this call and had failed: nobody's KV any more."""

    # -- state as data ----------------------------------------------------------------------------------------------------------
    def snapshot(self) -> Image:
        """All of it, immutable."""
        return self._free, self._next_producer, tuple(self.backups.items()), tuple(self.nodes.items()), tuple(self.loads.items())

    def restore(self, image: Image) -> None:
        """Become what :meth:`snapshot` was asked of."""
        self._free, self._next_producer, backups, nodes, loads = image
        self.backups, self.nodes, self.loads = dict(backups), dict(nodes), dict(loads)
        self.garbage.clear()

    def canonical(self, key: OpKey | int) -> tuple[bool, bool]:
        """How the copies of a backup (by key) or of a load-back (by id) stand: in flight, failed. The rest of the local half follows
        from the logical one, and :func:`cphicache.explore.audit.audit` proves that it does."""
        copies: BackupCopies | LoadCopies | None = self.loads.get(key) if isinstance(key, int) else self.backups.get(key)
        return (False, True) if copies is None else (copies.flying, copies.failed)

    # -- backup -----------------------------------------------------------------------------------------------------------------
    def reserve(self, op: OpKey, pages: Sequence[LogicalPage]) -> None:
        """See the port."""
        _require(op not in self.backups, f"reserve {op}", "a new operation", "it in flight")
        _require(op.node not in self.nodes, f"reserve {op}", "a node that is not backed up", "its committed copy")
        owners = self._layout.owners(pages)
        slots = self._slots(owners)
        if slots and self._reserve_may_fail:
            fate = self._environment.fate(f"slots of node {op.node}", (Fate.TAKEN, Fate.EXHAUSTED))
            if fate is Fate.EXHAUSTED:
                raise HostSlotsExhausted(f"reserve {op}: {slots} slots wanted, told to fail")
        _require(slots <= self._free, f"reserve {op}", f"at most {self._free} slots, as the ledger says", slots)
        self._free -= slots
        self.backups[op] = BackupCopies(owners, (0,) * len(self._names))

    def submit_layers(self, ops: Iterable[OpKey], payload: str, layers: Sequence[int]) -> None:
        """See the port."""
        _require(payload in self._names, "submit_layers", f"a payload of {list(self._names)}", payload)
        index = self._names.index(payload)
        for key in ops:
            copies = self._backup(key, "submit_layers")
            submitted = list(copies.submitted)
            for layer in layers:
                fits = (1 << layer) & self._full[index] and not (1 << layer) & submitted[index]
                _require(bool(fits), f"submit_layers {key} {payload}", "a layer that exists, once", layer)
                submitted[index] |= 1 << layer
            flies = copies.flying or (bool(layers) and self._slots(copies.owners) > 0)
            self.backups[key] = copies._replace(submitted=tuple(submitted), flying=flies)

    def status(self, op: OpKey) -> CopyStatus:
        """See the port: this is where the environment decides."""
        copies = self._backup(op, "status")
        if copies.flying:
            fate = self._environment.fate(f"node {op.node}", _LOOKS[copies.failed])
            copies = self.backups[op] = copies._replace(
                flying=fate in (Fate.FLYING, Fate.FAILING), failed=copies.failed or fate in (Fate.FAILED, Fate.FAILING)
            )
        return CopyStatus(not copies.flying, copies.failed)

    def wait_backup(self, op: OpKey) -> None:
        """See the port: the copies end here, well or not."""
        copies = self._backup(op, "wait_backup")
        if copies.flying:
            failed = copies.failed or self._fails_waiting(f"node {op.node}", given_up=self.is_given_up(op))
            self.backups[op] = copies._replace(flying=False, failed=failed)

    def shrink(self, op: OpKey, head_pages: int, *, free_now: bool) -> None:
        """See the port."""
        copies = self._backup(op, "shrink")
        inside = 0 < head_pages < len(copies.owners)
        _require(inside, f"shrink {op}", f"a cut inside {len(copies.owners)} pages", head_pages)
        slots, kept = self._slots(copies.owners[:head_pages]), copies.kept_slots
        if free_now:
            _require_ended(copies, f"shrink {op} with free_now")
            self._give(slots)
        else:
            kept += slots
        self.backups[op] = copies._replace(owners=copies.owners[head_pages:], kept_slots=kept)

    def commit(self, op: OpKey) -> None:
        """See the port."""
        copies = self._end(op, "commit")
        _require(op.node not in self.nodes, f"commit {op}", "no committed copy of the node", "one")
        _require(not copies.failed, f"commit {op}", "every copy to have succeeded", "a failed one")
        _require(copies.submitted == self._full, f"commit {op}", f"all layers {self._full}", copies.submitted)
        self.nodes[op.node] = copies.owners

    def release(self, op: OpKey) -> None:
        """See the port."""
        self._give(self._slots(self._end(op, "release").owners))

    # -- committed nodes --------------------------------------------------------------------------------------------------------
    def free_node(self, node: int) -> None:
        """See the port."""
        owners = self._node(node, "free_node")
        readers = [load for load, copies in self.loads.items() if node in copies.nodes]
        _require(not readers, f"free_node {node}", "no load-back of it", readers)
        del self.nodes[node]
        self._give(self._slots(owners))

    def split_node(self, node: int, head: int, head_pages: int) -> None:
        """See the port."""
        owners = self._node(node, "split_node")
        _require(head not in self.nodes, f"split_node {node}", f"no committed copy of {head}", "one")
        _require(0 < head_pages < len(owners), f"split_node {node}", f"a cut inside {len(owners)} pages", head_pages)
        self.nodes[head], self.nodes[node] = owners[:head_pages], owners[head_pages:]
        for load, copies in self.loads.items():
            if node in copies.nodes:
                self.loads[load] = copies._replace(nodes=(*copies.nodes, head))

    # -- load-back --------------------------------------------------------------------------------------------------------------
    def queue_load(self, load: int, items: Sequence[LoadItem]) -> None:
        """See the port."""
        _require(load not in self.loads, f"queue_load {load}", "a new load-back", "it queued")
        owned, pages = 0, list[LogicalPage]()
        for item in items:
            owners = self._layout.owners(item.pages)
            if owners != self._node(item.node, "queue_load"):
                raise OwnerMismatch(f"load-back of node {item.node}: owners {self.nodes[item.node]}, pages of owners {owners}")
            owned += owners.count(self._rank)
            pages.extend(item.pages)
        self.loads[load] = LoadCopies(tuple(item.node for item in items), tuple(pages), owned)

    def start_loads(self) -> int:
        """See the port."""
        queued = [load for load, copies in self.loads.items() if not copies.started]
        return self._start(queued) if queued else -1

    def load_status(self, load: int) -> CopyStatus:
        """See the port: this is where the environment decides."""
        copies = self._load(load, "load_status")
        if copies.flying:
            fate = self._environment.fate(f"load-back {load}", _LOOKS[copies.failed])
            copies = self.loads[load] = copies._replace(
                flying=fate in (Fate.FLYING, Fate.FAILING), failed=copies.failed or fate in (Fate.FAILED, Fate.FAILING)
            )
        return CopyStatus(copies.started and not copies.flying, copies.failed)

    def wait_load(self, load: int) -> None:
        """See the port: the copies end here, well or not."""
        if not self._load(load, "wait_load").started:
            self._start([load])
        copies = self.loads[load]
        if copies.flying:
            failed = copies.failed or self._fails_waiting(f"load-back {load}")
            self.loads[load] = copies._replace(flying=False, failed=failed)

    def end_load(self, load: int) -> None:
        """See the port."""
        copies = self._load(load, "end_load")
        _require(copies.started, f"end_load {load}", "a started load-back", "it queued")
        _require_ended(copies, f"end_load {load}")
        if copies.failed:
            self.garbage.extend(copies.pages)
        del self.loads[load]

    # -- the forward pass, and the outside ----------------------------------------------------------------------------------------
    def before_store(self, pages: Sequence[LogicalPage]) -> None:
        """See the port. There are no bytes here that a store could come too early for."""

    def wait_layer(self, producer: int, payload: str, layer: int) -> None:
        """See the port."""
        _require(-1 <= producer < self._next_producer, "wait_layer", f"a producer below {self._next_producer}", producer)
        exists = payload in self._names and (1 << layer) & self._full[self._names.index(payload)]
        _require(bool(exists), "wait_layer", f"a layer of {self._config.payloads}", (payload, layer))

    def free_slots(self) -> dict[str, int]:
        """See the port."""
        return dict.fromkeys(self._names, self._free)

    # -- inner parts ----------------------------------------------------------------------------------------------------------------
    def _fails_waiting(self, about: str, *, given_up: bool = False) -> bool:
        if not self._wait_may_fail:
            return False
        return self._environment.fate(about, (Fate.ENDED,) if given_up else (Fate.ENDED, Fate.FAILED)) is Fate.FAILED

    def _slots(self, owners: Sequence[int]) -> int:
        return owners.count(self._rank) * self._config.page_size

    def _give(self, slots: int) -> None:
        self._free += slots
        _require(self._free <= self._config.host_slots, "free", f"at most {self._config.host_slots} free slots", self._free)

    def _start(self, loads: Sequence[int]) -> int:
        for load in loads:
            copies = self.loads[load]
            self.loads[load] = copies._replace(started=True, flying=copies.owned_pages > 0)
        self._next_producer += 1
        return self._next_producer - 1

    def _end(self, key: OpKey, where: str) -> BackupCopies:
        copies = self._backup(key, where)
        _require_ended(copies, f"{where} {key}")
        del self.backups[key]
        self._give(copies.kept_slots)
        return copies

    def _backup(self, key: OpKey, where: str) -> BackupCopies:
        copies = self.backups.get(key)
        if copies is None:
            raise ContractBroken(f"{where} {key}: expected an operation in flight, found none of that generation")
        return copies

    def _load(self, load: int, where: str) -> LoadCopies:
        copies = self.loads.get(load)
        if copies is None:
            raise ContractBroken(f"{where} {load}: expected a load-back in flight, found none")
        return copies

    def _node(self, node: int, where: str) -> tuple[int, ...]:
        owners = self.nodes.get(node)
        if owners is None:
            raise ContractBroken(f"{where} {node}: expected a committed node, found none")
        return owners


def _require(holds: bool, where: str, expected: str, found: object) -> None:
    if not holds:
        raise ContractBroken(f"{where}: expected {expected}, found {found}")


def _require_ended(copies: BackupCopies | LoadCopies, where: str) -> None:
    _require(not copies.flying, where, "its copies to have ended", "some in flight")
