"""Who is named when a reduction does not come, and how survivors part from the group together. No process, no waiting: time is told."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from threading import Event, Lock

import pytest

from cphicache.agree.membership import SILENT_S, Membership, Watch, mark_gone, read, read_beat
from cphicache.agree.port import Excluded, GroupBroken

LIMIT_S = 5.0


class DictStore:
    """A store in memory; ``silent`` ranks' heartbeats are not written any more."""

    def __init__(self) -> None:
        self.silent: set[int] = set()
        self._lock = Lock()
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: str) -> None:
        with self._lock:
            if key not in {f"beat/{rank}" for rank in self.silent}:
                self._values[key] = value.encode()

    def get(self, key: str) -> bytes:
        with self._lock:
            return self._values[key]

    def check(self, keys: list[str]) -> bool:
        with self._lock:
            return all(key in self._values for key in keys)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        with self._lock:
            assert expected == ""
            return self._values.setdefault(key, desired.encode())


class Group:
    """Three ranks whose heartbeats are written by hand."""

    def __init__(self) -> None:
        self.store = DictStore()
        self.store.silent = {0, 1, 2}
        self.stops = [Event() for _ in range(3)]
        self.members = [Membership(lambda: self.store, rank, 3, LIMIT_S, self.stops[rank]) for rank in range(3)]
        self._count = 0

    def beat(self, rank: int, issued: int, tick: int = 7) -> None:
        self._count += 1
        self.store.silent.discard(rank)
        self.store.set(f"beat/{rank}", json.dumps([self._count, issued, tick, 0]))
        self.store.silent.add(rank)

    def close(self) -> None:
        for member in self.members:
            member.close()


@pytest.fixture
def group() -> Iterator[Group]:
    made = Group()
    for rank in range(3):
        made.beat(rank, 4)
    yield made
    made.close()


def watch_after(waited_s: float) -> Watch:
    watch = Watch()
    watch.waited_s = waited_s
    return watch


def test_nobody_is_blamed_within_the_limit(group: Group) -> None:
    """R22: until the time limit is over a rank that is late is only late."""
    watch = watch_after(LIMIT_S - 0.1)
    group.members[0].find_out(4, watch)
    assert read(group.store, "verdict") is None


def test_a_rank_that_lives_and_does_not_come_is_named(group: Group) -> None:
    """R22: past the limit the rank that has not contributed is named, with the reduction, the wait and how far it has got."""
    watch = watch_after(0.0)
    group.beat(0, 5)
    group.members[2].find_out(4, watch)
    watch.waited_s = LIMIT_S
    group.beat(0, 5, tick=9)
    group.beat(1, 4, tick=9)
    with pytest.raises(
        GroupBroken, match=r"rank 1 does not answer reduction 4 \(waited 5.0 s of at most 5 s\): it is alive, at tick 9"
    ) as caught:
        group.members[2].find_out(4, watch)
    assert caught.value.ranks == (1,)


def test_a_rank_without_a_heartbeat_is_named_as_such(group: Group) -> None:
    """R22: a stopped process shows no sign of life, and the text says since when; the one that goes on is not blamed."""
    watch = watch_after(0.0)
    group.members[2].find_out(4, watch)
    watch.waited_s = 1.0
    group.beat(0, 5)
    group.members[2].find_out(4, watch)
    watch.waited_s = LIMIT_S
    group.beat(0, 5)
    with pytest.raises(
        GroupBroken, match=r"rank 1 .*: no sign of life for 5.0 s, last seen at tick 7, after 4 reductions"
    ) as caught:
        group.members[2].find_out(4, watch)
    assert caught.value.ranks == (1,)


def test_a_rank_that_has_never_been_seen_is_named_as_such() -> None:
    """R22: a rank that was stopped before its first heartbeat has no last seen tick, and the text does not make one up."""
    store = DictStore()
    member = Membership(lambda: store, 0, 2, LIMIT_S, Event())
    with pytest.raises(GroupBroken, match=r"rank 1 does not answer reduction 0 .*: it has never given a sign of life$") as caught:
        member.find_out(0, watch_after(LIMIT_S))
    assert caught.value.ranks == (1,)
    member.close()


def test_a_silent_rank_is_given_up_early_when_the_reduction_has_failed() -> None:
    """R22: with a long limit and nobody who sees processes end, a rank that is silent is named soon after its connection has broken, and
    one that lives is not."""
    store = DictStore()
    store.set("beat/1", json.dumps([1, 4, 7, 0]))
    member = Membership(lambda: store, 0, 3, 300.0, Event())
    watch = watch_after(0.0)
    for waited_s in (0.0, SILENT_S, SILENT_S + 1.0):
        watch.waited_s = waited_s
        store.set("beat/2", json.dumps([int(waited_s) + 1, 4, 7, 0]))
        if waited_s <= SILENT_S:
            member.find_out(4, watch, failed=True)
    member.find_out(4, watch)
    with pytest.raises(
        GroupBroken, match=r"rank 1 .*of at most 300 s\): no sign of life for 11.0 s, last seen at tick 7"
    ) as caught:
        member.find_out(4, watch, failed=True)
    assert caught.value.ranks == (1,)
    member.close()


def test_the_launchers_word_comes_before_the_limit(group: Group) -> None:
    """R22: a rank whose end the launcher has seen is named at once, with what it died of; the first reason stays."""
    mark_gone(group.store, 1, "was killed by SIGKILL")
    mark_gone(group.store, 1, "ended with status 1")
    with pytest.raises(GroupBroken, match=r"rank 1 does not answer reduction 4 \(waited 0.0 s .*it was killed by SIGKILL$"):
        group.members[0].find_out(4, Watch())


def test_all_survivors_give_one_verdict(group: Group) -> None:
    """R22: the first verdict is everybody's, whatever others have seen since; the rank that it names hears that it is excluded."""
    mark_gone(group.store, 1, "was killed by SIGKILL")
    with pytest.raises(GroupBroken) as first:
        group.members[0].find_out(4, Watch())
    mark_gone(group.store, 0, "ended with status 1")
    with pytest.raises(GroupBroken) as second:
        group.members[2].find_out(4, Watch())
    assert str(first.value) == str(second.value)
    assert second.value.ranks == (1,)
    with pytest.raises(Excluded, match="rank 1 was excluded from the group: rank 1 does not answer reduction 4"):
        group.members[1].find_out(4, Watch())


def test_time_in_which_a_process_was_stopped_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """R22: a rank that was stopped for an hour while it waited has not waited for an hour, and blames nobody for it."""
    now = [100.0]
    monkeypatch.setattr("cphicache.agree.membership.time.monotonic", lambda: now[0])
    watch = Watch()
    now[0] += 3600.0
    watch.pass_slice()
    assert watch.waited_s < 1.0


def test_survivors_part_at_the_same_reduction(group: Group) -> None:
    """R22: a reduction that came through on one survivor only is handed to the other, so that both give up one later, together."""
    group.store.set("last/2", json.dumps([5, [9, 3]]))
    settled = group.members[0].settle(4, (8, 3), (1,))
    assert settled == (5, (9, 3))
    assert group.members[2].settle(5, (9, 3), (1,)) == settled


def test_who_comes_after_the_others_have_parted_is_out(group: Group) -> None:
    """R22: a survivor that is ahead of what the others have settled on would decide otherwise than they do: it stops."""
    group.members[0].settle(4, (8, 3), (1, 2))
    with pytest.raises(Excluded, match="given the group up at reduction 4, it was at 5"):
        group.members[2].settle(5, (9, 3), (1,))


def test_an_interrupt_ends_a_wait(group: Group) -> None:
    """R22: a rank that is told to stop does so from inside a wait, and writes no verdict on others."""
    group.stops[0].set()
    with pytest.raises(GroupBroken, match=r"^interrupted$"):
        group.members[0].find_out(4, watch_after(LIMIT_S))
    assert read(group.store, "verdict") is None


class GoneStore(DictStore):
    """Its host has gone."""

    def set(self, key: str, value: str) -> None:
        raise RuntimeError


@pytest.mark.parametrize(
    ("store", "parent", "told"),
    [
        (GoneStore(), None, r"rank 1: the launcher's store does not answer \(RuntimeError\)"),
        (DictStore(), 1, "rank 1: the launcher has gone"),
    ],
    ids=["store", "parent"],
)
def test_a_rank_whose_launcher_has_gone_ends_at_its_next_step(
    store: DictStore, parent: int | None, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R22: the heartbeat notices that the store does not answer, or that the rank has another parent, and has the rank end."""
    parents = iter([os.getppid()] if parent is None else [parent + 1, parent])
    monkeypatch.setattr("cphicache.agree.membership.os.getppid", lambda: next(parents))
    stop = Event()
    member = Membership(lambda: store, 1, 2, LIMIT_S, stop)
    assert stop.wait(20.0)
    with pytest.raises(GroupBroken, match=f"^{told}$"):
        member.check_stop()
    member.close()


def test_a_heartbeat_tells_how_far_a_rank_is() -> None:
    """R22: the heartbeat is written by itself and carries tick, reductions and requests."""
    store = DictStore()
    written = Event()

    class Telling(DictStore):
        def set(self, key: str, value: str) -> None:
            store.set(key, value)
            written.set()

    telling = Telling()
    member = Membership(lambda: telling, 1, 2, LIMIT_S, Event())
    assert written.wait(10.0)
    member.close()
    beat = read_beat(store, 1)
    assert beat is not None
    assert beat[1:] == (0, 0, 0)
    assert read_beat(store, 0) is None


def test_ranks_that_do_not_start_are_named(group: Group) -> None:
    """R22: at start, who has not come in time is named; who is known to be dead is named at once."""
    group.store.set("hello/0", "")
    with pytest.raises(GroupBroken, match=r"ranks \[1, 2\] have not said hello within 0 s"):
        group.members[0].wait_for_keys("hello", "said hello", 0.0)
    mark_gone(group.store, 2, "was killed by SIGKILL")
    group.store.set("hello/1", "")
    with pytest.raises(GroupBroken, match="rank 2 was killed by SIGKILL, before it said hello"):
        group.members[0].wait_for_keys("hello", "said hello", LIMIT_S)
