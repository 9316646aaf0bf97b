"""Each call of the cache: what the log has of it, what goes on to the local half, and what is the caller's mistake (R35, R36)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest

from cphicache.engine import CacheMisuse, CpHiRadixCache
from cphicache.engine.counters import Counters
from cphicache.engine.oplog import KeyedNames
from cphicache.events import EventLog, Level
from cphicache.spaces.types import LogicalPage
from cphicache.tree import RadixKey
from tests.engine.rig import Rig, rig_config
from tests.engine.rig_extra import back_up, frozen
from tests.engine.small_scheduler import Loopback
from tests.engine_fakes import FakeTransfer


def one_cache(level: Level = Level.OPS, **options: Any) -> tuple[CpHiRadixCache, EventLog]:
    """An engine of one rank, with its log."""
    config = rig_config(cp_size=1, **options)
    log = EventLog(None, rank=0, level=level, wall_clock=None, header={})
    return CpHiRadixCache(config, FakeTransfer(config), Loopback(), log), log


def calls(log: EventLog) -> list[dict[str, Any]]:
    """What the log has of calls, without what every event has."""
    found = [event for event in log.events if event["event"] == "op"]
    return [{name: value for name, value in event.items() if name not in ("rank", "seq", "event", "tick")} for event in found]


LOGGED: dict[str, tuple[Callable[[CpHiRadixCache], object], dict[str, Any]]] = {
    "batch": (lambda cache: cache.batch(7), {"batch": 7}),
    "stores": (lambda cache: cache.stores("r", 7, 5), {"request": "r", "batch": 7, "start": 5}),
    "free": (lambda cache: cache.free([]), {"pages": []}),
    "quarantine": (lambda cache: cache.quarantine("over"), {"local": True, "reason": "over"}),
    "restore": (lambda cache: cache.restore(cache.snapshot()), {"local": True}),
    "evict": (lambda cache: cache.evict(3), {"tokens": 3}),
    "shutdown": (lambda cache: cache.shutdown(), {}),
    "reset_backups": (lambda cache: cache.reset_backups(), {}),
    "start_loads": (lambda cache: cache.start_loads(), {}),
    "alloc": (lambda cache: cache.alloc(0, None), {"count": 0, "after": None}),
    "end_request": (lambda cache: cache.end_request("x", [], "gone"), {"request": "x", "row": [], "reason": "gone"}),
}


@pytest.mark.parametrize("name", LOGGED)
def test_a_call_that_can_change_something_is_logged_with_its_arguments(name: str) -> None:
    """R36, R38: at level ``ops`` each such call is one event, with what is needed to make it again; at other levels it is none."""
    call, told = LOGGED[name]
    for level in Level:
        cache, log = one_cache(level)
        cache.admit("r", cache.state.tree.root, 0)
        before = len(calls(log))
        call(cache)
        assert calls(log)[before:] == ([{"call": name, **told}] if level >= Level.OPS else [])


def test_an_admission_names_its_priority_and_a_tick_that_it_was_idle() -> None:
    """R36: what is left at its default is not written down; what is not, is."""
    cache, log = one_cache()
    cache.admit("plain", cache.state.tree.root, 0)
    cache.admit("urgent", cache.state.tree.root, 0, priority=3)
    cache.begin_tick()
    cache.begin_tick(idle=True)
    assert calls(log) == [
        {"call": "admit", "request": "plain", "node": 0, "pages": 0},
        {"call": "admit", "request": "urgent", "node": 0, "pages": 0, "priority": 3},
        {"call": "begin_tick"},
        {"call": "begin_tick", "idle": True},
    ]


def test_a_key_is_told_by_names_alone() -> None:
    """R36: of a key the log has a name a page, its namespace by name, and that it is of bigrams; never a token or the namespace itself.
    Other secrets give other names, the same one the same."""
    names = {secret: KeyedNames(secret) for secret in (b"one", b"other")}
    key = RadixKey.of([1, 2, 3, 4], 2, "tenant")
    assert names[b"one"].pages(key) == KeyedNames(b"one").pages(key)
    assert names[b"one"].pages(key) != names[b"other"].pages(key)
    spaces = [names[secret].namespace(space) for secret in names for space in ("tenant", "other")]
    assert len({*spaces}) == 4
    cache, log = one_cache()
    cache.prepare("r", key)
    cache.prepare("s", RadixKey.of([1, 2, 3], 2, is_bigram=True))
    with_space, bigram = calls(log)
    assert len(with_space["keys"]) == 2
    assert with_space["namespace"] not in ("tenant", *with_space["keys"])
    assert "bigram" not in with_space
    assert (bigram["bigram"], "namespace" in bigram) == (True, False)


def test_what_a_forward_is_about_to_write_is_told_to_the_local_half() -> None:
    """R8: the local half hears which pages are overwritten next, as they are."""
    rig = Rig()
    pages = [LogicalPage(3), LogicalPage(1)]
    rig.each(lambda side: side.cache.before_store(pages))
    assert [side.transfer.called("before_store") for side in rig.sides] == [[((3, 1),)]] * 2


def test_a_request_is_admitted_once() -> None:
    """R35: admitting a running request is the caller's mistake: named, with the remedy, and nothing is changed."""
    rig = Rig()
    back_up(rig, "ab")
    assert rig.begin("runs", "ab")
    before = frozen(rig)
    with pytest.raises(CacheMisuse, match="request 'runs' is running already: end it before it is admitted again"):
        rig.cache.admit("runs", rig.node("ab"), 2)
    assert frozen(rig) == before
    rig.rest()


UNKNOWN: tuple[Callable[[CpHiRadixCache], object], ...] = (
    lambda cache: cache.stores("nobody", 1, 0),
    lambda cache: cache.reserve("nobody", 1, cache.key([1, 2]), []),
    lambda cache: cache.insert_unfinished("nobody", cache.key([1, 2]), [], chunked=False),
    lambda cache: cache.confirm_loads("nobody"),
    lambda cache: cache.finish("nobody", cache.key([1, 2]), []),
)


@pytest.mark.parametrize("call", UNKNOWN)
def test_what_is_not_running_can_neither_store_nor_end(call: Callable[[CpHiRadixCache], object]) -> None:
    """R35: a call for a request that was never admitted says so, with the remedy, and changes and logs nothing."""
    cache, log = one_cache()
    before = cache.canonical()
    with pytest.raises(CacheMisuse, match="request 'nobody' is not running: admit it first"):
        call(cache)
    assert cache.canonical() == before
    assert calls(log) == []


def test_a_new_engine_has_counted_nothing() -> None:
    """R37: all totals begin at nothing, those by reason empty, and no two engines share them."""
    totals = Counters()
    assert not any(getattr(totals, field.name) for field in fields(Counters))
    totals.refused["x"] += 1
    assert not Counters().refused


def test_a_chunk_starts_in_the_page_of_its_first_token() -> None:
    """R11: which tokens a forward stores is told in tokens and kept in pages: the page that holds the first one is written too."""
    cache, _ = one_cache()
    cache.admit("r", cache.state.tree.root, 0)
    for token, page in ((0, 0), (1, 0), (2, 1), (5, 2)):
        cache.stores("r", token, token)
        assert cache.batch(token).stores == {"r": page}


def test_digests_fit_where_they_are_sent() -> None:
    """R20: digests are sent as signed 64-bit integers; all of them have at most 56 bits, and use them."""
    cache, _ = one_cache()
    seen: list[int] = []
    for token in range(16):
        cache.admit(f"r{token}", cache.state.tree.root, 0)
        pages = cache.alloc(1, None)
        assert pages
        seen += cache.digest()
        cache.finish(f"r{token}", cache.key([token, token]), pages)
    assert 2**48 < max(seen) < 2**56


def test_an_empty_device_is_not_told_of() -> None:
    """R36: the log has the tokens in use, and those that could be evicted, when they change: not before anything is stored."""
    rig = Rig()
    rig.tick(2)
    assert rig.events("device") == []
    assert rig.begin("r1", "ab")
    rig.chunk("r1")
    rig.tick(2)
    assert [(event["in_use"], event["evictable"]) for event in rig.events("device")] == [(4, 0)]
    rig.rest()
