"""The life of one rank, as torchrun starts it, in this process: what it says, what it tells the others, and its exit status."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event
from threading import enumerate as enumerate_threads
from typing import Any

import pytest

from cphicache.agree.distributed import HostedStore, host_store
from cphicache.agree.membership import KeyStore, mark_gone, read
from cphicache.run import rank_main
from cphicache.run.launch import LOOPBACK, rank_arguments
from cphicache.run.rank_main import INTERRUPTED, UNUSABLE, run_rank
from cphicache.run.world import make_streams
from tests.ranks.worlds import config_of


class Left(Exception):
    """The process has ended at once."""


class Launcher:
    """What torchrun is for a rank: an environment, and a store in this process."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.patch = patch
        self._hosted: HostedStore | None = host_store(LOOPBACK, "torchrun.0", 20.0)
        variables = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(self._hosted.port)}
        for name, value in variables.items():
            patch.setenv(name, value)

    @property
    def store(self) -> KeyStore:
        assert self._hosted is not None
        return self._hosted.store

    def go(self) -> None:
        """The store goes with its host."""
        self._hosted = None
        gc.collect()


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launcher]:
    def leave(status: int) -> None:
        raise Left(status)

    made = Launcher(monkeypatch)
    monkeypatch.setattr(rank_main, "CONNECT_TIMEOUT_S", 1.0)
    monkeypatch.setattr(rank_main, "_leave_at_once", leave)
    yield made
    made.go()
    for thread in enumerate_threads():
        if thread.name == "heartbeat":  # of a rank that has left at once: it ends when its store has gone
            thread.join(20.0)
            assert not thread.is_alive()


def life(size: int = 1, *more: str, stop: Event | None = None, **hooks: Any) -> int:
    """Rank 0's exit status; also when it does not wait for who has gone."""
    arguments = rank_arguments(config_of(cp_size=size, requests=3, rank_timeout_s=0.5))
    try:
        return run_rank([*arguments, *more], stop or Event(), **hooks)
    except Left as left:
        return int(left.args[0])


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    """All that was printed: one line on stderr. (torch's own warnings go past Python.)"""
    out, err = capsys.readouterr()
    (line,) = err.splitlines()
    assert out == ""
    assert isinstance(line, str)
    assert line.startswith("cphicache: ")
    return line


def test_a_single_rank_serves_and_prints_its_result(launcher: Launcher, capsys: pytest.CaptureFixture[str]) -> None:
    """R23: one rank under torchrun needs no group: it serves, prints the summary, and leaves its result and its end in the store."""
    assert life(1, "--json") == 0
    out, err = capsys.readouterr()
    summary = json.loads(out)
    assert summary["requests"]["finished"] + summary["requests"]["aborted"] == 3
    assert [rank["rank"] for rank in summary["ranks"]] == [0]
    assert err == ""
    assert all(read(launcher.store, key) is not None for key in ("result/0", "done/0"))


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("RANK", None, "cphicache: rank_main: 'RANK' is not in the environment: start ranks with torchrun, or --launch processes"),
        ("MASTER_PORT", "x", "cphicache: rank_main: invalid literal for int() with base 10: 'x' is not in the environment: "),
        ("WORLD_SIZE", "2", "cphicache: rank 0: --cp-size 1: 2 ranks were started; give as many as that"),
        ("MASTER_PORT", "1", "cphicache: rank 0: no store at 127.0.0.1:1 ("),
    ],
)
def test_a_rank_that_was_not_started_as_it_should_be_says_so(
    launcher: Launcher,
    capsys: pytest.CaptureFixture[str],
    variable: str,
    value: str | None,
    said: str,
) -> None:
    """R35: without a launcher's environment, its number of ranks or its store: one line, and status 2."""
    if value is None:
        launcher.patch.delenv(variable)
    else:
        launcher.patch.setenv(variable, value)
    assert life() == UNUSABLE
    assert one_line(capsys).startswith(said)


def test_an_option_that_cannot_be_is_refused_before_the_store_is_asked(
    launcher: Launcher, capsys: pytest.CaptureFixture[str]
) -> None:
    """R35: the same line as that of ``cphicache run``, with the rank."""
    assert life(1, "--page-size", "-1") == UNUSABLE
    assert one_line(capsys).startswith("cphicache: rank 0: --page-size -1: ")
    assert read(launcher.store, "beat/0") is None


def test_a_rank_that_is_interrupted_before_it_begins_does_not_begin(launcher: Launcher, capsys: pytest.CaptureFixture[str]) -> None:
    """R22: an interrupt while a rank imports ends it before it has connected."""
    stop = Event()
    stop.set()
    assert life(stop=stop) == INTERRUPTED
    assert capsys.readouterr() == ("", "")
    assert read(launcher.store, "beat/0") is None


def test_an_interrupt_while_it_serves_ends_it_without_a_report(launcher: Launcher, capsys: pytest.CaptureFixture[str]) -> None:
    """R22: an interrupted rank says nothing, and leaves neither a result nor an error."""
    stop = Event()

    def streams(*arguments: Any) -> Any:
        stop.set()
        return make_streams(*arguments)

    assert life(stop=stop, streams=streams) == INTERRUPTED
    assert capsys.readouterr() == ("", "")
    assert all(read(launcher.store, key) is None for key in ("result/0", "error/0", "gone/0"))


def failing(before: Callable[[], object], error: Exception | None = None) -> Callable[..., Any]:
    """A hook: something happens right before the rank would serve, and it fails."""

    def streams(*arguments: Any) -> Any:
        before()
        if error is not None:
            raise error
        return make_streams(*arguments)

    return streams


def test_what_ends_a_rank_ends_the_others_too(launcher: Launcher, capsys: pytest.CaptureFixture[str]) -> None:
    """R22: an error that nobody has foreseen is told to the group and printed, and the status is 1."""
    assert life(streams=failing(lambda: None, ZeroDivisionError("planned"))) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "cphicache: rank 0: ZeroDivisionError: planned",
        "cphicache: failed: rank 0: ZeroDivisionError: planned",
    ]
    assert read(launcher.store, "gone/0") == b"ended: ZeroDivisionError: planned"
    assert json.loads(launcher.store.get("error/0")) == ["failed", "rank 0: ZeroDivisionError: planned"]


@pytest.mark.parametrize(
    ("heard", "error", "after"),
    [(False, None, ""), (True, None, ""), (False, ZeroDivisionError("planned"), ", after ZeroDivisionError: planned")],
    ids=["told by a call", "told by the heartbeat", "told after an error"],
)
def test_a_store_that_goes_ends_a_rank_in_one_line(
    launcher: Launcher,
    capsys: pytest.CaptureFixture[str],
    heard: bool,
    error: Exception | None,
    after: str,
) -> None:
    """R22: when the launcher has gone with its store a rank ends with status 1 and one line, which has what the rank wanted to tell."""
    stop = Event()
    if not heard:
        launcher.patch.setattr("cphicache.agree.membership.BEATS_PER_TIMEOUT", 1)  # then it is the rank itself that notices

    def goes() -> None:
        launcher.go()
        assert not heard or stop.wait(20.0)

    assert life(stop=stop, streams=failing(goes, error)) == 1
    line = one_line(capsys)
    assert line.startswith("cphicache: rank 0: the launcher's store does not answer (")
    assert line.endswith(f"){after}; it stops")


def test_a_rank_that_waits_for_one_that_has_gone_names_it(launcher: Launcher, capsys: pytest.CaptureFixture[str]) -> None:
    """R22: who has gone before the start is named with why, in the store and on stderr, and nobody is waited for."""
    mark_gone(launcher.store, 1, "was killed by SIGKILL")
    assert two_ranks(launcher) == 1
    told = "rank 1 was killed by SIGKILL, before it said hello"
    assert json.loads(launcher.store.get("error/0")) == ["group", told]
    assert capsys.readouterr().err.splitlines() == [f"cphicache: {told}", f"cphicache: failed: {told}"]


def test_who_never_comes_is_waited_for_until_the_limit(launcher: Launcher, capsys: pytest.CaptureFixture[str]) -> None:
    """R22: a rank of which nothing is ever heard keeps neither the start nor the report waiting for ever."""
    launcher.patch.setattr(rank_main, "START_TIMEOUT_S", 0.0)
    assert two_ranks(launcher) == 1
    assert "cphicache: failed: ranks [1] have not said hello within 0 s" in capsys.readouterr().err


def two_ranks(launcher: Launcher) -> int:
    """Rank 0 of two."""
    launcher.patch.setenv("WORLD_SIZE", "2")
    return life(2)


def test_a_summary_that_cannot_be_written_is_one_line(
    launcher: Launcher, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """R35: a place that cannot be written to is unusable, under torchrun too, although everything was served."""
    (tmp_path / "summary.json").mkdir()
    assert life(1, "--out", str(tmp_path), "--json") == UNUSABLE
    assert one_line(capsys).startswith(f"cphicache: {tmp_path / 'summary.json'}: cannot be written (")
    assert read(launcher.store, "result/0") is not None
