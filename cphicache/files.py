"""Files that are there as a whole, or not at all."""

from __future__ import annotations

import errno
import os
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
    partial = _partial(target)
    try:
        yield partial
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def check_place(path: Path) -> None:
    """Make the folder of ``path``, and raise the OSError that :func:`whole_file` would end with: before the work, not after it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    target = path.resolve()
    if target.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if target.exists() and not target.is_file():
        if not os.access(target, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return
    partial = _partial(target)
    try:
        partial.touch()
    finally:
        partial.unlink(missing_ok=True)


def _partial(target: Path) -> Path:
    return target.with_name(f".{target.name}.partial")
