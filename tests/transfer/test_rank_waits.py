"""Each wait of R34, kept (bytes are right) and removed alone (bytes are wrong), on the virtual clock.

Durations: one layer of one page is copied in about 100 us (``SLOW``) or 0.1 us (``FAST``); effects come at the end of an item.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import pytest

from cphicache.spaces.layout import CpSharedKVLayout
from cphicache.spaces.types import LogicalPage
from cphicache.transfer.jobs import CopyJob, PageUsers
from cphicache.transfer.port import CopyStatus, LoadItem, OpKey, Wait
from cphicache.transfer.streams.port import Streams
from cphicache.transfer.streams.virtual import VirtualStreams
from tests.streams.dropping import DroppingStreams
from tests.transfer.rigs import Rig, pages, same

SLOW, FAST = 1.0, 1000.0
LAYOUT = CpSharedKVLayout(4, 1, 0)


def rig_of(streams: Streams, d2h: float = SLOW, h2d: float = SLOW) -> Rig:
    return Rig.of(streams, LAYOUT, layers=1, draft_host_pages=None, d2h_bytes_per_us=d2h, h2d_bytes_per_us=h2d)


def drain(rig: Rig, status: Callable[[], CopyStatus]) -> None:
    """Ask as the scheduler does, once a step, until everything has ended."""
    for _ in range(10_000):
        if status().drained:
            return
        rig.streams.pause(1.0)
    pytest.fail("the copies have not drained in 10000 steps")


def backup_after_store(streams: Streams) -> bool:
    """The forward stores a page, slowly; its copy is submitted at once."""
    rig = rig_of(streams, d2h=FAST)
    stored = rig.store("target", 0, 1, seed=90, cost_us=500.0)
    rig.rank.reserve(OpKey(1, 0), pages(1))
    rig.submit_all(OpKey(1, 0))
    streams.close()
    return same(rig.host["target"].read(0, range(4)), stored)


def store_after_backup(streams: Streams) -> bool:
    """A page is written again while its copy is in flight."""
    rig = rig_of(streams)
    old = rig.device_page("target", 0, 1)
    rig.rank.reserve(OpKey(1, 0), pages(1, 2))
    rig.submit_all(OpKey(1, 0))
    rig.rank.before_store(pages(5, 1))
    rig.store("target", 0, 1, seed=90, cost_us=1.0)
    streams.close()
    return same(rig.host["target"].read(0, range(4)), old)


def store_after_shrunk_backup(streams: Streams) -> bool:
    """A page that was cut from an operation in flight is given to somebody else while its copy is in flight."""
    rig = rig_of(streams)
    old = rig.device_page("target", 0, 1)
    rig.rank.reserve(OpKey(1, 0), pages(1, 2))
    rig.submit_all(OpKey(1, 0))
    rig.rank.shrink(OpKey(1, 0), 1, free_now=False)
    rig.rank.before_store(pages(1))
    rig.store("target", 0, 1, seed=90, cost_us=1.0)
    streams.close()
    return same(rig.host["target"].read(0, range(4)), old)


def store_after_load(streams: Streams) -> bool:
    """A page is written by the forward while a load-back still writes it: the forward's bytes come last."""
    rig = rig_of(streams)
    rig.back_up(1, pages(1))
    rig.rank.queue_load(0, [LoadItem(1, pages(2))])
    rig.rank.start_loads()
    rig.rank.before_store(pages(2))
    stored = rig.store("target", 0, 2, seed=90, cost_us=1.0)
    streams.close()
    return same(rig.device_page("target", 0, 2), stored)


def load_after_backup(streams: Streams) -> bool:
    """A page is loaded onto while a backup still reads it."""
    rig = rig_of(streams, h2d=FAST)
    rig.back_up(1, pages(1))
    old = rig.device_page("target", 0, 2)
    rig.rank.reserve(OpKey(2, 0), pages(2))
    rig.submit_all(OpKey(2, 0))
    rig.rank.queue_load(0, [LoadItem(1, pages(2))])
    rig.rank.start_loads()
    streams.close()
    return same(rig.host["target"].read(0, range(4, 8)), old)


def read_after_load(streams: Streams) -> bool:
    """The forward reads a layer that is being loaded."""
    rig = rig_of(streams)
    rig.back_up(1, pages(1))
    loaded = rig.device_page("target", 0, 1)
    rig.rank.queue_load(0, [LoadItem(1, pages(2))])
    producer = rig.rank.start_loads()
    rig.rank.wait_layer(producer, "target", 0)
    read = {}
    streams.stream("compute").submit(lambda: read.update(rig.device_page("target", 0, 2)), cost_us=1.0)
    streams.close()
    return same(read, loaded)


def load_after_read(streams: Streams) -> bool:
    """A page is loaded onto while the forward still reads what it held before."""
    rig = rig_of(streams, h2d=FAST)
    rig.back_up(1, pages(1))
    old = rig.device_page("target", 0, 2)
    read = {}
    streams.stream("compute").submit(lambda: read.update(rig.device_page("target", 0, 2)), cost_us=500.0)
    rig.rank.queue_load(0, [LoadItem(1, pages(2))])
    rig.rank.start_loads()
    streams.close()
    return same(read, old)


def commit_after_drain(streams: Streams) -> bool:
    """A backup is committed and loaded from as soon as it says that it has drained."""
    rig = rig_of(streams, h2d=FAST)
    backed_up = rig.device_page("target", 0, 1)
    rig.rank.reserve(OpKey(1, 0), pages(1))
    rig.submit_all(OpKey(1, 0))
    drain(rig, lambda: rig.rank.status(OpKey(1, 0)))
    rig.rank.commit(OpKey(1, 0))
    rig.rank.queue_load(0, [LoadItem(1, pages(2))])
    rig.rank.start_loads()
    streams.close()
    return same(rig.device_page("target", 0, 2), backed_up)


def free_after_load(streams: Streams) -> bool:
    """Host slots are given on as soon as the load-back that reads them says that it has drained."""
    rig = rig_of(streams, d2h=FAST)
    rig.back_up(1, pages(1))
    backed_up = rig.device_page("target", 0, 1)
    rig.rank.queue_load(0, [LoadItem(1, pages(2))])
    rig.rank.start_loads()
    drain(rig, lambda: rig.rank.load_status(0))
    rig.rank.end_load(0)
    rig.rank.free_node(1)
    rig.rank.reserve(OpKey(3, 0), pages(3))
    rig.submit_all(OpKey(3, 0))
    streams.close()
    return same(rig.device_page("target", 0, 2), backed_up)


def release_after_drain(streams: Streams) -> bool:
    """A page is reused after its backup, rolled back, says that it has drained; nobody asks about the copy any more."""
    rig = rig_of(streams)
    old = rig.device_page("target", 0, 1)
    rig.rank.reserve(OpKey(1, 0), pages(1))
    rig.submit_all(OpKey(1, 0))
    drain(rig, lambda: rig.rank.status(OpKey(1, 0)))
    rig.rank.release(OpKey(1, 0))
    rig.rank.before_store(pages(1))
    rig.store("target", 0, 1, seed=90, cost_us=1.0)
    streams.close()
    return same(rig.host["target"].read(0, range(4)), old)


CASES = [
    (Wait.STORE_TO_COPY, backup_after_store),
    (Wait.COPY_TO_REUSE, store_after_backup),
    (Wait.COPY_TO_REUSE, store_after_shrunk_backup),
    (Wait.COPY_TO_REUSE, store_after_load),
    (Wait.COPY_TO_REUSE, load_after_backup),
    (Wait.LOAD_TO_READ, read_after_load),
    (Wait.READ_TO_LOAD, load_after_read),
    (Wait.DRAIN_TO_FREE, commit_after_drain),
    (Wait.DRAIN_TO_FREE, free_after_load),
    (Wait.DRAIN_TO_FREE, release_after_drain),
]


@pytest.mark.parametrize(("why", "story"), CASES)
def test_bytes_are_right_with_every_wait(why: Wait, story: Callable[[Streams], bool]) -> None:
    """R34: the green twin: with all waits the bytes are right."""
    assert story(VirtualStreams()), why


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(("why", "story"), CASES)
def test_bytes_are_right_in_every_order_that_the_waits_allow(why: Wait, story: Callable[[Streams], bool], seed: int) -> None:
    """R34: effects at the start or the end of an item and long tails of durations change no byte."""
    assert story(VirtualStreams(seed=seed, jitter=1.0)), why


@pytest.mark.parametrize(("why", "story"), CASES)
def test_bytes_are_wrong_without_the_wait(why: Wait, story: Callable[[Streams], bool]) -> None:
    """R34: with this one wait removed, and all others kept, the bytes are wrong."""
    streams = DroppingStreams(VirtualStreams(), why)
    assert not story(streams)
    assert streams.dropped > 0


def test_a_copy_that_ends_after_its_operation_is_counted_as_stale() -> None:
    """R18: a completion for an operation that is gone changes nothing but a counter."""
    streams = DroppingStreams(VirtualStreams(), Wait.DRAIN_TO_FREE)
    rig = rig_of(streams)
    rig.rank.reserve(OpKey(1, 0), pages(1))
    rig.submit_all(OpKey(1, 0))
    rig.rank.release(OpKey(1, 0))
    assert rig.rank.counters.stale_completions == 0
    streams.close()
    assert rig.rank.counters.stale_completions == 1
    assert rig.rank.free_slots() == {"target": 40}


def test_a_store_waits_for_each_copy_in_flight_once_and_for_no_ended_one() -> None:
    """R34: one wait for each event that a page's copies in flight have; none for pages that were cut off and freed, for operations
    and load-backs that have ended, or for pages of others."""
    streams = DroppingStreams(VirtualStreams(), Wait.COPY_TO_REUSE)
    rig = rig_of(streams)

    def waits(*numbers: int) -> int:
        before = streams.dropped
        rig.rank.before_store(pages(*numbers))
        return streams.dropped - before

    first, second, cut = OpKey(1, 0), OpKey(2, 0), OpKey(3, 0)
    rig.rank.reserve(first, pages(1, 2))
    rig.rank.reserve(second, pages(2, 3))
    rig.rank.reserve(cut, pages(4, 5))
    assert waits(1, 2, 3, 4, 5) == 0
    rig.submit_all(first)
    rig.submit_all(second)
    rig.rank.shrink(cut, 1, free_now=True)
    rig.submit_all(cut)
    assert [waits(1), waits(1, 2), waits(3, 2, 1), waits(4), waits(4, 5), waits(6)] == [1, 2, 2, 0, 1, 0]
    rig.rank.wait_backup(cut)
    rig.rank.release(first)
    rig.rank.commit(second)
    assert [waits(1, 2, 3), waits(5)] == [0, 1]
    rig.rank.queue_load(0, [LoadItem(2, pages(6, 7))])
    rig.rank.start_loads()
    assert waits(6, 7) == 1
    rig.rank.wait_load(0)
    rig.rank.end_load(0)
    assert waits(6, 7) == 0


def test_a_finished_producer_is_waited_for_no_more() -> None:
    """R25: a batch waits for a producer's layer while one of its load-backs is in flight, and for nothing after the last has ended."""
    streams = DroppingStreams(VirtualStreams(), Wait.LOAD_TO_READ)
    rig = rig_of(streams)
    rig.back_up(1, pages(1))
    for load, page in ((0, 5), (1, 6)):
        rig.rank.queue_load(load, [LoadItem(1, pages(page))])
    producer = rig.rank.start_loads()
    for load in (0, 1):
        rig.rank.wait_layer(producer, "target", 0)
        assert streams.dropped == load + 1
        rig.rank.wait_load(load)
        rig.rank.end_load(load)
    rig.rank.wait_layer(producer, "target", 0)
    assert streams.dropped == 2


def test_whoever_else_touches_a_page_is_still_found() -> None:
    """R9: of several jobs on one page each may end first; the others are waited for all the same."""
    first, second, third = (
        cast(CopyJob, SimpleNamespace(owned_pages=[LogicalPage(4), LogicalPage(page)], last_event=f"event {page}"))
        for page in (5, 6, 7)
    )
    users = PageUsers()
    for job in (first, second, third):
        users.add(job)
    assert users.events([LogicalPage(4)]) == ["event 5", "event 6", "event 7"]
    users.remove(second, second.owned_pages)
    assert users.events([LogicalPage(4), LogicalPage(6)]) == ["event 5", "event 7"]
    users.remove(first, first.owned_pages)
    assert users.events([LogicalPage(4), LogicalPage(5)]) == ["event 7"]
    users.remove(third, third.owned_pages)
    assert users.events([LogicalPage(4)]) == []
