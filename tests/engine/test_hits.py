"""Hits that pass a node in part, in one tick with others, or in an eviction: what is tried, and what is counted (R15, R17, R19)."""

from __future__ import annotations

from tests.engine.rig import C, N, Rig
from tests.engine.rig_extra import fail_backup


def test_a_hit_inside_a_node_covers_no_more_than_its_key() -> None:
    """R19: a request whose first insert ends inside of somebody's node has hit so many pages; what it stores behind them is hit, and
    backed up, by its next insert."""
    rig = Rig()
    rig.serve("first", "abcd")
    rig.settle()
    assert rig.begin("goes on", "ab")
    rig.grow("goes on")
    assert rig.insert("goes on") == rig.row("goes on")
    rig.prompts["goes on"].tokens += rig.tokens("xy")
    rig.grow("goes on")
    assert rig.insert("goes on")
    assert [rig.node(text).backup.hits for text in ("abxy", "abcd")] == [1, 2]
    rig.finish("goes on")
    rig.settle()
    assert rig.state("abxy") is C
    rig.rest()


def test_what_hangs_below_a_node_that_was_refused_in_this_tick_is_asked_for_too() -> None:
    """R15, R19: a node that found no slots a moment ago is not asked for again in this tick, but what follows it is, and is refused for its
    sake: so both are tried again, the parent first, when there are slots."""
    rig = Rig(cp_size=1, host_slots=8)
    rig.hold()
    rig.serve("full", "wxyz")
    rig.serve("one", "ab")
    rig.serve("two", "abcd")
    assert rig.states("ab", "abcd") == [N, N]
    assert [event["node"] for event in rig.events("step", trigger="reserve", refused="parent_not_backed")][-1] == rig.node(
        "abcd"
    ).id
    fail_backup(rig, rig.node("wxyz").backup.key, 0)
    rig.hold(False)
    rig.tick(2)
    rig.settle()
    assert rig.states("ab", "abcd") == [C, C]
    rig.rest()


def test_an_eviction_asks_once_for_each_node() -> None:
    """R15, R19: under write_back a chain of victims without host copies shares its ancestors; one that is refused is asked for once."""
    rig = Rig(cp_size=1, policy="write_back", host_slots=2)
    for rid, text in {"one": "ab", "two": "abcd", "three": "abcdef"}.items():
        rig.serve(rid, text)
    assert rig.evict(12).num_tokens_dropped == 12
    assert len(rig.events("step", trigger="reserve")) == 1
    rig.rest()


def test_an_allocation_that_must_wait_waits_once_for_all_that_it_lacks() -> None:
    """R4, R19: under write_back an allocation backs up as many victims as it takes to give every lane its pages, and waits for them
    together."""
    rig = Rig(ranks=[0], policy="write_back", usable_pages=8)
    for text in ("ab", "cd", "ef", "gh"):
        rig.serve(text, text)
    assert rig.cache.alloc(4, None) is not None
    assert (rig.cache.counters.write_back_waits, rig.cache.counters.device_dropped_tokens) == (1, 0)
    assert [rig.node(text).pages is None for text in ("ab", "cd", "ef", "gh")] == [True, True, False, False]


def test_both_halves_of_a_node_have_been_tried_as_often() -> None:
    """R15: dividing a node gives its halves no further tries."""
    rig = Rig(cp_size=1, host_slots=8, max_retries=1)
    rig.local(0).fail_copy_next = True
    rig.serve("fails", "abcd")
    rig.tick(2)
    rig.settle()
    rig.hold()
    rig.serve("other", "wx")
    rig.local(0).fail_copy_next = True
    fail_backup(rig, rig.node("wx").backup.key, 0)
    rig.hold(False)
    rig.tick(2)
    rig.settle()
    assert (rig.state("abcd"), rig.node("abcd").backup.retries) == (N, 1)
    assert rig.begin("divides", "aby")
    rig.grow("divides")
    assert rig.insert("divides", chunked=True)
    assert [rig.node(text).backup.retries for text in ("ab", "abcd", "aby")] == [1, 1, 0]
    assert rig.cache.counters.splits == 1
    rig.rest()


def test_both_halves_of_a_node_wait_for_slots_as_it_did() -> None:
    """R15: dividing a node that was refused makes neither half due before slots are freed; then both are backed up."""
    rig = Rig(cp_size=1, host_slots=8)
    rig.hold()
    rig.serve("full", "stuv")
    rig.serve("is refused", "abcd")
    assert rig.begin("divides", "aby")
    rig.grow("divides")
    assert rig.insert("divides", chunked=True)
    rig.tick()
    assert (rig.cache.counters.splits, rig.cache.counters.retries) == (1, 0)
    rig.hold(False)
    fail_backup(rig, rig.node("stuv").backup.key, 0)
    rig.tick(2)
    rig.settle()
    assert (rig.states("ab", "abcd"), rig.cache.counters.retries) == ([C, C], 2)
    rig.rest()


def test_a_prompt_below_a_page_may_wait_for_what_it_will_insert() -> None:
    """R17: a key without a whole page, of a request that will insert more, is deferred for that; past the bound it is matched as it is."""
    rig = Rig(max_deferral_ticks=1)
    rig.hold()
    rig.serve("first", "abcd")
    short, whole = rig.cache.key([7]), rig.key("abz")
    assert rig.each(lambda side: side.cache.prepare("r", short, whole)) is None
    rig.tick(2)
    found = rig.each(lambda side: side.cache.prepare("r", short, whole))
    assert found is not None
    assert (found.device_pages, found.host_nodes) == ([], [])
    assert rig.cache.counters.deferrals_expired == 1
    rig.abort("r")
    rig.finish_all()
    rig.settle()
    rig.rest()
