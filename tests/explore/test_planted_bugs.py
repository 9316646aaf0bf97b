"""A bug in any of these places of the engine is found, with a way to it that a person can follow."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from cphicache.alloc.pages import PageAllocator
from cphicache.engine import matching
from cphicache.engine.agreement import Agreement
from cphicache.engine.backups import Backups
from cphicache.engine.effects import Effects
from cphicache.engine.holds import Holds
from cphicache.engine.host_eviction import HostEviction
from cphicache.engine.loadback import LoadBacks
from cphicache.engine.records import Backup, Load, Match
from cphicache.engine.state import CacheState
from cphicache.explore import World
from cphicache.explore.scenario import play, read, write
from cphicache.lifecycle import State, Trigger
from cphicache.run.census import take_census
from cphicache.tree import Node
from tests.explore.worlds import CHAIN, LOAD_BACK, SPLIT, run, single, tiny, two_ranks

Plant = Callable[[pytest.MonkeyPatch], None]


def gone(owner: type, name: str) -> Plant:
    """The method does nothing."""
    return lambda patch: patch.setattr(owner, name, lambda self, *args, **kwargs: None)


def instead(owner: type, name: str, method: Callable[..., Any]) -> Plant:
    """Another method takes its place; it is given the old one first."""
    old = getattr(owner, name)
    return lambda patch: patch.setattr(owner, name, lambda self, *args, **kwargs: method(old, self, *args, **kwargs))


def no_failure_in_sample(old: Any, self: Agreement) -> tuple[int, int]:
    return old(self)[0], 2**62


def sample_over_gaps(old: Any, self: Agreement) -> tuple[int, int]:
    count, failed = old(self)
    done = [number for number, operation in self._state.numbered.items() if operation.done_here]
    return max([count, *(number + 1 for number in done)]), failed


def roll_back_at_once(old: Any, self: Agreement, operation: Backup | Load) -> None:
    old(self, operation)
    if isinstance(operation, Backup) and operation.failed_here and operation.state is State.LAYERS_IN_FLIGHT:
        self._backups.fire(operation, Trigger.AGREED_FAILED)


def issue_when_done_here(old: Any, self: Agreement) -> None:
    self.sample()
    if any(operation.done_here for operation in self._state.numbered.values()):
        old(self)


def give_twice(old: Any, self: Effects, record: Backup) -> None:
    need = record.need
    old(self, record)
    if sum(self._state.ledger.snapshot().used) >= sum(need):
        self._state.ledger.give(need)


def forget_retries(old: Any, self: Backups, record: Backup, reason: str, *, retry: bool = False) -> bool:
    record.retries = 0
    answer: bool = old(self, record, reason, retry=retry)
    return answer


def own_rollback_counts(old: Any, self: Effects, record: Backup) -> None:
    old(self, record)
    record.refused_epoch = -1
    self._state.retried_epoch = -1


def keep_the_slots(old: Any, self: Effects, record: Backup) -> None:
    self._state.ledger.take(record.need)
    old(self, record)


def failure_overlooked(old: Any, self: LoadBacks, load: Load) -> None:
    """A failed load-back is taken for a good one."""


def reclaim_anything(old: Any, self: HostEviction, need: Any, may_reclaim: bool) -> Any:
    for node in self._state.tree.nodes():
        if node.backup.state is State.LAYERS_IN_FLIGHT and not self._state.ledger.fits(need):
            return [(node, Trigger.RECLAIM)]
    return old(self, need, may_reclaim)


class Untold:
    """A local half that hears nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None


def untold(old: Any, self: Effects, *args: Any) -> None:
    local, self._transfer = self._transfer, Untold()  # type: ignore[assignment]
    old(self, *args)
    self._transfer = local


def told_twice(call: str) -> Callable[..., None]:
    """What ends is told the local half twice."""

    def twice(old: Any, self: Effects, record: Backup, *given: Any) -> None:
        node, key = record.node_id, record.key
        old(self, record, *given)
        getattr(self._transfer, call)(node if call == "free_node" else key)

    return twice


def ended_twice(old: Any, self: LoadBacks, load: Load) -> None:
    old(self, load)
    self._transfer.end_load(load.load_id)


def started_when_queued(old: Any, self: LoadBacks, *args: Any) -> Any:
    answer = old(self, *args)
    for load in self._state.loads.values():
        load.producer = 0
    return answer


def wait_anyway(old: Any, self: Agreement) -> None:
    self._state.outstanding = False
    self._wait_and_apply()


def issue_twice(old: Any, self: Agreement) -> None:
    old(self)
    old(self)


def once_more_where_it_waited(old: Any, self: Agreement) -> None:
    self.sample()
    waits = not all(operation.done_here for operation in self._state.numbered.values())
    old(self)
    if waits:
        self._reduce_now()


def any_node_is_the_last_host_node(patch: pytest.MonkeyPatch) -> None:
    right = matching.match_of

    def match_of(state: CacheState, walk: Any) -> Match:
        found = right(state, walk)
        return found._replace(last_host_node=found.device_node)

    patch.setattr(matching, "match_of", match_of)


CHAIN_WORLD = tiny(CHAIN, outside="abort reset shutdown", insert_early=True, one_forward=False)
ONE = tiny(outside="abort shutdown")
HOST_ROOM_FOR_ONE = tiny(single("a", 1, 2), single("b", 3, 4), outside="evict", config={"host_slots": 2})


def unlink_only(self: Effects, record: Backup) -> None:
    if not record.bound:
        self._holds.unlink(record)


BUGS: dict[str, tuple[Plant, World, str, int]] = {
    "a rollback keeps the device lock": (gone(Holds, "release_device"), ONE, "locks", 6),
    "a rollback keeps its slots": (instead(Effects, "release", keep_the_slots), ONE, "host", 6),
    "a rollback frees its slots twice": (instead(Effects, "release", give_twice), two_ranks("siblings-2", "abort"), "host", 6),
    "a failed copy is not reported": (instead(Agreement, "sample", no_failure_in_sample), ONE, "commit .* to have succeeded", 6),
    "the count goes over a gap": (
        instead(Agreement, "sample", sample_over_gaps),
        tiny(single("a", 1), single("b", 2)),
        "no copy in flight once every rank has passed it",
        8,
    ),
    "a rank rolls back alone": (
        instead(Agreement, "_poll", roll_back_at_once),
        two_ranks("siblings-2"),
        "logical halves .* differ",
        8,
    ),
    "a rank reduces alone": (instead(Agreement, "issue", issue_when_done_here), two_ranks("siblings-2"), "others not", 8),
    "a shutdown does not drain": (gone(Agreement, "drain"), ONE, "quiet", 4),
    "waiters sleep on": (gone(Effects, "wake"), SPLIT, "waiters", 8),
    "a pending node is divided": (
        lambda patch: patch.setattr("cphicache.engine.inserts.blocks_split", lambda walk, key: None),
        SPLIT,
        "split while pending",
        6,
    ),
    "children of a committed node wait": (gone(Effects, "commit_children"), CHAIN_WORLD, "columns|no state at rest", 12),
    "children of a lost node stay": (
        lambda patch: patch.setattr(Effects, "lose_children", unlink_only),
        CHAIN_WORLD,
        "contiguity",
        8,
    ),
    "an extent does not pin its parent": (
        lambda patch: patch.setattr(Holds, "host_anchor", lambda self, record: None),
        CHAIN_WORLD,
        "holds",
        6,
    ),
    "a load-back keeps its lock": (
        lambda patch: patch.setattr("cphicache.tree.radix.RadixTree.release_host", lambda self, node, pages: None),
        LOAD_BACK,
        "holds",
        12,
    ),
    "a failed load-back is taken for a good one": (
        instead(LoadBacks, "failed", failure_overlooked),
        LOAD_BACK,
        "a load-back that failed",
        12,
    ),
    "retries are not counted": (
        lambda patch: (
            [
                plant(patch)
                for plant in (instead(Backups, "reserve_stored", forget_retries), instead(Effects, "release", own_rollback_counts))
            ]
            and None
        ),
        tiny(single("a", 1)),
        "a cycle on which nothing gets on: retry, rollback",
        12,
    ),
    "slots of a pending node are taken": (
        instead(HostEviction, "plan", reclaim_anything),
        tiny(single("a", 1, 2), single("b", 3, 4, batch=1), config={"host_slots": 2}, one_forward=False),
        "not committed",
        6,
    ),
    "a rollback is told twice": (instead(Effects, "release", told_twice("release")), ONE, "release .* found none of that", 6),
    "a commit is not told": (instead(Effects, "commit", untold), ONE, "operations of the local half: expected {}, found {Op", 6),
    "a host eviction is told twice": (
        instead(Effects, "release_host", told_twice("free_node")),
        HOST_ROOM_FOR_ONE,
        "free_node 1: expected a committed node, found none",
        12,
    ),
    "a host eviction is not told": (
        instead(Effects, "release_host", untold),
        HOST_ROOM_FOR_ONE,
        "at most 0 slots, as the ledger says, found 2",
        12,
    ),
    "a load-back is ended twice": (
        instead(LoadBacks, "_end", ended_twice),
        LOAD_BACK,
        "end_load .: expected a load-back in flight, found none",
        12,
    ),
    "a load-back that was not started has a producer": (
        instead(LoadBacks, "queue", started_when_queued),
        LOAD_BACK,
        "load-back 1: expected it to have been started as producer 0, found it queued",
        12,
    ),
    "a load-back gets pages of other ranks": (
        instead(PageAllocator, "alloc_for_owners", lambda old, self, owners: old(self, owners[::-1])),
        two_ranks("load-back", "evict"),
        "OwnerMismatch: load-back of node",
        12,
    ),
    "a reduction is issued twice": (instead(Agreement, "issue", issue_twice), ONE, "a reduction is outstanding", 6),
    "a reduction is waited for that was not issued": (
        instead(Agreement, "apply_outstanding", wait_anyway),
        ONE,
        "no reduction is outstanding",
        6,
    ),
    "a rank that had to wait reduces once more": (
        instead(Agreement, "drain", once_more_where_it_waited),
        two_ranks("chain-disjoint", "shutdown"),
        "ranks .* wait for a reduction that the others do not join",
        8,
    ),
    "a pending node is the last host node": (any_node_is_the_last_host_node, ONE, "match: expected COMMITTED host nodes only", 6),
    "any leaf is a host victim": (
        lambda patch: patch.setattr(Node, "is_host_leaf", property(lambda node: not (node.is_root or node.children))),
        ONE,
        "host victims: expected COMMITTED nodes only",
        6,
    ),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """R30, R8, R15, R20, R21: exploring the real engine finds the bug, by a short list of events that leads to it again."""
    plant, world, what, longest = BUGS[bug]
    plant(monkeypatch)
    report = run(world)
    assert report.violation is not None
    assert re.search(what, report.violation.what), report.violation.what
    assert len(report.violation.way) <= longest
    text = write(world, report.violation, take_census)
    name, happenings = read(text)
    assert name == world.name
    assert [happening.event for happening in happenings] == [h.event for h in (*report.violation.way, *report.violation.cycle)]
    again = play(world, happenings, take_census)
    assert again == [line for line in text.splitlines() if not line.startswith("#")]


def test_without_a_bug_nothing_is_found_there() -> None:
    """R30: the worlds in which the bugs are planted are sound themselves, as far as the bugs are deep."""
    worlds = {id(world): world for _, world, _, _ in BUGS.values()}
    for world in worlds.values():
        report = run(world, max_states=300)
        assert report.violation is None
        assert report.states > 20
