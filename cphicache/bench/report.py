"""Results as JSON and as a Markdown table, and the generated part of docs/performance.md."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson

from cphicache import __version__
from cphicache.bench.harness import Bench, Effort, Measured
from cphicache.files import whole_file

SCHEMA = 1
BEGIN, END = "<!-- generated: begin -->\n", "<!-- generated: end -->\n"
HEAD = ("row", "what", "measured", "spread", "must", "aim", "")


class ResultsError(ValueError):
    """A file of results, or one with a place for them, cannot be used."""


def result_of(bench: Bench, measured: Measured, effort: Effort) -> dict[str, Any]:
    """One finished row as plain data."""
    value, target = measured.value, bench.target
    return {
        "name": bench.name,
        "what": bench.what,
        "unit": measured.unit,
        "median": value.median,
        "low": value.low,
        "high": value.high,
        "rounds": measured.rounds,
        "effort": asdict(effort),
        "must": None if target is None else target.must,
        "aim": None if target is None else target.aim,
        "better": None if target is None else target.better,
        "met_must": None if target is None else target.met(value.median, target.must),
        "met_aim": None if target is None else target.met(value.median, target.aim),
        "details": measured.details,
    }


def missing_result(bench: Bench, why: str) -> dict[str, Any]:
    """A row whose other side is not installed."""
    return {"name": bench.name, "what": bench.what, "missing": why}


def read_results(path: Path) -> dict[str, dict[str, Any]]:
    """Rows by name of an earlier run; none when there is no file. Raises :class:`ResultsError` for one that is something else."""
    try:
        found = orjson.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, orjson.JSONDecodeError) as error:
        raise ResultsError(f"{path}: cannot be read as results ({error}); give another file, or remove it") from error
    if not isinstance(found, dict) or found.get("schema") != SCHEMA:
        raise ResultsError(f"{path}: holds no results of schema {SCHEMA}; give another file, or remove it")
    rows = found.get("rows")
    if not isinstance(rows, list) or not all(isinstance(row, dict) and isinstance(row.get("name"), str) for row in rows):
        raise ResultsError(f"{path}: is damaged (rows are no list of objects with a name); give another file, or remove it")
    return {row["name"]: row for row in rows}


def check_effort(path: Path, known: Mapping[str, Mapping[str, Any]], effort: Effort) -> None:
    """Raise :class:`ResultsError` if a row of the file was measured with another effort: a table is of one run."""
    wanted = asdict(effort)
    for name, row in known.items():
        found = row.get("effort", wanted if "missing" in row else None)
        if found != wanted:
            raise ResultsError(
                f"{path}: row {name} was measured with {_options(found)}, this run measures with {_options(wanted)}; "
                "give the same options, or leave --resume away"
            )


def _options(effort: Mapping[str, Any] | None) -> str:
    return (
        "unknown options" if effort is None else " ".join(f"--{name.replace('_', '-')} {value}" for name, value in effort.items())
    )


def write_results(path: Path, results: Mapping[str, Mapping[str, Any]]) -> None:
    """Write all rows so that the file is there as a whole or as it was."""
    encoded = orjson.dumps({"schema": SCHEMA, "made on": machine(), "rows": list(results.values())}, option=orjson.OPT_INDENT_2)
    _write_whole(path, encoded + b"\n")


def machine() -> str:
    """Where this runs, in one line."""
    return f"cphicache {__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}"


def markdown(results: Sequence[Mapping[str, Any]]) -> str:
    """The table: what was measured, the spread over the rounds, what was to be reached, and whether it was."""
    lines = [_line(HEAD), _line(["---"] * len(HEAD))]
    lines += [_line(_cells(row)) for row in results]
    return "\n".join(lines) + "\n"


def _cells(row: Mapping[str, Any]) -> list[str]:
    if "missing" in row:
        return [f"`{row['name']}`", row["what"], "-", "", "", "", row["missing"]]
    unit = "" if row["unit"] == "exponent" else f" {row['unit']}"
    better = {"higher": "≥ ", "lower": "≤ ", None: ""}[row["better"]]
    bounds = ["" if row[name] is None else f"{better}{_figure(row[name])}" for name in ("must", "aim")]
    spread = f"{_figure(row['low'])} .. {_figure(row['high'])}" if row["rounds"] > 1 else "exact"
    return [f"`{row['name']}`", row["what"], f"{_figure(row['median'])}{unit}", spread, *bounds, verdict(row)]


def verdict(row: Mapping[str, Any]) -> str:
    """``aim``: reached both; ``must``; ``not met``; empty where nothing was set."""
    if row.get("met_must") is None:
        return ""
    return "aim" if row["met_aim"] else "must" if row["met_must"] else "**not met**"


def _figure(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def write_docs(path: Path, results: Sequence[Mapping[str, Any]]) -> None:
    """Put the table into the generated part of a page. Raises :class:`ResultsError` for a page without a place for it."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ResultsError(f"{path}: cannot be read ({error.strerror or error}); give a page with a generated part") from error
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not (begin and end):
        raise ResultsError(f"{path}: has no generated part; put {BEGIN.strip()} and {END.strip()} where the table is to be")
    _write_whole(path, f"{head}{BEGIN}Made on {machine()}.\n\n{markdown(results)}{END}{tail}".encode())


def _write_whole(path: Path, content: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as file:
            file.write_bytes(content)
    except OSError as error:
        raise ResultsError(f"{path}: cannot be written ({error.strerror or error}); give another file") from error
