"""The cache as SGLang 0.5.23 calls it: ``checkpoint`` and ``on_release``; matches and load-backs are numbers of tokens."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import MatchResult

from cphicache.sglang.prefix_cache import CphicachePrefixCache


class PrefixCache(CphicachePrefixCache):
    """SGLang frees of a row what lies above ``cache_protected_len``, and unlocks ``req.lock`` (``None`` while the request runs)."""

    def _matched_tokens(self, req: Any) -> int:
        return int(req.prefix_len)

    def _extent_end(self, req: Any) -> int:
        return int(req.extend_end)

    def _drop_admission_lock(self, req: Any) -> None:
        self.unlock(req.lock)
        req.lock = None

    def match_prefix(self, params: Any) -> MatchResult:
        """What of the key is on the device and what a load-back could bring. Changes nothing."""
        found = self._match(params)
        return MatchResult(
            device_prefix_len=len(found.device_pages) * self.page_size,
            last_device_node=found.device_node,
            last_host_node=found.last_host_node,
            best_match_node=found.host_nodes[-1] if found.host_nodes else found.device_node,
            host_hit_length=found.host_hit_tokens,
        )

    def path_device_indices(self, node: Any) -> torch.Tensor:
        """The locations of a handle's whole path, int64 of shape ``[tokens]``; SGLang cuts it to its match."""
        path = []
        while not node.is_root:
            path.append(node)
            node = node.parent
        return self._requests.locs([page for node in reversed(path) for page in node.pages])

    def init_load_back(self, params: Any) -> tuple[int, Any]:
        """The tokens of the promised load-back, and its last node; or none, and the last node of the device."""
        answer = self._load_back(params)
        if answer is None:
            return 0, params.req.last_node
        return len(answer.pages) * self.page_size, answer.node

    def checkpoint(self, req: Any, *, up_to: int, **kwargs: Any) -> None:
        """Insert the first ``up_to`` tokens of a request that runs, or that has finished: then its whole row is taken over."""
        if req.finished():
            self._end(req, up_to, insert=True)
            req.kv.cache_protected_len = up_to  # inserted, parked or freed: nothing is left for SGLang to free
        else:
            self._insert(req, up_to, chunked=up_to < len(req.origin_input_ids))

    def on_release(self, req: Any, *, checkpointed: bool) -> None:
        """SGLang has freed the row of a request. If that had not ended with a checkpoint, it ends here: aborted or retracted."""
        if self._requests.is_running(req):
            self._end_without_insert(req, ())
