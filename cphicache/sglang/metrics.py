"""``--enable-metrics``: cphicache's metrics beside SGLang's own, at the server's ``/metrics``.

SGLang's server collects what its processes write into the files of prometheus_client's multi-process mode. That mode knows no
collectors, so that the values of :class:`~cphicache.metrics.CacheMetrics` are copied there about once a second.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from prometheus_client import values
from prometheus_client.metrics_core import Metric as Family

from cphicache.engine import CpHiRadixCache
from cphicache.events import EventLog
from cphicache.metrics import CacheMetrics, TransferTotals

PERIOD_S = 1.0
"""Least time between two copies."""
FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
NOT_OURS = "cphicache_request_tokens"
"""Counted by SGLang (``sglang:cached_tokens_total``), not by the cache."""


class HostTokens:
    """The host pool as SGLang's metrics look at it (``sglang:hicache_host_used_tokens``); all ranks together."""

    def __init__(self, engine: CpHiRadixCache) -> None:
        self._engine = engine

    @property
    def logical_size(self) -> int:
        """Token slots."""
        return self._engine.config.host_slots * self._engine.config.cp_size

    def available_size(self) -> int:
        """Those that are free."""
        return self.logical_size - self._engine.state.ledger.used


class ServerMetrics:
    """The metrics of one scheduler process. ``token_bytes``: see :meth:`~cphicache.metrics.CacheMetrics.watch`."""

    def __init__(
        self, rank: int, cache: CpHiRadixCache, transfer: Callable[[], TransferTotals], *, token_bytes: int, log: EventLog | None
    ) -> None:
        self._rank = rank
        self._metrics = CacheMetrics()
        self._metrics.watch(rank, cache, transfer, token_bytes=token_bytes, log=log)
        self._published: dict[tuple[str, ...], Any] = {}
        self._due_s = 0.0

    @staticmethod
    def are_collected() -> bool:
        """Whether this process has the folder from which the server collects."""
        return FOLDER_VARIABLE in os.environ

    def tick(self) -> None:
        """Once a scheduler iteration: look at what is pending, and copy the values if it is time to."""
        self._metrics.tick(self._rank)
        now_s = time.monotonic()
        if now_s >= self._due_s:
            self._due_s = now_s + PERIOD_S
            self.publish()

    def publish(self) -> None:
        """Copy all values now."""
        for family in self._metrics.collect():
            if family.name != NOT_OURS:
                for name, labels, value in _series(family):
                    self._set(family, name, labels, value)

    def _set(self, family: Family, name: str, labels: dict[str, str], value: float) -> None:
        key = (name, *labels.values())
        series = self._published.get(key)
        if series is None:
            series = self._published[key] = values.ValueClass(
                family.type,
                family.name,
                name,
                tuple(labels),
                tuple(labels.values()),
                family.documentation,
                multiprocess_mode="livesum",
            )
        series.set(value)


def _series(family: Family) -> list[tuple[str, dict[str, str], float]]:
    """(name, labels, value) as the files have them: the count of each bucket alone, and no total, which the reader adds up."""
    if family.type != "histogram":
        return [(sample.name, sample.labels, sample.value) for sample in family.samples]
    series = [(sample.name, sample.labels, sample.value) for sample in family.samples if sample.name.endswith("_sum")]
    below = 0.0
    for sample in family.samples:
        if sample.name.endswith("_bucket"):
            series.append((sample.name, sample.labels, sample.value - below))
            below = 0.0 if sample.labels["le"] == "+Inf" else sample.value  # the last of its series
    return series
