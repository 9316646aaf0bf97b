"""A run looks for its host memory before it allocates any."""

from __future__ import annotations

import pytest

from cphicache.run.config import RunConfig
from cphicache.run.pools import require_memory
from cphicache.run.world import cache_config
from cphicache.transfer.budget import HostBudgetError, MemoryLimit


def test_a_run_fits_its_memory_or_says_what_does() -> None:
    """R31, R35: MLA of 40 elements x 2 bytes, 4 layers and a draft layer: 400 bytes a token; 8,192 tokens on four ranks: 819,200 a rank."""
    config = RunConfig(device_tokens=8192, host_tokens=8192)
    payloads = cache_config(config).payloads
    budget = require_memory(config, payloads, [])
    assert budget.token_bytes == {"target": 320, "draft": 80}
    assert (budget.slots, budget.size_bytes) == (config.host_tokens_per_rank, 819_200)
    enough = 4 * 819_200
    total = 8 * enough
    require_memory(config, payloads, [MemoryLimit("x", total, enough + total // 8)])
    with pytest.raises(
        HostBudgetError, match=r"--host-tokens 8192: needs 819200 bytes .* on each of 4 ranks here.*--host-tokens 8128$"
    ):
        require_memory(config, payloads, [MemoryLimit("x", total, enough + total // 8 - 1)])
