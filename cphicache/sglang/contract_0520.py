"""The cache as SGLang 0.5.20 calls it: ``cache_unfinished_req``, ``cache_finished_req``; matches and load-backs are locations."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import MatchResult

from cphicache.sglang.prefix_cache import CphicachePrefixCache


class PrefixCache(CphicachePrefixCache):
    """SGLang frees what a request has allocated beyond its KV; everything else of its row is the cache's to free."""

    def _matched_tokens(self, req: Any) -> int:
        return len(req.prefix_indices)

    def _extent_end(self, req: Any) -> int:
        return int(req.extend_range.end)

    def _drop_admission_lock(self, req: Any) -> None:
        self.dec_lock_ref(req.last_node)

    def _row_changed(self, req: Any, tokens: int) -> None:
        req.prefix_indices = self._requests.row(req, tokens).to(torch.int64, copy=True)

    def match_prefix(self, params: Any) -> MatchResult:
        """What of the key is on the device and what a load-back could bring. Changes nothing."""
        found = self._match(params)
        return MatchResult(
            device_indices=self._requests.locs(found.device_pages),
            last_device_node=found.device_node,
            last_host_node=found.last_host_node,
            best_match_node=found.host_nodes[-1] if found.host_nodes else found.device_node,
            host_hit_length=found.host_hit_tokens,
        )

    def init_load_back(self, params: Any) -> tuple[torch.Tensor, Any]:
        """The locations of the promised load-back, int64, and its last node; or none, and the last node of the device."""
        answer = self._load_back(params)
        if answer is None:
            return self._requests.locs([]), params.req.last_node
        return self._requests.locs(answer.pages), answer.node

    def cache_unfinished_req(self, req: Any, chunked: bool = False, **kwargs: Any) -> None:
        """Insert what a running request has stored. The next round reads its prefix from the row, whosever the pages are."""
        tokens = self._extent_end(req)
        self._insert(req, tokens, chunked=chunked)
        self._row_changed(req, tokens)

    def cache_finished_req(self, req: Any, is_insert: bool = True, *, kv_len_to_handle: int, **kwargs: Any) -> None:
        """The request has ended: insert its KV, or (aborted, retracted) free what is its own."""
        self._end(req, kv_len_to_handle, insert=is_insert)
