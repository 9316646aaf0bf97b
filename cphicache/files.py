"""Files that are there as a whole, or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Where to write what shall become ``path``: a file beside it that takes its place when the block ends well, and goes otherwise.

    A symlink stays one: what it names is replaced. What is there and no regular file (a pipe, a device) is written itself.
    """
    target = path.resolve()
    if target.exists() and not target.is_file():
        yield target
        return
    partial = target.with_name(f".{target.name}.partial")
    try:
        yield partial
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
