"""When a load-back is refused, and what it takes when it is not (R25, R26, R4)."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from cphicache.engine import Refusal, load_back_quota
from tests.engine.rig import Rig
from tests.engine.rig_extra import ALL_TOKENS, ask_load, back_up, load_of, owners_of, queued_pages, to_host


@pytest.mark.parametrize(("real", "quota"), [(192, 256), (128, 320), (448, 0), (512, 0), (4096, 0)])
@pytest.mark.parametrize("hit", [0, 64, 640])
def test_worked_quota(real: int, quota: int, hit: int) -> None:
    """R26: available 512, page 64: real input 192 -> 256, 128 -> 320, 448 or more -> 0, whatever the host brings on top."""
    assert load_back_quota(512, real + hit, hit, 64) == quota


@pytest.mark.parametrize(("real", "rounded"), [(1, 64), (64, 64), (65, 128), (0, 0)])
def test_real_input_is_rounded_up_to_pages(real: int, rounded: int) -> None:
    """R26: the real input is what is left to compute, rounded up to whole pages."""
    assert load_back_quota(512, real + 100, 100, 64) == 512 - rounded - 64


def test_threshold_counts_logical_tokens() -> None:
    """R25: threshold 10: a host hit of 9 tokens is refused, one of 10 loads."""
    for text, refused in (("abcdefghi", Refusal.BELOW_THRESHOLD), ("abcdefghij", None)):
        rig = Rig(page_size=1, load_back_threshold=10)
        to_host(rig, text)
        answer = ask_load(rig, "asks", text)
        assert answer.refused is refused
        assert len(answer.pages) == (0 if refused else 10)
        rig.start_loads()
        rig.settle()
        rig.rest()


def test_a_rank_that_owns_nothing_of_it_loads_all_the_same() -> None:
    """R25: threshold 5 with 6 logical tokens, of which a rank owns 0, loads on that rank too: logical tokens count."""
    rig = Rig(cp_size=4, load_back_threshold=5)
    to_host(rig, "abc")
    assert rig.node("abc").backup.owners == (0, 1, 2)
    answer = ask_load(rig, "asks", "abc")
    assert answer.refused is None
    assert len(answer.pages) == 3
    rig.hold()
    rig.start_loads()
    assert [len(side.transfer.in_flight()) for side in rig.sides] == [1, 1, 1, 0]
    rig.finish_all()
    rig.settle()
    rig.rest()


def quota_rig() -> Rig:
    """16 device tokens: ``ab`` (4) and ``abcd`` behind it, which is on the host only."""
    rig = Rig(cp_size=1, usable_pages=8)
    back_up(rig, "ab", "abcd")
    rig.evict(4)
    assert rig.node("ab").pages is not None
    assert rig.node("abcd").pages is None
    assert rig.cache.available_size() + rig.cache.evictable_size() == 16
    return rig


@pytest.mark.parametrize(("real", "loads"), [(6, True), (8, False), (12, False)])
def test_the_quota_counts_what_pinning_the_ancestor_takes_away(real: int, loads: bool) -> None:
    """R25, R26: available are 16 tokens, 4 of them in the ancestor. Real input 6: quota 8, delta -4, a hit of 4 loads. Real input 8:
    quota 6 would do, but 2 are left when the ancestor is pinned. Real input 12: quota 2. A refusal is logged with its reason."""
    rig = quota_rig()
    assert load_back_quota(16, real + 4, 4, 2) == 14 - real
    answer = ask_load(rig, "asks", "abcd", real)
    assert answer.refused is (None if loads else Refusal.OVER_QUOTA)
    told = [(event["request"], event["reason"], event["node"], event["tokens"]) for event in rig.events("load_back_refused")]
    assert told == ([] if loads else [("asks", "over_quota", rig.node("abcd").id, 4)])
    assert len(answer.pages) == (2 if loads else 0)
    assert rig.node("ab").lock_ref == (1 if loads else 0), "the load-back's lock, or none"
    rig.start_loads()
    rig.settle()
    rig.rest()


def test_an_ancestor_that_is_locked_already_takes_nothing_away() -> None:
    """R25: delta is what pinning takes: an ancestor that a running request holds is not available in the first place."""
    rig = quota_rig()
    assert rig.begin("holds", "ab")
    assert ask_load(rig, "asks", "abcd", 6).refused is None, "available 12, quota 4, delta 0"
    rig.start_loads()
    rig.settle()
    rig.evict(4)
    assert rig.node("abcd").pages is None
    assert ask_load(rig, "asks", "abcd", 8).refused is Refusal.OVER_QUOTA
    rig.rest()


@pytest.mark.parametrize("patterns", [([0, 1, 2, 3],), ([2, 2, 0], [3, 1]), ([1], [1, 1], [0])])
def test_one_allocation_of_the_whole_chain_by_owner(patterns: Sequence[Sequence[int]]) -> None:
    """R25, R4: the pages of all nodes of the chain are allocated together, with the owners that each byte was backed up with."""
    rig = Rig(cp_size=4)
    text = ""
    for index, owners in enumerate(patterns):
        text += "abcdefgh"[len(text) : len(text) + len(owners)]
        rig.serve(f"warm{index}", text, owners=owners)
        rig.settle()
    rig.evict(ALL_TOKENS)
    free = rig.cache.state.alloc.lane_free()
    answer = ask_load(rig, "asks", text)
    wanted = [owner for owners in patterns for owner in owners]
    assert owners_of(rig, answer.pages) == wanted
    assert [before - after for before, after in zip(free, rig.cache.state.alloc.lane_free(), strict=True)] == [
        wanted.count(rank) for rank in range(4)
    ]
    for side in rig.sides:
        items = queued_pages(side)
        assert len(side.transfer.called("queue_load")) == 1
        assert [page for _, pages in items for page in pages] == answer.pages
        assert [len(pages) for _, pages in items] == [len(owners) for owners in patterns]
    assert load_of(rig, 1).tokens == 2 * len(wanted)
    rig.start_loads()
    rig.settle()
    rig.rest()


def test_worked_pages_of_a_restore() -> None:
    """R4: with pages of 4 on 4 ranks, the backup of locs 4..19 is restored onto 68..83 (pages 17..20), which have the same owners:
    one allocation of 16 logical tokens."""
    rig = Rig(cp_size=4, page_size=4, usable_pages=20)
    back_up(rig, "abcd")
    assert rig.node("abcd").pages == [1, 2, 3, 4]
    rig.evict(ALL_TOKENS)
    assert rig.begin("others", "ABCDEFGHIJKL")
    rig.grow("others")
    assert rig.row("others") == list(range(5, 17))
    answer = ask_load(rig, "asks", "abcd")
    assert answer.pages == [17, 18, 19, 20]
    assert owners_of(rig, answer.pages) == [0, 1, 2, 3]
    assert load_of(rig, 1).tokens == 16
    rig.start_loads()
    rig.settle()
    rig.rest()


def test_eviction_makes_room_and_the_load_is_tried_once_more() -> None:
    """R25: with no page free, others are evicted and the same load succeeds; what pins the ancestor is not among the victims."""
    rig = Rig(usable_pages=8)
    to_host(rig, "ab", "abcd")
    assert rig.begin("brings", "ab")
    rig.start_loads()
    rig.settle()
    rig.abort("brings")
    rig.serve("fills", "pqrstu")
    rig.settle()
    assert rig.cache.available_size() == 0
    assert rig.begin("touches", "pqrstu")
    rig.abort("touches")  # so that the ancestor is the least recently used, and would go first
    answer = ask_load(rig, "asks", "abcd")
    assert answer.refused is None
    assert len(answer.pages) == 2
    assert rig.node("ab").pages is not None
    assert rig.node("pqrstu").pages is None
    assert rig.cache.counters.load_backs_under_eviction == 1
    rig.start_loads()
    rig.settle()
    rig.rest()


def test_no_device_pages_leaves_nothing_behind_but_one_warning() -> None:
    """R25: when eviction does not suffice either, one warning names tokens, node and evictable size, and everything is unpinned:
    neither lock nor hold nor load is left, and the request may compute instead."""
    rig = Rig(usable_pages=8)
    to_host(rig, "ab", owners=[0, 0])
    node = rig.node("ab")
    rig.serve("lane", "pqr", owners=[1, 1, 1])
    rig.settle()
    assert rig.begin("locked", "mnop")
    rig.grow("locked", owners=[0, 0, 0, 0])
    holders = [(n.id, n.lock_ref, n.host_ref) for n in rig.cache.state.tree.nodes()]
    answer = ask_load(rig, "asks", "ab")
    assert answer == ([], None, Refusal.NO_DEVICE_PAGES)
    assert [(n.id, n.lock_ref, n.host_ref) for n in rig.cache.state.tree.nodes()] == holders
    assert not rig.cache.state.loads
    assert not rig.cache.state.numbered
    (warning,) = rig.events("load_back_failed")
    assert (warning["request"], warning["node"], warning["tokens"]) == ("asks", node.id, 4)
    assert "evictable_size=0" in warning["reason"]
    assert "num_tokens_evicted=6" in warning["reason"]
    assert not rig.events("load_back_refused")
    assert rig.cache.counters.load_refused[Refusal.NO_DEVICE_PAGES] == 1
    rig.abort("locked")
    assert ask_load(rig, "asks", "ab").refused is None
    rig.start_loads()
    rig.settle()
    rig.rest()


def test_all_promised_tokens_or_none() -> None:
    """R25: a chain of which only the first nodes would fit is not loaded in part."""
    rig = Rig(cp_size=1, usable_pages=8)
    to_host(rig, "ab", "abcd", "abcdef")
    assert rig.begin("locked", "mnop")
    rig.grow("locked")
    answer = ask_load(rig, "asks", "abcdef")
    assert answer.refused is Refusal.OVER_QUOTA, "6 pages asked, 4 are free"
    assert [rig.node(text).pages for text in ("ab", "abcd", "abcdef")] == [None] * 3
    assert rig.cache.available_size() == 8
    assert not any(side.transfer.called("queue_load") for side in rig.sides)
    rig.rest()
