"""Percentiles of many whole numbers in little memory."""

from __future__ import annotations

from collections import Counter

EXACT_BELOW = 256
"""Numbers below this are counted as they are; above, a bucket is 1/64 of its octave wide, so a percentile is at most 1.6 % low."""
_BITS = 6


class Spread:
    """Counts of whole numbers >= 0, exact when small. Holds at most a few thousand buckets whatever it is given."""

    __slots__ = ("_buckets", "count", "most", "total")

    def __init__(self) -> None:
        self._buckets: Counter[int] = Counter()
        self.count = 0
        self.total = 0
        self.most = 0

    def add(self, value: int) -> None:
        """Count one number; a negative one (a clock that went back) counts as 0."""
        value = max(value, 0)
        if value >= EXACT_BELOW:
            shift = value.bit_length() - 1 - _BITS
            self._buckets[value >> shift << shift] += 1
        else:
            self._buckets[value] += 1
        self.count += 1
        self.total += value
        self.most = max(self.most, value)

    def percentile(self, share: float) -> int:
        """The smallest counted number that ``share`` of all do not exceed; 0 when nothing was counted."""
        left = share * self.count
        for value in sorted(self._buckets):
            left -= self._buckets[value]
            if left <= 0:
                return value
        return self.most

    def summary(self) -> dict[str, int | float]:
        """count, p50, p95, p99, most and mean."""
        return {
            "count": self.count,
            "p50": self.percentile(0.50),
            "p95": self.percentile(0.95),
            "p99": self.percentile(0.99),
            "most": self.most,
            "mean": round(self.total / self.count, 3) if self.count else 0,
        }
