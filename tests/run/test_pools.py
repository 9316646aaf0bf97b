"""Whole runs over every supported kind, layout and backend: every reused byte is right."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from click.testing import CliRunner

from cphicache.run.cli import main
from cphicache.run.config import RunConfig
from cphicache.run.jobs import load_requests
from cphicache.run.world import run_world
from cphicache.transfer.support import SUPPORT

ON_CPU = [row for row in SUPPORT if row.reason is None and row.io_backend != "triton"]
SMALL = RunConfig(requests=24, cp_size=2, layers=3, draft_layers=2, device_tokens=2048, host_tokens=8192)


@cache
def requests() -> tuple[object, ...]:
    return tuple(load_requests(SMALL))


@pytest.mark.parametrize("row", ON_CPU, ids=lambda row: "-".join(row[:3]))
def test_every_supported_combination_serves_without_a_wrong_byte(row: tuple[str, ...]) -> None:
    """R31, R32: target, draft and indexer keys of a run go out and come back by each kind, layout and backend, with the operators'
    stand-ins for kernel and direct; no byte, slot or copy is wrong, and bytes went both ways."""
    kind, layout, io_backend = row[:3]
    config = replace(
        SMALL,
        kv=kind,  # type: ignore[arg-type]
        kv_dtype="fp8_e4m3" if kind == "mha" else "fp8_packed" if layout == "page_first_direct" else "bf16",
        layout=layout,  # type: ignore[arg-type]
        backend=io_backend,  # type: ignore[arg-type]
        index_every=2,
        reference_operators=io_backend in ("kernel", "direct"),
    )
    for result in run_world(config, list(requests())):  # type: ignore[arg-type]
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
    result = CliRunner().invoke(main, ["run", "--requests", "1", *options], env={"TRITON_INTERPRET": "0"})
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("cphicache: ")
    assert why in line
