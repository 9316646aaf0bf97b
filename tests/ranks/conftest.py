"""Ranks share the cores: torch's own threads would only stand in their way."""

from __future__ import annotations

from tests.run.conftest import one_torch_thread

__all__ = ["one_torch_thread"]
