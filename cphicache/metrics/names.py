"""Every metric: name, kind, help text, label and its values. Label values come from closed sets, so the number of series is bounded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from cphicache.engine.records import Refusal
from cphicache.lifecycle import PENDING, ROWS, State

PREFIX = "cphicache_"
TICK_BUCKETS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Upper bounds of histograms of ticks."""


class Metric(NamedTuple):
    """``name`` without the prefix (and without ``_total``); each series also has the label ``rank``. ``label`` is "" without one."""

    kind: Literal["counter", "gauge", "histogram"]
    help: str
    label: str = ""
    values: tuple[str, ...] = ("",)


PENDING_STATES = tuple(state.value for state in State if state in PENDING)
ROLLBACK_CAUSES = tuple(
    dict.fromkeys(row.trigger.value for row in ROWS if row.dest is State.ROLLED_BACK and row.source is not State.ROLLED_BACK)
)
STALE_NAMES = tuple(dict.fromkeys(row.stale for row in ROWS if row.stale is not None))
LOAD_REFUSALS = (Refusal.BELOW_THRESHOLD, Refusal.OVER_QUOTA, Refusal.NO_DEVICE_PAGES, Refusal.NOTHING_TO_LOAD)
BACKUP_REFUSALS = tuple(reason for reason in Refusal if reason not in LOAD_REFUSALS)

METRICS: Mapping[str, Metric] = {
    "ticks": Metric("counter", "Scheduler steps"),
    "backups": Metric("counter", "Backups by outcome", "outcome", ("reserved", "committed")),
    "backups_rolled_back": Metric("counter", "Backups rolled back by cause", "cause", ROLLBACK_CAUSES),
    "backups_refused": Metric("counter", "Reservations refused by reason", "reason", tuple(r.value for r in BACKUP_REFUSALS)),
    "backup_retries": Metric("counter", "Nodes tried again after a refusal or a rollback"),
    "eviction_retries": Metric(
        "counter", "Reservations tried again after host eviction, by outcome", "outcome", ("succeeded", "failed")
    ),
    "backups_pending": Metric("gauge", "Backups pending by state", "state", PENDING_STATES),
    "backup_state_ticks": Metric(
        "histogram", "Ticks that backups spent in a state; a state passed within one tick counts as 0", "state", PENDING_STATES
    ),
    "host_visible_ticks": Metric("histogram", "Ticks from the end of the forward that stored the last layer to host-visible"),
    "backup_tokens": Metric("counter", "Tokens of backups by fate", "fate", ("submitted", "committed", "wasted")),
    "copied_bytes": Metric("counter", "Bytes copied by direction; the rate is the bandwidth", "direction", ("d2h", "h2d")),
    "wasted_bytes": Metric("counter", "Bytes of submitted backups that were duplicates or rolled back, all ranks together"),
    "copies": Metric("counter", "Layer copies by outcome", "outcome", ("done", "failed")),
    "owned_nothing": Metric("counter", "Backups and load-backs of which this rank owns nothing"),
    "stale": Metric("counter", "Stale no-ops by name", "reason", STALE_NAMES),
    "host_slots": Metric(
        "gauge",
        "Host slots by state, all ranks together, in each payload",
        "state",
        ("FREE", *PENDING_STATES, State.COMMITTED.value),
    ),
    "device_tokens": Metric("gauge", "Device tokens by state, all ranks together", "state", ("free", "evictable", "protected")),
    "evicted_tokens": Metric(
        "counter", "Tokens evicted by tier; dropped: from the device without a host copy", "tier", ("device", "dropped", "host")
    ),
    "reclaims": Metric("counter", "Host copies reclaimed from nodes that are on the device"),
    "splits": Metric("counter", "Nodes divided"),
    "deferrals": Metric(
        "counter",
        "Waits for a pending backup by kind",
        "kind",
        ("split", "expired", "insert_declined", "insert_parked", "insert_dropped", "write_back"),
    ),
    "duplicate_tokens": Metric("counter", "Tokens that a request computed and the tree had already"),
    "load_backs": Metric("counter", "Load-backs by outcome", "outcome", ("queued", "under_eviction", "failed")),
    "load_back_tokens": Metric("counter", "Tokens loaded back"),
    "load_backs_refused": Metric("counter", "Load-backs refused by reason", "reason", tuple(r.value for r in LOAD_REFUSALS)),
    "load_back_ticks": Metric("histogram", "Ticks from queueing a load-back to its end on every rank"),
    "collectives": Metric("counter", "Reductions by kind", "kind", ("tick", "drain")),
    "ticks_in_flight": Metric("counter", "Ticks with something numbered and not agreed"),
    "request_tokens": Metric("counter", "Tokens of requests by where they came from", "tier", ("device", "host", "computed")),
    "events_lost": Metric("counter", "Events that the log's buffer had no room for"),
}


def exposed_names() -> frozenset[str]:
    """Names of all series as a scrape shows them, with the suffixes of counters and histograms."""
    names = set()
    for name, metric in METRICS.items():
        if metric.kind == "counter":
            names.add(f"{PREFIX}{name}_total")
        elif metric.kind == "gauge":
            names.add(f"{PREFIX}{name}")
        else:
            names.update(f"{PREFIX}{name}_{suffix}" for suffix in ("bucket", "count", "sum"))
    return frozenset(names)
