"""What the engine remembers of backups, load-backs, requests and those who wait. Plain objects; no port, no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from cphicache.ledger import Need
from cphicache.lifecycle import BackupRecord
from cphicache.lifecycle.names import COMMITTED, LAYERS_IN_FLIGHT, RESERVED
from cphicache.spaces.types import LogicalPage
from cphicache.transfer.port import OpKey
from cphicache.tree import Node, RadixKey, Walk

ALIVE = frozenset({RESERVED, LAYERS_IN_FLIGHT})
"""States of a backup that holds slots and may still commit."""


class Refusal(StrEnum):
    """Why a backup was not reserved, or a load-back not queued."""

    NO_HOST_SLOTS = "no_host_slots"
    PARENT_NOT_BACKED = "parent_not_backed"
    PARENT_ROLLING_BACK = "parent_rolling_back"
    SPLIT_AWAITED = "split_awaited"
    PAYLOAD_NOT_STORED = "payload_not_stored"
    BELOW_THRESHOLD = "below_threshold"
    OVER_QUOTA = "over_quota"
    NO_DEVICE_PAGES = "no_device_pages"
    LOAD_ABOVE_FAILED = "load_above_failed"
    NOTHING_TO_LOAD = "nothing_to_load"
    QUARANTINED = "quarantined"


class Backup(BackupRecord):
    """A lifecycle record with what the engine needs to serve it.

    ``pages`` are the logical pages of the extent (of the node while it is not backed up: empty). ``need`` are the host slots by rank
    that it holds, wasted ones in ``wasted_need``. ``parent`` and ``heirs`` link extents that have no node yet.
    """

    __slots__ = (
        "done_here",
        "heirs",
        "hold",
        "key",
        "need",
        "node",
        "order",
        "owners",
        "pages",
        "parent",
        "refused_epoch",
        "refused_tick",
        "request",
        "retries",
        "retrying",
        "start_page",
        "stored_tick",
        "tried_tick",
        "void",
        "wasted_need",
    )

    def __init__(self, node_id: int, payloads: int, *, bound: bool, no_need: Need) -> None:
        super().__init__(node_id, payloads, bound=bound)
        self.node: Node[Backup] | None = None
        self.parent: Backup | None = None
        self.heirs: list[Backup] = []
        self.request = ""
        self.start_page = 0
        self.pages: list[LogicalPage] = []
        self.owners: tuple[int, ...] = ()
        self.need = no_need
        self.wasted_need = no_need
        self.hold: tuple[Node[Backup], int] | None = None
        self.order = 0
        self.retries = 0
        self.retrying = False
        self.refused_epoch = -1
        self.refused_tick = -(10**9)
        self.tried_tick = -1
        self.stored_tick = -1
        self.done_here = False
        self.void = False
        self.key = OpKey(node_id, 0)

    def set_generation(self, generation: int) -> None:
        """The generation, and with it ``key``, the identity of the operation towards the local half: kept, as it is asked for once a
        layer."""
        self.generation = generation
        self.key = OpKey(self.node_id, generation)

    @property
    def has_host_copy(self) -> bool:
        """Whether the node's KV can be loaded back: host-visible on every rank."""
        return self.state is COMMITTED

    @property
    def end_page(self) -> int:
        """Page of the request at which the extent ends."""
        return self.start_page + len(self.pages)


class LoadState(StrEnum):
    """Where a load-back is."""

    QUEUED = "queued"
    FAILED = "failed"
    DRAINED = "drained"


@dataclass(slots=True)
class Load:
    """A load-back in flight: the chain of ``pages`` pages that ends with node ``last``."""

    load_id: int
    last: Node[Backup]
    pages: int
    tokens: int
    number: int = -1
    producer: int | None = None
    state: LoadState = LoadState.QUEUED
    doomed: bool = False
    """Loaded below a load-back that failed: its bytes are right, but what they hang on is not."""
    failed_here: bool = False
    done_here: bool = False
    queued_tick: int = field(kw_only=True)
    readers: set[str] = field(default_factory=set)


@dataclass(slots=True)
class Request:
    """The cache's side of a request. ``protected_pages`` at the front of its row belong to the tree, the rest is its own."""

    rid: str
    lock: Node[Backup]
    protected_pages: int
    hit_pages: int
    ops: list[Backup] = field(default_factory=list)
    loads: set[int] = field(default_factory=set)
    poisoned: bool = False
    priority: int = 0
    """For the eviction policy of that name: the nodes of its KV get it, unless they have a higher one."""
    whole_pages: int | None = None
    """Pages from here on lack a payload, because a forward of theirs ended without it: they never enter the tree (R5). None: all whole."""


@dataclass(slots=True)
class Waiter:
    """A request, or a parked insert, that waits until the backup of a node has ended."""

    rid: str
    node_id: int
    deadline_tick: int
    woken: bool = False


@dataclass(slots=True)
class Parked:
    """The insert of a finished request that could not be made yet. It owns the request's pages."""

    rid: str
    key: RadixKey
    row: list[LogicalPage]
    deadline_tick: int


@dataclass(slots=True)
class Pin:
    """A prefix whose host copy may not be taken before a tick: the ``pages`` pages that end with ``node``."""

    node: Node[Backup]
    pages: int
    expires_tick: int


@dataclass(slots=True)
class Batch:
    """What one forward pass stores: backups in reservation order, and by request the first page that it writes."""

    batch_id: int
    ops: list[Backup] = field(default_factory=list)
    stores: dict[str, int] = field(default_factory=dict)
    stored_layers: dict[int, int] = field(default_factory=dict)
    """Bit mask of the layers that were reported, by payload; all of them at the end of the payload's forward."""


class Match(NamedTuple):
    """Answer of :meth:`~cphicache.engine.cache.CpHiRadixCache.match_prefix`. Good until the tree changes.

    ``device_pages``: logical pages of the prefix that is on the device. ``device_node``: the node in which it ends (an opaque handle;
    a match may end inside it). ``host_nodes``: the chain of host-only nodes that follows, the last one matched for ``host_tail_pages``
    of its pages. ``host_hit_tokens``: what a load-back may bring, 0 below the threshold. ``last_host_node``: deepest committed node.
    """

    walk: Walk[Backup]
    device_pages: list[LogicalPage]
    device_node: Node[Backup]
    host_nodes: list[Node[Backup]]
    host_tail_pages: int
    host_hit_tokens: int
    last_host_node: Node[Backup]


class LoadAnswer(NamedTuple):
    """Answer of a load-back: ``pages`` that now continue the device prefix and the node they end in, or a refusal."""

    pages: list[LogicalPage]
    node: Node[Backup] | None
    refused: Refusal | None


class TickReport(NamedTuple):
    """What a tick decided that the scheduler must act on.

    ``poisoned``: running requests that read a failed load-back and must be retracted or aborted. ``inserted`` / ``dropped``: parked
    inserts of finished requests that were made / given up in this tick.
    """

    tick: int
    poisoned: list[str]
    inserted: list[str]
    dropped: list[str]
