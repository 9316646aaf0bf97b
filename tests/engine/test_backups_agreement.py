"""The sequence that all ranks agree on: what is sampled, what a tick applies, and how many collectives that takes (R20, R21)."""

from __future__ import annotations

from itertools import product

import pytest

from cphicache.transfer.port import CopyStatus
from tests.engine.rig import B, C, L, N, Rig, Side
from tests.engine.rig_extra import ask_load
from tests.engine_fakes import FakeTransfer

TEXTS = ("ab", "cd", "ef", "gh", "ij")
LONG_TEXTS = ("abcd", "efgh", "ijkl", "mnop")
"""One page, or more, of each on every rank."""


def numbered(rig: Rig, count: int, of: tuple[str, ...] = TEXTS) -> list[str]:
    """``count`` separate nodes in flight with numbers 0, 1, ...; their texts."""
    rig.hold()
    texts = list(of[:count])
    for index, text in enumerate(texts):
        rig.begin(f"r{index}", text)
        rig.chunk(f"r{index}")
    rig.forward()
    for index in range(count):
        rig.finish(f"r{index}")
    assert [rig.node(text).backup.number for text in texts] == list(range(count))
    return texts


def samples(rig: Rig) -> list[list[tuple[int, int | None]]]:
    return [side.tap.issued for side in rig.sides]


ORDERS = {0: (0, 1, 2, 3), 1: (3, 2, 1, 0), 2: (1, 0, 3, 2), 3: (2, 3, 0, 1)}
"""The order in which each rank's copies of four backups end."""


@pytest.mark.parametrize("cp_size", [2, 4])
def test_ranks_with_different_orders_of_completion_apply_the_same(cp_size: int) -> None:
    """R20, R21: every rank's copies end in another order; all ranks commit the same nodes in the same ticks, in sequence, each one tick
    after the last rank's sample had it."""
    rig = Rig(cp_size=cp_size)
    texts = numbered(rig, 4, LONG_TEXTS)
    keys = [rig.node(text).backup.key for text in texts]
    sampled = 0
    for step in range(4):
        for side in rig.sides:
            side.transfer.finish(keys[ORDERS[side.rank][step]])
        rig.tick()
        assert [state is C for state in rig.states(*texts)] == [number < sampled for number in range(4)]
        ended = [set(ORDERS[side.rank][: step + 1]) for side in rig.sides]
        counts = [next((number for number in range(4) if number not in done), 4) for done in ended]
        assert [issued[-1] for issued in samples(rig)] == [(count, None) for count in counts]
        sampled = min(counts)
    assert sampled == 4
    rig.tick()
    assert rig.states(*texts) == [C] * 4
    rig.rest()


def test_issued_in_one_tick_and_applied_in_the_next() -> None:
    """R21: a reduction is waited for one tick after it was issued, never in the same."""
    rig = Rig()
    rig.hold()
    rig.serve("r1", "ab")
    rig.finish_all()
    assert samples(rig) == [[], []]
    rig.tick()
    assert (samples(rig), [side.tap.applied for side in rig.sides]) == ([[(1, None)]] * 2, [[], []])
    assert rig.state("ab") is L
    rig.tick()
    assert [side.tap.applied for side in rig.sides] == [[(1, None)]] * 2
    assert rig.state("ab") is C
    rig.rest()


def test_no_collective_while_nothing_is_numbered() -> None:
    """R20, R21: reserving, copying, inserting, evicting and idling take none; a number does, one a tick until it is passed."""
    rig = Rig()
    rig.begin("r1", "abcd")
    rig.chunk("r1")
    rig.tick(3)
    rig.layer(0, 0, 1, 2)
    rig.tick(3)
    rig.evict(100)
    assert samples(rig) == [[], []]
    rig.hold()
    rig.forward()
    rig.finish("r1")
    rig.tick(5)
    assert [len(issued) for issued in samples(rig)] == [5, 5]
    rig.finish_all()
    rig.tick(2)
    assert rig.state("abcd") is C
    rig.tick(5)
    assert [len(issued) for issued in samples(rig)] == [6, 6]
    rig.evict(100)
    rig.tick(5)
    assert [len(issued) for issued in samples(rig)] == [6, 6]
    assert (rig.cache.counters.reductions, rig.cache.counters.drain_reductions) == (6, 0)
    rig.rest()


@pytest.mark.parametrize(("layers", "nodes", "letters"), list(product((1, 8), (1, 5), (1, 2))))
def test_the_number_of_collectives_does_not_depend_on_the_work(layers: int, nodes: int, letters: int) -> None:
    """R21: the same two ticks agree on one node of one layer and on five nodes of sixteen."""
    rig = Rig(payloads=(("target", layers), ("draft", layers)))
    for index in range(nodes):
        rig.begin(f"r{index}", TEXTS[index][:letters])
        rig.chunk(f"r{index}")
    rig.forward()
    for index in range(nodes):
        rig.finish(f"r{index}")
    rig.tick(4)
    assert rig.cache.counters.committed == nodes
    assert samples(rig) == [[(nodes, None)]] * 2
    rig.rest()


def test_numbers_follow_reservation_order_however_layers_were_reported() -> None:
    """R21: two backups of one batch are numbered at the end of its forward, in the order of their reservations, and so is the next."""
    rig = Rig()
    for index, text in enumerate(TEXTS[:3]):
        rig.begin(f"r{index}", text)
        rig.chunk(f"r{index}")
    rig.layer(1, 1)
    rig.layer(0, 2, 0)
    assert rig.cache.state.next_number == 0
    rig.end_payload(0)
    rig.end_payload(1)
    assert rig.cache.state.next_number == 0
    rig.end_forward()
    assert [rig.op(f"r{index}").number for index in range(3)] == [0, 1, 2]
    rig.rest()


def test_a_long_prefill_does_not_hold_back_later_backups() -> None:
    """R21: a backup that was reserved first and whose forward goes on has no number yet; one that was reserved later commits."""
    rig = Rig()
    rig.begin("long", "abcdefgh")
    rig.chunk("long")
    rig.layer(0, 0)
    rig.batch = 2
    rig.serve("short", "xy")
    rig.settle()
    assert rig.state("xy") is C
    assert (rig.op("long").state, rig.op("long").number) == (L, None)
    rig.batch = 1
    rig.forward()
    rig.finish("long")
    rig.settle()
    assert rig.state("abcdefgh") is C
    rig.rest()


def test_two_failures_in_one_sample_are_applied_one_by_one() -> None:
    """R21: a tick applies up to the first failure and no further, since a second one does not show in the minimum."""
    rig = Rig()
    texts = numbered(rig, 5)
    keys = [rig.node(text).backup.key for text in texts]
    rig.fail_copies(keys[1], 0)
    rig.fail_copies(keys[3], 1)
    rig.finish_all()
    rig.tick()
    assert samples(rig) == [[(5, 1)], [(5, 3)]]
    rig.tick()
    assert rig.states(*texts) == [C, N, L, L, L]
    assert rig.cache.state.resolved == 2
    assert [issued[-1] for issued in samples(rig)] == [(5, None), (5, 3)]
    rig.tick()
    assert rig.states(*texts)[2:] == [C, N, L]
    assert rig.cache.state.resolved == 4
    rig.tick()
    assert rig.state("ij") is C
    assert rig.cache.counters.rolled_back == {"agreed_failed": 2}
    rig.rest()


def test_two_failures_of_one_rank() -> None:
    """R21: a rank that has two failures reports the second one once the first is agreed."""
    rig = Rig()
    texts = numbered(rig, 4)
    for text in texts[1:3]:
        rig.fail_copies(rig.node(text).backup.key, 1)
    rig.finish_all()
    rig.tick(2)
    assert rig.states(*texts) == [C, N, L, L]
    assert samples(rig)[1] == [(4, 1), (4, 2)]
    rig.tick(2)
    assert rig.states(*texts)[2:] == [N, C]
    rig.rest()


def test_a_failure_behind_the_count_rolls_back_and_drains_in_its_turn() -> None:
    """R21, R22: the first failure is agreed although earlier numbers are still open: it rolls back on all ranks in that tick, and ends
    when its number is passed; the sample does not report it again."""
    rig = Rig()
    texts = numbered(rig, 3)
    keys = [rig.node(text).backup.key for text in texts]
    rig.fail_copies(keys[2], 1)
    rig.tick(2)
    assert rig.states(*texts) == [L, L, B]
    assert rig.free_slots() == [58, 58]
    rig.finish_all(0)
    rig.tick(2)
    assert [issued[-1] for issued in samples(rig)] == [(3, None), (0, None)]
    assert rig.states(*texts) == [L, L, B]
    rig.finish_all()
    rig.tick(2)
    assert rig.states(*texts) == [C, C, N]
    assert rig.free_slots() == [60, 60]
    rig.rest()


def test_a_failed_operation_counts_as_finished_when_its_copies_are_drained() -> None:
    """R21: failed with copies still running, it is agreed as failed and not passed; nothing behind it is passed either."""
    rig = Rig()
    texts = numbered(rig, 2)
    key = rig.node("ab").backup.key
    rig.finish_copies(rig.node("cd").backup.key)
    rig.fail_copies(key, 0, drained=False)
    rig.finish_copies(key, 1)
    rig.tick()
    assert samples(rig) == [[(0, 0)], [(2, None)]]
    rig.tick(3)
    assert rig.states(*texts) == [B, L]
    assert rig.cache.state.resolved == 0
    rig.finish_all()
    rig.tick(2)
    assert rig.states(*texts) == [N, C]
    rig.rest()


def test_a_failure_whose_copies_go_on_is_noted_once() -> None:
    """R22, R36: a copy that failed is asked about in every tick until the others have ended; the failure is one step, not one a tick."""
    rig = Rig()
    texts = numbered(rig, 1)
    rig.fail_copies(rig.node("ab").backup.key, 0, drained=False)
    rig.tick(4)
    assert rig.states(*texts) == [B]
    assert len(rig.events("step", trigger="copy_failed")) == 1
    rig.finish_all()
    rig.tick(2)
    assert rig.states(*texts) == [N]
    assert len(rig.events("step", trigger="copy_failed")) == 1
    rig.rest()


def test_a_rank_without_slots_reports_no_copies() -> None:
    """R22, R38: a rank that lacks the slots has no copies whose end it could tell: its log has that the reservation failed, and the
    others' logs have how the copies fared, so that each can be executed again."""
    rig = Rig()
    rig.begin("r1", "ab")
    rig.local(1).fail_reserve_next = True
    rig.chunk("r1")
    rig.forward()
    rig.finish("r1")
    node = rig.node("ab").id
    rig.tick(2)
    assert rig.state("ab") is N

    def told(side: Side[FakeTransfer]) -> list[str]:
        names = ("local_reserve_failed", "copy_status")
        return [event["event"] for event in side.log.events if event["event"] in names and event["node"] == node]

    assert [told(side) for side in rig.sides] == [["copy_status"], ["local_reserve_failed"]]
    rig.rest()


def test_a_failure_before_its_number_changes_nothing() -> None:
    """R22: a copy that fails while the forward is running is not reported before the operation is numbered; the ranks go on alike."""
    rig = Rig()
    rig.hold()
    rig.begin("r1", "abcd")
    rig.chunk("r1")
    rig.local(1).fail_copy_next = True
    rig.layer(0, 0)
    rig.finish_all()
    rig.tick(3)
    assert samples(rig) == [[], []]
    assert rig.op("r1").state is L
    rig.forward()
    rig.finish_all()
    rig.insert("r1")
    rig.tick()
    assert samples(rig) == [[(1, None)], [(1, 0)]]
    rig.tick()
    assert rig.state("abcd") is N
    assert [side.tap.applied for side in rig.sides] == [[(1, 0)]] * 2
    rig.rest()


def test_copies_that_have_ended_during_the_forward_say_nothing_of_those_to_come() -> None:
    """R10, R13, R21: the copies of the layers so far have ended, and that is told early, while the forward goes on: the backup is done
    when those of the later layers have ended, too."""
    rig = Rig()
    rig.begin("r1", "ab")
    rig.chunk("r1")
    rig.layer(0, 0)
    key = rig.op("r1").key
    rig.each(lambda side: side.cache.completion(key, CopyStatus(drained=True, failed=False)))
    rig.hold()
    rig.forward()
    rig.finish("r1")
    rig.tick(3)
    assert rig.state("ab") is L
    rig.finish_all()
    rig.settle()
    assert rig.state("ab") is C
    rig.rest()


def test_a_number_is_not_passed_before_every_rank_has_finished_it() -> None:
    """R13, R21: three of four ranks are done: nothing commits for as long as the fourth is not."""
    rig = Rig(cp_size=4, usable_pages=32)
    rig.hold()
    rig.serve("r1", "abcd")
    rig.finish_all(0, 1, 3)
    rig.tick(6)
    assert rig.state("abcd") is L
    assert [issued[-1] for issued in samples(rig)] == [(1, None), (1, None), (0, None), (1, None)]
    rig.finish_all(2)
    rig.tick(2)
    assert rig.state("abcd") is C
    rig.rest()


def test_a_rank_that_owns_nothing_never_holds_the_others_back() -> None:
    """R9, R21: its sample counts an operation of which it owns nothing as finished in the first tick."""
    rig = Rig(cp_size=4, usable_pages=32)
    rig.hold()
    rig.serve("r1", "a")
    rig.tick()
    assert samples(rig) == [[(0, None)], [(1, None)], [(1, None)], [(1, None)]]
    rig.finish_all()
    rig.tick(2)
    assert rig.state("a") is C
    rig.rest()


def test_what_has_ended_everywhere_can_be_agreed_within_a_tick() -> None:
    """R21: a blocking reduction passes at once what has ended on every rank; it waits for no copy, and the next tick goes on as usual."""
    rig = Rig()
    rig.hold()
    rig.serve("r1", "ab")
    rig.serve("r2", "cd")
    tick = rig.cache.state.tick
    rig.together(lambda side: side.cache.agree_now())
    assert rig.states("ab", "cd") == [L, L]
    rig.finish_copies(rig.node("ab").backup.key)
    rig.together(lambda side: side.cache.agree_now())
    assert rig.states("ab", "cd") == [C, L]
    rig.finish_all()
    rig.together(lambda side: side.cache.agree_now())
    assert (rig.states("ab", "cd"), rig.cache.state.tick) == ([C, C], tick)
    reductions = rig.cache.counters.drain_reductions
    rig.together(lambda side: side.cache.agree_now())
    assert rig.cache.counters.drain_reductions == reductions == 3, "nothing is in flight: nothing is asked"
    rig.serve("r3", "ef")
    rig.finish_all()
    rig.tick()
    assert rig.state("ef") == L
    rig.together(lambda side: side.cache.agree_now())
    assert (rig.state("ef"), rig.cache.counters.drain_reductions) == (C, 3), "the tick's own reduction is waited for"
    rig.logs_agree()
    rig.rest()


def rests(rig: Rig) -> bool:
    return bool(rig.each(lambda side: side.cache.is_at_rest()))


def test_a_cache_in_which_nothing_would_happen_is_at_rest() -> None:
    """R36: with a request, a copy in flight, or a refused node that has room now, a tick has something to do; else it may be left out."""
    rig = Rig(host_slots=4)
    assert rests(rig)
    rig.hold()
    rig.begin("r1", "ab")
    assert not rests(rig), "a request runs"
    rig.abort("r1")
    assert rests(rig)
    rig.serve("r2", "ab")
    rig.serve("r3", "cdef")
    assert not rests(rig), "a copy is in flight"
    rig.finish_all()
    rig.settle()
    assert (rig.states("ab", "cdef"), rests(rig)) == ([C, N], True)
    rig.begin("r4", "gh")
    rig.chunk("r4")
    rig.abort("r4")
    rig.forward()
    assert not rests(rig), "host slots were freed: the refused node is to be tried again"
    rig.tick()
    assert rests(rig)
    rig.each(lambda side: side.cache.pin_host(rig.key("ab"), 2))
    assert not rests(rig), "a pin is to end"
    rig.tick(2)
    assert rests(rig)
    rig.rest()


def test_a_cache_is_not_at_rest_before_all_have_ended_who_use_it() -> None:
    """R36: a forward that outlives its request, a deferred request that may come back, and a load-back that nobody has been admitted on
    yet are something in flight, or somebody who waits."""
    rig = Rig()
    rig.begin("r1", "ab")
    rig.chunk("r1")
    rig.abort("r1")
    assert not rests(rig), "its forward goes on"
    rig.end_forward()
    assert rests(rig)
    rig.hold()
    rig.serve("r2", "mn")
    assert not rig.begin("waits", "mx")
    rig.finish_all()
    rig.settle()
    assert not rests(rig), "it was woken, and has not come yet"
    rig.abort("waits")
    assert rests(rig)
    rig.evict(4)
    assert len(ask_load(rig, "nobody yet", "mn").pages) == 2
    assert not rests(rig), "a load-back is in flight"
    rig.start_loads()
    rig.finish_all()
    rig.settle()
    assert rests(rig)
    rig.rest()
