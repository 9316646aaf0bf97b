"""SGLang 0.5.20's ``BasePrefixCache`` over :class:`~cphicache.engine.CpHiRadixCache`.

The engine decides and accounts in logical pages; SGLang speaks of token locations (``page * page_size + offset``) and of request rows.
The engine's nodes are passed to SGLang as opaque handles.

The names of the engine's requests are made here: SGLang's request id may come again while an insert of the first request is parked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.mem_cache.base_prefix_cache import (
    BasePrefixCache,
    DecLockRefResult,
    EvictResult,
    IncLockRefResult,
    MatchResult,
)

from cphicache.engine import CpHiRadixCache
from cphicache.spaces.types import LogicalPage
from cphicache.transfer.port import TransferPort
from cphicache.tree import RadixKey


class CphicachePrefixCache(BasePrefixCache):
    """The tree cache of one scheduler process. ``pools``: SGLang's device pools by payload. ``close``: gives everything back.

    A draft model's KV of a token depends on the token that follows it: with a draft, keys are of bigrams, so that KV which is found by
    a key is right for both models.
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
        self._close = close
        self._closed = False
        self._names: dict[Any, str] = {}  # by SGLang's handle of the attempt
        self._running: dict[str, Any] = {}
        self._serial = 0
        self._next_batch = 1
        self._prepared: tuple[Any, int] | None = None
        self._forward: int | None = None
        self._last_match: tuple[Any, RadixKey] | None = None
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

    # -- matching and admission ---------------------------------------------------------------------------------------------
    def match_prefix(self, params: Any) -> MatchResult:
        """What of the key is on the device and what a load-back could bring. Changes nothing."""
        key = self._key(params.key.raw_token_ids(), params.key.extra_key, params.key.cache_salt)
        found = self.engine.match_prefix(key)
        if params.req is not None:
            self._last_match = (params.req, key)
        return MatchResult(
            device_indices=self._locs(found.device_pages),
            last_device_node=found.device_node,
            last_host_node=found.last_host_node,
            best_match_node=found.host_nodes[-1] if found.host_nodes else found.device_node,
            host_hit_length=found.host_hit_tokens,
        )

    def must_wait(self, req: Any) -> bool:
        """Whether the request is passed over this round: its insert would divide a node whose backup is pending (R17)."""
        state = self.engine.state
        if not state.pending and not state.waiters:
            return False
        name = self._name_of(req)
        if self.engine.is_waiting(name):
            return True
        # Not the request's fill ids: SGLang sets them between asking whether to preempt for it and asking whether to add it.
        full = self._key_of(req, req.origin_input_ids + req.output_ids)
        return self.engine.prepare(name, full, full) is None

    def init_load_back(self, params: Any) -> tuple[torch.Tensor, Any]:
        """Queue the load-back that the match of this request has promised: all of it, or nothing, which means recompute (R25, R26)."""
        req, last_match = params.req, self._last_match
        nothing = self._locs([]), req.last_node
        if last_match is None or last_match[0] is not req:
            return nothing
        found = self.engine.match_prefix(last_match[1])
        device_tokens = len(found.device_pages) * self.page_size
        if found.host_hit_tokens != params.host_hit_length or device_tokens != len(req.prefix_indices):
            return nothing
        answer = self.engine.load_back(self._name_of(req), found, len(req.full_untruncated_fill_ids) - device_tokens)
        if answer.node is None:
            return nothing
        return self._locs(answer.pages), answer.node

    def inc_lock_ref(self, node: Any) -> IncLockRefResult:
        """Lock a handle's whole node and what is above it."""
        return IncLockRefResult(delta=self.engine.state.tree.lock(node))

    def dec_lock_ref(self, node: Any, params: Any = None) -> DecLockRefResult:
        """Undo one lock."""
        return DecLockRefResult(delta=self.engine.state.tree.unlock(node))

    def evict(self, params: Any) -> EvictResult:
        """Free device tokens, as many as asked for or as there are."""
        return EvictResult(num_tokens_evicted=self.engine.evict(params.num_tokens).num_tokens_evicted)

    # -- the scheduler's iteration ------------------------------------------------------------------------------------------
    def check_hicache_events(self) -> None:
        """One tick. Requests that read a load-back which has failed are aborted."""
        report = self.engine.begin_tick()
        for name in report.poisoned:
            req = self._running.get(name)
            if req is not None and not req.finished() and req.to_finish is None:
                req.to_finish = FINISH_ABORT("cphicache: the load-back of this request's prefix has failed; send it again")

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
            key = self._key_of(req, req.get_fill_ids())
            self.engine.stores(name, batch_id, prefix_len)
            self.engine.reserve(name, batch_id, key, self._row_pages(req, req.extend_range.end))
        self._prepared = (batch, batch_id)

    def _admit(self, req: Any) -> str:
        name = self._name_of(req)
        if name not in self._running:
            self.engine.admit(name, req.last_node, req.kv.cache_protected_len // self.page_size)
            self.engine.state.tree.unlock(req.last_node)  # the scheduler's lock: the engine holds one for the request from here on
            self._running[name] = req
        return name

    def begin_forward(self, batch: Any) -> None:
        """The batch's forward starts: it may write pages that copies still read, and is the one that layer reports speak of."""
        state = self.engine.state
        if state.pending or state.loads:
            self.engine.before_store(sorted(self._written_pages(batch)))
        if self._prepared is not None and self._prepared[0] is batch:
            self._forward = self._prepared[1]
            self._prepared = None

    def _written_pages(self, batch: Any) -> set[LogicalPage]:
        """The pages that a batch's forward may write."""
        if (
            self._drafts and batch.forward_mode.is_decode()
        ):  # its locations are chosen inside, from what its requests have allocated
            rows = (
                (req.kv.kv_committed_len // self.page_size, self._row_pages(req, req.kv.kv_allocated_len)) for req in batch.reqs
            )
            return {page for first, row in rows for page in row[first:]}
        if batch.out_cache_loc is None:
            return set()
        return {LogicalPage(page) for page in (batch.out_cache_loc // self.page_size).tolist() if page}

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
    def cache_unfinished_req(self, req: Any, chunked: bool = False, **kwargs: Any) -> None:
        """Insert what a running request has stored. A declined insert leaves tree, lock and protected length alone (R17)."""
        name = self._running_name(req)
        tokens = req.get_fill_ids()
        key = self._key_of(req, tokens)
        row = self._row(req, len(tokens))
        pages = self.engine.insert_unfinished(name, key, self._pages(row), chunked=chunked)
        if pages is None:
            req.prefix_indices = row.to(torch.int64, copy=True)
            return
        end, start = len(pages) * self.page_size, req.kv.cache_protected_len
        locs = self._locs(pages)
        if end > start:
            self.req_to_token_pool.write((req.kv.req_pool_idx, slice(start, end)), locs[start:].to(row.dtype))
        req.prefix_indices = torch.cat([locs, row[end:].to(torch.int64)])
        req.kv.cache_protected_len = end
        req.last_node = self.engine.state.requests[name].lock

    def cache_finished_req(self, req: Any, is_insert: bool = True, *, kv_len_to_handle: int | None = None, **kwargs: Any) -> None:
        """The request has ended: insert its KV, or (aborted, retracted, poisoned) free what is its own."""
        name = self._running_name(req)
        tokens = (req.origin_input_ids + req.output_ids)[:kv_len_to_handle]
        pages = self._row_pages(req, len(tokens))
        if is_insert and not self.engine.state.requests[name].poisoned:
            self.engine.finish(name, self._key_of(req, tokens), pages)
        else:
            self.engine.end_request(name, pages, "retract" if not req.finished() else "abort")
        self._forget(req)

    def release_aborted_request(self, handle: Any) -> None:
        """An attempt was aborted before it ran: it waits for nothing any more. (A running one ends in :meth:`cache_finished_req`.)"""
        name = self._names.get(handle)
        if name is not None and name not in self._running:
            self.engine.end_request(name, (), "abort")
            del self._names[handle]

    # -- flush and end ----------------------------------------------------------------------------------------------------------
    def settle(self) -> None:
        """Bring everything in flight to its end, if no request runs: a flush is not refused because of backups."""
        if not self._running:
            self.engine.shutdown()

    def reset(self) -> None:
        """Forget the whole cache."""
        self.engine.flush()
        self._names.clear()
        self._prepared = self._last_match = None

    def release_host_resources(self) -> None:
        """End the copies, unpin host memory, close the log. Idempotent."""
        if not self._closed:
            self._closed = True
            self.engine.shutdown()
            self._close()

    def running_rows(self) -> Mapping[str, Sequence[LogicalPage]]:
        """All device pages of each running request, by the engine's name, for checkers."""
        return {name: self._row_pages(req, req.kv.kv_allocated_len) for name, req in self._running.items()}

    # -- inner parts --------------------------------------------------------------------------------------------------------------
    def _name_of(self, req: Any) -> str:
        handle = req.cache_request_handle
        name = self._names.get(handle)
        if name is None:
            self._serial += 1
            name = self._names[handle] = f"{handle.rid}#{self._serial}"
        return name

    def _running_name(self, req: Any) -> str:
        name = self._names.get(req.cache_request_handle)
        if name is None or name not in self._running:
            raise AssertionError(f"request {req.rid}: expected it to have been admitted, found {name!r} among {len(self._running)}")
        return name

    def _forget(self, req: Any) -> None:
        del self._running[self._names.pop(req.cache_request_handle)]

    def _key_of(self, req: Any, tokens: Sequence[int]) -> RadixKey:
        if getattr(req, "positional_embed_overrides", None) is not None:
            tokens = ()  # equal tokens do not mean equal KV
        return self._key(tokens, req.extra_key, req.cache_salt)

    def _key(self, tokens: Sequence[int], extra_key: str | None, salt: str | None) -> RadixKey:
        namespace = extra_key if not salt else f"{len(salt)}:{salt}{extra_key or ''}"
        return RadixKey.of(tokens, self.page_size, namespace, is_bigram=self._drafts)

    def _locs(self, pages: Sequence[int]) -> torch.Tensor:
        starts = torch.tensor(pages, dtype=torch.int64) * self.page_size
        return (starts[:, None] + torch.arange(self.page_size)).reshape(-1).to(self.device)

    def _row(self, req: Any, tokens: int) -> torch.Tensor:
        rows: torch.Tensor = self.req_to_token_pool.req_to_token
        return rows[req.kv.req_pool_idx, :tokens]

    def _pages(self, row: torch.Tensor) -> list[LogicalPage]:
        return [LogicalPage(page) for page in (row[:: self.page_size] // self.page_size).tolist()]

    def _row_pages(self, req: Any, tokens: int) -> list[LogicalPage]:
        return self._pages(self._row(req, tokens))
