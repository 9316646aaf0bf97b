"""Keys: whole pages, bigrams, namespaces, and comparison without copies."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cphicache.tree import RadixKey, check_page_size
from tests.tree.twin import common, pages_of


@pytest.mark.parametrize("page_size", [1, 4, 16, 1024])
def test_key_is_cut_down_to_whole_pages(page_size: int) -> None:
    """R28: a key holds whole pages only, for every page size up to 1024."""
    for tokens in (0, 1, page_size - 1, page_size, 2 * page_size - 1, 3 * page_size):
        key = RadixKey.of(range(tokens), page_size)
        assert (key.pages, key.len_tokens) == (tokens // page_size, tokens // page_size * page_size)
        assert len(key.data) == 8 * key.len_tokens


@pytest.mark.parametrize("page_size", [0, -1, 1025])
def test_page_size_outside_1_to_1024_is_refused(page_size: int) -> None:
    """R28: page sizes other than 1..1024 are refused with the value."""
    with pytest.raises(ValueError, match=rf"page_size {page_size} is not in 1\.\.1024"):
        check_page_size(page_size)
    assert [check_page_size(least_or_most) for least_or_most in (1, 1024)] == [1, 1024]
    with pytest.raises(ValueError, match=rf"page_size {page_size} is not in 1\.\.1024"):
        RadixKey.of([1], page_size)


def test_bigram_key_has_one_element_less_than_tokens() -> None:
    """R28: EAGLE keys are pairs of neighbours, so n tokens are n - 1 elements, cut down to whole pages."""
    key = RadixKey.of([1, 2, 3, 4, 5], 2, None, True)
    assert (key.pages, key.len_tokens) == (2, 4)
    assert key.page(0) == array("q", [1, 2, 2, 3]).tobytes()
    assert key.page(1) == array("q", [3, 4, 4, 5]).tobytes()
    assert RadixKey.of([1, 2, 3, 4], 2, None, True).pages == 1
    assert RadixKey.of([1], 1, None, True).pages == RadixKey.of([], 1, None, True).pages == 0


def test_tokens_may_come_as_any_sequence_of_integers() -> None:
    """R28: lists, tuples, arrays of any width, ranges and bytes give the same key; what is no int64 is refused."""
    expected = RadixKey.of([3, 4, 5, 6], 2, "x")
    for tokens in ((3, 4, 5, 6), array("q", [3, 4, 5, 6]), array("i", [3, 4, 5, 6]), range(3, 7), bytes([3, 4, 5, 6])):
        assert RadixKey.of(tokens, 2, "x") == expected
    assert hash(RadixKey.of(range(3, 7), 2, "x")) == hash(expected)
    for wrong in ([2**63], [1.5], ["a"]):
        with pytest.raises(ValueError, match="not an int64"):
            RadixKey.of(wrong, 1)  # type: ignore[arg-type]


def test_pages_and_slices_stay_inside_the_key() -> None:
    """R28: a page or a slice outside the key is an error that names it; slices keep namespace and kind."""
    key = RadixKey.of(range(9), 2, "lora", True)
    assert key.slice(1, 3).page(0) == key.page(1)
    assert key.slice(1, 3).is_same_kind(key)
    assert key.slice(2, 2).pages == 0
    for index in (-1, 4):
        with pytest.raises(IndexError, match=f"page {index} of a key of 4 pages"):
            key.page(index)
    for start, end in ((-1, 2), (3, 2), (0, 5)):
        with pytest.raises(IndexError, match="of a key of 4 pages"):
            key.slice(start, end)


def test_namespace_belongs_to_the_child_key_at_the_root_only() -> None:
    """R28: the extra key parts keys at the root; None and the empty string are two namespaces; below, the page alone is the key."""
    keys = [RadixKey.of([1, 2], 1, extra) for extra in (None, "", "a")]
    assert len({key.child_key(0, at_root=True) for key in keys}) == 3
    assert {key.child_key(1, at_root=False) for key in keys} == {keys[0].page(1)}


def test_keys_of_different_kinds_have_nothing_in_common() -> None:
    """R28: namespace, page size and bigram flag part keys even where the bytes are equal."""
    key = RadixKey.of([5, 5, 5, 5, 5], 2)
    for other in (
        RadixKey.of([5, 5, 5, 5], 2, "a"),
        RadixKey.of([5, 5, 5, 5], 1),
        RadixKey.of([5, 5, 5], 1, None, True),
        RadixKey.of([5, 5, 5, 5, 5], 2, None, True),
    ):
        assert key.common_pages(0, other) == other.common_pages(0, key) == 0


@pytest.mark.parametrize("is_bigram", [False, True])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_common_pages_agree_with_comparing_page_by_page(page_size: int, is_bigram: bool) -> None:
    """R28: the common prefix at any two offsets is the one found by comparing page by page."""
    tokens = st.lists(st.integers(0, 1), max_size=8 * page_size).map(lambda drawn: [0] * (len(drawn) // 2) + drawn)

    @settings(derandomize=True, max_examples=60, deadline=None, database=None)
    @given(mine=tokens, theirs=tokens, my_start=st.integers(0, 9), their_start=st.integers(0, 9))
    def run(mine: list[int], theirs: list[int], my_start: int, their_start: int) -> None:
        a, b = RadixKey.of(mine, page_size, None, is_bigram), RadixKey.of(theirs, page_size, None, is_bigram)
        twin_a, twin_b = pages_of(mine, page_size, is_bigram), pages_of(theirs, page_size, is_bigram)
        assert (a.pages, b.pages) == (len(twin_a), len(twin_b))
        assert a.common_pages(my_start, b, their_start) == common(twin_a[my_start:], twin_b[their_start:])

    run()


def test_every_position_of_the_first_difference_is_found() -> None:
    """R28: the binary search finds the first page that differs wherever it is, later differences notwithstanding."""
    tokens = list(range(64))
    key = RadixKey.of(tokens, 2)
    for position in range(64):
        changed = list(tokens)
        changed[position] = changed[63] = -1
        assert key.common_pages(0, RadixKey.of(changed, 2)) == position // 2
