"""From the queued load-back to its acknowledgement: pins, producers, readers (R25, R21)."""

from __future__ import annotations

import pytest

from cphicache.agree.port import NO_FAILURE
from cphicache.engine import WriteBackShort, WritePolicy
from cphicache.lifecycle import State
from tests.engine.rig import Rig
from tests.engine.rig_extra import ALL_TOKENS, ask_load, back_up, frozen, host_only_slots, load_of, queued_pages, to_host

L, C = State.LAYERS_IN_FLIGHT, State.COMMITTED


def waits(rig: Rig) -> list[tuple[object, ...]]:
    """(producer, payload, layer) of every wait that the forward was given, forgotten afterwards."""
    found = [side.transfer.called("wait_layer") for side in rig.sides]
    assert all(each == found[0] for each in found)
    for side in rig.sides:
        side.transfer.calls.clear()
    return found[0]


def read_layers(rig: Rig) -> None:
    """What the current batch's forward waits for before each layer."""
    for name, layers in rig.config.payloads:
        for layer in range(layers):
            rig.each(lambda side, name=name, layer=layer: side.cache.wait_layer(rig.batch, name, layer))  # type: ignore[misc]


def layers_of(producer: int) -> list[tuple[object, ...]]:
    return [
        (producer, "target", 0),
        (producer, "target", 1),
        (producer, "target", 2),
        (producer, "draft", 0),
        (producer, "draft", 1),
    ]


def test_nothing_queued_starts_nothing() -> None:
    """R25: with nothing queued there is no producer (-1), and every start of something has an index of its own."""
    rig = Rig()
    to_host(rig, "ab", "pq", "mn")

    def start() -> int:
        return rig.each(lambda side: side.cache.start_loads())

    assert start() == -1
    ask_load(rig, "one", "ab")
    ask_load(rig, "two", "pq")
    first = start()
    assert first >= 0
    assert [load_of(rig, load).producer for load in (1, 2)] == [first, first], "one producer for each batch"
    assert start() == -1
    ask_load(rig, "three", "mn")
    assert start() == first + 1
    rig.settle()
    assert start() == -1
    rig.rest()


def test_queued_means_published_locked_and_not_started() -> None:
    """R25: a load-back only queues: no copy starts before the batch is ready. Its nodes are published at once, under a lock that is
    held to the acknowledgement, and their host copies are pinned as long."""
    rig = Rig()
    to_host(rig, "ab", "abcd")
    assert host_only_slots(rig) == [4, 4]
    rig.hold()
    answer = ask_load(rig, "asks", "abcd")
    nodes = [rig.node("ab"), rig.node("abcd")]
    assert [page for node in nodes for page in node.pages or ()] == answer.pages
    assert [(node.lock_ref, node.host_ref, node.loading) for node in nodes] == [(1, 1, 1)] * 2
    assert rig.states("ab", "abcd") == [C, C]
    assert host_only_slots(rig) == [0, 0]
    assert rig.match("abcd").device_pages == answer.pages
    assert load_of(rig, 1).producer is None
    assert not any(side.transfer.in_flight() for side in rig.sides)
    rig.tick(3)
    assert load_of(rig, 1).number == rig.cache.state.resolved, "numbered when queued, and nobody passes what has not started"
    rig.start_loads()
    rig.tick(2)
    assert rig.evict(ALL_TOKENS).num_tokens_evicted == 0
    rig.finish_all()
    rig.tick()
    assert nodes[1].lock_ref == 1, "sampled, not yet applied"
    rig.tick()
    assert [(node.lock_ref, node.host_ref, node.loading) for node in nodes] == [(0, 0, None)] * 2
    assert not rig.cache.state.loads
    assert [side.transfer.called("end_load") for side in rig.sides] == [[(1,)]] * 2
    assert rig.evict(ALL_TOKENS).num_tokens_evicted == 8
    rig.rest()


def test_a_zero_owned_rank_acknowledges() -> None:
    """R25, R4: a rank that owns nothing of a load-back copies nothing and acknowledges it; the others decide when it ends."""
    rig = Rig(cp_size=4)
    to_host(rig, "a", owners=[0])
    rig.hold()
    answer = ask_load(rig, "asks", "a")
    assert len(answer.pages) == 1
    rig.start_loads()
    assert [side.transfer.in_flight() for side in rig.sides] == [[1], [], [], []]
    assert rig.local(3).load_status(1).drained
    rig.tick(3)
    assert rig.cache.state.loads
    rig.finish_all()
    rig.tick(2)
    assert not rig.cache.state.loads
    assert [side.tap.applied[-1] for side in rig.sides] == [(2, None)] * 4
    rig.rest()


def test_every_batch_that_reads_a_loading_node_waits_for_its_layers() -> None:
    """R25: the batch that brought the load, and any later one that reads its nodes before the acknowledgement, wait layer by layer for
    its producer; a batch that reads other nodes waits for nothing, and after the acknowledgement nobody does."""
    rig = Rig()
    to_host(rig, "abcd", "pq")
    rig.hold()
    assert rig.begin("brings", "abcdx")
    rig.chunk("brings")
    rig.start_loads()
    waits(rig)
    read_layers(rig)
    assert waits(rig) == layers_of(0)
    rig.forward()
    assert rig.begin("reads", "abcdy")
    assert rig.row("reads")[:4] == rig.row("brings")[:4]
    assert rig.begin("inside", "abz")
    for rid in ("reads", "inside"):
        rig.chunk(rid)
    read_layers(rig)
    assert waits(rig) == layers_of(0)
    rig.end_forward()
    rig.abort("reads")
    rig.abort("inside")
    assert rig.begin("other", "xy")
    rig.chunk("other")
    read_layers(rig)
    assert waits(rig) == []
    rig.abort("other")
    rig.end_forward()
    rig.finish_all()
    rig.settle()
    assert rig.begin("late", "abcdy")
    rig.chunk("late")
    read_layers(rig)
    assert waits(rig) == []
    rig.rest()


def test_an_insert_past_a_loading_node_waits_for_the_acknowledgement() -> None:
    """R25, R17: KV that was computed on a load in flight is not inserted before the load is agreed: a running request's insert is
    declined, a finished one's parked, without anybody to wait for but the load."""
    rig = Rig()
    to_host(rig, "abcd")
    rig.hold()
    assert rig.begin("runs", "abcdx")
    assert rig.begin("ends", "abcdy")
    for rid in ("runs", "ends"):
        rig.chunk(rid)
    rig.start_loads()
    rig.forward()
    assert rig.insert("runs") is None
    assert not rig.finish("ends")
    assert not rig.cache.state.waiters
    assert [(e["load"], e["reason"]) for e in rig.events("insert_declined")] == [(1, "load_in_flight")] * 2
    assert rig.tick(3).inserted == []
    assert len(rig.events("insert", request="ends")) == 1, "nor is it tried"
    for side in rig.sides:
        if 1 in side.transfer.in_flight():
            side.transfer.finish(1)
    rig.tick()
    assert rig.tick().inserted == ["ends"]
    assert rig.insert("runs") is not None
    rig.finish_all()
    rig.settle()
    assert rig.states("abcdx", "abcdy") == [C, C]
    rig.rest()


def test_a_computed_prefix_waits_for_somebody_elses_load() -> None:
    """R17, R25: a request that computed what another has begun to load meanwhile inserts only behind that load, and frees its
    duplicates then, once."""
    rig = Rig(load_back_threshold=6)
    to_host(rig, "abcd")
    assert rig.begin("computes", "ab")  # too little to be promised
    rig.chunk("computes")
    rig.hold()
    assert rig.begin("loads", "abcd")
    rig.start_loads()
    rig.forward()
    assert rig.insert("computes") is None
    free = sum(rig.cache.state.alloc.lane_free())
    assert not rig.finish("computes")
    rig.finish_all()
    rig.tick()
    assert rig.tick().inserted == ["computes"]
    assert sum(rig.cache.state.alloc.lane_free()) == free + 2
    assert rig.node("abcd").length_pages == 4, "the key lies inside the node: nothing is divided"
    rig.rest()


def test_a_load_back_under_a_load_back() -> None:
    """R25: what hangs on a loading node can be loaded behind it; its reader waits for both producers, and both are agreed in order."""
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
    assert sorted(rig.cache.state.requests["lower"].loads) == [1, 2]
    waits(rig)
    read_layers(rig)
    assert sorted(waits(rig)) == sorted(layers_of(0) + layers_of(1))
    rig.forward()
    assert [load_of(rig, load).pages for load in (1, 2)] == [2, 2]
    assert (rig.node("ab").lock_ref, rig.node("abcd").lock_ref) == (4, 2)
    for side in rig.sides:
        side.transfer.finish(2)
    rig.tick(3)
    assert rig.cache.state.loads.keys() == {1, 2}, "the upper one comes first in the sequence"
    rig.finish_all()
    rig.tick(2)
    assert not rig.cache.state.loads
    assert rig.finish("upper")
    assert rig.finish("lower")
    rig.settle()
    assert rig.states("abx", "abcdy") == [C, C]
    rig.rest()


def test_pins_outlive_host_eviction_pressure() -> None:
    """R25, R16: while a load-back is in flight its host copies are no victims, not even of a reclaim; afterwards they may be."""
    rig = Rig(cp_size=1, host_slots=8, usable_pages=16, reclaim_device_valid=True)
    to_host(rig, "abcd")
    rig.hold()
    ask_load(rig, "asks", "abcd")
    rig.start_loads()
    rig.serve("wants", "pq")
    assert rig.cache.counters.refused["no_host_slots"] >= 1
    assert rig.state("abcd") is C
    rig.hold(False)
    rig.finish_all()
    rig.settle()
    rig.serve("wants again", "mn")
    rig.settle()
    assert rig.state("mn") is C
    assert rig.state("abcd") is State.DEVICE_VALID_HOST_NONE, "reclaimed"
    rig.rest()


def test_the_chain_is_pinned_before_anything_is_evicted() -> None:
    """R25: an eviction that a load-back calls for may write other nodes back, for which host copies must go: never those that are about
    to be loaded, although they are the least recently used."""
    rig = Rig(
        ranks=[0],
        cp_size=1,
        policy=WritePolicy.WRITE_BACK,
        write_back_short=WriteBackShort.WAIT,
        usable_pages=8,
        host_slots=8,
    )
    rig.serve("one", "ab")
    rig.serve("two", "pq")
    rig.evict(ALL_TOKENS)
    assert rig.states("ab", "pq") == [C, C]
    assert rig.free_slots() == [0]
    rig.serve("fills", "mnopqrst")
    assert rig.cache.available_size() == 0
    answer = ask_load(rig, "asks", "ab")
    assert len(answer.pages) == 2
    assert rig.state("ab") is C
    assert not rig.has("pq") or rig.node("pq").pages is None
    assert rig.cache.counters.load_backs_under_eviction == 1
    rig.start_loads()
    rig.settle()
    rig.rest()


@pytest.mark.parametrize("asked", ["ab", "abcd", "abcde"])
def test_a_partly_matched_chain_is_loaded_up_to_the_match(asked: str) -> None:
    """R25, R24: a chain whose last node is matched in part is loaded up to the match: that node is divided and its tail stays host-only."""
    rig = Rig()
    to_host(rig, "abc", "abcdef")
    answer = ask_load(rig, "asks", asked)
    assert len(answer.pages) == len(asked)
    assert rig.node(asked).pages is not None
    assert rig.node("abcdef").pages is None
    assert rig.states("abc", "abcdef", asked) == [C, C, C]
    assert sum(len(pages) for _, pages in queued_pages(rig.sides[0])) == len(asked)
    rig.start_loads()
    rig.settle()
    rig.evict(ALL_TOKENS)
    assert len(ask_load(rig, "again", "abcdef").pages) == 6
    rig.start_loads()
    rig.settle()
    rig.rest()


def test_loads_and_backups_share_one_sequence() -> None:
    """R21, R25: a load-back is numbered when queued, in one sequence with the backups, and passes in that order only."""
    rig = Rig()
    to_host(rig, "ab")
    back_up(rig, "pq")
    base = rig.cache.state.next_number
    rig.hold()
    rig.serve("before", "mn")
    ask_load(rig, "asks", "ab")
    rig.start_loads()
    rig.serve("after", "xy")
    assert [rig.node("mn").backup.number, load_of(rig, 1).number, rig.node("xy").backup.number] == [base, base + 1, base + 2]
    rig.finish_copies(rig.node("xy").backup.key)
    for side in rig.sides:
        side.transfer.finish(1)
    rig.tick(3)
    assert rig.cache.state.loads.keys() == {1}
    assert rig.states("mn", "xy") == [L, L]
    rig.finish_all()
    rig.tick(2)
    assert not rig.cache.state.loads
    assert rig.states("mn", "xy") == [C, C]
    rig.rest()


def test_asking_how_copies_fare_changes_nothing_while_they_go_on() -> None:
    """R20, R25: a sample that finds a load-back in flight leaves the rank as it was: nobody has failed before somebody says so."""
    rig = Rig()
    to_host(rig, "ab")
    rig.hold()
    ask_load(rig, "asks", "ab")
    rig.start_loads()
    before = frozen(rig)
    for side in rig.sides:
        assert side.cache._agreement.sample() == (load_of(rig, 1).number, NO_FAILURE)
    assert frozen(rig) == before
    rig.finish_all()
    rig.settle()
    rig.rest()
