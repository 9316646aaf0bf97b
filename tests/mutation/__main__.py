"""``make mutate``: the mutation score of the parts that decide, and the mutants that survive (see docs/testing.md).

    python -m tests.mutation [--only TEXT] [--sample N --seed S] [--seconds S] [--jobs N] [--again] [PART ...]

Results are kept in out/mutation/ by the text of the file, so that a run can be interrupted and goes on where it was; a survivor meets only
tests that it has not survived yet, up to --seconds of them in each run.
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import os
import pickle
import random
import resource
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import TypeAlias

import pytest

from tests.mutation.equivalent import EQUIVALENT
from tests.mutation.operators import Module, Mutant
from tests.mutation.probes import put_probes
from tests.mutation.running import SURVIVED, Coverage, Runner, Verdict

ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / "out" / "mutation"
PARTS = ("ledger", "lifecycle", "tree", "engine")
"""Folders of ``cphicache``; the folder of that name in ``tests`` must tell the mutants from the original."""
MORE_TESTS = {"engine": ("tests/ranks/test_quarantine.py",)}
"""Tests of a part that stand elsewhere."""
NOT_TRIED = "tests/lifecycle/test_deletions.py"
"""Leaves the rows of the transition table out one by one: mutation testing of its own, and slow."""
NEEDED = 0.95
TOLD_EVERY_S = 15


def modules_of(part: str) -> list[Module]:
    """The files of a part with their mutants."""
    paths = sorted((ROOT / "cphicache" / part).glob("*.py"))
    return [Module(str(path.relative_to(ROOT)), ROOT) for path in paths]


class Kept:
    """Verdicts of earlier runs, one line each; those of a file that has changed since are not read."""

    def __init__(self, again: bool) -> None:
        self._path = KEPT / "verdicts.jsonl"
        self._known: dict[tuple[str, str], Verdict] = {}
        self._survived: dict[tuple[str, str], set[str]] = {}
        if self._path.exists() and not again:
            for line in self._path.read_text().splitlines():
                name, text, outcome, test, survived = json.loads(line)
                self._known[name, text] = Verdict(outcome, test)
                self._survived.setdefault((name, text), set()).update(survived)

    def get(self, module: Module, mutant: Mutant) -> Verdict | None:
        """What was found, if it was."""
        return self._known.get((mutant.name, _hash(module.source)))

    def outcome(self, module: Module, mutant: Mutant) -> str:
        """The outcome of one that has been judged."""
        return self._known[mutant.name, _hash(module.source)].outcome

    def survived(self, module: Module, mutant: Mutant) -> set[str]:
        """The tests that did not notice it, as they were then: :func:`states_of`."""
        return self._survived.get((mutant.name, _hash(module.source)), set())

    def killers(self) -> defaultdict[str, Counter[str]]:
        """How many mutants each test has killed, by :func:`places`."""
        killers = defaultdict[str, Counter[str]](Counter)
        for (name, _), verdict in self._known.items():
            if verdict.test:
                for place in places(name):
                    killers[place][verdict.test] += 1
        return killers

    def put(self, module: Module, mutant: Mutant, verdict: Verdict, survived: list[str]) -> None:
        """Keep it at once: a run may be interrupted."""
        KEPT.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.write(json.dumps([mutant.name, _hash(module.source), verdict.outcome, verdict.test, survived]) + "\n")


def places(name: str) -> tuple[str, str, str]:
    """Where a mutant is: function, file, part."""
    path, scope, *_ = name.split("::")
    return f"{path}::{scope}", path, str(Path(path).parent)


def _hash(text: str) -> str:
    return sha256(text.encode()).hexdigest()[:16]


def states_of(runner: Runner, part: str) -> dict[str, str]:
    """By test, what tells whether it is still the same: its name, its file, and what the tests of the part share."""
    shared = sorted([*(ROOT / "tests").glob("*.py"), *(ROOT / "tests" / part).rglob("*.py")])
    common = "".join(path.read_text() for path in shared if not path.name.startswith("test_"))
    files = {file: (ROOT / file).read_text() for file in {test.partition("::")[0] for test in runner.tests}}
    return {test: _hash(common + files[test.partition("::")[0]] + test)[:8] for test in runner.tests}


def coverage_of(runner: Runner, part: str, modules: list[Module]) -> Coverage:
    """Which tests run which lines: kept for each test file until it, or a source file, changes."""
    states, sources = states_of(runner, part), "".join(module.source for module in modules)
    by_file: dict[str, list[str]] = {}
    for test in runner.tests:
        by_file.setdefault(test.partition("::")[0], []).append(test)
    found = Coverage(states=states)
    for file, tests in by_file.items():
        path = KEPT / f"coverage-{Path(file).stem}-{_hash(sources + ''.join(states[test] for test in tests))}"
        if not path.exists():
            print(f"running the {len(tests)} tests of {file} once to see which lines they run", flush=True)
            KEPT.mkdir(parents=True, exist_ok=True)
            path.write_bytes(pickle.dumps(runner.cover(modules, tests)))
        found.add(pickle.loads(path.read_bytes()))
    for module in modules:
        found.know(module.path, put_probes(ast.parse(module.source)))
    return found


def order(tests: list[str], coverage: Coverage, killers: Sequence[Counter[str]], longest_s: float) -> list[str]:
    """Tests that have killed in this function, then in this file, then anywhere (``killers``); then the quickest parameters of each
    other test, then the rest; as many as fit the time, and at least one."""
    turns = Counter[str]()
    keys: dict[str, tuple[float, ...]] = {}
    for test in sorted(tests, key=lambda test: (coverage.seconds[test], test)):
        near = next((at for at, killed in enumerate(killers) if killed[test]), len(killers))
        function = test.partition("[")[0]
        turns[function] += near == len(killers)
        keys[test] = (near, turns[function] if near == len(killers) else -killers[near][test], coverage.seconds[test])
    total_s, chosen = 0.0, list[str]()
    for test in sorted(tests, key=keys.__getitem__):
        if chosen and total_s + coverage.seconds[test] > longest_s:
            continue
        total_s += coverage.seconds[test]
        chosen.append(test)
    return chosen


Todo: TypeAlias = list[tuple[Module, Mutant]]


def judge_all(runner: Runner, part: str, modules: list[Module], options: argparse.Namespace) -> Counter[str]:
    """Judge every mutant of the part; totals by outcome."""
    coverage = coverage_of(runner, part, modules)
    todo = [(module, mutant) for module in modules for mutant in module.mutants if options.only in mutant.name]
    if options.sample:  # of one seed, the larger one holds the smaller one
        random.Random(options.seed).shuffle(todo)
        del todo[options.sample :]
    if options.jobs == 1:
        return judge_some(runner, part, todo, coverage, options)
    jobs = []
    for job in range(options.jobs):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                judge_some(runner, f"{part} ({job + 1} of {options.jobs})", todo[job :: options.jobs], coverage, options)
                status = 0
            finally:
                os._exit(status)
        jobs.append(child)
    statuses = [os.waitpid(child, 0)[1] for child in jobs]
    if any(statuses):
        raise SystemExit(f"error: a job of {part} has ended early")
    kept = Kept(again=False)
    return Counter("equivalent" if mutant.name in EQUIVALENT else kept.outcome(module, mutant) for module, mutant in todo)


def judge_some(runner: Runner, part: str, todo: Todo, coverage: Coverage, options: argparse.Namespace) -> Counter[str]:
    """Judge these mutants; totals by outcome."""
    kept, counts = Kept(options.again), Counter[str]()
    killers = kept.killers()
    told_s = time.monotonic()
    for at, (module, mutant) in enumerate(todo):
        if mutant.name in EQUIVALENT:
            counts["equivalent"] += 1
            continue
        verdict = kept.get(module, mutant)
        near = [killers[place] for place in places(mutant.name)]
        if verdict is None or verdict.outcome == SURVIVED:
            tests, anew = coverage.tests_of(mutant)
            survived = kept.survived(module, mutant)
            chosen = order([test for test in tests if coverage.states[test] not in survived], coverage, near, options.seconds)
            verdict = runner.judge(module, mutant, chosen, coverage.seconds, anew=anew) if chosen else Verdict(SURVIVED)
            kept.put(module, mutant, verdict, [coverage.states[test] for test in chosen] if verdict.outcome == SURVIVED else [])
        for killed in near:
            killed[verdict.test] += 1
        counts[verdict.outcome] += 1
        if verdict.outcome == SURVIVED:
            print(f"survived: {mutant.name}  (line {mutant.first_line})", flush=True)
        if time.monotonic() - told_s > TOLD_EVERY_S:
            told_s = time.monotonic()
            print(f"{part}: {at + 1} of {len(todo)}  {dict(counts)}", flush=True)
    return counts


def interval(fraction: float, count: int) -> tuple[float, float]:
    """Where the score of all mutants lies, by that of a random sample of so many: Wilson's interval of 95 %."""
    z = 1.96
    middle = (fraction + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(fraction * (1 - fraction) / count + z * z / (4 * count * count))
    return middle - half, middle + half


def report(totals: dict[str, Counter[str]], *, sampled: bool) -> bool:
    """Print the table; True if every part has the score that is needed."""
    fine = True
    print(f"{'part':12}{'mutants':>9}{'equivalent':>12}{'killed':>8}{'timed out':>11}{'survived':>10}{'score':>8}")
    for part, counts in totals.items():
        judged = counts.total() - counts["equivalent"]
        score = 1 - counts[SURVIVED] / judged if judged else 1.0
        fine = fine and score >= NEEDED
        cells = (counts.total(), counts["equivalent"], counts["killed"], counts["timed out"], counts[SURVIVED])
        told = "  of all: {:.1%} .. {:.1%}".format(*interval(score, judged)) if sampled and judged else ""
        print(f"{part:12}{cells[0]:9}{cells[1]:12}{cells[2]:8}{cells[3]:11}{cells[4]:10}{score:8.1%}{told}")
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"{usage.ru_utime + usage.ru_stime:.0f} s of processor time in this run")
    return fine


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutation", description="Mutate the parts that decide, and see who notices."
    )
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="which parts (default: all)")
    parser.add_argument("--only", default="", metavar="TEXT", help="mutants with this in their name")
    parser.add_argument("--sample", type=int, default=0, metavar="N", help="only N mutants of each part, drawn by --seed")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="seed of the sample")
    parser.add_argument("--seconds", type=float, default=20.0, metavar="S", help="longest total of tests for one mutant")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes")
    parser.add_argument("--again", action="store_true", help="judge all anew")
    options = parser.parse_args()
    totals = {part: mutate(part, options) for part in options.parts or PARTS}
    return 0 if report(totals, sampled=bool(options.sample)) else 1


def mutate(part: str, options: argparse.Namespace) -> Counter[str]:
    """Judge a part's mutants in a child, which has its tests imported; totals by outcome."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        counts: list[Counter[str]] = []
        runner = Runner(ROOT, lambda runner: counts.append(judge_all(runner, part, modules_of(part), options)))
        paths = [str(ROOT / path) for path in (f"tests/{part}", *MORE_TESTS.get(part, ()))]
        options_of_pytest = ["-q", "-s", "--tb=native", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not soak and not gpu"]
        pytest.main([*options_of_pytest, f"--ignore={ROOT / NOT_TRIED}", *paths], plugins=[runner])
        os.write(write, json.dumps(counts).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        found = json.loads(pipe.read() or "[]")
    os.waitpid(child, 0)
    if not found:
        raise SystemExit(f"error: the tests of {part} could not be run; run them with `make test` first")
    return Counter(found[0])


if __name__ == "__main__":
    sys.exit(main())
