"""Whole runs over every supported kind, layout and backend: every reused byte is right."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from click.testing import CliRunner

from cphicache.run.cli import main
from cphicache.run.config import RunConfig
from cphicache.run.jobs import load_requests
from cphicache.run.trace import TraceRequest
from cphicache.run.world import run_world
from cphicache.transfer.backends import copy_backend
from cphicache.transfer.support import SUPPORT, Support

SUPPORTED = [row for row in SUPPORT if row.reason is None]
SMALL = RunConfig(requests=24, cp_size=2, layers=3, draft_layers=2, device_tokens=2048, host_tokens=8192)
TINY = RunConfig(requests=16, cp_size=1, layers=2, draft_layers=1, device_tokens=240, host_tokens=4096, chunk_tokens=64, scale=0.02)
"""For Triton's interpreter, which is slow."""


@cache
def requests(config: RunConfig) -> tuple[TraceRequest, ...]:
    return tuple(load_requests(config))


@pytest.mark.parametrize("row", SUPPORTED, ids=lambda row: "-".join(row[:3]))
def test_every_supported_combination_serves_without_a_wrong_byte(row: Support, monkeypatch: pytest.MonkeyPatch) -> None:
    """R31, R32: target, draft and indexer keys of a run go out and come back by each kind, layout and backend, with the operators'
    stand-ins for kernel and direct and Triton's interpreter; no byte, slot or copy is wrong, and bytes went both ways."""
    kind, layout, io_backend = row[:3]
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    copy_backend.cache_clear()
    base = TINY if io_backend == "triton" else SMALL
    config = replace(
        base,
        kv=kind,  # type: ignore[arg-type]
        kv_dtype="fp8_e4m3" if kind == "mha" else "fp8_packed" if layout == "page_first_direct" else "bf16",
        layout=layout,  # type: ignore[arg-type]
        backend=io_backend,  # type: ignore[arg-type]
        index_every=2,
        reference_operators=io_backend in ("kernel", "direct"),
    )
    results = run_world(config, list(requests(base)))
    copy_backend.cache_clear()
    for result in results:
        assert result.verdict.mismatches == 0, result.verdict.evidence
        assert (result.leaks, result.transfer.failed_copies) == (0, 0)
        assert result.verdict.bytes_checked > 0
        assert min(result.transfer.d2h_bytes, result.transfer.h2d_bytes) > 0


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--backend", "kernel"], "pip install 'cphicache[cuda]'"),
        (["--backend", "direct", "--layout", "page_first_direct"], "pip install 'cphicache[cuda]'"),
        (["--backend", "triton"], "needs a GPU"),
        (["--kv-dtype", "fp8_token_scales"], "its scales lie in a buffer of their own"),
    ],
)
def test_a_backend_that_cannot_run_here_is_one_line(options: list[str], why: str) -> None:
    """R32, R35: without package or GPU, and without asking for the stand-ins, nothing is served: one line says what to do, status 2."""
    copy_backend.cache_clear()
    result = CliRunner().invoke(main, ["run", "--requests", "1", *options], env={"TRITON_INTERPRET": "0"})
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("cphicache: ")
    assert why in line
