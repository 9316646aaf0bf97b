"""Runs tests against mutants: one process has everything imported and collected, and a forked child per mutant changes the live code.

A mutant inside a function takes effect by giving every live function its new code object; one in what runs at import by importing all
anew in the child.
"""

from __future__ import annotations

import ast
import gc
import os
import pickle
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FunctionType

import pytest
from _pytest.runner import runtestprotocol

from tests.mutation.operators import Module, Mutant
from tests.mutation.probes import HITS, put_probes
from tests.replaced import Replaced

CPU_S, WALL_S = 1.0, 300.0
"""A test may use so much processor time, and ten times what it takes otherwise; and it may take so long on a busy machine."""
MEMORY_BYTES = 4 << 30
FEW = 4
"""Of the tests of a mutant that is imported anew, so many are tried first, by themselves."""
NOT_JUDGED = 9
"""Exit status of a child that did not get as far as a test."""
SURVIVED, KILLED, TIMED_OUT = "survived", "killed", "timed out"


@dataclass
class Coverage:
    """Which tests run which lines, how long they take (seconds), and what tells whether they have changed since."""

    lines: dict[str, dict[int, set[str]]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    states: dict[str, str] = field(default_factory=dict)

    def add(self, other: Coverage) -> None:
        """Put in what other tests run."""
        self.seconds.update(other.seconds)
        for path, by_line in other.lines.items():
            for line, tests in by_line.items():
                self.lines.setdefault(path, {}).setdefault(line, set()).update(tests)

    def know(self, path: str, lines: Iterable[int]) -> None:
        """These lines of a file have probes: one that no test runs is known as such."""
        of_file = self.lines.setdefault(path, {})
        for line in lines:
            of_file.setdefault(line, set())

    def tests_of(self, mutant: Mutant) -> tuple[list[str], bool]:
        """The tests that run one of the mutant's lines, quick ones first, and False; or, where only an import runs them, the tests that
        run anything of its file (all, if there is nothing in it that runs), and True."""
        of_file = self.lines.get(mutant.path, {})
        known = [of_file[line] for line in range(mutant.first_line, mutant.last_line + 1) if mutant.in_function and line in of_file]
        tests = set[str]().union(*(known or of_file.values())) or (set() if known else set(self.seconds))
        return sorted(tests, key=lambda test: (self.seconds[test], test)), not known


@dataclass(frozen=True)
class Verdict:
    """How a mutant fared, and which test told it from the original."""

    outcome: str
    test: str = ""


class Runner:
    """A pytest plugin in whose session the mutants run: ``work`` is called with it once everything is collected."""

    def __init__(self, root: Path, work: Callable[[Runner], None]) -> None:
        self._root = root
        self._work = work
        self._items: dict[str, pytest.Item] = {}
        self._functions: dict[str, list[FunctionType]] = {}

    def pytest_sessionstart(self) -> None:
        """Property tests need not look for a small example. Set before they are imported."""
        from hypothesis import HealthCheck, Phase, settings

        settings.register_profile(
            "mutation",
            phases=(Phase.explicit, Phase.generate),
            database=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),  # a busy machine must not look like a mutant that was noticed
        )
        settings.load_profile("mutation")

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Instead of running the tests."""
        if session.testsfailed:
            raise session.Interrupted(f"{session.testsfailed} errors while collecting")
        self._items = {item.nodeid: item for item in session.items}
        functions: dict[str, list[FunctionType]] = {}
        for found in gc.get_objects():
            if type(found) is FunctionType:  # asking an object of torch.distributed what it is an instance of makes it warn
                functions.setdefault(found.__code__.co_filename, []).append(found)
        self._functions = functions
        gc.collect()
        gc.freeze()  # children share what is there without copying it
        self._work(self)
        return True

    @property
    def tests(self) -> list[str]:
        """All tests by node id."""
        return list(self._items)

    # -- which test runs what ---------------------------------------------------------------------------------------------------
    def cover(self, modules: Sequence[Module], tests: Sequence[str]) -> Coverage:
        """Run these tests once, in a child, and note which lines of ``modules`` they run. Raises if one fails."""
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            _in_child(lambda: self._cover_here(modules, tests, write))
        os.close(write)
        with os.fdopen(read, "rb") as pipe:
            data = pipe.read()
        os.waitpid(child, 0)
        if not data:
            raise RuntimeError("a test fails or crashes without any mutant: run the tests first")
        found: Coverage = pickle.loads(data)
        return found

    def _cover_here(self, modules: Sequence[Module], tests: Sequence[str], write: int) -> int:
        probed = [(module.path, *self._probe(module)) for module in modules]
        found = Coverage()
        for test in tests:
            for _, _, hits in probed:
                hits[:] = bytes(len(hits))
            started = time.process_time()
            if not _passes(self._items[test]):
                os.write(2, f"fails without any mutant: {test}\n".encode())
                return 1
            found.seconds[test] = time.process_time() - started
            for path, owners, hits in probed:
                for line, statement in owners.items():
                    if hits[statement]:
                        found.lines.setdefault(path, {}).setdefault(line, set()).add(test)
        with os.fdopen(write, "wb") as pipe:
            pipe.write(pickle.dumps(found))
        return 0

    def _probe(self, module: Module) -> tuple[dict[int, int], bytearray]:
        """Probes in all live functions of a module: the statement of each line, and what the probes write."""
        tree = ast.parse(module.source)
        owners = put_probes(tree)
        hits = bytearray(max(owners.values(), default=-1) + 1)
        old = _compiled(module, self._root)
        functions = self._functions.get(old.co_filename, [])
        for function in functions:
            function.__globals__[HITS] = hits
        if owners:
            replace_code(functions, old, compile(tree, old.co_filename, "exec", dont_inherit=True))
        return owners, hits

    # -- one mutant -------------------------------------------------------------------------------------------------------------
    def judge(self, module: Module, mutant: Mutant, tests: Sequence[str], seconds: dict[str, float], *, anew: bool) -> Verdict:
        """Run ``tests`` in this order until one fails. ``anew``: import everything again first, as is done for a mutant that cannot be
        put into live functions. Raises if it cannot be judged at all."""
        verdict = Verdict(SURVIVED)
        for some in (tests[:FEW], tests[FEW:]) if anew else (tests,):  # to collect them takes longer than to run them
            if some and verdict.outcome == SURVIVED:
                verdict = self._judge(module, mutant, some, seconds, anew=anew)
        return verdict

    def _judge(self, module: Module, mutant: Mutant, tests: Sequence[str], seconds: dict[str, float], *, anew: bool) -> Verdict:
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(read)
            _in_child(lambda: (self._judge_anew if anew else self._judge_here)(module, mutant, tests, seconds, write))
        os.close(write)
        with os.fdopen(read, "rb") as pipe:
            begun = pipe.read().decode().splitlines()
        _, status = os.waitpid(child, 0)
        test = begun[-1] if begun else ""
        if os.WIFSIGNALED(status):
            return Verdict(TIMED_OUT if os.WTERMSIG(status) in (signal.SIGVTALRM, signal.SIGALRM) else KILLED, test)
        match os.WEXITSTATUS(status):
            case 0:
                return Verdict(SURVIVED)
            case pytest.ExitCode.TESTS_FAILED | pytest.ExitCode.INTERRUPTED:  # the latter: it cannot even be imported
                return Verdict(KILLED, test)
            case pytest.ExitCode.USAGE_ERROR if anew:  # nor can a test be found whose parameters are made from what is mutated
                return Verdict(KILLED, test)
            case code if code == NOT_JUDGED and not anew:
                return self.judge(module, mutant, tests, seconds, anew=True)
            case code:
                raise RuntimeError(f"{mutant.name}: cannot be judged (exit status {code})")

    def _judge_here(self, module: Module, mutant: Mutant, tests: Sequence[str], seconds: dict[str, float], write: int) -> int:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        old = _compiled(module, self._root)
        mutant.apply()
        replace_code(self._functions[old.co_filename], old, _compiled(module, self._root))
        for test in tests:
            os.write(write, f"{test}\n".encode())
            _limit(seconds[test])
            if not _passes(self._items[test]):
                return int(pytest.ExitCode.TESTS_FAILED)
        return 0

    def _judge_anew(self, module: Module, mutant: Mutant, tests: Sequence[str], seconds: dict[str, float], write: int) -> int:
        os.write(write, b"(imported anew)\n")
        _limit(10 + sum(seconds[test] for test in tests))
        mutant.apply()
        for name, imported in list(sys.modules.items()):
            if Path(getattr(imported, "__file__", None) or "/").is_relative_to(self._root):
                del sys.modules[name]
        Replaced(self._root / module.path, _compiled(module, self._root)).install()
        os.dup2(1, 2)
        return int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *tests], plugins=[_Begun(write)]))


class _Begun:
    """A pytest plugin that tells which test has begun."""

    def __init__(self, write: int) -> None:
        self._write = write

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        os.write(self._write, f"{nodeid}\n".encode())


def _in_child(work: Callable[[], int]) -> None:
    """End this process with what ``work`` returns, whatever happens in it."""
    code = NOT_JUDGED
    try:
        quiet = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1):
            os.dup2(quiet, number)
        code = work()
    finally:
        os._exit(code)


def _limit(usual_s: float) -> None:
    signal.signal(signal.SIGVTALRM, signal.SIG_DFL)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_VIRTUAL, CPU_S + 10 * usual_s)
    signal.setitimer(signal.ITIMER_REAL, WALL_S + 30 * usual_s)


def _passes(item: pytest.Item) -> bool:
    """Run one test with its fixtures, and take all of them down again."""
    reports = runtestprotocol(item, nextitem=None, log=False)
    return not any(report.failed for report in reports)


def _compiled(module: Module, root: Path) -> CodeType:
    return compile(ast.fix_missing_locations(module.tree), str(root / module.path), "exec", dont_inherit=True)


def _nested(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _nested(constant)


def _by_place(code: CodeType) -> dict[tuple[str, int, int], CodeType]:
    found: dict[tuple[str, int, int], CodeType] = {}
    for inner in _nested(code):
        place, turn = (inner.co_qualname, inner.co_firstlineno), 0
        while (*place, turn) in found:
            turn += 1
        found[(*place, turn)] = inner
    return found


def replace_code(functions: Sequence[FunctionType], old: CodeType, new: CodeType) -> None:
    """Give every one of ``functions`` whose code is in ``old`` and differs in ``new`` its new code. Raises if there is none."""
    after = _by_place(new)
    changed = {code: after[place] for place, code in _by_place(old).items() if place in after and after[place] != code}
    live = [function for function in functions if function.__code__ in changed]
    for function in live:
        function.__code__ = changed[function.__code__]
    if not live:
        raise LookupError("no live function has the code that is to be changed")
