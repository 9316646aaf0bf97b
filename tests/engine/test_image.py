"""The engine's state as plain data: nothing is forgotten, nothing is shared, and what is equal from here on compares equal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any, NoReturn

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cphicache.agree.local import InProcessGroup
from cphicache.engine import CacheConfig, CpHiRadixCache, TickReport, WriteBackShort, WritePolicy
from cphicache.engine.canonical import Outlook
from cphicache.engine.image import Image
from cphicache.engine.records import Backup, Batch, Load, LoadState, Parked, Pin, Request, Waiter
from cphicache.engine.state import CacheState
from cphicache.events import EventLog, EventLogError, Level
from cphicache.events.render import StepRecord
from cphicache.lifecycle import State
from cphicache.spaces.types import LogicalPage
from cphicache.transfer.port import OpKey
from cphicache.tree import RadixKey
from tests.engine.rig import Rig
from tests.engine.rig_extra import to_host
from tests.engine.small_scheduler import Loopback, SmallScheduler, Step, small_config
from tests.engine_fakes import FakeTransfer

FREQUENT = ("tick", "admit", "forward", "results") * 5 + ("chunk",) * 3 + ("evict",) * 2
steps = st.lists(st.tuples(st.sampled_from(FREQUENT + SmallScheduler.STEPS), st.integers(0, 255)), max_size=40)
configs = st.builds(
    small_config,
    policy=st.sampled_from((*[WritePolicy.WRITE_THROUGH] * 2, *WritePolicy)),
    eviction_policy=st.sampled_from(("lru", "lfu", "fifo", "mru", "priority")),
    reclaim_device_valid=st.booleans(),
    overlap=st.booleans(),
    write_back_short=st.sampled_from(WriteBackShort),
    host_slots=st.sampled_from((4, 8, 16)),
)


# -- there and back -----------------------------------------------------------------------------------------------------------------
@settings(derandomize=True, max_examples=120, deadline=None)
@given(configs, steps, steps)
def test_a_restored_engine_goes_on_alike(config: CacheConfig, before: list[Step], after: list[Step]) -> None:
    """R20: from a snapshot on, equal calls give equal answers, port calls, events and states, in a new engine and in the same one."""
    live = SmallScheduler(config)
    live.run(before)
    image, around, canonical = live.cache.snapshot(), live.save(), live.cache.canonical()
    answers = live.run(after)
    reached, reached_canonical = live.cache.snapshot(), live.cache.canonical()
    for other in (SmallScheduler(config), live):
        other.cache.restore(image)
        other.load(around)
        assert other.cache.snapshot() == image
        assert other.cache.canonical() == canonical
        assert other.run(after) == answers
        assert other.cache.snapshot() == reached
        assert other.cache.canonical() == reached_canonical
    live.end()


@settings(derandomize=True, max_examples=40, deadline=None)
@given(configs, steps, steps)
def test_an_image_is_plain_and_shares_nothing(config: CacheConfig, before: list[Step], after: list[Step]) -> None:
    """R20: an image holds plain data only; neither the engine it was taken of nor one restored from it can change it, nor it them."""
    live = SmallScheduler(config)
    live.run(before)
    image, around = live.cache.snapshot(), live.save()
    text = repr(image)
    assert {type(leaf) for leaf in leaves(image)} <= {int, bool, str, bytes, type(None)}
    live.run(after)
    assert repr(image) == text
    twin = SmallScheduler(config)
    twin.cache.restore(image)
    twin.load(around)
    untouched = twin.cache.snapshot()
    for container in containers(image):
        container.clear()
    assert twin.cache.snapshot() == untouched
    assert repr(untouched) == text


def leaves(data: Any) -> Iterator[Any]:
    if isinstance(data, dict):
        data = [item for pair in data.items() for item in pair]
    if isinstance(data, (tuple, list)):
        for item in data:
            yield from leaves(item)
    else:
        yield data


def containers(data: Any) -> list[Any]:
    found: list[Any] = []
    for item in data.values() if isinstance(data, dict) else data if isinstance(data, (tuple, list)) else ():
        found.extend(containers(item))
    return [*found, data] if isinstance(data, (dict, list)) else found


def test_an_image_of_another_configuration_is_refused() -> None:
    """R35: an image is restored into an engine of an equal configuration only; the refusal changes nothing."""
    live = SmallScheduler(small_config())
    live.run([("admit", 9), ("forward", 2)])
    other = SmallScheduler(small_config(max_retries=9))
    other.run([("admit", 1)])
    before = other.cache.snapshot()
    with pytest.raises(ValueError, match="restore into its like"):
        other.cache.restore(live.cache.snapshot())
    assert other.cache.snapshot() == before


def test_host_copies_are_reclaimed_after_a_restore_as_before() -> None:
    """R16: what may be reclaimed is found again after a restore, in a new engine and in one that has gone on since."""
    live = SmallScheduler(small_config(host_slots=4, reclaim_device_valid=True))
    live.run([("admit", 2), ("forward", 2), ("results", 1), ("tick", 1), ("tick", 1)])
    image, around = live.cache.snapshot(), live.save()
    more: list[Step] = [("admit", 0b111010), ("forward", 2), ("results", 1), ("tick", 1), ("tick", 1)]
    answers = live.run(more)
    assert len(live.local.called("free_node")) == live.cache.counters.reclaims == 1
    for other in (SmallScheduler(live.config), live):
        other.cache.restore(image)
        other.load(around)
        assert other.run(more) == answers
        other.end()


class Breaking(FakeTransfer):
    """Its next release raises, once."""

    breaks = False

    def release(self, op: OpKey) -> None:
        if self.breaks:
            self.breaks = False
            raise RuntimeError("released badly")
        super().release(op)


def test_what_a_broken_call_left_queued_does_not_reach_the_restored_state() -> None:
    """R18: an error between the steps that follow from a rollback leaves no step of the abandoned state for the restored one."""
    config = small_config()
    local = Breaking(config)
    live = SmallScheduler(config, local)
    live.run([("admit", 3), ("forward", 0), ("results", 0)])  # the first page of a request is copied, ...
    live.run([("chunk", 0), ("admit", 0b10011)])  # ... and two extents are reserved behind it
    records = list(live.cache.state.pending.values())
    assert [record.state for record in records] == [State.LAYERS_IN_FLIGHT, State.RESERVED, State.RESERVED]
    assert all(record.parent is records[0] for record in records[1:])
    failing: list[Step] = [("tick", 3), ("tick", 0), ("tick", 0)]
    image, around = live.cache.snapshot(), live.save()
    answers = live.run(failing)
    reached = live.cache.snapshot()
    for breaks in (True, False):
        live.cache.restore(image)
        live.load(around)
        local.breaks = breaks
        if breaks:
            with pytest.raises(RuntimeError, match="released badly"):
                live.run(failing)
    assert live.run(failing) == answers
    assert live.cache.snapshot() == reached
    live.end()


def raises(error: Exception) -> Callable[..., NoReturn]:
    def call(*_: object) -> NoReturn:
        raise error

    return call


class BreakingLog(EventLog):
    """Its next step event raises, once: as when the log's file cannot be written any more."""

    breaks = False

    def add(self, record: StepRecord) -> None:
        if self.breaks:
            self.breaks = False
            raise EventLogError("no space left")
        super().add(record)


def test_layers_that_a_broken_call_left_queued_are_not_submitted_after_a_restore() -> None:
    """R10, R18: an error between a layer's report and the submission of its copies leaves nothing of the abandoned state to be
    submitted with the restored one's."""
    config = small_config()
    live, log = SmallScheduler(config), BreakingLog(None, rank=0, level=Level.OPS, wall_clock=None, header={})
    live.cache = CpHiRadixCache(config, live.local, live.reducer, log)
    live.run([("admit", 3)])
    more: list[Step] = [("forward", 1), ("results", 1), ("tick", 1), ("tick", 1)]
    image, around = live.cache.snapshot(), live.save()
    answers = live.run(more)
    for breaks in (True, False):
        live.cache.restore(image)
        live.load(around)
        log.breaks = breaks
        if breaks:
            with pytest.raises(EventLogError, match="no space left"):
                live.run(more)
    assert live.run(more) == answers
    live.end()


def test_victims_that_a_broken_call_has_planned_are_not_taken_after_a_restore(monkeypatch: pytest.MonkeyPatch) -> None:
    """R16, R18: an error while room is made leaves nothing of the abandoned state: the next reservation looks for victims of its own."""
    rig = Rig(ranks=[0], cp_size=1, host_slots=4)
    to_host(rig, "ab")
    assert rig.begin("needs", "xy")
    rig.grow("needs")
    image = rig.cache.snapshot()
    monkeypatch.setattr(rig.local(0), "free_node", raises(RuntimeError("freed badly")))
    with pytest.raises(RuntimeError, match="freed badly"):
        rig.reserve("needs")
    monkeypatch.undo()
    rig.cache.restore(image)
    assert rig.reserve("needs")
    assert not rig.has("ab")
    rig.rest()


def test_a_backup_whose_node_was_removed_is_restored_without_it() -> None:
    """R18, R20: a batch goes on with a reservation that was rolled back, whose node has been evicted since."""
    rig = Rig(ranks=[0], cp_size=1)
    assert rig.begin("r", "ab")
    rig.chunk("r")
    rig.insert("r", chunked=True)
    rig.each(lambda side: side.cache.reset_backups())
    rig.abort("r")
    rig.evict(4)
    image = rig.cache.snapshot()
    assert (len(rig.cache.batch(rig.batch).ops), rig.cache.state.tree.node_count) == (1, 0)
    rig.cache.restore(image)
    assert rig.cache.snapshot() == image
    rig.forward()
    rig.rest()


# -- relative form --------------------------------------------------------------------------------------------------------------------
def warm_up(live: SmallScheduler, times: int) -> None:
    """Back up, evict, load and flush; all device pages have come and gone each time."""
    cache = live.cache
    for turn in range(times):
        rid, key = f"warm{turn}", cache.key([7 + turn] * 12)
        for _ in range(2):
            found = cache.prepare(rid, key)
            assert found is not None
            row, node = list(found.device_pages), found.device_node
            if found.host_nodes:
                answer = cache.load_back(rid, found, 12)
                assert answer.node is not None
                row, node = answer.pages, answer.node
            cache.admit(rid, node, len(row))
            row += cache.alloc(6 - len(row), None) or []
            cache.reserve(rid, -1, key, row)
            cache.start_loads()
            cache.end_payload(-1, 0)
            cache.end_payload(-1, 1)
            cache.end_forward(-1)
            for _ in range(2):
                live.local.finish_all()
                cache.begin_tick()
            assert cache.finish(rid, key, row)
            cache.evict(12)
        cache.flush()
    assert cache.counters.load_back_tokens == 12 * times
    cache.take_events()


@settings(derandomize=True, max_examples=80, deadline=None)
@given(configs.filter(lambda config: config.host_slots > 4 and config.policy is WritePolicy.WRITE_THROUGH), steps)
def test_what_was_before_does_not_show(config: CacheConfig, after: list[Step]) -> None:
    """R20: two engines with different pasts but equal canonical forms answer alike, and stay equal in canonical form step by step."""
    short, long = SmallScheduler(config), SmallScheduler(config)
    warm_up(short, 1)
    warm_up(long, 3)
    assert short.cache.canonical() == long.cache.canonical()
    assert short.cache.snapshot() != long.cache.snapshot()
    for step in after:
        (_, one, *_), (_, other, *_) = short.step(*step), long.step(*step)
        if isinstance(one, TickReport):
            one, other = one[1:], other[1:]
        if step[0] == "forward" and one is not None:
            one, other = one < 0, other < 0  # producers have absolute numbers
        assert one == other
        assert short.cache.canonical() == long.cache.canonical()
        hash(short.cache.canonical())


def reordered(image: Image) -> Image:
    """The image with everything the other way round whose order is left out of the canonical form: siblings, heirs, look-up tables."""
    image = dict(image)
    root, *rows = image["tree"]["nodes"]
    below: dict[int, list[Any]] = {}
    for row in rows:
        below.setdefault(row[1], []).append(row)
    nodes, stack = [root], list(below.get(root[0], ()))
    while stack:  # parents first, siblings last to first
        nodes.append(stack.pop())
        stack.extend(below.get(nodes[-1][0], ()))
    image["tree"] = image["tree"] | {"nodes": nodes}
    for name in ("pending", "loads", "undoing", "batches", "waiters"):
        image[name] = image[name][::-1]
    image["waiting_for"] = tuple((node_id, rids[::-1]) for node_id, rids in image["waiting_for"][::-1])
    image["records"] = [(*row[:-2], row[-2][::-1], row[-1]) for row in image["records"]]
    return image


@settings(derandomize=True, max_examples=120, deadline=None)
@given(configs, steps, steps)
def test_an_order_that_is_left_out_decides_nothing(config: CacheConfig, before: list[Step], after: list[Step]) -> None:
    """R20: the order of siblings, and of tables that are only looked up, is in no decision. (A flush frees nodes in tree order.)"""
    compare_with_reordered(config, before, after)


def test_who_loses_a_parent_takes_a_number_in_reservation_order() -> None:
    """R14: two extents with copies in flight whose parent fails are numbered as they were reserved, in whatever order it knows them."""
    before: list[Step] = [("admit", 3), ("forward", 0), ("results", 0), ("chunk", 0), ("admit", 0b10011), ("forward", 1)]
    live = compare_with_reordered(small_config(), before, [("tick", 3), ("tick", 0)])
    lost = [record for record in live.cache.state.pending.values() if record.state is State.ROLLED_BACK]
    assert sorted((record.order, record.number) for record in lost) == [(1, 1), (2, 2)]


def compare_with_reordered(config: CacheConfig, before: list[Step], after: list[Step]) -> SmallScheduler:
    live, other = SmallScheduler(config), SmallScheduler(config)
    live.run(before)
    other.cache.restore(reordered(live.cache.snapshot()))
    other.load(live.save())
    assert other.cache.canonical() == live.cache.canonical()
    for step in after:
        (_, one, calls, events), (_, another, other_calls, other_events) = live.step(*step), other.step(*step)
        assert another == one
        assert sorted(other_events) == sorted(events)
        assert other_calls == calls or (step[0] == "flush" and sorted(map(repr, other_calls)) == sorted(map(repr, calls)))
        assert other.cache.canonical() == live.cache.canonical()
    return live


# -- field by field ---------------------------------------------------------------------------------------------------------------------
Change = Callable[[CacheState], object]


def rich_state() -> CacheState:
    """A state with at least one of everything that it can hold; written by hand, so that it does not depend on the engine's choices."""
    config = small_config(policy=WritePolicy.WRITE_THROUGH_SELECTIVE)
    state = CpHiRadixCache(config, FakeTransfer(config), Loopback()).state
    tree = state.tree

    def node(parent: Any, token: int) -> Any:
        pages = state.alloc.alloc(1, None)
        assert pages is not None
        return tree.add_child(parent, RadixKey.of([token] * 2, 2), pages, state.new_node_id(), state.now())

    def pend(record: Backup, number: int | None) -> None:
        record.state, record.number = State.LAYERS_IN_FLIGHT, number
        record.generation, record.order = state.next_generation, state.next_order
        record.pages, record.owners, record.need = [LogicalPage(1), LogicalPage(2)], (0, 1), (2, 2)
        record.submitted, record.confirmed = (3, 1), (0, 0)
        state.next_generation += 1
        state.next_order += 1
        state.pending[record.node_id] = record
        if number is not None:
            state.numbered[number] = record

    committed, plain, pending, loading = node(tree.root, 1), node(tree.root, 2), node(tree.root, 3), node(tree.root, 4)
    state.tick, state.resolved, state.next_number = 40, 20, 23
    state.ledger.take((6, 6))
    state.ledger.give((2, 0))
    for loaded in (committed, loading):
        loaded.backup.state, loaded.backup.owners, loaded.backup.need = State.COMMITTED, (0,), (2, 0)
    plain.backup.refused_epoch = 0
    state.retries[plain.id] = plain.backup
    pend(pending.backup, 20)
    head, heir = (Backup(state.new_node_id(), 2, bound=False, no_need=state.no_need) for _ in range(2))
    pend(head, 21)
    pend(heir, None)
    head.parent, head.start_page = pending.backup, 1
    heir.parent, heir.start_page = head, 3
    pending.backup.heirs.append(head)
    head.heirs.append(heir)
    tree.hold_host(pending, 1)
    head.hold = (pending, 1)
    load = Load(state.next_load_id, loading, 1, 2, number=22, producer=4, queued_tick=38, readers={"r"})
    state.next_load_id += 1
    state.loads[load.load_id] = state.numbered[22] = load
    tree.set_loading(loading, load.load_id)
    request = Request("r", loading, 1, 1, [head, heir], {load.load_id})
    state.requests["r"] = request
    state.batches[3] = Batch(3, [head, heir], {"r": 3})
    state.waiters["w"] = Waiter("w", pending.id, 44)
    state.waiting_for[pending.id] = ["w"]
    tree.hold_host(committed, 1)
    state.pins.append(Pin(committed, 1, 60))
    state.parked["p"] = Parked("p", RadixKey.of([5, 5], 2), [LogicalPage(3)], 45)
    state.kv_event(stored=True, medium="device", node=plain)
    return state


def by_token(state: CacheState, token: int) -> Backup:
    return next(node.backup for node in state.tree.nodes() if node.key == RadixKey.of([token] * 2, 2))


def committed(state: CacheState) -> Backup:
    return by_token(state, 1)


def plain(state: CacheState) -> Backup:
    return by_token(state, 2)


def pending(state: CacheState) -> Backup:
    return by_token(state, 3)


def extent(state: CacheState) -> Backup:
    return state.requests["r"].ops[0]


def heir(state: CacheState) -> Backup:
    return state.requests["r"].ops[1]


def load(state: CacheState) -> Load:
    return state.loads[1]


def request(state: CacheState) -> Request:
    return state.requests["r"]


def put(owner: Callable[[CacheState], Any], name: str, value: Any) -> Change:
    return lambda state: setattr(owner(state), name, value)


def put_state(name: str, value: Any) -> Change:
    return lambda state: setattr(state, name, value)


def rename_extent(state: CacheState) -> None:
    record = state.pending.pop(extent(state).node_id)
    record.node_id = 99
    state.pending = {99: record} | state.pending


def rename_load(state: CacheState) -> None:
    renamed = state.loads.pop(1)
    renamed.load_id = 9
    state.loads[9] = renamed
    request(state).loads = {9}
    state.tree.set_loading(renamed.last, 9)


DECIDES: dict[str, Change] = {
    "CacheState.tree": lambda state: state.tree.touch([plain(state).node], state.now()),  # type: ignore[list-item]
    "CacheState.alloc": lambda state: state.alloc.alloc(1, None),
    "CacheState.ledger": lambda state: state.ledger.take((2, 0)),
    "CacheState.tick": put_state("tick", 41),
    "CacheState.quarantined": put_state("quarantined", "rank 1 has gone"),
    "CacheState.resolved": put_state("resolved", 19),
    "CacheState.numbered": lambda state: state.numbered.pop(22),
    "CacheState.outstanding": put_state("outstanding", True),
    "CacheState.pending": lambda state: state.pending.pop(heir(state).node_id),
    "CacheState.loads": lambda state: state.loads.update({2: Load(2, state.tree.root, 1, 2, queued_tick=0)}),
    "CacheState.undoing": lambda state: state.undoing.append(1),
    "CacheState.requests": lambda state: state.requests.update(q=Request("q", state.tree.root, 0, 0)),
    "CacheState.batches": lambda state: state.batches.update({4: Batch(4)}),
    "CacheState.waiters": lambda state: state.waiters.update(q=Waiter("q", 0, 44)),
    "CacheState.waiting_for": lambda state: state.waiting_for.clear(),
    "CacheState.parked": lambda state: state.parked.clear(),
    "CacheState.retries": lambda state: state.retries.clear(),
    "CacheState.pins": lambda state: state.pins.clear(),
    "Pin.node": lambda state: setattr(state.pins[0], "node", plain(state).node),
    "Pin.pages": lambda state: setattr(state.pins[0], "pages", 2),
    "Pin.expires_tick": lambda state: setattr(state.pins[0], "expires_tick", 61),
    "CacheState.retried_epoch": put_state("retried_epoch", 1),
    "CacheState.host_only_need": put_state("host_only_need", [2, 0]),
    "Backup.state": put(extent, "state", State.ROLLED_BACK),
    "Backup.generation": put(extent, "generation", 0),
    "Backup.number": put(extent, "number", None),
    "Backup.agreed": put(extent, "agreed", True),
    "Backup.hits": put(plain, "hits", 1),
    "Backup.submitted": put(extent, "submitted", (1, 0)),
    "Backup.failed_here": put(extent, "failed_here", True),
    "Backup.node": put(pending, "node", None),
    "Backup.parent": put(extent, "parent", None),
    "Backup.start_page": put(extent, "start_page", 2),
    "Backup.pages": put(extent, "pages", [1]),
    "Backup.owners": put(committed, "owners", (1,)),
    "Backup.need": put(committed, "need", (0, 2)),
    "Backup.wasted_need": put(extent, "wasted_need", (2, 0)),
    "Backup.hold": put(extent, "hold", None),
    "Backup.order": put(extent, "order", -1),
    "Backup.retries": put(plain, "retries", 1),
    "Backup.refused_epoch": put(plain, "refused_epoch", 1),
    "Backup.tried_tick": put(plain, "tried_tick", 40),
    "Backup.done_here": put(extent, "done_here", True),
    "Backup.void": put(extent, "void", True),
    "Load.last": lambda state: setattr(load(state), "last", plain(state).node),
    "Load.pages": put(load, "pages", 2),
    "Load.producer": put(load, "producer", None),
    "Load.state": put(load, "state", LoadState.FAILED),
    "Load.doomed": put(load, "doomed", True),
    "Load.failed_here": put(load, "failed_here", True),
    "Load.done_here": put(load, "done_here", True),
    "Load.readers": put(load, "readers", {"r", "q"}),
    "Request.rid": put(request, "rid", "q"),
    "Request.lock": lambda state: setattr(request(state), "lock", state.tree.root),
    "Request.protected_pages": put(request, "protected_pages", 2),
    "Request.hit_pages": put(request, "hit_pages", 2),
    "Request.ops": lambda state: request(state).ops.pop(),
    "Request.loads": lambda state: request(state).loads.clear(),
    "Request.poisoned": put(request, "poisoned", True),
    "Request.priority": put(request, "priority", 3),
    "Request.whole_pages": put(request, "whole_pages", 1),
    "Waiter.rid": lambda state: setattr(state.waiters["w"], "rid", "q"),
    "Waiter.node_id": lambda state: setattr(state.waiters["w"], "node_id", plain(state).node_id),
    "Waiter.deadline_tick": lambda state: setattr(state.waiters["w"], "deadline_tick", 43),
    "Waiter.woken": lambda state: setattr(state.waiters["w"], "woken", True),
    "Parked.rid": lambda state: setattr(state.parked["p"], "rid", "q"),
    "Parked.key": lambda state: setattr(state.parked["p"], "key", RadixKey.of([6, 6], 2)),
    "Parked.row": lambda state: state.parked["p"].row.append(LogicalPage(4)),
    "Parked.deadline_tick": lambda state: setattr(state.parked["p"], "deadline_tick", 46),
    "Batch.batch_id": lambda state: setattr(state.batches[3], "batch_id", 4),
    "Batch.ops": lambda state: state.batches[3].ops.pop(),
    "Batch.stores": lambda state: state.batches[3].stores.clear(),
    "Batch.stored_layers": lambda state: state.batches[3].stored_layers.update({0: 1}),
}
"""A change of each field that must show in the canonical form."""

DECIDES_NOTHING: dict[str, tuple[str, Change]] = {
    "CacheState.clock": ("only the order of its values counts, and the next one is the largest", put_state("clock", 900)),
    "CacheState.next_node_id": ("ids are positions or ranks", put_state("next_node_id", 900)),
    "CacheState.next_generation": ("generations are ranks", put_state("next_generation", 900)),
    "CacheState.next_load_id": ("load-backs are ranks", put_state("next_load_id", 900)),
    "CacheState.next_order": ("orders are ranks", put_state("next_order", 900)),
    "CacheState.next_number": ("resolved and the list of the numbered say it", put_state("next_number", 900)),
    "CacheState.counters": ("totals for reports", lambda state: setattr(state.counters, "committed", 5)),
    "CacheState.kv_events": ("handed out, never read", lambda state: state.kv_events.clear()),
    "CacheState.kv_events_lost": ("a total for reports", put_state("kv_events_lost", 1)),
    "Backup.node_id": ("a position or a rank", rename_extent),
    "Backup.bound": ("true exactly when there is a node", put(extent, "bound", True)),
    "Backup.confirmed": ("for the log; done_here says that copies have ended", put(extent, "confirmed", (3, 1))),
    "Backup.wasted_pages": ("wasted_need is what is given back", put(extent, "wasted_pages", 1)),
    "Backup.heirs": ("the other end of parent", lambda state: extent(state).heirs.clear()),
    "Backup.request": ("for the log", put(extent, "request", "q")),
    "Backup.retrying": ("written in the call that reads it", put(plain, "retrying", True)),
    "Backup.refused_tick": ("limits the rate of log notes", put(plain, "refused_tick", 39)),
    "Backup.stored_tick": ("for a counter", put(extent, "stored_tick", 39)),
    "Load.load_id": ("a rank", rename_load),
    "Load.tokens": ("for a log note", put(load, "tokens", 4)),
    "Load.number": ("its place in the list of the numbered says it", put(load, "number", 900)),
    "Load.queued_tick": ("read by nobody", put(load, "queued_tick", 39)),
}
"""A change of each field that must not show in the canonical form, and why."""

CONSTANT = {
    "CacheState.config": "equal on both sides, which restore() checks",
    "CacheState.layout": "made from the configuration",
    "CacheState.kv_listener": "somebody outside, who stays",
    "CacheState.no_need": "made from the configuration",
    "Backup.key": "made from node id and generation",
}


def all_fields() -> set[str]:
    names = {f"CacheState.{name}" for name in vars(rich_state())}
    for kind in (Load, Request, Waiter, Parked, Pin, Batch):
        assert is_dataclass(kind)
        names |= {f"{kind.__name__}.{field.name}" for field in fields(kind)}
    slots = [slot for kind in Backup.__mro__ for slot in getattr(kind, "__slots__", ())]
    return names | {f"Backup.{slot}" for slot in slots}


def test_every_field_is_decided() -> None:
    """R20: a field of the engine's state is in both forms, or stands in a list with the reason why it is not."""
    assert all_fields() == DECIDES.keys() | DECIDES_NOTHING.keys() | CONSTANT.keys()
    assert len(all_fields()) == len(DECIDES) + len(DECIDES_NOTHING) + len(CONSTANT)


def cache_of(state: CacheState) -> CpHiRadixCache:
    cache = CpHiRadixCache(state.config, FakeTransfer(state.config), Loopback())
    cache.state = state
    return cache


@pytest.mark.parametrize("name", [*DECIDES, *DECIDES_NOTHING])
def test_a_change_of_any_field_shows_in_the_image(name: str) -> None:
    """R20: no field is left out of a snapshot, and a restore brings the changed value back."""
    state = rich_state()
    cache = cache_of(state)
    before = cache.snapshot()
    change = DECIDES[name] if name in DECIDES else DECIDES_NOTHING[name][1]
    change(state)
    changed = cache.snapshot()
    assert changed != before
    if name != "Load.load_id":  # the one change that leaves the list of the numbered naming what is gone
        twin = CpHiRadixCache(state.config, FakeTransfer(state.config), Loopback())
        twin.restore(changed)
        assert twin.snapshot() == changed


def test_everything_is_found_under_its_name_after_a_restore() -> None:
    """R20: requests, waiters, load-backs and the rest are looked up as before, and what is numbered is what it was."""
    state = rich_state()
    twin = CpHiRadixCache(state.config, FakeTransfer(state.config), Loopback())
    twin.restore(cache_of(state).snapshot())
    for found, wanted in zip(vars(twin.state).values(), vars(state).values(), strict=True):
        if isinstance(wanted, dict):
            assert [(key, type(value)) for key, value in found.items()] == [(key, type(value)) for key, value in wanted.items()]


@pytest.mark.parametrize("name", DECIDES)
def test_what_decides_shows_in_the_canonical_form(name: str) -> None:
    """R20: states that may behave differently from here on are told apart."""
    state = rich_state()
    before = cache_of(state).canonical()
    DECIDES[name](state)
    assert cache_of(state).canonical() != before


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("generation", 9), ("number", None), ("agreed", True), ("submitted", (1, 0)), ("done_here", True), ("failed_here", True),
        ("void", True), ("pages", [1]), ("owners", (1, 0)), ("need", (4, 0)), ("wasted_need", (2, 0)), ("order", 9),
    ],
)  # fmt: skip
def test_what_decides_shows_of_a_backup_in_the_tree_too(name: str, value: object) -> None:
    """R20: a pending backup tells as much when it has a node as when it has none yet."""
    state = rich_state()
    before = cache_of(state).canonical()
    setattr(pending(state), name, value)
    assert cache_of(state).canonical() != before


@pytest.mark.parametrize("name", DECIDES_NOTHING)
def test_what_decides_nothing_does_not_show_in_the_canonical_form(name: str) -> None:
    """R20: what no decision reads does not tell states apart."""
    state = rich_state()
    before = cache_of(state).canonical()
    DECIDES_NOTHING[name][1](state)
    assert cache_of(state).canonical() == before


def passed(state: CacheState) -> Backup:
    """An extent whose number every rank has passed."""
    record = extent(state)
    if record.number is not None:
        state.numbered.pop(record.number, None)
    record.agreed = True
    return record


@pytest.mark.parametrize(
    ("owner", "name", "values"),
    [
        (plain, "hits", (2, 3)),
        (plain, "tried_tick", (5, 39)),
        (plain, "refused_epoch", (-1, 0)),
        (lambda state: state.waiters["w"], "deadline_tick", (40, 12)),
        (lambda state: state.parked["p"], "deadline_tick", (40, 12)),
        (load, "producer", (4, 7)),
        (committed, "number", (3, None)),
        (passed, "number", (3, 5)),
    ],
)
def test_values_that_are_read_alike_compare_equal(owner: Callable[[CacheState], Any], name: str, values: tuple[Any, Any]) -> None:
    """R20: past the threshold, in an earlier tick, older than the epoch, over: how far does not matter."""
    forms = []
    for value in values:
        state = rich_state()
        setattr(owner(state), name, value)
        forms.append(cache_of(state).canonical())
    assert forms[0] == forms[1]


def test_the_last_tick_of_a_wait_shows() -> None:
    """R17, R20: a request whose wait is over is no longer passed over; one that waits for one tick more is."""
    state = rich_state()
    cache = cache_of(state)
    state.waiters["w"].deadline_tick = state.tick
    over = cache.canonical()
    state.waiters["w"].deadline_tick += 1
    assert cache.canonical() != over


def test_which_of_the_refused_nodes_are_due_shows() -> None:
    """R15, R20: of the nodes that are to be tried again, the next round passes over those that were refused since slots were freed."""
    forms = []
    for refused_epoch in (0, 1):
        state = rich_state()
        state.retries[committed(state).node_id] = committed(state)
        committed(state).refused_epoch = refused_epoch
        assert state.is_retry_due(), "the other one is"
        forms.append(cache_of(state).canonical())
    assert forms[0] != forms[1]


@pytest.mark.parametrize("policy", list(WritePolicy))
def test_hits_decide_under_the_policy_that_reads_them(policy: WritePolicy) -> None:
    """R19, R20: how often a node was hit tells states apart when the next hit may back it up, and under no other policy."""
    live = SmallScheduler(small_config(policy=policy, eviction_policy="lru"))
    live.run([("admit", 9), ("forward", 2), ("results", 1)])
    forms = []
    for hits in (0, 1):
        for node in live.cache.state.tree.nodes():
            node.backup.hits = hits
        forms.append(live.cache.canonical())
    assert (forms[0] == forms[1]) == (policy is not WritePolicy.WRITE_THROUGH_SELECTIVE)


@pytest.mark.parametrize("name", ["requests", "parked", "retries"])
def test_the_order_in_which_they_are_served_shows(name: str) -> None:
    """R20: the poisoned are reported in order of admission, parked inserts made in order of arrival, nodes tried in order of refusal."""
    state = rich_state()
    state.parked["q"] = Parked("q", RadixKey.of([6, 6], 2), [], 45)
    state.requests["q"] = Request("q", state.tree.root, 0, 0, poisoned=True)
    state.retries[committed(state).node_id] = committed(state)
    before = cache_of(state).canonical()
    setattr(state, name, dict(reversed(getattr(state, name).items())))
    assert cache_of(state).canonical() != before


def test_the_order_of_those_who_cannot_be_poisoned_does_not_show() -> None:
    """R20: who reads no load-back when it is admitted never reads one; and nothing else goes through the requests in order."""
    forms = []
    for rids in ("ab", "ba"):
        state = rich_state()
        state.requests |= {rid: Request(rid, state.tree.root, 0, 0) for rid in rids}
        forms.append(cache_of(state).canonical())
    assert forms[0] == forms[1]
    state.requests["a"].poisoned = True
    assert cache_of(state).canonical() != forms[0]


@pytest.mark.parametrize(("refused_epoch", "shows"), [(0, True), (1, False)])
def test_when_nodes_were_tried_last_shows_only_if_one_is_due(refused_epoch: int, *, shows: bool) -> None:
    """R15: a round of retries in which nothing is due does nothing; and before anything is due again, slots are freed."""
    forms = []
    for retried_epoch in (0, 1):
        state = rich_state()
        plain(state).refused_epoch, state.retried_epoch = refused_epoch, retried_epoch
        assert state.ledger.freed_epoch == 1
        assert state.is_retry_due() is (shows and retried_epoch == 0)
        forms.append(cache_of(state).canonical())
    assert (forms[0] != forms[1]) is shows


def no_longer_pending(state: CacheState, start_page: int) -> None:
    """The request's last reservation has ended, behind page ``start_page``."""
    record = state.pending.pop(heir(state).node_id)
    record.state, record.start_page, record.pages = State.DEVICE_VALID_HOST_NONE, start_page, []


@pytest.mark.parametrize(("before", "behind", "shows"), [(0, 0, True), (1, 0, True), (0, 1, False)])
def test_of_reservations_that_have_ended_only_the_last_decides(before: int, behind: int, *, shows: bool) -> None:
    """R12, R20: the next reservation may not follow one that has ended; where one ended that others came after is looked at by nobody.
    ``before``, ``behind``: reservations that go on, in front of the one that has ended and after it."""
    forms = []
    for page in (2, 3):
        state = rich_state()
        goes_on, ended = request(state).ops
        no_longer_pending(state, page)
        request(state).ops = [goes_on] * before + [ended] + [goes_on] * behind
        forms.append(cache_of(state).canonical())
    assert (forms[0] != forms[1]) is shows


def test_a_reservation_that_has_ended_where_the_one_before_it_ends_shows() -> None:
    """R12, R20: the next reservation may follow one that goes on, but not one behind that which has ended."""
    forms = []
    for reservations in (1, 2):
        state = rich_state()
        no_longer_pending(state, extent(state).end_page)
        del request(state).ops[reservations:]
        forms.append(cache_of(state).canonical())
    assert forms[0] != forms[1]


OUTLOOKS: dict[str, tuple[Outlook, Outlook, Callable[[CacheState, int], object]]] = {
    "where the last reservation ended": (Outlook(reserving=()), Outlook(reserving={"r"}), no_longer_pending),
    "from where on a batch stores": (
        Outlook(draft_may_lack=False),
        Outlook(draft_may_lack=True),
        lambda state, page: state.batches[3].stores.update(r=page),
    ),
    "what was tried in this tick": (
        Outlook(hits=False),
        Outlook(hits=True),
        lambda state, tick: setattr(plain(state), "tried_tick", 37 + tick),
    ),
}
"""What is read in calls of one kind only: an outlook without them, one with them, and a change that takes a number."""


@pytest.mark.parametrize("name", OUTLOOKS)
def test_what_no_call_to_come_reads_does_not_show(name: str) -> None:
    """R20: a caller who says which calls will not come is told fewer states apart; all others see the difference."""
    without, with_them, change = OUTLOOKS[name]

    def form(number: int, **given: Any) -> object:
        state = rich_state()
        change(state, number)
        return cache_of(state).canonical(**given)

    assert form(2, outlook=without) == form(3, outlook=without)
    assert form(2, outlook=with_them) != form(3, outlook=with_them)
    assert form(2) != form(3)


def test_an_outstanding_reduction_can_be_left_out() -> None:
    """R18: whoever knows what it says compares that."""
    state = rich_state()
    forms = [cache_of(state).canonical(outstanding=False)]
    state.outstanding = True
    forms.append(cache_of(state).canonical(outstanding=False))
    assert forms[0] == forms[1]


# -- what ranks share, and what renumbering keeps ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("owner", "name"),
    [(extent, "done_here"), (extent, "failed_here"), (extent, "void"), (load, "done_here"), (load, "failed_here")],
)
def test_what_is_local_can_be_left_out(owner: Callable[[CacheState], Any], name: str) -> None:
    """R20: how this rank's copies fare shows in the whole form, and not in the one that all ranks share."""
    state = rich_state()
    cache = cache_of(state)
    whole, shared = cache.canonical(), cache.canonical(local=False)
    setattr(owner(state), name, not getattr(owner(state), name))
    assert cache.canonical() != whole
    assert cache.canonical(local=False) == shared


def test_a_renumbering_of_pages_does_not_show_by_name() -> None:
    """R20: states that hold other pages of the same owners are equal by name, and differ by number; other owners show in both."""

    def forms(first: int) -> tuple[object, object]:
        live = SmallScheduler(small_config())
        taken = live.cache.state.alloc.alloc(first, None)
        assert taken is not None
        live.run([("admit", 9), ("forward", 2), ("results", 1)])
        live.cache.free(taken)
        names: dict[LogicalPage, tuple[int, int]] = {}
        owner = live.cache.state.layout.owner_of_page
        named = live.cache.canonical(page_name=lambda page: names.setdefault(page, (owner(page), len(names))))
        return live.cache.canonical(), named

    (none, none_named), (two, two_named), (one, one_named) = forms(0), forms(2), forms(1)
    assert none_named == two_named != one_named
    assert none != two != one


def test_a_restore_forgets_what_came_after() -> None:
    """R20, R27: an engine that goes back has the KV events, and the failed load-backs that wait for their readers, of the image."""
    rig = Rig(ranks=[0], cp_size=1)
    to_host(rig, "ab")
    rig.hold()
    assert rig.begin("reads", "ab")
    rig.start_loads()
    rig.local(0).fail(1)
    rig.tick(3)
    cache, others = rig.cache, CpHiRadixCache(rig.config, FakeTransfer(rig.config), InProcessGroup(1, 1.0).member(0))
    image = cache.snapshot()
    assert (image["undoing"], len(image["kv_events"])) == ((1,), 4)
    rig.abort("reads")
    after = cache.snapshot()
    assert (after["undoing"], len(after["kv_events"])) == ((), 5)
    for engine in (cache, others):
        engine.restore(image)
        assert engine.snapshot() == image
        engine.restore(after)
        assert engine.snapshot() == after
        assert [tuple(event) for event in engine.take_events()] == list(after["kv_events"])
