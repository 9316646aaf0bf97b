"""The engine's state as data: an image to go back to.

It is taken between two calls of the cache: inside a call, work may be queued that is no part of it. What the local half and the
reducer hold (copies, host slots, a reduction that was issued) is theirs to save; so is what the caller remembers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import MISSING, fields
from functools import lru_cache
from operator import attrgetter
from typing import Any, TypeAlias

from cphicache.engine.config import CacheConfig
from cphicache.engine.counters import Counters
from cphicache.engine.records import Backup, Batch, Load, LoadState, Parked, Pin, Request, Waiter
from cphicache.engine.state import CacheState, KVEvent
from cphicache.lifecycle import State
from cphicache.tree import Node, RadixKey

Image: TypeAlias = dict[str, Any]
"""Integers, strings, bytes, None, and tuples, lists and dicts of such. Shares nothing that changes with the state it was taken of."""

_SCALARS = (
    "tick",
    "clock",
    "next_node_id",
    "next_generation",
    "next_load_id",
    "next_order",
    "next_number",
    "resolved",
    "outstanding",
    "quarantined",
    "retried_epoch",
    "kv_events_lost",
)
# A backup has immutable values, its pages, its state, and links to nodes and other backups.
_VALUES = (
    "agreed",
    "bound",
    "done_here",
    "failed_here",
    "generation",
    "hits",
    "need",
    "number",
    "order",
    "owners",
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
    "wasted_pages",
    "submitted",
    "confirmed",
)
_values_of: Callable[[Backup], tuple[Any, ...]] = attrgetter(*_VALUES)


def _set_values(record: Backup, values: tuple[Any, ...]) -> None:
    """The other way round: one assignment, several times as fast as one a name."""
    (
        record.agreed,
        record.bound,
        record.done_here,
        record.failed_here,
        record.generation,
        record.hits,
        record.need,
        record.number,
        record.order,
        record.owners,
        record.refused_epoch,
        record.refused_tick,
        record.request,
        record.retries,
        record.retrying,
        record.start_page,
        record.stored_tick,
        record.tried_tick,
        record.void,
        record.wasted_need,
        record.wasted_pages,
        record.submitted,
        record.confirmed,
    ) = values


_COUNTED_BY_KEY = tuple(field.name for field in fields(Counters) if field.default_factory is not MISSING)
_STATES = {str(state): state for state in State}


# -- to data ----------------------------------------------------------------------------------------------------------------------
class _RecordTable:
    """All backups that a state refers to, each once. Others name them by their index, since two may name the same one."""

    def __init__(self) -> None:
        self._index: dict[Backup, int] = {}
        self._records: list[Backup] = []

    def index(self, record: Backup) -> int:
        index = self._index.setdefault(record, len(self._records))
        if index == len(self._records):
            self._records.append(record)
        return index

    def indices(self, records: Iterable[Backup]) -> tuple[int, ...]:
        return tuple(self.index(record) for record in records)

    def rows(self, state: CacheState) -> list[tuple[Any, ...]]:
        rows: list[tuple[Any, ...]] = []
        for record in self._records:  # grows meanwhile: a record may link to one that nobody else names
            in_tree = record.node is not None and state.tree.find(record.node.id) is record.node
            rows.append(
                (
                    record.node_id,
                    str(record.state),
                    _values_of(record),
                    tuple(record.pages),
                    record.node_id if in_tree else None,  # a node that was removed serves nobody any more
                    None if record.parent is None else self.index(record.parent),
                    self.indices(record.heirs),
                    None if record.hold is None else (record.hold[0].id, record.hold[1]),
                )
            )
        return rows


def dump_state(state: CacheState) -> Image:
    """The whole state as plain data."""
    table = _RecordTable()
    image: Image = {name: getattr(state, name) for name in _SCALARS}
    image["config"] = _config_values(state.config)
    image["tree"] = state.tree.snapshot(table.index)
    image["alloc"] = state.alloc.snapshot()
    image["ledger"] = state.ledger.snapshot()
    image["pending"] = table.indices(state.pending.values())
    image["retries"] = table.indices(state.retries.values())
    image["numbered"] = tuple(
        (number, True, operation.load_id) if isinstance(operation, Load) else (number, False, table.index(operation))
        for number, operation in state.numbered.items()
    )
    image["loads"] = tuple(_dump_load(load) for load in state.loads.values())
    image["undoing"] = tuple(state.undoing)
    image["requests"] = tuple(
        (
            request.rid,
            request.lock.id,
            request.protected_pages,
            request.hit_pages,
            table.indices(request.ops),
            tuple(sorted(request.loads)),
            request.poisoned,
            request.priority,
            request.whole_pages,
        )
        for request in state.requests.values()
    )
    image["batches"] = tuple(
        (batch.batch_id, table.indices(batch.ops), tuple(batch.stores.items()), tuple(sorted(batch.stored_layers.items())))
        for batch in state.batches.values()
    )
    image["waiters"] = tuple((waiter.rid, waiter.node_id, waiter.deadline_tick, waiter.woken) for waiter in state.waiters.values())
    image["waiting_for"] = tuple((node_id, tuple(rids)) for node_id, rids in state.waiting_for.items())
    image["parked"] = tuple(
        (parked.rid, _key_values(parked.key), tuple(parked.row), parked.deadline_tick) for parked in state.parked.values()
    )
    image["pins"] = tuple((pin.node.id, pin.pages, pin.expires_tick) for pin in state.pins)
    image["host_only_need"] = tuple(state.host_only_need)
    image["counters"] = counts = dict(vars(state.counters))
    for name in _COUNTED_BY_KEY:
        counts[name] = _dump_counts(counts[name]) if counts[name] else {}
    image["kv_events"] = tuple(tuple(event) for event in state.kv_events)
    image["records"] = table.rows(state)  # last: everything above may have named one
    return image


@lru_cache(maxsize=64)
def _config_values(config: CacheConfig) -> tuple[Any, ...]:
    values = (getattr(config, field.name) for field in fields(config))
    return tuple(str(value) if isinstance(value, str) else value for value in values)


def _dump_counts(counts: Counter[Any]) -> dict[Any, int]:
    return {str(key) if isinstance(key, str) else key: number for key, number in counts.items()}


def _dump_load(load: Load) -> tuple[Any, ...]:
    return (
        load.load_id,
        load.last.id,
        load.pages,
        load.tokens,
        load.number,
        load.producer,
        str(load.state),
        load.doomed,
        load.failed_here,
        load.done_here,
        load.queued_tick,
        tuple(sorted(load.readers)),
    )


def _key_values(key: RadixKey) -> tuple[Any, ...]:
    return key.data, key.page_size, key.extra_key, key.is_bigram, key.pages, key.page_bytes


# -- and back ---------------------------------------------------------------------------------------------------------------------
def load_state(state: CacheState, image: Image) -> None:
    """Become the state that an image was taken of. Nodes and records are new objects; handles from before are void.

    Raises ValueError, and changes nothing, if the image was taken under another configuration.
    """
    if image["config"] != _config_values(state.config):
        raise ValueError(
            f"image of an engine configured as {image['config']}, this one has {_config_values(state.config)}: restore into its like"
        )
    records = [_new_record(state, row) for row in image["records"]]

    def pick(indices: Iterable[int]) -> list[Backup]:
        return [records[index] for index in indices]

    state.tree.restore(image["tree"], lambda node, index: records[index])
    state.alloc.restore(image["alloc"])
    state.ledger.restore(image["ledger"])
    for record, row in zip(records, image["records"], strict=True):
        *_, node_id, parent, heirs, hold = row
        record.node = None if node_id is None else _node(state, node_id)
        record.parent = None if parent is None else records[parent]
        record.heirs = pick(heirs)
        record.hold = None if hold is None else (_node(state, hold[0]), hold[1])
    for name in _SCALARS:
        setattr(state, name, image[name])
    state.pending = {record.node_id: record for record in pick(image["pending"])}
    state.retries = {record.node_id: record for record in pick(image["retries"])}
    state.loads = {row[0]: _new_load(state, row) for row in image["loads"]}
    state.numbered = {number: state.loads[name] if is_load else records[name] for number, is_load, name in image["numbered"]}
    state.undoing = list(image["undoing"])
    state.requests = {
        rid: Request(rid, _node(state, lock), protected_pages, hit_pages, pick(ops), set(loads), poisoned, priority, whole_pages)
        for rid, lock, protected_pages, hit_pages, ops, loads, poisoned, priority, whole_pages in image["requests"]
    }
    state.batches = {
        batch_id: Batch(batch_id, pick(ops), dict(stores), dict(layers)) for batch_id, ops, stores, layers in image["batches"]
    }
    state.waiters = {row[0]: Waiter(*row) for row in image["waiters"]}
    state.waiting_for = {node_id: list(rids) for node_id, rids in image["waiting_for"]}
    state.parked = {rid: Parked(rid, RadixKey(*key), list(row), deadline_tick) for rid, key, row, deadline_tick in image["parked"]}
    state.pins = [Pin(_node(state, node_id), pages, expires_tick) for node_id, pages, expires_tick in image["pins"]]
    state.host_only_need = list(image["host_only_need"])
    counts = dict(image["counters"])
    for name in _COUNTED_BY_KEY:
        counts[name] = Counter(counts[name]) if counts[name] else Counter()
    vars(state.counters).update(counts)
    state.kv_events.clear()
    state.kv_events.extend(KVEvent(*event) for event in image["kv_events"])


def _new_record(state: CacheState, row: tuple[Any, ...]) -> Backup:
    node_id, lifecycle_state, values, pages, *_ = row
    record = Backup(node_id, len(state.config.payloads), bound=False, no_need=state.no_need)
    record.state = _STATES[lifecycle_state]
    _set_values(record, values)
    record.set_generation(record.generation)
    record.pages = list(pages)
    return record


def _new_load(state: CacheState, row: tuple[Any, ...]) -> Load:
    load_id, last, pages, tokens, number, producer, load_state, doomed, failed_here, done_here, queued_tick, readers = row
    return Load(
        load_id,
        _node(state, last),
        pages,
        tokens,
        number=number,
        producer=producer,
        state=LoadState(load_state),
        doomed=doomed,
        failed_here=failed_here,
        done_here=done_here,
        queued_tick=queued_tick,
        readers=set(readers),
    )


def _node(state: CacheState, node_id: int) -> Node[Backup]:
    node = state.tree.find(node_id)
    if node is None:
        raise AssertionError(f"image: expected node {node_id} in its tree, found none")
    return node
