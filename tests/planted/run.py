"""Runs a catcher with a bug planted: ``python -m tests.planted.run NUMBER`` (without a number: without a bug) ``-- CATCHER...``."""

from __future__ import annotations

import sys

import pytest

from tests.planted.bugs import BUGS
from tests.replaced import Replaced


def main(arguments: list[str]) -> int:
    """Exit status of the catcher."""
    at = arguments.index("--")
    number, catcher = arguments[:at], arguments[at + 1 :]
    if number:
        bug = BUGS[int(number[0])]
        Replaced(bug.path, compile(bug.source, str(bug.path), "exec", dont_inherit=True)).install()
    if catcher[0] == "test":
        return int(
            pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not soak and not gpu", *catcher[1:]])
        )
    from cphicache.run.cli import main as command

    command(catcher, prog_name="cphicache")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
