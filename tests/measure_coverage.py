"""Branch coverage of ``cphicache/``:  python -m tests.measure_coverage [--sglang] [arguments of pytest]

Runs the tests of ``make test`` and reports; exits with 2 below the least coverage that pyproject.toml asks for, with pytest's status if
a test fails. With ``--sglang``, in an environment that has SGLang: runs the tests that need it instead, reports nothing, and keeps the
data for the next report, which they count in as long as ``cphicache/`` is the same.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[1]
INSIDE_SGLANG = ("tests/sglang", "tests/bench/test_bench.py")
"""Tests that need SGLang, or its caches to measure against."""
KEPT = ROOT / "out" / "coverage"
SGLANG = "sglang-"
"""What a folder of data from inside SGLang begins with; its version follows."""
SOURCES = "sources"
"""Beside such data: the digest of the sources that they are of."""
CONTRACTS = {"0.5.20": "cphicache/sglang/contract_0520.py", "0.5.23": "cphicache/sglang/contract_0523.py"}
"""What only one version of SGLang runs."""
NEEDS_SGLANG = (
    "cphicache/sglang/factory.py",
    "cphicache/sglang/prefix_cache.py",
    "cphicache/sglang/kv_events.py",
)
"""What every version runs, and nothing without SGLang: these modules import it."""


def digest(root: Path) -> str:
    """Of all sources that are measured: data of other sources speak of other lines."""
    parts = sha256()
    for path in sorted((root / "cphicache").rglob("*.py")):
        parts.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
    return parts.hexdigest()


def fresh(folder: Path) -> Path:
    """The folder, made anew: whatever lies in it is of an earlier run. What other runs have left beside it stays."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def run_tests(folder: Path, arguments: Sequence[str]) -> int:
    """Run pytest, all processes measured, into ``folder``/data; returns its status."""
    environment = os.environ | {"COVERAGE_FILE": str(folder / "data")}  # absolute: some processes work in another folder
    command = [sys.executable, "-m", "pytest", *arguments, "--cov", "--cov-report=", "--cov-fail-under=0"]
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def data_files(folder: Path) -> list[Path]:
    """Pytest's data, which it has put together, and those of processes that ended after it did."""
    return sorted(folder.glob("data*"))


def of_sglang(kept: Path, wanted: str) -> tuple[dict[str, list[Path]], list[str]]:
    """Files of data from inside SGLang by its version, and what is to be said of data that cannot be used."""
    usable: dict[str, list[Path]] = {}
    said: list[str] = []
    for folder in sorted(kept.glob(f"{SGLANG}*")):
        if not (folder / SOURCES).exists():
            said.append(f"{folder.name}: its run did not end; it is left out")
        elif (folder / SOURCES).read_text(encoding="utf-8") != wanted:
            said.append(f"{folder.name}: of other sources than these; it is left out")
        else:
            usable[folder.name.removeprefix(SGLANG)] = data_files(folder)
    return usable, said


def left_out(versions: Iterable[str]) -> list[str]:
    """Files that nothing can have run, with data from inside these versions of SGLang."""
    present = set(versions)
    return ([] if present else list(NEEDS_SGLANG)) + [path for known, path in CONTRACTS.items() if known not in present]


def report(kept: Path, folder: Path) -> int:
    """Put the data in ``folder`` and those from inside SGLang together and print the report; returns the status."""
    usable, said = of_sglang(kept, digest(ROOT))
    omitted = left_out(usable)
    for line in said:
        print(f"coverage: {line}")
    if omitted:
        print(f"coverage: without data of make coverage-sglang, left out: {', '.join(omitted)}")
    coverage = [sys.executable, "-m", "coverage"]
    common = [f"--data-file={kept / 'all'}"]
    parts = [str(path) for path in [*data_files(folder), *(path for paths in usable.values() for path in paths)]]
    subprocess.run([*coverage, "combine", *common, "--keep", "-q", *parts], cwd=ROOT, check=True)
    if omitted:
        common.append(f"--omit={','.join(omitted)}")
    subprocess.run([*coverage, "json", *common, "-q", "--fail-under=0", "-o", str(kept / "coverage.json")], cwd=ROOT, check=True)
    return subprocess.run([*coverage, "report", *common], cwd=ROOT, check=False).returncode


def main(arguments: Sequence[str]) -> int:
    """Run the tests, and report."""
    if arguments[:1] == ["--sglang"]:
        folder = fresh(KEPT / f"{SGLANG}{version('sglang')}")
        status = run_tests(folder, ["-n", "2", "--dist", "loadfile", *INSIDE_SGLANG, *arguments[1:]])
        if status == 0:
            (folder / SOURCES).write_text(digest(ROOT), encoding="utf-8")
        return status
    folder = fresh(KEPT / "tests")
    status = run_tests(folder, ["-n", "2", "-m", "not soak", *arguments])
    if status:
        print("coverage: no figure, because the tests have not all passed", file=sys.stderr)
        return status
    return report(KEPT, folder)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
