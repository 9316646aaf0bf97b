"""The whole acceptance table: every named configuration on every workload, one row each. Run by ``make soak``.

Each row is a process of its own (``cphicache run ... --json``). A row is bad when the run fails, takes too long, finds a wrong byte, a
leak or ranks that disagree, compares or commits nothing, or does not show what its configuration is about. With ``--replay`` each run
writes its log at level ``ops``, which must replay without a finding and execute to the same events.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cphicache.reexecute import Execution, RecordedLog, Refused
from cphicache.replay import UnusableLogs
from cphicache.replay import replay as replay_logs
from cphicache.transfer.support import SUPPORT, Support

ROOT = Path(__file__).resolve().parents[1]
TRACES = ("mooncake_conversation.jsonl", "mooncake_synthetic.jsonl")
COMMON = ("--requests", "300", "--cp-size", "4", "--draft-layers", "1", "--verify", "all")
SEEDS = 20
COLUMNS = ("seconds", "host hits", "committed", "refused", "mismatches", "leaks")

Summary = dict[str, Any]
Expectation = Callable[[Summary], str | None]
"""What a row's figures do not show although they should, or None."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests to serve, and a device pool (tokens) on which they press."""

    name: str
    options: tuple[str, ...]
    device_tokens: int


@dataclass(frozen=True, slots=True)
class Row:
    """One configuration on one workload."""

    name: str
    options: tuple[str, ...]
    expect: Expectation


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a row ended: its figures in the order of :data:`COLUMNS`, and what is bad about it."""

    row: Row
    figures: tuple[str, ...]
    bad: tuple[str, ...]


def _nothing(summary: Summary) -> str | None:
    return None


def _few(summary: Summary) -> str | None:
    """So few requests were served that some backup policies do nothing yet."""
    return None


def _reclaims(summary: Summary) -> str | None:
    return None if summary["evictions"]["reclaimed host copies"] else "no host copy was reclaimed"


def _refuses(summary: Summary) -> str | None:
    if summary["evictions"]["reclaimed host copies"]:
        return "a host copy was reclaimed although the switch is off"
    return None if summary["backups"].get("refused: no host slots") else "no backup was refused for want of host slots"


def _loads_back(summary: Summary) -> str | None:
    return None if summary["tokens"]["host hit"] else "nothing was loaded back"


def _pool_options(row: Support) -> tuple[str, ...]:
    """Options for one kind, layout and backend, with the operators' stand-ins; fewer requests, and for Triton's interpreter (hundreds of
    times slower than a kernel) very few and short ones."""
    options = ("--kv", row.kind, "--layout", row.layout, "--backend", row.io_backend, "--requests", "60")
    if row.io_backend == "triton":
        return (*options[:-1], "24", "--scale", "0.02", "--page-size", "4", "--layers", "2", "--cp-size", "1")
    return options if row.io_backend == "torch" else (*options, "--reference-operators")


def rows_of(workload: Workload) -> list[Row]:
    """All configurations of a workload."""
    quarter = ("--device-tokens", str(workload.device_tokens), "--host-tokens", str(workload.device_tokens // 4))
    deep = ("--device-tokens", str(workload.device_tokens // 2), "--host-tokens", str(workload.device_tokens * 3))
    variations: list[tuple[str, tuple[str, ...], Expectation]] = [
        ("base", (), _nothing),
        ("mha", ("--kv", "mha"), _nothing),
        ("selective", ("--policy", "write_through_selective"), _nothing),
        ("write-back", ("--policy", "write_back"), _nothing),
        ("write-back-drop", ("--policy", "write_back", "--write-back-wait", "drop"), _nothing),
        ("no-overlap", ("--no-overlap",), _nothing),
        *((f"page-{size}", ("--page-size", str(size)), _nothing) for size in (1, 16, 64)),
        ("host-quarter-reclaim", (*quarter, "--reclaim-device-valid"), _reclaims),
        ("host-quarter", quarter, _refuses),
        ("deep-host", deep, _loads_back),
        ("threads", ("--streams", "threads"), _nothing),
        ("processes", ("--launch", "processes"), _nothing),
        *((f"pools-{'-'.join(row[:3])}", _pool_options(row), _nothing) for row in SUPPORT if row.reason is None),
        *((f"virtual-seed-{seed:02}", ("--streams", "virtual", "--seed", str(seed)), _nothing) for seed in range(SEEDS)),
    ]
    return [Row(f"{workload.name}/{name}", (*workload.options, *options), expect) for name, options, expect in variations]


def workloads(traces: Path) -> list[Workload]:
    """The traces that are there, and the synthetic workload. Says which are not."""
    found = [Workload("synthetic", COMMON, 2560)]
    for name in reversed(TRACES):
        path = traces / name
        if path.is_file():
            found.insert(0, Workload(path.stem, ("--trace", str(path.resolve()), "--scale", "0.05", *COMMON), 16384))
        else:
            print(f"skipped: {path} is not there; give its folder with --traces DIR", flush=True)
    return found


class Runner:
    """Runs rows as processes, and can end those that are still running."""

    def __init__(self, timeout_s: float, *, replay: bool) -> None:
        self._timeout_s = timeout_s
        self._replay = replay
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[str]] = set()
        self._stopped = False

    def run(self, row: Row) -> Outcome:
        """Run a row to its end, and replay what it has logged if that is wanted."""
        if not self._replay:
            return self._serve(row)
        with tempfile.TemporaryDirectory(prefix="cphicache-soak-") as folder:
            logged = replace(row, options=(*row.options, "--log", f"{folder}/events.jsonl", "--log-level", "ops"))
            outcome = self._serve(logged)
            bad = outcome.bad or tuple(replayed(sorted(Path(folder).glob("events*.jsonl"))))
            return replace(outcome, row=row, bad=bad)

    def _serve(self, row: Row) -> Outcome:
        started_s = time.monotonic()
        with self._lock:
            if self._stopped:
                return Outcome(row, (), ("interrupted",))
            command = [sys.executable, "-m", "cphicache.run.cli", "run", *row.options, "--json"]
            process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                cwd=ROOT,
                env=os.environ | {"TRITON_INTERPRET": "1"},
            )
            self._running.add(process)
        try:
            stdout, stderr = process.communicate(timeout=self._timeout_s)
            late = False
        except subprocess.TimeoutExpired:
            process.kill()
            stdout, stderr = process.communicate()
            late = True
        finally:
            with self._lock:
                self._running.discard(process)
        seconds = f"{time.monotonic() - started_s:.1f}"
        if late:
            return Outcome(row, (seconds,), (f"did not end within {self._timeout_s:g} s", *stderr.splitlines()[-8:]))
        return judge(row, seconds, process.returncode, stdout, stderr)

    def stop(self) -> None:
        """End the processes that run, and start no more."""
        with self._lock:
            self._stopped = True
            for process in self._running:
                process.terminate()


def judge(row: Row, seconds: str, status: int, stdout: str, stderr: str) -> Outcome:
    """What a finished run says."""
    bad = []
    if status != 0:
        bad = [f"exit status {status}", *stderr.splitlines()[-8:]]
    try:
        summary: Summary = json.loads(stdout)
    except ValueError:
        return Outcome(row, (seconds,), (*bad, "no summary was printed"))
    checks, committed = summary["checks"], summary["backups"]["committed"]
    refused = summary["seen"]["refused reservations"]
    figures = (seconds, summary["tokens"]["host hit"], committed, refused, checks["mismatches"], checks["leaks"])
    missing = [] if checks["bytes compared"] else ["no byte was compared"]
    missing += [] if committed or row.expect is _few else ["nothing was committed"]
    missing += [] if summary["ranks_agree"] else ["the ranks disagree"]
    unexpected = row.expect(summary)
    wrong = [f"{checks[name]} {name}" for name in ("mismatches", "leaks") if checks[name]]
    return Outcome(
        row, tuple(str(figure) for figure in figures), (*bad, *wrong, *missing, *([unexpected] if unexpected is not None else []))
    )


def replayed(logs: Sequence[Path]) -> list[str]:
    """What is bad about the logs of a run (one a rank, level ``ops``)."""
    bad = []
    try:
        report = replay_logs(logs)
        if report.findings.first is not None:
            bad.append(f"{report.findings.total} findings, the first: {report.findings.first.describe()}")
        for path in logs:
            difference = Execution(RecordedLog(path)).run()
            if difference is not None:
                bad.append(str(difference))
    except (UnusableLogs, Refused) as error:
        bad.append(str(error))
    return bad


def line(name: str, figures: Sequence[str], verdict: str, width: int) -> str:
    """One row of the table."""
    return (
        f"{name:<{width}}"
        + "".join(f"{figure:>12}" for figure in (*figures, *[""] * (len(COLUMNS) - len(figures))))
        + f"  {verdict}"
    )


def soak(rows: Sequence[Row], jobs: int, timeout_s: float, *, replay: bool = False) -> int:
    """Run all rows, print each as it ends; 0 if all are good, 1 if one is bad, 130 when interrupted."""
    width = max(len(row.name) for row in rows)
    print(line("configuration", COLUMNS, "", width).rstrip(), flush=True)
    runner, good, bad = Runner(timeout_s, replay=replay), 0, 0
    with ThreadPoolExecutor(jobs) as pool:
        try:
            for future in as_completed([pool.submit(runner.run, row) for row in rows]):
                outcome = future.result()
                good, bad = good + (not outcome.bad), bad + bool(outcome.bad)
                print(line(outcome.row.name, outcome.figures, "BAD" if outcome.bad else "ok", width), flush=True)
                for text in outcome.bad:
                    print(f"    {text}", flush=True)
        except KeyboardInterrupt:
            runner.stop()
            pool.shutdown(wait=True, cancel_futures=True)
            print(f"interrupted: {good} good, {bad} bad, {len(rows) - good - bad} not run to their end", flush=True)
            return 130
    print(f"{good} good, {bad} bad", flush=True)
    return 1 if bad else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """The script."""
    parser = argparse.ArgumentParser(prog="soak.py", description="Run the whole acceptance table.")
    parser.add_argument("--traces", type=Path, default=ROOT / "traces", metavar="DIR", help=f"folder of {' and '.join(TRACES)}")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="rows whose name has this in it (* and ? as in a shell)")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="rows that run at the same time")
    parser.add_argument("--timeout-s", type=float, default=900.0, help="longest time of one row")
    parser.add_argument(
        "--requests", type=int, metavar="N", help="serve fewer requests; rows need not show then what they are about"
    )
    parser.add_argument("--replay", action="store_true", help="replay and execute the log of each run")
    parser.add_argument("--list", action="store_true", help="print the rows, run nothing")
    options = parser.parse_args(arguments)
    if options.jobs < 1:
        parser.error(f"--jobs {options.jobs}: give at least 1")
    rows = [row for workload in workloads(options.traces) for row in rows_of(workload)]
    rows = [row for row in rows if fnmatchcase(row.name, f"*{options.only}*")]
    if not rows:
        parser.error(f"--only {options.only}: no row has that in its name; --list shows them all")
    if options.requests is not None:
        rows = [replace(row, options=(*row.options, "--requests", str(options.requests)), expect=_few) for row in rows]
    if options.list:
        for row in rows:
            print(row.name, *row.options)
        return 0
    return soak(rows, options.jobs, options.timeout_s, replay=options.replay)


if __name__ == "__main__":
    sys.exit(main())
