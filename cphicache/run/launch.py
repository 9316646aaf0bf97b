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
from cphicache.agree.membership import Beat, KeyStore, Watch, mark_gone, read, read_beat
from cphicache.events import EventReadError
from cphicache.run.compare import first_difference
from cphicache.run.config import RunConfig
from cphicache.run.rank_main import LAUNCHED, RUN_ID, START_TIMEOUT_S
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
"""After an interrupt or a signal to end ranks have so long to end their step and close their logs."""

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
    start_timeout_s: float = START_TIMEOUT_S,
) -> Outcome:
    """Run all ranks of ``config`` to the end.

    ``extra``: more arguments of single ranks; ``environment``: more variables of all; ``on_start`` is handed the processes and the store.
    Raises :class:`RunFailed` with the first error of any rank, and when no rank is left. No process is left behind in any case: an
    interrupt, or a SystemExit that a signal raises, ends every rank after its step, and is raised when all have ended.
    """
    config = _with_readable_trace(config)
    store, port = host_store(LOOPBACK, RUN_ID, STORE_TIMEOUT_S)
    with tempfile.TemporaryDirectory(prefix="cphicache-") as folder:
        if config.log is None and config.log_level != "off" and config.cp_size > 1:
            config = replace(config, log=Path(folder) / "events.jsonl")
        variables = {
            **os.environ,
            "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
            "OMP_NUM_THREADS": "1",
            "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),  # it warns of a lost store with its C++ stack
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
            lost = _Watcher(ranks, store, config.rank_timeout_s, start_timeout_s).watch(on_progress)
        except (KeyboardInterrupt, SystemExit):  # the latter from a signal to end
            _interrupt(ranks)
            raise
        finally:
            for process in ranks:
                if process.poll() is None:
                    process.kill()
                process.wait()
        return outcome_of(config, store, lost)


def _with_readable_trace(config: RunConfig) -> RunConfig:
    """The configuration with a trace that every rank can open by name: ``/dev/stdin`` is another file for each of them."""
    if config.trace is None:
        return config
    trace = Path(os.path.realpath(config.trace))
    if not trace.is_file():
        raise RunFailed(
            f"--trace {config.trace}: is not a regular file, and with --launch processes every rank reads it; "
            "give a file, or --launch threads",
            "unusable",
        )
    return replace(config, trace=trace)


class _Watcher:
    """Waits for all ranks; tells the group of those that die, and ends those that will not end by themselves.

    A rank lives too long when the others have given it up, when it is not through its start within ``start_timeout_s`` (for each of its
    stages), and when it gives no sign within ``rank_timeout_s`` although another rank has ended. Only the launcher's own waiting counts.
    """

    def __init__(
        self, ranks: Sequence[subprocess.Popen[bytes]], store: KeyStore, rank_timeout_s: float, start_timeout_s: float
    ) -> None:
        self._ranks = ranks
        self._store = store
        self._limit_s = rank_timeout_s + GRACE_S
        self._start_timeout_s = start_timeout_s
        self._clock = Watch()
        self._stages = [("hello", "said hello"), ("ready", "got ready")]
        self._stage_since_s = 0.0
        self._given_up_s: float | None = None
        self._signs: dict[int, tuple[Beat | None, float]] = {}
        self.lost: dict[int, str] = {}
        """Why ranks ended badly."""

    def watch(self, on_progress: Progress) -> dict[int, str]:
        """Return when all ranks have ended: why some of them ended badly."""
        while True:
            running = [rank for rank, process in enumerate(self._ranks) if process.poll() is None]
            for rank, process in enumerate(self._ranks):
                if rank not in running and rank not in self.lost and process.returncode:
                    self.lost[rank] = _how_it_ended(process.returncode)
                    mark_gone(self._store, rank, self.lost[rank])
            if not running:
                return self.lost
            verdict = read(self._store, "verdict")
            out = [] if verdict is None else json.loads(verdict)[0]
            left = [rank for rank in running if rank not in out]
            beats = {rank: read_beat(self._store, rank) for rank in left}
            self._bound_start(running)
            if len(running) < len(self._ranks):
                self._bound_silence(beats)
            if not left:
                self._bound_given_up(running)
            beat = next((beat for beat in beats.values() if beat is not None), None)
            if beat is not None:
                on_progress(beat.served, beat.tick)
            time.sleep(LOOK_S)
            self._clock.pass_slice()

    def _bound_start(self, running: Sequence[int]) -> None:
        while self._stages:
            key, what = self._stages[0]
            missing = [rank for rank in range(len(self._ranks)) if not self._store.check([f"{key}/{rank}"])]
            if missing:
                if self._clock.waited_s - self._stage_since_s >= self._start_timeout_s:
                    for rank in missing:
                        if rank in running:
                            self._end(rank, f"has not {what} within {self._start_timeout_s:g} s and was ended")
                return
            del self._stages[0]
            self._stage_since_s = self._clock.waited_s

    def _bound_silence(self, beats: Mapping[int, Beat | None]) -> None:
        # Once a rank has ended badly, who is only alive waits for it in vain: the others must get on, to a verdict or to their end.
        # Those that outlive a good end are closing up.
        must_get_on = bool(self.lost)
        for rank, beat in beats.items():
            sign = beat._replace(beat=0) if must_get_on and beat is not None else beat
            if rank not in self._signs or self._signs[rank][0] != sign:
                self._signs[rank] = (sign, self._clock.waited_s)
            elif self._clock.waited_s - self._signs[rank][1] >= self._limit_s:
                self._end(rank, f"did not answer for {self._limit_s:g} s after another rank had ended, and was ended")

    def _bound_given_up(self, running: Sequence[int]) -> None:
        if self._given_up_s is None:
            self._given_up_s = self._clock.waited_s
        if self._clock.waited_s - self._given_up_s > GRACE_S:
            for rank in running:
                self._end(rank, "was given up by the others and did not stop")

    def _end(self, rank: int, why: str) -> None:
        """Kill a rank, stopped or not, and tell the others."""
        if rank not in self.lost:
            self.lost[rank] = why
            mark_gone(self._store, rank, why)
            self._ranks[rank].kill()
            self._ranks[rank].wait()


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
        silent = "".join(f"; rank {rank} {reason}" for rank, reason in why.items() if rank in lost and reason not in text)
        raise RunFailed(text + silent, "failed" if kind == "group" else kind)
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
