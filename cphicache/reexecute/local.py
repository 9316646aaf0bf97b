"""A local half and a reducer that answer what was recorded. No bytes, no host slots: the engine's decisions are what is repeated."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from cphicache.agree.port import Excluded, GroupBroken
from cphicache.spaces.types import LogicalPage
from cphicache.transfer.port import CopyStatus, HostSlotsExhausted, LoadItem, OpKey

Operation: TypeAlias = OpKey | int
"""A backup, or a load-back by its id."""

NOTHING = CopyStatus(False, False)


class Name(NamedTuple):
    """A backup or a load-back by where it came from: the ``nth`` that the local half got during operation ``at``.

    It keeps its name when other operations are left out, while node ids, generations and numbers change.
    """

    at: int
    nth: int


class NotRecorded(Exception):
    """The engine asked for something that was not asked when the log was written."""


class Lost(NamedTuple):
    """A reduction that ended with the loss of ranks."""

    reason: str
    ranks: tuple[int, ...]
    excluded: bool

    def error(self) -> GroupBroken:
        """As the reducer raised it."""
        return (Excluded if self.excluded else GroupBroken)(self.reason, self.ranks)


@dataclass(slots=True)
class Answers:
    """What the local half and the other ranks answered during one operation; operations are told by their keys."""

    statuses: list[tuple[Operation, CopyStatus]] = field(default_factory=list)
    no_slots: dict[int, str] = field(default_factory=dict)
    """Nodes for which this rank's pool had no slots, with the error's text."""
    reductions: list[tuple[int, int] | Lost] = field(default_factory=list)


class ReplayTransfer:
    """Implements :class:`~cphicache.transfer.port.TransferPort`. Copies end when the caller has said so, or are waited for."""

    def __init__(self) -> None:
        self.names: dict[Operation, Name] = {}
        self.waited: set[Name] = set()
        """Operations that were waited for: in a drain round every rank waits for its own."""
        self._at = 0
        self._nth = 0
        self._statuses: dict[Operation | Name, deque[CopyStatus]] = {}
        self._last: dict[Name, CopyStatus] = {}
        self._no_slots: dict[int | Name, str] = {}
        self._queued: list[int] = []
        self._producers = 0

    def begin(
        self, at: int, statuses: Iterable[tuple[Operation | Name, CopyStatus]], no_slots: Iterable[tuple[int | Name, str]]
    ) -> None:
        """Operation ``at`` comes next. Each time it asks for an operation's status it gets the next one of those that are given."""
        self._at, self._nth = at, 0
        for operation, status in statuses:
            self._statuses.setdefault(operation, deque()).append(status)
        self._no_slots = dict(no_slots)

    # -- backup -----------------------------------------------------------------------------------------------------------------
    def reserve(self, op: OpKey, pages: Sequence[LogicalPage]) -> None:
        """See the port."""
        name = self._name(op)
        reason = self._no_slots.get(op.node, self._no_slots.get(name))
        if reason is not None:
            raise HostSlotsExhausted(reason)

    def submit_layers(self, ops: Iterable[OpKey], payload: str, layers: Sequence[int]) -> None:
        """See the port: nothing is copied."""

    def status(self, op: OpKey) -> CopyStatus:
        """See the port."""
        return self._status(op)

    def wait_backup(self, op: OpKey) -> None:
        """See the port."""
        self._wait(op)

    def shrink(self, op: OpKey, head_pages: int, *, free_now: bool) -> None:
        """See the port: no slots are kept here."""

    def commit(self, op: OpKey) -> None:
        """See the port: no slots are kept here."""

    def release(self, op: OpKey) -> None:
        """See the port: no slots are kept here."""

    # -- committed nodes ----------------------------------------------------------------------------------------------------
    def free_node(self, node: int) -> None:
        """See the port: no slots are kept here."""

    def split_node(self, node: int, head: int, head_pages: int) -> None:
        """See the port: no metadata is kept here."""

    # -- load-back ----------------------------------------------------------------------------------------------------------
    def queue_load(self, load: int, items: Sequence[LoadItem]) -> None:
        """See the port."""
        self._name(load)
        self._queued.append(load)

    def start_loads(self) -> int:
        """See the port."""
        if not self._queued:
            return -1
        self._queued.clear()
        self._producers += 1
        return self._producers - 1

    def load_status(self, load: int) -> CopyStatus:
        """See the port."""
        return self._status(load)

    def wait_load(self, load: int) -> None:
        """See the port."""
        if load in self._queued:
            self._queued.remove(load)
            self._producers += 1
        self._wait(load)

    def end_load(self, load: int) -> None:
        """See the port: nothing is kept here."""

    # -- the forward pass, and the outside ------------------------------------------------------------------------------------
    def before_store(self, pages: Sequence[LogicalPage]) -> None:
        """See the port: no stream waits here."""

    def wait_layer(self, producer: int, payload: str, layer: int) -> None:
        """See the port: no stream waits here."""

    def free_slots(self) -> dict[str, int]:
        """See the port: no slots are kept here, so no payload is named."""
        return {}

    # -- inner parts ------------------------------------------------------------------------------------------------------------
    def _name(self, operation: Operation) -> Name:
        name = Name(self._at, self._nth)
        self._nth += 1
        self.names[operation] = name
        return name

    def _status(self, operation: Operation) -> CopyStatus:
        name = self.names[operation]
        for key in (operation, name):
            told = self._statuses.get(key)
            if told:
                self._last[name] = told.popleft()
                if not told:
                    del self._statuses[key]
                break
        return self._last.get(name, NOTHING)

    def _wait(self, operation: Operation) -> None:
        """Its copies have ended. What they answer, if they failed, is in what was recorded; without that, they went well."""
        name = self.names[operation]
        self.waited.add(name)
        self._last[name] = CopyStatus(True, self._last.get(name, NOTHING).failed)


class RecordedReducer:
    """Implements :class:`~cphicache.agree.port.Reducer`: returns the reductions that were recorded, in their order."""

    def __init__(self) -> None:
        self.coming: deque[tuple[int, int] | Lost] = deque()

    def issue(self, count: int, first_failed: int) -> None:
        """See the port: all ranks' answer is known already."""

    def wait(self) -> tuple[int, int]:
        """See the port. Raises :class:`NotRecorded` when the engine waits for a reduction that was not waited for."""
        if not self.coming:
            raise NotRecorded("a reduction is waited for, and the log has none here")
        answer = self.coming.popleft()
        if isinstance(answer, Lost):
            raise answer.error()
        return answer
