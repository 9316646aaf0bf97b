"""Who imports whom, and what an import does to the process."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

MAY_IMPORT_TORCH = (
    "cphicache.agree.distributed",
    "cphicache.bench.",
    "cphicache.check.reference",
    "cphicache.run.",
    "cphicache.sglang.allocator",
    "cphicache.sglang.interleaved",
    "cphicache.sglang.pools",
    "cphicache.sglang.ranks",
    "cphicache.sglang.requests",
    "cphicache.sglang.streams",
    "cphicache.spaces.metadata",
    "cphicache.spaces.tensors",
    "cphicache.transfer.backends",
    "cphicache.transfer.pools",
    "cphicache.transfer.jobs",
    "cphicache.transfer.rank",
)
MUST_NOT_AFTER_ALL = (
    "cphicache.bench.command",
    "cphicache.bench.harness",
    "cphicache.bench.report",
    "cphicache.bench.tree_rows",
    "cphicache.run.cli",
    "cphicache.run.config",
    "cphicache.run.diagrams",
    "cphicache.run.doctor_command",
    "cphicache.run.draw",
    "cphicache.run.failure",
    "cphicache.run.plan",
    "cphicache.run.plan_command",
    "cphicache.run.simulate.command",
    "cphicache.run.simulate.drawn",
    "cphicache.run.simulate.outcome",
    "cphicache.run.simulate.planted",
    "cphicache.run.simulate.shrink",
    "cphicache.run.simulate.workers",
    "cphicache.run.tabulate",
    "cphicache.run.trace",
)


NEEDS_SGLANG = (
    "cphicache.sglang.contract_",
    "cphicache.sglang.factory",
    "cphicache.sglang.kv_events",
    "cphicache.sglang.prefix_cache",
)
"""Imported by SGLang's processes only, where ``make test-sglang`` tests them."""


def all_modules() -> list[str]:
    paths = sorted((ROOT / "cphicache").rglob("*.py"))
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in paths]
    return [name for name in names if not name.endswith("__main__") and not name.startswith(NEEDS_SGLANG)]


def python(code: str, *arguments: str) -> str:
    done = subprocess.run([sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_decisions_are_made_without_torch() -> None:
    """R1, R6: importing any package, and any module but those with tensors, does not import torch."""
    names = [name for name in all_modules() if not name.startswith(MAY_IMPORT_TORCH) or name in MUST_NOT_AFTER_ALL]
    code = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    assert "torch" not in sys.modules, f"{name} imports torch"
"""
    assert "cphicache.engine" in names
    assert "cphicache.transfer.port" in names
    python(code, *names)


def test_nothing_is_configured_at_import() -> None:
    """R36: importing everything leaves logging, structlog, torch, warnings, signals, threads and random as they are."""
    code = """
import importlib, logging, os, random, signal, sys, threading, warnings
import click, rich, structlog, torch, transitions

def world():
    return {
        "logging": (logging.root.level, list(logging.root.handlers), logging.root.manager.disable),
        "transitions": (logging.getLogger("transitions").level, list(logging.getLogger("transitions").handlers)),
        "structlog": (structlog.is_configured(), structlog.get_config()),
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads(), threading.active_count()),
        "torch": (torch.get_default_dtype(), torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled()),
        "seed": torch.initial_seed(),
        "random": (random.getstate(), torch.get_rng_state().tolist()),
        "warnings": list(warnings.filters),
        "signals": {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)},
        "process": (dict(os.environ), os.getcwd(), sys.excepthook, sys.getrecursionlimit()),
    }

before = world()
for name in sys.argv[1:]:
    importlib.import_module(name)
after = world()
changed = [part for part in before if before[part] != after[part]]
assert not changed, f"changed by an import: {changed}"
"""
    assert python(code, *all_modules()) == ""


def test_the_import_contracts_hold() -> None:
    """R1, R6: the table of docs/architecture.md, as import-linter's contracts, is kept."""
    code = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
    assert "0 broken" in python(code)


def test_every_package_has_a_contract() -> None:
    """R6: no package escapes the import rules; only `run` and `bench` may import everything, and nothing else may import them."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        contracts = tomllib.load(file)["tool"]["importlinter"]["contracts"]
    packages = {f"cphicache.{path.parent.name}" for path in (ROOT / "cphicache").glob("*/__init__.py")}
    ruled = {name: contract for contract in contracts for name in contract["source_modules"]}
    assert packages - set(ruled) == {"cphicache.bench", "cphicache.run"}
    assert all({"cphicache.bench", "cphicache.run"} <= set(contract["forbidden_modules"]) for contract in contracts)
    importers = {name for name in packages if name in ruled and "cphicache.lifecycle" not in ruled[name]["forbidden_modules"]}
    assert importers == {
        f"cphicache.{name}" for name in ("lifecycle", "engine", "events", "check", "explore", "reexecute", "replay", "metrics")
    }
