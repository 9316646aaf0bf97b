"""The mutants that `make mutate` makes, and those that are listed as equivalent."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.mutation.__main__ import PARTS, modules_of
from tests.mutation.equivalent import EQUIVALENT
from tests.mutation.operators import Module
from tests.mutation.running import replace_code

SOURCE = '''
def larger(a: int, b: int = 0) -> int:
    """A docstring with 1 number."""
    if a < b and not b > 9:
        raise ValueError(f"{a + 1} is smaller")
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
        "without not@4", "> -> >=@4", "9 -> 10@4", "left out@5", "left out@6", "return None@7", "- -> +@7", "max -> min@7", "1 -> 2@7",
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


def test_every_equivalent_mutant_exists() -> None:
    """R30: the list of mutants that need no test does not outlive the lines that they change, and each says why."""
    names = {mutant.name for part in PARTS for module in modules_of(part) for mutant in module.mutants}
    assert set(EQUIVALENT) - names == set()
    assert all(reason.strip() for reason in EQUIVALENT.values())
