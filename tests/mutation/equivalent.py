"""Mutants that no test can tell from the original, each with the reason."""

from __future__ import annotations

EQUIVALENT: dict[str, str] = {}
