"""What the outside checker is shown: plain frozen values, read off an engine by :mod:`cphicache.run.census`.

Pages are logical pages, slots are host token slots. Nothing here refers to an object of the engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cphicache.lifecycle import State

Slots = tuple[int, ...]
"""Host slots by rank, in each payload."""


@dataclass(frozen=True, slots=True)
class NodeView:
    """A radix node.

    ``parent``: whose ``children`` it was found in; ``parent_link``: whom it names as its parent. The root has None in both.
    ``filed_under``: its key in ``children``; ``segment``: its own key as bytes, ``page_bytes`` a page; ``extra_key``: its namespace.
    ``pages``: None when it is host-only. ``host_owners``: owner of each page of a committed host copy, else empty.
    ``state`` and ``number``: of its record; ``record_fits``: the record is bound and names this very node.
    """

    id: int
    parent: int | None
    parent_link: int | None
    filed_under: object
    segment: bytes
    page_bytes: int
    extra_key: str | None
    length_pages: int
    pages: tuple[int, ...] | None
    device_children: int
    lock_ref: int
    host_ref: int
    loading: int | None
    state: State
    number: int | None
    record_fits: bool
    host_owners: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class OperationView:
    """A pending backup.

    ``in_tree``: node ``node`` of the tree carries this very record. ``need`` and ``wasted_need``: slots by rank that it holds, for its
    extent and for ``wasted_pages`` pages cut from it. ``host_hold``: (node, pages) that it pins on the host. ``parent``: node in the
    tree that an unbound extent hangs on (None: the root, or another unbound extent), ``parent_state`` that parent's state.
    ``void``: this rank has none of its slots (a local reserve fault).
    """

    node: int
    generation: int
    state: State
    bound: bool
    in_tree: bool
    number: int | None
    agreed: bool
    submitted: tuple[int, ...]
    confirmed: tuple[int, ...]
    request: str
    pages: tuple[int, ...]
    owners: tuple[int, ...]
    need: Slots
    wasted_need: Slots
    wasted_pages: int
    host_hold: tuple[int, int] | None
    parent: int | None
    parent_state: State | None
    void: bool


@dataclass(frozen=True, slots=True)
class LoadView:
    """A load-back in flight of the ``pages`` pages that end with node ``last``. ``drained``: failed, and its number was passed."""

    load: int
    last: int
    pages: int
    number: int
    drained: bool
    readers: frozenset[str]


@dataclass(frozen=True, slots=True)
class RequestView:
    """A running request: the first ``protected_pages`` of ``row`` belong to the tree, the rest to it. ``lock``: node that it locks."""

    rid: str
    row: tuple[int, ...]
    protected_pages: int
    lock: int
    loads: frozenset[int]


@dataclass(frozen=True, slots=True)
class ParkedView(RequestView):
    """A finished request whose insert waits; it owns pages and a lock like a running one."""


@dataclass(frozen=True, slots=True)
class PinView:
    """A prefix that is kept on the host for some ticks: the ``pages`` pages that end with ``node``."""

    node: int
    pages: int
    expires_tick: int


@dataclass(frozen=True, slots=True)
class WaiterView:
    """A request that waits until the backup of ``node`` has ended."""

    rid: str
    node: int
    woken: bool


@dataclass(frozen=True, slots=True)
class NumberedView:
    """An entry of the agreed sequence. Exactly one of ``node`` (with ``generation``) and ``load`` is set."""

    number: int
    node: int | None
    generation: int
    load: int | None


@dataclass(frozen=True, slots=True)
class Census:
    """Everything that an engine holds at one moment, between two calls.

    ``usable``: logical pages without the reserved ones. ``payload_layers``: (name, layers). ``host_total``: slots of one rank by payload.
    ``nodes``: parents first, the root included. ``free_pages``: of all free and release lists. ``ledger_free``: by (rank, payload).
    ``local_free``: free slots of this rank's own pools by payload, None when they are not looked at.
    ``host_only_need``, ``evictable_tokens``, ``protected_tokens``, ``tokens_*``: what the engine says that they are.
    ``outstanding``: a reduction is issued and not applied.
    """

    tick: int
    page_size: int
    cp_size: int
    base: int
    usable: range
    payload_layers: tuple[tuple[str, int], ...]
    host_total: Mapping[str, int]
    nodes: tuple[NodeView, ...]
    operations: tuple[OperationView, ...]
    loads: tuple[LoadView, ...]
    requests: tuple[RequestView, ...]
    parked: tuple[ParkedView, ...]
    pins: tuple[PinView, ...]
    waiters: tuple[WaiterView, ...]
    free_pages: tuple[int, ...]
    ledger_free: Mapping[tuple[int, str], int]
    rank: int
    local_free: Mapping[str, int] | None
    numbered: tuple[NumberedView, ...]
    next_number: int
    resolved: int
    outstanding: bool
    open_batches: int
    evictable_tokens: int
    protected_tokens: int
    host_only_need: Slots
    tokens_submitted: int
    tokens_committed: int
    tokens_wasted: int
