"""The one error of this package: what a user asked for cannot work."""

from __future__ import annotations

import sys


class SglangRefused(ValueError):
    """The backend does not start. One line: what was found, and what to do."""


def say(text: str) -> None:
    """One line on stderr: SGLang's logging is not configured yet where plug-ins load, and it swallows their errors."""
    print(f"[cphicache] {text}", file=sys.stderr, flush=True)
