"""Everything that an engine knows, without tensors and without ports: integers and plain objects, equal on every rank
(fields called ``*_here`` and ``void`` excepted, which no decision reads)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from cphicache.alloc import AllocatorPort, PageAllocator
from cphicache.engine.config import CacheConfig
from cphicache.engine.counters import Counters
from cphicache.engine.records import Backup, Batch, Load, Parked, Pin, Request, Waiter
from cphicache.ledger import HostLedger, Need, need_of
from cphicache.spaces.types import LogicalPage
from cphicache.tree import Node, RadixTree

KV_EVENTS_KEPT = 65_536
"""KV events kept for :meth:`CpHiRadixCache.take_events`; older ones are dropped and counted."""


class KVEvent(NamedTuple):
    """A radix node's KV appeared in, or went from, a medium (R27)."""

    stored: bool
    medium: str
    node: int
    pages: int


KVListener = Callable[[bool, str, Node[Backup]], None]
"""Hears of each KV event (stored, medium, node) when it happens, while the node is in the tree."""


class CacheState:
    """Tree, allocator, ledger, sequence and everybody who waits."""

    def __init__(self, config: CacheConfig, allocator: AllocatorPort | None = None) -> None:
        self.config = config
        self.layout = config.layout(0)  # only rank-independent questions are asked of it here
        self.no_need: Need = (0,) * config.cp_size
        self.tree: RadixTree[Backup] = RadixTree(config.page_size, config.eviction_policy, self._make_backup)
        self.alloc: AllocatorPort = PageAllocator(self.layout, config.usable_pages) if allocator is None else allocator
        self.ledger = HostLedger(config.cp_size, dict.fromkeys(config.payload_names, config.host_slots))
        self.tick = 0
        self.clock = 0
        self.next_node_id = 1
        self.next_generation = 1
        self.next_load_id = 1
        self.next_order = 0
        # the sequence that all ranks agree on: numbers below `resolved` are agreed, those below `next_number` are given out
        self.next_number = 0
        self.resolved = 0
        self.numbered: dict[int, Backup | Load] = {}
        self.outstanding = False
        self.quarantined: str | None = None
        """Why the host tier takes nothing any more."""
        # by node id / load id / request id / batch id
        self.pending: dict[int, Backup] = {}
        self.loads: dict[int, Load] = {}
        self.undoing: list[int] = []
        self.requests: dict[str, Request] = {}
        self.batches: dict[int, Batch] = {}
        self.waiters: dict[str, Waiter] = {}
        self.waiting_for: dict[int, list[str]] = {}
        self.parked: dict[str, Parked] = {}
        self.retries: dict[int, Backup] = {}
        self.pins: list[Pin] = []
        self.retried_epoch = -1
        self.host_only_need = [0] * config.cp_size
        """Slots by rank that host-only committed nodes hold: the most that host eviction could free."""
        self.counters = Counters()
        self.kv_events: deque[KVEvent] = deque(maxlen=KV_EVENTS_KEPT)
        self.kv_events_lost = 0
        self.kv_listener: KVListener | None = None

    def _make_backup(self, node: Node[Backup]) -> Backup:
        backup = Backup(node.id, len(self.config.payloads), bound=True, no_need=self.no_need)
        backup.node = node
        return backup

    def new_node_id(self) -> int:
        """Node ids are never reused."""
        self.next_node_id += 1
        return self.next_node_id - 1

    def now(self) -> int:
        """The next value of the logical clock that orders accesses."""
        self.clock += 1
        return self.clock

    def is_retry_due(self) -> bool:
        """Whether a round of retries would look at any node: slots were freed since it was refused, and no whole round was made since.

        What is not due becomes so only when slots are freed, or when a round is asked for anew; so what went before does not matter.
        """
        epoch = self.ledger.freed_epoch
        return self.retried_epoch != epoch and any(record.refused_epoch < epoch for record in self.retries.values())

    def need(self, owners: Sequence[int]) -> Need:
        """Host slots by rank, in every payload, for whole pages with these owners."""
        return need_of(owners, self.config.page_size, self.config.cp_size)

    def owners(self, pages: Sequence[LogicalPage]) -> tuple[int, ...]:
        """Owning rank of each page."""
        return self.layout.owners(pages)

    def kv_event(self, *, stored: bool, medium: str, node: Node[Backup]) -> None:
        """Note that a node's KV appeared in, or went from, ``device`` or ``host``."""
        if len(self.kv_events) == KV_EVENTS_KEPT:
            self.kv_events_lost += 1
        self.kv_events.append(KVEvent(stored, medium, node.id, node.length_pages))
        if self.kv_listener is not None:
            self.kv_listener(stored, medium, node)


def add_need(one: Sequence[int], other: Sequence[int]) -> Need:
    """Sum by rank."""
    return tuple(a + b for a, b in zip(one, other, strict=True))


def sub_need(one: Sequence[int], other: Sequence[int]) -> Need:
    """Difference by rank."""
    return tuple(a - b for a, b in zip(one, other, strict=True))
