"""Ports that do nothing, so that a benchmark measures what is in front of them."""

from __future__ import annotations

from collections.abc import Callable

from cphicache.lifecycle import BackupRecord, Input
from cphicache.transfer.backends.port import CopyGroup, RowPlan
from cphicache.transfer.port import Wait
from cphicache.transfer.streams.port import Event


class EmptyPort:
    """A lifecycle port without a world: there is room, parents are committed, and no work is done."""

    def __init__(self, layers: int) -> None:
        self._layers = layers

    def fit(self, record: BackupRecord) -> bool:
        """Yes."""
        return True

    def room(self, record: BackupRecord) -> bool:
        """Yes."""
        return True

    def victims_suffice(self, record: BackupRecord) -> bool:
        """Nobody has to ask."""
        return True

    def parent_committed(self, record: BackupRecord) -> bool:
        """Yes."""
        return True

    def on_device(self, record: BackupRecord) -> bool:
        """Yes."""
        return True

    def layers_of(self, payload: int) -> int:
        """The same for every payload."""
        return self._layers

    def take_number(self, record: BackupRecord) -> int:
        """Always the first."""
        return 0

    def refuse(self, record: BackupRecord, given: Input) -> None:
        """Nothing."""

    def reserve_slots(self, record: BackupRecord, given: Input) -> None:
        """Nothing."""

    def evict_host(self, record: BackupRecord, given: Input) -> None:
        """Nothing."""

    def copy_layers(self, record: BackupRecord, given: Input) -> None:
        """Nothing."""

    def commit(self, record: BackupRecord) -> None:
        """Nothing."""

    def release(self, record: BackupRecord) -> None:
        """Nothing."""

    def release_host(self, record: BackupRecord, given: Input) -> None:
        """Nothing."""

    def attach(self, record: BackupRecord, given: Input) -> None:
        """Nothing."""

    def shrink(self, record: BackupRecord, pages: int, *, free_now: bool) -> None:
        """Nothing."""

    def defer_split(self, record: BackupRecord, given: Input) -> None:
        """Nothing."""

    def fork(self, record: BackupRecord, given: Input) -> None:
        """Nothing."""

    def drop_device(self, record: BackupRecord) -> None:
        """Nothing."""

    def begin_load(self, record: BackupRecord, given: Input) -> None:
        """Nothing."""

    def end_load(self, record: BackupRecord) -> None:
        """Nothing."""

    def fail_load(self, record: BackupRecord) -> None:
        """Nothing."""

    def undo_load(self, record: BackupRecord) -> None:
        """Nothing."""

    def reserve_again(self, record: BackupRecord) -> None:
        """Nothing."""

    def commit_children(self, record: BackupRecord) -> None:
        """Nothing."""

    def lose_children(self, record: BackupRecord) -> None:
        """Nothing."""

    def drain_now(self, record: BackupRecord) -> None:
        """Nothing."""

    def wake(self, record: BackupRecord) -> None:
        """Nothing."""


class NoBackend:
    """A copy backend that is given everything, rows included, and moves nothing."""

    name = "torch"

    def check(self, group: CopyGroup) -> None:
        """All are fine."""

    def backup_layer(self, group: CopyGroup, layer: int, plan: RowPlan) -> None:
        """Nothing."""
        self.backup_layers(group, plan)

    def backup_layers(self, group: CopyGroup, plan: RowPlan) -> None:
        """Nothing: an operator takes the rows of both sides, so that they are made."""
        assert plan.source_rows.numel() == plan.destination_rows.numel()

    def load_layer(self, group: CopyGroup, layer: int, plan: RowPlan) -> None:
        """Nothing."""
        self.backup_layers(group, plan)


class Point:
    """An event of a stream that does nothing: it has come."""

    __slots__ = ()


_POINT = Point()


class NoStream:
    """A stream that forgets its work, so that what is left is the submission; or, with ``runs``, one that runs it in the submission, as
    the CUDA one does with what launches the copies."""

    __slots__ = ("_runs", "name")

    def __init__(self, name: str, *, runs: bool = False) -> None:
        self.name = name
        self._runs = runs

    @property
    def takes_whole(self) -> bool:
        """Yes: as on a device."""
        return True

    def submit(self, work: Callable[[], None], *, cost_us: float = 0.0) -> None:
        """Run it, or forget it."""
        if self._runs:
            work()

    def record(self) -> Event:
        """A point that has come."""
        return _POINT

    def wait(self, event: Event, why: Wait) -> None:
        """It has come."""


class NoStreams:
    """Streams of :class:`NoStream`; see :class:`~cphicache.transfer.streams.port.Streams`."""

    def __init__(self, *, run: bool = False) -> None:
        self._run = run
        self._streams: dict[str, NoStream] = {}

    def stream(self, name: str) -> NoStream:
        """The stream of that name."""
        known = self._streams.get(name)
        if known is None:
            known = self._streams[name] = NoStream(name, runs=self._run)
        return known

    def query(self, event: Event, why: Wait) -> bool:
        """It has come."""
        return True

    def synchronize(self, event: Event) -> None:
        """It has come."""

    def pause(self, duration_us: float) -> None:
        """No clock."""

    @property
    def now_us(self) -> float | None:
        """No clock."""
        return None

    def close(self) -> None:
        """Nothing is open."""
