"""The event log. One object a rank; it configures nothing outside itself.

On the scheduler thread an event is a record put into a bounded buffer. It is rendered and written on a thread of the log's own.
"""

from __future__ import annotations

import atexit
import platform
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

import orjson

from cphicache import __version__
from cphicache.events.render import Record, Renderer, StepRecord, encode_fields
from cphicache.events.sinks import EventLogError, FileWriter
from cphicache.events.types import END, HEADER, LOST, SCHEMA_VERSION, STEP, WRITTEN_HERE, Level
from cphicache.lifecycle import State, Trigger, table_hash

__all__ = ["EventLog", "EventLogError", "rank_log_path"]

_PACKAGES = ("torch", "transitions", "structlog", "orjson")
_OWN = frozenset({HEADER, END, LOST, STEP})
BUFFER_FACT_BYTES = 1 << 26
"""Encoded facts that wait to be written, at most (the long ones are lists of page hashes)."""
_NEVER = 1 << 62


def rank_log_path(path: Path, rank: int, size: int) -> Path:
    """Where a rank writes its log: ``events.jsonl`` of rank 2 of 4 is ``events.rank2.jsonl``."""
    return path if size == 1 else path.with_name(f"{path.stem}.rank{rank}{path.suffix}")


class EventLog:
    """Events of one rank, as JSON lines in a file, or in memory when ``path`` is ``None``.

    ``wall_clock`` gives seconds; with ``None`` (virtual time) no event has a wall time, so that equal runs give equal files.
    ``header`` is what the caller wants to find in the first line: seed, configuration. In memory the newest ``keep`` events are
    kept. At level ``OFF`` no file is made.

    A file's events wait in a buffer of ``buffer_events``, which is written at least every ``flush_interval_s``, at :meth:`flush`, at
    :meth:`close` and when the interpreter exits (a signal that ends the process without that: see
    :func:`~cphicache.signals.exit_on_signals`). A killed process loses what was buffered. When the buffer is full, events are
    counted and an event ``lost`` takes their place, or, with ``wait_when_full`` (the default in virtual time, which can wait), they
    are written by the caller's thread. ``max_file_bytes`` and ``keep_parts`` rotate the file, see
    :class:`~cphicache.events.sinks.FileWriter`.

    One thread records; :meth:`flush` and :meth:`close` may be called by any. Raises :class:`EventLogError` when the file cannot be
    opened, or at the next event when it could not be written; ``TypeError`` for a value that JSON does not know: tensors, and with
    them KV contents, cannot be logged.
    """

    def __init__(
        self,
        path: Path | None,
        *,
        rank: int,
        level: Level,
        wall_clock: Callable[[], float] | None,
        header: Mapping[str, object],
        keep: int = 100_000,
        buffer_events: int = 1 << 16,
        flush_interval_s: float = 0.2,
        max_file_bytes: int | None = None,
        keep_parts: int | None = None,
        wait_when_full: bool | None = None,
    ) -> None:
        _check_sizes(keep, buffer_events, flush_interval_s, max_file_bytes, keep_parts)
        self.level = level
        self.seq = -1
        """``seq`` of the last event, lost ones included."""
        self._rank = rank
        self._path = path
        self.now: Callable[[], float | None] = _no_wall_time if wall_clock is None else wall_clock
        """Wall time of what is recorded now."""
        self._wait = wall_clock is None if wait_when_full is None else wait_when_full
        self._lost = 0
        self._lost_now = 0
        self._fact_bytes = 0
        self._closed = False
        self._writer: FileWriter | None = None
        self._records: deque[Record] = deque()
        self._renderer = Renderer(rank)
        self._capacity = _NEVER
        head = encode_fields(_header_fields(level, header)) if level is not Level.OFF else b""
        if path is None or level is Level.OFF:
            self._records = deque(maxlen=keep)
        else:
            self._capacity = buffer_events
            self._writer = FileWriter(
                path,
                self._records,
                self._renderer,
                head,
                flush_interval_s=flush_interval_s,
                max_file_bytes=max_file_bytes,
                keep_parts=keep_parts,
                on_failure=self._hear_of_failure,
            )
            atexit.register(self._at_exit)
        self._pressure = self._pressure_at_ease = max(1, self._capacity // 2)
        if level is not Level.OFF:
            self._put_fact(head)

    def name_payloads(self, payloads: Sequence[str]) -> None:
        """Names of the payloads whose masks :meth:`add` gets, once before the first."""
        self._renderer.payloads = tuple(payloads)

    # -- writing --------------------------------------------------------------------------------------------------------------
    def add(self, record: StepRecord) -> None:
        """One lifecycle step as :data:`~cphicache.events.render.StepRecord`, whose wall time is an answer of :attr:`now`."""
        records = self._records
        if len(records) >= self._pressure and not self._has_room(record[1]):
            return
        self.seq += 1
        records.append(record)

    def step(  # noqa: PLR0917 - these six say which step it was, in the order of the log
        self,
        tick: int,
        node: int,
        generation: int,
        trigger: Trigger,
        before: State,
        after: State,
        *,
        stale: str | None = None,
        number: int | None = None,
        bound: bool,
        agreed: bool,
        marks: Sequence[tuple[int, int]],
        payloads: Sequence[str],
        slots: int,
        used: int = 0,
        locks: int = 0,
        reason: str = "",
        **extra: object,
    ) -> None:
        """One lifecycle step, told in numbers: ``marks`` are (layers submitted, layers confirmed) by payload, ``slots`` host slots.

        :meth:`add` is the same for those who have masks and needs and no time."""
        if not self.level:
            return
        submitted = {name: mark[0] for name, mark in zip(payloads, marks, strict=True)}
        confirmed = {name: mark[1] for name, mark in zip(payloads, marks, strict=True)}
        fields: dict[str, object] = {
            "event": STEP, "tick": tick, "node": node, "generation": generation, "trigger": trigger, "before": before,
            "after": after, "bound": bound, "agreed": agreed, "submitted": submitted, "confirmed": confirmed, "slots": slots,
            "used": used,
        }  # fmt: skip
        for name, value in (("locks", locks or None), ("stale", stale), ("number", number), ("reason", reason or None)):
            if value is not None:
                fields[name] = value
        self._fact(tick, {**fields, **extra})

    def note(self, tick: int, event: str, **fields: object) -> None:
        """Another fact of level ``lifecycle``: a refusal, an eviction, a deferral, a load, a reduction.

        Give ``local=True`` when other ranks need not see it at the same tick."""
        if self.level:
            self._note(tick, event, fields)

    def op(self, tick: int, event: str, **fields: object) -> None:
        """What the cache was asked; recorded at level ``ops`` only."""
        if self.level is Level.OPS:
            self._note(tick, event, fields)

    def _note(self, tick: int, event: str, fields: dict[str, object]) -> None:
        if event in _OWN or not WRITTEN_HERE.isdisjoint(fields):
            taken = sorted(WRITTEN_HERE.intersection(fields)) or [event]
            raise ValueError(f"event {event!r} may not set {', '.join(taken)}: the log writes that itself; choose another name")
        self._fact(tick, {"event": event, "tick": tick, **fields})

    def _fact(self, tick: int, fields: dict[str, object]) -> None:
        encoded = encode_fields(fields)  # before anything is counted: a refused event leaves no gap
        writer = self._writer
        if writer is not None and self._fact_bytes - writer.taken_bytes > BUFFER_FACT_BYTES:
            self._pressure = 0
        if len(self._records) >= self._pressure and not self._has_room(tick):
            return
        self._put_fact(encoded)

    def _put_fact(self, encoded: bytes) -> None:
        self._fact_bytes += len(encoded)
        self.seq += 1
        self._records.append((self.now(), encoded))

    def _hear_of_failure(self) -> None:
        self._pressure = 0  # the next event asks, and is told

    # -- the buffer -----------------------------------------------------------------------------------------------------------
    def _has_room(self, tick: int) -> bool:
        """The buffer is half full, or something is wrong. False: the event is lost, and counted."""
        writer = cast(FileWriter, self._writer)  # memory never asks
        writer.raise_failure()
        if self._closed or writer.failure is not None:
            raise EventLogError(f"event log {self._path}: an event came after it was closed")
        full = len(self._records) >= self._capacity or self._fact_bytes - writer.taken_bytes > BUFFER_FACT_BYTES
        if self._wait:
            if full:
                writer.drain()
                writer.raise_failure()
            else:
                writer.wake()
            self._pressure = self._pressure_at_ease
            return True
        writer.wake()
        if full or (self._lost_now and len(self._records) >= self._pressure_at_ease):
            # once events are lost, go on losing until there is room for many: one long gap reads better than many short ones
            self._pressure = 0
            self._lost_now += 1
            self.seq += 1
            return False
        self._tell_loss(tick)
        return True

    def _tell_loss(self, tick: int | None) -> None:
        count = self._lost_now
        if count:
            fields: dict[str, object] = {"event": LOST, "first": self.seq - count + 1, "lost": count}
            self._records.append((self.now(), encode_fields(fields if tick is None else {**fields, "tick": tick}), count))
            self._lost += count
            self._lost_now = 0
        self._pressure = self._pressure_at_ease

    # -- reading back ---------------------------------------------------------------------------------------------------------
    @property
    def events(self) -> list[dict[str, Any]]:
        """What is kept in memory, decoded, oldest first and with the header if it is still there. Empty when a file is written."""
        if self._writer is not None:
            return []
        renderer = Renderer(self._rank, self._renderer.payloads, first_seq=self.dropped)
        return [orjson.loads(renderer.render(record)) for record in self._records]

    def take(self) -> list[dict[str, Any]]:
        """Like :attr:`events`, and forgets them: each is taken once. They count as dropped then."""
        taken = self.events
        if self._writer is None:
            self._records.clear()
        return taken

    @property
    def dropped(self) -> int:
        """Events that memory had no room for, or that were taken."""
        return 0 if self._writer is not None else self.seq + 1 - len(self._records)

    @property
    def lost(self) -> int:
        """Events that the buffer had no room for."""
        return self._lost + self._lost_now

    # -- ending ---------------------------------------------------------------------------------------------------------------
    def flush(self) -> None:
        """Write everything that was recorded before the call."""
        if self._writer is not None and not self._closed:
            self._writer.drain()
            self._writer.raise_failure()

    def close(self) -> None:
        """Flush, say that this is the end, and close. Idempotent; what is in memory stays readable."""
        self._close("closed")

    def _at_exit(self) -> None:
        self._close("exit")

    def _close(self, reason: str) -> None:
        writer = self._writer
        if writer is None or self._closed:
            return
        self._closed = True
        atexit.unregister(self._at_exit)
        self._tell_loss(None)
        self._put_fact(encode_fields({"event": END, "lost": self._lost, "reason": reason}))
        self._pressure = 0
        writer.close()
        writer.raise_failure()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _no_wall_time() -> None:
    """Time is virtual."""


def _header_fields(level: Level, config: Mapping[str, object]) -> dict[str, object]:
    return {
        "event": HEADER,
        "schema": SCHEMA_VERSION,
        "table": table_hash(),
        "level": level.name.lower(),
        "versions": {"cphicache": __version__, "python": platform.python_version(), **_versions()},
        "config": dict(config),
    }


def _versions() -> dict[str, str]:
    return {package: metadata.version(package) for package in _PACKAGES}


def _check_sizes(
    keep: int, buffer_events: int, flush_interval_s: float, max_file_bytes: int | None, keep_parts: int | None
) -> None:
    if keep < 1:
        raise ValueError(f"keep is {keep}: an event log in memory keeps at least one event")
    if buffer_events < 1:
        raise ValueError(f"buffer_events is {buffer_events}: give room for at least one event")
    if not flush_interval_s > 0:
        raise ValueError(f"flush_interval_s is {flush_interval_s}: give seconds, more than 0")
    if max_file_bytes is not None and max_file_bytes < 1:
        raise ValueError(f"max_file_bytes is {max_file_bytes}: give at least 1, or None for no rotation")
    if keep_parts is not None and keep_parts < 0:
        raise ValueError(f"keep_parts is {keep_parts}: give 0 or more, or None to keep all")
