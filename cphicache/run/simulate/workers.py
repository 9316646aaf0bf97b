"""Runs seeds in this process or in several, in order of completion. A world that hangs ends its process with the code for that."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from threading import Event, Thread
from typing import NamedTuple

from cphicache.run.simulate.drawn import DrawnWorld, draw
from cphicache.run.simulate.outcome import Code, Outcome
from cphicache.run.simulate.planted import CANARIES

GRACE = 2.0
"""A world is asked to end after its processor time, and ended with its process after so many times that."""
IDLE_SHARE = 0.001
"""A process that took less of a processor than this between two looks hangs. One on a machine that is busy with others takes more."""


ENDED = "process ended"
"""Kind of an outcome that ended its process."""


class Done(NamedTuple):
    """One seed, and what came of it."""

    seed: int
    outcome: Outcome


@contextmanager
def watchdog(what: str, cpu_s: float) -> Iterator[None]:
    """Ends the process with :attr:`Code.NO_PROGRESS` when the body, that cannot be interrupted, takes too much processor time or none."""
    ended = Event()

    def watch() -> None:
        started = before = time.process_time()
        while not ended.wait(cpu_s * GRACE):
            now = time.process_time()
            if now - started > cpu_s * GRACE or now - before < IDLE_SHARE * cpu_s * GRACE:
                sys.stderr.write(f"cphicache: no progress: {what} does not end; stacks follow\n")
                faulthandler.dump_traceback(sys.stderr)
                os._exit(Code.NO_PROGRESS)
            before = now

    thread = Thread(target=watch, name="watchdog", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def run_guarded(world: DrawnWorld, what: str, canary: str | None, cpu_s: float) -> Outcome:
    """One world in this process."""
    from cphicache.run.simulate.judge import simulate

    with watchdog(what, cpu_s):
        return simulate(world, canary=None if canary is None else CANARIES[canary], cpu_s=cpu_s)


def run_seeds(seeds: Iterable[int], *, jobs: int, canary: str | None, cpu_s: float) -> Generator[Done, None, None]:
    """Every seed's outcome. With ``jobs`` above 1 in processes, which are ended when the caller wants no more."""
    if jobs == 1:
        for seed in seeds:
            yield Done(seed, run_guarded(draw(seed), f"seed {seed}", canary, cpu_s))
        return
    left = iter(seeds)
    workers = [_Worker(canary, cpu_s) for _ in range(jobs)]
    try:
        for worker in workers:
            worker.give(next(left, None))
        while busy := [worker for worker in workers if worker.seed is not None]:
            ready = wait([worker.pipe for worker in busy])
            for at, worker in enumerate(workers):
                if worker.seed is None or worker.pipe not in ready:
                    continue
                done = worker.take()
                if done.outcome.kind == ENDED:
                    worker.end()
                    workers[at] = _Worker(canary, cpu_s)
                workers[at].give(next(left, None))
                yield done
    finally:
        for worker in workers:
            worker.end()


class _Worker:
    """A process that runs the seeds that it is given, one at a time."""

    def __init__(self, canary: str | None, cpu_s: float) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs, canary, cpu_s), daemon=True)
        self.process.start()
        theirs.close()
        self.seed: int | None = None

    def give(self, seed: int | None) -> None:
        self.seed = seed
        if seed is not None:
            self.pipe.send(seed)

    def take(self) -> Done:
        """The outcome of its seed; one that ended the process is an outcome too."""
        if self.seed is None:
            raise AssertionError("worker: expected a seed to be running, found none")
        try:
            return Done(self.seed, self.pipe.recv())
        except EOFError:
            self.process.join()
            status = self.process.exitcode
            code = Code.NO_PROGRESS if status == Code.NO_PROGRESS else Code.CRASH
            return Done(self.seed, Outcome(code, ENDED, f"its process ended with status {status}"))

    def end(self) -> None:
        self.process.terminate()
        self.process.join()
        self.pipe.close()


def _work(pipe: Connection, canary: str | None, cpu_s: float) -> None:
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # typed at a terminal it goes to every process: the one that has started this one ends it
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            seed = pipe.recv()
        except EOFError:
            return
        pipe.send(run_guarded(draw(seed), f"seed {seed}", canary, cpu_s))
