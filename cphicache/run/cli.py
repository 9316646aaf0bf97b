"""The command line. Exit status: 0 fine, 1 something was wrong with the bytes, the accounts or the coverage, 2 unusable input."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args

import click
from click.core import ParameterSource
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from cphicache import __version__
from cphicache.bench.command import bench_command
from cphicache.run.config import (
    Arrival,
    ConfigError,
    CopyBackendName,
    EvictionPolicy,
    HostLayout,
    KvKind,
    Launch,
    LogLevel,
    PageFirstD2H,
    RunConfig,
    StreamKind,
    Verify,
    WriteBackWait,
    WritePolicy,
)
from cphicache.run.doctor_command import doctor_command
from cphicache.run.explore_command import explore_command
from cphicache.run.failure import Failure, OneLineGroup, write_whole
from cphicache.run.plan_command import plan_command
from cphicache.run.plots_command import plots_command
from cphicache.run.seen import diagram_command, replay_command, report_command, trace_command
from cphicache.run.simulate.command import simulate_command
from cphicache.run.study.command import study_command
from cphicache.signals import deferred_signals, exit_on_signals
from cphicache.transfer.budget import HostBudgetError, memory_limits
from cphicache.transfer.support import KV_DTYPES

if TYPE_CHECKING:
    from cphicache.metrics import CacheMetrics
    from cphicache.run.launch import Outcome

F = TypeVar("F", bound=Callable[..., Any])
_DEFAULTS = {field.name: field.default for field in fields(RunConfig)}
SIGNALLED = 128
"""A process that a signal has ended has this and the signal's number as its status, as shells tell it."""
_REPORTING = {"log", "log_level", "out", "json", "metrics_port"}
"""Options that change what is written, not what happens: with only these the run is still the bare default run."""


def _option(name: str, kind: Any, text: str) -> Callable[[F], F]:
    field = name.replace("-", "_")
    return click.option(f"--{name}", field, type=kind, default=_DEFAULTS[field], show_default=True, help=text)


def _choice(name: str, alias: Any, text: str) -> Callable[[F], F]:
    # Any string is taken here: the configuration checks it, so that the command line and a file give the same error.
    return _option(name, str, f"{text} [{'|'.join(get_args(alias))}]")


@click.group(cls=OneLineGroup, context_settings={"help_option_names": ["-h", "--help"]})
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
@_option("cp-size", int, "Context-parallel ranks.")
@click.option("--kv-replicated", is_flag=True, help="Each of these ranks stores all of the KV, as tensor-parallel ranks do.")
@_choice("launch", Launch, "Ranks in lockstep as threads of this process, or as processes over torch.distributed.")
@_option("rank-timeout-s", float, "Longest wait for another rank once all serve (to start, each has 120 s).")
@_option("check-ranks", int, "Compare digests of the ranks' states every so many ticks; 0: never.")
@_option("page-size", int, "Tokens of a page.")
@_option("device-tokens", int, "Device pool of all ranks together.")
@_option("host-tokens", int, "Host pool of all ranks together.")
@_choice("kv", KvKind, "Kind of KV.")
@_option("kv-dtype", str, f"Dtype of the KV. [{'|'.join(KV_DTYPES)}]")
@_option("layers", int, "Layers of the target model.")
@_option("draft-layers", int, "Layers of the draft model; 0: no draft.")
@_option("latent-dim", int, "MLA: elements of the latent.")
@_option("rope-dim", int, "MLA: further elements of the same item.")
@_option("kv-heads", int, "MHA: KV heads.")
@_option("head-dim", int, "MHA: elements of a head.")
@_option("index-dim", int, "DSA: elements of an indexer key.")
@_option("index-every", int, "DSA: every so many layers have indexer keys.")
@_choice("layout", HostLayout, "Order of the host pool.")
@_choice("backend", CopyBackendName, "What copies.")
@_choice("page-first-d2h", PageFirstD2H, "How backend kernel copies one layer into a page_first host pool.")
@click.option("--reference-operators", is_flag=True, help="Backends kernel and direct on CPU stand-ins of the package's operators.")
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
@_choice("streams", StreamKind, "Copies on real threads, on a virtual clock (same seed, same events), or on a GPU.")
@_choice("verify", Verify, "Compare reused KV byte for byte. off: neither bytes nor, before the end, accounts; no KV is computed.")
@_option("log", str, "Write the event log here (one file a rank).")
@_choice("log-level", LogLevel, "Detail of the event log.")
@_option("out", str, "Write summary.json and the event log into this folder.")
@click.option("--json", is_flag=True, help="Print the summary as JSON.")
@click.option(
    "--metrics-port", type=click.IntRange(0, 65535), help="Serve Prometheus metrics here while running (0: any free port)."
)
@click.pass_context
def run(context: click.Context, /, metrics_port: int | None = None, **options: Any) -> None:
    """Serve a request trace through the engine and prove every reused byte, every slot and every lock."""
    given = {name for name in options if context.get_parameter_source(name) is not ParameterSource.DEFAULT}
    with exit_on_signals(signal.SIGTERM, signal.SIGHUP):  # so that event logs are flushed
        try:
            status = serve(options, bare=not given - _REPORTING, metrics_port=metrics_port)
        except SystemExit as left:
            if isinstance(left.code, int) and left.code > SIGNALLED:
                click.echo(f"cphicache: ended by {signal.Signals(left.code - SIGNALLED).name}", err=True)
            raise
    sys.exit(status)


def serve(options: dict[str, Any], *, bare: bool, metrics_port: int | None = None) -> int:
    """The main job; returns the exit status. Raises :class:`Failure` for unusable input."""
    try:
        config = RunConfig.from_mapping(with_out(options))
    except ConfigError as error:
        raise Failure(str(error)) from error
    if metrics_port is not None and config.launch == "processes":
        raise Failure(f"--metrics-port {metrics_port}: serves ranks of one process; use --launch threads")

    with deferred_signals():  # torch takes a second to import: after the options have been checked
        import torch

        from cphicache.run.jobs import load_requests, sized_for
        from cphicache.run.launch import Outcome, run_processes
        from cphicache.run.pools import require_backend, require_memory
        from cphicache.run.trace import TraceError
        from cphicache.run.world import RunFailed, cache_config, run_world
        from cphicache.transfer.backends import BackendUnavailable

    torch.set_num_threads(1)  # several ranks share the cores; ours is the process
    console = Console(stderr=True)
    make_folder(config)
    try:
        requests = load_requests(config)
        config = sized_for(config, requests)
        require_memory(config, cache_config(config).payloads, memory_limits())
        require_backend(config)
    except (TraceError, ConfigError, HostBudgetError, BackendUnavailable, OSError) as error:
        raise Failure(str(error)) from error
    if config.host_smaller_than_device and not config.reclaim_device_valid:
        console.print(
            f"warning: the host pool ({config.host_tokens_per_rank * config.owners} tokens) is smaller than the device pool "
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
    metrics = _serve_metrics(metrics_port, console)
    if config.out is not None:
        _clear(config.out)  # only now: a run that is refused leaves what is there
    try:
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
            task = progress.add_task("serving", total=len(requests), tick=0)
            if config.launch == "processes":
                outcome = run_processes(config, lambda served, tick: progress.update(task, completed=served, tick=tick))
            else:
                results = run_world(
                    config,
                    requests,
                    on_done=lambda job: progress.advance(task),
                    on_tick=lambda scheduler: progress.update(task, tick=scheduler.tick) if scheduler.tick % 16 == 0 else None,
                    metrics=metrics,
                )
                outcome = Outcome(results, {}, None)
    except RunFailed as error:
        if error.kind == "unusable":
            raise Failure(str(error.__cause__ or error)) from error
        click.echo(f"cphicache: {error.kind}: {error}", err=True)
        return 1
    except KeyboardInterrupt:
        click.echo("cphicache: interrupted", err=True)
        return 130
    return report_run(config, outcome, bare=bare)


def _clear(folder: Path) -> None:
    """Take away what an earlier run has written there, so that nobody reads two runs as one."""
    for old in (folder / "summary.json", *folder.glob("events*.jsonl")):
        try:
            if old.is_file():
                old.unlink()
        except OSError as error:
            raise Failure(
                f"{old}: is of an earlier run and cannot be removed ({error.strerror or error}); give another --out"
            ) from error


def report_run(config: RunConfig, outcome: Outcome, *, bare: bool) -> int:
    """Write and print what came of a run; returns the exit status."""
    import orjson

    from cphicache.run.report import missing, rank_table, summarize, table

    summary = summarize(config, outcome.results)
    unseen = missing(summary) if bare else []
    summary["unseen"] = unseen
    summary["lost ranks"] = [f"rank {rank} {why}" for rank, why in sorted(outcome.lost.items())]
    summary["logs differ"] = outcome.difference
    encoded = orjson.dumps(summary, option=orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS)
    if config.out is not None:
        write_whole(config.out / "summary.json", encoded + b"\n")
    if config.json:
        click.echo(encoded.decode())
    else:
        Console().print(table(summary))
        if any(result.waits for result in outcome.results):  # ranks as processes
            Console().print(rank_table(outcome.results))
    return _verdict(summary)


def _serve_metrics(port: int | None, console: Console) -> CacheMetrics | None:
    """Metrics on all interfaces until the process ends; None when no port is given."""
    if port is None:
        return None
    from prometheus_client import start_http_server

    from cphicache.metrics import CacheMetrics

    metrics = CacheMetrics()
    try:
        server, _ = start_http_server(port, registry=metrics.registry)
    except OSError as error:
        raise Failure(f"--metrics-port {port}: cannot be served ({error.strerror}); give another, or 0 for any free one") from error
    console.print(f"metrics at http://localhost:{server.server_port}/metrics", soft_wrap=True)
    return metrics


def _verdict(summary: dict[str, Any]) -> int:
    """0 if all is well; else say what is not, with the first evidence, and 1."""
    for refusal in summary["refusals"]:
        click.echo(f"cphicache: {refusal}", err=True)
    if summary["evidence"]:
        click.echo(f"cphicache: wrong bytes: {summary['evidence'][0]}", err=True)
    if not summary["ranks_agree"]:
        click.echo("cphicache: the ranks' logical figures differ", err=True)
    for line in summary["lost ranks"]:
        click.echo(f"cphicache: {line}", err=True)
    told = [line for rank in summary["ranks"] for line in (rank["broken"] or rank["quarantined"], rank["gone"]) if line is not None]
    for line in dict.fromkeys(told):  # survivors say the same
        click.echo(f"cphicache: {line}", err=True)
    if summary["logs differ"]:
        click.echo(f"cphicache: {summary['logs differ']}", err=True)
    if summary["unseen"]:
        click.echo(f"cphicache: the default run should have seen, and has not: {', '.join(summary['unseen'])}", err=True)
    checks = summary["checks"]
    broken = any(rank["broken"] for rank in summary["ranks"])
    if summary["lost ranks"] and not any(rank["broken"] or rank["quarantined"] for rank in summary["ranks"]):
        broken = True  # it went when nobody needed it any more: what it had served and held is not proved
    wrong = checks["mismatches"] or checks["leaks"] or not summary["ranks_agree"] or summary["logs differ"] or summary["unseen"]
    return 1 if wrong or broken else 0


def with_out(options: dict[str, Any]) -> dict[str, Any]:
    """``--out DIR`` writes the log there too, unless it has a place of its own."""
    if options.get("out") and not options.get("log") and options.get("log_level") != "off":
        return {**options, "log": str(Path(options["out"]) / "events.jsonl")}
    return options


def make_folder(config: RunConfig) -> None:
    """Make the folder of ``--out``. Refuse a ``--log`` beside which ranks cannot have a file each."""
    log = config.log
    if log is not None and config.cp_size > 1 and log.exists() and not log.is_file():
        raise Failure(
            f"--log {log}: is not a file, and each of {config.cp_size} ranks writes its own beside it; give a name like events.jsonl"
        )
    if config.out is None:
        return
    try:
        config.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Failure(f"--out {config.out}: cannot be made ({error.strerror or error}); give a folder that can") from error


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
        raise Failure(str(error)) from error


main.add_command(bench_command)
main.add_command(plan_command)
main.add_command(plots_command)
main.add_command(doctor_command)
main.add_command(replay_command)
main.add_command(report_command)
main.add_command(diagram_command)
main.add_command(trace_command)
main.add_command(explore_command)
main.add_command(simulate_command)
main.add_command(study_command)

if __name__ == "__main__":
    main()
