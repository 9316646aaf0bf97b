"""Counts of what an engine did. All of it is logical (equal on every rank) unless it says "local"."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Counters:
    """Totals since construction; tokens where the name says so, operations or ticks elsewhere."""

    reserved: int = 0
    committed: int = 0
    rolled_back: Counter[str] = field(default_factory=Counter)
    """Rollbacks by the trigger that caused them."""
    refused: Counter[str] = field(default_factory=Counter)
    """Refused reservations by reason."""
    stale: Counter[str] = field(default_factory=Counter)
    """Stale no-ops by name (local ones included)."""
    retries: int = 0
    tokens_submitted: int = 0
    tokens_committed: int = 0
    tokens_wasted: int = 0
    """Tokens of submitted operations that were duplicates or rolled back."""
    eviction_retries_succeeded: int = 0
    eviction_retries_failed: int = 0
    host_evictions: int = 0
    host_evicted_tokens: int = 0
    reclaims: int = 0
    device_evictions: int = 0
    device_evicted_tokens: int = 0
    device_dropped_tokens: int = 0
    splits: int = 0
    deferred_splits: int = 0
    deferrals_expired: int = 0
    declined_inserts: int = 0
    parked_inserts: int = 0
    parked_dropped: int = 0
    duplicate_binds: int = 0
    duplicate_tokens: int = 0
    adopted_tokens: int = 0
    load_backs: int = 0
    load_back_tokens: int = 0
    load_backs_under_eviction: int = 0
    load_backs_failed: int = 0
    load_refused: Counter[str] = field(default_factory=Counter)
    reductions: int = 0
    ticks_in_flight: int = 0
    drain_reductions: int = 0
    write_back_waits: int = 0
    ticks_to_visible: Counter[int] = field(default_factory=Counter)
    """Backups by ticks from the end of the forward that stored the last layer to host-visible."""
