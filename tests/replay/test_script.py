"""Scripts: calls that are told without the log's numbers are the same calls, and say so where they cannot be made any more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cphicache.engine.loadback import LoadBacks
from cphicache.engine.records import Load
from cphicache.events import EventLog
from cphicache.events.types import DEVICE
from cphicache.reexecute import Execution, NothingFails, RecordedLog, Unplayable, run_case, shrink
from cphicache.reexecute.execute import Event, comparable
from cphicache.reexecute.local import Name, ReplayTransfer
from cphicache.reexecute.script import Symbols, needs
from cphicache.spaces.types import LogicalPage
from cphicache.transfer.port import CopyStatus, OpKey
from tests.replay.calls import (
    LoggedScheduler,
    load_back_without_prepare,
    lost_group,
    matched_without_prepare,
    odd_calls,
    random_calls,
)

Script = list[dict[str, Any]]
SEEDS = (4, 14, 20)
LOGS: dict[str, Callable[[Path], Path]] = {
    **{f"seed {seed}": partial(random_calls, seed=seed) for seed in SEEDS},
    "odd calls": odd_calls,
    "match without prepare": matched_without_prepare,
    "load-back without prepare": load_back_without_prepare,
    "a rank is lost": partial(lost_group, excluded=False),
    "this rank is excluded": partial(lost_group, excluded=True),
}


def told(path: Path) -> tuple[dict[str, Any], Script, list[list[Event]]]:
    """Configuration, calls and the events of each call of a log that executes as recorded."""
    log = RecordedLog(path)
    execution, script, events = Execution(log), list[dict[str, Any]](), list[list[Event]]()
    symbols = Symbols(execution.player, execution.transfer)
    execution.on_call = lambda recorded: script.append(symbols.before(recorded))
    for recorded, result in execution.steps():
        symbols.after(recorded, script[-1], result)
        events.append([comparable(line.event) for line in (recorded.line, *recorded.followed) if line.event["event"] != DEVICE])
    assert execution.difference is None
    return asdict(log.config), script, events


def check_same(path: Path, patch: pytest.MonkeyPatch) -> None:
    """The script of a log, played, gives the events of the log call by call."""
    config, script, events = told(path)
    taken: list[list[Event]] = []
    take = EventLog.take

    def kept(log: EventLog) -> list[Event]:
        found = take(log)
        taken.append([comparable(event) for event in found if event["event"] != DEVICE])
        return found

    patch.setattr(EventLog, "take", kept)
    assert run_case(config, script, ()) is None
    for at, (call, expected) in enumerate(zip(script, events, strict=True)):
        assert taken[at + 1] == expected, f"call {at}: {call}"  # what came before the first call is taken first


# -- the same -----------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("log", LOGS)
def test_a_script_is_the_log_without_its_numbers(log: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R37: with nothing left out the calls have the log's events, also where copies and reservations fail, drain rounds wait for several
    reductions in one call, completions are handed in, and the group is lost."""
    check_same(LOGS[log](tmp_path / "events.jsonl"), monkeypatch)


def test_other_ranks_are_told_by_what_they_passed(failing_ranks: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """R37: what the other ranks were slow with, and what failed on one of them, is where it was."""
    check_same(failing_ranks[3], monkeypatch)


def test_a_run_under_pressure_is_told(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R37: pages of load-backs and evictions are told by the calls that gave them."""
    check_same(recorded, monkeypatch)


@pytest.mark.parametrize("log", LOGS)
def test_the_checker_knows_every_row(log: str, tmp_path: Path) -> None:
    """R37: asked after every call, the outside checker finds nothing in a log that is right: it is told who has which page, also of pages
    that were loaded back, and not of those that were freed. It is not asked where a caller admits what no call has found."""
    with pytest.raises(NothingFails, match="the checker finds nothing"):
        shrink(RecordedLog(LOGS[log](tmp_path / "events.jsonl")))


def test_an_answer_is_given_once_and_the_last_one_stays() -> None:
    """R37: each time the engine looks it gets the next answer of those that were recorded, and after the last one that one again; what
    was waited for has ended, and has failed only if that was recorded."""
    transfer, first, second = ReplayTransfer(), OpKey(1, 1), OpKey(2, 2)
    transfer.begin(0, [], [])
    transfer.reserve(first, [LogicalPage(1)])
    transfer.reserve(second, [LogicalPage(2)])
    failing, failed = CopyStatus(False, True), CopyStatus(True, True)
    transfer.begin(1, [(first, failing), (Name(0, 1), failing), (first, failed)], [])
    assert [transfer.status(first) for _ in range(3)] == [failing, failed, failed]
    assert transfer.status(second) == failing
    transfer.begin(2, [], [])
    assert [transfer.status(op) for op in (first, second)] == [failed, failing]
    transfer.wait_backup(second)
    assert transfer.status(second) == failed


# -- less ---------------------------------------------------------------------------------------------------------------------------
def keep_the_hold(self: LoadBacks, load: Load) -> None:
    """A load-back that ends does not give its hold on the host copies back."""
    self._transfer.end_load(load.load_id)
    del self._state.loads[load.load_id]


def test_a_load_back_is_reduced_with_what_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R37: a bug that shows with a load-back only is reduced to the calls that lead to it: its match is the one that a prepare of the
    script finds, and its request is admitted at the node that it gives."""
    log = RecordedLog(random_calls(tmp_path / "events.jsonl", SEEDS[0]))
    with monkeypatch.context() as patch:
        patch.setattr(LoadBacks, "_end", keep_the_hold)
        case = shrink(log)
        calls = {call["at"]: call for call in case.operations}
        (load,) = [call for call in calls.values() if call["call"] == "load_back"]
        assert (calls[load["match"]]["call"], calls[load["match"]]["request"]) == ("prepare", load["request"])
        assert len(calls) < case.recorded / 3
        assert run_case(case.config, case.operations, case.expected, fields=case.fields) is not None
    assert run_case(case.config, case.operations, case.expected, fields=case.fields) is None


@pytest.fixture(scope="module")
def divided(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Script]:
    """Two requests that share their first page; the second comes when the backup of the first is committed, and loads back."""
    with LoggedScheduler(tmp_path_factory.mktemp("divided") / "events.jsonl") as live:
        live.run([("admit", 11), ("forward", 2)])
        live.local.finish_all()
        (record,) = live.cache.state.pending.values()
        live.cache.completion(record.key, CopyStatus(True, False))
        live.run(
            [("results", 1), ("tick", 1), ("tick", 0), ("admit", 26), ("forward", 0), ("results", 1), ("tick", 1), ("tick", 0)]
        )
        live.run([("evict", 15), ("admit", 27)])
        live.end()
    config, script, _ = told(live.path)
    return config, script


@pytest.mark.parametrize(
    ("left_out", "at", "says"),
    [
        ({0}, 1, "call 0 was left out"),
        ({2}, 3, "call 2 was left out"),
        ({3, 4, 5, 6}, 7, "call 7 completes a backup that was not begun"),
        ({12, 13}, 15, "call 15 needs the answer of a call that has given none"),
        (set(range(14)) | {16}, 17, "call 14 has given fewer pages than before"),
        ({26}, 27, "call 26 was left out"),
        (set(range(12, 26)), 27, "call 27 needs the answer of a call that has given none"),
        ({27}, 28, "call 27 was left out"),
    ],
)
def test_what_a_call_needs_and_has_not_is_told(
    divided: tuple[dict[str, Any], Script], left_out: set[int], at: int, says: str
) -> None:
    """R37: a script without a call whose answer a later one needs is refused at the later one, and so is one in which that call now
    answers something else: a match that is put off, fewer pages, a backup that was not begun. Up to
    there the checker blames nobody for it."""
    config, script = divided
    less = [call for call in script if call["at"] not in left_out]
    assert run_case(config, [call for call in less if call["at"] < at]) is None
    with pytest.raises(Unplayable) as refused:
        run_case(config, [call for call in less if call["at"] <= at])
    assert str(refused.value) == says


def test_needs_are_all_that_a_call_names(divided: tuple[dict[str, Any], Script]) -> None:
    """R37: with a call go all that name it: its pages, its match, its node or its backup."""
    _, script = divided
    users = {at: {call["call"] for call in script if at in needs(call)} for at in (2, 3, 26, 27)}
    assert users == {
        2: {"reserve", "finish", "alloc"},
        3: {"completion"},
        26: {"load_back"},
        27: {"admit", "alloc", "reserve", "end_request"},
    }
