"""What an engine writes into its log: whole stories event by event (``logs/``), and that it decides alike whatever it logs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from cphicache.engine.cache import HASH_SECRET
from cphicache.engine.oplog import KeyedNames
from cphicache.events import Level
from cphicache.transfer.port import CopyStatus
from tests.engine.rig import Rig

LOGS = Path(__file__).parent / "logs"


def serve_and_load_back(level: Level) -> Rig:
    """Two chunks on top of a prefix, eviction to the host, a load-back into an aborted request, a pin, and the end."""
    rig = Rig(level=level, usable_pages=16, host_slots=16, max_retries=1)
    rig.serve("a", "ab")
    rig.settle()
    assert rig.begin("b", "abcd")
    rig.chunk("b", 6)
    rig.each(lambda side: side.cache.stores("b", rig.batch, 4))
    rig.forward()
    rig.insert("b", chunked=True)
    rig.chunk("b")
    rig.each(lambda side: side.cache.before_store(side.rows["b"][3:]))
    rig.forward()
    rig.finish("b")
    rig.settle()
    rig.evict(4)
    assert rig.begin("c", "abce")
    rig.chunk("c")
    rig.start_loads()
    rig.each(lambda side: side.cache.wait_layer(rig.batch, "target", 0))
    rig.forward()
    rig.each(lambda side: side.cache.free(side.cache.alloc(1, None) or []))
    rig.together(lambda side: side.cache.confirm_loads("c"))
    rig.abort("c")
    rig.settle()
    rig.each(lambda side: side.cache.pin_host(rig.key("ab"), 2))
    rig.each(lambda side: side.cache.touch(rig.node("ab")))
    rig.together(lambda side: side.cache.agree_now())
    rig.each(lambda side: side.cache.begin_tick(idle=True))
    rig.each(lambda side: side.cache.restore(side.cache.snapshot()))
    rig.together(lambda side: side.cache.reset_backups())
    rig.together(lambda side: side.cache.shutdown())
    rig.together(lambda side: side.cache.flush())
    rig.each(lambda side: side.cache.quarantine("the story is over"))
    return rig


def run_short_of_host_slots(level: Level) -> Rig:
    """A copy that fails on one rank, a refusal and its retry, host slots taken from another, a rank that lacks slots that all count."""
    rig = Rig(level=level, usable_pages=16, host_slots=4, max_retries=1)
    rig.hold()
    assert rig.begin("fails", "ab")
    rig.chunk("fails")
    key = rig.op("fails").key
    rig.forward()
    assert rig.begin("waits", "xyzw")
    rig.chunk("waits")
    rig.forward()
    rig.finish("fails")
    rig.finish("waits")
    rig.fail_copies(key, 0)
    rig.finish_all()
    rig.each(lambda side: side.cache.completion(key, CopyStatus(True, side.rank == 0)))
    rig.each(lambda side: side.cache.completion(key._replace(generation=9), CopyStatus(True, False)))
    rig.hold(False)
    rig.tick(3)
    rig.finish_all()
    rig.settle()
    rig.evict(8)
    rig.local(1).fail_reserve_next = True
    rig.serve("void", "qr")
    rig.settle()
    rig.tick()
    return rig


def wait_for_a_split(level: Level) -> Rig:
    """An insert and a match that would divide a node with a pending backup: declined, deferred, parked, dropped."""
    rig = Rig(level=level, max_deferral_ticks=2)
    rig.hold()
    assert rig.begin("first", "abcd")
    rig.chunk("first")
    assert rig.begin("second", "abxy")
    rig.chunk("second")
    rig.forward()
    rig.finish("first")
    assert rig.insert("second") is None
    assert not rig.begin("third", "abz")
    rig.finish("second")
    rig.tick(2)
    assert rig.begin("third", "abz")
    rig.chunk("third")
    rig.abort("third")
    rig.finish_all()
    rig.settle()
    assert rig.begin("fourth", "abz")
    rig.abort("fourth", "retracted")
    return rig


STORIES: Mapping[str, Callable[[Level], Rig]] = {
    story.__name__: story for story in (serve_and_load_back, run_short_of_host_slots, wait_for_a_split)
}


def lines(rig: Rig) -> list[str]:
    """The first rank's log without its header, page names shown as the letters of the prompt."""
    key = rig.key
    texts = ("abcd", "abce", "abxy", "abz", "xyzw", "qr")
    letters = {name: text[: at + 1] for text in texts for at, name in enumerate(KeyedNames(HASH_SECRET).pages(key(text)))}

    def shown(value: Any) -> str:
        return ",".join(letters.get(item, str(item)) for item in value) or "-" if isinstance(value, list) else str(value)

    told = []
    for event in rig.sides[0].log.events[1:]:
        fields = " ".join(f"{name}={shown(value)}" for name, value in event.items() if name not in ("rank", "seq", "event", "tick"))
        told.append(f"{event['tick']} {event['event']} {fields}")
    return told


@pytest.mark.parametrize("name", STORIES)
def test_a_log_tells_the_whole_story(name: str, request: pytest.FixtureRequest) -> None:
    """R36, R38: every call, step, refusal, copy and reduction is logged with its fields, and nothing else. ``--rewrite-golden`` writes
    what is logged now: read the difference."""
    path = LOGS / f"{name}.txt"
    told = lines(STORIES[name](Level.OPS))
    if request.config.getoption("--rewrite-golden"):
        path.write_text("\n".join(told) + "\n", encoding="utf-8")
    else:
        assert told == path.read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("name", STORIES)
def test_what_is_logged_decides_nothing(name: str) -> None:
    """R36: with less in the log, or no log at all, the engine ends in the same state with the same counters; a level leaves out the
    events above it and changes none."""
    rigs = {level: STORIES[name](level) for level in Level}
    whole = rigs[Level.OPS]
    for rig in rigs.values():
        assert rig.cache.digest() == whole.cache.digest()
        assert rig.cache.counters == whole.cache.counters
    assert rigs[Level.OFF].sides[0].log.events == []
    below = [
        line for line in lines(whole) if line.split()[1] not in ("op", "engine", "match", "insert", "copy_status", "group_lost")
    ]
    assert lines(rigs[Level.LIFECYCLE]) == below


COUNTED: Mapping[str, dict[str, Any]] = {
    "serve_and_load_back": {
        "reserved": 4, "committed": 3, "rolled_back": {"abort": 1}, "stale": {"not_agreed_yet": 1},
        "tokens_submitted": 10, "tokens_committed": 8, "tokens_wasted": 2, "ticks_to_visible": {2: 3},
        "device_evictions": 4, "device_evicted_tokens": 10, "device_dropped_tokens": 6, "load_backs": 1, "load_back_tokens": 2,
        "reductions": 2, "ticks_in_flight": 2, "drain_reductions": 1,
    },
    "run_short_of_host_slots": {
        "reserved": 3, "committed": 1, "rolled_back": {"agreed_failed": 2}, "refused": {"no_host_slots": 2}, "retries": 1,
        "stale": {"stale_generation": 1}, "tokens_submitted": 16, "tokens_committed": 8, "tokens_wasted": 8, "ticks_to_visible": {2: 1},
        "eviction_retries_succeeded": 1, "host_evictions": 1, "host_evicted_tokens": 8,
        "device_evictions": 2, "device_evicted_tokens": 12, "device_dropped_tokens": 4, "reductions": 3, "ticks_in_flight": 3,
    },
    "wait_for_a_split": {
        "reserved": 3, "committed": 1, "rolled_back": {"abort": 2}, "tokens_submitted": 16, "tokens_committed": 8, "tokens_wasted": 8,
        "ticks_to_visible": {4: 1}, "deferred_splits": 1, "deferrals_expired": 1, "declined_inserts": 2, "parked_inserts": 1,
        "parked_dropped": 1, "reductions": 3, "ticks_in_flight": 3,
    },
}  # fmt: skip
"""What the engine has counted at the end of each story: tokens of what the story stores (2 a page), rolls back, evicts and loads."""


@pytest.mark.parametrize("name", STORIES)
def test_what_a_story_counts(name: str) -> None:
    """R37: each thing that happens in a story is counted once under its name, tokens as logical ones, and nothing else is."""
    counters = STORIES[name](Level.OFF).cache.counters
    counted = {field.name: getattr(counters, field.name) for field in fields(counters)}
    assert {name: count for name, count in counted.items() if count} == COUNTED[name]
