"""KV that lacks a payload, because a forward of its batch did not come, is kept out of everything (R5, R11)."""

from __future__ import annotations

import pytest

from cphicache.engine import Refusal
from tests.engine.rig import B, C, L, N, Rig


def without_draft(rig: Rig, rid: str) -> None:
    """The current batch's target forward, with no draft forward after it."""
    rig.layer(0, 0, 1, 2)
    rig.end_payload(0)
    rig.end_forward()


def test_what_was_whole_before_is_inserted_and_backed_up() -> None:
    """R5, R11: a request whose second chunk came without draft KV keeps what the first one stored: that part alone enters the tree and is
    committed, and the pages behind it are free when the request ends."""
    rig = Rig()
    assert rig.begin("r", "abcdef")
    rig.chunk("r", 4)
    rig.forward()
    rig.insert("r", chunked=True)
    rig.chunk("r", 8)
    lost = rig.op("r")
    without_draft(rig, "r")
    assert rig.events("step", node=lost.node_id, trigger="abort")[-1]["reason"] == "payload_not_stored"
    rig.insert("r", chunked=True)
    assert (rig.has("ab"), rig.has("abc")) == (True, False)
    rig.settle()
    assert (rig.state("ab"), lost.state) == (C, N)
    assert rig.finish("r")
    assert not rig.has("abc")
    assert rig.cache.available_size() == 2 * (rig.config.usable_pages - 2)
    rig.rest()


def test_a_reservation_that_ends_where_it_begins_is_kept() -> None:
    """R5, R12: a chunk that is whole and not inserted yet keeps its backup when the next one comes without draft KV, and both are told
    apart by the page at which they meet."""
    rig = Rig()
    assert rig.begin("r", "abcdef")
    rig.chunk("r", 4)
    rig.forward()
    rig.chunk("r", 8)
    without_draft(rig, "r")
    whole, lost = rig.cache.state.requests["r"].ops
    assert (whole.state, lost.state) == (L, B)
    assert rig.cache.state.requests["r"].whole_pages == 2
    assert rig.finish("r")
    rig.settle()
    assert (rig.state("ab"), rig.has("abc"), lost.state) == (C, False, N)
    rig.rest()


def test_nothing_more_is_reserved_for_it() -> None:
    """R5: what follows KV that lacks a payload is not backed up either: the next reservation is refused, logged and counted as such."""
    rig = Rig()
    assert rig.begin("r", "abcdef")
    rig.chunk("r", 4)
    without_draft(rig, "r")
    assert rig.chunk("r") is False
    assert rig.cache.counters.refused == {Refusal.PAYLOAD_NOT_STORED: 1}
    (refused,) = rig.events("refused")
    assert (refused["request"], refused["node"], refused["reason"]) == ("r", None, "payload_not_stored")
    rig.forward()
    assert rig.finish("r")
    assert not rig.has("a")
    rig.rest()


@pytest.mark.parametrize("first_without", [0, 1])
def test_the_earliest_page_without_counts(first_without: int) -> None:
    """R5: with several such forwards, all that is behind the first of them is kept out, in whatever order they end."""
    rig = Rig()
    assert rig.begin("r", "abcdef")
    starts = (4, 2) if first_without else (2, 4)
    for start in starts:
        batch = rig.batch
        rig.each(lambda side, batch=batch, start=start: side.cache.stores("r", batch, start * 2))  # type: ignore[misc]
        without_draft(rig, "r")
    rig.grow("r")
    assert rig.cache.state.requests["r"].whole_pages == 2
    assert rig.insert("r") == rig.row("r")[:2]
    assert (rig.has("ab"), rig.has("abc")) == (True, False)
    rig.rest()


def test_an_insert_that_ends_before_what_lacks_a_payload_is_made_as_it_is() -> None:
    """R5: what is inserted of a request is whole as long as it ends before the first page without a payload."""
    rig = Rig()
    assert rig.begin("r", "abcdef")
    rig.each(lambda side: side.cache.stores("r", rig.batch, 8))
    without_draft(rig, "r")
    for pages in (2, 4):
        rig.grow("r", 2 * pages)
        assert rig.insert("r", chunked=True) == rig.row("r")
    rig.grow("r")
    assert rig.insert("r") == rig.row("r")[:4]
    assert (rig.has("abcd"), rig.has("abcde")) == (True, False)
    rig.rest()


def test_the_part_that_is_the_trees_stays_its() -> None:
    """R5, R30: a forward that stores nothing beyond the prefix that the tree has, and lacks a payload, takes nothing out of the tree."""
    rig = Rig()
    rig.serve("first", "abcd")
    rig.settle()
    assert rig.begin("again", "abcdef")
    batch = rig.batch
    rig.each(lambda side: side.cache.stores("again", batch, 2))
    without_draft(rig, "again")
    rig.grow("again")
    assert rig.insert("again") == rig.node("abcd").pages
    assert not rig.has("abcde")
    assert rig.finish("again")
    assert rig.state("abcd") is C
    rig.rest()


def test_who_ended_inside_its_forward_is_passed_over() -> None:
    """R5: a request that ended before the forward of its batch did has nothing to be kept out; the batch ends all the same."""
    rig = Rig()
    assert rig.begin("gone", "ab")
    assert rig.begin("stays", "cd")
    rig.chunk("gone")
    rig.chunk("stays")
    rig.abort("gone")
    without_draft(rig, "stays")
    assert rig.finish("stays")
    assert not rig.has("c")
    assert rig.cache.state.batches == {}
    rig.rest()
