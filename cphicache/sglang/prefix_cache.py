"""SGLang's ``BasePrefixCache`` over :class:`~cphicache.engine.CpHiRadixCache`: all of it that is the same in every version.

The engine's nodes are passed to SGLang as opaque handles. What SGLang calls a request's match and its end, and what it expects as
answers, changed between versions: that is in one module a contract, ``contract_0520.py`` and ``contract_0523.py``.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache, DecLockRefResult, EvictResult, IncLockRefResult

from cphicache.agree.port import GroupBroken
from cphicache.engine import CpHiRadixCache, LoadAnswer, Match
from cphicache.sglang.kv_events import ServerEvents
from cphicache.sglang.metrics import HostTokens
from cphicache.sglang.refusal import say
from cphicache.sglang.requests import ServerRequests
from cphicache.spaces.types import LogicalPage
from cphicache.transfer.port import TransferPort
from cphicache.tree import RadixKey

LOAD_FAILED = "cphicache: the load-back of this request's prefix has failed; send it again"


@contextmanager
def _telling() -> Iterator[None]:
    """Say on stderr that a rank is lost, which ends the server; SGLang's own text is a stack trace."""
    try:
        yield
    except GroupBroken as broken:
        say(str(broken))
        raise


class CphicachePrefixCache(BasePrefixCache):
    """The tree cache of one scheduler process. ``pools``: SGLang's device pools by payload. ``alone``: no other
    rank decides with this one. ``on_tick``: hears of each tick.
    ``close``: gives everything back.

    A draft model's KV of a token depends on the token that follows it: with a draft, keys are of bigrams, so that KV which is found by
    a key is right for both models.

    A contract's class adds what SGLang calls under names of its own, in terms of :meth:`match`, :meth:`load_back`, :meth:`insert` and
    :meth:`end`, and the three abstract methods below.
    """

    is_cphicache = True
    """How the hooks tell this cache from every other, without importing it."""

    def __init__(
        self,
        params: Any,
        engine: CpHiRadixCache,
        transfer: TransferPort,
        *,
        pools: Mapping[str, Any],
        alone: bool,
        on_tick: Callable[[int], None],
        close: Callable[[], None],
    ) -> None:
        self.disable = False
        self.req_to_token_pool = params.req_to_token_pool
        self.token_to_kv_pool_allocator = params.token_to_kv_pool_allocator
        self.page_size: int = params.page_size
        self.device = params.token_to_kv_pool_allocator.device
        self.enable_storage = False
        self.engine = engine
        self._transfer = transfer
        self._pools = list(pools.values())
        self._drafts = len(pools) > 1
        self._alone = alone
        self._on_tick = on_tick
        self._close = close
        self._closed = False
        self._requests = ServerRequests(self._make_key, self.req_to_token_pool, self.page_size, self.device)
        self._next_batch = 1
        self._prepared: tuple[Any, int] | None = None
        self._forward: int | None = None
        self._last_match: tuple[Any, RadixKey] | None = None
        self._declined: dict[str, tuple[Any, int, RadixKey]] = {}
        """Running requests whose prompt is computed and not inserted yet, by name: request, tokens, key."""
        self.preempted: list[Any] = []
        """Whom SGLang has preempted in this round; for the hooks."""
        self._computed = False  # whether a forward was started since the last tick
        self._rests = False  # whether the last tick was an idle one
        self._events = ServerEvents(self.page_size) if params.enable_kv_cache_events else None
        if self._events is not None:
            engine.listen(self._events.hear)
        if params.enable_metrics:
            self.init_metrics_collector()

    # -- sizes ----------------------------------------------------------------------------------------------------------------
    def evictable_size(self) -> int:
        """Device tokens of unlocked nodes."""
        return self.engine.evictable_size()

    def protected_size(self) -> int:
        """Device tokens of locked nodes, and of finished requests whose insert is parked."""
        state = self.engine.state
        parked = sum(len(parked.row) - state.requests[rid].protected_pages for rid, parked in state.parked.items())
        return self.engine.protected_size() + parked * self.page_size

    def total_size(self) -> int:
        """Device tokens in the tree."""
        return self.engine.evictable_size() + self.engine.protected_size()

    @property
    def token_to_kv_pool_host(self) -> HostTokens:
        """What SGLang's own metrics read of the host pool."""
        return HostTokens(self.engine)

    @property
    def root_node(self) -> Any:
        """The root, for policies that walk the tree."""
        return self.engine.state.tree.root

    @property
    def ongoing_write_through(self) -> list[Any]:
        """Backups that have not ended, and parked inserts: while there are any, the scheduler is not idle."""
        state = self.engine.state
        return [*state.pending, *state.parked]

    @property
    def ongoing_load_back(self) -> list[int]:
        """Load-backs that have not ended."""
        return list(self.engine.state.loads)

    def pretty_print(self) -> None:
        """Print the tree's nodes, one a line."""
        for node in self.engine.state.tree.nodes():
            print(node)

    # -- what a contract's class says of its requests -------------------------------------------------------------------------
    @abstractmethod
    def _matched_tokens(self, req: Any) -> int:
        """How many tokens this round's match has found on the device."""

    @abstractmethod
    def _extent_end(self, req: Any) -> int:
        """Where the extent that the request's batch stores ends, in tokens."""

    @abstractmethod
    def _drop_admission_lock(self, req: Any) -> None:
        """Give up the scheduler's lock on the request's match: the engine holds one for every request that runs."""

    def _row_changed(self, req: Any, tokens: int) -> None:
        """The row's first tokens may lie on other pages now."""

    # -- matching and admission ---------------------------------------------------------------------------------------------
    def _match(self, params: Any) -> Match:
        """What of the key is on the device and what a load-back could bring. Changes nothing but what is remembered of the match."""
        key = self._requests.key(params.key.raw_token_ids(), params.key.extra_key, params.key.cache_salt)
        if params.req is not None:
            self._last_match = (params.req, key)
        return self.engine.match_prefix(key)

    def _load_back(self, params: Any) -> LoadAnswer | None:
        """Queue the load-back that the match of this request has promised: all of it, or ``None``, which means recompute (R25, R26)."""
        req, last_match = params.req, self._last_match
        if last_match is None or last_match[0] is not req:
            return None
        found = self.engine.match_prefix(last_match[1])
        device_tokens = len(found.device_pages) * self.page_size
        if found.host_hit_tokens != params.host_hit_length or device_tokens != self._matched_tokens(req):
            return None
        answer = self.engine.load_back(self._requests.name_of(req), found, len(req.full_untruncated_fill_ids) - device_tokens)
        return None if answer.node is None else answer

    def touch(self, req: Any) -> None:
        """SGLang tries to admit the request that it has just matched: what it has found counts as used, whether there is room or not."""
        if self._last_match is not None and self._last_match[0] is req:
            found = self.engine.match_prefix(self._last_match[1])
            node = found.host_nodes[-1] if found.host_nodes else found.device_node
            if not node.is_root:
                self.engine.touch(node)

    def must_wait(self, req: Any) -> bool:
        """Whether the request is passed over this round: its insert would divide a node whose backup is pending (R17)."""
        state = self.engine.state
        if not state.pending and not state.waiters:
            return False
        name = self._requests.name_of(req)
        if self.engine.is_waiting(name):
            return True
        # Not the request's fill ids: SGLang sets them between asking whether to preempt for it and asking whether to add it.
        full = self._requests.key_of(req, req.origin_input_ids + req.output_ids)
        return self.engine.prepare(name, full, full) is None

    def inc_lock_ref(self, node: Any) -> IncLockRefResult:
        """Lock a handle's whole node and what is above it."""
        return IncLockRefResult(delta=self.engine.state.tree.lock(node))

    def dec_lock_ref(self, node: Any, params: Any = None) -> DecLockRefResult:
        """Undo one lock."""
        return DecLockRefResult(delta=self.engine.state.tree.unlock(node))

    def evict(self, params: Any) -> EvictResult:
        """Free device tokens, as many as asked for or as there are."""
        return EvictResult(num_tokens_evicted=self.engine.evict(params.num_tokens).num_tokens_evicted)

    # -- pages that the ranks of a group share --------------------------------------------------------------------------------
    def rotation_base_of(self, node: Any) -> int | None:
        """The rank that owns the first page of the chain that ``node`` is on; ``None`` where no pages are shared, and for the root."""
        shards = self.engine.config.cp_size
        if shards == 1 or node is None or node.is_root:
            return None
        while not node.parent.is_root:
            node = node.parent
        owner = node.backup.owners[0] if node.pages is None else self.engine.state.layout.owner_of_page(node.pages[0])
        return int(owner)

    def _breaks_rotation(self, req: Any, key: RadixKey) -> bool:
        """Whether the tree's pages of ``key`` begin with another rank than the request's own: the owners of a chain have to go round."""
        if self.engine.config.cp_size == 1:
            return False
        path = self.engine.state.tree.walk(key).path
        return bool(path) and self.rotation_base_of(path[0]) != req.kv_rotation_base

    # -- the scheduler's iteration ------------------------------------------------------------------------------------------
    def check_hicache_events(self) -> None:
        """One tick. Requests that read a load-back which has failed are aborted. Raises ``GroupBroken`` when a rank is lost.

        SGLang calls this some thousand times a second while it has nothing to do: the first idle iteration is a tick, those after it are
        left out as long as nothing would happen in them.
        """
        if not self._computed and self._rests and self.engine.is_at_rest():
            self._on_tick(self.engine.state.tick)
            return
        self._rests = not self._computed
        with _telling():
            report = self.engine.begin_tick(idle=not self._computed)
            if self._alone and self.engine.state.outstanding:
                self.engine.agree_now()
        self._computed = False
        self._on_tick(report.tick)
        for name in report.poisoned:
            req = self._requests.running.get(name)
            if req is not None and not req.finished() and req.to_finish is None:
                req.to_finish = FINISH_ABORT(LOAD_FAILED)
        self._insert_declined()

    def ready_to_load_host_cache(self) -> int:
        """Start the queued load-backs as one producer; -1 when there is none."""
        return self.engine.start_loads()

    # -- the forward ----------------------------------------------------------------------------------------------------------
    def reserve_batch(self, batch: Any) -> None:
        """The locations of a prefill batch are known: admit its requests and reserve their new extents (R12)."""
        if any(req.last_node is None for req in batch.reqs):
            return  # a batch of SGLang's own, for measuring: it serves nobody
        batch_id = self._next_batch
        self._next_batch += 1
        self.engine.batch(batch_id)
        for req, prefix_len in zip(batch.reqs, batch.prefix_lens, strict=True):
            name = self._admit(req)
            key = self._requests.key_of(req, req.get_fill_ids())
            self.engine.stores(name, batch_id, prefix_len)
            self.engine.reserve(name, batch_id, key, self._requests.row_pages(req, self._extent_end(req)))
        self._prepared = (batch, batch_id)

    def _admit(self, req: Any) -> str:
        name = self._requests.name_of(req)
        if not self._requests.is_running(req):
            pages = req.kv.cache_protected_len // self.page_size
            self.engine.admit(name, req.last_node, pages, priority=getattr(req, "priority", 0) or 0)
            self._drop_admission_lock(req)
            self._requests.start(req)
        return name

    def begin_forward(self, batch: Any) -> None:
        """The batch's forward starts: it may write pages that copies still read, and is the one that layer reports speak of."""
        self._computed = True
        state = self.engine.state
        if state.pending or state.loads:
            self.engine.before_store(sorted(self._written_pages(batch)))
        if self._prepared is not None and self._prepared[0] is batch:
            self._forward = self._prepared[1]
            self._prepared = None

    def _written_pages(self, batch: Any) -> set[LogicalPage]:
        """The pages that a batch's forward may write. With a draft, a decode chooses among those that its requests have allocated."""
        if self._drafts and batch.forward_mode.is_decode():
            pages: set[LogicalPage] = set()
            for req in batch.reqs:
                pages.update(self._requests.row_pages(req, req.kv.kv_allocated_len)[req.kv.kv_committed_len // self.page_size :])
            return pages
        if batch.out_cache_loc is None:
            return set()
        reserved = self.engine.state.layout.reserved_pages  # SGLang pads a batch with locations there
        return {LogicalPage(page) for page in (batch.out_cache_loc // self.page_size).tolist() if page not in reserved}

    def layer_stored(self, pool: Any, layer_id: int) -> None:
        """A forward has issued the KV store of a layer (number as in the model) into a device pool, which says whose layer it is."""
        if self._forward is None:
            return
        for payload, (known, (_, layers)) in enumerate(zip(self._pools, self.engine.config.payloads, strict=True)):
            layer = layer_id - known.start_layer
            if pool is known and 0 <= layer < layers:
                self.engine.layer_stored(self._forward, payload, layer)

    def wait_layer(self, payload: str, layer: int) -> None:
        """A forward is about to read a layer: wait for the load-backs that its requests read."""
        if self._forward is not None:
            self.engine.wait_layer(self._forward, payload, layer)

    def end_forward(self) -> None:
        """Everything of the batch has been issued, the draft model's pass included: submit what was not reported, number the backups
        (R11)."""
        batch_id, self._forward = self._forward, None
        if batch_id is not None:
            for payload in range(len(self._pools)):
                self.engine.end_payload(batch_id, payload)
            self.engine.end_forward(batch_id)

    # -- results --------------------------------------------------------------------------------------------------------------
    def _insert(self, req: Any, tokens: int, *, chunked: bool) -> None:
        """Insert the first ``tokens`` tokens of a running request. A declined insert leaves tree, lock and protected length alone (R17).

        ``chunked``: more chunks of its prompt follow.
        """
        key = self._requests.key_of(req, req.full_untruncated_fill_ids[:tokens])
        self._insert_key(req, tokens, key, chunked=chunked)

    def _insert_key(self, req: Any, tokens: int, key: RadixKey, *, chunked: bool) -> None:
        name = self._requests.running_name(req)
        self._declined.pop(name, None)
        if self._breaks_rotation(req, key):
            return
        self._hurry_for(key)
        pages = self.engine.insert_unfinished(name, key, self._requests.row_pages(req, tokens), chunked=chunked)
        if pages is None:
            if not chunked:
                self._declined[name] = req, tokens, key
            return
        self._requests.point_row(req, req.kv.cache_protected_len, pages)
        req.kv.cache_protected_len = len(pages) * self.page_size
        req.last_node = self.engine.state.requests[name].lock

    def _hurry_for(self, key: RadixKey) -> None:
        """What an insert would be declined for may have ended since the tick began: a rank that is alone has nobody to ask about it."""
        if self._alone and self.engine.state.numbered and self.engine.is_declined(key):
            self.engine.agree_now()

    def _insert_declined(self) -> None:
        """Insert the prompts that were declined, as soon as that can be: SGLang would not ask again before the request ends, and until
        then nobody would find them."""
        for req, tokens, key in list(self._declined.values()):
            if not self.engine.is_declined(key):
                self._insert_key(req, tokens, key, chunked=False)
                self._row_changed(req, tokens)

    def _end(self, req: Any, tokens: int, *, insert: bool) -> None:
        """The request has ended with so many tokens stored: insert its KV, or (aborted, retracted, poisoned) free what is its own.

        One that ends before it is agreed that the load-backs which it has read went well asks for that now: if one has failed, its
        answer, which SGLang sends after this call, is an abort.
        """
        name = self._requests.running_name(req)
        self._declined.pop(name, None)
        insert = insert and self._reads_right(req)
        stored = (req.origin_input_ids + req.output_ids)[:tokens]
        pages = self._requests.row_pages(req, len(stored))
        key = self._requests.key_of(req, stored)
        if insert and not self._breaks_rotation(req, key):
            self._hurry_for(key)
            done = self.engine.finish(name, key, pages)
            if not done and self.engine.config.cp_size > 1:
                # Later, another chain may be there, which its pages would not continue.
                self.engine.end_request(name, (), "rotation")
            self._requests.forget(req)
        else:
            self._end_without_insert(req, pages)

    def _reads_right(self, req: Any) -> bool:
        """Whether the load-backs that the request has read went well; if one has failed, the request is aborted."""
        with _telling():
            right = self.engine.confirm_loads(self._requests.running_name(req))
        if not right and req.finished():
            req.finished_reason = FINISH_ABORT(LOAD_FAILED)
        elif not right:
            req.to_finish = FINISH_ABORT(LOAD_FAILED)
        return right

    def _end_without_insert(self, req: Any, pages: Sequence[LogicalPage]) -> None:
        """The request has ended: roll its reservations back, free those of its ``pages`` that are its own."""
        if not req.finished():
            self._reads_right(req)  # it was taken back, and goes on later with the tokens that it has
        name = self._requests.running_name(req)
        self._declined.pop(name, None)
        self.engine.end_request(name, pages, "abort" if req.finished() else "retract")
        self._requests.forget(req)

    def release_aborted_request(self, handle: Any) -> None:
        """An attempt was aborted: if it had not run, it waits for nothing any more. (One that runs ends when SGLang gives up its row.)"""
        name = self._requests.take_waiting(handle)
        if name is not None:
            self.engine.end_request(name, (), "abort")

    def take_events(self) -> list[Any]:
        """SGLang's KV events since the last call; none without ``--kv-events-config``."""
        return [] if self._events is None else self._events.take()

    # -- flush and end ----------------------------------------------------------------------------------------------------------
    def settle(self) -> None:
        """Bring everything in flight to its end, if no request runs: a flush is not refused because of backups."""
        if not self._requests.running:
            self.engine.shutdown()

    def reset(self) -> None:
        """Forget the whole cache."""
        self.engine.flush()
        if self._events is not None:
            self._events.cleared()
        self._requests.clear()
        self._declined.clear()
        self._prepared = self._last_match = None

    def release_host_resources(self) -> None:
        """End the copies, unpin host memory, close the log, also where the engine's own end fails (a rank is lost). Idempotent."""
        if not self._closed:
            self._closed = True
            try:
                self.engine.shutdown()
            finally:
                self._close()

    def running_rows(self) -> Mapping[str, Sequence[LogicalPage]]:
        """All device pages of each running request, by the engine's name, for checkers."""
        return {name: self._requests.row_pages(req, req.kv.kv_allocated_len) for name, req in self._requests.running.items()}

    def _make_key(self, tokens: Sequence[int], namespace: str | None) -> RadixKey:
        return RadixKey.of(tokens, self.page_size, namespace, is_bigram=self._drafts)
