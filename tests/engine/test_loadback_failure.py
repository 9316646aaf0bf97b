"""Load-backs that fail on one rank: what is kept, for how long, and what becomes of those who read them (R25, R22)."""

from __future__ import annotations

import pytest

from cphicache.engine import Refusal, WriteBackShort, WritePolicy
from cphicache.engine.records import LoadState
from cphicache.lifecycle import State
from tests.engine.rig import Rig
from tests.engine.rig_extra import ALL_TOKENS, ask_load, host_only_slots, kv_events, load_of, to_host

N, L, C, B = State.DEVICE_VALID_HOST_NONE, State.LAYERS_IN_FLIGHT, State.COMMITTED, State.ROLLED_BACK


def begin_load(rig: Rig, rid: str = "reads", text: str = "abcdx") -> None:
    """A request whose prefix is being loaded, in the forward that reads it."""
    rig.hold()
    assert rig.begin(rid, text)
    rig.chunk(rid)
    rig.start_loads()


def end_copies(rig: Rig, load_id: int, *ranks: int) -> None:
    """The copies of a load-back have ended on these ranks (all)."""
    for side in rig.sides:
        if (not ranks or side.rank in ranks) and load_id in side.transfer.in_flight():
            side.transfer.finish(load_id)


def fail_load(rig: Rig, load_id: int, rank: int) -> None:
    """A load-back fails on one rank while the others' copies, and the rest of that rank's, go on."""
    rig.local(rank).fail(load_id, drained=False)


def loads_again(rig: Rig, text: str) -> None:
    """The chain is host-only once more, and loads when it is asked for again."""
    rig.hold(False)
    assert rig.node(text).pages is None
    assert rig.state(text) is C
    answer = ask_load(rig, "again", text)
    assert len(answer.pages) == len(text)
    rig.start_loads()
    rig.settle()
    assert rig.node(text).loading is None
    assert rig.match(text).device_pages == answer.pages


def test_a_failure_on_one_rank_changes_nothing_before_it_is_agreed() -> None:
    """R22, R25: a load-back that fails on one rank goes on as if it had not, until the sample that says so is applied on all ranks."""
    rig = Rig()
    to_host(rig, "abcd")
    begin_load(rig)
    before = [side.census().loads for side in rig.sides]
    fail_load(rig, 1, 1)
    rig.tick()
    assert [side.census().loads for side in rig.sides] == before
    assert load_of(rig, 1).state is LoadState.QUEUED
    assert rig.match("abcd").device_pages == rig.row("reads")[:4]
    assert rig.tick().poisoned == ["reads"]
    assert load_of(rig, 1).state is LoadState.FAILED
    rig.finish_all()
    rig.rest()


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("drains", ["before the reader goes", "after the reader has gone"])
def test_pages_and_lock_are_kept_to_the_agreed_drain(rank: int, drains: str) -> None:
    """R25: a failed load keeps its pages, lock and pins until every rank has drained and its readers are gone; nobody new may read it,
    nothing of its readers is inserted, their backups roll back; then the nodes are host-only again and can be loaded again."""
    rig = Rig()
    to_host(rig, "abcd")
    begin_load(rig)
    rig.forward()
    op, node = rig.op("reads"), rig.node("abcd")
    fail_load(rig, 1, rank)
    rig.tick()
    assert rig.tick().poisoned == ["reads"]
    assert (node.lock_ref, node.host_ref, node.loading, len(node.pages or ())) == (2, 2, 1, 4), "load and reader; load and extent"
    assert (rig.match("abcd").device_pages, rig.match("abcd").host_nodes) == ([], [])
    assert rig.insert("reads") is None
    if drains == "before the reader goes":
        end_copies(rig, 1)
        rig.tick(2)
        assert load_of(rig, 1).state is LoadState.DRAINED
        assert node.pages is not None, "the reader may still read"
        assert rig.tick().poisoned == ["reads"], "said again until it is done"
        rig.abort("reads", "load_failed")
    else:
        rig.abort("reads", "load_failed")
        assert node.lock_ref == 1
        rig.tick(2)
        assert node.pages is not None, "copies may still write"
        end_copies(rig, 1)
        rig.tick(2)
    assert not rig.cache.state.loads
    assert (node.lock_ref, node.host_ref, node.loading) == (0, 0, None)
    assert rig.node("abcd").pages is None
    assert op.state is B
    assert not rig.has("abcdx")
    rig.finish_all()
    rig.settle()
    assert op.state is N
    assert host_only_slots(rig) == [4, 4]
    assert rig.cache.counters.load_backs_failed == 1
    loads_again(rig, "abcd")
    rig.rest()


def test_one_rank_may_not_have_drained_when_all_others_have() -> None:
    """R25, R14: the drain that frees the pages is the agreed one: as long as one rank's copies run, every rank keeps them."""
    rig = Rig(cp_size=4)
    to_host(rig, "abcd")
    begin_load(rig)
    fail_load(rig, 1, 2)
    rig.tick(2)
    rig.abort("reads")
    end_copies(rig, 1, 0, 1, 2)
    rig.tick(3)
    assert rig.node("abcd").pages is not None
    end_copies(rig, 1, 3)
    rig.tick(2)
    assert rig.node("abcd").pages is None
    rig.end_forward()
    loads_again(rig, "abcd")
    rig.rest()


def test_several_readers_are_all_poisoned_and_others_are_not() -> None:
    """R25: all requests that were admitted on the failed load are reported, each until it has gone; requests that read nothing of it
    go on, those on other nodes as well as those that come after."""
    rig = Rig()
    to_host(rig, "abcd", "pq")
    rig.hold()
    for rid, text in {"one": "abcdx", "two": "abz", "other": "pqx", "new": "mn"}.items():
        assert rig.begin(rid, text)
        rig.chunk(rid)
    rig.start_loads()
    rig.forward()
    fail_load(rig, 1, 0)
    rig.tick()
    assert rig.tick().poisoned == ["one", "two"]
    rig.abort("one")
    assert rig.tick().poisoned == ["two"]
    end_copies(rig, 1)
    rig.tick(2)
    assert load_of(rig, 1).state is LoadState.DRAINED
    assert rig.begin("late", "abcd")
    assert rig.row("late") == []
    rig.abort("two")
    assert rig.node("abcd").pages is None
    rig.finish_all()
    rig.settle()
    assert rig.finish("other")
    assert rig.finish("new")
    assert rig.tick().poisoned == []
    rig.rest()


def test_parked_readers_are_dropped() -> None:
    """R25, R17: finished requests that read a failed load are all dropped with the reason in the tick in which that is agreed; their pages
    are free and nothing of them is inserted."""
    rig = Rig()
    to_host(rig, "abcd")
    begin_load(rig)
    assert rig.begin("too", "abcdy")
    rig.chunk("too")
    rig.forward()
    ops = [rig.op("reads"), rig.op("too")]
    assert [rig.finish("reads"), rig.finish("too")] == [False, False]
    fail_load(rig, 1, 1)
    rig.tick()
    report = rig.tick()
    assert (report.dropped, report.poisoned) == (["reads", "too"], [])
    assert [e["reason"] for e in rig.events("parked_dropped")] == ["load_failed"] * 2
    assert [op.state for op in ops] == [B, B]
    rig.finish_all()
    rig.settle()
    assert not rig.has("abcdx")
    assert rig.cache.available_size() == rig.config.usable_pages * 2
    loads_again(rig, "abcd")
    rig.rest()


def test_a_poisoned_request_reserves_nothing_more() -> None:
    """R25: a request that has read a failed load is not backed up any further: its next chunk reserves nothing."""
    rig = Rig()
    to_host(rig, "abcd")
    rig.hold()
    assert rig.begin("reads", "abcdxyz")
    rig.chunk("reads", upto=10)
    rig.start_loads()
    rig.forward()
    assert rig.insert("reads", chunked=True) is None
    fail_load(rig, 1, 1)
    rig.tick(2)
    before = rig.cache.counters.reserved
    assert rig.chunk("reads")
    assert rig.cache.counters.reserved == before
    rig.end_forward()
    rig.abort("reads")
    rig.finish_all()
    rig.settle()
    rig.rest()


@pytest.mark.parametrize("first", ["upper", "lower"])
def test_a_load_below_a_failed_one_is_doomed(first: str) -> None:
    """R25: a load that hangs on a failed one ends as well, whether its own copies have ended before or after: its readers are poisoned,
    its nodes are host-only again, children before parents, and all of the chain can be loaded again."""
    rig = Rig()
    to_host(rig, "ab", "abcd")
    rig.hold()
    assert rig.begin("upper", "abx")
    rig.chunk("upper")
    rig.start_loads()
    rig.forward()
    assert rig.begin("lower", "abcdy")
    rig.chunk("lower")
    rig.start_loads()
    rig.forward()
    for rid in ("upper", "lower"):
        rig.finish_copies(rig.op(rid).key)
    if first == "lower":
        end_copies(rig, 2)
    fail_load(rig, 1, 1)
    rig.tick()
    assert rig.tick().poisoned == ["upper", "lower"], "the lower one reads the upper load, too"
    assert load_of(rig, 2).doomed
    assert rig.match("abcd").device_pages == []
    assert rig.insert("lower") is None
    rig.abort("upper")
    end_copies(rig, 1)
    rig.tick(3)
    if first == "upper":
        rig.abort("lower")
        assert load_of(rig, 1).state is LoadState.DRAINED, "kept for the one below"
        kv_events(rig)
        end_copies(rig, 2)
        rig.tick(2)
    else:
        assert [load_of(rig, load).state for load in (1, 2)] == [LoadState.DRAINED] * 2, "kept for the reader"
        kv_events(rig)
        rig.abort("lower")
    assert not rig.cache.state.loads
    dropped = [node for stored, medium, node, _ in kv_events(rig) if (stored, medium) == (False, "device")]
    assert dropped == [rig.node("abcd").id, rig.node("ab").id]
    rig.finish_all()
    rig.settle()
    assert rig.cache.counters.load_backs_failed == 2
    loads_again(rig, "abcd")
    rig.rest()


def test_both_loads_may_fail() -> None:
    """R25, R21: two loads in one chain fail on different ranks: each is agreed in its turn, and all of it is host-only again."""
    rig = Rig()
    to_host(rig, "ab", "abcd", "abcdef")
    rig.hold()
    assert rig.begin("upper", "abcd")
    rig.start_loads()
    assert rig.begin("lower", "abcdef")
    rig.start_loads()
    rig.local(1).fail(2)
    rig.local(0).fail(1)
    rig.finish_all()
    rig.tick(3)
    assert rig.tick().poisoned == ["upper", "lower"]
    rig.abort("upper")
    rig.abort("lower")
    assert not rig.cache.state.loads
    loads_again(rig, "abcdef")
    rig.rest()


def test_a_load_elsewhere_is_not_doomed() -> None:
    """R25: a failed load dooms what hangs on it and nothing else."""
    rig = Rig()
    to_host(rig, "ab", "abcd", "pq")
    rig.hold()
    for rid, text in {"one": "abcd", "two": "pq"}.items():
        assert rig.begin(rid, text)
    rig.start_loads()
    rig.local(0).fail(1)
    rig.finish_all()
    rig.tick(3)
    assert rig.tick().poisoned == ["one"]
    assert rig.node("pq").loading is None
    assert rig.match("pq").device_pages == rig.row("two")
    rig.rest()


def test_a_reader_that_goes_before_the_failure_is_agreed_is_not_reported() -> None:
    """R25: an aborted reader is no reader any more; with nobody left, the nodes are host-only as soon as the drain is agreed."""
    rig = Rig()
    to_host(rig, "abcd")
    begin_load(rig)
    rig.local(1).fail(1)
    rig.abort("reads")
    rig.finish_all()
    rig.tick()
    assert rig.tick().poisoned == []
    assert rig.node("abcd").pages is None
    rig.end_forward()
    loads_again(rig, "abcd")
    rig.rest()


def test_a_failed_load_back_that_nobody_reads_ends_when_its_drain_is_agreed_within_a_tick() -> None:
    """R21, R25: who agrees within a tick has the pages of a failed load-back back at once, not with the next tick."""
    rig = Rig()
    to_host(rig, "abcd")
    begin_load(rig)
    rig.local(1).fail(1)
    rig.abort("reads")
    rig.finish_all()
    tick = rig.cache.state.tick
    rig.together(lambda side: side.cache.agree_now())
    assert (rig.node("abcd").pages, rig.cache.state.loads, rig.cache.state.tick) == (None, {}, tick)
    rig.end_forward()
    loads_again(rig, "abcd")
    rig.rest()


def failing_under_eviction() -> Rig:
    """Under write_back, ``ab`` is being loaded (and fails); a load of ``abcd`` behind it must evict what has no host copy yet, which
    waits with a drain round."""
    rig = Rig(ranks=[0], cp_size=1, policy=WritePolicy.WRITE_BACK, write_back_short=WriteBackShort.WAIT, usable_pages=8)
    rig.serve("one", "ab")
    rig.serve("two", "abcd")
    rig.evict(ALL_TOKENS)
    assert rig.states("ab", "abcd") == [C, C]
    rig.serve("fills", "mnopqr")
    assert ask_load(rig, "upper", "ab").pages
    assert rig.cache.available_size() == 0
    rig.local(0).hold()
    rig.local(0).fail_copy_next = True
    rig.start_loads()
    return rig


def test_a_load_is_refused_when_the_one_above_fails_while_it_makes_room() -> None:
    """R25, R19: under write_back, making room may wait for an agreement by which the load above has failed: then nothing is loaded
    below it, nothing stays locked, and what failed is host-only again."""
    rig = failing_under_eviction()
    assert ask_load(rig, "lower", "abcd") == ([], None, Refusal.LOAD_ABOVE_FAILED)
    assert rig.cache.state.loads.keys() == {1}
    assert not rig.cache.state.numbered
    assert not rig.cache.is_at_rest(), "the failed load-back has drained and is still to be undone"
    rig.tick()
    assert not rig.cache.state.loads
    assert [rig.node(text).pages for text in ("ab", "abcd")] == [None, None]
    assert rig.states("ab", "abcd") == [C, C]
    rig.finish_all()
    rig.settle()
    loads_again(rig, "abcd")
    rig.rest()


def test_a_failed_load_that_is_still_to_be_undone_is_undone_by_a_flush() -> None:
    """R18, R25: a flush before the next tick finds a load-back that has failed while another one made room: it ends before its nodes do."""
    rig = failing_under_eviction()
    assert ask_load(rig, "lower", "abcd").refused is Refusal.LOAD_ABOVE_FAILED
    assert rig.cache.state.undoing == [1]
    rig.cache.flush()
    assert (rig.cache.state.loads, rig.cache.state.undoing, rig.cache.state.tree.node_count) == ({}, [], 0)
    assert rig.local(0).called("end_load") == [(1,)]
    rig.rest()


def test_whoever_is_admitted_on_a_failed_load_is_poisoned() -> None:
    """R25: a request whose match was good when it was made, but whose load has failed by the time it is admitted, is reported like
    every other reader, and nothing of it is inserted."""
    rig = failing_under_eviction()
    assert rig.begin("reads", "abcd")  # its own load-back makes room, by which the one above fails
    assert len(rig.row("reads")) == 2
    rig.grow("reads")
    assert rig.insert("reads") is None
    assert rig.tick().poisoned == ["reads"]
    assert rig.node("ab").pages is not None
    rig.abort("reads")
    assert rig.node("ab").pages is None
    rig.finish_all()
    rig.settle()
    rig.rest()


def confirm(rig: Rig, rid: str = "reads") -> bool:
    """Ask on all ranks at once; they answer alike."""
    answers: dict[int, bool] = {}
    rig.together(lambda side: answers.__setitem__(side.rank, side.cache.confirm_loads(rid)))
    assert len(set(answers.values())) == 1
    return answers[0]


def load_behind_a_backup() -> Rig:
    """A load-back that is read, and a backup in flight that has a lower number."""
    rig = Rig()
    to_host(rig, "abcd")
    rig.hold()
    rig.begin("other", "xyz")
    rig.chunk("other")
    rig.forward()
    begin_load(rig)
    rig.forward()
    return rig


def test_a_request_that_ends_at_once_hears_of_a_failure_on_one_rank() -> None:
    """R25, R22: a request that ends before a failure of what it reads is agreed asks for it: every rank knows then, though copies that
    have lower numbers still go on. Asking again costs nothing."""
    rig = load_behind_a_backup()
    fail_load(rig, 1, 1)
    for _ in range(2):
        assert not confirm(rig)
        assert rig.cache.counters.drain_reductions == 1
    assert load_of(rig, 1).state is LoadState.FAILED
    assert rig.op("other").state is L
    rig.abort("reads", "load_failed")
    rig.finish_all()
    rig.settle()
    assert not rig.has("abcdx")
    rig.rest()


def test_failures_of_others_do_not_hide_that_of_a_load_back() -> None:
    """R25, R21: a minimum names one failure at a time; a backup with a lower number that has failed as well costs a round more."""
    rig = load_behind_a_backup()
    rig.fail_copies(rig.op("other").key, 0, drained=False)
    fail_load(rig, 1, 1)
    before = rig.cache.counters.drain_reductions
    assert not confirm(rig)
    assert rig.cache.counters.drain_reductions == before + 2
    assert rig.op("other").state is B
    rig.abort("reads", "load_failed")
    rig.finish_all()
    rig.settle()
    rig.rest()


@pytest.mark.parametrize(
    ("order", "failing", "rounds"),
    [
        (("other", "upper", "lower"), ("lower",), 1),
        (("other", "upper", "lower"), ("upper",), 2),
        (("upper", "other", "lower"), ("other", "lower"), 2),
    ],
)
def test_each_load_back_that_is_read_is_confirmed(order: tuple[str, ...], failing: tuple[str, ...], rounds: int) -> None:
    """R25, R21: of two load-backs that a request reads either may fail, and a backup whose number stands between theirs, too. A reduction
    is asked for until no failure can be hidden by one that stands before it, and no further."""
    rig = Rig()
    to_host(rig, "ab", "abcd")
    rig.hold()
    for rid in order:
        assert rig.begin(rid, {"other": "xyz", "upper": "ab", "lower": "abcd"}[rid])
        if rid == "other":
            rig.chunk(rid)
            rig.forward()
        rig.start_loads()
    if "other" in failing:
        rig.fail_copies(rig.op("other").key, 0, drained=False)
    for load, rid in enumerate(("upper", "lower"), start=1):
        if rid in failing:
            fail_load(rig, load, 1)
    before = rig.cache.counters.drain_reductions
    assert not confirm(rig, "lower")
    assert rig.cache.counters.drain_reductions == before + rounds
    assert rig.cache.state.requests["upper"].poisoned is ("upper" in failing)
    for rid in ("upper", "lower"):
        rig.abort(rid)
    rig.finish_all()
    rig.settle()
    rig.rest()


def test_a_load_back_that_ends_with_what_is_under_way_costs_nothing_more() -> None:
    """R21, R25: what the reduction of the last tick passes is confirmed by it: nothing is waited for, and no other one is asked for."""
    rig = Rig()
    to_host(rig, "abcd")
    begin_load(rig)
    rig.forward()
    rig.finish_all()
    rig.tick()
    assert rig.cache.state.outstanding
    before = rig.cache.counters.drain_reductions
    assert confirm(rig)
    assert (rig.cache.state.loads, rig.cache.counters.drain_reductions) == ({}, before)
    assert [side.transfer.called("wait_load") for side in rig.sides] == [[], []]
    rig.rest()


def test_a_failure_that_is_agreed_does_not_hide_the_next() -> None:
    """R21, R25: a load-back that has failed and still drains is named once: one behind it that fails is agreed in its own two ticks."""
    rig = Rig()
    to_host(rig, "ab", "pq")
    rig.hold()
    for rid, text in {"one": "ab", "two": "pq"}.items():
        assert rig.begin(rid, text)
    rig.start_loads()
    fail_load(rig, 1, 0)
    rig.tick()
    assert rig.tick().poisoned == ["one"]
    fail_load(rig, 2, 0)
    rig.tick()
    assert rig.tick().poisoned == ["one", "two"]
    assert [load_of(rig, load).state for load in (1, 2)] == [LoadState.FAILED] * 2
    rig.finish_all()
    rig.rest()


def test_a_load_back_that_went_well_is_confirmed_once() -> None:
    """R25: a right load-back is confirmed with one reduction; when nothing is in flight any more, asking costs none."""
    rig = Rig()
    to_host(rig, "abcd")
    begin_load(rig)
    rig.forward()
    before = rig.cache.counters.drain_reductions
    assert confirm(rig)
    assert rig.cache.counters.drain_reductions == before + 1
    rig.finish_all()
    rig.settle()
    assert confirm(rig)
    assert rig.cache.counters.drain_reductions == before + 1
    rig.rest()


def test_a_load_back_is_waited_for_before_it_is_confirmed() -> None:
    """R25: whoever ends at once hears of failures that copies still under way would have: they are waited for on every rank, and agreed."""
    rig = Rig()
    to_host(rig, "abcd")
    begin_load(rig)
    rig.forward()
    assert all(1 in side.transfer.in_flight() for side in rig.sides)
    assert confirm(rig)
    assert [side.transfer.called("wait_load") for side in rig.sides] == [[(1,)]] * 2
    assert not rig.cache.state.loads, "it has ended well on every rank"
    rig.finish_all()
    rig.settle()
    rig.rest()


@pytest.mark.parametrize("fails", [False, True])
def test_what_is_under_way_is_applied_before_a_load_back_is_confirmed(fails: bool) -> None:
    """R21, R25: the reduction of the last tick comes first, as one is under way at a time; then the one that the question costs."""
    rig = Rig()
    to_host(rig, "abcd")
    begin_load(rig)
    rig.forward()
    rig.tick()
    if fails:
        fail_load(rig, 1, 0)
    assert rig.cache.state.outstanding
    before = [(len(side.tap.issued), len(side.tap.applied)) for side in rig.sides]
    assert confirm(rig) is not fails
    after = [(len(side.tap.issued), len(side.tap.applied)) for side in rig.sides]
    assert [(issued + 1, applied + 2) for issued, applied in before] == after
    rig.abort("reads")
    rig.finish_all()
    rig.settle()
    rig.rest()


def test_a_load_that_has_failed_itself_is_not_doomed_by_the_one_above() -> None:
    """R25: the lower load's own failure is agreed first: it ends as failed, and stays that when the one above it fails after it."""
    rig = Rig()
    to_host(rig, "ab", "abcd")
    rig.hold()
    assert rig.begin("upper", "ab")
    rig.start_loads()
    assert rig.begin("lower", "abcd")
    rig.start_loads()
    fail_load(rig, 2, 1)
    rig.tick(2)
    assert [load_of(rig, load).state for load in (1, 2)] == [LoadState.QUEUED, LoadState.FAILED]
    fail_load(rig, 1, 0)
    rig.tick(2)
    assert [load_of(rig, load).state for load in (1, 2)] == [LoadState.FAILED, LoadState.FAILED]
    assert [load_of(rig, load).doomed for load in (1, 2)] == [False, False]
    assert [event["reason"] for event in rig.events("step", trigger="load_failed")] == ["copy_failed"] * 2
    rig.finish_all()
    rig.tick(4)
    rig.abort("upper")
    rig.abort("lower")
    assert not rig.cache.state.loads
    loads_again(rig, "abcd")
    rig.rest()


def test_a_failed_load_that_is_still_read_keeps_no_other() -> None:
    """R25, R14: two loads of different prefixes have failed and drained; the one whose reader has gone gives its pages back, though that of
    the other is still there."""
    rig = Rig()
    to_host(rig, "ab", "pq")
    rig.hold()
    for rid, text in {"one": "ab", "two": "pq"}.items():
        assert rig.begin(rid, text)
        rig.start_loads()
    for load in (1, 2):
        rig.local(0).fail(load)
    rig.finish_all()
    rig.tick(5)
    assert rig.cache.state.undoing == [1, 2]
    rig.abort("one")
    assert list(rig.cache.state.loads) == [2]
    assert (rig.node("ab").pages, rig.node("pq").pages) == (None, rig.row("two"))
    rig.abort("two")
    assert not rig.cache.state.loads
    rig.rest()


def test_a_reader_of_a_load_in_flight_is_declined_whenever_it_asks() -> None:
    """R17, R25: whoever asks whether an insert would be declined hears what the insert itself says, before and after the load's end."""
    rig = Rig()
    to_host(rig, "abcd")
    begin_load(rig)
    rig.forward()

    def is_declined() -> bool:
        return rig.each(lambda side: side.cache.is_declined(rig.stored_key("reads")))

    assert is_declined()
    assert rig.insert("reads") is None
    rig.finish_all()
    rig.settle()
    assert not is_declined()
    assert rig.insert("reads") is not None
    rig.finish("reads")
    rig.rest()
