"""Commands that read event logs. Exit status: 0 nothing is wrong, 1 something is, 2 unusable input."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from cphicache.files import whole_file
from cphicache.replay import Filter, UnusableLogs, node_way, replay, write_page, write_trace
from cphicache.run.diagrams import DiagramError, draw_with_dot
from cphicache.run.draw import dot_text, mermaid_text
from cphicache.run.failure import Failure, OneLineCommand

PROGRESS_FROM_BYTES = 8 << 20
"""Logs of this size in all show progress."""
PICTURES = (".svg", ".png")
_LOGS = click.argument("logs", nargs=-1, required=True, type=click.Path(path_type=Path))


@click.command("replay", cls=OneLineCommand)
@_LOGS
@click.option("--node", type=int, help="Report on this node only, and print what the log says of it.")
@click.option("--request", help="Report on this request only, and print what the log says of it.")
@click.option("--since", "since_tick", type=int, metavar="TICK", help="Report on what happened from this tick on.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@click.option("--execute", is_flag=True, help="Make the calls of the logs (level ops) on a real engine, and compare its events.")
@click.option("--shrink", is_flag=True, help="Reduce a log that does not execute as recorded to few calls; write them to --out.")
@click.option("-o", "--out", type=click.Path(dir_okay=False, path_type=Path), help="--shrink: the test case to write.")
def replay_command(
    logs: Sequence[Path],
    node: int | None,
    request: str | None,
    since_tick: int | None,
    *,
    as_json: bool,
    execute: bool,
    shrink: bool,
    out: Path | None,
) -> None:
    """Re-step every lifecycle of event logs (one a rank, of one run) through the transition table, and compare the ranks."""
    if execute or shrink or out is not None:
        asked = {"--node": node, "--request": request, "--since": since_tick}
        narrowing = [name for name, value in asked.items() if value is not None]
        sys.exit(_execute(logs, narrowing=narrowing, as_json=as_json, execute=execute, shrink=shrink, out=out))
    try:
        with _progress("replaying", logs) as on_progress:
            report = replay(logs, Filter(node, request, since_tick), on_progress=on_progress)
    except UnusableLogs as error:
        raise Failure(str(error)) from error
    click.echo(json.dumps(report.as_json(), indent=2) if as_json else report.text())
    sys.exit(0 if report.is_clean else 1)


def _execute(
    logs: Sequence[Path], *, narrowing: Sequence[str], as_json: bool, execute: bool, shrink: bool, out: Path | None
) -> int:
    if execute and shrink:
        raise Failure("--execute and --shrink: give one of them")
    if out is not None and not shrink:
        raise Failure(f"-o {out}: is the test case that --shrink writes; leave it out, or give --shrink")
    if shrink and out is None:
        raise Failure("--shrink: give the file to write, with -o test_case.py")
    what = "--shrink" if shrink else "--execute"
    if narrowing:
        raise Failure(f"{what} takes whole logs: leave out {', '.join(narrowing)}")
    if as_json and shrink:
        raise Failure("--shrink writes a test case: leave out --json")
    if shrink and len(logs) != 1:
        raise Failure(f"--shrink takes the log of one rank, and {len(logs)} were given")

    # the engine is needed for these two only
    from cphicache.reexecute import Execution, NothingFails, RecordedLog, Refused

    told, status = [], 0
    try:
        if out is not None:
            _shrink(logs[0], out)
            return 0
        for path in logs:
            with _progress("executing", [path]) as on_progress:
                recorded = RecordedLog(path, on_progress=on_progress)
                execution = Execution(recorded)
                difference = execution.run()
            text = None if difference is None else str(difference)
            told.append({"log": str(path), "operations": execution.executed, "events": execution.events, "difference": text})
            status = status if difference is None else 1
            if not as_json:
                done = f"{path}: {execution.executed} operations executed, {execution.events} events as recorded"
                click.echo(done if text is None else text)
    except (Refused, NothingFails) as error:
        raise Failure(str(error)) from error
    if as_json:
        click.echo(json.dumps({"logs": told}, indent=2))
    return status


def _shrink(log: Path, out: Path) -> None:
    from cphicache.reexecute import RecordedLog, shrink, write_case

    with Console(stderr=True).status("executing") as shown:
        case = shrink(
            RecordedLog(log),
            on_operation=lambda done: shown.update(f"executing: {done:,} operations") if done % 64 == 0 else None,
            on_trial=lambda played, left: shown.update(f"shrinking: {played:,} scripts played, {left:,} operations left"),
        )
    try:
        write_case(case, out)
    except OSError as error:
        raise Failure(f"{out}: cannot be written ({error.strerror or error}); give another file") from error
    click.echo(f"{case.text}\n{out}: {len(case.operations)} of {case.recorded} operations fail in the same way")


@click.command("trace", cls=OneLineCommand)
@_LOGS
@click.option("-o", "--out", required=True, type=click.Path(dir_okay=False, path_type=Path), help="Where to write the JSON trace.")
def trace_command(logs: Sequence[Path], out: Path) -> None:
    """Write event logs (one a rank) as a timeline for Perfetto (ui.perfetto.dev) or chrome://tracing."""
    try:
        with _progress("drawing", logs) as on_progress:
            count = write_trace(logs, out, on_progress=on_progress)
    except UnusableLogs as error:
        raise Failure(str(error)) from error
    click.echo(f"{out}: {count} trace events")


@click.command("report", cls=OneLineCommand)
@_LOGS
@click.option("-o", "--out", required=True, type=click.Path(dir_okay=False, path_type=Path), help="Where to write the page.")
def report_command(logs: Sequence[Path], out: Path) -> None:
    """Write event logs (one a rank) as one self-contained HTML page: timeline, slow and failed backups, occupancy, ranks."""
    try:
        with _progress("reading", logs) as on_progress:
            report = write_page(logs, out, on_progress=on_progress)
    except UnusableLogs as error:
        raise Failure(str(error)) from error
    click.echo(f"{out}: {'nothing is wrong' if report.is_clean else f'{report.findings.total} findings'}")


@click.command("diagram", cls=OneLineCommand)
@click.option("-o", "--out", type=click.Path(dir_okay=False, path_type=Path), help="Draw into FILE.svg or FILE.png, with graphviz.")
@click.option("--log", type=click.Path(path_type=Path), help="The event log of the rank that --node is looked for in.")
@click.option("--node", type=int, help="Mark this node's way: the steps it took, how often and when.")
def diagram_command(out: Path | None, log: Path | None, node: int | None) -> None:
    """Print the state machine of a backup as Mermaid, or draw it; with --log and --node, one node's way on it."""
    if (log is None) != (node is None):
        raise Failure("--log and --node belong together: --log LOG --node N marks the way of node N")
    if out is not None and out.suffix not in PICTURES:
        raise Failure(f"-o {out}: give a name that ends in {' or '.join(PICTURES)}")
    try:
        way = None if log is None or node is None else node_way(log, node)
        picture = b"" if out is None else draw_with_dot(dot_text(way=way), out.suffix[1:])
    except (UnusableLogs, DiagramError) as error:
        raise Failure(str(error)) from error
    if out is None:
        click.echo(mermaid_text(way=way), nl=False)
        return
    try:
        with whole_file(out) as file:
            file.write_bytes(picture)
    except OSError as error:
        raise Failure(f"{out}: cannot be written ({error.strerror or error}); name another file with -o") from error
    click.echo(out)


@contextmanager
def _progress(what: str, logs: Sequence[Path]) -> Iterator[Callable[[int], None] | None]:
    """Progress on stderr, for logs that take a while."""
    total = sum(path.stat().st_size for path in logs if path.is_file())
    if total < PROGRESS_FROM_BYTES:
        yield None
        return
    console = Console(stderr=True)
    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(what, total=total)
        yield lambda done: progress.update(task, completed=done)
