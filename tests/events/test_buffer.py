"""What happens between the scheduler thread and the file: the buffer, losses, rotation, and the ends of a process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import orjson
import pytest

from cphicache.events import EventLog, EventLogError, EventReadError, Level, read_events
from cphicache.lifecycle import Input, State, Trigger
from cphicache.signals import exit_on_signals

LONG_S = 3600.0
"""A flush interval after which nothing in a test happens by itself."""
ROOT = Path(__file__).resolve().parents[2]


def make_log(path: Path | None, **options: Any) -> EventLog:
    return EventLog(
        path, **{"rank": 0, "level": Level.LIFECYCLE, "wall_clock": None, "header": {}, "flush_interval_s": LONG_S, **options}
    )


def record(log: EventLog, tick: int, **changes: Any) -> None:
    values: dict[str, Any] = {
        "node": 4, "generation": 2, "trigger": Trigger.LAYER_STORED, "before": State.RESERVED, "after": State.LAYERS_IN_FLIGHT,
        "stale": None, "number": None, "bound": False, "agreed": False, "submitted": (0b101, 1), "confirmed": (0, 0),
        "need": (16, 0), "wasted": (0, 8), "used": (40, 8), "locks": -1,
        "cause": Input(reason="why", payload=1, layers=(0, 2)), "extra": (("parent", 3),),
    }  # fmt: skip
    step: Any = (log.now(), tick, *(values | changes).values())
    log.add(step)


def test_a_record_tells_the_same_as_the_step_in_words() -> None:
    """R36: masks and needs become counts: what the hot path records is the documented step event."""
    short, plain = make_log(None), make_log(None)
    short.name_payloads(["target", "draft"])
    record(short, 3)
    plain.step(
        3, 4, 2, Trigger.LAYER_STORED, State.RESERVED, State.LAYERS_IN_FLIGHT, bound=False, agreed=False, marks=[(2, 0), (1, 0)],
        payloads=["target", "draft"], slots=24, used=48, locks=-1, reason="why", payload="draft", layers=[0, 2], parent=3,
    )  # fmt: skip
    assert short.events[1] == plain.events[1]


def test_values_are_those_of_the_moment() -> None:
    """R36: what the caller does with its lists after an event was noted is not seen in the log."""
    log, nodes, deep = make_log(None), [1, 2], {"a": [1]}
    log.note(1, "fact", nodes=nodes, deep=deep)
    nodes.append(3)
    deep["a"].append(2)
    assert (log.events[1]["nodes"], log.events[1]["deep"]) == ([1, 2], {"a": [1]})


@pytest.mark.parametrize("kind", ["fact", "step"])
def test_losses_are_counted_and_logged(kind: str, tmp_path: Path) -> None:
    """R36: events for which the buffer has no room are counted, an event stands in their place with number and range, and the log
    is read as whole but for them."""
    path = tmp_path / "log"
    log = make_log(path, buffer_events=8, wait_when_full=False, wall_clock=lambda: 1.5)

    def write(tick: int) -> None:
        if kind == "fact":
            log.note(tick, "fact")
        else:
            record(log, tick, submitted=(), confirmed=(), cause="")

    with log._writer._lock:  # type: ignore[union-attr]  # the writer gets no turn
        for tick in range(1, 21):
            write(tick)
        assert log.lost == 20 - 7
    log.flush()
    write(21)
    log.close()
    events = list(read_events(path))
    (lost,) = [event for event in events if event["event"] == "lost"]
    assert (lost["first"], lost["seq"], lost["lost"], lost["tick"]) == (8, 20, 13, 21)
    assert [event["tick"] for event in events if event["event"] == kind] == [1, 2, 3, 4, 5, 6, 7, 21]
    assert (events[-1]["event"], events[-1]["lost"], events[-1]["seq"]) == ("end", 13, 22)


@pytest.mark.parametrize("wait", [True, False])
def test_long_facts_are_bounded_by_their_bytes(wait: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R36: lists of page hashes fill memory long before the number of events would: past the bound they are written by whoever records
    them, or lost and counted, as with too many events."""
    monkeypatch.setattr("cphicache.events.log.BUFFER_FACT_BYTES", 1000)
    log = make_log(tmp_path / "log", wait_when_full=wait)
    lock: AbstractContextManager[object] = nullcontext() if wait else log._writer._lock  # type: ignore[union-attr]
    with lock:
        for tick in range(40):
            log.note(tick, "fact", pages=["x" * 100])
    assert (log.lost == 0) is wait
    log.close()
    facts = [event["tick"] for event in read_events(tmp_path / "log") if event["event"] == "fact"]
    assert facts == list(range(len(facts)))
    assert len(facts) + log.lost == 40
    assert wait or 3 <= len(facts) <= 10


def test_a_log_in_a_file_is_not_in_memory_too(tmp_path: Path) -> None:
    """R36: what is written can be read from the file only; asking the log for it takes nothing away. One in memory needs no flush."""
    with make_log(tmp_path / "log") as log:
        log.note(1, "fact")
        assert (log.events, log.take(), log.dropped) == ([], [], 0)
    log.flush()
    assert [event["event"] for event in read_events(tmp_path / "log")] == ["header", "fact", "end"]
    kept = make_log(None)
    kept.note(1, "fact")
    kept.flush()
    assert [event["event"] for event in kept.take()] == ["header", "fact"]
    assert (kept.events, kept.dropped) == ([], 2)


def test_a_loss_up_to_the_end_is_told_at_the_end(tmp_path: Path) -> None:
    """R36: when nothing is recorded after a loss, closing tells it."""
    log = make_log(tmp_path / "log", buffer_events=2, wait_when_full=False)
    with log._writer._lock:  # type: ignore[union-attr]
        for tick in range(5):
            log.note(tick, "fact")
    log.close()
    assert [event["event"] for event in read_events(tmp_path / "log")] == ["header", "fact", "lost", "end"]


def test_virtual_time_waits_instead_of_losing(tmp_path: Path) -> None:
    """R35, R36: without a wall clock a full buffer is written by whoever fills it: nothing is lost, equal runs give equal files."""
    contents = []
    for buffer_events in (2, 3, 1000):
        path = tmp_path / "log"
        with make_log(path, buffer_events=buffer_events) as log:
            for tick in range(100):
                record(log, tick, submitted=(), confirmed=(), cause="")
        assert log.lost == 0
        contents.append(path.read_bytes())
    assert contents[0] == contents[1] == contents[2]
    assert contents[0].count(b"\n") == 102


def test_rotation_keeps_every_line_and_reads_as_one_log(tmp_path: Path) -> None:
    """R36: parts stay below the size, each begins with a header, the reader puts them together; rotating is deterministic."""
    seen = []
    for name in ("a", "b"):
        path = tmp_path / name / "log"
        path.parent.mkdir()
        with make_log(path, max_file_bytes=2000) as log:
            for tick in range(60):
                log.note(tick, "fact", filler="x" * 40)
        parts = sorted(path.parent.iterdir())
        assert len(parts) > 3
        assert all(part.stat().st_size <= 2000 for part in parts)
        assert all(orjson.loads(part.read_bytes().splitlines()[0])["event"] == "header" for part in parts)
        assert [event["tick"] for event in read_events(path) if event["event"] == "fact"] == list(range(60))
        seen.append([part.read_bytes() for part in parts])
    assert seen[0] == seen[1]


def test_rotation_keeps_the_newest_parts(tmp_path: Path) -> None:
    """R36: with `keep_parts` older parts go, and the strict reader says that the start is missing."""
    path = tmp_path / "log"
    with make_log(path, max_file_bytes=1000, keep_parts=2) as log:
        for tick in range(60):
            log.note(tick, "fact", filler="x" * 40)
    assert len(list(tmp_path.iterdir())) == 3
    with pytest.raises(EventReadError, match="the first parts of the log are gone"):
        list(read_events(path))


def rotated(path: Path) -> list[int]:
    """Write a log in many parts; the ticks of its facts."""
    with make_log(path, max_file_bytes=1000) as log:
        for tick in range(60):
            log.note(tick, "fact", filler="x" * 40)
    return list(range(60))


def test_a_log_whose_writer_was_stopped_between_two_parts_is_read(tmp_path: Path) -> None:
    """R36: a killed process may leave closed parts and no file of the log's own name: they are the log."""
    path = tmp_path / "log"
    ticks = rotated(path)
    path.unlink()
    found = [event["tick"] for event in read_events(path) if event["event"] == "fact"]
    assert found == ticks[: len(found)]
    assert len(found) > 40
    with pytest.raises(EventReadError, match=r"other: cannot be read \(No such file"):
        list(read_events(tmp_path / "other"))


def test_a_part_that_does_not_follow_is_named(tmp_path: Path) -> None:
    """R36: lines that are missing at the end of a part are missed at the begin of the next one."""
    path = tmp_path / "log"
    rotated(path)
    first = tmp_path / "log.1"
    lines = first.read_bytes().splitlines(keepends=True)
    first.write_bytes(b"".join(lines[:-2]))
    last = orjson.loads(lines[-1])["seq"]
    with pytest.raises(EventReadError, match=rf"log\.2, line 1: follows event {last} where {last - 2} was the last"):
        list(read_events(path))


def test_a_part_that_cannot_be_put_aside_is_said_once(tmp_path: Path) -> None:
    """R36: what stands where a part must go is named with the remedy; what was written till then can be read."""
    (tmp_path / "log.1").mkdir()
    log = make_log(tmp_path / "log", max_file_bytes=1000)
    for tick in range(60):
        log.note(tick, "fact", filler="x" * 40)
    with pytest.raises(EventLogError, match=r"log: cannot be rotated \(.*; give it a folder of its own$"):
        log.flush()
    log.close()
    assert len(list(read_events(tmp_path / "log"))) > 3


def test_a_record_that_cannot_be_rendered_is_said_once(tmp_path: Path) -> None:
    """R36: a step with masks of payloads that were never named cannot be told: it is an error of the caller, not a line that lies."""
    log = make_log(tmp_path / "log")
    log.note(1, "fact")
    record(log, 2)
    with pytest.raises(EventLogError, match=r"log: an event cannot be encoded \(.*; it and those after it are lost$"):
        log.flush()
    log.close()


def test_parts_of_an_older_log_are_not_read(tmp_path: Path) -> None:
    """R36: a new log of the same name does not take parts for its own that were left by an older one."""
    path = tmp_path / "log"
    for rounds in (60, 1):
        with make_log(path, max_file_bytes=1000) as log:
            for tick in range(rounds):
                log.note(tick, "fact", filler="x" * 40)
    assert [event["event"] for event in read_events(path)] == ["header", "fact", "end"]


def test_sizes_are_checked() -> None:
    """R36: a size that cannot work is refused with its value and the remedy."""
    for name, value in (("buffer_events", 0), ("flush_interval_s", 0.0), ("max_file_bytes", 0), ("keep_parts", -1)):
        with pytest.raises(ValueError, match=f"{name} is {value}: give"):
            make_log(None, **{name: value})


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a file that is always full")
def test_a_full_disk_reaches_the_thread_that_records() -> None:
    """R36: when the writer cannot write, the next event raises; it is not silent."""
    log = make_log(Path("/dev/full"))
    log._writer.drain()  # type: ignore[union-attr]
    with pytest.raises(RuntimeError, match="cannot be written"):
        log.note(1, "fact")
    log.close()


RECORDING = """
import os, signal, sys
from pathlib import Path
from cphicache.events import EventLog, Level
from cphicache.signals import exit_on_signals
log = EventLog(Path(sys.argv[1]), rank=0, level=Level.OPS, wall_clock=None, header={}, flush_interval_s=3600.0)
for tick in range(10):
    log.note(tick, "fact")
    if tick == 5 and sys.argv[2] == "KILL":
        log.flush()
if sys.argv[2] == "error":
    raise RuntimeError("of the program")
with exit_on_signals(signal.SIGTERM):
    if sys.argv[2] in ("KILL", "TERM"):
        os.kill(os.getpid(), getattr(signal, "SIG" + sys.argv[2]))
"""


@pytest.mark.parametrize(
    ("how", "facts", "end"), [("exit", 10, "exit"), ("error", 10, "exit"), ("TERM", 10, "exit"), ("KILL", 6, None)]
)
def test_a_process_that_ends_leaves_its_events(how: str, facts: int, end: str | None, tmp_path: Path) -> None:
    """R36: at exit, on error and on a signal everything is flushed; a killed process leaves what was flushed, in whole lines."""
    path = tmp_path / "log"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", RECORDING, str(path), how], env=environment, capture_output=True, check=False)
    assert done.returncode == {"exit": 0, "error": 1, "TERM": 143, "KILL": -9}[how], done.stderr
    events = list(read_events(path))
    assert [event["tick"] for event in events if event["event"] == "fact"] == list(range(facts))
    assert (events[-1].get("reason") if events[-1]["event"] == "end" else None) == end


def test_signal_handlers_are_put_back() -> None:
    """R36: the handler is the program's again afterwards."""
    before = signal.getsignal(signal.SIGUSR1)
    with exit_on_signals(signal.SIGUSR1), pytest.raises(SystemExit) as caught:
        signal.raise_signal(signal.SIGUSR1)
    assert caught.value.code == 128 + signal.SIGUSR1
    assert signal.getsignal(signal.SIGUSR1) == before
