"""Plots of benchmarks and studies: costs over sizes, what overlap gains, hit rates. Needs matplotlib (the ``plots`` extra)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cphicache.files import whole_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Rows = Sequence[Mapping[str, Any]]
_TREE = ("tick-growth", "lifecycle-growth", "ledger-growth", "match-growth", "insert-growth", "evict-growth")
_COSTS = {
    "cost-over-tree": (_TREE, "nodes (leaves, records)", "Cost of an operation over the size of the tree"),
    "cost-over-layers": (("layers-growth",), "layers", "Reports of a forward with one pending node, without copies"),
    "cost-over-ranks": (("ranks-growth",), "ranks (CP size)", "One rank's part of a backup of 16 pages, without copies"),
    "cost-over-pages": (("pages-growth",), "pages of the node", "A node's backup, without copies"),
}
_FLAT = 3
"""Costs that differ less than by this are drawn from 0 on, others in powers of ten."""
_LAYERED, _WHOLE = "tab:blue", "tab:orange"


def write_plots(results: Path, to: Path) -> list[Path]:
    """Draw what the folder ``results`` has (``bench.json``, ``study-*.json``) as SVG files in ``to``; returns them. ImportError without
    matplotlib, ValueError when there is nothing to draw or a file is not of that kind."""
    import matplotlib as mpl
    import orjson

    mpl.use("svg")
    mpl.rcParams.update(
        {"svg.hashsalt": "cphicache", "axes.grid": True, "grid.alpha": 0.3, "font.size": 9, "legend.frameon": False}
    )
    figures: dict[str, Figure] = {}
    there = []
    drawers: dict[str, Callable[[Mapping[str, Any]], dict[str, Figure]]] = {
        "bench.json": costs,
        "study-overlap.json": overlap,
        "study-hits.json": hits,
    }
    for name, draw in drawers.items():
        path = results / name
        try:
            content = path.read_bytes() if path.is_file() else None
        except OSError as error:
            raise ValueError(f"{path}: cannot be read ({error.strerror or error}); give other --results") from error
        if content is not None:
            there.append(path)
            try:
                figures.update(draw(orjson.loads(content)))
            except (ValueError, LookupError, TypeError, AttributeError) as error:  # whatever is not as bench and study write it
                reason = f"{type(error).__name__}: {error}"
                raise ValueError(
                    f"{path}: is damaged, or of another version ({reason}); have it written anew, or remove it"
                ) from error
    if not figures and there:
        empty = f"{', '.join(map(str, there))}: no row to draw"
        raise ValueError(f"{empty}; run cphicache bench (its growth rows), or cphicache study, again")
    if not figures:
        raise ValueError(f"{results}: holds none of {', '.join(drawers)}; run cphicache bench or cphicache study first")
    to.mkdir(parents=True, exist_ok=True)
    written = []
    for name, figure in figures.items():
        path = to / f"{name}.svg"
        with whole_file(path) as file:
            figure.savefig(file, format="svg", metadata={"Date": None})
        written.append(path)
    return written


def costs(found: Mapping[str, Any]) -> dict[str, Figure]:
    """Costs over sizes, of the growth rows of a benchmark that are there."""
    named = {row["name"]: row for row in found["rows"]}
    rows = {name: row for name, row in named.items() if "sizes" in row.get("details", ())}
    figures = {}
    for name, (wanted, unit, title) in _COSTS.items():
        there = [rows[row] for row in wanted if row in rows]
        if not there:
            continue
        figure, axes = _axes(title)
        for row in there:
            details = row["details"]
            label = f"{row['what'].partition(',')[0]} (exponent {row['median']:.2f})"
            axes.plot(details["sizes"], details["us"], marker="o", markersize=3, label=label)
        axes.set(xscale="log", xlabel=unit, ylabel="CPU time, microseconds")
        sizes = sorted({size for row in there for size in row["details"]["sizes"]})
        axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
        axes.minorticks_off()
        us = [value for row in there for value in row["details"]["us"]]
        if max(us) > _FLAT * min(us):
            axes.set_yscale("log")
            for which in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
                which("{x:,g}")
        else:
            axes.set_ylim(0, 1.1 * max(us))  # what hardly grows shows as what it is
        figure.legend(loc="outside lower center", fontsize=8)  # below: lines may be anywhere
        figures[name] = figure
    return figures


def overlap(found: Mapping[str, Any]) -> dict[str, Figure]:
    """Time to done copies and exposed stall over the link's bandwidth."""
    about, rows = found["about"], found["rows"]
    setting = f"{about['layers']} layers of {about['compute_us']:g} us, {about['tokens']:,} tokens, CP {about['cp_size']}"
    figure, (times, stalls) = _two_axes(f"Backup on a virtual clock: {setting}, device pool of {about['pool_chunks']:g} chunks")
    xs = [row["gb_per_s"] for row in rows]
    for name, colour in (("per layer", _LAYERED), ("all layers", _WHOLE)):
        label = "layer by layer" if name == "per layer" else "all layers after the forward"
        times.plot(xs, [row[f"{name} copied ms"] for row in rows], marker="o", markersize=3, color=colour, label=label)
        stalls.plot(xs, [100 * row[f"{name} stall"] for row in rows], marker="o", markersize=3, color=colour, label=label)
    times.set(xscale="log", yscale="log", xlabel="D2H of one rank, GB/s", ylabel="last KV store to copies done, ms")
    stalls.set(xscale="log", xlabel="D2H of one rank, GB/s", ylabel="forward stalled, % of the time")
    for axes in (times, stalls):
        axes.axvline(about["gb_per_s"], color="grey", linestyle=":", linewidth=1, label=f"preset {about['preset']}")
        axes.legend()
    return {"overlap": figure}


def hits(found: Mapping[str, Any]) -> dict[str, Figure]:
    """Hit rate over the host pool, a curve a device pool, with the bound of a cache without limits."""
    about, rows = found["about"], found["rows"]
    figure, axes = _axes(f"Hit rate, {about['trace']}, {about['requests']:,} requests")
    devices = sorted({row["device tokens"] for row in rows})
    for place, device in enumerate(devices):
        mine = sorted((row for row in rows if row["device tokens"] == device), key=lambda row: row["host tokens"])
        xs = [row["host tokens"] for row in mine]
        colour = f"C{place}"
        both = [100 * (row["device hit rate"] + row["host hit rate"]) for row in mine]
        axes.plot(xs, both, marker="o", markersize=3, color=colour, label=f"device {device:,} tokens: device and host")
        on_device = [100 * row["device hit rate"] for row in mine]
        axes.plot(
            xs, on_device, marker="o", markersize=3, linestyle="--", color=colour, label=f"device {device:,} tokens: device alone"
        )
    axes.axhline(100 * about["bound"], color="black", linestyle=":", linewidth=1, label="cache without limits")
    axes.set(xscale="log", xlabel="host pool, tokens", ylabel="prompt tokens that were not computed, %", ylim=(0, None))
    axes.legend()
    return {"hits": figure}


def _axes(title: str) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, fontsize=10)
    return figure, axes


def _two_axes(title: str) -> tuple[Figure, Sequence[Axes]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    figure.suptitle(title, fontsize=10)
    return figure, [figure.add_subplot(1, 2, place) for place in (1, 2)]
