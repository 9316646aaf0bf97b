"""Layer by layer: which backups a report submits, how often, and what happens to layers that nobody reported."""

from __future__ import annotations

from itertools import permutations

import pytest

from cphicache.events import Level
from cphicache.lifecycle import Trigger
from cphicache.transfer.port import OpKey
from tests.engine.rig import B, C, L, N, Rig
from tests.engine.rig_extra import back_up


def submissions(rig: Rig, rank: int = 0) -> list[tuple[tuple[int, ...], str, tuple[int, ...]]]:
    """(nodes, payload, layers) of each submission so far."""
    found = []
    for ops, payload, layers in rig.local(rank).called("submit_layers"):
        assert isinstance(ops, tuple)
        assert isinstance(payload, str)
        assert isinstance(layers, tuple)
        found.append((tuple(op.node for op in ops if isinstance(op, OpKey)), payload, layers))
    return found


ALL_LAYERS = [("target", (0,)), ("target", (1,)), ("target", (2,)), ("draft", (0,)), ("draft", (1,))]


def test_each_layer_is_submitted_when_it_was_stored() -> None:
    """R10: one submission a layer and payload, at its report: target layers in the target's pass, draft layers in the draft's own."""
    rig = Rig()
    rig.hold()
    rig.begin("r1", "ab")
    rig.chunk("r1")
    node = rig.op("r1").node_id
    for payload, layers in enumerate((3, 2)):
        for layer in range(layers):
            done = len(submissions(rig))
            rig.layer(payload, layer)
            assert submissions(rig)[done:] == [((node,), ("target", "draft")[payload], (layer,))]
        rig.end_payload(payload)
    rig.end_forward()
    assert [(payload, layers) for _, payload, layers in submissions(rig)] == ALL_LAYERS
    assert rig.cache.counters.stale == {}
    rig.rest()


@pytest.mark.parametrize("layers", [1, 3, 12])
def test_one_acknowledgement_a_node_however_many_layers(layers: int) -> None:
    """R10, R13: however many layers and payloads, a node's copies are confirmed once, agreed once and committed once."""
    rig = Rig(payloads=(("target", layers), ("draft", layers)))
    rig.hold()
    rig.serve("r1", "ab")
    rig.tick(3)
    assert rig.state("ab") is L
    rig.finish_all()
    rig.tick(4)
    node = rig.node("ab").id
    for trigger in ("copy_done", "agreed"):
        assert len(rig.events("step", node=node, trigger=trigger)) == 1
    assert len(rig.local(0).called("commit")) == 1
    assert rig.cache.counters.committed == 1
    stored = [event for event in rig.cache.take_events() if event.stored and event.medium == "host"]
    assert [(event.node, event.pages) for event in stored] == [(node, 2)]
    rig.rest()


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_layers_in_any_order(order: tuple[int, ...]) -> None:
    """R11: layers are submitted in the order in which they were reported, and the backup commits whatever that order is."""
    rig = Rig()
    rig.begin("r1", "ab")
    rig.chunk("r1")
    rig.layer(0, *order)
    rig.layer(1, 1, 0)
    rig.end_payload(0)
    rig.end_payload(1)
    rig.end_forward()
    assert [layers for _, _, layers in submissions(rig)] == [(layer,) for layer in (*order, 1, 0)]
    rig.insert("r1")
    rig.settle()
    assert rig.state("ab") is C
    rig.rest()


def test_a_layer_reported_twice_is_copied_once() -> None:
    """R11: the second report is a logged and counted no-op."""
    rig = Rig()
    rig.begin("r1", "ab")
    rig.chunk("r1")
    node = rig.op("r1").node_id
    rig.layer(0, 0, 1, 0, 0)
    assert [layers for _, _, layers in submissions(rig)] == [(0,), (1,)]
    assert rig.cache.counters.stale == {"layer_twice": 2}
    assert len(rig.events("step", node=node, trigger="layer_stored", stale="layer_twice")) == 2
    rig.forward()  # reports 0 and 1 once more
    assert [(payload, layers) for _, payload, layers in submissions(rig)] == ALL_LAYERS
    rig.insert("r1")
    rig.settle()
    assert rig.state("ab") is C
    rig.rest()


@pytest.mark.parametrize("reported", [(), (1,), (0, 2)])
def test_layers_that_nobody_reported_are_submitted_at_the_end_of_their_forward(reported: tuple[int, ...]) -> None:
    """R11: missing target layers go at the end of the target's forward, missing draft layers at the end of the draft's, not earlier."""
    rig = Rig()
    rig.begin("r1", "ab")
    rig.chunk("r1")
    rig.layer(0, *reported)
    done = len(submissions(rig))
    rig.end_payload(0)
    missing = tuple(layer for layer in range(3) if layer not in reported)
    assert [(payload, layers) for _, payload, layers in submissions(rig)[done:]] == [("target", missing)]
    assert rig.op("r1").watermarks() == [(3, 0), (0, 0)]
    rig.end_payload(1)
    assert [(payload, layers) for _, payload, layers in submissions(rig)[done + 1 :]] == [("draft", (0, 1))]
    rig.end_forward()
    rig.insert("r1")
    rig.settle()
    assert rig.state("ab") is C
    rig.rest()


@pytest.mark.parametrize("missing", [(0,), (2, 3), (1, 4), (2, 5), (1, 2, 5), (0, 1, 2, 3, 4, 5)])
def test_exactly_the_layers_that_nobody_reported_are_submitted(missing: tuple[int, ...]) -> None:
    """R11: whether they are neighbours or not, one submission has all of them and no other, in ascending order."""
    rig = Rig(payloads=(("target", 6), ("draft", 2)))
    rig.begin("r1", "ab")
    rig.chunk("r1")
    rig.layer(0, *(layer for layer in range(6) if layer not in missing))
    done = len(submissions(rig))
    rig.end_payload(0)
    assert [layers for _, _, layers in submissions(rig)[done:]] == [missing]
    rig.forward()
    rig.insert("r1")
    rig.settle()
    assert rig.state("ab") is C
    rig.rest()


def test_without_overlap_all_layers_go_after_their_forward() -> None:
    """R11: with overlap off, reports are ignored and each payload's layers go as one submission at the end of its forward."""
    rig = Rig(overlap=False)
    rig.begin("r1", "ab")
    rig.chunk("r1")
    rig.layer(0, 0, 1, 2)
    assert submissions(rig) == []
    rig.forward()
    assert [(payload, layers) for _, payload, layers in submissions(rig)] == [("target", (0, 1, 2)), ("draft", (0, 1))]
    rig.insert("r1")
    rig.settle()
    assert rig.state("ab") is C
    rig.rest()


@pytest.mark.parametrize("draft_layers", [0, 1])
def test_no_draft_forward_means_rollback(draft_layers: int) -> None:
    """R11: target KV without all of the draft's is never committed: the backup rolls back, and its slots return once it has drained."""
    rig = Rig()
    rig.hold()
    rig.begin("r1", "ab")
    rig.chunk("r1")
    rig.layer(0, 0, 1, 2)
    rig.end_payload(0)
    rig.layer(1, *range(draft_layers))
    rig.end_forward()
    op = rig.op("r1")
    assert (op.state, op.number) == (B, 0)
    rig.tick(2)
    assert op.state is B
    assert rig.free_slots() == [62, 62]
    rig.finish_all()
    rig.tick(2)
    assert op.state is N
    assert rig.free_slots() == [64, 64]
    assert rig.cache.counters.committed == 0
    assert all(not side.transfer.called("commit") for side in rig.sides)
    rig.rest()


def test_a_forward_that_stored_nothing_gives_its_reservations_back_at_once() -> None:
    """R11, R14: with no layer of any payload submitted there is nothing to drain and no number to take."""
    rig = Rig()
    rig.begin("r1", "ab")
    rig.chunk("r1")
    op = rig.op("r1")
    rig.end_forward()
    assert (op.state, rig.cache.state.next_number) == (N, 0)
    assert rig.free_slots() == [64, 64]
    rig.rest()


def test_a_report_names_its_batch() -> None:
    """R10: a layer is submitted for exactly the backups of its batch, in one submission for all of them; not for an earlier batch's,
    bound or not, and with no pending backup in the batch the hook does nothing."""
    rig = Rig()
    rig.hold()
    rig.begin("r0", "xy")
    rig.chunk("r0")
    rig.forward()
    rig.begin("r1", "ab")
    rig.begin("r2", "cd")
    rig.chunk("r1")
    rig.chunk("r2")
    first, second = rig.op("r1").node_id, rig.op("r2").node_id
    done = len(submissions(rig))
    rig.forward()
    assert submissions(rig)[done:] == [((first, second), *each) for each in ALL_LAYERS]
    done = len(submissions(rig))
    rig.forward()  # of a batch that backs up nothing
    assert submissions(rig)[done:] == []
    rig.rest()


def test_reports_after_the_end_are_ignored() -> None:
    """R11: a report of a batch that has ended submits nothing and changes nothing."""
    rig = Rig()
    rig.begin("r1", "ab")
    rig.chunk("r1")
    rig.layer(0, 0)
    rig.end_forward()
    done = len(submissions(rig))
    rig.batch -= 1
    rig.layer(0, 1, 2)
    rig.end_payload(1)
    rig.end_forward()
    assert submissions(rig)[done:] == []
    rig.rest()


def test_stored_kv_goes_the_same_way_with_all_layers_at_once() -> None:
    """R11: a backup of KV that is stored already is one submission of all layers for each payload, and takes its number at once."""
    rig = Rig(policy="write_through_selective")
    rig.hold()
    rig.serve("r1", "ab")
    rig.serve("r2", "ab")
    node = rig.node("ab").id
    assert submissions(rig) == [((node,), "target", (0, 1, 2)), ((node,), "draft", (0, 1))]
    assert (rig.state("ab"), rig.node("ab").backup.number) == (L, 0)
    rig.finish_all()
    rig.tick(2)
    assert rig.state("ab") is C
    rig.rest()


def test_kv_without_draft_never_enters_the_tree() -> None:
    """R5, R11: no draft forward comes for a batch: its backup rolls back, its KV is never inserted, hit, backed up or leaked."""
    rig = Rig()
    assert rig.begin("r0", "abcd")
    rig.reserve("r0")
    rig.layer(0, *range(3))
    rig.end_payload(0)
    rig.end_forward()
    rig.insert("r0")
    assert rig.match("abcd").device_pages == []
    rig.settle()
    assert rig.each(lambda side: side.cache.counters.committed) == 0
    assert rig.finish("r0")
    assert rig.match("abcd").device_pages == []
    rig.rest()


def test_reports_are_counted_alike_without_a_log() -> None:
    """R11, R36: without a log the same layers are submitted for the same backups, and what is reported twice is counted as with one."""
    rigs = [Rig(level=level) for level in (Level.OPS, Level.OFF)]
    for rig in rigs:
        for rid, text in {"r1": "ab", "r2": "cd"}.items():
            assert rig.begin(rid, text)
            rig.chunk(rid)
        rig.layer(0, 0, 1, 0, 0)
        rig.abort("r1")
        rig.layer(0, 2)
    logged, plain = rigs
    assert submissions(plain) == submissions(logged)
    assert plain.cache.counters.stale == logged.cache.counters.stale == {"layer_twice": 4}
    for rig in rigs:
        rig.end_forward()
        rig.rest()


@pytest.mark.parametrize(("reported", "whole"), [((0, 1, 2), True), ((1, 2), False), ((0, 2), False), ((0, 1), False)])
def test_kv_is_whole_when_each_of_its_layers_was_reported(reported: tuple[int, ...], whole: bool) -> None:
    """R5, R11: of a payload whose forward nobody has ended, the layers that were reported decide: all of them are enough for the tree,
    and no other one stands for one that is missing."""
    rig = Rig()
    assert rig.begin("r1", "ab")
    rig.chunk("r1")
    rig.layer(0, *reported)
    rig.end_payload(1)
    rig.end_forward()
    assert rig.finish("r1")
    rig.settle()
    assert rig.has("ab") is whole
    assert rig.cache.counters.committed == whole
    rig.rest()


@pytest.mark.parametrize("level", [Level.OPS, Level.OFF])
def test_whoever_comes_too_late_is_told_so(level: Level) -> None:
    """R18, R36: a step that comes too late is counted by its name, one that is taken is not, with a log and without."""
    rig = Rig(level=level)
    back_up(rig, "ab")
    record = rig.node("ab").backup
    rig.cache._backups.fire(record, Trigger.ABORT)
    assert rig.cache.counters.stale == {"already_committed": 1}
    rig.cache._backups.fire(record, Trigger.HIT)
    assert rig.cache.counters.stale == {"already_committed": 1}


@pytest.mark.parametrize("layers", range(1, 13))
def test_victims_are_looked_for_anew_after_any_number_of_steps(layers: int) -> None:
    """R16, R36: a node that found neither room nor victims is backed up as soon as there is a victim, however many layers have been
    reported in between; without a log, too."""
    rig = Rig(ranks=[0], cp_size=1, host_slots=8, level=Level.OFF, payloads=(("target", 12),), max_retries=0)
    back_up(rig, "ab")
    assert rig.begin("runs", "xy")
    rig.chunk("runs")
    runs, rig.batch = rig.batch, rig.batch + 1
    rig.serve("refused", "cd")
    assert rig.state("cd") is N
    rig.evict(4)
    after, rig.batch = rig.batch, runs
    rig.layer(0, *range(layers))
    rig.batch = after
    rig.tick()
    rig.serve("again", "cd")
    rig.settle()
    assert rig.state("cd") is C
    assert not rig.has("ab")
    rig.batch = runs
    rig.end_forward()
    rig.abort("runs")
    rig.settle()
    rig.rest()
