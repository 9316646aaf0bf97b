"""The census of real engines: it can be taken between any two calls, and the outside checker finds nothing wrong with it."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cphicache.check.conservation import InvariantBroken
from cphicache.engine import CacheConfig, WriteBackShort, WritePolicy
from cphicache.lifecycle import State
from cphicache.run.census import take_census
from tests.engine_server import Prompt, Server, Step


def config(**changed: Any) -> CacheConfig:
    given: dict[str, Any] = {
        "page_size": 2,
        "cp_size": 2,
        "usable_pages": 16,
        "payloads": (("target", 2), ("draft", 1)),
        "host_slots": 12,
        "load_back_threshold": 2,
        "max_deferral_ticks": 3,
        "max_retries": 2,
    }
    return CacheConfig(**{**given, **changed})


EXPECTED = (
    *("finished", "aborted", "retracted", "parked"),
    *("abort", "agreed_failed", "bind_duplicate_whole", "forward_ended", "parent_lost", "reset"),
    *("committed", "retries", "eviction_retries_succeeded", "host_evictions", "reclaims", "device_evictions", "splits"),
    *("deferred_splits", "deferrals_expired", "declined_inserts", "parked_dropped", "duplicate_binds", "adopted_tokens"),
    *("load_backs", "load_backs_failed", "drain_reductions"),
)
"""Ends of requests, causes of rollbacks and counters that the seeded histories must all have met."""

PROMPTS = st.builds(
    Prompt, st.lists(st.integers(0, 1), min_size=1, max_size=5).map(tuple), st.integers(0, 1), st.sampled_from([0, 3])
)
STEPS = st.builds(
    Step,
    prompts=st.lists(PROMPTS, max_size=2).map(tuple),
    chunk_tokens=st.sampled_from([3, 4, 20]),
    abort=st.none() | st.integers(0, 2),
    abort_layer=st.integers(-1, 1),
    evict_tokens=st.sampled_from([0, 0, 4, 20]),
    report=st.sampled_from(["all", "all", "none", "no_draft"]),
    copies=st.sampled_from(["go_on", "hold", "finish", "fail", "finish_all"]),
    pick=st.integers(0, 3),
    fault=st.sampled_from(["", "", "reserve", "copy"]),
    reset=st.sampled_from([False] * 15 + [True]),
)
CONFIGS = st.builds(
    config,
    cp_size=st.sampled_from([1, 2]),
    payloads=st.sampled_from([(("target", 2),), (("target", 2), ("draft", 1))]),
    base=st.sampled_from([0, 1]),
    host_slots=st.sampled_from([4, 8, 40]),
    policy=st.sampled_from([WritePolicy.WRITE_THROUGH] * 2 + list(WritePolicy)),
    reclaim_device_valid=st.booleans(),
    overlap=st.booleans(),
    write_back_short=st.sampled_from(list(WriteBackShort)),
)


@given(CONFIGS, st.integers(0, 1), st.lists(STEPS, min_size=3, max_size=12))
@settings(derandomize=True, max_examples=100, deadline=None)
def test_conservation_holds_after_every_call(of: CacheConfig, rank: int, steps: list[Step]) -> None:
    """R30: after every call of a random history, with faults, aborts, evictions and resets, all accounts agree; then all is quiet."""
    server = Server(of, rank % of.cp_size)
    for step in steps:
        server.step(step)
    server.rest()


def seeded_step(random: Random) -> Step:
    """A step of a longer history: mostly ordinary, prompts of few blocks so that they meet."""
    prompts = [
        Prompt(tuple(random.choices((0, 1), k=random.randint(1, 6))), random.randint(0, 1), random.choice((0, 0, 3)))
        for _ in range(random.choice((0, 0, 1, 1, 2)))
    ]
    return Step(
        prompts=tuple(prompts),
        chunk_tokens=random.choice((3, 4, 6, 20)),
        abort=random.choice((None, None, None, 0, 1)),
        abort_layer=random.randint(-1, 1),
        evict_tokens=random.choice((0, 0, 0, 4, 20)),
        report=random.choice(("all", "all", "all", "none", "no_draft")),
        copies=random.choice(("go_on", "go_on", "hold", "finish", "fail", "finish_all")),
        pick=random.randint(0, 3),
        fault=random.choice(("", "", "", "", "reserve", "copy")),
        reset=random.random() < 0.03,
    )


def test_random_histories_reach_what_they_are_to_check() -> None:
    """R30: seeded histories in which every kind of operation occurs, checked after every call, so that the checks above are not void."""
    seen: Counter[str] = Counter()
    for seed in range(30):
        random = Random(seed)
        server = Server(config(host_slots=random.choice((8, 12)), reclaim_device_valid=seed % 2 == 0), rank=seed % 2)
        for _ in range(30):
            server.step(seeded_step(random))
        server.rest()
        counters = server.cache.counters
        seen.update(server.ended.values())
        seen.update(counters.rolled_back)
        seen.update({name: getattr(counters, name) for name in EXPECTED if hasattr(counters, name)})
    assert [name for name in EXPECTED if not seen[name]] == []


def test_the_census_changes_nothing() -> None:
    """R30: two censuses in a row are equal, and so is the engine's answer after them."""
    server = busy_server()
    assert server.census() == server.census()
    before = len(server.transfer.calls)
    server.check()
    assert len(server.transfer.calls) == before


def busy_server() -> Server:
    """Three requests in the middle of their prompts, with copies in flight."""
    server = Server(config())
    server.step(Step((Prompt((0, 1, 2, 3)), Prompt((0, 4, 5, 6)), Prompt((7,), 1, 3)), chunk_tokens=4, copies="hold"))
    assert server.census().operations
    assert len(server.census().requests) == 3
    return server


def test_rows_of_all_running_requests_are_wanted() -> None:
    """R30: a census with a row missing, or with one too many, is refused: the pages could not be accounted for."""
    server = busy_server()
    rows = {request.rid: request.row for request in server.running.values()}
    with pytest.raises(ValueError, match="give the whole row"):
        take_census(server.cache, {}, None, 0)
    with pytest.raises(ValueError, match="r9"):
        take_census(server.cache, rows | {"r9": rows["r0"]}, None, 0)


def test_the_census_shows_a_leaked_page() -> None:
    """R30: a page that a request took and lost is found in the census of the real engine."""
    server = busy_server()
    assert server.cache.alloc(1, None)
    with pytest.raises(InvariantBroken, match="device at tick 1: expected free"):
        server.check()


def test_the_census_shows_a_lock_and_a_child_that_are_wrong() -> None:
    """R30: a lock without a holder, and a child under a key that is not its own, are found in the census of the real engine."""
    server = busy_server()
    tree = server.cache.state.tree
    node = next(tree.nodes())
    tree.lock(node)
    with pytest.raises(InvariantBroken, match=f"locks at tick 1, node {node.id}: expected lock_ref"):
        server.check()
    tree.unlock(node)
    server.check()
    child_key = next(key for key, child in tree.root.children.items() if child is node)
    tree.root.children[b"another page"] = tree.root.children.pop(child_key)
    with pytest.raises(InvariantBroken, match=f"structure at tick 1, node {node.id}: expected to be filed"):
        server.check()


def test_a_parked_insert_keeps_its_pages_and_lock() -> None:
    """R17, R30: the pages and the lock of a finished request whose insert waits are the parked insert's."""
    server = Server(config())
    server.step(Step((Prompt((0, 1)), Prompt((0, 2))), copies="hold"))
    assert [parked.rid for parked in server.census().parked] == ["r1"]
    server.rest()
    assert server.ended == {"r0": "finished", "r1": "parked"}


# -- what the checker found, kept ---------------------------------------------------------------------------------------------


def test_an_extent_that_drains_does_not_keep_its_parent() -> None:
    """R14, R30: once a parent's backup is given up it may be evicted, although an extent behind it still drains."""
    server = Server(config())
    server.step(Step((Prompt((0, 1, 2, 3)),), chunk_tokens=4, copies="hold"))
    server.step(Step(chunk_tokens=4, abort=0, abort_layer=1))
    assert [op.state for op in server.census().operations] == [State.LAYERS_IN_FLIGHT, State.ROLLED_BACK]
    server.transfer.fail(server.transfer.in_flight()[0])
    server.step(Step())
    server.step(Step())
    server.step(Step(evict_tokens=20))
    assert server.cache.state.tree.node_count == 0
    server.rest()


def test_an_extent_is_not_committed_under_a_node_that_is_not() -> None:
    """R15: two requests of one batch share a page; the first one's backup fails, the other's is agreed and unbound meanwhile. It is
    bound below a node without a host copy then, and rolls back instead of committing."""
    server = Server(config(max_deferral_ticks=8))
    server.step(Step((Prompt((0, 1)), Prompt((0, 2))), copies="hold"))
    first, second = server.transfer.in_flight()
    server.transfer.finish(second)
    server.transfer.fail(first, drained=False)
    server.step(Step())
    server.step(Step())
    assert [op.state for op in server.census().operations] == [State.ROLLED_BACK, State.LAYERS_IN_FLIGHT]
    server.rest()
    assert server.ended == {"r0": "finished", "r1": "parked"}
    assert server.cache.counters.rolled_back["parent_lost"] == 1


def test_a_lost_extent_drains_apart_from_the_node_of_its_kv() -> None:
    """R18: two extents of one request are lost when they are bound; the second still drains when the node that holds its KV is backed
    up again, and each ends on its own."""
    server = Server(config(host_slots=40, usable_pages=32))
    server.step(Step((Prompt((0, 1)), Prompt((0, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11))), chunk_tokens=4, copies="hold"))
    server.step(Step(chunk_tokens=4))
    first, one, two = server.transfer.in_flight()
    server.transfer.fail(first)
    server.step(Step(chunk_tokens=2))
    server.step(Step(chunk_tokens=2))
    assert server.cache.counters.rolled_back["parent_lost"] >= 2
    server.transfer.finish(one)
    for _ in range(8):
        server.step(Step(chunk_tokens=2))
    server.serve(Prompt((0, 2, 3, 4, 5)))
    assert two in server.transfer.in_flight()
    server.rest()


def test_what_follows_a_duplicate_extent_stays_one_backup() -> None:
    """R12: the first of a request's two extents is in the tree by the time it is inserted; the second is bound below what is there."""
    server = Server(config(host_slots=40, usable_pages=32))
    server.step(Step((Prompt((0, 1)), Prompt((0, 2)), Prompt((0, 2, 3, 4))), chunk_tokens=4, copies="hold"))
    server.step(Step(chunk_tokens=4))
    server.transfer.finish_all()
    server.rest()
    assert server.cache.counters.rolled_back == {"bind_duplicate_whole": 1}
