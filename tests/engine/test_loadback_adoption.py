"""Host-only nodes whose KV is computed anew: an insert gives them its pages (R24, R12)."""

from __future__ import annotations

import pytest

from cphicache.lifecycle import State
from tests.engine.rig import Rig
from tests.engine.rig_extra import ALL_TOKENS, ask_load, frozen, host_only_slots, kv_events, owners_of, to_host

C = State.COMMITTED


def unpromised() -> Rig:
    """A rig in which nothing on the host is ever promised, so that everything is computed anew."""
    return Rig(load_back_threshold=ALL_TOKENS)


def compute(rig: Rig, rid: str, text: str) -> None:
    """A request that gets nothing from the host, up to its insert."""
    assert rig.begin(rid, text)
    rig.chunk(rid)
    rig.forward()


def total_free(rig: Rig) -> int:
    return sum(rig.cache.state.alloc.lane_free())


@pytest.mark.parametrize("chain", [("abcd",), ("ab", "abcd"), ("a", "abc", "abcd")])
def test_host_only_nodes_adopt_recomputed_pages(chain: tuple[str, ...]) -> None:
    """R24, R27: a refused promise means recompute; the insert then gives the host-only nodes its pages, which are counted as adopted
    and neither freed nor held twice; the nodes keep their host copies, and only their host-only accounts go."""
    rig = unpromised()
    to_host(rig, *chain)
    nodes = [rig.node(text) for text in chain]
    copies = [(node.backup.generation, node.backup.owners, node.backup.need) for node in nodes]
    assert rig.cache.state.host_only_need == host_only_slots(rig) == [4, 4]
    compute(rig, "computes", "abcdx")
    row, free, slots = list(rig.row("computes")), total_free(rig), rig.free_slots()
    kv_events(rig)
    assert rig.insert("computes") == row, "its own pages are the tree's now"
    assert total_free(rig) == free
    assert rig.free_slots() == slots
    assert [page for node in nodes for page in node.pages or ()] == row[:4]
    assert [(node.backup.generation, node.backup.owners, node.backup.need) for node in nodes] == copies
    assert rig.states(*chain) == [C] * len(chain)
    assert rig.cache.state.host_only_need == [0, 0]
    assert rig.cache.counters.adopted_tokens == 8
    assert rig.cache.counters.duplicate_tokens == 0
    device = [(stored, node) for stored, medium, node, _ in kv_events(rig) if medium == "device"]
    assert device == [(True, node.id) for node in [*nodes, rig.node("abcdx")]]
    rig.finish("computes")
    assert total_free(rig) == free
    rig.settle()
    rig.evict(ALL_TOKENS)
    assert total_free(rig) == rig.config.usable_pages
    rig.rest()


@pytest.mark.parametrize("text", ["abx", "ab", "abc"])
def test_a_host_only_node_is_divided_where_the_recomputed_part_ends(text: str) -> None:
    """R24, R17: recomputed pages that cover a host-only node in part divide it: the head is on the device, the tail stays host-only."""
    rig = unpromised()
    to_host(rig, "abcd")
    common = len(text.rstrip("x"))
    compute(rig, "computes", text)
    row = list(rig.row("computes"))
    assert rig.insert("computes") == row
    assert rig.node("abcd"[:common]).pages == row[:common]
    assert rig.node("abcd").pages is None
    assert rig.cache.counters.adopted_tokens == 2 * common
    assert rig.cache.state.host_only_need == host_only_slots(rig)
    assert sum(host_only_slots(rig)) == 2 * (4 - common)
    rig.rest()


def test_the_second_to_compute_the_same_frees_its_pages_once() -> None:
    """R24, R12: of two requests that computed the same, the first gives its pages to the tree; the second's are duplicates, freed once."""
    rig = unpromised()
    to_host(rig, "abcd")
    for rid in ("one", "two"):
        assert rig.begin(rid, "abcd")
        rig.chunk(rid)
    rig.forward()
    free = total_free(rig)
    row = list(rig.row("one"))
    assert rig.insert("one") == row
    assert total_free(rig) == free
    assert rig.insert("two") == row
    assert total_free(rig) == free + 4
    assert (rig.cache.counters.adopted_tokens, rig.cache.counters.duplicate_tokens) == (8, 8)
    for rid in ("one", "two"):
        rig.finish(rid)
    assert total_free(rig) == free + 4
    rig.rest()


def test_some_is_on_the_device_and_some_adopted() -> None:
    """R24: of a chain whose head somebody has brought back meanwhile, the head's pages are duplicates and the rest is adopted."""
    rig = unpromised()
    to_host(rig, "ab", "abcd")
    for rid, text in {"head": "ab", "all": "abcd"}.items():
        assert rig.begin(rid, text)
        rig.chunk(rid)
    rig.forward()
    row = list(rig.row("all"))
    assert rig.insert("head") is not None
    free = total_free(rig)
    assert rig.insert("all") == [*rig.row("head"), *row[2:]]
    assert total_free(rig) == free + 2
    assert rig.node("abcd").pages == row[2:]
    assert (rig.cache.counters.adopted_tokens, rig.cache.counters.duplicate_tokens) == (8, 4)
    rig.rest()


def test_the_host_copy_keeps_its_own_owner_pattern() -> None:
    """R4, R24: adopted pages may have other owners than the host copy; a later load-back goes by those of the host copy."""
    rig = unpromised()
    to_host(rig, "abc", owners=[1, 1, 0])
    assert rig.begin("computes", "abc")
    rig.chunk("computes", owners=[0, 1, 0])
    rig.forward()
    rig.finish("computes")
    node = rig.node("abc")
    assert owners_of(rig, node.pages or ()) == [0, 1, 0]
    assert node.backup.owners == (1, 1, 0)
    rig.evict(ALL_TOKENS)
    assert rig.cache.state.host_only_need == host_only_slots(rig) == [2, 4]
    rig.rest()

    rig = Rig()
    to_host(rig, "abc", owners=[1, 1, 0])
    answer = ask_load(rig, "asks", "abc")
    assert owners_of(rig, answer.pages) == [1, 1, 0]
    rig.start_loads()
    rig.settle()
    rig.rest()


def test_the_new_extent_starts_behind_host_only_nodes() -> None:
    """R12, R24: what is on the host is not backed up again when it is recomputed: the reservation begins behind it and is bound there."""
    rig = unpromised()
    to_host(rig, "abcd")
    compute(rig, "computes", "abcdxyz")
    op = rig.op("computes")
    assert (op.start_page, len(op.pages)) == (4, 3)
    assert rig.cache.state.tree.find(op.hold[0].id if op.hold else -1) is rig.node("abcd"), "pinned until it is bound"
    rig.insert("computes")
    rig.settle()
    assert rig.states("abcd", "abcdxyz") == [C, C]
    assert rig.cache.counters.tokens_committed == 14
    assert rig.cache.counters.tokens_wasted == 0
    rig.rest()


def test_recomputed_in_chunks() -> None:
    """R24: a prompt that is computed in chunks adopts host-only nodes piece by piece, also where a chunk ends inside one."""
    rig = unpromised()
    to_host(rig, "abcd")
    assert rig.begin("computes", "abcdxy")
    for upto in (3, 6, 9, 12):
        rig.chunk("computes", upto=upto)
        rig.forward()
        assert rig.insert("computes", chunked=upto < 12) is not None
        assert rig.cache.state.host_only_need == host_only_slots(rig)
    assert rig.cache.counters.adopted_tokens == 8
    assert [rig.node("abcdxy"[:end]).pages for end in (1, 3, 4)] == [
        rig.row("computes")[start:end] for start, end in ((0, 1), (1, 3), (3, 4))
    ]
    rig.settle()
    rig.rest()


def test_an_abort_before_the_insert_adopts_nothing() -> None:
    """R24, R14: a request that recomputed a host-only prefix and is aborted leaves the node as it was, and its pages are free."""
    rig = unpromised()
    to_host(rig, "abcd")
    before = [side.census().nodes for side in rig.sides], total_free(rig), rig.free_slots()
    compute(rig, "computes", "abcdx")
    rig.abort("computes")
    rig.settle()
    assert ([side.census().nodes for side in rig.sides], total_free(rig), rig.free_slots()) == before
    found = frozen(rig)
    rig.match("abcd")
    assert frozen(rig) == found
    rig.rest()
