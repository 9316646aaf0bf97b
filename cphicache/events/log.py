"""The writer of the event log. One object a rank; it configures nothing outside itself."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import orjson
import structlog

from cphicache import __version__
from cphicache.events.sinks import EventLogError, FileSink, MemorySink, Sink
from cphicache.events.types import HEADER, SCHEMA_VERSION, STEP, WRITTEN_HERE, Level
from cphicache.lifecycle import State, Trigger, table_hash

__all__ = ["EventLog", "EventLogError"]

_PACKAGES = ("torch", "transitions", "structlog", "orjson")


def _not_loggable(value: object) -> object:
    # structlog's own fallback would write the value's repr, and a tensor's repr is its contents
    raise TypeError(f"a {type(value).__name__} does not belong in an event: log a number, a name or a size")


class _RankLogger(structlog.BoundLoggerBase):
    """A structlog logger with one method, built with its own processors so that global configuration cannot reach it."""

    def emit(self, fields: dict[str, Any]) -> None:
        args, _ = self._process_event("msg", None, fields)
        self._logger.msg(*args)


class EventLog:
    """Events of one rank, as JSON lines in a file, or in memory when ``path`` is ``None``.

    ``wall_clock`` gives seconds; with ``None`` (virtual time) no event has a wall time, so that equal runs give equal files.
    ``header`` is what the caller wants to find in the first line: seed, configuration. In memory the newest ``keep`` events are
    kept. At level ``OFF`` no file is made. Raises :class:`EventLogError` when the file cannot be opened or written; ``TypeError``
    for a value that JSON does not know: tensors, and with them KV contents, cannot be logged.
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
    ) -> None:
        if keep < 1:
            raise ValueError(f"keep is {keep}: an event log in memory keeps at least one event")
        self.level = level
        self.seq = -1
        self._wall_clock = wall_clock
        self._memory = MemorySink(keep)
        self._sink: Sink = self._memory if path is None or level is Level.OFF else FileSink(path)
        render = structlog.processors.JSONRenderer(serializer=orjson.dumps, default=_not_loggable)
        self._logger = _RankLogger(self._sink, [render], {"rank": rank})
        if level is not Level.OFF:
            self._emit(
                {
                    "event": HEADER,
                    "schema": SCHEMA_VERSION,
                    "table": table_hash(),
                    "level": level.name.lower(),
                    "versions": {"cphicache": __version__, "python": platform.python_version(), **_versions()},
                    "config": dict(header),
                }
            )

    # -- writing --------------------------------------------------------------------------------------------------------------
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
        reason: str = "",
    ) -> None:
        """One lifecycle step. ``marks`` are (layers submitted, layers confirmed) by payload, in the order of ``payloads``;
        ``slots`` are this rank's host slots. Everything but ``before`` tells how the record is when the step has been taken."""
        if not self.level:
            return
        fields: dict[str, Any] = {
            "event": STEP,
            "tick": tick,
            "node": node,
            "generation": generation,
            "trigger": trigger,
            "before": before,
            "after": after,
            "bound": bound,
            "agreed": agreed,
            "submitted": {name: mark[0] for name, mark in zip(payloads, marks, strict=True)},
            "confirmed": {name: mark[1] for name, mark in zip(payloads, marks, strict=True)},
            "slots": slots,
        }
        if stale is not None:
            fields["stale"] = stale
        if number is not None:
            fields["number"] = number
        if reason:
            fields["reason"] = reason
        self._emit(fields)

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
        if event in (HEADER, STEP) or not WRITTEN_HERE.isdisjoint(fields):
            taken = sorted(WRITTEN_HERE.intersection(fields)) or [event]
            raise ValueError(f"event {event!r} may not set {', '.join(taken)}: the log writes that itself; choose another name")
        self._emit({"event": event, "tick": tick, **fields})

    def _emit(self, fields: dict[str, Any]) -> None:
        if self._wall_clock is not None:
            fields["wall"] = self._wall_clock()
        self._logger.emit({"seq": self.seq + 1, **fields})
        self.seq += 1  # only now: a refused event leaves no gap

    # -- reading back ---------------------------------------------------------------------------------------------------------
    @property
    def events(self) -> list[dict[str, Any]]:
        """What is kept in memory, decoded, oldest first and with the header if it is still there. Empty when a file is written."""
        return [orjson.loads(line) for line in self._memory.lines]

    @property
    def dropped(self) -> int:
        """Events that memory had no room for."""
        return self._memory.dropped

    # -- ending ---------------------------------------------------------------------------------------------------------------
    def flush(self) -> None:
        """Hand buffered lines to the system."""
        self._sink.flush()

    def close(self) -> None:
        """Flush and close. Idempotent; what is in memory stays readable."""
        self._sink.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _versions() -> dict[str, str]:
    return {package: metadata.version(package) for package in _PACKAGES}
