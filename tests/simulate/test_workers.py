"""Processes that run seeds, and what is done when one of them ends or hangs."""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing.connection import Connection
from threading import Event, Thread
from threading import enumerate as enumerate_threads

import pytest

from cphicache.run.simulate import workers
from cphicache.run.simulate.outcome import Code, Outcome
from cphicache.run.simulate.workers import ENDED, Done, run_seeds, watchdog

CPU_S = 0.01
LIMIT_S = CPU_S * workers.GRACE


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # only the thread ends here
@pytest.mark.parametrize(
    ("spent_s", "ends"),
    [([0.0, 0.9, 1.1], True), ([0.0, 0.5, 0.5], True), ([0.0, 0.4, 0.8], False)],
    ids=["too much", "none any more", "enough"],
)
def test_a_body_that_takes_too_much_processor_time_or_none_ends_the_process(
    spent_s: list[float], ends: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """R13: what cannot be interrupted is watched from beside: past its processor time, or when it takes none between two looks, the process
    ends with the code for no progress, and says where it stood; while it gets on within its time, nothing happens."""
    looked, left, statuses = Event(), list(spent_s), list[int]()

    def process_time() -> float:
        seconds = left.pop(0)
        if not left:
            looked.set()
            left.append(seconds + 0.002)  # if it is not over then, it gets on
        return seconds * LIMIT_S

    def leave(status: int) -> None:
        statuses.append(status)
        raise SystemExit

    monkeypatch.setattr("cphicache.run.simulate.workers.time.process_time", process_time)
    monkeypatch.setattr("cphicache.run.simulate.workers.os._exit", leave)
    with watchdog("seed 7", CPU_S):
        assert looked.wait(20.0)
        for thread in enumerate_threads():
            if ends and thread.name == "watchdog":
                thread.join(20.0)
    assert statuses == ([Code.NO_PROGRESS] if ends else [])
    err = capfd.readouterr().err
    assert err.startswith("cphicache: no progress: seed 7 does not end; stacks follow\n") is ends
    assert ("in test_a_body_that_takes_too_much" in err) is ends
    assert not [thread for thread in enumerate_threads() if thread.name == "watchdog"]


ENDS_WITH = {1: 3, 2: int(Code.NO_PROGRESS)}


def dies_at_some(pipe: Connection, canary: str | None, cpu_s: float) -> None:
    """A worker's process: some seeds end it."""
    while True:
        seed = pipe.recv()
        if seed in ENDS_WITH:
            os._exit(ENDS_WITH[seed])
        pipe.send(Outcome(Code.FINE, fingerprint=f"{seed} {canary} {cpu_s}"))


def test_a_process_that_ends_is_an_outcome_and_another_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """R34: a seed that ends its process is told with its status, as no progress when the watchdog has ended it; the seeds that are left run
    in a new process, and in the end none is left."""
    monkeypatch.setattr(workers, "_work", dies_at_some)
    done = sorted(run_seeds([1, 2, 3, 4], jobs=2, canary="crash", cpu_s=9.0))
    assert done[:2] == [
        Done(1, Outcome(Code.CRASH, ENDED, "its process ended with status 3")),
        Done(2, Outcome(Code.NO_PROGRESS, ENDED, f"its process ended with status {int(Code.NO_PROGRESS)}")),
    ]
    assert [(each.seed, each.outcome.fingerprint) for each in done[2:]] == [(3, "3 crash 9.0"), (4, "4 crash 9.0")]
    assert not multiprocessing.active_children()


@pytest.mark.usefixtures("default_sigint")
def test_a_worker_whose_starter_has_gone_ends() -> None:
    """R34: a process that nobody gives seeds any more does not wait for ever; what it was asked before is answered."""
    ours, theirs = multiprocessing.Pipe()
    answers: list[Outcome] = []

    def ask() -> None:
        ours.send(3)
        answers.append(ours.recv())
        ours.close()

    asking = Thread(target=ask)
    asking.start()
    workers._work(theirs, None, 60.0)
    asking.join()
    assert [answer.code for answer in answers] == [Code.FINE]
