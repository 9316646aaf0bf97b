"""``cphicache doctor``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.table import Table

from cphicache.run.failure import Failure, OneLineCommand, write_whole
from cphicache.signals import deferred_signals
from cphicache.transfer.budget import describe_bytes

if TYPE_CHECKING:
    from cphicache.run.doctor import PairResult, Report


@click.command("doctor", cls=OneLineCommand)
@click.option(
    "--device",
    type=click.Choice(["auto", "cuda", "cpu"]),
    default="auto",
    show_default=True,
    help="Where to copy: auto takes a GPU where there is one; cuda fails without.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Write the report as JSON into this file, too.")
def doctor_command(device: str, as_json: bool, out: Path | None) -> None:
    """Say what works on this machine, and why the rest does not: every KV kind, host layout and copy backend, byte by byte.

    Exit status: 0 all that can run here is right, 1 wrong bytes or a copy that failed, 2 unusable input.
    """
    with deferred_signals():
        import orjson
        import torch

        from cphicache.run.doctor import examine
        from cphicache.transfer.streams.cuda import CudaUnavailable

    torch.set_num_threads(1)  # the copies are small, and the process is ours
    progress = Console(stderr=True)
    try:
        with progress.status("copying") as status:
            report = examine(
                device=device, on_pair=lambda pair: status.update(f"copying: {pair.kind} {pair.layout} {pair.io_backend}")
            )
    except CudaUnavailable as error:
        raise Failure(f"--device {device}: {error}") from error
    encoded = orjson.dumps(report.to_json(), option=orjson.OPT_INDENT_2)
    if out is not None:
        write_whole(out, encoded + b"\n")
    if as_json:
        click.echo(encoded.decode())
    else:
        _show(report)
    sys.exit(0 if report.healthy else 1)


def _show(report: Report) -> None:
    console = Console(soft_wrap=True, highlight=False)
    packages = ", ".join(f"{name} {found or 'not installed'}" for name, found in report.packages.items())
    console.print(f"cphicache {report.cphicache}, Python {report.python}, {report.system}")
    console.print(packages)
    if report.gpu is None:
        console.print(f"GPU: none (torch is built for CUDA {report.cuda})" if report.cuda else "GPU: none (torch is a CPU build)")
    else:
        console.print(f"GPU: {report.gpu}, compute capability {report.compute_capability}, CUDA {report.cuda}")
        console.print(
            f"pinned-copy limit: {report.pinned_d2h_gb_per_s:.1f} GB/s out (D2H), {report.pinned_h2d_gb_per_s:.1f} GB/s in (H2D)"
        )
    for limit in report.memory_limits[:1]:
        console.print(f"host memory: {describe_bytes(limit.available_bytes)} free under {limit.name}")
    console.print()
    table = Table("KV", "layout", "backend", "status", "runs on", box=None, pad_edge=False)
    if report.gpu is not None:
        for title in ("D2H layer", "D2H all", "H2D layer"):
            table.add_column(f"{title} GB/s", justify="right")
    for pair in report.pairs:
        table.add_row(pair.kind, pair.layout, pair.io_backend, pair.status, pair.runs_on, *(_rates(pair) if report.gpu else ()))
    console.print(table)
    console.print()
    reasons: dict[str, list[str]] = {}
    for pair in report.pairs:
        if pair.reason:
            reasons.setdefault(f"{pair.status}: {pair.reason}", []).append(f"{pair.kind}/{pair.layout}/{pair.io_backend}")
    for reason, pairs in reasons.items():
        console.print(f"{', '.join(pairs)}\n    {reason}", markup=False)
    for note in report.notes:
        console.print(note, markup=False)
    console.print(report.verdict, markup=False)


def _rates(pair: PairResult) -> list[str]:
    rates = (pair.d2h_layer_gb_per_s, pair.d2h_all_gb_per_s, pair.h2d_layer_gb_per_s)
    return ["" if rate is None else f"{rate:.1f}" for rate in rates]
