"""`cphicache doctor` without a GPU: every combination is tried, what is wrong is found and said."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from cphicache.run import doctor, doctor_copies
from cphicache.run.cli import main
from cphicache.run.doctor import ON_CPU_NOTE, PairResult, Report, examine
from cphicache.run.doctor_command import doctor_command
from cphicache.run.doctor_copies import Way, ways
from cphicache.transfer.backends import make_backend
from cphicache.transfer.backends.port import RowPair, RowPlan
from cphicache.transfer.backends.rows import RowsBackend
from cphicache.transfer.backends.torch_backend import TorchBackend
from cphicache.transfer.support import SUPPORT, Support, support_of

Fault = Callable[[TorchBackend, Sequence[RowPair], RowPlan], None]


def test_every_combination_is_tried_or_refused_for_its_reason(tmp_path: Path) -> None:
    """R32: each row of the table appears: what is supported copies right bytes here, and the rest carries the table's reason."""
    out = tmp_path / "doctor.json"
    result = CliRunner().invoke(doctor_command, ["--device", "cpu", "--json", "--out", str(out)])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert json.loads(out.read_text()) == report
    found = Counter((pair["kind"], pair["layout"], pair["io_backend"]) for pair in report["pairs"])
    twice = {("mla", "page_first", "kernel"), ("mha", "page_first", "kernel"), ("dsa", "page_first", "kernel")}
    assert found == Counter({(row.kind, row.layout, row.io_backend): 1 for row in SUPPORT} | dict.fromkeys(twice, 2))
    for pair in report["pairs"]:
        reason = support_of(pair["kind"], pair["layout"], pair["io_backend"]).reason
        assert (pair["status"], pair["reason"]) == (("ok", "") if reason is None else ("unsupported", reason)), pair
        assert pair["d2h_layer_gb_per_s"] is None
    assert {pair["runs_on"] for pair in report["pairs"]} == {
        "",
        "cpu",
        "reference operators",
        "reference operators, triton D2H",
        "Triton's interpreter",
    }
    assert report["healthy"] is True
    assert report["gpu"] is None
    assert report["notes"] == [ON_CPU_NOTE]
    assert report["verdict"].startswith("33 ok, 6 unsupported; not verified on a GPU")
    assert report["packages"]["torch"].startswith(torch.__version__.split("+")[0])


def last_row_missing(backend: TorchBackend, pairs: Sequence[RowPair], plan: RowPlan) -> None:
    for source, destination in pairs:
        for row, to in list(zip(plan.source_rows.tolist(), plan.destination_rows.tolist(), strict=True))[:-1]:
            destination.flatten(0, -2)[to] = source.flatten(0, -2)[row]


def one_byte_too_many(backend: TorchBackend, pairs: Sequence[RowPair], plan: RowPlan) -> None:
    for source, destination in pairs:
        for row, to in zip(plan.source_rows.tolist(), plan.destination_rows.tolist(), strict=True):
            destination[to] = source[row]
        destination[-1, -1] ^= 1


def source_is_spoilt(backend: TorchBackend, pairs: Sequence[RowPair], plan: RowPlan) -> None:
    for source, destination in pairs:
        for row, to in zip(plan.source_rows.tolist(), plan.destination_rows.tolist(), strict=True):
            destination[to] = source[row]
        source[-1, -1] ^= 1


def driver_refuses(backend: TorchBackend, pairs: Sequence[RowPair], plan: RowPlan) -> None:
    raise OSError("invalid device address")


ROW = support_of("mla", "layer_first", "torch")


def examined(fault: Fault) -> PairResult:
    """The first pair, with a backend that copies as ``fault`` does."""
    faulty = type("Faulty", (TorchBackend,), {"copy_rows": fault})()

    def only_first(row: Support, device_type: str) -> list[Callable[[], Way]]:
        return [lambda: Way(RowsBackend(faulty), device_type)] if row == ROW else []

    report = examine(device="cpu", find_ways=only_first)
    assert not report.healthy
    return report.pairs[0]


@pytest.mark.parametrize(
    ("fault", "status", "reason"),
    [
        (last_row_missing, "wrong bytes", "backup of layer 1, destination: layer 1 latent slot 31 byte 0: expected 0x"),
        (one_byte_too_many, "wrong bytes", "backup of layer 1, destination: layer 1 latent slot 127 byte 1151: expected 0x"),
        (source_is_spoilt, "wrong bytes", "backup of layer 1, source: layer 1 latent slot 127 byte 1151: expected 0x"),
        (driver_refuses, "failed", "OSError: invalid device address"),
    ],
)
def test_a_copy_that_is_wrong_is_found(fault: Fault, status: str, reason: str) -> None:
    """R33: a missing row, a byte too many, a spoilt source and an error of the driver are each told with where and what."""
    found = examined(fault)
    assert found.status == status
    assert found.reason.startswith(reason)


def test_wrong_bytes_are_exit_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    """R33: when a pair copies wrong bytes the command says which and ends with 1."""
    monkeypatch.setattr(TorchBackend, "copy_rows", last_row_missing)
    result = CliRunner().invoke(doctor_command, ["--device", "cpu"])
    assert result.exit_code == 1
    assert "mla/layer_first/torch" in result.stdout
    assert "wrong bytes: backup of layer 1, destination" in result.stdout


def test_a_missing_package_is_unavailable_and_not_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """R32: without triton its pairs are told unavailable, with what to install, and nothing is wrong."""
    monkeypatch.setitem(sys.modules, "cphicache.transfer.backends.triton_kernels", None)
    monkeypatch.delattr("cphicache.transfer.backends.triton_kernels", raising=False)
    result = CliRunner().invoke(doctor_command, ["--device", "cpu"])
    assert result.exit_code == 0, result.output
    assert "pip install 'cphicache[triton]'" in result.stdout
    assert "21 ok, 12 unavailable, 6 unsupported" in result.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_exit_status_2() -> None:
    """R35: asking for a GPU that is not there is one line and 2, for the doctor and for a run."""
    for arguments, text in (
        (["doctor", "--device", "cuda"], "cphicache: --device cuda: no GPU"),
        (["run", "--streams", "cuda"], "cphicache: --streams cuda: no GPU"),
    ):
        result = CliRunner().invoke(main, arguments)
        assert result.exit_code == 2
        assert result.stderr.startswith(text)
        assert result.stderr.count("\n") == 1


def test_a_report_that_cannot_be_written_is_exit_status_2(tmp_path: Path) -> None:
    """R35: an --out that cannot be written is one line and 2."""
    result = CliRunner().invoke(doctor_command, ["--device", "cpu", "--out", str(tmp_path / "no" / "such.json")])
    assert result.exit_code == 2
    assert "such.json: cannot be written" in result.stderr


def test_on_a_gpu_nothing_is_a_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """R32: with a GPU every backend runs on its package and on that device: neither on reference operators nor in an interpreter."""
    asked: list[tuple[str, dict[str, object]]] = []

    def made(name: str, **options: object) -> object:
        asked.append((name, options))
        return make_backend("torch")

    monkeypatch.setattr(doctor_copies, "make_backend", made)
    found = {
        (row.kind, row.io_backend, way.runs_on, way.operators)
        for row in SUPPORT
        if row.reason is None and row.layout == "page_first" and row.kind == "mla"
        for find in ways(row, "cuda")
        for way in [find()]
    }
    assert found == {("mla", name, "cuda", None) for name in ("torch", "triton", "kernel")} | {
        ("mla", "kernel", "cuda, triton D2H", None)
    }
    assert [name for name, options in asked if options] == ["kernel"]
    assert all(set(options) <= {"page_first_d2h"} for _, options in asked)


def test_a_gpu_and_its_rates_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """R32: with a GPU the table names it, with what pinned copies reach and what each pair does; what could not run has no rate."""
    report = Report(
        cphicache="1", python="3", system="Linux", packages={"torch": "2"}, cuda="12.9", gpu="NVIDIA H100", compute_capability="9.0",
        memory_limits=[], pinned_d2h_gb_per_s=55.04, pinned_h2d_gb_per_s=54.0,
        pairs=[
            PairResult("mla", "layer_first", "torch", "ok", "cuda", "", 20.04, 21.0, 22.0),
            PairResult("mla", "layer_first", "kernel", "unavailable", "", "no package"),
        ],
    )  # fmt: skip
    monkeypatch.setattr(doctor, "examine", lambda **options: report)
    result = CliRunner().invoke(doctor_command, [], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    for line in (
        "GPU: NVIDIA H100, compute capability 9.0, CUDA 12.9",
        "pinned-copy limit: 55.0 GB/s out (D2H), 54.0 GB/s in (H2D)",
        "KV layout backend status runs on D2H layer GB/s D2H all GB/s H2D layer GB/s",
        "mla layer_first torch ok cuda 20.0 21.0 22.0",
        "mla layer_first kernel unavailable",
        "1 ok, 1 unavailable; verified on NVIDIA H100",
    ):
        assert line in lines
