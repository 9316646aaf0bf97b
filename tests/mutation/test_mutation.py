"""The mutants that `make mutate` makes, and those that are listed as equivalent."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest

from tests.mutation.__main__ import PARTS, interval, modules_of, order
from tests.mutation.equivalent import EQUIVALENT
from tests.mutation.operators import Module
from tests.mutation.probes import HITS, put_probes
from tests.mutation.running import Coverage, replace_code

SOURCE = '''
def larger(a: int, b: int = 0) -> int:
    """A docstring with 1 number."""
    if a < b and not b > 9:
        raise ValueError(f"{a + 1} is smaller")
    if a < 0:
        raise AssertionError(f"expected a number of at least 0, found {a}")
    a.note(b)
    return max(a, b) - 1
'''


def changed(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "source.py").write_text(SOURCE)
    texts: dict[str, str] = {}
    for at, mutant in enumerate(Module("source.py", tmp_path).mutants):
        again = Module("source.py", tmp_path)
        again.mutants[at].apply()
        texts[mutant.what + f"@{mutant.first_line}"] = ast.unparse(again.tree)
    return texts


def test_every_mutant_is_another_program(tmp_path: Path) -> None:
    """R30: each change gives a program of its own, and what only people read is left alone."""
    texts = changed(tmp_path)
    assert set(texts) == {
        "0 -> 1@2", "not (a < b and (not b > 9))@4", "and -> or@4", "without a < b@4", "without not b > 9@4", "< -> <=@4",
        "without not@4", "> -> >=@4", "9 -> 10@4", "left out@5", "left out@8", "return None@9", "- -> +@9", "max -> min@9", "1 -> 2@9",
    }  # fmt: skip
    assert len({*texts.values(), ast.unparse(ast.parse(SOURCE))}) == len(texts) + 1


def test_live_functions_get_the_new_code() -> None:
    """R30: a change reaches functions that were imported before, closures and lambdas among them, and none is passed over in silence."""
    old = compile("def f(n):\n    return lambda: n + 1\ng = [lambda n: n < 3]", "made up", "exec")
    new = compile("def f(n):\n    return lambda: n - 1\ng = [lambda n: n <= 3]", "made up", "exec")
    names: dict[str, object] = {}
    exec(old, names)
    f, (g,) = names["f"], names["g"]  # type: ignore[misc]
    replace_code([f, g], old, new)
    assert (f(5)(), g(3)) == (4, True)
    with pytest.raises(LookupError, match="no live function"):
        replace_code([f, g], old, old)


BRANCHES = """
def f(n):
    if n > 1 or (
        n < -1
    ):
        return [
            m for m in range(n)
        ]
    match n:
        case 0:
            x = 1
        case _ if n == 1:
            x = 2
    try:
        x //= n
    except ZeroDivisionError:
        x = 3
    finally:
        x += 1
    return x
"""


@pytest.mark.parametrize(
    ("given", "answer", "lines"),
    [
        (2, [0, 1], {3, 4, 5, 6, 7, 8}),
        (0, 4, {3, 4, 5, 9, 10, 11, 12, 14, 15, 16, 17, 18, 19, 20}),
        (1, 3, {3, 4, 5, 9, 10, 12, 13, 14, 15, 16, 18, 19, 20}),
    ],
)
def test_probes_tell_which_lines_ran(given: int, answer: object, lines: set[int]) -> None:
    """R30: a line counts as run exactly when the innermost statement that holds it has begun; what the code answers is unchanged."""
    tree = ast.parse(BRANCHES)
    owners = put_probes(tree)
    hits = bytearray(max(owners.values()) + 1)
    names: dict[str, object] = {HITS: hits}
    exec(compile(tree, "made up", "exec"), names)
    assert names["f"](given) == answer  # type: ignore[operator]
    assert {line for line, statement in owners.items() if hits[statement]} == lines


def test_coverage_of_several_test_files_adds_up(tmp_path: Path) -> None:
    """R30: whichever file a test is in, a mutant meets the tests that run its lines, quick ones first."""
    (tmp_path / "source.py").write_text(SOURCE)
    mutant = next(mutant for mutant in Module("source.py", tmp_path).mutants if mutant.first_line == 9)
    coverage = Coverage({"source.py": {9: {"slow"}, 4: {"slow"}}}, {"slow": 2.0})
    coverage.add(Coverage({"source.py": {9: {"quick"}, 5: {"raises"}}}, {"quick": 0.1, "raises": 0.1}))
    assert coverage.tests_of(mutant) == (["quick", "slow"], False)


def test_what_has_killed_nearby_is_tried_first_and_the_time_is_kept() -> None:
    """R30: tests that told neighbours from the original come first, nearest ones before all; then one case of each test, quick ones first;
    then the rest. One that does not fit the time leaves it to those that do."""
    coverage = Coverage(seconds={"a[1]": 0.1, "a[2]": 0.2, "b": 0.5, "here": 3.0, "in file": 1.0, "long": 9.0})
    tests, near = list(coverage.seconds), (Counter({"here": 2}), Counter({"here": 1, "in file": 3}))
    assert order(tests, coverage, near, 20.0) == ["here", "in file", "a[1]", "b", "long", "a[2]"]
    assert order(tests, coverage, near, 5.0) == ["here", "in file", "a[1]", "b", "a[2]"]
    assert order(tests, coverage, (Counter(), Counter()), 0.0) == ["a[1]"]


@pytest.mark.parametrize(
    ("fraction", "count", "low", "high"), [(0.5, 100, 0.4038, 0.5962), (0.95, 600, 0.9295, 0.9648), (1.0, 10, 0.7225, 1.0)]
)
def test_a_sample_says_how_sure_it_is(fraction: float, count: int, low: float, high: float) -> None:
    """R30: the score of a sample comes with Wilson's interval (values from a table of it)."""
    assert interval(fraction, count) == pytest.approx((low, high), abs=5e-4)


def test_every_equivalent_mutant_exists() -> None:
    """R30: the list of mutants that need no test does not outlive the lines that they change, and each says why."""
    names = {mutant.name for part in PARTS for module in modules_of(part) for mutant in module.mutants}
    assert set(EQUIVALENT) - names == set()
    assert all(reason.strip() for reason in EQUIVALENT.values())
