"""From a record of the hot path to a JSON line. Runs on the writer's thread, or on the reader's when events are kept in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import orjson
import structlog

from cphicache.events.types import STEP
from cphicache.lifecycle import Input, State, Trigger

Extra: TypeAlias = tuple[tuple[str, object], ...]
"""Further fields of a step: names and values that nobody can change any more (numbers, strings, tuples of them)."""

StepRecord: TypeAlias = tuple[
    float | None,  # wall time
    int,  # tick
    int,  # node
    int,  # generation
    Trigger,
    State,  # before
    State,  # after
    str | None,  # stale
    int | None,  # number
    bool,  # bound
    bool,  # agreed
    tuple[int, ...],  # submitted: a mask of layers by payload
    tuple[int, ...],  # confirmed
    tuple[int, ...],  # host slots by rank
    tuple[int, ...],  # wasted ones among them, which go with the operation
    Sequence[int],  # slots in use by rank
    int,  # change of device locks
    str | Input,  # reason; of layer_stored what came with it: reason, payload and layers
    Extra,
]
"""A lifecycle step as the scheduler thread leaves it: references to values that do not change any more, nothing computed. Everything but
``before`` tells how things are when the step has been taken. Masks of layers are by payload, in the order of
:meth:`~cphicache.events.log.EventLog.name_payloads`, host slots by rank. Not more than 19 values: CPython keeps the memory of shorter
tuples at hand."""

FactRecord: TypeAlias = tuple[float | None, bytes]
"""Another event, encoded when it was noted, so that what the caller does with its lists afterwards is not seen."""

LossRecord: TypeAlias = tuple[float | None, bytes, int]
"""Like a fact; the number of events in whose place it stands."""

Record: TypeAlias = StepRecord | FactRecord | LossRecord


def not_loggable(value: object) -> object:
    """Refuse what JSON does not know: structlog's own fallback would write the value's repr, and a tensor's repr is its contents."""
    raise TypeError(f"a {type(value).__name__} does not belong in an event: log a number, a name or a size")


def encode_fields(fields: Mapping[str, object]) -> bytes:
    """The fields as they are now. Raises TypeError for a value that does not belong in an event."""
    return orjson.dumps(fields, default=not_loggable)


class _RankLogger(structlog.BoundLoggerBase):
    """A structlog logger with one method, built with its own processors so that global configuration cannot reach it."""

    def line(self, fields: dict[str, Any]) -> bytes:
        args, _ = self._process_event("msg", None, fields)
        rendered: bytes = args[0]
        return rendered


class Renderer:
    """Numbers records and renders them. ``seq`` is that of the last one; ``payloads`` names the masks of step records, in order."""

    def __init__(self, rank: int, payloads: tuple[str, ...] = (), first_seq: int = 0) -> None:
        self.payloads = payloads
        self.seq = first_seq - 1
        processors = [structlog.processors.JSONRenderer(serializer=orjson.dumps, default=not_loggable)]
        self._logger = _RankLogger(None, processors, {"rank": rank})

    def render(self, record: Record) -> bytes:
        """The next line, without its line end."""
        if len(record) == 2:
            wall, encoded = record
            self.seq += 1
            fields = orjson.loads(encoded)
        elif len(record) == 3:
            wall, encoded, count = record
            self.seq += count
            fields = orjson.loads(encoded)
        else:
            wall = record[0]
            self.seq += 1
            fields = _step_fields(record, self.payloads)
        return self._line(wall, fields)

    def render_part_header(self, encoded: bytes, part: int, seq: int) -> bytes:
        """The first line of a later part: it is no event of its own, so it repeats the number of the one before it."""
        return self._logger.line({"seq": seq, **orjson.loads(encoded), "part": part})

    def _line(self, wall: float | None, fields: dict[str, Any]) -> bytes:
        if wall is not None:
            fields["wall"] = wall
        return self._logger.line({"seq": self.seq, **fields})


def _step_fields(record: StepRecord, names: tuple[str, ...]) -> dict[str, Any]:
    (
        _, tick, node, generation, trigger, before, after, stale, number, bound, agreed, submitted, confirmed, need, wasted,
        used, locks, cause, extra,
    ) = record  # fmt: skip
    reason = cause.reason if isinstance(cause, Input) else cause
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
        "submitted": {name: mask.bit_count() for name, mask in zip(names, submitted, strict=True)},
        "confirmed": {name: mask.bit_count() for name, mask in zip(names, confirmed, strict=True)},
        "slots": sum(need) + sum(wasted),
        "used": sum(used),
    }
    if locks:
        fields["locks"] = locks
    if stale is not None:
        fields["stale"] = stale
    if number is not None:
        fields["number"] = number
    if reason:
        fields["reason"] = reason
    if isinstance(cause, Input):
        fields["payload"], fields["layers"] = names[cause.payload], list(cause.layers)
    fields.update(extra)
    return fields
