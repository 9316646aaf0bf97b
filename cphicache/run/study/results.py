"""Results of studies as JSON files: written whole, row by row, read back to go on or to plot."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import orjson

from cphicache.files import check_place
from cphicache.run.failure import Failure, write_whole


def read_rows(path: Path, study: str, numbers: Iterable[str] = ()) -> dict[str, Any]:
    """What :func:`write_rows` has written; without rows when there is no file. Raises :class:`Failure` for anything else, and for a row
    that lacks one of ``numbers``."""
    try:
        found = orjson.loads(path.read_bytes())
    except FileNotFoundError:
        return {"study": study, "about": {}, "rows": []}
    except (OSError, orjson.JSONDecodeError) as error:
        raise Failure(f"{path}: cannot be read as results ({error}); give another file, or remove it") from error
    if not isinstance(found, dict) or found.get("study") != study:
        raise Failure(f"{path}: holds no results of study {study}; give another file, or remove it")
    about, rows = found.get("about"), found.get("rows")
    if not isinstance(about, dict) or not isinstance(rows, list):
        raise Failure(f"{path}: is damaged (about and rows are not an object and a list); give another file, or remove it")
    for place, row in enumerate(rows):
        for name in numbers:
            if not isinstance(row, dict) or type(row.get(name)) not in (int, float):
                raise Failure(f"{path}: is damaged (row {place} has no number {name!r}); give another file, or remove it")
    return found


def check_same(path: Path, kept: Mapping[str, Any], here: Mapping[str, Any], options: Mapping[str, str]) -> None:
    """Rows of two runs are told apart by nothing: raises :class:`Failure` where what ``path`` is about (``kept``) is not what this run is
    about (``here``). ``options``: those that a user sets, by field."""
    for name, value in orjson.loads(orjson.dumps(here)).items():
        if name not in kept or kept[name] != value:
            there = orjson.dumps(kept[name]).decode() if name in kept else "nothing"
            raise Failure(
                f"{path}: is of another run: {options.get(name, name)} is {there} there and {orjson.dumps(value).decode()} here; "
                "give the same, or another --out"
            )


def require_place(option: str, path: Path | None) -> None:
    """Raises :class:`Failure` when a file cannot be written there, so that no run ends in vain."""
    try:
        if path is not None:
            check_place(path)
    except OSError as error:
        raise Failure(f"{option} {path}: cannot be written ({error.strerror or error}); give another file") from error


def write_rows(path: Path, results: dict[str, Any]) -> None:
    """Write results so that the file is there as a whole or as it was. Raises :class:`Failure`."""
    write_whole(path, orjson.dumps(results, option=orjson.OPT_INDENT_2) + b"\n", make_folder=True)
