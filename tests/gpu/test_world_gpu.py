"""The whole run on a real GPU: engine, scheduler, pools, CUDA streams; every reused byte is compared."""

from __future__ import annotations

import pytest

from cphicache.run.config import RunConfig
from cphicache.run.jobs import load_requests
from cphicache.run.pools import require_backend
from cphicache.run.world import run_world
from cphicache.transfer.backends import BackendUnavailable
from cphicache.transfer.support import SUPPORT, Support
from tests.gpu import NEEDS_GPU

pytestmark = NEEDS_GPU
ROWS = [pytest.param(row, id=f"{row.kind}-{row.layout}-{row.io_backend}") for row in SUPPORT if row.reason is None]


@pytest.mark.parametrize("row", ROWS)
def test_a_run_on_the_gpu_has_no_mismatch(row: Support) -> None:
    """R33, R34: a trace on two CP ranks, with a draft, over CUDA streams and pinned pools: no wrong byte, no leak, host hits happened."""
    config = RunConfig(
        streams="cuda",
        kv=row.kind,
        layout=row.layout,
        backend=row.io_backend,
        cp_size=2,
        requests=60,
        device_tokens=2048,
        host_tokens=4096,
    )  # type: ignore[arg-type]
    try:
        require_backend(config)
    except BackendUnavailable as error:
        pytest.skip(str(error))
    results = run_world(config, load_requests(config))
    for result in results:
        assert result.verdict.mismatches == 0, result.verdict.evidence[0].describe()
        assert result.leaks == 0
        assert result.served.tokens_host > 0
        assert result.transfer.failed_copies == 0
