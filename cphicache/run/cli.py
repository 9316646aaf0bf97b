"""The command line. Exit status: 0 fine, 1 something was wrong with the bytes, the accounts or the coverage, 2 unusable input."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar, get_args

import click
from click.core import ParameterSource
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from cphicache import __version__
from cphicache.run.config import (
    Arrival,
    ConfigError,
    EvictionPolicy,
    KvKind,
    LogLevel,
    RunConfig,
    StreamKind,
    Verify,
    WriteBackWait,
    WritePolicy,
)

F = TypeVar("F", bound=Callable[..., Any])
_DEFAULTS = {field.name: field.default for field in fields(RunConfig)}
_REPORTING = {"log", "log_level", "out", "json"}
"""Options that change what is written, not what happens: with only these the run is still the bare default run."""


def _option(name: str, kind: Any, text: str) -> Callable[[F], F]:
    field = name.replace("-", "_")
    return click.option(f"--{name}", field, type=kind, default=_DEFAULTS[field], show_default=True, help=text)


def _choice(name: str, alias: Any, text: str) -> Callable[[F], F]:
    # Any string is taken here: the configuration checks it, so that the command line and a file give the same error.
    return _option(name, str, f"{text} [{'|'.join(get_args(alias))}]")


class _Failure(click.ClickException):
    """One line on stderr and exit status 2."""

    exit_code = 2

    def show(self, file: Any = None) -> None:
        click.echo(f"cphicache: {self.format_message()}", err=True)


@contextmanager
def _one_line() -> Iterator[None]:
    """What cannot be parsed is unusable input like any other: one line, without the usage that click adds."""
    try:
        yield
    except click.exceptions.NoArgsIsHelpError:
        raise
    except click.UsageError as error:
        raise _Failure(error.format_message()) from error


class _Command(click.Command):
    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        with _one_line():
            return super().parse_args(ctx, args)


class _Group(click.Group):
    command_class = _Command

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        with _one_line():
            return super().parse_args(ctx, args)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        with _one_line():
            return super().resolve_command(ctx, args)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="cphicache")
def main() -> None:
    """Backs up the KV cache of an LLM server from device to host, layer by layer, as an explicit state machine per radix node."""


@main.command()
@_option("trace", str, "Mooncake JSONL trace; without it a seeded synthetic workload is served.")
@_option("requests", int, "The first so many requests of the trace.")
@_option("scale", float, "Shrink lengths; a block of 512 tokens becomes max(1, round(512 F)).")
@_option("seed", int, "Seed of workload, aborts, retractions and the virtual clock.")
@_choice("arrival", Arrival, "Requests arrive at the trace's times, or all at once.")
@_option("tick-ms", float, "Trace time of one scheduler step.")
@_option("abort-rate", float, "Share of requests that are aborted on their way.")
@_option("retract-rate", float, "Share of requests that are retracted once.")
@_option("cp-size", int, "Context-parallel ranks, as engines in lockstep in this process.")
@_option("page-size", int, "Tokens of a page.")
@_option("device-tokens", int, "Device pool of all ranks together.")
@_option("host-tokens", int, "Host pool of all ranks together.")
@_choice("kv", KvKind, "Kind of KV.")
@_option("layers", int, "Layers of the target model.")
@_option("draft-layers", int, "Layers of the draft model; 0: no draft.")
@_option("latent-dim", int, "MLA: elements of the latent.")
@_option("rope-dim", int, "MLA: further elements of the same item.")
@_option("kv-heads", int, "MHA: KV heads.")
@_option("head-dim", int, "MHA: elements of a head.")
@_option("chunk-tokens", int, "Most prompt tokens of one request in one step.")
@_option("max-batch", int, "Most running requests.")
@_choice("policy", WritePolicy, "When nodes are backed up.")
@_option("selective-hits", int, "Hits from which write_through_selective backs up.")
@_choice("write-back-wait", WriteBackWait, "What an eviction under write_back does when backed-up nodes do not suffice.")
@_choice("eviction-policy", EvictionPolicy, "Eviction order.")
@click.option("--reclaim-device-valid", is_flag=True, help="Let host copies of nodes that are on the device be reclaimed, last.")
@click.option("--no-overlap", "overlap", flag_value=False, default=True, help="Submit all layers after the forward.")
@_option("max-deferral-ticks", int, "Longest wait of a request for a pending node.")
@_option("max-retries", int, "Retries of a refused or rolled-back node.")
@_option("load-back-threshold", int, "Shortest host hit that is loaded back, in tokens.")
@_choice("streams", StreamKind, "Copies on real threads, or on a virtual clock (same seed, same events).")
@_choice("verify", Verify, "Compare reused KV byte for byte.")
@_option("log", str, "Write the event log here (one file a rank).")
@_choice("log-level", LogLevel, "Detail of the event log.")
@_option("out", str, "Write summary.json and the event log into this folder.")
@click.option("--json", is_flag=True, help="Print the summary as JSON.")
@click.pass_context
def run(context: click.Context, /, **options: Any) -> None:
    """Serve a request trace through the engine and prove every reused byte, every slot and every lock."""
    given = {name for name in options if context.get_parameter_source(name) is not ParameterSource.DEFAULT}
    sys.exit(serve(options, bare=not given - _REPORTING))


def serve(options: dict[str, Any], *, bare: bool) -> int:
    """The main job; returns the exit status. Raises :class:`_Failure` for unusable input."""
    try:
        config = RunConfig.from_mapping(_with_out(options))
    except ConfigError as error:
        raise _Failure(str(error)) from error

    # torch takes a second to import: after the options have been checked
    import orjson
    import torch

    from cphicache.check.conservation import InvariantBroken
    from cphicache.events import EventLogError
    from cphicache.run.jobs import load_requests, sized_for
    from cphicache.run.report import missing, summarize, table
    from cphicache.run.trace import TraceError
    from cphicache.run.world import RunFailed, run_world

    torch.set_num_threads(1)  # several ranks share the cores; ours is the process
    console = Console(stderr=True)
    if config.out is not None:
        try:
            config.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _Failure(f"--out {config.out}: cannot be made ({error.strerror or error}); give a folder that can") from error
    try:
        requests = load_requests(config)
        config = sized_for(config, requests)
    except (TraceError, ConfigError) as error:
        raise _Failure(str(error)) from error
    if config.host_smaller_than_device and not config.reclaim_device_valid:
        console.print(
            f"warning: the host pool ({config.host_tokens_per_rank * config.cp_size} tokens) is smaller than the device pool "
            f"({config.device_pages * config.page_size}): backups will be refused once it is full of nodes that are on the device "
            "too; --reclaim-device-valid lets those go",
            soft_wrap=True,
        )
    columns = (
        TextColumn("serving"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("tick {task.fields[tick]}"),
    )
    try:
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
            task = progress.add_task("serving", total=len(requests), tick=0)
            results = run_world(
                config,
                requests,
                on_done=lambda job: progress.advance(task),
                on_tick=lambda scheduler: progress.update(task, tick=scheduler.tick) if scheduler.tick % 16 == 0 else None,
            )
    except RunFailed as error:
        if isinstance(error.__cause__, EventLogError):
            raise _Failure(str(error.__cause__)) from error
        kind = "broken invariant" if isinstance(error.__cause__, InvariantBroken) else "failed"
        click.echo(f"cphicache: {kind}: {error}", err=True)
        return 1
    except KeyboardInterrupt:
        click.echo("cphicache: interrupted", err=True)
        return 130
    summary = summarize(config, results)
    unseen = missing(summary) if bare else []
    summary["unseen"] = unseen
    encoded = orjson.dumps(summary, option=orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS)
    if config.out is not None:
        _write_whole(config.out / "summary.json", encoded + b"\n")
    if config.json:
        click.echo(encoded.decode())
    else:
        Console().print(table(summary))
    return _verdict(summary)


def _verdict(summary: dict[str, Any]) -> int:
    """0 if all is well; else say what is not, with the first evidence, and 1."""
    for refusal in summary["refusals"]:
        click.echo(f"cphicache: {refusal}", err=True)
    if summary["evidence"]:
        click.echo(f"cphicache: wrong bytes: {summary['evidence'][0]}", err=True)
    if not summary["ranks_agree"]:
        click.echo("cphicache: the ranks' logical figures differ", err=True)
    if summary["unseen"]:
        click.echo(f"cphicache: the default run should have seen, and has not: {', '.join(summary['unseen'])}", err=True)
    wrong = summary["checks"]["mismatches"] or summary["checks"]["leaks"] or not summary["ranks_agree"] or summary["unseen"]
    return 1 if wrong else 0


def _with_out(options: dict[str, Any]) -> dict[str, Any]:
    """``--out DIR`` writes the log there too, unless it has a place of its own."""
    if options.get("out") and not options.get("log") and options.get("log_level") != "off":
        return {**options, "log": str(Path(options["out"]) / "events.jsonl")}
    return options


def _write_whole(path: Path, content: bytes) -> None:
    """Write a file so that it is either there as a whole or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        try:
            partial.write_bytes(content)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise _Failure(f"{path}: cannot be written ({error.strerror or error}); give another --out") from error


@main.command()
@click.option("--check", is_flag=True, help="Only say which generated files are stale (exit status 1).")
@click.option("--root", type=click.Path(file_okay=False, path_type=Path), default=Path(), help="Checkout to write into.")
def diagrams(check: bool, root: Path) -> None:
    """Generate the diagrams and the table of the lifecycle from the transition table."""
    from cphicache.run.diagrams import DiagramError, stale, write_all

    if check:
        problems = stale(root)
        for problem in problems:
            click.echo(problem, err=True)
        sys.exit(1 if problems else 0)
    try:
        for path in write_all(root):
            click.echo(path)
    except DiagramError as error:
        raise _Failure(str(error)) from error


@main.command()
@click.argument("worlds", nargs=-1, metavar="[WORLD]...")
@click.option("--all", "all_worlds", is_flag=True, help="All worlds (as without any name).")
@click.option("--list", "list_worlds", is_flag=True, help="Only say which worlds there are.")
@click.option("--max-states", type=click.IntRange(min=1), help="Bound of a world's states.")
@click.option("--max-seconds", type=click.FloatRange(min=0), help="Time for each world.")
@click.option("--max-faults", type=click.IntRange(min=0), help="Failing copies in one history; without it any number.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=Path("out"), help="Folder for scenarios.")
@click.option("--json", "as_json", is_flag=True, help="Print the numbers as JSON.")
@click.option("--replay", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Play a scenario file again instead.")
def explore(
    *,
    worlds: tuple[str, ...],
    all_worlds: bool,
    list_worlds: bool,
    max_states: int | None,
    max_seconds: float | None,
    max_faults: int | None,
    out: Path,
    as_json: bool,
    replay: Path | None,
) -> None:
    """Explore every order of events of small worlds on the real engine. Exit status 1 when a rule is broken anywhere."""
    import orjson

    from cphicache.explore import WORLDS, ScenarioError
    from cphicache.run import explore as exploring

    if list_worlds:
        for world in WORLDS.values():
            click.echo(f"{world.name:<16} {world.about}")
        return
    try:
        if replay is not None:
            text, same = exploring.replay(replay)
            click.echo(text, nl=False)
            sys.exit(0 if same else 1)
        chosen = exploring.worlds_named(() if all_worlds else worlds)
    except (ScenarioError, exploring.UnknownWorld) as error:
        raise _Failure(str(error)) from error
    reports = exploring.explore_worlds(
        chosen, max_states=max_states, max_seconds=max_seconds, max_faults=max_faults, console=Console(stderr=True)
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
            raise _Failure(f"--out {out}: cannot be made ({error.strerror or error}); give a folder that can") from error
        _write_whole(path, text.encode())
        click.echo(f"{text}cphicache: {report.world}: a rule is broken; written to {path}", err=True)
    interrupted = any(report.ended_by == "interrupted" for report in reports)
    sys.exit(1 if broken else 130 if interrupted else 0)


if __name__ == "__main__":
    main()
