"""Takes the census of an engine for the outside checker. Reads only; O(nodes + pages)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from cphicache.check.views import (
    Census,
    LoadView,
    NodeView,
    NumberedView,
    OperationView,
    ParkedView,
    PinView,
    RequestView,
    WaiterView,
)
from cphicache.engine import CpHiRadixCache
from cphicache.engine.records import Backup, Load, LoadState
from cphicache.engine.state import CacheState
from cphicache.lifecycle import State
from cphicache.spaces.types import LogicalPage
from cphicache.tree import Node

_STRAY_PARENT = -1
"""Stands for a parent that is not the node in whose ``children`` the child was found."""


def take_census(
    cache: CpHiRadixCache, rows: Mapping[str, Sequence[LogicalPage]], local_free: Mapping[str, int] | None, rank: int
) -> Census:
    """What ``cache`` holds now, to be taken between two of its calls.

    ``rows``: all pages of each running request by request id (parked ones are known to the cache). ``local_free``: free host slots
    of rank ``rank`` by payload, as ``TransferPort.free_slots`` says; None leaves them out. ValueError if ``rows`` has not exactly the
    running requests.
    """
    state, config = cache.state, cache.config
    running = state.requests.keys() - state.parked.keys()
    if running != rows.keys():
        raise ValueError(
            f"rows of {sorted(rows)} for running requests {sorted(running)}: give the whole row of each admitted request that has not "
            "finished, and of no other"
        )
    payloads = config.payload_names
    return Census(
        tick=state.tick,
        page_size=config.page_size,
        cp_size=config.cp_size,
        base=config.base,
        usable=state.alloc.usable_pages,
        payload_layers=config.payloads,
        host_total=dict.fromkeys(payloads, config.host_slots),
        nodes=tuple(_nodes(state)),
        operations=tuple(_operation(state, record) for record in state.pending.values()),
        loads=tuple(_load(load) for load in state.loads.values()),
        requests=tuple(
            RequestView(rid, tuple(rows[rid]), request.protected_pages, request.lock.id, frozenset(request.loads))
            for rid, request in state.requests.items()
            if rid not in state.parked
        ),
        parked=tuple(_parked(state, rid) for rid in state.parked),
        pins=tuple(PinView(pin.node.id, pin.pages, pin.expires_tick) for pin in state.pins),
        waiters=tuple(WaiterView(waiter.rid, waiter.node_id, waiter.woken) for waiter in state.waiters.values()),
        free_pages=tuple(page for lists in state.alloc.snapshot() for lane in lists for page in lane),
        ledger_free={(each, name): state.ledger.free(each, name) for each in range(config.cp_size) for name in payloads},
        rank=rank,
        local_free=None if local_free is None else dict(local_free),
        numbered=tuple(_numbered(number, operation) for number, operation in state.numbered.items()),
        next_number=state.next_number,
        resolved=state.resolved,
        outstanding=state.outstanding,
        open_batches=len(state.batches),
        evictable_tokens=cache.evictable_size(),
        protected_tokens=cache.protected_size(),
        host_only_need=tuple(state.host_only_need),
        tokens_submitted=state.counters.tokens_submitted,
        tokens_committed=state.counters.tokens_committed,
        tokens_wasted=state.counters.tokens_wasted,
    )


def _nodes(state: CacheState) -> Iterator[NodeView]:
    """All nodes as their parents' ``children`` show them, parents first."""
    yield _node(state.tree.root, None, None)
    stack = [state.tree.root]
    while stack:
        parent = stack.pop()
        for key, child in parent.children.items():
            yield _node(child, parent, key)
            stack.append(child)


def _node(node: Node[Backup], parent: Node[Backup] | None, filed_under: object) -> NodeView:
    record = node.backup
    link = node.parent
    return NodeView(
        id=node.id,
        parent=None if parent is None else parent.id,
        parent_link=None if link is None else link.id if link is parent else _STRAY_PARENT,
        filed_under=filed_under,
        segment=node.key.data,
        page_bytes=node.key.page_bytes,
        extra_key=node.key.extra_key,
        length_pages=node.length_pages,
        pages=None if node.pages is None else tuple(node.pages),
        device_children=node.device_children,
        lock_ref=node.lock_ref,
        host_ref=node.host_ref,
        loading=node.loading,
        state=record.state,
        number=record.number,
        record_fits=record.bound and record.node is node and record.node_id == node.id,
        host_owners=record.owners if record.state is State.COMMITTED else (),
    )


def _operation(state: CacheState, record: Backup) -> OperationView:
    in_tree = state.tree.find(record.node_id)
    parent = record.parent
    parent_node = None if parent is None or parent.node is None or parent.node.is_root else parent.node.id
    return OperationView(
        node=record.node_id,
        generation=record.generation,
        state=record.state,
        bound=record.bound,
        in_tree=in_tree is not None and in_tree.backup is record,
        number=record.number,
        agreed=record.agreed,
        submitted=record.submitted,
        confirmed=record.confirmed,
        request=record.request,
        pages=tuple(record.pages),
        owners=tuple(record.owners),
        need=tuple(record.need),
        wasted_need=tuple(record.wasted_need),
        wasted_pages=record.wasted_pages,
        host_hold=None if record.hold is None else (record.hold[0].id, record.hold[1]),
        parent=parent_node,
        parent_state=None if parent is None else parent.state,
        void=record.void,
    )


def _load(load: Load) -> LoadView:
    drained = load.state is LoadState.DRAINED
    return LoadView(load.load_id, load.last.id, load.pages, load.number, drained, frozenset(load.readers))


def _parked(state: CacheState, rid: str) -> ParkedView:
    request, parked = state.requests[rid], state.parked[rid]
    return ParkedView(rid, tuple(parked.row), request.protected_pages, request.lock.id, frozenset(request.loads))


def _numbered(number: int, operation: Backup | Load) -> NumberedView:
    if isinstance(operation, Load):
        return NumberedView(number, None, 0, operation.load_id)
    return NumberedView(number, operation.node_id, operation.generation, None)
