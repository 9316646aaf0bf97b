"""Prometheus metrics of a cache (R40)."""

from cphicache.metrics.collector import CacheMetrics, TierTokens, TransferTotals
from cphicache.metrics.names import METRICS, Metric, exposed_names

__all__ = ["METRICS", "CacheMetrics", "Metric", "TierTokens", "TransferTotals", "exposed_names"]
