"""Starts ranks as processes, watches them, and puts their results together. It hosts the store, so that any rank may die and be named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from signal import SIGINT, Signals
from typing import Any

from cphicache.agree.distributed import host_store
from cphicache.agree.membership import KeyStore, mark_gone, read, read_beat
from cphicache.events import EventReadError
from cphicache.run.compare import first_difference
from cphicache.run.config import RunConfig
from cphicache.run.rank_main import LAUNCHED, RUN_ID
from cphicache.run.wire import decode
from cphicache.run.world import RankResult, RunFailed

RANK_COMMAND = (sys.executable, "-m", "cphicache.run.rank_main")
LOOPBACK = "127.0.0.1"
STORE_TIMEOUT_S = 60.0
LOOK_S = 0.03
"""The launcher looks at its ranks every so often."""
GRACE_S = 2.0
"""A rank that was given up, but lives, has so long to see that and stop."""
INTERRUPT_GRACE_S = 15.0
"""After an interrupt ranks have so long to end their step and close their logs."""

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of the ranks: results of those that have one, in rank order; why each of the others has none."""

    results: list[RankResult]
    lost: dict[int, str]
    difference: str | None
    """Where the logs of the ranks that have a result first differ."""


def rank_arguments(config: RunConfig) -> list[str]:
    """The options of a configuration as a command line, without those that have their default."""
    arguments: list[str] = []
    for field in fields(config):
        value = getattr(config, field.name)
        if value == field.default or field.name in ("launch", "out", "json"):
            continue
        name = field.name.replace("_", "-")
        if isinstance(value, bool):
            arguments.append(f"--{name}" if value else f"--no-{name}")
        else:
            arguments += [f"--{name}", str(value)]
    return arguments


def run_processes(
    config: RunConfig,
    on_progress: Progress = lambda served, tick: None,
    *,
    command: Sequence[str] = RANK_COMMAND,
    extra: Mapping[int, Sequence[str]] | None = None,
    environment: Mapping[str, str] | None = None,
    on_start: Callable[[Sequence[subprocess.Popen[bytes]], KeyStore], None] = lambda ranks, store: None,
) -> Outcome:
    """Run all ranks of ``config`` to the end.

    ``extra``: more arguments of single ranks; ``environment``: more variables of all; ``on_start`` is handed the processes and the store.
    Raises :class:`RunFailed` with the first error of any rank, and when no rank is left. No process is left behind in any case: an
    interrupt ends every rank after its step, and is raised when all have ended.
    """
    store, port = host_store(LOOPBACK, RUN_ID, STORE_TIMEOUT_S)
    with tempfile.TemporaryDirectory(prefix="cphicache-") as folder:
        if config.log is None and config.log_level != "off" and config.cp_size > 1:
            config = replace(config, log=Path(folder) / "events.jsonl")
        variables = {
            **os.environ,
            "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
            "OMP_NUM_THREADS": "1",
            **(environment or {}),
            LAUNCHED: "1",
            "MASTER_ADDR": LOOPBACK,
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(config.cp_size),
        }
        ranks: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(config.cp_size):
                arguments = [*command, *rank_arguments(config), *(extra or {}).get(rank, ())]
                ranks.append(
                    subprocess.Popen(
                        arguments,
                        env={**variables, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.DEVNULL,
                        start_new_session=True,  # an interrupt from the terminal reaches us, and we hand it on
                    )
                )
            on_start(ranks, store)
            lost = _watch(ranks, store, on_progress)
        except KeyboardInterrupt:
            _interrupt(ranks)
            raise
        finally:
            for process in ranks:
                if process.poll() is None:
                    process.kill()
                process.wait()
        return outcome_of(config, store, lost)


def _watch(ranks: Sequence[subprocess.Popen[bytes]], store: KeyStore, on_progress: Progress) -> dict[int, str]:
    """Wait for all ranks; tell the group of those that die, and end those that it has given up. Returns why ranks ended badly."""
    lost: dict[int, str] = {}
    given_up_s: float | None = None
    while True:
        running = [rank for rank, process in enumerate(ranks) if process.poll() is None]
        for rank, process in enumerate(ranks):
            if rank not in running and rank not in lost and process.returncode:
                lost[rank] = _how_it_ended(process.returncode)
                mark_gone(store, rank, lost[rank])
        if not running:
            return lost
        verdict = read(store, "verdict")
        out = [] if verdict is None else json.loads(verdict)[0]
        if all(rank in out for rank in running):
            given_up_s = given_up_s or time.monotonic() + GRACE_S
            if time.monotonic() > given_up_s:
                for rank in running:
                    lost[rank] = "was given up by the others and did not stop"
                    ranks[rank].kill()
                    ranks[rank].wait()
        beat = next((beat for rank in running if rank not in out and (beat := read_beat(store, rank)) is not None), None)
        if beat is not None:
            on_progress(beat.served, beat.tick)
        time.sleep(LOOK_S)


def _how_it_ended(status: int) -> str:
    return f"was killed by {Signals(-status).name}" if status < 0 else f"ended with status {status}"


def _interrupt(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ask all ranks to end, and wait for that; those that cannot (a stopped one) are ended by the caller."""
    for process in ranks:
        if process.poll() is None:
            process.send_signal(SIGINT)
    deadline_s = time.monotonic() + INTERRUPT_GRACE_S
    while any(process.poll() is None for process in ranks) and time.monotonic() < deadline_s:
        time.sleep(LOOK_S)


def outcome_of(config: RunConfig, store: Any, lost: Mapping[int, str]) -> Outcome:
    """Collect what ranks have left in the store, and compare their logs. Raises :class:`RunFailed`."""
    results: list[RankResult] = []
    errors: list[tuple[str, str]] = []
    why: dict[int, str] = {}
    for rank in range(config.cp_size):
        result, error = read(store, f"result/{rank}"), read(store, f"error/{rank}")
        if error is not None:
            kind, text = json.loads(error)
            errors.append((kind, text))
        elif result is not None:
            results.append(decode(result))
        else:
            why[rank] = lost.get(rank, "ended without a result")
    if errors:
        order = ("unusable", "broken invariant", "failed", "group")  # who only heard of another's end says less than that one
        kind, text = min(errors, key=lambda entry: order.index(entry[0]))
        raise RunFailed(text, "failed" if kind == "group" else kind)
    if not results:
        raise RunFailed("no rank has come to its end: " + "; ".join(f"rank {rank} {text}" for rank, text in why.items()))
    return Outcome(results, why, _compare(results))


def _compare(results: Sequence[RankResult]) -> str | None:
    logs = [(result.rank, result.log) for result in results if result.log is not None]
    if len(logs) < 2:
        return None
    try:
        return first_difference(logs)
    except EventReadError as error:
        return str(error)
