"""What an event is: levels, the schema's version, the fields of every event, and which parts differ between ranks that agree."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Any

from cphicache.lifecycle import Trigger

SCHEMA_VERSION = 2
"""Raised when a field changes its meaning or goes away; new fields do not raise it.

2: ``slots`` counts all ranks' host slots (1: said to be this rank's); logs that end properly have an ``end``.
"""

HEADER = "header"
"""Name of the first event of a log, and of the first line of each of its later parts."""
END = "end"
"""Name of the last event of a log whose writer came to its end."""
LOST = "lost"
"""Name of the event that stands for those that the buffer had no room for."""
STEP = "step"
"""Name of the event of one lifecycle step."""
CACHE = "cache"
"""Name of the event with the sizes of the cache that is about to be served."""
DEVICE = "device"
"""Name of the event of the device pool's occupancy: an observation, which nothing follows from."""
QUARANTINE = "quarantine"
"""Name of the event with which a rank gives the host tier up: from there on it agrees with no other rank."""

ENGINE = "engine"
"""Name of the event with the engine's configuration (level ``ops``)."""
OP = "op"
"""Name of the event of one call that may change the cache's state, written before anything that follows from it (level ``ops``)."""
COPY_STATUS = "copy_status"
"""Name of the event of what the local half answered when it was asked for an operation that has ended or failed (level ``ops``)."""
GROUP_LOST = "group_lost"
"""Name of the event of a reduction that ended with the loss of a rank (level ``ops``)."""


class Level(IntEnum):
    """How much is recorded. Each level includes the ones below it."""

    OFF = 0
    """Nothing, not even a header."""
    LIFECYCLE = 1
    """Every lifecycle step, and what explains it: refusals, evictions, deferrals, loads, reductions."""
    OPS = 2
    """Also what the cache was asked: every call that can change its state, keys as chained keyed page hashes, and what it was answered."""


FIELDS: Mapping[str, str] = {
    "rank": "which CP rank wrote the event",
    "seq": "position in this rank's log: 0 is the header, then one more an event; only a `lost` event leaves a gap before it",
    "tick": "scheduler step (the header and the end have none)",
    "event": "`header`, `step`, or the name of another fact",
    "local": "present and true: this rank's own business, other ranks may not have it",
    "wall": "wall time in seconds; absent when time is virtual; replay ignores it",
    "node": "id of the radix node (or of the extent that is to become one)",
    "generation": "which backup of that node",
    "number": "place in the sequence that all ranks agree on; absent before it has one",
    "request": "the request that it is about",
    "reason": "why, in a few words; absent when there is nothing to say",
}
"""Fields that have one meaning wherever they occur."""

EVENTS: Mapping[str, Mapping[str, str]] = {
    HEADER: {
        "schema": "schema version",
        "table": "hash of the transition table that the run used",
        "level": "`lifecycle` or `ops`",
        "versions": "versions of cphicache, python and the packages that matter",
        "config": "seed and configuration, as the caller gave them",
        "part": "which part of a rotated log this file is, from 1; absent in the first. A later part repeats the last `seq`",
    },
    END: {
        "lost": "events that are missing from this log",
        "reason": "`closed`, or `exit`: the process ended before the log was closed",
    },
    LOST: {
        "first": "`seq` of the first event that is missing; that of the last is the event's own `seq`",
        "lost": "how many are missing",
    },
    CACHE: {
        "page_size": "tokens of a page",
        "cp_size": "ranks",
        "payloads": "layers by payload",
        "host_slots": "token slots of one rank's host pool, in each payload",
        "policy": "write policy",
    },
    STEP: {
        "trigger": "what happened (transition table)",
        "before": "state before the step",
        "after": "state after it",
        "stale": "name of the no-op, when the table answers the trigger so; `after` equals `before`",
        "bound": "the backup belongs to a node in the tree",
        "agreed": "every rank has passed its number",
        "submitted": "layers whose copies have been submitted, by payload",
        "confirmed": "layers whose copies are known to be done on this rank, by payload; never more than submitted",
        "slots": "host slots that the backup holds, all ranks together, in each payload",
        "used": "host slots in use after the step, all ranks together, in each payload, as the ledger has them",
        "locks": "change of the node's device locks by this step; absent when there is none",
        "parent": "id of the node that it hangs on, 0 for the root (reserve, bind, agreed, parent_committed, split)",
        "payload": "layer_stored: whose layers",
        "layers": "layer_stored: which layers have been reported",
        "refused": "reserve, reserve_retry: why no slots were given",
        "head": "split: id of the node that got the first pages",
        "head_slots": "split: `slots` of that node",
    },
    "refused": {
        "needed": "host slots by rank (absent when no reservation was tried)",
        "free": "free host slots by rank",
        "evictable": "host slots by rank that only the host copies of host-only nodes hold",
        "pinned_tokens": "tokens of host copies that load-backs read",
        "in_flight": "backups that are pending",
    },
    "local_reserve_failed": {},
    "stale_generation": {},
    "reduction": {
        "count": "numbers below this one have been passed by every rank, up to a failed one",
        "first_failed": "first number that failed on some rank, or null",
    },
    DEVICE: {
        "in_use": "device tokens that cannot be handed out, all ranks together: of the tree, of requests, in flight",
        "evictable": "those of them that unlocked nodes hold",
    },
    "device_evicted": {"tokens": "device tokens freed", "dropped": "those of them without a host copy"},
    "write_back_wait": {"nodes": "whose backups the eviction waits for"},
    "load_back": {"load": "id of the load-back", "tokens": "tokens that it brings", "nodes": "the chain, parents first"},
    "load_back_failed": {"tokens": "tokens that it would have brought"},
    "load_back_refused": {"tokens": "tokens that it would have brought"},
    "insert_declined": {"load": "id of the load-back that the insert passes, or null"},
    "parked_dropped": {},
    "match": {
        "keys": "page hashes of what was asked for",
        "device": "pages found on the device",
        "host": "tokens that a load-back may bring",
    },
    "insert": {
        "keys": "page hashes of what is inserted",
        "pages": "the request's logical pages",
        "chunked": "more chunks of the prompt follow",
    },
    "pinned": {"nodes": "the chain whose host copies stay, parents first", "ticks": "for how long"},
    QUARANTINE: {"pending": "backups that roll back", "loads": "load-backs that are given up"},
    "group_broken": {},
    ENGINE: {"config": "the engine's whole configuration"},
    OP: {
        "call": "the method of the cache; the other fields are its arguments",
        "keys": "page hashes of the key (prepare, pin_host, reserve, insert_unfinished, finish)",
        "namespace": "hash of the key's namespace; absent without one",
        "bigram": "present and true for a bigram key",
        "full": "prepare: the longer key, as an object of these three",
        "row": "the request's logical pages (reserve, insert_unfinished, finish, end_request)",
        "pages": "free: logical pages; admit: how many pages of the row the prefix has",
        "batch": "id of the batch",
        "start": "stores: first token",
        "payload": "index of the payload (layer_stored, end_payload)",
        "layer": "layer_stored: which",
        "chunked": "insert_unfinished: more chunks follow",
        "count": "alloc: how many pages",
        "after": "alloc: the page that they follow, or null",
        "tokens": "evict: how many; load_back: how many the match promised",
        "device_node": "load_back: the node in which the device prefix ends",
        "nodes": "load_back: the chain to be loaded, parents first",
        "tail": "load_back: matched pages of the last of them",
        "extend": "load_back: tokens beyond the device prefix",
        "ticks": "pin_host: for how long",
        "drained": "completion: see `copy_status`",
        "failed": "completion: see `copy_status`",
    },
    COPY_STATUS: {
        "load": "id of the load-back; absent for a backup, which has `node` and `generation`",
        "drained": "none of its copies is queued or running on this rank",
        "failed": "a copy of it failed on this rank",
    },
    GROUP_LOST: {"ranks": "which have gone", "excluded": "the others went on without this rank"},
}
"""Fields of each event besides :data:`FIELDS`. A reader takes events and fields that it does not know for news, not for errors."""

OPS_EVENTS = frozenset({"match", "insert", ENGINE, OP, COPY_STATUS, GROUP_LOST})
"""Events that logs of level ``ops`` only have."""

LOCAL_FIELDS = frozenset({"rank", "seq", "wall", "confirmed", "local"})
"""Fields whose values may differ between ranks that agree about everything."""

LOCAL_FIELDS_BEFORE_2 = LOCAL_FIELDS | {"slots"}
"""The same in logs of schema version 1."""

LOCAL_TRIGGERS = frozenset({Trigger.COPY_DONE, Trigger.COPY_FAILED})
"""Steps that only one rank takes, or takes at another tick than the others: its own copies' ends."""

LOCAL_EVENTS = frozenset({HEADER, END, LOST})
"""Events about a log, not about the cache."""

WRITTEN_HERE = frozenset({"rank", "seq", "wall"})
"""Fields that the log itself sets; a caller that passes one is mistaken."""


def logical_view(event: Mapping[str, Any], schema: int = SCHEMA_VERSION) -> dict[str, Any] | None:
    """What of an event must be equal on every rank, or ``None`` for what concerns one rank, or its log, only.

    Ranks that agree give equal sequences of logical views: compare them pairwise, in order. ``schema``: version of the log.
    """
    if (
        event["event"] in LOCAL_EVENTS
        or event.get("local", False)
        or (event["event"] == STEP and event["trigger"] in LOCAL_TRIGGERS)
    ):
        return None
    local = LOCAL_FIELDS if schema >= 2 else LOCAL_FIELDS_BEFORE_2
    return {name: value for name, value in event.items() if name not in local}
