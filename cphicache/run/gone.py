"""Which pages are gone with a lost rank, in words."""

from __future__ import annotations

from collections.abc import Sequence

from cphicache.engine import CpHiRadixCache
from cphicache.lifecycle import State
from cphicache.spaces.types import LogicalPage

RUNS_NAMED = 8
"""Runs of pages that are named one by one."""


def gone_text(cache: CpHiRadixCache, ranks: Sequence[int]) -> str:
    """The logical device pages in use, and the host pages, that ranks ``ranks`` owned: how many, and which."""
    config = cache.config
    layout = config.layout(0)
    free = {page for lists in cache.state.alloc.snapshot() for lane in lists for page in lane}
    pages = [LogicalPage(page) for page in cache.state.alloc.usable_pages]
    owned = [page for page, owner in zip(pages, layout.owners(pages), strict=True) if owner in ranks]
    used = [page for page in owned if page not in free]
    host = sum(
        owner in ranks for node in cache.state.tree.nodes() if node.backup.state is State.COMMITTED for owner in node.backup.owners
    )
    names = ", ".join(map(str, ranks))
    which = f" (logical pages {runs_text(used, config.cp_size)})" if used else ""
    return (
        f"gone with rank {names}: {len(owned)} of {len(pages)} device pages, of which {len(used)} held KV"
        f"{which}, and {host} host pages"
    )


def runs_text(pages: Sequence[int], step: int) -> str:
    """Sorted pages as runs: ``2..50 in steps of 4, 58``. At most :data:`RUNS_NAMED` runs are named."""
    runs: list[list[int]] = []
    for page in pages:
        if runs and page - runs[-1][1] == step:
            runs[-1][1] = page
        else:
            runs.append([page, page])
    named = [str(first) if first == last else f"{first}..{last}" for first, last in runs[:RUNS_NAMED]]
    more = f" and {len(runs) - RUNS_NAMED} runs more" if len(runs) > RUNS_NAMED else ""
    steps = f" in steps of {step}" if step > 1 and any(first != last for first, last in runs) else ""
    return ", ".join(named) + more + steps
