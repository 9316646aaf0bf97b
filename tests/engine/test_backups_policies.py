"""When a node is backed up: at its insert, at its second hit, or when it is evicted from the device (R19)."""

from __future__ import annotations

import pytest

from cphicache.engine import EvictResult, WriteBackShort
from cphicache.events import Level
from tests.engine.rig import C, L, N, R, Rig, Side
from tests.engine.rig_extra import ALL_TOKENS
from tests.engine_fakes import FakeTransfer

ONE = (("target", 1),)


def attempts(rig: Rig) -> int:
    """Reservations that were tried."""
    return len(rig.events("step", trigger="reserve"))


def hits(rig: Rig, *texts: str) -> list[int]:
    return [rig.node(text).backup.hits for text in texts]


def continue_with(rig: Rig, rid: str, text: str) -> None:
    """A running request goes on with tokens that no reservation covers, as decoding does."""
    rig.prompts[rid].tokens += rig.tokens(text)
    rig.grow(rid)


# -- write_through ------------------------------------------------------------------------------------------------------------------
def test_write_through_the_insert_is_hit_one() -> None:
    """R19: what was stored without a reservation (decoded tokens) is backed up by the insert that brings it into the tree."""
    rig = Rig()
    rig.begin("r1", "ab")
    rig.chunk("r1")
    rig.forward()
    rig.insert("r1")
    continue_with(rig, "r1", "cd")
    assert attempts(rig) == 1
    rig.finish("r1")
    assert (attempts(rig), hits(rig, "ab", "abcd")) == (2, [1, 1])
    rig.settle()
    assert rig.states("ab", "abcd") == [C, C]
    rig.rest()


@pytest.mark.parametrize("stage", ["reserved", "in_flight", "committed"])
def test_a_hit_on_a_pending_or_committed_node_starts_nothing(stage: str) -> None:
    """R19: it raises the hit count and that is all; in RESERVED, LAYERS_IN_FLIGHT and COMMITTED alike."""
    rig = Rig()
    rig.hold(stage != "committed")
    rig.begin("r1", "ab")
    rig.chunk("r1")
    rig.insert("r1", chunked=True)
    if stage != "reserved":
        rig.forward()
        rig.settle() if stage == "committed" else rig.tick()
    rig.insert("r1")
    state = {"reserved": R, "in_flight": L, "committed": C}[stage]
    assert (rig.state("ab"), hits(rig, "ab")) == (state, [1])
    before = attempts(rig), [len(side.transfer.called("reserve")) for side in rig.sides], rig.free_slots()
    for rid in ("r2", "r3"):
        rig.begin(rid, "ab")
        rig.grow(rid)
        rig.insert(rid)
    assert (rig.state("ab"), hits(rig, "ab")) == (state, [3])
    assert (attempts(rig), [len(side.transfer.called("reserve")) for side in rig.sides], rig.free_slots()) == before
    rig.rest()


# -- write_through_selective ----------------------------------------------------------------------------------------------------------
def test_selective_backs_up_on_the_second_request() -> None:
    """R19: two hits of different requests: the shared prefix is divided off and backed up, what only one has asked for is not."""
    rig = Rig(policy="write_through_selective")
    rig.serve("r1", "abcd")
    assert (rig.state("abcd"), hits(rig, "abcd"), attempts(rig)) == (N, [1], 0)
    rig.serve("r2", "abef")
    assert hits(rig, "ab", "abcd", "abef") == [2, 1, 1]
    assert rig.states("ab", "abcd", "abef") == [L, N, N]
    rig.settle()
    assert rig.states("ab", "abcd", "abef") == [C, N, N]
    rig.serve("r3", "abcd")
    rig.settle()
    assert rig.states("ab", "abcd", "abef") == [C, C, N]
    rig.rest()


def test_selective_counts_the_whole_path_of_a_hit() -> None:
    """R19: the second request hits every node of its prefix, which are backed up together, parents first."""
    rig = Rig(policy="write_through_selective")
    rig.begin("r1", "abcdef")
    for upto in (4, 8, 12):
        rig.chunk("r1", upto)
        rig.forward()
        rig.insert("r1", chunked=upto < 12)
    rig.finish("r1")
    assert (hits(rig, "ab", "abcd", "abcdef"), attempts(rig)) == ([1, 1, 1], 0)
    rig.serve("r2", "abcdef")
    assert hits(rig, "ab", "abcd", "abcdef") == [2, 2, 2]
    numbers = [rig.node(text).backup.number for text in ("ab", "abcd", "abcdef")]
    assert numbers == [0, 1, 2]
    rig.rest()


def test_one_request_hits_a_node_once() -> None:
    """R19: chunk inserts are not hits, and inserting a longer key again does not count the same prefix twice."""
    rig = Rig(policy="write_through_selective")
    rig.begin("r1", "abcd")
    rig.chunk("r1", 4)
    rig.forward()
    rig.insert("r1", chunked=True)
    assert hits(rig, "ab") == [0]
    rig.chunk("r1")
    rig.forward()
    rig.insert("r1")
    assert hits(rig, "ab", "abcd") == [1, 1]
    continue_with(rig, "r1", "ef")
    rig.insert("r1")
    continue_with(rig, "r1", "gh")
    rig.finish("r1")
    assert hits(rig, "ab", "abcd", "abcdef", "abcdefgh") == [1, 1, 1, 1]
    assert attempts(rig) == 0
    rig.rest()


def test_chunk_inserts_are_no_hits_and_the_prompt_is_backed_up_whole() -> None:
    """R19: under write_through each chunk is reserved before its forward, and the nodes have one hit at the end, from the last insert."""
    rig = Rig()
    rig.begin("r1", "abcdef")
    for upto, counted in ((4, 0), (8, 0), (12, 1)):
        rig.chunk("r1", upto)
        rig.forward()
        rig.insert("r1", chunked=upto < 12)
        assert hits(rig, "ab") == [counted]
    rig.finish("r1")
    assert hits(rig, "ab", "abcd", "abcdef") == [1, 1, 1]
    rig.settle()
    assert rig.states("ab", "abcd", "abcdef") == [C, C, C]
    assert attempts(rig) == 3
    rig.rest()


# -- write_back -------------------------------------------------------------------------------------------------------------------------
def evict(rig: Rig, tokens: int) -> list[tuple[int, int]]:
    """(evicted, dropped) tokens on each rank. In threads: an eviction under write_back may wait for all ranks."""
    found: dict[int, tuple[int, int]] = {}

    def run(side: Side[FakeTransfer]) -> None:
        result = side.cache.evict(tokens)
        found[side.rank] = result.num_tokens_evicted, result.num_tokens_dropped

    rig.together(run)
    return [found[side.rank] for side in rig.sides]


def test_write_back_starts_nothing_before_an_eviction() -> None:
    """R19: neither inserts nor hits back anything up; an eviction does, waits for it in drain rounds, and drops nothing. Drain rounds
    are counted apart from the reduction of a tick."""
    rig = Rig(policy="write_back")
    rig.hold()
    for rid in ("r1", "r2", "r3"):
        rig.serve(rid, "abcd")
    assert (rig.state("abcd"), attempts(rig), hits(rig, "abcd")) == (N, 0, [3])
    rig.tick(3)
    assert evict(rig, 8) == [(8, 0), (8, 0)]
    found = rig.match("abcd")
    assert (found.device_pages, found.host_hit_tokens) == ([], 8)
    counters = rig.cache.counters
    assert (counters.write_back_waits, counters.drain_reductions, counters.reductions) == (1, 1, 0)
    (noted,) = rig.events("write_back_wait")
    assert noted["nodes"] == [rig.node("abcd").id]
    rig.rest()


def test_write_back_backs_up_the_prefix_of_a_victim() -> None:
    """R15, R19: an eviction that takes only the end of a chain backs its ancestors up, too, parents first."""
    rig = Rig(policy="write_back")
    rig.serve("r1", "ab")
    rig.serve("r2", "abcd")
    assert evict(rig, 4) == [(4, 0), (4, 0)]
    assert rig.node("abcd").pages is None
    assert rig.node("ab").pages is not None
    rig.settle()
    assert rig.states("ab", "abcd") == [C, C]
    rig.serve("r3", "abxy")
    assert evict(rig, 4) == [(4, 0), (4, 0)], "what hangs on a prefix that has its copy is backed up alone"
    assert rig.state("abxy") is C
    rig.rest()


def test_write_back_takes_backed_up_nodes_first() -> None:
    """R19: a node with a host copy goes before an older one without; the older one is backed up for the next eviction, keeps its device
    pages and one hold until then, and nobody waits."""
    rig = Rig(policy="write_back")
    rig.serve("r1", "wx")
    evict(rig, 4)
    rig.serve("r2", "ab")
    rig.serve("r3", "wx")  # loaded back: on both media, and used last
    rig.settle()
    assert rig.states("wx", "ab") == [C, N]
    waits = rig.cache.counters.write_back_waits
    rig.hold()
    assert evict(rig, 4) == [(4, 0), (4, 0)]
    assert rig.node("wx").pages is None
    assert (rig.state("ab"), rig.node("ab").lock_ref, len(rig.match("ab").device_pages)) == (L, 1, 2)
    assert rig.cache.counters.write_back_waits == waits
    rig.finish_all()
    rig.settle()
    assert evict(rig, 4) == [(4, 0), (4, 0)]
    assert rig.cache.counters.write_back_waits == waits
    rig.rest()


@pytest.mark.parametrize("short", list(WriteBackShort))
def test_an_eviction_that_is_short_waits_or_drops(short: WriteBackShort) -> None:
    """R19: with no backed-up node to take: wait for the backups, or drop the nodes now, by config."""
    rig = Rig(policy="write_back", write_back_short=short)
    rig.hold()
    rig.serve("r1", "ab")
    rig.serve("r2", "cd")
    dropped = 4 if short is WriteBackShort.DROP else 0
    assert evict(rig, 4) == [(4, dropped)] * 2
    counters = rig.cache.counters
    assert (counters.write_back_waits, counters.drain_reductions) == ((0, 0) if dropped else (1, 1))
    assert rig.has("ab") is (dropped == 0)
    assert rig.state("cd") is (L if dropped else N)  # dropping, the next victim is backed up ahead
    rig.rest()


@pytest.mark.parametrize("short", list(WriteBackShort))
def test_a_shortage_of_one_lane_is_enough_to_write_back(short: WriteBackShort) -> None:
    """R4, R19: an allocation that lacks pages of one owner only evicts as much as that takes, waiting or dropping, and succeeds."""
    rig = Rig(policy="write_back", write_back_short=short, usable_pages=8)
    rig.serve("r1", "ab", owners=[0, 0])
    rig.serve("r2", "cd", owners=[0, 0])
    assert rig.cache.state.alloc.lane_free() == (0, 4)
    assert rig.begin("r3", "xy")
    rig.together(lambda side: side.rows["r3"].extend(side.cache.alloc(2, None) or ()))
    assert sorted(rig.cache.state.owners(rig.row("r3"))) == [0, 1]
    assert rig.cache.counters.write_back_waits == (short is WriteBackShort.WAIT)
    assert rig.has("ab") is (short is WriteBackShort.WAIT)
    assert rig.node("cd").pages is not None
    rig.rest()


def test_an_eviction_waits_once_for_all_that_it_takes() -> None:
    """R19: an eviction that needs a token more than the first victim has starts the backups of two, and waits for both together."""
    rig = Rig(policy="write_back", ranks=[0])
    for text in ("ab", "cd", "ef"):
        rig.serve(text, text)
    assert rig.evict(5) == EvictResult(8, 0)
    assert [event["nodes"] for event in rig.events("write_back_wait")] == [[rig.node("ab").id, rig.node("cd").id]]
    rig.rest()


def test_an_allocation_is_refused_where_an_eviction_would_wait() -> None:
    """R4, R19: dropping, an allocation that lacks pages of one owner does not wait for those that a backup in flight keeps: it may be
    refused, and is."""
    rig = Rig(policy="write_back", write_back_short="drop", ranks=[0], usable_pages=8)
    rig.hold()
    for text in ("ab", "cd"):
        rig.serve(text, text, owners=[0, 0])
    assert rig.evict(4) == EvictResult(4, 4)
    assert (rig.state("cd"), rig.cache.state.alloc.lane_free()) == (L, (2, 4))
    assert rig.cache.alloc(6, None) is None
    assert (rig.state("cd"), rig.cache.counters.write_back_waits) == (L, 0)
    rig.rest()


def test_what_a_wait_has_backed_up_goes_before_what_has_no_copy() -> None:
    """R4, R15, R19: the prefix of a victim is backed up with it; if the victim does not give the lane enough, that prefix goes next, and
    nobody waits for an older node without a host copy."""
    rig = Rig(policy="write_back", ranks=[0], usable_pages=8)
    rig.serve("r1", "ab", owners=[1, 1])
    rig.serve("r2", "abcd", owners=[0, 0])
    rig.serve("r3", "xy", owners=[1, 1])
    assert rig.begin("uses", "ab")
    rig.abort("uses")
    assert rig.cache.state.alloc.lane_free() == (2, 0)
    assert rig.cache.alloc(2, None) is not None
    assert (rig.states("ab", "abcd", "xy"), rig.cache.counters.write_back_waits) == ([C, C, N], 1)
    assert [rig.node(text).pages is None for text in ("ab", "abcd", "xy")] == [True, True, False]


def test_a_victim_whose_backup_fails_or_is_refused_goes_without() -> None:
    """R19, R22: a wait ends also when the copy fails on some rank, or when there are no host slots: the pages are needed."""
    rig = Rig(policy="write_back", host_slots=4)
    rig.serve("r1", "ab")
    rig.local(1).fail_copy_next = True
    assert evict(rig, 4) == [(4, 4), (4, 4)]
    assert not rig.has("ab")
    rig.serve("r2", "stuvwxyz")  # more than the host pool has
    assert evict(rig, 16) == [(16, 16), (16, 16)]
    assert rig.free_slots() == [4, 4]
    rig.rest()


def test_a_written_back_node_keeps_its_pages_and_one_hold_until_commit() -> None:
    """R19: while its copy is in flight it is locked once and a device hit; committed, it can be evicted without a drop."""
    rig = Rig(policy="write_back", write_back_short="drop")
    rig.hold()
    rig.serve("r1", "ab")
    rig.serve("r2", "cd")
    evict(rig, 4)
    assert (rig.state("cd"), rig.node("cd").lock_ref, len(rig.match("cd").device_pages)) == (L, 1, 2)
    rig.finish_all()
    rig.tick(2)
    assert (rig.state("cd"), rig.node("cd").lock_ref) == (C, 0)
    assert evict(rig, 4) == [(4, 0), (4, 0)]
    rig.rest()


def back_up_ahead(short: WriteBackShort) -> Rig:
    """``ab``, then the chain ``cd``, ``cdef``: their backups have been started ahead, by an eviction that took another node."""
    rig = Rig(policy="write_back", write_back_short=short)
    rig.serve("r0", "wx")
    evict(rig, 4)
    rig.serve("r1", "ab")
    rig.serve("r2", "cd")
    rig.serve("r3", "cdef")
    rig.serve("r4", "wx")  # loaded back, or with no host copy (dropping) backed up
    rig.settle()
    rig.hold()
    evict(rig, 4)
    if short is WriteBackShort.DROP:  # that dropped one
        rig.serve("r5", "ab")
        evict(rig, 4)
    return rig


@pytest.mark.parametrize("short", list(WriteBackShort))
@pytest.mark.parametrize("ticks", [0, 1])
def test_an_eviction_waits_for_pages_that_one_before_it_backs_up(short: WriteBackShort, ticks: int) -> None:
    """R19, R21: a scheduler counts what may be evicted, then asks for it in several evictions. What the first one backs up ahead is locked
    when the next one needs it: that one waits, dropping or not, and gets the pages, of whole chains too; the reduction of a tick comes
    first, if one is under way."""
    rig = back_up_ahead(short)
    for _ in range(ticks):
        rig.tick()
    assert rig.cache.state.outstanding is bool(ticks)
    protected, evictable = rig.cache.protected_size(), rig.cache.evictable_size()
    assert protected > 0
    waits = rig.cache.counters.write_back_waits
    told = evict(rig, protected + evictable)
    assert [evicted for evicted, _ in told] == [protected + evictable] * 2
    assert rig.cache.counters.write_back_waits > waits
    assert (rig.cache.protected_size(), rig.cache.evictable_size()) == (0, 0)
    rig.rest()


@pytest.mark.parametrize("short", list(WriteBackShort))
def test_an_eviction_does_not_wait_for_pages_that_a_request_keeps(short: WriteBackShort) -> None:
    """R19: the end of a backup whose node a running request locks gives no page back: nobody waits for it."""
    rig = back_up_ahead(short)
    rig.begin("r6", "ab")
    rig.begin("r7", "cdef")
    evict(rig, rig.cache.evictable_size())
    waits = rig.cache.counters.write_back_waits
    assert rig.states("ab", "cdef") == [L, L]
    assert evict(rig, 4) == [(0, 0), (0, 0)]
    assert rig.cache.counters.write_back_waits == waits
    rig.abort("r6")
    rig.abort("r7")
    rig.rest()


@pytest.mark.parametrize("short", list(WriteBackShort))
def test_pages_whose_backup_fails_while_an_eviction_waits_for_them_are_taken(short: WriteBackShort) -> None:
    """R19, R22: a backup that was started ahead fails while its pages are waited for: they are needed all the same."""
    rig = back_up_ahead(short)
    wanted = rig.cache.protected_size() + rig.cache.evictable_size()
    rig.fail_copies(rig.node("cd").backup.key, 1)
    assert [evicted for evicted, _ in evict(rig, wanted)] == [wanted] * 2
    rig.rest()


def test_what_follows_a_node_that_is_not_worth_it_is_not_either() -> None:
    """R19: a node below one with too few hits is not asked for, even where it has enough itself, so that nothing is refused and logged in
    vain; when the upper one is due, both are backed up."""
    rig = Rig(policy="write_through_selective", selective_hits=4)
    assert rig.begin("first", "abcdef")
    rig.grow("first", 4)
    rig.insert("first", chunked=True)
    rig.grow("first")
    rig.finish("first")
    assert rig.begin("inside", "abc")
    rig.grow("inside")
    rig.insert("inside")
    continue_with(rig, "inside", "def")
    rig.finish("inside")
    assert hits(rig, "ab", "abcdef") == [2, 3]
    rig.serve("third", "abcdef")
    assert hits(rig, "ab", "abcdef") == [3, 4]
    assert (attempts(rig), rig.cache.counters.refused) == (0, {})
    rig.serve("fourth", "abcdef")
    rig.settle()
    assert rig.states("ab", "abcdef") == [C, C]
    rig.rest()


def one_copy_among_others(short: WriteBackShort) -> Rig:
    """``ab``, ``cd``, ``mn`` and ``ef`` would go in this order; of these ``mn`` alone has a host copy."""
    rig = Rig(ranks=[0], cp_size=1, policy="write_back", write_back_short=short)
    rig.serve("dropped, or waited for", "gh")
    rig.serve("backed up", "mn")
    rig.evict({"drop": 4, "wait": 8}[short])
    rig.settle()
    rig.serve("r1", "ab")
    rig.serve("r2", "cd")
    assert rig.begin("uses", "mn")
    rig.start_loads()
    rig.settle()
    rig.abort("uses")
    rig.serve("r3", "ef")
    assert rig.states("ab", "cd", "mn", "ef") == [N, N, C, N]
    return rig


def what_is_left(rig: Rig) -> dict[str, bool]:
    """Which of these nodes are still in the tree, and whether they are on the device."""
    return {text: rig.node(text).pages is not None for text in ("ab", "cd", "mn", "ef") if rig.has(text)}


def used_last(rig: Rig, text: str, others: str) -> None:
    """``text``, with a host copy and on the device, is used after each letter of ``others`` has been served, none of which has a copy."""
    rig.serve("backed up", text)
    rig.evict(ALL_TOKENS)
    for letter in others:
        rig.serve(letter, letter)
    assert rig.begin("uses", text)
    rig.start_loads()
    rig.settle()
    rig.abort("uses")


def test_the_first_eight_that_have_no_copy_are_backed_up_for_the_next_eviction() -> None:
    """R19: an eviction that has found enough host copies starts the backups of so many nodes that it has passed over, in order."""
    rig = Rig(ranks=[0], policy="write_back")
    used_last(rig, "wx", "abcdefghij")
    rig.hold()
    assert rig.evict(4) == EvictResult(4, 0)
    assert rig.node("wx").pages is None
    assert rig.states(*"abcdefghij") == [L] * 8 + [N] * 2
    rig.rest()


def test_a_host_copy_is_found_behind_256_nodes_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """R19: that is how far an eviction looks for one before it waits; the 257th in order is not looked at."""
    monkeypatch.setattr(Rig, "check", lambda rig: None)  # looks at every node after every call
    rig = Rig(
        ranks=[0], level=Level.OFF, cp_size=1, page_size=1, usable_pages=300, host_slots=300, policy="write_back", payloads=ONE
    )
    used_last(rig, "wx", "".join(map(chr, range(1000, 1257))))
    waits = rig.cache.counters.write_back_waits
    for waited in (1, 0):
        assert rig.evict(1).num_tokens_dropped == 0
        waits += waited
        assert (rig.cache.counters.write_back_waits, rig.node("wx").pages is None) == (waits, not waited)


@pytest.mark.parametrize("short", list(WriteBackShort))
@pytest.mark.parametrize("scan", [1, 2])
def test_a_search_for_host_copies_ends_after_so_many_nodes_without(
    scan: int, short: WriteBackShort, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R19, R27: an eviction under write_back finds a host copy behind so many nodes that have none; behind more it does as when there is
    none: what would go first is waited for, or dropped, and nothing else."""
    monkeypatch.setattr("cphicache.engine.eviction.WRITE_BACK_SCAN", scan)
    rig = one_copy_among_others(short)
    dropped = 4 if (scan, short) == (1, "drop") else 0
    assert rig.evict(4) == EvictResult(4, dropped)
    left = {"ab": True, "cd": True, "mn": True, "ef": True}
    if scan == 2:
        left["mn"] = False
    elif dropped:
        del left["ab"]
    else:
        left["ab"] = False
    assert what_is_left(rig) == left
    rig.rest()


@pytest.mark.parametrize("short", list(WriteBackShort))
def test_what_a_search_has_passed_over_counts_for_the_whole_eviction(
    short: WriteBackShort, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R19: an eviction that has found one host copy, and needs more, takes none of the nodes without one out of turn: by configuration it
    waits for the first, or drops that."""
    monkeypatch.setattr("cphicache.engine.eviction.WRITE_BACK_SCAN", 2)
    rig = one_copy_among_others(short)
    assert rig.evict(8) == EvictResult(8, {"drop": 4, "wait": 0}[short])
    left = {"ab": False, "cd": True, "mn": False, "ef": True}
    if short == "drop":
        del left["ab"]
    assert what_is_left(rig) == left
    rig.rest()
