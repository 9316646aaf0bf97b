"""What a reset, a flush and a shutdown do besides: who is told, what is kept, what is refused (R18)."""

from __future__ import annotations

import pytest

from cphicache.engine import CacheMisuse
from cphicache.lifecycle import State
from cphicache.transfer.port import CopyStatus
from tests.engine.rig import Rig
from tests.engine.rig_extra import ask_load, back_up, frozen, to_host

N, L, C = State.DEVICE_VALID_HOST_NONE, State.LAYERS_IN_FLIGHT, State.COMMITTED


def test_a_flush_with_a_running_request_is_refused() -> None:
    """R18: a flush while a request runs is the caller's mistake: one clear line that names the request and the remedy, nothing changed."""
    rig = Rig()
    rig.hold()
    assert rig.begin("runs", "abcd")
    rig.chunk("runs")
    before = frozen(rig)
    with pytest.raises(CacheMisuse, match=r"flush with 1 requests running \('runs', \.\.\.\): end them first") as caught:
        rig.cache.flush()
    assert "\n" not in str(caught.value)
    assert frozen(rig) == before
    rig.rest()


def test_a_flush_drops_parked_inserts() -> None:
    """R18, R17: a parked insert is no running request: a flush drops it, its pages are free and its reservation has ended."""
    rig = Rig()
    rig.hold()
    for rid, text in {"first": "pqrs", "parks": "pqxy"}.items():
        assert rig.begin(rid, text)
        rig.chunk(rid)
    rig.forward()
    rig.finish("first")
    assert not rig.finish("parks")
    assert not rig.begin("waits", "pz")
    op = rig.op("parks")
    rig.together(lambda side: side.cache.flush())
    assert op.state is N
    assert [(e["request"], e["reason"]) for e in rig.events("parked_dropped")] == [("parks", "flush")]
    assert not rig.cache.is_waiting("waits"), "woken: what it waited for is gone"
    rig.hold(False)
    assert rig.begin("waits", "pz")
    assert rig.row("waits") == []
    rig.rest()


def test_the_outstanding_reduction_is_applied_first() -> None:
    """R18, R21: a reset first applies the reduction that is under way, so what that sample agreed on is committed, not rolled back; its
    drain rounds are counted apart from the tick's reductions."""
    rig = Rig()
    rig.serve("one", "ab")
    rig.hold()
    rig.serve("two", "cd")
    rig.tick()
    assert rig.cache.state.outstanding
    assert (rig.states("ab", "cd"), rig.cache.counters.reductions) == ([L, L], 1)
    rig.together(lambda side: side.cache.reset_backups())
    assert rig.states("ab", "cd") == [C, N]
    assert (rig.cache.counters.reductions, rig.cache.counters.drain_reductions) == (1, 1)
    assert [len(side.tap.issued) for side in rig.sides] == [2, 2]
    rig.rest()


def test_nothing_to_reset_needs_no_reduction() -> None:
    """R18, R21: with nothing numbered a reset, a flush and a shutdown take part in no reduction at all."""
    rig = Rig()
    back_up(rig, "ab")
    issued = [len(side.tap.issued) for side in rig.sides]
    for call in ("reset_backups", "flush", "shutdown"):
        rig.each(lambda side, call=call: getattr(side.cache, call)())  # type: ignore[misc]
    assert [len(side.tap.issued) for side in rig.sides] == issued
    rig.rest()


def test_a_completion_from_before_the_reset_is_stale() -> None:
    """R18: a completion that comes after a reset carries an older generation: a logged, counted no-op, also when the node is being
    backed up again."""
    rig = Rig()
    rig.hold()
    rig.serve("one", "abcd")
    old = rig.node("abcd").backup.key
    rig.together(lambda side: side.cache.reset_backups())
    rig.serve("hits", "abcd")
    new = rig.node("abcd").backup.key
    assert (new.node, new.generation > old.generation, rig.state("abcd")) == (old.node, True, L)
    for status in (CopyStatus(True, False), CopyStatus(True, True)):
        rig.each(lambda side, status=status: side.cache.completion(old, status))  # type: ignore[misc]
    assert rig.cache.counters.stale["stale_generation"] == 2
    assert len(rig.events("stale_generation", generation=old.generation)) == 2
    assert rig.state("abcd") is L
    rig.finish_all()
    rig.settle()
    assert rig.state("abcd") is C
    rig.rest()


@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_a_reset_ends_load_backs(started: bool, fails: bool) -> None:
    """R18, R25: a reset drains load-backs too, also those that nobody has started yet; one that fails in the drain poisons its reader,
    and its nodes are host-only again when that has gone."""
    rig = Rig()
    to_host(rig, "abcd")
    rig.hold()
    assert rig.begin("reads", "abcd")
    rig.local(1).fail_copy_next = fails
    if started:
        rig.start_loads()
    rig.together(lambda side: side.cache.reset_backups())
    assert not rig.cache.state.numbered
    assert bool(rig.cache.state.loads) == fails
    assert rig.tick().poisoned == (["reads"] if fails else [])
    rig.abort("reads")
    assert not rig.cache.state.loads
    assert (rig.node("abcd").pages is None) == fails
    assert rig.state("abcd") is C
    rig.hold(False)
    assert len(ask_load(rig, "again", "abcd").pages) == (4 if fails else 0)
    rig.start_loads()
    rig.settle()
    rig.rest()


def test_a_flush_forgets_retries_and_frees_host_copies() -> None:
    """R18: after a flush nothing is tried again, and nodes on the device, on the host and on both are all gone."""
    rig = Rig(host_slots=8)
    to_host(rig, "ab")
    back_up(rig, "pq")
    rig.serve("refused", "mnopqrst")
    rig.settle()
    assert rig.cache.state.retries
    rig.together(lambda side: side.cache.flush())
    assert not rig.cache.state.retries
    assert rig.cache.state.tree.node_count == 0
    assert rig.free_slots() == [8, 8]
    rig.tick(2)
    assert not rig.cache.state.pending
    rig.rest()


def test_shutdown_keeps_the_nodes() -> None:
    """R18: a shutdown ends what is pending and leaves the tree as it is, to be looked at; it may be asked twice."""
    rig = Rig()
    back_up(rig, "ab")
    rig.hold()
    rig.serve("flies", "cd")
    for _ in range(2):
        rig.together(lambda side: side.cache.shutdown())
        assert rig.states("ab", "cd") == [C, N]
    assert rig.cache.protected_size() == 0
    rig.rest()


def test_a_drain_takes_as_many_rounds_as_there_are_failures() -> None:
    """R18, R21: a round passes nothing behind the first failure that it agrees on, so that a reset goes on until all is passed: here two
    load-backs that fail on different ranks, and a backup behind them."""
    rig = Rig()
    to_host(rig, "ab", "pq")
    rig.hold()
    for rank, text in enumerate(("ab", "pq")):
        assert ask_load(rig, text, text).pages
        rig.local(rank).fail_copy_next = True
        rig.start_loads()
    rig.serve("flies", "cd")
    rig.together(lambda side: side.cache.reset_backups())
    assert not rig.cache.state.loads
    assert not rig.cache.state.numbered
    assert rig.cache.counters.load_backs_failed == 2
    assert [rig.node(text).pages for text in ("ab", "pq")] == [None, None]
    assert rig.state("cd") is N
    assert rig.cache.counters.drain_reductions == 3
    rig.rest()


def test_a_forward_that_outlives_a_reset_reports_nothing_to_the_next_backup() -> None:
    """R18, R10: a chunk that was inserted while its forward was going on is rolled back by a reset and backed up again under a new
    generation; what its old forward still stores, and its end, are nothing to that one."""
    rig = Rig()
    rig.hold()
    assert rig.begin("runs", "abcd")
    rig.chunk("runs", 4)
    rig.insert("runs", chunked=True)
    outlives, rig.batch = rig.batch, rig.batch + 1
    rig.chunk("runs", 8)
    old = rig.node("ab").backup.key
    rig.together(lambda side: side.cache.reset_backups())
    assert rig.state("ab") is N
    rig.tick()
    new = rig.node("ab").backup
    assert (new.node_id, new.generation > old.generation, new.state, new.number) == (old.node, True, L, 0)
    for payload in (0, 1):
        rig.each(lambda side, payload=payload: side.cache.layer_stored(outlives, payload, 0))  # type: ignore[misc]
        rig.each(lambda side, payload=payload: side.cache.end_payload(outlives, payload))  # type: ignore[misc]
    rig.each(lambda side: side.cache.end_forward(outlives))
    assert (new.state, new.number) == (L, 0)
    rig.forward()
    rig.finish_all()
    rig.settle()
    assert rig.state("ab") is C
    rig.rest()
