"""``make planted``: plants each bug in turn, and fails unless its catcher catches it, and the seeds used pass without it.

(That worlds and tests pass without a bug is what `make explore` and `make test` show.)

    python -m tests.planted [--docs docs/testing.md] [NUMBER ...]
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
from pathlib import Path

from tests.planted.bugs import BUGS, ROOT, Bug

CAUGHT = {"test": ({1}, "FAILED tests/"), "explore": ({1}, "a rule is broken"), "simulate": ({10, 11, 12, 13}, "seed")}
"""Exit status and text by which a catcher says that it has found something (and did not only fail to start)."""
BEGIN, END = "<!-- planted: begin -->", "<!-- planted: end -->"
HEAD = ("bug", "place", "caught by", "after (CPU s)")


def run(bug: Bug, number: int | None) -> tuple[int, float, str]:
    """Run a bug's catcher with the bug, or without it: exit status, processor seconds, what it printed."""
    words = [] if number is None else [str(number)]
    extra = {"simulate": ["--no-shrink"], "explore": ["--out", str(ROOT / "out" / "planted")], "test": []}[bug.kind]
    command = [sys.executable, "-m", "tests.planted.run", *words, "--", *bug.catcher.split(), *extra]
    before_s = cpu_s()
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False
    )
    return done.returncode, cpu_s() - before_s, done.stdout + done.stderr


def cpu_s() -> float:
    """Processor time of the children so far: what it takes, however busy the machine is."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def rows(seconds: dict[int, float]) -> list[str]:
    """The table of docs/testing.md."""
    cells = [
        (bug.name, f"`{bug.place}`", f"`{shown(bug)}`", "" if number not in seconds else f"{seconds[number]:.1f}")
        for number, bug in enumerate(BUGS)
    ]
    return [f"| {' | '.join(row)} |" for row in (HEAD, ("---", "---", "---", "---:"), *cells)]


def shown(bug: Bug) -> str:
    """The catcher as a person would call it."""
    return bug.catcher.removeprefix("test ") if bug.kind == "test" else f"cphicache {bug.catcher}"


def write(path: Path, seconds: dict[int, float]) -> None:
    """Put the table between the marks of the page."""
    before, _, rest = path.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    path.write_text("\n".join((before + BEGIN, *rows(seconds), END + after)))


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.planted", description="Plant each bug, and see that it is caught.")
    parser.add_argument(
        "numbers", nargs="*", type=int, choices=[*range(len(BUGS)), []], metavar="NUMBER", help="bugs (default: all)"
    )
    parser.add_argument("--docs", type=Path, metavar="FILE", help="write the table into this page")
    options = parser.parse_args()
    numbers = options.numbers or list(range(len(BUGS)))
    missed, unfair, seconds = list[str](), list[str](), dict[int, float]()
    for seed in {BUGS[number].catcher: BUGS[number] for number in numbers if BUGS[number].kind == "simulate"}.values():
        status, took_s, text = run(seed, None)
        print(f"{took_s:8.1f} s  {'passes without a bug' if status == 0 else 'FAILS WITHOUT A BUG'}: {seed.catcher}", flush=True)
        if status:
            unfair.append(seed.catcher)
            print(text[-2000:], flush=True)
    for number in numbers:
        bug = BUGS[number]
        status, seconds[number], text = run(bug, number)
        codes, said = CAUGHT[bug.kind]
        caught = status in codes and said in text
        print(
            f"{seconds[number]:8.1f} s  {'caught' if caught else 'NOT CAUGHT'}: {bug.name}  ({bug.catcher}: {status})", flush=True
        )
        if not caught:
            missed.append(bug.name)
            print(text[-2000:], flush=True)
    if options.docs is not None and not missed and not unfair and not options.numbers:
        write(options.docs, seconds)
    print(f"{len(numbers) - len(missed)} of {len(numbers)} caught")
    return 1 if missed or unfair else 0


if __name__ == "__main__":
    sys.exit(main())
