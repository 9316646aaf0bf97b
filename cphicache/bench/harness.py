"""Measuring: samples of two sides in alternating rounds, their ratio by round, the median and the spread.

Absolute times drift with the machine, so that only figures of one round are set against each other. The garbage collector stays on,
as it is when serving; it runs before each sample so that no side pays for what the other left.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from math import log
from statistics import median
from typing import Any, Literal

Sampler = Callable[[int], float]
"""Does so many operations and returns the seconds that they took, without what was needed to set them up."""
Better = Literal["higher", "lower"]

clock = time.thread_time
"""Seconds of the CPU that this thread has had: what others do on a shared machine does not count. All sides run on one thread."""

CALIBRATION_LIMIT = 1 << 24
"""Most operations of one sample."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How long to measure. ``sample_s``: a sample takes about so long; ``shrink``: what is made big is divided by this."""

    rounds: int = 7
    sample_s: float = 0.1
    shrink: int = 1

    def __post_init__(self) -> None:
        if self.rounds < 1 or self.shrink < 1 or self.sample_s < 0:
            raise ValueError(f"effort {self}: give at least one round, shrink of at least 1 and a sample_s that is not negative")

    def size(self, full: int, least: int = 1) -> int:
        """A size of that many at full effort."""
        return max(least, full // self.shrink)


@dataclass(frozen=True, slots=True)
class Target:
    """What a figure must reach, and what it should."""

    better: Better
    must: float
    aim: float

    def met(self, value: float, bound: float) -> bool:
        """Whether a value is on the good side of a bound."""
        return value >= bound if self.better == "higher" else value <= bound


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, lowest and highest of the rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        """Of at least one value."""
        return cls(median(values), min(values), max(values))


@dataclass(frozen=True, slots=True)
class Measured:
    """What one row gave. ``unit``: ``x`` for a ratio. ``details``: figures of the sides, for the reader."""

    value: Spread
    unit: str
    rounds: int
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Bench:
    """A row of the table. ``target`` is None for figures of our own that nothing was set for."""

    name: str
    what: str
    target: Target | None
    measure: Callable[[Effort], Measured]


class PeerMissing(RuntimeError):
    """What a row is set against is not installed here. The text says what to do."""


def looped(loop: Callable[[int], object]) -> Sampler:
    """A sampler of a function that does all of its operations in one go."""

    def sample(operations: int) -> float:
        start = clock()
        loop(operations)
        return clock() - start

    return sample


def calibrated(sampler: Sampler, sample_s: float) -> int:
    """Operations that take about ``sample_s``; what is tried on the way warms up."""
    operations = 1
    while operations < CALIBRATION_LIMIT:
        took_s = sampler(operations)
        if took_s >= sample_s:
            break
        grown = operations * 2 if took_s <= 0 else int(operations * min(8.0, max(1.3, 1.1 * sample_s / took_s))) + 1
        operations = min(CALIBRATION_LIMIT, grown)
    return operations


def times_us(samplers: dict[str, Sampler], effort: Effort) -> dict[str, list[float]]:
    """Microseconds an operation by side and round. Sides take turns, and every other round in the opposite order."""
    counts = {name: calibrated(sampler, effort.sample_s) for name, sampler in samplers.items()}
    found: dict[str, list[float]] = {name: [] for name in samplers}
    order = list(samplers)
    for number in range(effort.rounds):
        for name in order if number % 2 == 0 else reversed(order):
            gc.collect()
            found[name].append(samplers[name](counts[name]) / counts[name] * 1e6)
    return found


def ratio(numerator: str, denominator: str, samplers: dict[str, Sampler], effort: Effort, scale: float = 1.0) -> Measured:
    """Time of one side over that of another, by round, times ``scale``."""
    found = times_us(samplers, effort)
    by_round = [scale * one / other for one, other in zip(found[numerator], found[denominator], strict=True)]
    return Measured(Spread.of(by_round), "x", effort.rounds, _sides(found))


def cost_us(ours: str, samplers: dict[str, Sampler], effort: Effort) -> Measured:
    """Time of one side in microseconds; the other sides are stated beside it."""
    found = times_us(samplers, effort)
    return Measured(Spread.of(found[ours]), "us", effort.rounds, _sides(found))


def _sides(found: dict[str, list[float]]) -> dict[str, Any]:
    return {f"{name} us": round(median(values), 4) for name, values in found.items()}


def slope(sizes: list[int], costs: list[float]) -> float:
    """Exponent of growth: least squares through (log size, log cost). 0: flat, 1: linear."""
    if len(sizes) < 2:
        raise ValueError(f"slope of {len(sizes)} sizes: give at least two")
    xs, ys = [log(size) for size in sizes], [log(cost) for cost in costs]
    middle_x, middle_y = sum(xs) / len(xs), sum(ys) / len(ys)
    above = sum((x - middle_x) * (y - middle_y) for x, y in zip(xs, ys, strict=True))
    return above / sum((x - middle_x) ** 2 for x in xs)
