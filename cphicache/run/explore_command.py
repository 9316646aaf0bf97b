"""The command ``cphicache explore``."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from cphicache.run.failure import Failure, OneLineCommand, refuse_given, write_whole
from cphicache.run.numbers import FiniteFloatRange
from cphicache.signals import deferred_signals

_BOUNDS = ("max_states", "max_cpu_seconds", "max_faults")


@click.command("explore", cls=OneLineCommand)
@click.argument("worlds", nargs=-1, metavar="[WORLD]...")
@click.option("--all", "all_worlds", is_flag=True, help="All worlds (as without any name).")
@click.option("--list", "list_worlds", is_flag=True, help="Only say which worlds these are.")
@click.option("--max-states", type=click.IntRange(min=1), help="Bound of a world's states.")
@click.option("--max-seconds", "max_cpu_seconds", type=FiniteFloatRange(min=0), help="Processor time for each world.")
@click.option("--max-faults", type=click.IntRange(min=0), help="Failing copies in one history; without it any number.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=Path("out"), help="Folder for scenarios.")
@click.option("--json", "as_json", is_flag=True, help="Print the numbers as JSON.")
@click.option("--replay", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Play a scenario file again instead.")
def explore_command(
    *,
    worlds: tuple[str, ...],
    all_worlds: bool,
    list_worlds: bool,
    max_states: int | None,
    max_cpu_seconds: float | None,
    max_faults: int | None,
    out: Path,
    as_json: bool,
    replay: Path | None,
) -> None:
    """Explore every order of events of small worlds on the real engine. Exit status 1 when a rule is broken anywhere.

    An interrupt (or SIGTERM) ends it with what was seen so far, and how far that goes; exit status 130.
    """
    import orjson
    from rich.console import Console

    with deferred_signals():
        from cphicache.explore import ScenarioError
        from cphicache.run import explore as exploring

    if replay is not None:
        refuse_given(
            "worlds", "all_worlds", "list_worlds", *_BOUNDS, "out", "as_json", because="is of no use with --replay; leave it out"
        )
    if list_worlds:
        refuse_given(*_BOUNDS, "out", "as_json", because="is of no use with --list; leave it out")
    if all_worlds and worlds:
        raise Failure(f"--all and {worlds[0]}: give either")
    try:
        if replay is not None:
            text, same = exploring.replay(replay)
            click.echo(text, nl=False)
            sys.exit(0 if same else 1)
        chosen = exploring.worlds_named(worlds)
    except (ScenarioError, exploring.UnknownWorld) as error:
        raise Failure(str(error)) from error
    if list_worlds:
        for world in chosen:
            click.echo(f"{world.name:<16} {world.about}")
        return
    console = Console(stderr=True)
    reports = exploring.explore_worlds(
        chosen, max_states=max_states, max_cpu_seconds=max_cpu_seconds, max_faults=max_faults, console=console
    )
    if as_json:
        click.echo(orjson.dumps(exploring.as_json(reports), option=orjson.OPT_INDENT_2).decode())
    else:
        Console().print(exploring.table(reports))
    broken = [report for report in reports if report.violation is not None]
    for report in broken:
        path, text = exploring.scenario_file(report, out)
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise Failure(f"--out {out}: cannot be made ({error.strerror or error}); give a folder that can") from error
        write_whole(path, text.encode())
        click.echo(f"{text}cphicache: {report.world}: a rule is broken; written to {path}", err=True)
    interrupted = any(report.ended_by == "interrupted" for report in reports)
    sys.exit(1 if broken else 130 if interrupted else 0)
