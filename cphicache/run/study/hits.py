"""Hit rates of pool sizes over a trace, and the bound that no cache passes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from cphicache.run.study.serve import ServeConfig, TraceServer
from cphicache.run.trace import TraceRequest

ROW_NUMBERS = (
    "device tokens",
    "host tokens",
    "device hit rate",
    "host hit rate",
    "recomputed tokens",
    "backups refused",
    "too long",
)
"""Of a row: what tells sizes apart and what is shown."""


def digest(requests: Iterable[TraceRequest]) -> str:
    """Equal for equal requests: files of one name need not hold the same."""
    found = hashlib.sha256()
    for request in requests:
        found.update(repr(request).encode())
    return found.hexdigest()[:16]


def infinite_hits(requests: Iterable[TraceRequest], page_size: int) -> tuple[int, int]:
    """(tokens of all prompts, those of them that a cache without limits has in whole pages) with requests served one after the other.

    The last token of a prompt is always computed. What requests decode is not in the trace, and never comes back.
    """
    longest: dict[int, int] = {}
    tokens = hits = 0
    for request in requests:
        tokens += request.input_length
        matched, whole = 0, True
        for block, size in zip(request.hash_ids, request.block_tokens, strict=True):
            if whole:
                common = min(size, longest.get(block, 0))
                matched += common
                whole = common == size
            longest[block] = max(size, longest.get(block, 0))
        hits += min(matched, request.input_length - 1) // page_size * page_size
    return tokens, hits


def study(
    config: ServeConfig,
    requests: Sequence[TraceRequest],
    sizes: Sequence[tuple[int, int]],
    known: list[dict[str, Any]],
    *,
    on_row: Callable[[], object],
    on_request: Callable[[], object] = int,
) -> None:
    """Serve the trace at each of the (device, host) sizes that ``known`` lacks. Each finished row is added to it, and ``on_row`` called."""
    have = {(row["device tokens"], row["host tokens"]) for row in known}
    for device, host in sizes:
        if (device, host) in have:
            continue
        changed = replace(config, device_tokens=device, host_tokens=host)
        known.append(row_of(changed, requests, on_request))
        on_row()


def row_of(config: ServeConfig, requests: Sequence[TraceRequest], on_request: Callable[[], object] = int) -> dict[str, Any]:
    """Serve the trace once, and what came of it as plain data. Shares are of the tokens of all prompts."""
    server = TraceServer(config, requests, on_request)
    served, counters = server.run(), server.cache.counters
    prompts = max(1, served.prompts)
    return {
        "device tokens": config.device_tokens,
        "host tokens": config.host_tokens,
        "overlap": config.overlap,
        "requests": served.finished,
        "too long": served.refused,
        "retracted": served.retracted,
        "prompt tokens": served.prompts,
        "device hits": served.tokens_device,
        "host hits": served.tokens_host,
        "recomputed tokens": served.prompts - served.tokens_device - served.tokens_host,
        "device hit rate": served.tokens_device / prompts,
        "host hit rate": served.tokens_host / prompts,
        "backups refused": sum(counters.refused.values()),
        "load-backs refused": sum(counters.load_refused.values()),
        "evicted without host copy": counters.device_dropped_tokens,
        "host evicted tokens": counters.host_evicted_tokens,
        "declined inserts": counters.declined_inserts,
        "virtual s": served.virtual_s,
        "cpu s": sum(served.seconds.values()),
        "seconds by part": dict(served.seconds),
    }
