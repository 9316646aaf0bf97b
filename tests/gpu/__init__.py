"""Tests that need an NVIDIA GPU: marked ``gpu``, skipped with a reason where there is none; `make test-gpu` runs them."""

from __future__ import annotations

import pytest
import torch

NO_GPU = "no GPU: torch.cuda.is_available() is False"
NEEDS_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason=NO_GPU)]
"""Marks of a test, a module (``pytestmark``) or one parameter."""
SPIN_CYCLES = 400_000_000
"""A kernel that does nothing for a fifth of a second or so: long against every launch of a test."""


def hold_current_stream() -> None:
    """Keep the current CUDA stream busy for :data:`SPIN_CYCLES`."""
    torch.cuda._sleep(SPIN_CYCLES)
