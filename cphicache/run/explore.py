"""``cphicache explore``: what the command line does with an exploration."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.progress import Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from cphicache.explore import WORLDS, Report, ScenarioError, World, explore
from cphicache.explore.scenario import play, read, write
from cphicache.run.census import take_census

SCENARIO_BYTES = 1 << 24
"""The longest scenario that is read: of what is none, such as a device, more would never end."""


class UnknownWorld(ValueError):
    """No world has that name."""


def worlds_named(names: Iterable[str]) -> list[World]:
    """The worlds of these names, all without any. Raises :class:`UnknownWorld`."""
    chosen = list(dict.fromkeys(names)) or list(WORLDS)
    unknown = [name for name in chosen if name not in WORLDS]
    if unknown:
        raise UnknownWorld(f"unknown world {unknown[0]!r}: give some of {', '.join(WORLDS)}")
    return [WORLDS[name] for name in chosen]


def explore_worlds(
    worlds: Iterable[World], *, max_states: int | None, max_cpu_seconds: float | None, max_faults: int | None, console: Console
) -> list[Report]:
    """Explore one world after the other, with progress on ``console``. An interrupt ends the list with what was seen."""
    reports: list[Report] = []
    columns = (TextColumn("{task.description}"), TimeElapsedColumn(), TextColumn("{task.fields[seen]}"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        for world in worlds:
            task = progress.add_task(world.name, total=None, seen="")
            bounded = world if max_faults is None else replace(world, max_faults=max_faults)
            report = explore(
                bounded,
                take_census,
                max_states=max_states,
                max_cpu_seconds=max_cpu_seconds,
                on_progress=lambda seen, task=task: progress.update(task, seen=_numbers(seen)),  # type: ignore[misc]
            )
            progress.remove_task(task)
            reports.append(report)
            if report.ended_by == "interrupted":
                break
    return reports


def scenario_file(report: Report, folder: Path) -> tuple[Path, str]:
    """Where the scenario of a violation belongs, and its text."""
    if report.violation is None:
        raise ValueError(f"world {report.world!r} has no violation to write")
    return folder / f"explore-{report.world}.txt", write(WORLDS[report.world], report.violation, take_census)


def replay(path: Path) -> tuple[str, bool]:
    """Play a scenario file again. Returns its text as it is now, and whether that is the text of the file.

    Raises :class:`~cphicache.explore.ScenarioError` with the file's name.
    """
    try:
        with path.open("rb") as file:
            content = file.read(SCENARIO_BYTES + 1)
        if len(content) > SCENARIO_BYTES:
            raise ScenarioError(f"is longer than {SCENARIO_BYTES} bytes: give a file that explore has written")
        text = content.decode("utf-8")
        name, happenings = read(text)
        lines = play(worlds_named([name])[0], happenings, take_census)
    except OSError as error:
        raise ScenarioError(f"{path}: cannot be read ({error.strerror or error}); give a file that explore has written") from error
    except UnicodeDecodeError as error:
        raise ScenarioError(f"{path}: is not UTF-8 at byte {error.start}; give a file that explore has written") from error
    except (ScenarioError, UnknownWorld) as error:
        raise ScenarioError(f"{path}: {error}") from error
    before = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return "\n".join(lines) + "\n", lines == before


def as_json(reports: Iterable[Report]) -> dict[str, Any]:
    """Reports as plain data."""
    plain = []
    for report in reports:
        values = asdict(report)
        values["violation"] = None if report.violation is None else report.violation.what
        values["states_per_s"] = _rate(report)
        plain.append(values)
    return {"worlds": plain}


def table(reports: Sequence[Report]) -> Group:
    """Reports for people: a row each, and how far those came that were not exhausted."""
    shown = Table(box=None, pad_edge=False)
    for column in ("world", "states", "edges", "depth", "logical", "engine calls", "CPU s", ""):
        shown.add_column(column, justify="left" if column in ("world", "") else "right")
    for report in reports:
        verdict = "[red]violation[/red]" if report.violation else "exhausted" if report.complete else "bounded"
        numbers = (report.states, report.edges, report.depth, report.logical, report.steps)
        cells = [f"{number:,}" for number in numbers]
        shown.add_row(report.world, *cells, f"{report.cpu_seconds:.1f}", verdict)
    notes = [f"{report.world}: bounded: {_how_far(report)}" for report in reports if not (report.violation or report.complete)]
    return Group(shown, *notes)


def _numbers(report: Report) -> str:
    return f"{report.states:,} states, {report.edges:,} edges, depth {report.depth}, {_rate(report):,} states/s"


def _how_far(report: Report) -> str:
    return f"{report.ended_by}; {report.expanded:,} states expanded, every history of up to {report.followed} events followed"


def _rate(report: Report) -> int:
    return round(report.states / report.cpu_seconds) if report.cpu_seconds else 0
