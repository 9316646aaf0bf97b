"""Metrics from the counters that the cache keeps anyway: read when scraped, plus a look at what is pending once a tick.

Nothing is done on the hot path. Counters are read by the thread that answers a scrape: plain integers, and the answer may be one
event behind itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from cphicache.engine import CpHiRadixCache
from cphicache.events import EventLog
from cphicache.metrics.histogram import TickHistogram
from cphicache.metrics.names import METRICS, PENDING_STATES, PREFIX


class TransferTotals(Protocol):
    """Totals of a rank's copies, as :attr:`cphicache.transfer.rank.RankTransfer.counters` gives them."""

    @property
    def d2h_bytes(self) -> int:
        """Bytes copied to the host."""

    @property
    def h2d_bytes(self) -> int:
        """Bytes copied to the device."""

    @property
    def copies(self) -> int:
        """Layer copies."""

    @property
    def failed_copies(self) -> int:
        """Those of them that failed."""

    @property
    def noop_completions(self) -> int:
        """Operations of which the rank owns nothing."""


class TierTokens(Protocol):
    """Where requests' tokens came from; counted by the scheduler."""

    @property
    def tokens_device(self) -> int:
        """Device hits."""

    @property
    def tokens_host(self) -> int:
        """Host hits."""

    @property
    def tokens_computed(self) -> int:
        """Computed."""


class CacheMetrics(Collector):
    """Metrics of the ranks that live in this process, registered with ``registry``: the host's, or a new one of its own.

    :meth:`watch` each rank, then call :meth:`tick` for it once a scheduler step, on its thread. All series of a rank are there, as
    zeros, from :meth:`watch` on.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = CollectorRegistry() if registry is None else registry
        self._ranks: dict[int, _RankMetrics] = {}
        self.registry.register(self)

    def watch(
        self,
        rank: int,
        cache: CpHiRadixCache,
        transfer: Callable[[], TransferTotals],
        *,
        token_bytes: int,
        tokens: TierTokens | None = None,
        log: EventLog | None = None,
    ) -> None:
        """Take a rank in. ``transfer`` gives its totals; ``token_bytes`` is the size of a token's KV over all layers and payloads.

        Raises ValueError for a rank that is watched already.
        """
        if rank in self._ranks:
            raise ValueError(f"rank {rank} is watched already: give each cache of the process a rank of its own")
        self._ranks[rank] = _RankMetrics(cache, transfer, token_bytes, tokens, log)

    def tick(self, rank: int) -> None:
        """Look at what is pending on a rank. Costs a few microseconds and one a pending backup."""
        self._ranks[rank].tick()

    def collect(self) -> Iterator[Family]:
        """See :class:`prometheus_client.registry.Collector`."""
        ranks = {str(rank): metrics.values() for rank, metrics in list(self._ranks.items())}
        histograms = {str(rank): metrics.histograms for rank, metrics in list(self._ranks.items())}
        for name, metric in METRICS.items():
            labels = ["rank", metric.label] if metric.label else ["rank"]
            family: Family
            if metric.kind == "histogram":
                family = self._histogram(name, labels, histograms)
            else:
                kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
                family = made = kind(PREFIX + name, metric.help, labels=labels)
                for rank, values in ranks.items():
                    for value in metric.values:
                        made.add_metric([rank, value] if metric.label else [rank], values[name].get(value, 0))
            yield family

    @staticmethod
    def _histogram(
        name: str, labels: list[str], ranks: Mapping[str, Mapping[tuple[str, str], TickHistogram]]
    ) -> HistogramMetricFamily:
        metric = METRICS[name]
        family = HistogramMetricFamily(PREFIX + name, metric.help, labels=labels)
        for rank, histograms in ranks.items():
            for value in metric.values:
                buckets, total = histograms[name, value].buckets()
                family.add_metric([rank, value] if metric.label else [rank], buckets, total)
        return family


class _RankMetrics:
    """One rank: what :meth:`tick` has seen of pending backups and load-backs, and the way to the counters."""

    def __init__(
        self,
        cache: CpHiRadixCache,
        transfer: Callable[[], TransferTotals],
        token_bytes: int,
        tokens: TierTokens | None,
        log: EventLog | None,
    ) -> None:
        self._cache = cache
        self._transfer = transfer
        self._token_bytes = token_bytes
        self._tokens = tokens
        self._log = log
        self._seen: dict[tuple[int, int], tuple[str, int]] = {}
        self._loads: dict[int, int] = {}
        self._reserved = 0
        self._slots = dict.fromkeys(PENDING_STATES, 0)
        self._pending = dict.fromkeys(PENDING_STATES, 0)
        self._visible: dict[int, int] = {}
        self.histograms = {
            (name, value): TickHistogram()
            for name, metric in METRICS.items()
            if metric.kind == "histogram"
            for value in metric.values
        }

    # -- once a tick ------------------------------------------------------------------------------------------------------------
    def tick(self) -> None:
        """See :meth:`CacheMetrics.tick`."""
        state = self._cache.state
        pending, slots = dict.fromkeys(PENDING_STATES, 0), dict.fromkeys(PENDING_STATES, 0)
        seen: dict[tuple[int, int], tuple[str, int]] = {}
        unseen = state.counters.reserved - self._reserved
        self._reserved = state.counters.reserved
        for record in state.pending.values():
            key, now = (record.node_id, record.generation), record.state.value
            pending[now] += 1
            slots[now] += sum(record.need) + sum(record.wasted_need)
            before = self._seen.pop(key, None)
            if before is None:
                unseen -= 1
                for passed in PENDING_STATES[: PENDING_STATES.index(now)]:
                    self.histograms["backup_state_ticks", passed].observe(0)
                before = (now, state.tick)
            elif before[0] != now:
                self.histograms["backup_state_ticks", before[0]].observe(state.tick - before[1])
                before = (now, state.tick)
            seen[key] = before
        for last, since in self._seen.values():
            self.histograms["backup_state_ticks", last].observe(state.tick - since)
        if unseen > 0:  # reserved and ended since the last look
            self.histograms["backup_state_ticks", PENDING_STATES[0]].observe(0, unseen)
        self._seen, self._pending, self._slots = seen, pending, slots
        self._follow_loads()
        for ticks, count in state.counters.ticks_to_visible.items():
            more = count - self._visible.get(ticks, 0)
            if more:
                self.histograms["host_visible_ticks", ""].observe(ticks, more)
                self._visible[ticks] = count

    def _follow_loads(self) -> None:
        state = self._cache.state
        histogram = self.histograms["load_back_ticks", ""]
        for load_id in [load_id for load_id in self._loads if load_id not in state.loads]:
            histogram.observe(state.tick - self._loads.pop(load_id))
        for load_id, load in state.loads.items():
            self._loads.setdefault(load_id, load.queued_tick)

    # -- when scraped -------------------------------------------------------------------------------------------------------------
    def values(self) -> dict[str, Mapping[str, float]]:
        """Values by metric and label value; a value that is not there is 0."""
        state, counters, copied = self._cache.state, self._cache.state.counters, self._transfer()
        config = state.config
        total_slots, used = config.host_slots * config.cp_size, state.ledger.used
        pending_slots = self._slots
        tokens = self._tokens
        return {
            "ticks": {"": state.tick},
            "backups": {"reserved": counters.reserved, "committed": counters.committed},
            "backups_rolled_back": counters.rolled_back,
            "backups_refused": counters.refused,
            "backup_retries": {"": counters.retries},
            "eviction_retries": {"succeeded": counters.eviction_retries_succeeded, "failed": counters.eviction_retries_failed},
            "backups_pending": self._pending,
            "backup_tokens": {
                "submitted": counters.tokens_submitted,
                "committed": counters.tokens_committed,
                "wasted": counters.tokens_wasted,
            },
            "copied_bytes": {"d2h": copied.d2h_bytes, "h2d": copied.h2d_bytes},
            "wasted_bytes": {"": counters.tokens_wasted * self._token_bytes},
            "copies": {"done": copied.copies, "failed": copied.failed_copies},
            "owned_nothing": {"": copied.noop_completions},
            "stale": counters.stale,
            "host_slots": {
                "FREE": total_slots - used,
                **pending_slots,
                "COMMITTED": max(used - sum(pending_slots.values()), 0),
            },
            "device_tokens": {
                "free": self._cache.available_size(),
                "evictable": self._cache.evictable_size(),
                "protected": self._cache.protected_size(),
            },
            "evicted_tokens": {
                "device": counters.device_evicted_tokens,
                "dropped": counters.device_dropped_tokens,
                "host": counters.host_evicted_tokens,
            },
            "reclaims": {"": counters.reclaims},
            "splits": {"": counters.splits},
            "deferrals": {
                "split": counters.deferred_splits,
                "expired": counters.deferrals_expired,
                "insert_declined": counters.declined_inserts,
                "insert_parked": counters.parked_inserts,
                "insert_dropped": counters.parked_dropped,
                "write_back": counters.write_back_waits,
            },
            "duplicate_tokens": {"": counters.duplicate_tokens},
            "load_backs": {
                "queued": counters.load_backs,
                "under_eviction": counters.load_backs_under_eviction,
                "failed": counters.load_backs_failed,
            },
            "load_back_tokens": {"": counters.load_back_tokens},
            "load_backs_refused": counters.load_refused,
            "collectives": {"tick": counters.reductions, "drain": counters.drain_reductions},
            "ticks_in_flight": {"": counters.ticks_in_flight},
            "request_tokens": {}
            if tokens is None
            else {"device": tokens.tokens_device, "host": tokens.tokens_host, "computed": tokens.tokens_computed},
            "events_lost": {"": 0 if self._log is None else self._log.lost},
        }
