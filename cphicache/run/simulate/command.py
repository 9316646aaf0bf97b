"""``cphicache simulate``. Exit status: 0 fine, 2 unusable input, 130 interrupted, others as in
:class:`~cphicache.run.simulate.outcome.Code`."""

from __future__ import annotations

import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import closing

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from cphicache.run.config import MOST_REQUESTS, MOST_SEED
from cphicache.run.failure import Failure, OneLineCommand
from cphicache.run.numbers import FiniteFloatRange
from cphicache.run.simulate.drawn import DrawnWorld, WorldError, draw
from cphicache.run.simulate.outcome import Code, Outcome
from cphicache.run.simulate.planted import CANARIES
from cphicache.run.simulate.shrink import MOST_TRIES, shrink
from cphicache.run.simulate.workers import ENDED, run_guarded, run_seeds
from cphicache.signals import deferred_signals

DEFAULT_SEEDS = "1..100"
INTERRUPTED = 130
_FIRST_CANARY = next(iter(CANARIES))
_MOST_DIGITS = 1000
"""Of a seed with its leading zeros: Python reads a few thousand."""


@click.command("simulate", cls=OneLineCommand)
@click.option("--seed", type=click.IntRange(0, MOST_SEED), help="Run the world of this seed.")
@click.option("--seeds", metavar="A..B", help=f"Run the worlds of these seeds, both ends included. [default: {DEFAULT_SEEDS}]")
@click.option("--world", "world_json", metavar="JSON", help="Run this world, as a failing seed prints it.")
@click.option("--jobs", type=click.IntRange(1, 256), default=1, show_default=True, help="Processes.")
@click.option("--keep-going", is_flag=True, help="Go on after a failing seed.")
@click.option(
    "--canary",
    is_flag=False,
    flag_value=_FIRST_CANARY,
    type=click.Choice(list(CANARIES)),
    help=f"Plant a bug, which must be caught: {'; '.join(f'{canary.name}: {canary.text}' for canary in CANARIES.values())}. "
    f"[{_FIRST_CANARY}]",
)
@click.option("--no-shrink", "shrinking", flag_value=False, default=True, help="Print failing worlds as they are.")
@click.option("--cpu-s", type=FiniteFloatRange(1.0, 86400.0), default=60.0, show_default=True, help="Processor time for one world.")
def simulate_command(
    *,
    seed: int | None,
    seeds: str | None,
    world_json: str | None,
    jobs: int,
    keep_going: bool,
    canary: str | None,
    shrinking: bool,
    cpu_s: float,
) -> None:
    """Draw whole worlds from seeds - sizes, policies, ranks, requests, delays, faults -, run them on the classes that serve, and check
    every byte, slot, lock and hold from outside.

    Stops at the first failure: 10 wrong bytes, 11 broken invariant, 12 no progress, 13 crash; 14 if a planted bug was not caught.
    Interrupted, it says how many worlds have passed and which seeds are left, and ends with 130 unless one has failed.
    """
    if sum(given is not None for given in (seed, seeds, world_json)) > 1:
        raise Failure("--seed, --seeds and --world say the same thing in three ways; give one of them")
    chosen = range(seed, seed + 1) if seed is not None else _range(seeds or DEFAULT_SEEDS)
    try:
        world = None if world_json is None else DrawnWorld.from_json(world_json)
    except WorldError as error:
        raise Failure(f"--{error}") from error

    with deferred_signals():
        import torch

    torch.set_num_threads(1)  # the ranks are threads already
    runner = _Runner(canary, shrinking=shrinking, cpu_s=cpu_s)
    try:
        if world is None:
            runner.run_seeds(chosen, jobs=min(jobs, len(chosen)), keep_going=keep_going)
        else:
            runner.run_world(world)
    except KeyboardInterrupt:
        sys.exit(runner.interrupted(chosen if world is None else ()))
    sys.exit(runner.close())


class _Runner:
    """Runs, prints failures, and sums up."""

    def __init__(self, canary: str | None, *, shrinking: bool, cpu_s: float) -> None:
        self._canary = canary
        self._shrinking = shrinking
        self._cpu_s = cpu_s
        self._seen = Counter[str]()
        self._worlds = 0
        self._ended: set[int] = set()
        self._failures: list[tuple[str, Outcome]] = []

    def run_seeds(self, seeds: Sequence[int], *, jobs: int, keep_going: bool) -> None:
        console = Console(stderr=True)
        columns = (TextColumn("simulating"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
            task = progress.add_task("simulating", total=len(seeds))
            with closing(run_seeds(seeds, jobs=jobs, canary=self._canary, cpu_s=self._cpu_s)) as found:
                for done in found:
                    self._note(f"seed {done.seed}", done.outcome)
                    self._ended.add(done.seed)
                    progress.advance(task)
                    if done.outcome.code:
                        progress.stop()
                        found_by = f"cphicache simulate --seed {done.seed}{self._canary_option()}"
                        self._explain(draw(done.seed), done.outcome, found_by)
                        if not keep_going:
                            return
                        progress.start()

    def run_world(self, world: DrawnWorld) -> None:
        outcome = run_guarded(world, "the world", self._canary, self._cpu_s)
        self._note("the world", outcome)
        if outcome.code:
            self._explain(world, outcome, self._command(world))

    def interrupted(self, seeds: Sequence[int]) -> int:
        """Say how far it came: seeds behind the first one that has not ended may have ended too, and are run again. The exit status."""
        failed = [name for name, _ in self._failures]
        said = f"{self._worlds - len(failed)} of {len(seeds) or 1} worlds passed, {', '.join(failed) or 'none'} failed"
        first = next((seed for seed in seeds if seed not in self._ended), None)
        rest = "" if first is None else f"; go on with --seeds {first}..{seeds[-1]}"
        click.echo(f"cphicache: interrupted: {said}{rest}", err=True)
        return self._failures[0][1].code if self._failures and self._canary is None else INTERRUPTED

    def close(self) -> int:
        """Print what was seen; the exit status."""
        if self._canary is not None:
            return self._close_canary()
        if self._seen:
            Console().print(_table(self._worlds, self._seen))
        failed = [name for name, _ in self._failures]
        click.echo(f"{self._worlds} worlds, {len(failed)} failed{': ' if failed else ''}{', '.join(failed)}")
        return self._failures[0][1].code if self._failures else Code.FINE

    def _close_canary(self) -> int:
        canary = CANARIES[self._canary or _FIRST_CANARY]
        wanted = [(name, outcome) for name, outcome in self._failures if outcome.code in canary.codes]
        if wanted:
            click.echo(f"canary {canary.name} ({canary.text}): caught at {wanted[0][0]} as {wanted[0][1].code.text}")
            return wanted[0][1].code
        codes = " or ".join(code.text for code in canary.codes)
        others = "".join(f"; {name} failed as {outcome.code.text}" for name, outcome in self._failures)
        said = f"canary {canary.name} ({canary.text}): NOT caught as {codes} by {self._worlds} worlds{others}"
        click.echo(f"cphicache: {said}", err=True)
        return Code.CANARY_MISSED

    def _note(self, name: str, outcome: Outcome) -> None:
        self._worlds += 1
        self._seen.update(outcome.seen)
        if outcome.code:
            self._failures.append((name, outcome))
            click.echo(f"cphicache: {name}: {outcome.code.text}: {outcome.text}", err=True)

    def _explain(self, world: DrawnWorld, outcome: Outcome, command: str) -> None:
        click.echo(f"to repeat:    {command}")
        if not self._shrinking or outcome.kind == ENDED:
            return
        tries = MOST_TRIES if outcome.code != Code.NO_PROGRESS else MOST_TRIES // 4  # these take their time

        def run(smaller: DrawnWorld) -> Outcome:
            return run_guarded(smaller, "a smaller world", self._canary, self._cpu_s)

        small, how = shrink(world, outcome, run, tries=tries)
        click.echo(f"shrunk to:    {self._command(small)}")
        click.echo(f"which fails:  {how.text}")

    def _command(self, world: DrawnWorld) -> str:
        return f"cphicache simulate --world {shlex.quote(world.to_json())}{self._canary_option()}"

    def _canary_option(self) -> str:
        return "" if self._canary is None else f" --canary {self._canary}"


def _range(text: str) -> range:
    first, dots, last = text.partition("..")
    if not (dots and first.isascii() and first.isdigit() and last.isascii() and last.isdigit()):
        raise Failure(f"--seeds {text}: is not a range; give it as 1..1000")
    if max(map(len, (first, last))) > _MOST_DIGITS or int(last) > MOST_SEED:
        raise Failure(f"--seeds {text}: goes beyond the last seed; give at most {MOST_SEED}")
    if not 0 <= int(last) - int(first) < MOST_REQUESTS:
        raise Failure(f"--seeds {text}: is not a range of 1 to {MOST_REQUESTS} seeds; give it as 1..1000")
    return range(int(first), int(last) + 1)


def _table(worlds: int, seen: Counter[str]) -> Table:
    out = Table(title=f"{worlds} worlds", show_header=False, title_justify="left")
    out.add_column("what")
    out.add_column("count", justify="right")
    for name, count in seen.items():
        out.add_row(name, f"{count:,}")
    return out
