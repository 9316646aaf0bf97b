"""What comes from outside of a run, at every place at which it can: nothing is left behind, and one line says what it was."""

from __future__ import annotations

import ast
import errno
import io
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import pytest

import cphicache
from cphicache.agree.port import GroupBroken
from cphicache.engine.effects import Effects
from cphicache.events import EventLog
from cphicache.events.sinks import LineFile
from cphicache.lifecycle.port import LifecyclePort
from cphicache.replay import replay
from cphicache.run import world as world_module
from cphicache.run.rank_main import Rank
from cphicache.run.scheduler import Scheduler
from cphicache.run.world import RunFailed
from cphicache.transfer.faults import CopyFaults
from cphicache.transfer.pools.memory import HostMemory, HostMemoryError
from cphicache.transfer.port import TransferPort
from cphicache.transfer.rank import RankTransfer
from cphicache.transfer.streams.threads import ThreadStreams
from tests.faults.rig import InFlight, busy, nothing_left, nth_call, run, whole_events


def methods_of(port: type[Protocol]) -> list[str]:  # type: ignore[valid-type]
    return [name for name, member in vars(port).items() if callable(member) and not name.startswith("_")]


PLACES = [(RankTransfer, name) for name in methods_of(TransferPort)] + [(Effects, name) for name in methods_of(LifecyclePort)]
"""Every call between the engine and its local half, and everything that a transition asks or does."""
ENOUGH: dict[str, Any] = {"requests": 30, "layers": 2}
"""A run that reaches nearly all of them: load-backs, deferred requests, aborts before the first layer."""
WRITE_BACK = {"wait_backup", "wait_load"}
"""Reached where an eviction waits for backups."""
LOADS_FAIL = {"fail_load", "undo_load"}
"""Reached where load-backs fail."""
BLOCKS = {"wait_backup", "wait_load"}
"""Calls that wait for copies: never made with what does not end before the rank closes."""


# -- an error at every place ----------------------------------------------------------------------------------------------------------
def options_for(name: str) -> dict[str, Any]:
    return {**ENOUGH, "policy": "write_back"} if name in WRITE_BACK else ENOUGH


def faults_for(name: str) -> dict[int, CopyFaults]:
    faults = CopyFaults()
    if name in LOADS_FAIL:
        faults.fail_copies_where(lambda call: call.direction == "h2d")
    return {1: faults}


@pytest.mark.parametrize(("owner", "name"), PLACES, ids=[f"{owner.__name__}.{name}" for owner, name in PLACES])
def test_a_call_that_raises_ends_the_run_cleanly(owner: type, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R30, R35: an error inside of any call of a port, on one rank, is told by its name and text. The other rank ends too, host memory
    is given back, no thread lives on, and both logs are whole lines."""
    raising, _ = nth_call(getattr(owner, name), 1, RuntimeError(f"planted in {name}"), thread="rank1")
    monkeypatch.setattr(owner, name, raising)
    log = tmp_path / "events.jsonl"
    with nothing_left(monkeypatch) as pins:
        with pytest.raises(RunFailed, match=f"^rank 1: RuntimeError: planted in {name}$"):
            run(busy(log, **options_for(name), streams="virtual"), faults=faults_for(name))
        assert pins.most
    assert all(events > 1 for events in whole_events(log, 2))


@pytest.mark.parametrize(("owner", "name"), PLACES, ids=[f"{owner.__name__}.{name}" for owner, name in PLACES])
def test_a_call_that_raises_while_copies_run(owner: type, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R14, R30, R35: the same with copies in flight on both of the rank's copy threads, and an error that comes after the call's own
    effects (more copies among them): every copy has ended before host memory is given back, then all is as above."""
    flight = InFlight(monkeypatch, rank=1)

    def hold_then(call: Callable[[], Any]) -> None:
        flight.hold()
        if name not in BLOCKS:
            call()

    raising, _ = nth_call(getattr(owner, name), 1, RuntimeError(f"planted in {name}"), thread="rank1", first=hold_then)
    monkeypatch.setattr(owner, name, raising)
    log = tmp_path / "events.jsonl"
    with nothing_left(monkeypatch):
        with pytest.raises(RunFailed, match=f"^rank 1: RuntimeError: planted in {name}$"):
            run(busy(log, **options_for(name), streams="threads"), faults=faults_for(name), on_world=flight.on_world)
        assert len(flight.pinned) == 2
        assert all(flight.pinned)
    if name == "submit_layers":
        assert flight.copies > flight.copies_before
    assert all(events > 1 for events in whole_events(log, 2))


def test_a_forward_that_raises_while_its_load_back_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R25, R30: the forward ends with an error while the load-back that it reads is being copied: those copies end first, all of them,
    then host memory is given back."""
    flight = InFlight(monkeypatch, rank=1)
    queue_load = RankTransfer.queue_load

    def hold_and_queue(transfer: RankTransfer, *args: Any) -> None:
        if threading.current_thread().name == "rank1" and not flight.holding:
            flight.hold()
        queue_load(transfer, *args)

    monkeypatch.setattr(RankTransfer, "queue_load", hold_and_queue)
    raising, calls = nth_call(RankTransfer.wait_layer, 1, RuntimeError("planted in wait_layer"), thread="rank1")
    monkeypatch.setattr(RankTransfer, "wait_layer", raising)
    with nothing_left(monkeypatch):
        with pytest.raises(RunFailed, match=r"^rank 1: RuntimeError: planted in wait_layer$"):
            run(busy(tmp_path / "events.jsonl", **ENOUGH, streams="threads"), on_world=flight.on_world)
        assert len(flight.pinned) == 2
        assert all(flight.pinned)
    assert calls[0] == 1
    assert flight.copies > flight.copies_before


@pytest.mark.parametrize("ending", [ThreadStreams, HostMemory, EventLog], ids=lambda ending: ending.__name__)
def test_an_end_that_fails_still_ends_the_rest(ending: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R30, R35: where one of copy threads, host memory and log cannot be given up without an error, that is told, and the others are."""
    close = ending.close

    def close_and_raise(closed: Any) -> None:
        close(closed)
        raise RuntimeError("planted in close")

    monkeypatch.setattr(ending, "close", close_and_raise)
    log = tmp_path / "events.jsonl"
    with nothing_left(monkeypatch), pytest.raises(RunFailed, match=r"^rank 0: RuntimeError: planted in close$"):
        run(busy(log, cp_size=1, requests=2))
    assert '"reason":"closed"' in log.read_text(encoding="utf-8").splitlines()[-1]


@pytest.mark.parametrize("place", ["on_tick", "on_done", "on_world", "streams"])
def test_a_callback_of_the_caller_that_raises_ends_the_run_cleanly(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R30: what the caller of a run hands in may raise too: before the run, in it, and after a request."""

    def raises(*args: Any) -> Any:
        raise LookupError(f"planted in {place}")

    with nothing_left(monkeypatch), pytest.raises(RunFailed, match=rf"^rank \d: LookupError: planted in {place}$"):
        run(busy(tmp_path / "events.jsonl"), **{place: raises})


@pytest.mark.parametrize("place", ["check_stop", "wait_for_keys"])
def test_a_rank_that_is_stopped_before_it_serves_gives_all_back(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R31, R35: a rank process whose pools stand, and which then hears that the others do not come, gives its memory back, ends its
    copy threads and closes its log."""
    log = tmp_path / "events.jsonl"
    membership = NobodyComes(place)
    rank = Rank(busy(log, cp_size=1), 0, threading.Event())
    with nothing_left(monkeypatch) as pins:
        with pytest.raises(GroupBroken, match=f"^planted in {place}$"):
            rank._serve(membership)
        assert pins.most
    assert "hello/0" in membership.store
    assert all(events > 1 for events in whole_events(log, 1))


class NobodyComes:
    """The membership of a single rank: it may greet, and once its world stands ``place`` says that the group is broken."""

    def __init__(self, place: str) -> None:
        self.store = Store()
        self.timeout_s = 1.0
        self._place = place
        self._stops = 0

    def check_stop(self) -> None:
        """Asked before the group is made, and again when the world stands."""
        self._stops += 1
        if self._place == "check_stop" and self._stops == 2:
            raise GroupBroken("planted in check_stop")

    def wait_for_keys(self, kind: str, what: str, timeout_s: float) -> list[str]:
        if self._place == "wait_for_keys" and kind == "ready":
            raise GroupBroken("planted in wait_for_keys")
        return [self.store[f"{kind}/0"]]


class Store(dict[str, str]):
    """Keys in memory."""

    def set(self, key: str, value: str) -> None:
        self[key] = value


# -- memory ---------------------------------------------------------------------------------------------------------------------------
def test_no_host_memory_at_any_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    """R31: memory that ends at any buffer of any rank is one line; what the rank and the others had is given back."""
    counting, calls = nth_call(HostMemory.allocate, 0, RuntimeError())
    with monkeypatch.context() as patch, nothing_left(patch):
        patch.setattr(HostMemory, "allocate", counting)
        run(busy())
    assert calls[0] > 2
    for nth in range(1, calls[0] + 1):
        failing, _ = nth_call(
            HostMemory.allocate, nth, HostMemoryError("host pool buffer of 1 bytes: the system has not that much")
        )
        with monkeypatch.context() as patch, nothing_left(patch):
            patch.setattr(HostMemory, "allocate", failing)
            with pytest.raises(RunFailed, match="HostMemoryError: host pool buffer of 1 bytes") as caught:
                run(busy())
            assert "\n" not in str(caught.value)


# -- the disk -------------------------------------------------------------------------------------------------------------------------
class FullDisk(io.RawIOBase):
    """A file that takes ``room`` bytes."""

    def __init__(self, path: Path, room: int) -> None:
        self._file = path.open("wb", buffering=0)
        self._room = room

    def write(self, data: Any) -> int:
        part = memoryview(data)[: self._room]
        if not part:
            raise OSError(errno.ENOSPC, "No space left on device")
        self._room -= len(part)
        return self._file.write(part)

    def close(self) -> None:
        self._file.close()
        super().close()


def test_a_disk_that_is_full_at_any_part_of_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R36: wherever the disk ends - at the first byte, inside of a line, at the close - the run ends with one line that names the log
    and the cause, and nothing of it is left; a disk with just enough room is enough."""
    monkeypatch.setattr("cphicache.events.sinks.BUFFER_BYTES", 4096)
    log = tmp_path / "events.jsonl"
    config = busy(log, cp_size=1, streams="virtual")
    with nothing_left(monkeypatch):
        run(config)
    size = log.stat().st_size
    assert size > 5 * 4096
    for room in (0, 1, 4096, size // 2, size - 1):
        with monkeypatch.context() as patch, nothing_left(patch):
            fill(patch, room)
            with pytest.raises(RunFailed, match=r"events\.jsonl: cannot be written \(No space left on device\)") as caught:
                run(config)
            assert caught.value.kind == "unusable"
            assert "\n" not in str(caught.value)
        assert log.stat().st_size == room
    with monkeypatch.context() as patch, nothing_left(patch):
        fill(patch, size)
        run(config)


def fill(patch: pytest.MonkeyPatch, room: int) -> None:
    """Logs go to a disk with so much room."""
    opened = LineFile.__init__

    def on_full_disk(self: LineFile, path: Path) -> None:
        opened(self, path)
        self._file.close()
        self._file = FullDisk(path, room)  # type: ignore[assignment]

    patch.setattr(LineFile, "__init__", on_full_disk)


# -- interrupts -----------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("can't start new thread")])
def test_an_interrupt_while_ranks_are_started(
    error: BaseException, begun: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R18, R30: an interrupt when some ranks are started and others are not, or a thread that cannot be had, ends those that are: no rank
    begins, and nothing is left."""
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        if thread.name != "rank1" or begun:
            start(thread)
        if thread.name == "rank1":
            raise error

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with nothing_left(monkeypatch) as pins, pytest.raises(type(error)):
        run(busy(tmp_path / "events.jsonl", requests=4, streams="virtual"))
    assert pins.most == 0
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("default_sigint")
def test_an_interrupt_at_any_tick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R18: an interrupt at whatever tick, the last one included, ends all ranks: nothing is left, and their logs are whole lines."""
    log = tmp_path / "events.jsonl"
    config = busy(log, requests=4, streams="virtual")
    last = max(result.ticks for result in run(config))
    main = threading.main_thread().ident
    assert main is not None
    assert last > 5
    for tick in range(1, last + 1):

        def interrupt(scheduler: Scheduler, tick: int = tick) -> None:
            if scheduler.tick == tick:
                signal.pthread_kill(main, signal.SIGINT)

        with nothing_left(monkeypatch), pytest.raises(KeyboardInterrupt):
            run(config, on_tick=interrupt)
        assert all(events >= 1 for events in whole_events(log, 2))


# -- clocks ---------------------------------------------------------------------------------------------------------------------------
CLOCKS = {
    # how long a wait took (reported); since when a reduction has been waited for, beside signs of life
    "agree/distributed.py": {"monotonic"},
    "agree/membership.py": {"monotonic"},  # signs of life; a jump counts as a slice, see tests/ranks/test_membership.py
    "explore/search.py": {"process_time"},  # how long an exploration may compute
    "run/launch.py": {"monotonic"},  # how long interrupted ranks may take
    "run/simulate/judge.py": {"process_time"},  # how long a world may compute
    "run/simulate/workers.py": {"process_time"},  # the same, for one that cannot be interrupted
    "run/study/profile.py": {"thread_time"},  # what a run costs the scheduler's thread (reported)
    "run/study/serve.py": {"thread_time"},  # what a part of the scheduler costs (reported)
    "run/world.py": {"time"},  # a field of the log
    "sglang/factory.py": {"time"},  # a field of the log
    "sglang/metrics.py": {"monotonic"},  # how often values are published
}


def test_clocks_are_read_where_they_are_known_to_be() -> None:
    """R18: time is ticks. Whatever reads a clock is listed here with its reason, and none of it is the engine or what it stands on."""
    root = Path(cphicache.__file__).parent
    found: dict[str, set[str]] = {}
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and node.value.id == "time"
                and node.attr != "sleep"
            ):
                found.setdefault(path.relative_to(root).as_posix(), set()).add(node.attr)
    kept = {name: clocks for name, clocks in found.items() if not name.startswith("bench/")}
    assert kept == CLOCKS


@pytest.mark.parametrize("jump_s", [-1e6, 1e6])
def test_a_wall_clock_that_jumps_changes_a_field_of_the_log(jump_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R36: a wall clock that jumps at every reading, either way, changes nothing that is served or read back."""
    reading = [1e9]

    def jumping() -> float:
        reading[0] += jump_s
        return reading[0]

    monkeypatch.setattr(world_module.time, "time", jumping)
    log = tmp_path / "events.jsonl"
    with nothing_left(monkeypatch):
        results = run(busy(log, cp_size=1))
    assert results[0].served.finished + results[0].served.aborted == 12
    assert not results[0].leaks
    assert replay([log]).findings.total == 0
