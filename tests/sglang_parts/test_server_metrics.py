"""Metrics as SGLang's server reads them: the files of prometheus_client's multi-process mode."""

from __future__ import annotations

from prometheus_client.metrics_core import HistogramMetricFamily

from cphicache.sglang.metrics import _series


def test_buckets_are_written_apart() -> None:
    """R40: a reader of the files adds buckets up itself, so that each is written without those below it, series by series."""
    family = HistogramMetricFamily("ticks", "Ticks", labels=["state"])
    family.add_metric(["a"], [("1.0", 2.0), ("2.0", 5.0), ("+Inf", 5.0)], 9.0)
    family.add_metric(["b"], [("1.0", 7.0), ("2.0", 7.0), ("+Inf", 8.0)], 20.0)
    written = {(name, *labels.values()): value for name, labels, value in _series(family)}
    assert written == {
        ("ticks_sum", "a"): 9.0, ("ticks_bucket", "a", "1.0"): 2.0, ("ticks_bucket", "a", "2.0"): 3.0, ("ticks_bucket", "a", "+Inf"): 0.0,
        ("ticks_sum", "b"): 20.0, ("ticks_bucket", "b", "1.0"): 7.0, ("ticks_bucket", "b", "2.0"): 0.0, ("ticks_bucket", "b", "+Inf"): 1.0,
    }  # fmt: skip
