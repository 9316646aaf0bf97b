"""The lifecycles of one log as columns of small numbers: what the report page draws."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cphicache.events import EventReadError, read_lines
from cphicache.events.types import CACHE, DEVICE, STEP
from cphicache.lifecycle import PENDING, State, Trigger

BACKUPS_KEPT = 100_000
"""Backups of one log on a page; further ones are counted only."""
STEPS_KEPT = 400_000
"""Steps of one log on a page; further ones are counted only."""
POINTS_KEPT = 4_000
"""Ticks of an occupancy curve; a longer run is told in ranges of ticks: the most that was used in each, the sum that was evicted."""

STATES = tuple(state.value for state in State)
OUTCOMES = ("committed", "rolled back", "pending", "refused")
COMMITTED, ROLLED_BACK, PENDING_AT_END, REFUSED = range(4)
_N, _C, _B = (STATES.index(state) for state in (State.DEVICE_VALID_HOST_NONE, State.COMMITTED, State.ROLLED_BACK))
_PENDING = frozenset(STATES.index(state) for state in PENDING)
_NUMBER = {name: at for at, name in enumerate(STATES)}


class Names:
    """Strings that occur many times, as numbers in the order of their first occurrence."""

    def __init__(self) -> None:
        self.all: dict[str, int] = {}

    def __getitem__(self, name: str) -> int:
        return self.all.setdefault(name, len(self.all))


class _Backup:
    """One generation of a node. ``on_device``: whether its tokens are on the device, as far as the log tells."""

    __slots__ = ("index", "on_device", "opened", "slots", "state")

    def __init__(self, index: int, tick: int) -> None:
        self.index = index
        self.opened = tick
        self.state = _N
        self.slots = 0
        self.on_device = True

    def held(self) -> tuple[int, int]:
        """Tokens that it keeps on the device: locked by its copies, and free to go because there is a host copy."""
        if self.state in _PENDING:
            return self.slots, 0
        return 0, self.slots if self.state == _C and self.on_device else 0


class Lifecycles:
    """Reads the log at ``path`` up to where it can be read.

    ``backups``: node, generation, request, outcome, first tick, last tick, slots and reason of each, as parallel columns.
    ``segments``: backup, state, first tick and last tick of each stay in a state (other than without a host copy).
    ``steps``: backup, tick, line, trigger, state before, state after and details of each step. ``names`` holds requests, triggers
    and details, and may be shared by logs. Memory follows the kept part of the log.
    """

    def __init__(self, path: Path, names: Names) -> None:
        self.backups: dict[str, list[int]] = {name: [] for name in (
            "node", "generation", "request", "outcome", "first", "last", "slots", "pending", "reason",
        )}  # fmt: skip
        self.segments: dict[str, list[int]] = {name: [] for name in ("backup", "state", "from", "to")}
        self.steps: dict[str, list[int]] = {name: [] for name in ("backup", "tick", "line", "trigger", "before", "after", "detail")}
        self.backups_left_out = 0
        self.steps_left_out = 0
        self.host_slots: int | None = None
        """Host slots of all ranks together, in each payload."""
        self.last_tick = 0
        self._path = path
        self._names = names
        self._of_node: dict[int, _Backup] = {}
        self._generation: dict[int, int] = {}
        self._curve: list[list[int]] = []  # tick, used, locked, with a host copy, evicted, on the device, evictable
        self._used = self._locked = self._backed = self._evicted = self._on_device = self._evictable = 0
        self._read()

    def curve(self) -> list[list[int]]:
        """Occupancy by tick: tick, host slots used, device tokens locked by pending backups, device tokens that also have a host copy,
        device tokens evicted, device tokens in use (0 in logs that do not tell), those of them that may be evicted. Figures of all ranks
        together, in each payload. At most ``POINTS_KEPT`` entries."""
        width = -(-len(self._curve) // POINTS_KEPT)
        if width <= 1:
            return self._curve
        ranges = (self._curve[at : at + width] for at in range(0, len(self._curve), width))
        columns = ((list(zip(*part, strict=True))) for part in ranges)
        return [[ticks[0], *map(max, levels), sum(evicted), max(used), max(evictable)]
                for ticks, *levels, evicted, used, evictable in columns]  # fmt: skip

    # -- reading ------------------------------------------------------------------------------------------------------------------
    def _read(self) -> None:
        tick: int | None = None
        for number, event in self._events():
            now = event.get("tick")
            if now is None:
                continue
            if tick is not None and now != tick:
                self._end_tick(tick)
            tick = now
            self.last_tick = max(self.last_tick, now)
            if event["event"] == STEP:
                self._step(number, event)
            elif event["event"] == CACHE:
                self.host_slots = event.get("host_slots", 0) * event["cp_size"] or None
            elif event["event"] == "device_evicted":
                self._evicted += event.get("tokens", 0)
            elif event["event"] == DEVICE:
                self._on_device, self._evictable = event.get("in_use", 0), event.get("evictable", 0)
        if tick is not None:
            self._end_tick(tick)
        for backup in self._of_node.values():
            self._close(backup, self.last_tick)

    def _events(self) -> Iterator[tuple[int, dict[str, Any]]]:
        try:
            for line in read_lines(self._path, on_gap=lambda error: None):
                yield line.number, line.event
        except EventReadError:
            return  # the replay, which reads the log too, has told it as a finding, as it has told what was passed over

    def _end_tick(self, tick: int) -> None:
        point = [tick, self._used, self._locked, self._backed, self._evicted, self._on_device, self._evictable]
        last = self._curve[-1] if self._curve else []
        if self._evicted or last[1:4] != point[1:4] or last[5:] != point[5:]:
            self._curve.append(point)
        self._evicted = 0

    # -- one step -----------------------------------------------------------------------------------------------------------------
    def _step(self, number: int, event: dict[str, Any]) -> None:
        before, after = _NUMBER.get(event["before"]), _NUMBER.get(event["after"])
        node, generation, tick = event["node"], event["generation"], event["tick"]
        if before is None or after is None:
            return  # a finding of the replay
        self._used = event.get("used", self._used)
        if before == after == _N and not event.get("refused") and self._generation.get(node) != generation:
            return  # a hit of a node that nobody has tried to back up
        backup = self._backup(node, generation, tick)
        self._count(backup, -1)
        if after != backup.state:
            self._close(backup, tick)
            backup.state, backup.opened = after, tick
        self._settle(backup, before, event)
        self._place(backup, event)
        self._count(backup, 1)
        if "head" in event and event.get("stale") is None and backup.state != _N:
            self._split(backup, event)
        if len(self.steps["tick"]) >= STEPS_KEPT or backup.index < 0:
            self.steps_left_out += 1
            return
        row = (backup.index, tick, number, self._names[event["trigger"]], before, after, self._names[_detail(event)])
        for column, value in zip(self.steps.values(), row, strict=True):
            column.append(value)

    def _count(self, backup: _Backup, sign: int) -> None:
        locked, backed = backup.held()
        self._locked += sign * locked
        self._backed += sign * backed

    def _split(self, tail: _Backup, event: dict[str, Any]) -> None:
        """The head of a split has the state and the generation of its tail, and no step of its own."""
        head = self._backup(event["head"], event["generation"], event["tick"])
        head.state, head.on_device = tail.state, tail.on_device
        head.slots = event["head_slots"]
        self._count(head, 1)
        if head.index >= 0 and tail.index >= 0:
            for name in ("request", "outcome", "reason"):
                self.backups[name][head.index] = self.backups[name][tail.index]
            self.backups["slots"][head.index] = head.slots

    def _backup(self, node: int, generation: int, tick: int) -> _Backup:
        known = self._of_node.get(node)
        if known is not None and self._generation[node] == generation:
            return known
        if known is not None:
            self._close(known, tick)
            self._count(known, -1)
        index = len(self.backups["node"])
        if index >= BACKUPS_KEPT:
            self.backups_left_out += 1
            index = -1
        else:
            row = (node, generation, self._names[""], REFUSED, tick, tick, 0, 0, self._names[""])
            for column, value in zip(self.backups.values(), row, strict=True):
                column.append(value)
        made = self._of_node[node] = _Backup(index, tick)
        self._generation[node] = generation
        return made

    def _place(self, backup: _Backup, event: dict[str, Any]) -> None:
        """Whether its tokens are on the device, and how many they are."""
        backup.slots = event["slots"]
        trigger = event["trigger"]
        if event.get("stale") is None and trigger == Trigger.DEVICE_EVICT:
            backup.on_device = False
        elif (event.get("stale") is None and trigger == Trigger.LOAD_AGREED) or backup.state in _PENDING:
            backup.on_device = True

    def _settle(self, backup: _Backup, before: int, event: dict[str, Any]) -> None:
        """Columns of the backup after this step."""
        if backup.index < 0:
            return
        at, columns, after = backup.index, self.backups, backup.state
        columns["last"][at] = event["tick"]
        columns["slots"][at] = max(columns["slots"][at], event["slots"])
        if event.get("request"):
            columns["request"][at] = self._names[event["request"]]
        if event.get("refused"):
            columns["reason"][at] = self._names[event["refused"]]
        if after == _C:
            columns["outcome"][at] = COMMITTED
        elif after == _B and before != _B:
            columns["outcome"][at] = ROLLED_BACK
            columns["reason"][at] = self._names[event.get("reason") or event["trigger"]]
        elif after in _PENDING and after != _B:
            columns["outcome"][at] = PENDING_AT_END

    def _close(self, backup: _Backup, tick: int) -> None:
        if backup.state == _N or backup.index < 0:
            return
        self.backups["last"][backup.index] = max(tick, self.backups["last"][backup.index])
        if backup.state in _PENDING:
            self.backups["pending"][backup.index] += max(tick - backup.opened, 0)
        for column, value in zip(self.segments.values(), (backup.index, backup.state, backup.opened, tick), strict=True):
            column.append(value)
        backup.opened = tick


def _detail(event: dict[str, Any]) -> str:
    """What else a person wants to know of a step."""
    submitted, confirmed = event["submitted"], event["confirmed"]
    parts = [f"{name} submitted {count} confirmed {confirmed.get(name)}" for name, count in submitted.items()]
    parts.append(f"slots {event['slots']}")
    parts += [f"{name} {event[name]}" for name in ("number", "parent", "head", "head_slots", "locks") if name in event]
    parts += [f"{event[name]}" for name in ("payload", "layers") if name in event]
    parts += [f"{name}: {event[name]}" for name in ("stale", "refused", "reason") if event.get(name)]
    return ", ".join(parts)
