"""``make mutate``: the mutation score of the parts that decide, and the mutants that survive (see docs/testing.md).

    python -m tests.mutation [--only TEXT] [--again] [PART ...]

Results are kept in out/mutation/ by the text of the file, so that a run can be interrupted and goes on where it was; survivors are
judged anew each time.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import random
import sys
import time
from collections import Counter
from hashlib import sha256
from pathlib import Path

import pytest

from tests.mutation.equivalent import EQUIVALENT
from tests.mutation.operators import Module, Mutant
from tests.mutation.running import SURVIVED, Coverage, Runner, Verdict

ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / "out" / "mutation"
PARTS = ("ledger", "lifecycle", "tree", "engine")
"""Folders of ``cphicache``; the folder of that name in ``tests`` must tell the mutants from the original."""
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
        if self._path.exists() and not again:
            for line in self._path.read_text().splitlines():
                name, text, outcome, test = json.loads(line)
                self._known[name, text] = Verdict(outcome, test)

    def get(self, module: Module, mutant: Mutant) -> Verdict | None:
        """What was found, if it was."""
        return self._known.get((mutant.name, _hash(module.source)))

    def put(self, module: Module, mutant: Mutant, verdict: Verdict) -> None:
        """Keep it at once: a run may be interrupted."""
        KEPT.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.write(json.dumps([mutant.name, _hash(module.source), verdict.outcome, verdict.test]) + "\n")


def _hash(text: str) -> str:
    return sha256(text.encode()).hexdigest()[:16]


def coverage_of(runner: Runner, part: str, paths: list[str]) -> Coverage:
    """Which tests run which lines: kept until a source or test file changes."""
    files = sorted([*(ROOT / "cphicache" / part).rglob("*.py"), *(ROOT / "tests" / part).rglob("*.py")])
    state = _hash("".join(path.read_text() for path in files) + " ".join(paths) + " ".join(runner.tests))
    path = KEPT / f"coverage-{part}-{state}"
    if path.exists():
        found: Coverage = pickle.loads(path.read_bytes())
        return found
    print(f"running {len(runner.tests)} tests once to see which lines they run", flush=True)
    found = runner.cover(paths)
    KEPT.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps(found))
    return found


def order(tests: list[str], coverage: Coverage, killers: Counter[str], longest_s: float) -> list[str]:
    """Tests that have killed in this scope first, then the quickest parameters of each test, then the rest; as many as fit the time."""
    turns = Counter[str]()
    keys: dict[str, tuple[bool, int, float]] = {}
    for test in tests:  # quick ones first
        function = test.partition("[")[0]
        turns[function] += 1
        keys[test] = (not killers[test], turns[function] if not killers[test] else -killers[test], coverage.seconds[test])
    total_s, chosen = 0.0, []
    for test in sorted(tests, key=keys.__getitem__):
        total_s += coverage.seconds[test]
        if chosen and total_s > longest_s:
            continue
        chosen.append(test)
    return chosen


def judge_all(runner: Runner, part: str, modules: list[Module], options: argparse.Namespace) -> Counter[str]:
    """Judge every mutant of the part; totals by outcome."""
    coverage = coverage_of(runner, part, [module.path for module in modules])
    kept, counts = Kept(options.again), Counter[str]()
    todo = [(module, mutant) for module in modules for mutant in module.mutants if options.only in mutant.name]
    if options.sample:
        todo = random.Random(options.seed).sample(todo, min(options.sample, len(todo)))
    killers: dict[tuple[str, str], Counter[str]] = {}
    told_s = time.monotonic()
    for at, (module, mutant) in enumerate(todo):
        if mutant.name in EQUIVALENT:
            counts["equivalent"] += 1
            continue
        verdict = kept.get(module, mutant)
        if verdict is None or verdict.outcome == SURVIVED:
            of_scope = killers.setdefault((mutant.path, mutant.scope), Counter())
            tests, anew = coverage.tests_of(mutant)
            chosen = order(tests, coverage, of_scope, options.seconds)
            verdict = runner.judge(module, mutant, chosen, coverage.seconds, anew=anew) if chosen else Verdict(SURVIVED)
            of_scope[verdict.test] += 1
            kept.put(module, mutant, verdict)
        counts[verdict.outcome] += 1
        if verdict.outcome == SURVIVED:
            print(f"survived: {mutant.name}  (line {mutant.first_line})", flush=True)
        if time.monotonic() - told_s > TOLD_EVERY_S:
            told_s = time.monotonic()
            print(f"{part}: {at + 1} of {len(todo)}  {dict(counts)}", flush=True)
    return counts


def report(totals: dict[str, Counter[str]]) -> bool:
    """Print the table; True if every part has the score that is needed."""
    fine = True
    print(f"{'part':12}{'mutants':>9}{'equivalent':>12}{'killed':>8}{'timed out':>11}{'survived':>10}{'score':>8}")
    for part, counts in totals.items():
        judged = counts.total() - counts["equivalent"]
        score = 1 - counts[SURVIVED] / judged if judged else 1.0
        fine = fine and score >= NEEDED
        cells = (counts.total(), counts["equivalent"], counts["killed"], counts["timed out"], counts[SURVIVED])
        print(f"{part:12}{cells[0]:9}{cells[1]:12}{cells[2]:8}{cells[3]:11}{cells[4]:10}{score:8.1%}")
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
    parser.add_argument("--again", action="store_true", help="judge all anew")
    options = parser.parse_args()
    totals = {part: mutate(part, options) for part in options.parts or PARTS}
    return 0 if report(totals) else 1


def mutate(part: str, options: argparse.Namespace) -> Counter[str]:
    """Judge a part's mutants in a child, which has its tests imported; totals by outcome."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        counts: list[Counter[str]] = []
        runner = Runner(ROOT, lambda runner: counts.append(judge_all(runner, part, modules_of(part), options)))
        options_of_pytest = ["-q", "-s", "--tb=native", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not soak and not gpu"]
        pytest.main([*options_of_pytest, f"--ignore={ROOT / NOT_TRIED}", str(ROOT / "tests" / part)], plugins=[runner])
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
