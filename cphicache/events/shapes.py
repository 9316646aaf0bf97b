"""Of which type each field of an event is: what a reader checks of a line, so that nothing behind it has to ask."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import itemgetter
from typing import Any, NamedTuple

from cphicache.events.types import (
    CACHE,
    COPY_STATUS,
    DEVICE,
    END,
    ENGINE,
    GROUP_LOST,
    HEADER,
    LOST,
    OP,
    QUARANTINE,
    STEP,
)

LAYERS_MOST = 1 << 16
"""Layers of a payload, at most: readers keep a bit for each."""
_FAR = 1e15
"""Seconds; no clock is as far from its zero."""
_SHOWN = 60
"""Characters of a wrong value that are shown."""
_KINDS_KEPT = 1000
"""Kinds of lines that are remembered; a run writes some fifty."""


class Shape(NamedTuple):
    """A type of values. ``name``: for people."""

    name: str
    fits: Callable[[Any], bool]


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_layers_by_payload(value: Any) -> bool:
    if type(value) is not dict:
        return False
    for item in value.values():  # noqa: SIM110 - each step is asked twice, and a generator takes longer than its one or two values
        if type(item) is not int or not 0 <= item <= LAYERS_MOST:
            return False
    return True


def _is_key(value: Any) -> bool:
    return type(value) is dict and "keys" in value and all(_KEY[name].fits(part) for name, part in value.items() if name in _KEY)


COUNT = Shape("a whole number from 0 on", _is_count)
PART = Shape("a whole number from 1 on", lambda value: type(value) is int and value > 0)
WHOLE = Shape("a whole number", lambda value: type(value) is int)
COUNT_OR_NULL = Shape("a whole number from 0 on, or null", lambda value: value is None or _is_count(value))
FLAG = Shape("true or false", lambda value: type(value) is bool)
TEXT = Shape("a string", lambda value: type(value) is str)
TEXTS = Shape("a list of strings", lambda value: type(value) is list and all(type(item) is str for item in value))
COUNTS = Shape("a list of whole numbers from 0 on", lambda value: type(value) is list and all(map(_is_count, value)))
WHOLES = Shape("a list of whole numbers", lambda value: type(value) is list and all(type(item) is int for item in value))
WHOLE_OR_NULL = Shape("a whole number, or null", lambda value: value is None or type(value) is int)
WHOLE_OR_WHOLES = Shape("a whole number, or a list of them", lambda value: type(value) is int or WHOLES.fits(value))
OBJECT = Shape("an object", lambda value: type(value) is dict)
SECONDS = Shape("a number of seconds", lambda value: type(value) in (int, float) and -_FAR < value < _FAR)
LAYERS = Shape(
    f"a list of layers below {LAYERS_MOST}",
    lambda value: type(value) is list and all(type(item) is int and 0 <= item < LAYERS_MOST for item in value),
)
LAYERS_BY_PAYLOAD = Shape(f"numbers of layers up to {LAYERS_MOST}, by payload", _is_layers_by_payload)
_KEY = {"keys": TEXTS, "namespace": TEXT, "bigram": FLAG}
KEY = Shape("a key by its page hashes", _is_key)

FIELD_SHAPES: Mapping[str, Shape] = {
    "rank": COUNT, "seq": COUNT, "tick": COUNT, "event": TEXT, "local": FLAG, "wall": SECONDS, "node": COUNT, "generation": COUNT,
    "number": COUNT, "request": TEXT, "reason": TEXT,
}  # fmt: skip
"""Shapes of :data:`~cphicache.events.types.FIELDS`, in whatever event."""

EVENT_SHAPES: Mapping[str, Mapping[str, Shape]] = {
    HEADER: {"schema": PART, "table": TEXT, "level": TEXT, "versions": OBJECT, "config": OBJECT, "part": PART},
    END: {"lost": COUNT, "reason": TEXT},
    LOST: {"first": COUNT, "lost": COUNT},
    CACHE: {"page_size": COUNT, "cp_size": COUNT, "payloads": LAYERS_BY_PAYLOAD, "host_slots": COUNT, "policy": TEXT},
    STEP: {
        "trigger": TEXT, "before": TEXT, "after": TEXT, "stale": TEXT, "bound": FLAG, "agreed": FLAG, "submitted": LAYERS_BY_PAYLOAD,
        "confirmed": LAYERS_BY_PAYLOAD, "slots": COUNT, "used": COUNT, "locks": WHOLE, "parent": COUNT, "payload": TEXT,
        "layers": LAYERS, "refused": TEXT, "head": COUNT, "head_slots": COUNT,
    },
    "refused": {
        "node": COUNT_OR_NULL, "needed": COUNTS, "free": COUNTS, "evictable": COUNTS, "pinned_tokens": COUNT, "in_flight": COUNT,
    },
    "local_reserve_failed": {},
    "stale_generation": {},
    "reduction": {"count": COUNT, "first_failed": COUNT_OR_NULL},
    DEVICE: {"in_use": COUNT, "evictable": COUNT},
    "device_evicted": {"tokens": COUNT, "dropped": COUNT},
    "write_back_wait": {"nodes": COUNTS},
    "load_back": {"load": COUNT, "tokens": COUNT, "nodes": COUNTS},
    "load_back_failed": {"tokens": COUNT},
    "load_back_refused": {"tokens": COUNT},
    "insert_declined": {"node": COUNT_OR_NULL, "load": COUNT_OR_NULL},
    "parked_dropped": {},
    "match": {"keys": TEXTS, "device": COUNT, "host": COUNT},
    "insert": {"keys": TEXTS, "pages": WHOLES, "chunked": FLAG},
    "pinned": {"nodes": COUNTS, "ticks": COUNT},
    QUARANTINE: {"pending": COUNT, "loads": COUNT},
    "group_broken": {},
    ENGINE: {"config": OBJECT},
    OP: {  # arguments as the caller gave them
        "call": TEXT, **_KEY, "full": KEY, "row": WHOLES, "pages": WHOLE_OR_WHOLES, "batch": WHOLE, "start": WHOLE, "payload": COUNT,
        "layer": COUNT, "chunked": FLAG, "count": WHOLE, "after": WHOLE_OR_NULL, "tokens": WHOLE, "device_node": COUNT,
        "nodes": COUNTS, "tail": WHOLE, "extend": WHOLE, "ticks": WHOLE, "drained": FLAG, "failed": FLAG,
    },
    COPY_STATUS: {"load": COUNT, "drained": FLAG, "failed": FLAG},
    GROUP_LOST: {"ranks": COUNTS, "excluded": FLAG},
}  # fmt: skip
"""Shapes of the fields of :data:`~cphicache.events.types.EVENTS`; where one is in :data:`FIELD_SHAPES` too, this one counts."""

_IN_ALL = ("rank", "seq", "event")
_WITHOUT_TICK = (HEADER, END, LOST)
_NEEDED: Mapping[str, tuple[str, ...]] = {
    HEADER: ("schema",),
    LOST: ("first", "lost"),
    CACHE: ("payloads", "cp_size"),
    STEP: ("node", "generation", "trigger", "before", "after", "bound", "agreed", "submitted", "confirmed", "slots"),
    "reduction": ("count", "first_failed"),
    "load_back": ("load", "number", "nodes"),
    OP: ("call",),
}
"""Fields without which an event says nothing, besides those that all have; any schema version that is read has them."""
_TOGETHER = (("layers", "payload"), ("head", "head_slots"))
"""Fields of a step of which the first means nothing without the second."""


_BY_TYPE = (TEXT, FLAG, COUNT)
"""Shapes of which the type says all, but for a number's sign."""


class _Rules(NamedTuple):
    """Of one kind of event."""

    needed: frozenset[str]
    shapes: Mapping[str, Shape]


def _rules_of(kind: str) -> _Rules:
    needed = frozenset((*_IN_ALL, *(() if kind in _WITHOUT_TICK else ("tick",)), *_NEEDED.get(kind, ())))
    return _Rules(needed, {**FIELD_SHAPES, **EVENT_SHAPES.get(kind, {})})


_RULES = {kind: _rules_of(kind) for kind in EVENT_SHAPES}
_UNKNOWN = _rules_of("")


class ShapeCheck:
    """Checks events. A log has few kinds of lines, as to the names and the types of their values: how one of each is checked is
    remembered, and what is left of it for the others are the signs of numbers and what lists and objects hold."""

    def __init__(self) -> None:
        self._seen: dict[tuple[object, ...], tuple[Callable[[Any], tuple[int, ...]], list[tuple[str, Callable[[Any], bool]]]]] = {}

    def wrong(self, event: dict[str, Any]) -> str | None:
        """What is wrong with the first field that is missing or not of its type; ``None``: all are as they should be.

        ``event`` has the string ``event``. Fields and events that are not known are news, not errors; what all events have is checked
        of these too.
        """
        signature = (event["event"], *event, *map(type, event.values()))
        seen = self._seen.get(signature)
        if seen is not None:
            counts, others = seen
            if min(counts(event)) >= 0:
                for name, fits in others:
                    if not fits(event[name]):
                        break
                else:
                    return None
        rules = _RULES.get(event["event"], _UNKNOWN)
        told = _told(event, rules)
        if told is None and len(self._seen) < _KINDS_KEPT:
            known = {name: rules.shapes[name] for name in event if name in rules.shapes}
            numbers = [name for name, shape in known.items() if shape is COUNT]  # two at least: the rank and seq
            others = [(name, shape.fits) for name, shape in known.items() if shape not in _BY_TYPE]
            self._seen[signature] = (itemgetter(*numbers), others)
        return told


def _told(event: dict[str, Any], rules: _Rules) -> str | None:
    kind: str = event["event"]
    missing = rules.needed - event.keys()
    if kind == STEP:
        missing |= {other for name, other in _TOGETHER if name in event and other not in event}
    if missing:
        name = min(missing)
        return f"{kind!r} has no field {name!r}; {rules.shapes[name].name} was expected"
    for name, value in event.items():
        shape = rules.shapes.get(name)
        if shape is not None and not shape.fits(value):
            text = repr(value)
            shown = text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
            return f"field {name!r} of {kind!r} is {shown} where {shape.name} was expected"
    return None
