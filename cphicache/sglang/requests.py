"""SGLang's requests in the engine's terms: names, keys, and the pages of their rows.

The engine decides and accounts in logical pages; SGLang speaks of token locations (``page * page_size + offset``) and of request rows.
The names are made here: SGLang's request id may come again while an insert of the first request is parked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from cphicache.spaces.types import LogicalPage
from cphicache.tree import RadixKey


class ServerRequests:
    """The attempts that the engine has heard of. ``make_key(tokens, extra_key)``: the engine's keys; ``rows``: SGLang's row pool."""

    def __init__(self, make_key: Callable[[Sequence[int], str | None], RadixKey], rows: Any, page_size: int, device: Any) -> None:
        self._make_key = make_key
        self._rows = rows
        self._page_size = page_size
        self._device = device
        self._names: dict[Any, str] = {}  # by SGLang's handle of the attempt
        self._running: dict[str, Any] = {}
        self._serial = 0

    # -- names ------------------------------------------------------------------------------------------------------------------
    @property
    def running(self) -> Mapping[str, Any]:
        """SGLang's objects of the requests that run, by the engine's name."""
        return self._running

    def name_of(self, req: Any) -> str:
        """The engine's name of this attempt, made if it has none."""
        handle = req.cache_request_handle
        name = self._names.get(handle)
        if name is None:
            self._serial += 1
            name = self._names[handle] = f"{handle.rid}#{self._serial}"
        return name

    def is_running(self, req: Any) -> bool:
        """Whether the attempt has been started, and not forgotten."""
        return self._names.get(req.cache_request_handle) in self._running

    def running_name(self, req: Any) -> str:
        """The engine's name of a request that runs."""
        name = self._names.get(req.cache_request_handle)
        if name is None or name not in self._running:
            raise AssertionError(f"request {req.rid}: expected it to have been admitted, found {name!r} among {len(self._running)}")
        return name

    def start(self, req: Any) -> None:
        """The request runs from here on."""
        self._running[self.name_of(req)] = req

    def forget(self, req: Any) -> None:
        """A request that ran has ended."""
        del self._running[self._names.pop(req.cache_request_handle)]

    def take_waiting(self, handle: Any) -> str | None:
        """Forget an attempt that has not run, if it has a name: its name."""
        name = self._names.get(handle)
        if name is None or name in self._running:
            return None
        return self._names.pop(handle)

    def clear(self) -> None:
        """Forget every attempt. None may run."""
        self._names.clear()

    # -- keys -------------------------------------------------------------------------------------------------------------------
    def key_of(self, req: Any, tokens: Sequence[int]) -> RadixKey:
        """The request's key for the whole pages of ``tokens``."""
        if getattr(req, "positional_embed_overrides", None) is not None:
            tokens = ()  # equal tokens do not mean equal KV
        return self.key(tokens, req.extra_key, req.cache_salt)

    def key(self, tokens: Sequence[int], extra_key: str | None, salt: str | None) -> RadixKey:
        """The key for the whole pages of ``tokens`` in a namespace."""
        return self._make_key(tokens, extra_key if not salt else f"{len(salt)}:{salt}{extra_key or ''}")

    # -- rows -------------------------------------------------------------------------------------------------------------------
    def locs(self, pages: Sequence[int]) -> torch.Tensor:
        """Token locations of whole pages, int64 of shape ``[pages * page_size]``."""
        starts = torch.tensor(pages, dtype=torch.int64) * self._page_size
        return (starts[:, None] + torch.arange(self._page_size)).reshape(-1).to(self._device)

    def row(self, req: Any, tokens: int) -> torch.Tensor:
        """The locations of the request's first tokens (a view of SGLang's table)."""
        table: torch.Tensor = self._rows.req_to_token
        return table[req.kv.req_pool_idx, :tokens]

    def row_pages(self, req: Any, tokens: int) -> list[LogicalPage]:
        """The pages of the request's first tokens; the last may be part of a page."""
        row = self.row(req, tokens)
        return [LogicalPage(page) for page in (row[:: self._page_size] // self._page_size).tolist()]

    def point_row(self, req: Any, start: int, pages: Sequence[LogicalPage]) -> None:
        """Let the request's row, from token ``start`` on, name the tree's ``pages``, which are those of its prefix."""
        end = len(pages) * self._page_size
        if end > start:
            self._rows.write((req.kv.req_pool_idx, slice(start, end)), self.locs(pages)[start:].to(self._rows.req_to_token.dtype))
