"""Signals that end the program, at moments at which nobody can answer them."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import pytest

from cphicache.signals import ENDING, deferred_signals

ROOT = Path(__file__).parents[1]
HIT_WHILE_IMPORTING = """
import signal, sys
sys.argv[0] = "cphicache"
hit, number = sys.argv.pop(1), signal.Signals[sys.argv.pop(1)]
signal.signal(signal.SIGINT, signal.default_int_handler)

class Hit:
    def find_spec(self, name, path, target=None):
        if name == hit:
            sys.meta_path.remove(self)
            try:
                signal.raise_signal(number)
                signal.raise_signal(number)
            except BaseException:
                pass  # some imports try another way whatever happens
        return None

sys.meta_path.insert(0, Hit())
from cphicache.__main__ import main
main()
"""


@pytest.fixture(params=ENDING, ids=lambda number: number.name)
def heard(request: pytest.FixtureRequest) -> Iterator[tuple[signal.Signals, list[int]]]:
    """A signal, and how often its handler was called."""
    calls: list[int] = []
    before = signal.signal(request.param, lambda number, frame: calls.append(number))
    yield request.param, calls
    signal.signal(request.param, before)


def test_a_signal_while_imports_go_on_is_heard_at_their_end(heard: tuple[signal.Signals, list[int]]) -> None:
    """R18: it is put off, not lost, and told once; the handler that was there hears of it, and of all that come later."""
    number, calls = heard
    with deferred_signals():
        signal.raise_signal(number)
        signal.raise_signal(number)
        assert calls == []
    assert calls == [number]
    signal.raise_signal(number)
    assert calls == [number, number]


def test_without_a_signal_nothing_is_told(heard: tuple[signal.Signals, list[int]]) -> None:
    """R18: imports that nobody interrupts leave all as it was, also when one of them fails."""
    number, calls = heard
    handler: Callable[[int, FrameType | None], object] | int | None = signal.getsignal(number)
    with pytest.raises(ImportError), deferred_signals():
        raise ImportError
    assert signal.getsignal(number) is handler
    assert calls == []


@pytest.mark.parametrize(
    ("hit", "number", "status", "told"),
    [
        ("cphicache.run.cli", signal.SIGINT, 130, "interrupted"),
        ("cphicache.run.cli", signal.SIGTERM, 130, "interrupted"),
        ("torch", signal.SIGINT, 130, "interrupted"),
        ("torch", signal.SIGTERM, 143, "ended by SIGTERM"),
    ],
)
def test_a_signal_during_start_up_ends_the_command(hit: str, number: signal.Signals, status: int, told: str) -> None:
    """R18: one line and the status of a program that was interrupted, without a trace, also if an import swallows what is raised in it, and
    if the signal comes twice; nothing is served."""
    command = [sys.executable, "-c", HIT_WHILE_IMPORTING, hit, number.name, "run", "--requests", "3"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (status, "", f"cphicache: {told}\n")
