"""What a run ends with: one summary, as a table for people and as plain data for machines, and what the default run must have seen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from cphicache.run.config import RunConfig
from cphicache.run.world import RankResult

Summary = dict[str, Any]

MUST_SEE = (
    "deferred splits",
    "declined inserts",
    "eviction-retries that succeeded",
    "refused reservations",
    "zero-owned operations",
    "rollbacks",
    "aborts",
    "retractions",
    "duplicate binds",
    "chunked prompts",
    "load-backs under eviction",
)
"""What the bare default run is for: it has seen each of these at least once, or it fails."""


def summarize(config: RunConfig, results: Sequence[RankResult]) -> Summary:
    """The figures of a run. Logical ones are equal on all ranks and taken from rank 0; bytes and checks are summed over ranks."""
    first = results[0]
    served, counters = first.served, first.counters
    mismatches = sum(result.verdict.mismatches for result in results)
    return {
        "requests": {
            "finished": served.finished,
            "aborted": served.aborted,
            "refused (longer than the device pool)": served.refused,
            **({"given up with a lost rank": served.abandoned} if served.abandoned else {}),
        },
        "tokens": {
            "device hit": served.tokens_device,
            "host hit": served.tokens_host,
            "computed": served.tokens_computed,
        },
        "backups": {
            "reserved": counters.reserved,
            "committed": counters.committed,
            **{f"rolled back: {_text(name)}": count for name, count in sorted(counters.rolled_back.items())},
            **{f"refused: {_text(name)}": count for name, count in sorted(counters.refused.items())},
            "retried": counters.retries,
            "tokens submitted": counters.tokens_submitted,
            "tokens committed": counters.tokens_committed,
            "tokens wasted": counters.tokens_wasted,
        },
        "evictions": {
            "device nodes": counters.device_evictions,
            "device tokens": counters.device_evicted_tokens,
            "of these without a host copy": counters.device_dropped_tokens,
            "host nodes": counters.host_evictions,
            "host tokens": counters.host_evicted_tokens,
            "reclaimed host copies": counters.reclaims,
            "write-back waits": counters.write_back_waits,
        },
        "load-backs": {
            "queued": counters.load_backs,
            **{f"refused: {_text(name)}": count for name, count in sorted(counters.load_refused.items())},
            "failed": counters.load_backs_failed,
        },
        "bytes": {
            "D2H": sum(result.transfer.d2h_bytes for result in results),
            "H2D": sum(result.transfer.h2d_bytes for result in results),
        },
        "agreement": {
            "ticks": first.ticks,
            "ticks with something in flight": counters.ticks_in_flight,
            "collectives": counters.reductions,
            "collectives in drain rounds": counters.drain_reductions,
            "collectives elsewhere (to reserve, evict, defer)": first.collectives - counters.reductions - counters.drain_reductions,
        },
        "ticks to host-visible": _spread(counters.ticks_to_visible),
        "seen": {
            "deferred splits": counters.deferred_splits,
            "declined inserts": counters.declined_inserts,
            "eviction-retries that succeeded": counters.eviction_retries_succeeded,
            "refused reservations": sum(counters.refused.values()),
            "zero-owned operations": sum(result.transfer.noop_completions for result in results),
            "rollbacks": sum(counters.rolled_back.values()),
            "aborts": served.aborted,
            "retractions": served.retracted,
            "duplicate binds": counters.duplicate_binds,
            "chunked prompts": served.chunked,
            "load-backs under eviction": counters.load_backs_under_eviction,
        },
        "checks": {
            "bytes compared": sum(result.verdict.bytes_checked for result in results),
            "mismatches": mismatches,
            "conservation checks": sum(result.checks for result in results),
            "leaks": sum(result.leaks for result in results),
        },
        "verify": config.verify,
        "evidence": [mismatch.describe() for result in results for mismatch in result.verdict.evidence],
        "refusals": served.refusals,
        "ranks": [_rank(result) for result in results],
        "ranks_agree": _ranks_agree(results),
    }


def missing(summary: Summary) -> list[str]:
    """What the default run should have seen and has not."""
    return [name for name in MUST_SEE if not summary["seen"][name]]


def table(summary: Summary) -> Table:
    """The summary for people."""
    out = Table(title="cphicache run", show_header=False, title_justify="left")
    out.add_column("what")
    out.add_column("detail")
    out.add_column("value", justify="right")
    for group, content in summary.items():
        if not isinstance(content, Mapping):
            continue
        for index, (name, value) in enumerate(content.items()):
            out.add_row(group if index == 0 else "", name, f"{value:,}" if isinstance(value, int) else str(value))
        out.add_section()
    return out


def _rank(result: RankResult) -> dict[str, Any]:
    """One rank's own figures."""
    return {
        "rank": result.rank,
        "ticks": result.ticks,
        "collectives": result.collectives,
        "waits": result.waits,
        "blocked ms": round(result.blocked_s * 1e3, 1),
        "longest wait ms": round(result.longest_s * 1e3, 1),
        "D2H": result.transfer.d2h_bytes,
        "H2D": result.transfer.h2d_bytes,
        "zero-owned operations": result.transfer.noop_completions,
        "bytes compared": result.verdict.bytes_checked,
        "mismatches": result.verdict.mismatches,
        "leaks": result.leaks,
        "quarantined": result.quarantined,
        "broken": result.broken,
        "gone": result.gone,
    }


def rank_table(results: Sequence[RankResult]) -> Table:
    """The figures rank by rank."""
    out = Table(title="by rank", title_justify="left")
    rows = [_rank(result) for result in results]
    out.add_column("what")
    for row in rows:
        out.add_column(f"rank {row['rank']}", justify="right")
    for name, value in rows[0].items():
        if name != "rank" and isinstance(value, int | float):
            out.add_row(name, *(f"{row[name]:,}" for row in rows))
    return out


def _ranks_agree(results: Sequence[RankResult]) -> bool:
    """Do all ranks report the same logical figures? (``stale`` holds local ones.)"""
    local = {"stale"}

    def logical(result: RankResult) -> list[object]:
        counters = [getattr(result.counters, name) for name in vars(result.counters) if name not in local]
        return [*counters, result.served.finished, result.served.tokens_device, result.served.tokens_host, result.ticks]

    return all(logical(result) == logical(results[0]) for result in results)


def _spread(ticks: Counter[int]) -> dict[str, int]:
    ordered = sorted(ticks.elements())
    if not ordered:
        return {"p50": 0, "p99": 0, "most": 0}
    return {"p50": ordered[len(ordered) // 2], "p99": ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)], "most": ordered[-1]}


def _text(name: object) -> str:
    return str(name).replace("_", " ")
