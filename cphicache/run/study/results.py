"""Results of studies as JSON files: written whole, row by row, read back to go on or to plot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson

from cphicache.files import whole_file
from cphicache.run.failure import Failure


def read_rows(path: Path, study: str) -> dict[str, Any]:
    """What :func:`write_rows` has written; without rows when there is no file. Raises :class:`Failure` for anything else."""
    try:
        found = orjson.loads(path.read_bytes())
    except FileNotFoundError:
        return {"study": study, "about": {}, "rows": []}
    except (OSError, orjson.JSONDecodeError) as error:
        raise Failure(f"{path}: cannot be read as results ({error}); give another file, or remove it") from error
    if not isinstance(found, dict) or found.get("study") != study:
        raise Failure(f"{path}: holds no results of study {study}; give another file, or remove it")
    return found


def write_rows(path: Path, results: dict[str, Any]) -> None:
    """Write results so that the file is there as a whole or as it was. Raises :class:`Failure`."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as file:
            file.write_bytes(orjson.dumps(results, option=orjson.OPT_INDENT_2) + b"\n")
    except OSError as error:
        raise Failure(f"{path}: cannot be written ({error.strerror or error}); give another --out") from error
