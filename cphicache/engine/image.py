"""The engine's state as data: an image to go back to, and a canonical form for comparing states.

Both are taken between two calls of the cache: inside a call, work may be queued that is part of neither. What the local half and the
reducer hold (copies, host slots, a reduction that was issued) is theirs to save; so is what the caller remembers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from dataclasses import fields
from operator import attrgetter
from typing import Any, TypeAlias

from cphicache.engine.config import CacheConfig, WritePolicy
from cphicache.engine.counters import Counters
from cphicache.engine.records import Backup, Batch, Load, LoadState, Parked, Request, Waiter
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
    "retried_epoch",
    "kv_events_lost",
)
# A backup's fields are immutable values, lists of integers, its state, and links to nodes and other backups.
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
)
_LISTS = ("submitted", "confirmed", "pages")
_values_of: Callable[[Backup], tuple[Any, ...]] = attrgetter(*_VALUES)


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
                    tuple(tuple(getattr(record, name)) for name in _LISTS),
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
        )
        for request in state.requests.values()
    )
    image["batches"] = tuple((batch.batch_id, table.indices(batch.ops), tuple(batch.readers)) for batch in state.batches.values())
    image["waiters"] = tuple((waiter.rid, waiter.node_id, waiter.deadline_tick, waiter.woken) for waiter in state.waiters.values())
    image["waiting_for"] = tuple((node_id, tuple(rids)) for node_id, rids in state.waiting_for.items())
    image["parked"] = tuple(
        (parked.rid, _key_values(parked.key), tuple(parked.row), parked.deadline_tick) for parked in state.parked.values()
    )
    image["host_only_need"] = tuple(state.host_only_need)
    image["counters"] = {field.name: _dump_count(getattr(state.counters, field.name)) for field in fields(Counters)}
    image["kv_events"] = tuple(tuple(event) for event in state.kv_events)
    image["records"] = table.rows(state)  # last: everything above may have named one
    return image


def _config_values(config: CacheConfig) -> tuple[Any, ...]:
    values = (getattr(config, field.name) for field in fields(config))
    return tuple(str(value) if isinstance(value, str) else value for value in values)


def _dump_count(count: int | Counter[Any]) -> int | dict[Any, int]:
    if isinstance(count, int):
        return count
    return {str(key) if isinstance(key, str) else key: number for key, number in count.items()}


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
        rid: Request(rid, _node(state, lock), protected_pages, hit_pages, pick(ops), set(loads), poisoned)
        for rid, lock, protected_pages, hit_pages, ops, loads, poisoned in image["requests"]
    }
    state.batches = {batch_id: Batch(batch_id, pick(ops), list(readers)) for batch_id, ops, readers in image["batches"]}
    state.waiters = {row[0]: Waiter(*row) for row in image["waiters"]}
    state.waiting_for = {node_id: list(rids) for node_id, rids in image["waiting_for"]}
    state.parked = {rid: Parked(rid, RadixKey(*key), list(row), deadline_tick) for rid, key, row, deadline_tick in image["parked"]}
    state.host_only_need = list(image["host_only_need"])
    for name, count in image["counters"].items():
        setattr(state.counters, name, Counter(count) if isinstance(count, dict) else count)
    state.kv_events.clear()
    state.kv_events.extend(KVEvent(*event) for event in image["kv_events"])


def _new_record(state: CacheState, row: tuple[Any, ...]) -> Backup:
    node_id, lifecycle_state, values, lists, *_ = row
    record = Backup(node_id, len(state.config.payloads), bound=False, no_need=state.no_need)
    record.state = State(lifecycle_state)
    for name, value in zip(_VALUES, values, strict=True):
        setattr(record, name, value)
    for name, items in zip(_LISTS, lists, strict=True):
        setattr(record, name, list(items))
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


# -- canonical form ---------------------------------------------------------------------------------------------------------------
def canonical_state(state: CacheState) -> Hashable:
    """Equal for two states that behave alike from here on, whatever came before.

    What is kept is what a later decision, or this rank's next sample, can depend on. Names that the caller gave (requests, batches)
    and logical pages stay as they are, since the caller uses them again.
    """
    return _Canonical(state).form()


class _Canonical:
    """Absolute numbers become relative ones:

    * node ids: positions in the tree; extents without a node: their rank among the pending by reservation order. A new id is larger
      than all others and no decision compares ids (nodes of one access time, which tie by id, lie on one path and never compete);
    * numbers: by distance from ``resolved``. Numbered operations are exactly ``resolved <= number < next_number``, so the list of them
      in order says all; a number that has been agreed is never looked at again;
    * generations, orders, loads, producers: ranks among those alive. The next one is larger than all of them;
    * ticks: deadlines as ticks that are left (0 once they are over), ``tried_tick`` as "in this tick";
    * epochs: whether slots were freed since, which is all that is asked of them.

    Left out, because no decision reads them: counters and KV events (reports); ``clock`` (only the ranks of its values count, and the
    next value is the largest); ``refused_tick``, ``stored_tick``, ``queued_tick``, ``request`` of a backup, ``tokens`` of a load
    and ``confirmed`` (log and counters; ``done_here`` says that copies have ended); ``wasted_pages`` (``wasted_need`` is what is
    given back); ``retrying`` (written right before it is read, in the same call); ``heirs`` (the other end of ``parent``, in
    reservation order). The configuration is equal on both sides.
    """

    def __init__(self, state: CacheState) -> None:
        self._state = state
        self._positions = state.tree.positions()
        self._in_order = sorted(state.pending.values(), key=lambda record: record.order)
        self._orders = {record.node_id: rank for rank, record in enumerate(self._in_order)}
        self._generations = _ranks(record.generation for record in self._in_order)
        self._loads = _ranks(state.loads)
        self._producers = _ranks(load.producer for load in state.loads.values() if load.producer is not None)
        config = state.config
        self._hits_read = config.selective_hits if config.policy is WritePolicy.WRITE_THROUGH_SELECTIVE else 0
        self._awaited = {(node_id, rid) for node_id, rids in state.waiting_for.items() for rid in rids}

    def form(self) -> Hashable:
        state = self._state
        return (
            state.tree.canonical(self._node_form),
            state.alloc.canonical(),
            state.ledger.canonical(),
            tuple(state.host_only_need),
            tuple(self._extent_form(record) for record in self._in_order if record.node is None),
            tuple(
                ("load", self._loads[operation.load_id]) if isinstance(operation, Load) else self._name(operation)
                for operation in state.numbered.values()
            ),
            state.outstanding,
            tuple(self._load_form(load) for load in state.loads.values()),
            tuple(sorted(self._loads[load_id] for load_id in state.undoing)),
            # In the order of admission: so the poisoned are reported, and parked inserts are made.
            tuple(self._request_form(request) for request in state.requests.values()),
            tuple(
                (parked.rid, _key_values(parked.key), tuple(parked.row), self._ticks_left(parked.deadline_tick))
                for parked in state.parked.values()
            ),
            # Batches and waiters are only ever looked up by name.
            tuple(self._batch_form(batch) for _, batch in sorted(state.batches.items())),
            tuple(self._waiter_form(waiter) for _, waiter in sorted(state.waiters.items())),
            # In the order of refusal, in which they are tried again.
            tuple((self._name(record), record.refused_epoch < state.ledger.freed_epoch) for record in state.retries.values()),
            state.retried_epoch == state.ledger.freed_epoch,
        )

    def _name(self, record: Backup) -> Hashable:
        """A position in the tree, a rank among the pending, or None: it has ended without a node, or its node was removed."""
        if record.node is not None:
            alive = self._state.tree.find(record.node_id) is record.node
            return self._positions[record.node_id] if alive else None
        rank = self._orders.get(record.node_id)
        return None if rank is None else ("extent", rank)

    def _ticks_left(self, deadline_tick: int) -> int:
        return max(deadline_tick - self._state.tick, 0)

    def _node_form(self, node: Node[Backup]) -> Hashable:
        record = node.backup
        loading = None if node.loading is None else self._loads[node.loading]
        tried = record.tried_tick >= self._state.tick
        always = (str(record.state), min(record.hits, self._hits_read), record.retries, tried, loading)
        if record.node_id in self._orders:
            return (*always, self._operation_form(record))
        if record.state is State.COMMITTED:
            return (*always, record.owners, record.need)
        return always  # what a node without host copy or operation still holds is overwritten before it is read

    def _extent_form(self, record: Backup) -> Hashable:
        """A reservation without a node: where it lies in its request, too. It was tried once, and is not hit or tried again."""
        parent = (self._name(record.parent),) if record.parent is not None else ()
        hold = None if record.hold is None else (self._positions[record.hold[0].id], record.hold[1])
        return str(record.state), record.start_page, parent, hold, self._operation_form(record)

    def _operation_form(self, record: Backup) -> Hashable:
        number = None if record.number is None or record.agreed else record.number - self._state.resolved
        return (
            self._orders[record.node_id],
            self._generations[record.generation],
            number,
            record.agreed,
            tuple(record.submitted),
            record.done_here,
            record.failed_here,
            record.void,
            tuple(record.pages),
            record.owners,
            record.need,
            record.wasted_need,
        )

    def _load_form(self, load: Load) -> Hashable:
        return (
            self._positions[load.last.id],
            load.pages,
            None if load.producer is None else self._producers[load.producer],
            str(load.state),
            load.doomed,
            load.failed_here,
            load.done_here,
            tuple(sorted(load.readers)),
        )

    def _request_form(self, request: Request) -> Hashable:
        # Of the reservations that have ended, only the last one counts: the next may not follow it.
        ended = [op.end_page for op in request.ops[-1:] if self._name(op) is None]
        return (
            request.rid,
            self._positions[request.lock.id],
            request.protected_pages,
            request.hit_pages,
            self._alive(request.ops),
            tuple(ended),
            tuple(sorted(self._loads[load_id] for load_id in request.loads)),
            request.poisoned,
        )

    def _batch_form(self, batch: Batch) -> Hashable:
        return batch.batch_id, self._alive(batch.ops), tuple(sorted(set(batch.readers)))

    def _alive(self, records: Iterable[Backup]) -> tuple[Hashable, ...]:
        """Names of those that have not ended: an extent that has is passed over by everybody."""
        return tuple(name for record in records if (name := self._name(record)) is not None)

    def _waiter_form(self, waiter: Waiter) -> Hashable:
        return (
            waiter.rid,
            self._positions.get(waiter.node_id),
            self._ticks_left(waiter.deadline_tick),
            waiter.woken,
            (waiter.node_id, waiter.rid) in self._awaited,
        )


def _ranks(values: Iterable[int]) -> dict[int, int]:
    return {value: rank for rank, value in enumerate(sorted(set(values)))}
