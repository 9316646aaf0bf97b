"""The engine's state in canonical form, for comparing states: what a later decision can depend on, in relative numbers.

Taken between two calls of the cache, as an image is: inside a call, work may be queued that is part of neither.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from cphicache.engine.config import WritePolicy
from cphicache.engine.records import Backup, Batch, Load, Request, Waiter
from cphicache.engine.state import CacheState
from cphicache.lifecycle import State
from cphicache.spaces.types import LogicalPage
from cphicache.tree import Node

PageName: TypeAlias = Callable[[LogicalPage], Hashable]
"""What stands in a form for a page."""


@dataclass(frozen=True, slots=True)
class Outlook:
    """What the caller knows of the calls that may still come. The less may come, the more states behave alike from here on.

    ``reserving``: running requests for which :meth:`~cphicache.engine.cache.CpHiRadixCache.reserve` may be called again (None: any).
    ``draft_may_lack``: a forward may end without one of its payloads while its requests run on. ``hits``: an insert may come before the
    next tick, or an eviction that backs up what it takes.
    """

    reserving: Container[str] | None = None
    draft_may_lack: bool = True
    hits: bool = True


ANYTHING = Outlook()
"""Nothing is known."""


def canonical_state(
    state: CacheState,
    *,
    local: bool,
    page_name: PageName | None,
    outstanding: bool,
    outlook: Outlook,
) -> Hashable:
    """Equal for two states that behave alike from here on, whatever came before.

    What is kept is what a later decision, or this rank's next sample, can depend on. Names that the caller gave (requests, batches)
    and logical pages stay as they are, since the caller uses them again. With ``local=False`` what only the sample depends on
    (``done_here``, ``failed_here``, ``void``) is left out too: the rest is equal on all ranks after equal calls (R20).

    ``page_name`` names pages in the order in which it is asked (always the same for a form). Nothing depends on a page's number but its
    owner, so names that keep the owner and count pages from there make states equal that differ by a renumbering. Of the free
    pages only how many there are of each owner is kept then.

    With ``outstanding=False`` it is left out whether a reduction is outstanding: for a caller who looks at what that reduction says,
    which may be nothing. ``outlook``: what is known of the calls to come.
    """
    return _Canonical(state, local=local, page_name=page_name, outstanding=outstanding, outlook=outlook).form()


class _Canonical:
    """Absolute numbers become relative ones:

    * node ids: positions in the tree; extents without a node: their rank among the pending by reservation order. A new id is larger
      than all others and no decision compares ids (nodes of one access time, which tie by id, lie on one path and never compete);
    * numbers: by distance from ``resolved``. Numbered operations are exactly ``resolved <= number < next_number``, so the list of them
      in order says all; a number that has been agreed is never looked at again;
    * generations, orders, loads, producers: ranks among those alive. The next one is larger than all of them;
    * ticks: deadlines as ticks that are left (0 once they are over), ``tried_tick`` as "in this tick";
    * requests: by name, and in order as far as they may be poisoned;
    * epochs: whether slots were freed since, which is all that is asked of them; when the last round of retries was, only if one is due.

    Left out, because no decision reads them: counters and KV events (reports); ``clock`` (only the order of its values counts, and the
    next value is the largest); ``refused_tick``, ``stored_tick``, ``queued_tick``, ``request`` of a backup, ``tokens`` of a load
    and ``confirmed`` (log and counters; ``done_here`` says that copies have ended); ``wasted_pages`` (``wasted_need`` is what is
    given back); ``retrying`` (written right before it is read, in the same call); ``heirs`` (the other end of ``parent``, in
    reservation order); ``bound`` (true exactly when there is a node). The configuration is equal on both sides.
    """

    def __init__(self, state: CacheState, *, local: bool, page_name: PageName | None, outstanding: bool, outlook: Outlook) -> None:
        self._state = state
        self._outlook = outlook
        self._outstanding = outstanding
        self._local = local
        self._page_name = page_name
        self._ordered = state.tree.key_order()
        self._positions = {node.id: position for position, node in enumerate(self._ordered)}
        self._in_order = sorted(state.pending.values(), key=lambda record: record.order)
        self._orders = {record.node_id: rank for rank, record in enumerate(self._in_order)}
        self._generations = _ranks(record.generation for record in self._in_order)
        self._loads = _ranks(state.loads)
        self._producers = _ranks(load.producer for load in state.loads.values() if load.producer is not None)
        config = state.config
        self._hits_read = config.selective_hits if config.policy is WritePolicy.WRITE_THROUGH_SELECTIVE else 0
        self._awaited: dict[str, list[int]] = {}
        for node_id, rids in state.waiting_for.items():
            for rid in rids:
                if node_id in self._positions:
                    self._awaited.setdefault(rid, []).append(self._positions[node_id])

    def form(self) -> Hashable:
        state, epoch = self._state, self._state.ledger.freed_epoch
        return (
            state.tree.canonical(self._node_form, self._page_name, ordered=self._ordered),
            state.alloc.canonical() if self._page_name is None else state.alloc.lane_free(),
            state.ledger.canonical(),
            tuple(state.host_only_need),
            tuple(self._extent_form(record) for record in self._in_order if record.node is None),
            tuple(
                ("load", self._loads[operation.load_id]) if isinstance(operation, Load) else self._name(operation)
                for operation in state.numbered.values()
            ),
            state.outstanding and self._outstanding,
            state.quarantined is not None,
            tuple(self._load_form(load) for load in state.loads.values()),
            tuple(sorted(self._loads[load_id] for load_id in state.undoing)),
            # The poisoned are reported in the order of admission; who reads no load-back then, never will.
            tuple(request.rid for request in state.requests.values() if request.loads or request.poisoned),
            tuple(self._request_form(request) for _, request in sorted(state.requests.items())),
            # In the order in which they were parked: so they are inserted.
            tuple(
                (parked.rid, parked.key, self._pages(parked.row), self._ticks_left(parked.deadline_tick))
                for parked in state.parked.values()
            ),
            # Each ends by itself: their order does not matter.
            tuple(sorted((self._positions[pin.node.id], pin.pages, self._ticks_left(pin.expires_tick)) for pin in state.pins)),
            # Batches and waiters are only ever looked up by name.
            tuple(self._batch_form(batch) for _, batch in sorted(state.batches.items())),
            tuple(self._waiter_form(waiter) for _, waiter in sorted(state.waiters.items())),
            # In the order of refusal, in which they are tried again.
            tuple((self._name(record), record.refused_epoch < epoch) for record in state.retries.values()),
            state.is_retry_due(),
        )

    def _name(self, record: Backup) -> Hashable:
        """A position in the tree, a rank among the pending, or None: it has ended without a node, or its node was removed."""
        if record.node is not None:
            alive = self._state.tree.find(record.node_id) is record.node
            return self._positions[record.node_id] if alive else None
        rank = self._orders.get(record.node_id)
        return None if rank is None else ("extent", rank)

    def _pages(self, pages: Sequence[LogicalPage]) -> tuple[Hashable, ...]:
        return tuple(pages if self._page_name is None else map(self._page_name, pages))

    def _ticks_left(self, deadline_tick: int) -> int:
        return max(deadline_tick - self._state.tick, 0)

    def _node_form(self, node: Node[Backup]) -> Hashable:
        record = node.backup
        loading = None if node.loading is None else self._loads[node.loading]
        tried = self._outlook.hits and record.tried_tick >= self._state.tick
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
            record.submitted,
            (record.done_here, record.failed_here, record.void) if self._local else (),
            self._pages(record.pages),
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
            (load.failed_here, load.done_here) if self._local else (),
            tuple(sorted(load.readers)),
        )

    def _request_form(self, request: Request) -> Hashable:
        # Of the reservations that have ended, only the last one counts: the next may not follow it.
        reserving = self._outlook.reserving
        may_reserve = reserving is None or request.rid in reserving
        ended = [op.end_page for op in request.ops[-1:] if may_reserve and self._name(op) is None]
        return (
            request.rid,
            self._positions[request.lock.id],
            request.protected_pages,
            request.hit_pages,
            self._alive(request.ops),
            tuple(ended),
            tuple(sorted(self._loads[load_id] for load_id in request.loads)),
            request.poisoned,
            request.priority,
            request.whole_pages,
        )

    def _batch_form(self, batch: Batch) -> Hashable:
        return (
            batch.batch_id,
            self._alive(batch.ops),
            tuple(sorted(batch.stores.items() if self._outlook.draft_may_lack else batch.stores)),
            tuple(sorted(batch.stored_layers.items())),
        )

    def _alive(self, records: Iterable[Backup]) -> tuple[Hashable, ...]:
        """Names of those that have not ended: an extent that has is passed over by everybody."""
        return tuple(name for record in records if (name := self._name(record)) is not None)

    def _waiter_form(self, waiter: Waiter) -> Hashable:
        return (
            waiter.rid,
            self._positions.get(waiter.node_id),
            self._ticks_left(waiter.deadline_tick),
            waiter.woken,
            tuple(sorted(self._awaited.get(waiter.rid, ()))),
        )


def _ranks(values: Iterable[int]) -> dict[int, int]:
    return {value: rank for rank, value in enumerate(sorted(set(values)))}
