"""Compares the event logs of ranks: the same logical events, in the same order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from cphicache.events import logical_view, read_events


def first_difference(logs: Sequence[tuple[int, Path]]) -> str | None:
    """Where the logs of ranks (rank, path) first tell another story than that of the first one, in one line; ``None`` if nowhere.

    Raises :class:`~cphicache.events.EventReadError` for a log that is not whole.
    """
    (first_rank, first_log), *others = logs
    for rank, log in others:
        for mine, theirs in zip_longest(_views(first_log), _views(log)):
            if mine is None or theirs is None or mine[1] != theirs[1]:
                return f"the logs of ranks {first_rank} and {rank} differ: {_told(first_rank, mine)}; {_told(rank, theirs)}"
    return None


def _views(log: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    for event in read_events(log):
        view = logical_view(event)
        if view is not None:
            yield event["seq"], view


def _told(rank: int, found: tuple[int, dict[str, Any]] | None) -> str:
    if found is None:
        return f"rank {rank} has no further event"
    seq, view = found
    return f"rank {rank} event {seq} is " + " ".join(f"{name}={value}" for name, value in view.items())
