"""Operations that can be left out: what one call gave another is told by where it came from, not by numbers that would change."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from cphicache.agree.port import NO_FAILURE
from cphicache.engine.records import Backup, Load
from cphicache.reexecute.local import Lost, Name, ReplayTransfer
from cphicache.reexecute.player import Player, Result, Unplayable
from cphicache.reexecute.recorded import Recorded
from cphicache.spaces.types import LogicalPage
from cphicache.transfer.port import CopyStatus

Scripted = Mapping[str, Any]
"""A call as :class:`~cphicache.reexecute.player.Player` takes it, with these changes:

``at`` is its name. Pages are runs ``(at, start, end)`` of the pages that call ``at`` gave (``at`` -1: the numbers themselves), a node is
``(at,)`` for the one that call ``at`` gave, and ``match`` is the ``at`` of a prepare. What was answered during it: ``copies``, a list of
``(name, drained, failed)`` with ``(at, nth)`` for the nth backup or load-back that began in call ``at``; ``no_slots``, names and texts;
``reached``, names of what every rank had passed; ``failures``, names of what had failed on some rank; ``lost``, reductions that broke.
The last three end in the number of the call's reduction that told it, from 0: a drain round waits for several in one call.
"""

Run = tuple[int, int, int]
Where = tuple[int, int]
RAW = -1
"""Stands for the call of a page that no call gave."""


def name_of(transfer: ReplayTransfer, operation: Backup | Load) -> Name | None:
    """The name of a backup or a load-back; None if it never came to the local half."""
    return transfer.names.get(operation.load_id if isinstance(operation, Load) else operation.key)


class Symbols:
    """Writes a script while a log is executed."""

    def __init__(self, player: Player, transfer: ReplayTransfer) -> None:
        self._player = player
        self._transfer = transfer
        self._given: dict[LogicalPage, Where] = {}
        self._own: dict[str, dict[LogicalPage, Where]] = {}
        self._nodes: dict[str, dict[int, int]] = {}
        self._prepared: dict[str, int] = {}
        self._numbered: dict[int, Name] = {}

    def before(self, recorded: Recorded) -> dict[str, Any]:
        """The call, to be asked for before it is executed."""
        call, rid = dict(recorded.call), recorded.call.get("request", "")
        call["at"] = recorded.at
        for name in ("row", "pages"):
            if isinstance(call.get(name), list):
                call[name] = runs([self._where(page, rid) for page in call[name]])
        if call.get("after") is not None:
            call["after"] = self._where(call["after"], rid)
        if call["call"] == "admit":
            at = self._nodes.get(rid, {}).get(call["node"])
            call["node"] = call["node"] if at is None else (at,)
        if call["call"] == "load_back" and rid in self._prepared:
            call["match"] = self._prepared[rid]
            for name in ("device_node", "nodes", "tail", "tokens"):
                del call[name]
        self._note_numbers()
        return call

    def after(self, recorded: Recorded, call: dict[str, Any], result: Result) -> None:
        """Adds what was answered, and remembers what the call gave."""
        self._note_numbers()
        answers, names = recorded.answers, self._transfer.names
        copies = [(tuple(names[key]), *status) for key, status in answers.statuses if key in names]
        by_node = {key.node: name for key, name in names.items() if isinstance(key, tuple)} if answers.no_slots else {}
        no_slots = [(tuple(by_node[node]), text) for node, text in answers.no_slots.items() if node in by_node]
        if call["call"] == "completion":
            name = next((name for key, name in names.items() if key == (call["node"], call["generation"])), None)
            if name is not None:
                call["of"] = tuple(name)
        reached: list[tuple[int, int, int]] = []
        failures: list[tuple[int, int, int]] = []
        lost: list[tuple[str, tuple[int, ...], bool, int]] = []
        for nth, answer in enumerate(answers.reductions):
            if isinstance(answer, Lost):
                lost.append((*answer, nth))
                continue
            count, first_failed = answer
            if first_failed in self._numbered:
                failures.append((*self._numbered[first_failed], nth))
            passed = [number for number in self._numbered if number < count]
            reached.extend((*self._numbered.pop(number), nth) for number in passed)
        for field, told in (
            ("copies", copies),
            ("no_slots", no_slots),
            ("reached", reached),
            ("failures", failures),
            ("lost", lost),
        ):
            if told:
                call[field] = told
        self._give(recorded, result)

    def _note_numbers(self) -> None:
        for number, operation in self._player.cache.state.numbered.items():
            name = name_of(self._transfer, operation)
            if name is not None:
                self._numbered[number] = name

    def _give(self, recorded: Recorded, result: Result) -> None:
        call, rid = recorded.call["call"], recorded.call.get("request", "")
        if call == "prepare":
            self._own[rid], self._nodes[rid] = {}, {}
            self._prepared[rid] = recorded.at
        places = {page: (recorded.at, index) for index, page in enumerate(result.pages)}
        if call in ("alloc", "load_back"):  # fresh pages; the others only tell a request which pages of the tree it has
            self._given |= places
        if call != "alloc":
            self._own.setdefault(rid, {}).update(places)
        if result.node is not None and call in ("prepare", "load_back"):
            self._nodes.setdefault(rid, {})[result.node.id] = recorded.at
        if call in ("finish", "end_request"):
            self._own.pop(rid, None)

    def _where(self, page: LogicalPage, rid: str) -> Where:
        found = [given[page] for given in (self._given, self._own.get(rid, {})) if page in given]
        return max(found, default=(RAW, page))


def runs(places: Iterable[Where]) -> list[Run]:
    """Places in a row, those that follow each other together."""
    told: list[Run] = []
    for at, index in places:
        if told and told[-1][0] == at and told[-1][2] == index:
            told[-1] = (at, told[-1][1], index + 1)
        else:
            told.append((at, index, index + 1))
    return told


def needs(call: Scripted) -> set[int]:
    """Which calls must have been made for this one."""
    found = {run[0] for name in ("row", "pages") if isinstance(call.get(name), list) for run in call[name]}
    if call.get("after") is not None:
        found.add(call["after"][0])
    if isinstance(call.get("node"), tuple):
        found.add(call["node"][0])
    if "match" in call:
        found.add(call["match"])
    if "of" in call:
        found.add(call["of"][0])
    return found - {RAW}


class Resolver:
    """Turns scripted calls back into calls, with what the calls before them have given now."""

    def __init__(self, transfer: ReplayTransfer) -> None:
        self._transfer = transfer
        self._results: dict[int, Result] = {}

    def call(self, scripted: Scripted) -> dict[str, Any]:
        """Raises :class:`Unplayable` where a call was left out whose result is needed, or gave less."""
        call = dict(scripted)
        for name in ("row", "pages"):
            if isinstance(call.get(name), list):
                call[name] = [page for run in call[name] for page in self._pages(run)]
        if call.get("after") is not None:
            at, index = call["after"]
            call["after"] = self._pages((at, index, index + 1))[0]
        if isinstance(call.get("node"), tuple):
            call["node"] = self._result(call["node"][0]).node
        if "match" in call:
            call["match"] = self._result(call["match"]).match
        if (call["call"] == "admit" and call["node"] is None) or call.get("match", True) is None:
            raise Unplayable(f"call {call['at']} needs the answer of a call that has given none")
        if "of" in call:
            keys = [key for key, name in self._transfer.names.items() if name == call["of"] and isinstance(key, tuple)]
            if not keys:
                raise Unplayable(f"call {call['at']} completes a backup that was not begun")
            call["node"], call["generation"] = keys[0]
        return call

    def keep(self, scripted: Scripted, result: Result) -> None:
        """The call has given this."""
        self._results[scripted["at"]] = result

    def _result(self, at: int) -> Result:
        if at not in self._results:
            raise Unplayable(f"call {at} was left out")
        return self._results[at]

    def _pages(self, run: Run) -> Sequence[LogicalPage]:
        at, start, end = run
        if at == RAW:
            return [LogicalPage(page) for page in range(start, end)]
        pages = self._result(at).pages[start:end]
        if len(pages) < end - start:
            raise Unplayable(f"call {at} has given fewer pages than before")
        return pages


class GroupReducer:
    """Implements :class:`~cphicache.agree.port.Reducer`: the other ranks have reached, and failed, what the script says.

    In a drain round every rank waits for its own copies, so what was waited for here has been reached by all.
    """

    def __init__(self, transfer: ReplayTransfer) -> None:
        self._transfer = transfer
        self._sample = (0, NO_FAILURE)
        self._told = 0
        self._reached: set[Name] = set()
        self._reaching: dict[Name, int] = {}
        self._failing: list[tuple[Name, int]] = []
        self._losing: deque[tuple[Lost, int]] = deque()
        self.numbered: Mapping[int, Backup | Load] = {}
        """The engine's, to be set once."""

    def begin(self, scripted: Scripted) -> None:
        """A call comes."""
        self._reached.update(self._reaching)  # also what too few reductions were waited for to tell
        self._told = 0
        self._reaching = {Name(*name): nth for *name, nth in scripted.get("reached", ())}
        self._failing = [(Name(*name), nth) for *name, nth in scripted.get("failures", ())]
        self._losing = deque(
            (Lost(reason, tuple(ranks), excluded), nth) for reason, ranks, excluded, nth in scripted.get("lost", ())
        )

    def issue(self, count: int, first_failed: int) -> None:
        """See the port."""
        self._sample = (count, first_failed)

    def wait(self) -> tuple[int, int]:
        """See the port."""
        told, self._told = self._told, self._told + 1
        if self._losing and self._losing[0][1] <= told:
            raise self._losing.popleft()[0].error()
        self._reached.update(name for name, nth in self._reaching.items() if nth <= told)
        failed = {name for name, nth in self._failing if nth <= told}
        self._failing = [(name, nth) for name, nth in self._failing if nth > told]  # each is told once
        count, first_failed = self._sample
        for number, operation in self.numbered.items():
            name = name_of(self._transfer, operation)
            if name in failed:
                first_failed = min(first_failed, number)
            if number < count and name not in self._reached and name not in self._transfer.waited:
                count = number
        return count, first_failed


def statuses_of(scripted: Scripted) -> list[tuple[Name, CopyStatus]]:
    """What the local half answers during a call."""
    return [(Name(*name), CopyStatus(drained, failed)) for name, drained, failed in scripted.get("copies", ())]
