"""``CpHiRadixCache``: the cache as a scheduler sees it. Logical decisions only; equal calls on every rank give equal answers.

A scheduler step is: :meth:`begin_tick`; aborts; for each request :meth:`prepare`, :meth:`load_back`, :meth:`admit`, :meth:`alloc`,
:meth:`reserve`; :meth:`start_loads`; the forward with :meth:`layer_stored` / :meth:`end_payload` / :meth:`end_forward`; then
:meth:`insert_unfinished`, :meth:`finish` and :meth:`end_request` in batch order.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import asdict
from itertools import takewhile
from typing import Any

from cphicache.agree.port import Reducer
from cphicache.alloc import AllocatorPort
from cphicache.engine.agreement import Agreement
from cphicache.engine.backups import Backups
from cphicache.engine.canonical import ANYTHING, Outlook, PageName, canonical_state
from cphicache.engine.config import CacheConfig
from cphicache.engine.counters import Counters
from cphicache.engine.digest import StateDigest, digest_state
from cphicache.engine.eviction import DeviceEviction, EvictResult
from cphicache.engine.forwards import Forwards
from cphicache.engine.holds import Holds
from cphicache.engine.host_eviction import HostEviction
from cphicache.engine.image import Image, dump_state, load_state
from cphicache.engine.inserts import Inserts
from cphicache.engine.loadback import LoadBacks
from cphicache.engine.matching import blocks_split, cut_before_last, match, match_of
from cphicache.engine.oplog import KeyedNames, KeyNames, OpLog
from cphicache.engine.records import Backup, Batch, LoadAnswer, Match, Request, TickReport
from cphicache.engine.requests import Requests
from cphicache.engine.state import CacheState, KVEvent, KVListener
from cphicache.engine.waiting import Waiting
from cphicache.events import EventLog, Level
from cphicache.events.types import DEVICE
from cphicache.lifecycle import Input
from cphicache.lifecycle.names import COMMITTED, DEVICE_EVICT, LAYERS_IN_FLIGHT, RESERVED, RESET
from cphicache.spaces.types import LogicalPage
from cphicache.transfer.port import CopyStatus, OpKey, TransferPort
from cphicache.tree import Node, RadixKey

HASH_SECRET = b"cphicache"
"""Default key of the page hashes in logs of level ``ops``."""


class CacheMisuse(ValueError):
    """The caller broke the order of calls; nothing was changed."""


class CpHiRadixCache:
    """Radix cache over logical device pages with an agreed, layer-by-layer host backup of every node.

    A ``log`` of level ``ops`` gets every call that can change the state, with keys as hashes under ``hash_secret``, or as
    ``names`` has them.
    """

    def __init__(
        self,
        config: CacheConfig,
        transfer: TransferPort,
        reducer: Reducer,
        log: EventLog | None = None,
        *,
        hash_secret: bytes = HASH_SECRET,
        names: KeyNames | None = None,
        allocator: AllocatorPort | None = None,
    ) -> None:
        """``allocator``: who owns the device pages; None: an allocator of the engine's own."""
        if log is not None and log.level is Level.OFF:
            log = None  # off costs one `if`
        self.config = config
        self.state = CacheState(config, allocator)
        self._transfer = transfer
        self._log = log
        self._device_seen = (0, 0)
        self._ops: OpLog | None = None
        if log is not None and log.level >= Level.OPS:
            self._ops = OpLog(log, self.state, KeyedNames(hash_secret) if names is None else names)
        self._host_eviction = HostEviction(self.state)
        holds = Holds(self.state, self._host_eviction)
        self._backups = Backups(self.state, transfer, log, self._host_eviction, holds)
        self._device_eviction = DeviceEviction(self.state, self._backups, self._drain_round, log)
        self._loads = LoadBacks(self.state, self._backups, self._device_eviction, transfer, log)
        self._agreement = Agreement(self.state, self._backups, self._loads, transfer, reducer, log, self._ops)
        inserts = Inserts(self.state, self._backups, holds, self._host_eviction.refresh)
        self._waiting = Waiting(self.state, self._backups, log)
        self._forwards = Forwards(self.state, self._backups, transfer, log)
        self._inserts = inserts
        self._requests = Requests(
            self.state,
            backups=self._backups,
            loads=self._loads,
            inserts=inserts,
            waiting=self._waiting,
            host_eviction=self._host_eviction,
            log=log,
            ops=self._ops,
        )
        if log is not None:
            log.name_payloads(config.payload_names)
            log.note(
                0,
                "cache",
                page_size=config.page_size,
                cp_size=config.cp_size,
                payloads=dict(config.payloads),
                host_slots=config.host_slots,
                policy=config.policy.value,
            )
        if self._ops is not None:
            self._ops.note("engine", config=asdict(config))

    # -- sizes ----------------------------------------------------------------------------------------------------------------
    @property
    def counters(self) -> Counters:
        """Totals so far, see :class:`~cphicache.engine.counters.Counters`."""
        return self.state.counters

    def available_size(self) -> int:
        """Free device tokens: cp_size times the smallest lane."""
        return self.state.alloc.available_size()

    def evictable_size(self) -> int:
        """Device tokens of unlocked nodes."""
        return self.state.tree.evictable_tokens

    def protected_size(self) -> int:
        """Device tokens of locked nodes."""
        return self.state.tree.protected_tokens

    def key(self, tokens: Sequence[int], extra_key: str | None = None) -> RadixKey:
        """The key of ``tokens``, cut to whole pages."""
        return RadixKey.of(tokens, self.config.page_size, extra_key)

    # -- the tick -------------------------------------------------------------------------------------------------------------
    def begin_tick(self, *, idle: bool = False) -> TickReport:
        """Apply the last reduction, issue the next, then parked inserts, deferred requests and retries, in this order.

        ``idle``: nothing has been computed since the last tick, which then counts little for ``max_deferral_ticks``: only every
        :data:`~cphicache.engine.waiting.IDLE_TICKS`-th such tick counts, since they pass in a fraction of a forward's time.

        Raises :class:`~cphicache.agree.port.GroupBroken` when a rank is lost and its part of the KV with it, with the host tier
        quarantined already (R22). Where the KV is replicated the tick goes on instead.
        """
        state = self.state
        state.tick += 1
        if self._ops is not None:
            given: dict[str, Any] = {"idle": True} if idle else {}
            self._ops.call("begin_tick", **given)
        if idle:
            self._waiting.idle_tick()
        self._agreement.apply_outstanding()
        self._loads.undo_drained()
        self._agreement.issue()
        self._waiting.unpin()
        inserted, dropped = self._requests.insert_parked()
        self._waiting.retry()
        if self._log is not None:
            self._observe_device(self._log)
        poisoned = [request.rid for request in state.requests.values() if request.poisoned]
        return TickReport(state.tick, poisoned, inserted, dropped)

    def is_at_rest(self) -> bool:
        """Whether a tick would change nothing but its own number: nothing is in flight, nobody runs or waits, nothing is to be tried again.

        Equal on every rank. Whoever takes no tick meanwhile leaves no event in the log either.
        """
        state = self.state
        busy = state.numbered or state.undoing or state.batches  # what is pending has a number, or its forward or request goes on
        waiting = state.requests or state.waiters or state.pins
        return not (busy or waiting or state.is_retry_due())

    def _observe_device(self, log: EventLog) -> None:
        used = self.config.usable_pages * self.config.page_size - self.available_size()
        if (used, self.evictable_size()) != self._device_seen:
            self._device_seen = used, self.evictable_size()
            log.note(self.state.tick, DEVICE, local=True, in_use=used, evictable=self.evictable_size())

    def completion(self, key: OpKey, status: CopyStatus) -> None:
        """Hand a local completion in ahead of the tick's sample; one for an older generation is counted and ignored (R18)."""
        if self._ops is not None:
            self._ops.call(
                "completion", local=True, node=key.node, generation=key.generation, drained=status.drained, failed=status.failed
            )
        self._agreement.completion(key, status)

    # -- matching and admission -----------------------------------------------------------------------------------------------
    def match_prefix(self, key: RadixKey) -> Match:
        """What of ``key`` is on the device and on the host. Changes nothing (R24)."""
        return match(self.state, key)

    def is_waiting(self, rid: str) -> bool:
        """Whether a deferred request is still to be passed over (no need to ask :meth:`prepare`)."""
        return self._waiting.is_waiting(rid)

    def prepare(self, rid: str, key: RadixKey, full_key: RadixKey | None = None) -> Match | None:
        """Match ``key`` for admission. ``None``: deferred, ask again when :meth:`is_waiting` says so (R17).

        ``full_key``: what the request will insert, if ``key`` is shorter than that. Past ``max_deferral_ticks`` the match is cut back
        to the start of the pending node instead.
        """
        if self._ops is not None:
            whole: dict[str, Any] = {} if full_key is None else {"full": self._ops.key(full_key)}
            self._ops.call("prepare", request=rid, **self._ops.key(key), **whole)
        tree = self.state.tree
        walk = tree.walk(key)
        whole_key = key if full_key is None else full_key
        blocker = blocks_split(walk if full_key is None else tree.walk(full_key), whole_key)
        if blocker is not None:
            deadline = self._waiting.deadline(rid, blocker)
            if self.state.tick < deadline:
                self._defer(rid, blocker, deadline)
                return None
            self.state.counters.deferrals_expired += 1
            if walk.partial_pages and walk.path[-1] is blocker:
                walk = cut_before_last(walk, tree.root)
        found = match_of(self.state, walk)
        if self._ops is not None:
            self._ops.note(
                "match", request=rid, keys=self._ops.pages(key), device=len(found.device_pages), host=found.host_hit_tokens
            )
        return found

    def _defer(self, rid: str, blocker: Node[Backup], deadline: int) -> None:
        if rid not in self.state.waiters:
            self.state.counters.deferred_splits += 1
        self._waiting.wait_for(rid, blocker, deadline, "match")

    def load_back(self, rid: str, found: Match, extend_tokens: int) -> LoadAnswer:
        """Queue the load-back that ``found`` promises: all of it, or a refusal, which means recompute (R25).

        ``extend_tokens``: tokens of the request beyond the device prefix.
        """
        if self._ops is not None:
            self._ops.call(
                "load_back",
                request=rid,
                device_node=found.device_node.id,
                nodes=[node.id for node in found.host_nodes],
                tail=found.host_tail_pages,
                tokens=found.host_hit_tokens,
                extend=extend_tokens,
            )
        return self._loads.queue(rid, found, extend_tokens)

    def admit(self, rid: str, node: Node[Backup], protected_pages: int, *, priority: int = 0) -> None:
        """The request starts: lock its prefix, which ends in ``node`` and gives the first ``protected_pages`` pages of its row.

        ``priority``: of its KV, under the eviction policy of that name (lower ones go first).
        """
        if rid in self.state.requests:
            raise CacheMisuse(f"request {rid!r} is running already: end it before it is admitted again")
        if self._ops is not None:
            given: dict[str, Any] = {"priority": priority} if priority else {}
            self._ops.call("admit", request=rid, node=node.id, pages=protected_pages, **given)
        self._requests.admit(rid, node, protected_pages, priority)

    def touch(self, node: Node[Backup]) -> None:
        """The prefix that ends in ``node`` is asked for, whether or not its request is admitted now: it counts as used.

        A match changes nothing (R24): a request that is matched again and again, until there is room for it, would lose its prefix to
        whoever is served meanwhile.
        """
        if self._ops is not None:
            self._ops.call("touch", node=node.id)
        if node.parent is None and not node.is_root:
            raise CacheMisuse(f"touch of {node}, which was removed: match again")
        self._requests.touch(node)

    def alloc(self, pages: int, after: LogicalPage | None) -> list[LogicalPage] | None:
        """Fresh device pages that continue a chain after page ``after``, evicting if needed. ``None``: not enough, nothing taken."""
        if self._ops is not None:
            self._ops.call("alloc", count=pages, after=after)
        found = self.state.alloc.alloc(pages, after)
        if found is None:
            self._device_eviction.evict_for_lanes(lambda: self.state.alloc.lane_shortage(pages, after))
            found = self.state.alloc.alloc(pages, after)
        return found

    def pin_host(self, key: RadixKey, ticks: int) -> int:
        """Keep the host copy of ``key``'s prefix from eviction for so many ticks: of the nodes that are committed and matched whole.

        Returns the tokens pinned. A pin ends by itself; pins of one prefix add up to the latest end.
        """
        if ticks < 1:
            raise CacheMisuse(f"pin for {ticks} ticks: give at least 1")
        if self._ops is not None:
            self._ops.call("pin_host", **self._ops.key(key), ticks=ticks)
        walk = self.state.tree.walk(key)
        whole = walk.path[:-1] if walk.partial_pages else walk.path
        committed = list(takewhile(lambda node: node.backup.state is COMMITTED, whole))
        return self._waiting.pin(committed, ticks)

    def evict(self, tokens: int) -> EvictResult:
        """Free ``tokens`` device tokens, or as many as there are."""
        if self._ops is not None:
            self._ops.call("evict", tokens=tokens)
        return self._device_eviction.evict_tokens(tokens)

    # -- reservation before the forward (R12) -----------------------------------------------------------------------------------
    def batch(self, batch_id: int) -> Batch:
        """The batch of that id, begun by the first call."""
        if self._ops is not None:
            self._ops.call("batch", batch=batch_id)
        return self._forwards.batch(batch_id)

    def stores(self, rid: str, batch_id: int, start_token: int) -> None:
        """The batch's forward stores (and reads) KV of a running request, from token ``start_token`` on."""
        request = self._running(rid)
        if self._ops is not None:
            self._ops.call("stores", request=rid, batch=batch_id, start=start_token)
        self._forwards.stores(request, batch_id, start_token // self.config.page_size)

    def reserve(self, rid: str, batch_id: int, key: RadixKey, row: Sequence[LogicalPage]) -> bool:
        """Reserve the request's new extent: ``key`` is its whole-page prefix at the end of this chunk, ``row`` its pages.

        True if host slots were reserved, or if there is nothing to reserve. Under the other policies nothing is reserved here.
        """
        request = self._running(rid)
        if self._ops is not None:
            self._ops.call("reserve", request=rid, batch=batch_id, **self._ops.key(key), row=list(row))
        return self._forwards.reserve(request, batch_id, key, row)

    # -- the forward ------------------------------------------------------------------------------------------------------------
    def start_loads(self) -> int:
        """The batch is ready: start its load-backs. Returns the producer, -1 if nothing was queued."""
        if self._ops is not None:
            self._ops.call("start_loads")
        return self._loads.start()

    def before_store(self, pages: Sequence[LogicalPage]) -> None:
        """The forward is about to write these pages."""
        self._transfer.before_store(pages)

    def wait_layer(self, batch_id: int, payload: str, layer: int) -> None:
        """Make the forward wait for the load-backs that the batch's requests read."""
        self._forwards.wait_layer(batch_id, payload, layer)

    def layer_stored(self, batch_id: int, payload: int, layer: int) -> None:
        """The forward of a batch has issued one layer's KV store: submit its copies."""
        batch = self.state.batches.get(batch_id)
        if batch is None:
            return
        if self._ops is not None:
            self._ops.call("layer_stored", batch=batch_id, payload=payload, layer=layer)
        self._forwards.layer_stored(batch, payload, layer)

    def end_payload(self, batch_id: int, payload: int) -> None:
        """The forward that stores a payload has ended: submit the layers that were not reported (R11)."""
        batch = self.state.batches.get(batch_id)
        if batch is None:
            return
        if self._ops is not None:
            self._ops.call("end_payload", batch=batch_id, payload=payload)
        self._forwards.end_payload(batch, payload)

    def end_forward(self, batch_id: int) -> None:
        """All forwards of a batch have ended: number its backups in reservation order; those without draft KV roll back.

        Where a payload's forward did not come (no :meth:`end_payload`), what the batch stored is kept out of the tree (R5, R11).
        """
        batch = self.state.batches.get(batch_id)
        if batch is None:
            return
        if self._ops is not None:
            self._ops.call("end_forward", batch=batch_id)
        self._forwards.end(batch)

    # -- results ----------------------------------------------------------------------------------------------------------------
    def insert_unfinished(self, rid: str, key: RadixKey, row: Sequence[LogicalPage], *, chunked: bool) -> list[LogicalPage] | None:
        """Insert what a running request has stored; returns the tree's pages for it, or ``None``: declined, it keeps its own.

        ``chunked``: more chunks of its prompt follow (no hit is counted).
        """
        request = self._storing(rid, key)
        if self._ops is not None:
            self._ops.call("insert_unfinished", request=rid, **self._ops.key(key), row=list(row), chunked=chunked)
        return self._requests.insert_unfinished(request, key, row, chunked=chunked)

    def agree_now(self) -> None:
        """Pass what has ended on every rank now, instead of at the next tick: by the reduction that this tick has issued, or, later in
        the tick, by a blocking one, if anything is in flight. For a rank that is alone, which has nobody to wait for.

        No copy is waited for.
        """
        if self._ops is not None:
            self._ops.call("agree_now")
        self._agreement.agree_now()

    def is_declined(self, key: RadixKey) -> bool:
        """Whether an insert of ``key`` would be declined now. Changes nothing: whoever was declined asks before trying again."""
        return self._inserts.is_declined(key)

    def confirm_loads(self, rid: str) -> bool:
        """Whether what the request has read of load-backs is right, if it is about to end before that is agreed (R25).

        Waits for those copies, which its forward has waited for too, and settles their failures with one blocking reduction or more
        (one each that has failed); costs nothing when no load-back of the request is in flight.
        """
        request = self._running(rid)
        if request.loads:
            if self._ops is not None:
                self._ops.call("confirm_loads", request=rid)
            self._agreement.settle_failures([self.state.loads[load_id] for load_id in sorted(request.loads)])
        return not request.poisoned

    def finish(self, rid: str, key: RadixKey, row: Sequence[LogicalPage]) -> bool:
        """The request has ended: insert its KV, free what is left of its row. False: the insert is parked until it can be made."""
        request = self._storing(rid, key)
        if self._ops is not None:
            self._ops.call("finish", request=rid, **self._ops.key(key), row=list(row))
        return self._requests.finish(request, key, row)

    def end_request(self, rid: str, row: Sequence[LogicalPage], reason: str) -> None:
        """Abort or retract: its reservations roll back, its own pages are freed, nothing is inserted. A parked insert is dropped.

        A request that was never admitted only stops waiting.
        """
        if self._ops is not None:
            self._ops.call("end_request", request=rid, row=list(row), reason=reason)
        self._requests.end(rid, row, reason)

    def free(self, pages: Sequence[LogicalPage]) -> None:
        """Give back pages that a request allocated and did not put into its row."""
        if self._ops is not None:
            self._ops.call("free", pages=list(pages))
        self.state.alloc.free(list(pages))

    def listen(self, listener: KVListener | None) -> None:
        """Call ``listener`` at each KV event, instead of waiting for :meth:`take_events` to be asked; ``None``: do not."""
        self.state.kv_listener = listener

    def take_events(self) -> list[KVEvent]:
        """KV events by medium since the last call."""
        events = list(self.state.kv_events)
        self.state.kv_events.clear()
        return events

    # -- reset --------------------------------------------------------------------------------------------------------------------
    def reset_backups(self) -> None:
        """Roll back everything pending and drain it (R18). Legal at any time; nodes and requests stay."""
        if self._ops is not None:
            self._ops.call("reset_backups")
        self._reset_backups()

    def _reset_backups(self) -> None:
        self._agreement.apply_outstanding()
        for record in sorted(self.state.pending.values(), key=lambda record: record.order):
            self._backups.fire(record, RESET, Input(reason="reset"))
        self._agreement.drain()
        self._loads.undo_drained()

    def flush(self) -> None:
        """Forget the whole cache. No request may be running; parked inserts are dropped."""
        state = self.state
        running = [rid for rid in state.requests if rid not in state.parked]
        if running:
            raise CacheMisuse(f"flush with {len(running)} requests running ({running[0]!r}, ...): end them first")
        if self._ops is not None:
            self._ops.call("flush")
        for rid in list(state.parked):
            self._requests.drop_parked(rid, "flush")
        self._waiting.unpin(everything=True)
        self._reset_backups()
        for node in reversed(list(state.tree.nodes())):
            if node.backup.state is COMMITTED:
                self._backups.fire(node.backup, RESET, Input(reason="flush"))
            if node.pages is not None:
                self._backups.fire(node.backup, DEVICE_EVICT, Input(reason="flush"))
            else:
                state.tree.remove(node)

    def shutdown(self) -> None:
        """End: drop parked inserts, roll back what is pending, drain. Nodes stay as they are for inspection."""
        if self._ops is not None:
            self._ops.call("shutdown")
        for rid in list(self.state.parked):
            self._requests.drop_parked(rid, "shutdown")
        self._reset_backups()

    def quarantine(self, reason: str) -> None:
        """Give the host tier up, as is done when the group breaks: everything pending rolls back and is drained on this rank alone, and
        from now on nothing is reserved or loaded back (refused as ``quarantined``). Legal between any two calls; idempotent."""
        if self._ops is not None:
            self._ops.call("quarantine", local=True, reason=reason)
        self._agreement.quarantine(reason)

    @property
    def quarantined(self) -> str | None:
        """Why the host tier takes nothing any more; ``None`` while it is well."""
        return self.state.quarantined

    # -- state as data ------------------------------------------------------------------------------------------------------------
    def snapshot(self) -> Image:
        """The logical half as plain data that shares nothing with it. The local half and the reducer are the caller's to save."""
        return dump_state(self.state)

    def restore(self, image: Image) -> None:
        """Become the engine that :meth:`snapshot` was asked of, under an equal configuration (else ValueError, nothing changed).

        From there on equal calls give equal answers. Matches and nodes that the caller still holds are void.
        """
        load_state(self.state, image)
        if self._ops is not None:
            self._ops.call("restore", local=True)
        self._backups.forget_queued()
        self._host_eviction.refile()

    def canonical(
        self,
        *,
        local: bool = True,
        page_name: PageName | None = None,
        outstanding: bool = True,
        outlook: Outlook = ANYTHING,
    ) -> Hashable:
        """Equal for two engines of one configuration that behave alike from here on, given equal local halves and reducers.

        With ``local=False``, what all ranks share: equal after equal calls, however their copies fare. ``page_name``,
        ``outstanding`` and ``outlook``: see :func:`~cphicache.engine.canonical.canonical_state`.
        """
        return canonical_state(self.state, local=local, page_name=page_name, outstanding=outstanding, outlook=outlook)

    def digest(self) -> StateDigest:
        """Digests by part of what is equal on every rank between two calls."""
        return digest_state(self.state)

    # -- inner parts --------------------------------------------------------------------------------------------------------------
    def _drain_round(self) -> None:
        self._agreement.drain_round()

    def _running(self, rid: str) -> Request:
        request = self.state.requests.get(rid)
        if request is None:
            raise CacheMisuse(f"request {rid!r} is not running: admit it first")
        return request

    def _storing(self, rid: str, key: RadixKey) -> Request:
        """A running request whose reservations all lie within ``key``: one that reaches beyond it belongs to a later insert."""
        request = self._running(rid)
        for op in request.ops:
            if op.state in (RESERVED, LAYERS_IN_FLIGHT) and op.end_page > key.pages:
                raise CacheMisuse(
                    f"insert of {key.pages} pages of request {rid!r}, for which pages up to {op.end_page} are reserved: insert a chunk "
                    "before the next one is reserved, or both together"
                )
        return request
