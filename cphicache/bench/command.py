"""``cphicache bench``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from cphicache.run.failure import Failure, OneLineCommand
from cphicache.run.numbers import FiniteFloatRange
from cphicache.signals import deferred_signals

if TYPE_CHECKING:
    from cphicache.bench.harness import Bench, Effort

DEFAULT_OUT = Path("out/bench.json")


@click.command("bench", cls=OneLineCommand)
@click.argument("names", nargs=-1)
@click.option("--list", "only_list", is_flag=True, help="Say what there is to measure.")
@click.option("--rounds", type=click.IntRange(1, 1000), default=7, show_default=True, help="Alternating rounds a row.")
@click.option(
    "--sample-s", type=FiniteFloatRange(0.0, 60.0), default=0.1, show_default=True, help="Seconds of one sample of one side."
)
@click.option("--shrink", type=click.IntRange(1, 100_000), default=1, show_default=True, help="Divide the sizes by this: a try.")
@click.option(
    "--out", type=click.Path(dir_okay=False, path_type=Path), default=DEFAULT_OUT, show_default=True, help="Results as JSON."
)
@click.option("--resume", is_flag=True, help="Keep the rows that --out has, and measure the others.")
@click.option("--docs", type=click.Path(dir_okay=False, path_type=Path), help="Put the table into the generated part of this page.")
def bench_command(
    names: tuple[str, ...],
    *,
    only_list: bool,
    rounds: int,
    sample_s: float,
    shrink: int,
    out: Path,
    resume: bool,
    docs: Path | None,
) -> None:
    """Measure the rows NAME... (all without names; a name's beginning will do) and say which reach what they must.

    A row is written to --out when it is finished; an interrupt keeps it. Exit status: 0 measured, 1 a "must" was not met, 2 unusable
    input, 130 interrupted.
    """
    with deferred_signals():
        import torch

        from cphicache.bench.harness import Effort
        from cphicache.bench.report import ResultsError, check_effort, markdown, read_results, verdict, write_docs
        from cphicache.bench.rows import BENCHES, chosen

    try:
        wanted = chosen(names)
    except ValueError as error:
        raise Failure(str(error)) from error
    if only_list:
        for bench in wanted:
            click.echo(f"{bench.name:28} {bench.what}")
        return
    torch.set_num_threads(1)  # ratios are of one thread, and the process is ours
    console = Console(stderr=True)
    try:
        known, effort = read_results(out), Effort(rounds, sample_s, shrink)
        if resume:
            check_effort(out, known, effort)
            wanted = [bench for bench in wanted if bench.name not in known]
        with console.status("measuring") as status:
            finished = measure_all(wanted, effort, known, out, lambda text: status.update(f"measuring: {text}"))
        order = [bench.name for bench in BENCHES]
        rows = [known[name] for name in order if name in known and (not names or name.startswith(names))]
        click.echo(markdown(rows), nl=False)
        if docs is not None:
            write_docs(docs, [known[name] for name in order if name in known])
    except ResultsError as error:
        raise Failure(str(error)) from error
    if not finished:
        click.echo(f"cphicache: interrupted; finished rows are in {out}, go on with --resume", err=True)
        sys.exit(130)
    unmet = [row["name"] for row in rows if verdict(row) == "**not met**"]
    if unmet:
        click.echo(f"cphicache: must not met: {', '.join(unmet)}", err=True)
        sys.exit(1)


def measure_all(
    benches: Sequence[Bench], effort: Effort, known: dict[str, dict[str, Any]], out: Path, on_row: Callable[[str], object]
) -> bool:
    """Measure row by row; each finished one is in ``known`` and in ``out`` at once. False: interrupted."""
    from cphicache.bench.harness import PeerMissing
    from cphicache.bench.report import missing_result, result_of, write_results

    for number, bench in enumerate(benches, start=1):
        on_row(f"{bench.name} ({number} of {len(benches)})")
        try:
            known[bench.name] = result_of(bench, bench.measure(effort), effort)
        except PeerMissing as error:
            known[bench.name] = missing_result(bench, str(error))
        except KeyboardInterrupt:
            return False
        write_results(out, known)
    return True
