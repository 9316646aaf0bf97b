"""Types of the command line's numbers."""

from __future__ import annotations

import math
from typing import Any

import click

from cphicache.run.config import MOST_REQUESTS, MOST_TOKENS

TOKENS = click.IntRange(1, MOST_TOKENS)
"""Of a pool, or of a part of the work."""
REQUESTS = click.IntRange(1, MOST_REQUESTS)


class FiniteFloatRange(click.FloatRange):
    """A range without "not a number", which compares false with every bound, and without the infinities, which no bound may keep out."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """See click."""
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number
