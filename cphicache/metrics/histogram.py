"""A histogram of ticks."""

from __future__ import annotations

from bisect import bisect_left

from cphicache.metrics.names import TICK_BUCKETS


class TickHistogram:
    """Counts by bucket, written by one thread and read by another: what is read may be one observation behind itself."""

    __slots__ = ("_counts", "_sum")

    def __init__(self) -> None:
        self._counts = [0] * (len(TICK_BUCKETS) + 1)
        self._sum = 0

    def observe(self, ticks: int, times: int = 1) -> None:
        """Count a duration."""
        self._counts[bisect_left(TICK_BUCKETS, ticks)] += times
        self._sum += ticks * times

    def buckets(self) -> tuple[list[tuple[str, float]], float]:
        """(upper bound, count up to it) with +Inf last, and the sum."""
        total, out = 0, []
        for bound, count in zip([*map(str, TICK_BUCKETS), "+Inf"], list(self._counts), strict=True):
            total += count
            out.append((f"{bound}.0" if bound != "+Inf" else bound, float(total)))
        return out, float(self._sum)
