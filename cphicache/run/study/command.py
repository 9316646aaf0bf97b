"""``cphicache study overlap``, ``hits`` and ``serve``. Exit status: 0 fine, 2 unusable input, 130 interrupted."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from cphicache.run.config import MOST_REQUESTS, MOST_TOKENS
from cphicache.run.failure import Failure, OneLineCommand, OneLineGroup, refuse_given
from cphicache.run.numbers import REQUESTS, TOKENS, FiniteFloatRange
from cphicache.run.study.results import check_same, read_rows, require_place, write_rows
from cphicache.signals import deferred_signals

if TYPE_CHECKING:
    from cphicache.run.study.overlap import Setting
    from cphicache.run.study.serve import ServeConfig

_HITS_OPTIONS = {
    "trace": "--trace",
    "requests": "--requests",
    "page_size": "--page-size",
    "cp_size": "--cp-size",
    "layers": "--layers",
    "reclaim_device_valid": "--reclaim-device-valid",
}
"""Of ``hits``, by the field of what its rows are about."""
SWEEP_GB_PER_S = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 50.0, 100.0, 180.0)


class _StudyGroup(OneLineGroup):
    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except MemoryError as error:
            raise Failure("the memory does not hold this study; give smaller sizes, or fewer --requests") from error


@click.group("study", cls=_StudyGroup)
def study_command() -> None:
    """What overlap gains and what pool sizes give, on a virtual clock and pools without bytes."""


@study_command.command("overlap", cls=OneLineCommand)
@click.option(
    "--preset", type=click.Choice(["h100", "gb300"]), default="h100", show_default=True, help="Where the defaults come from."
)
@click.option("--layers", type=click.IntRange(1, 1024), help="Layers.")
@click.option("--compute-us", type=FiniteFloatRange(0.0, 1e9, min_open=True), help="A chunk's compute in one layer.")
@click.option("--gb-per-s", type=FiniteFloatRange(1e-6, 1e6), help="D2H of one rank, 10^9 bytes/s.")
@click.option("--cp-size", type=click.IntRange(1, 64), help="Ranks that share a chunk's KV.")
@click.option("--tokens", type=TOKENS, help="Tokens of a chunk, all ranks.")
@click.option("--token-layer-bytes", type=click.IntRange(1, 2**31), help="KV of one token in one layer.")
@click.option("--pool-chunks", type=FiniteFloatRange(1.0, MOST_TOKENS), help="Device pool, in chunks.")
@click.option("--chunks", type=click.IntRange(1, MOST_REQUESTS), help="Chunks of the stream.")
@click.option(
    "--trace", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Serve this trace in both modes instead."
)
@click.option("--requests", type=REQUESTS, help="With --trace: the first so many requests.")
@click.option("--device-tokens", type=TOKENS, default=262_144, show_default=True, help="With --trace: device pool.")
@click.option("--host-tokens", type=TOKENS, default=4_194_304, show_default=True, help="With --trace: host pool.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Write the rows here as JSON.")
def overlap_command(
    *,
    preset: str,
    trace: Path | None,
    requests: int | None,
    device_tokens: int,
    host_tokens: int,
    out: Path | None,
    **given: Any,
) -> None:
    """Backup layer by layer against all layers after the forward, on a stream of prefill chunks, or on a trace."""
    with deferred_signals():
        from cphicache.run.study.overlap import PRESETS, over_bandwidths, run

    if trace is None:
        refuse_given("requests", "device_tokens", "host_tokens", because="is for a trace; give --trace too, or leave it out")
    else:
        refuse_given("chunks", "pool_chunks", because="is for a stream of chunks; leave it out, or --trace")
    setting = replace(PRESETS[preset], **{name: value for name, value in given.items() if value is not None})
    require_place("--out", out)
    if trace is not None:
        _overlap_on_trace(trace, requests, (device_tokens, host_tokens), setting, out)
        return
    if setting.tokens * setting.pool_chunks > MOST_TOKENS:
        raise Failure(
            f"--pool-chunks {setting.pool_chunks:g} of --tokens {setting.tokens}: is a device pool of "
            f"{setting.tokens * setting.pool_chunks:g} tokens; give at most {MOST_TOKENS} together"
        )
    try:
        outcomes = [run(setting, overlap=overlap) for overlap in (True, False)]
        rows = over_bandwidths(setting, sorted({*SWEEP_GB_PER_S, setting.gb_per_s}))
    except ValueError as error:
        raise Failure(str(error)) from error
    table = Table("", "layer by layer", "all layers", box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    named: list[tuple[str, Callable[[Any], str]]] = [
        ("last KV store to copies done", lambda found: f"{found.copied_us / 1e3:.3f} ms"),
        ("last KV store to host-visible, mean", lambda found: f"{found.visible_us / 1e3:.3f} ms"),
        ("most", lambda found: f"{found.longest_us / 1e3:.3f} ms"),
        ("device memory held for backups, a rank", lambda found: f"{found.held_bytes / 2**20:,.1f} MiB"),
        ("copy engine busy", lambda found: f"{found.copy_engine:.2%}"),
        ("forward stalled for pages", lambda found: f"{found.stall:.3%}"),
        ("all chunks", lambda found: f"{found.total_us / 1e3:,.1f} ms"),
    ]
    for name, shown in named:
        table.add_row(name, *map(shown, outcomes))
    console = Console(soft_wrap=True)
    console.print(
        f"{preset}: {setting.chunks} chunks of {setting.tokens:,} tokens, {setting.layers} layers of {setting.compute_us:g} us, CP "
        f"{setting.cp_size}, {setting.gb_per_s:g} GB/s a rank: a layer's copy takes {setting.copy_us:.1f} us; device pool of "
        f"{setting.pool_chunks:g} chunks"
    )
    console.print(table)
    if out is not None:
        about = {"preset": preset, **asdict(setting), "outcomes": [asdict(outcome) for outcome in outcomes]}
        write_rows(out, {"study": "overlap", "about": about, "rows": rows})


def _overlap_on_trace(trace: Path, limit: int | None, sizes: tuple[int, int], setting: Setting, out: Path | None) -> None:
    from cphicache.run.study.hits import row_of
    from cphicache.run.study.serve import ServeConfig

    config = ServeConfig(
        device_tokens=sizes[0],
        host_tokens=sizes[1],
        cp_size=setting.cp_size,
        layers=setting.layers,
        token_layer_bytes=setting.token_layer_bytes,
        compute_us_per_token=setting.compute_us * setting.layers / setting.tokens,
        d2h_gb_per_s=setting.gb_per_s,
        h2d_gb_per_s=setting.gb_per_s,
    )
    _require_pages(config, sizes[:1], sizes[1:])
    requests = _read(trace, limit)
    rows = []
    with _progress("serving", 2 * len(requests)) as advance:
        for overlap in (True, False):
            rows.append(row_of(replace(config, overlap=overlap), requests, advance))
    table = Table("", "layer by layer", "all layers", box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for name in ("device hits", "host hits", "recomputed tokens", "evicted without host copy", "backups refused", "retracted"):
        table.add_row(name, *(f"{row[name]:,}" for row in rows))
    table.add_row("virtual time", *(f"{row['virtual s']:,.1f} s" for row in rows))
    Console(soft_wrap=True).print(table)
    if out is not None:
        write_rows(out, {"study": "overlap-trace", "about": {"trace": trace.name, **asdict(config)}, "rows": rows})


@study_command.command("hits", cls=OneLineCommand)
@click.option("--trace", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Mooncake JSONL; default: synthetic.")
@click.option("--requests", type=REQUESTS, help="The first so many requests; of the synthetic workload 400.")
@click.option("--device-tokens", "devices", type=TOKENS, multiple=True, default=[1 << 20], help="Device pool; repeat for more.")
@click.option("--host-tokens", "hosts", type=TOKENS, multiple=True, default=[1 << 22], help="Host pool; repeat for more.")
@click.option("--page-size", type=click.IntRange(1, 1024), default=64, show_default=True, help="Tokens of a page.")
@click.option("--cp-size", type=click.IntRange(1, 64), default=1, show_default=True, help="CP ranks.")
@click.option(
    "--layers", type=click.IntRange(1, 1024), default=1, show_default=True, help="Layers: only their number of reports changes."
)
@click.option("--reclaim-device-valid", is_flag=True, help="Let host copies of nodes that are on the device be reclaimed, last.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), default=Path("out/study-hits.json"), show_default=True)
@click.option("--resume", is_flag=True, help="Keep the rows that --out has, and serve the other sizes.")
def hits_command(
    *,
    trace: Path | None,
    requests: int | None,
    devices: tuple[int, ...],
    hosts: tuple[int, ...],
    page_size: int,
    cp_size: int,
    layers: int,
    reclaim_device_valid: bool,
    out: Path,
    resume: bool,
) -> None:
    """Hit rate by tier, recomputed tokens and refusals of each device and host size over a trace, beside a cache without limits.

    A size is written to --out when it is finished; an interrupt keeps it.
    """
    with deferred_signals():
        from cphicache.run.study.hits import ROW_NUMBERS, digest, infinite_hits, study
        from cphicache.run.study.serve import ServeConfig

    config = ServeConfig(page_size=page_size, cp_size=cp_size, layers=layers, reclaim_device_valid=reclaim_device_valid)
    _require_pages(config, devices, hosts)
    require_place("--out", out)
    served = _read(trace, requests)
    sizes = list(product(sorted(set(devices)), sorted(set(hosts))))
    tokens, bound = infinite_hits(served, page_size)
    about = {
        "trace": trace.name if trace else "synthetic",
        "requests": len(served),
        **{name: value for name, value in asdict(config).items() if name not in ("device_tokens", "host_tokens")},
        "prompt tokens": tokens,
        "digest of the requests": digest(served),
        "bound": bound / tokens,
    }
    results: dict[str, Any] = {"study": "hits", "about": about, "rows": []}
    if resume and out.exists():
        kept = read_rows(out, "hits", ROW_NUMBERS)
        check_same(out, kept["about"], about, _HITS_OPTIONS)
        results["rows"] = kept["rows"]
    known = {(row["device tokens"], row["host tokens"]) for row in results["rows"]}
    missing = sum(size not in known for size in sizes)
    written = bool(known)

    def keep() -> None:
        nonlocal written
        write_rows(out, results)
        written = True

    try:
        with _progress("serving", missing * len(served)) as advance:
            study(config, served, sizes, results["rows"], on_row=keep, on_request=advance)
    except KeyboardInterrupt:
        come = f"finished sizes are in {out}, go on with --resume" if written else "no size was finished, and nothing is written"
        click.echo(f"cphicache: interrupted; {come}", err=True)
        sys.exit(130)
    except ValueError as error:
        raise Failure(str(error)) from error
    table = Table(
        "device", "host", "device hits", "host hits", "recomputed tokens", "refused", "too long", box=None, pad_edge=False
    )
    for column in table.columns:
        column.justify = "right"
    for row in sorted(results["rows"], key=lambda row: (row["device tokens"], row["host tokens"])):
        table.add_row(
            f"{row['device tokens']:,}",
            f"{row['host tokens']:,}",
            f"{row['device hit rate']:.1%}",
            f"{row['host hit rate']:.1%}",
            f"{row['recomputed tokens']:,}",
            f"{row['backups refused']:,}",
            f"{row['too long']:,}",
        )
    console = Console(soft_wrap=True)
    console.print(
        f"{about['trace']}, {len(served):,} requests of {tokens:,} prompt tokens; without limits {bound / tokens:.1%} are hits"
    )
    console.print(table)


@study_command.command("serve", cls=OneLineCommand)
@click.option("--trace", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Mooncake JSONL; default: synthetic.")
@click.option("--requests", type=REQUESTS, help="The first so many requests; of the synthetic workload 400.")
@click.option("--device-tokens", type=TOKENS, default=1_000_000, show_default=True, help="Device pool.")
@click.option("--host-tokens", type=TOKENS, default=4_000_000, show_default=True, help="Host pool.")
@click.option("--page-size", type=click.IntRange(1, 1024), default=64, show_default=True, help="Tokens of a page.")
@click.option("--cp-size", type=click.IntRange(1, 64), default=1, show_default=True, help="CP ranks.")
@click.option("--layers", type=click.IntRange(1, 1024), default=61, show_default=True, help="Layers.")
@click.option("--no-overlap", is_flag=True, help="Back up all layers after the forward.")
@click.option(
    "--flame", type=click.Path(dir_okay=False, path_type=Path), help="Write a flame graph: .svg, .html, or .json (speedscope)."
)
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), default=Path("out/study-serve.json"), show_default=True)
def serve_command(
    *, trace: Path | None, requests: int | None, no_overlap: bool, flame: Path | None, out: Path, **sizes: Any
) -> None:
    """What a trace at its real lengths costs the scheduler's thread: requests a second, CPU time by part, peak memory.

    Tree, lifecycle, ledger and eviction are the real ones; pools have their real size and hold no bytes. An interrupt writes and shows
    how far it came.
    """
    with deferred_signals():
        from cphicache.run.study.profile import CostedRun, FlameGraph
        from cphicache.run.study.serve import ServeConfig

    config = ServeConfig(overlap=not no_overlap, **sizes)
    _require_pages(config, [config.device_tokens], [config.host_tokens])
    require_place("--out", out)
    graph = FlameGraph(flame)
    served = _read(trace, requests)
    interrupted = False
    try:
        with _progress("serving", len(served)) as advance, graph:
            run = CostedRun(config, served, advance, parts=flame is None)
            try:
                run.run()
            except KeyboardInterrupt:
                interrupted = True
    except ValueError as error:
        raise Failure(str(error)) from error
    row = run.row()
    about = {
        "trace": trace.name if trace else "synthetic",
        **asdict(config),
        "profiled": flame is not None,
        "whole": not interrupted,
    }
    _show_served(about["trace"], config, row)  # first: a file that cannot be written any more takes nothing with it
    write_rows(out, {"study": "serve", "about": about, "rows": [row]})
    graph.write()
    if interrupted:
        click.echo(f"cphicache: interrupted after {row['requests']:,} of {row['of']:,} requests; that part is in {out}", err=True)
        sys.exit(130)


def _show_served(name: str, config: ServeConfig, row: dict[str, Any]) -> None:
    console = Console(soft_wrap=True)
    console.print(
        f"{name}: {row['requests']:,} of {row['of']:,} requests, {row['prompt tokens']:,} prompt tokens, {config.layers} layers; "
        f"device pool of {config.device_tokens:,} tokens, host pool of {config.host_tokens:,}"
    )
    table = Table("", "", box=None, pad_edge=False, show_header=False)
    table.columns[1].justify = "right"
    table.add_row("requests a second", f"{row['requests a second']:,.0f}")
    table.add_row("CPU time", f"{row['cpu s']:,.1f} s, for {row['virtual s']:,.0f} s of the trace")
    table.add_row("peak memory", f"{row['peak memory bytes'] / 2**20:,.0f} MiB")
    for figure in ("backups reserved", "backups committed", "backups rolled back", "backups refused", "tokens a committed backup"):
        table.add_row(figure, f"{row[figure]:,.0f}")
    for figure in ("device evictions", "evicted without host copy", "host evictions", "device hits", "host hits", "retracted"):
        table.add_row(figure, f"{row[figure]:,}")
    console.print(table)
    parts = Table("part", "seconds", "share", box=None, pad_edge=False)
    for column in parts.columns[1:]:
        column.justify = "right"
    for part, seconds in row["seconds by part"].items():
        parts.add_row(part, f"{seconds:,.2f}", f"{seconds / max(row['cpu s'], 1e-9):.1%}")
    console.print(parts)


def _require_pages(config: ServeConfig, devices: Sequence[int], hosts: Sequence[int]) -> None:
    least = config.page_size * config.cp_size
    for option, tokens in (("--device-tokens", min(devices)), ("--host-tokens", min(hosts))):
        if tokens < least:
            raise Failure(
                f"{option} {tokens}: is less than a page of {config.page_size} tokens for each of {config.cp_size} CP ranks; "
                f"give at least {least}"
            )


def _read(trace: Path | None, limit: int | None) -> list[Any]:
    from cphicache.run.config import SYNTHETIC_REQUESTS
    from cphicache.run.synthetic import synthetic_trace
    from cphicache.run.trace import TraceError, read_trace

    if trace is None:
        return synthetic_trace(limit or SYNTHETIC_REQUESTS, 0)
    try:
        return read_trace(trace, limit)
    except TraceError as error:
        raise Failure(str(error)) from error


@contextmanager
def _progress(text: str, total: int) -> Iterator[Callable[[], object]]:
    """A progress bar on standard error; call what it gives for one more."""
    console = Console(stderr=True)
    columns = (TextColumn(text), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(text, total=total)
        yield lambda: bar.advance(task)
