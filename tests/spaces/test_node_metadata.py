"""What one rank holds of a node's host copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cphicache.spaces import CpSharedKVLayout, LogicalPage
from cphicache.spaces.metadata import CpHiCacheNodeMetadata, OwnedPages
from cphicache.spaces.tensors import owned_locs


def parts(metadata: CpHiCacheNodeMetadata) -> tuple[int, list[int], list[int]]:
    return metadata.logical_len, metadata.owned_positions.tolist(), metadata.host_indices.tolist()


def pages_of(first_loc: int, last_loc: int) -> list[LogicalPage]:
    return [LogicalPage(page) for page in range(first_loc // 4, last_loc // 4 + 1)]


def backup(rank: int, first_loc: int, last_loc: int, base: int = 1) -> CpHiCacheNodeMetadata:
    layout = CpSharedKVLayout(4, 4, rank, base)
    pages = pages_of(first_loc, last_loc)
    positions, _ = owned_locs(layout, pages)
    return CpHiCacheNodeMetadata(
        logical_len=last_loc - first_loc + 1,
        owned_positions=positions,
        host_indices=[100 + slot for slot in range(len(positions))],
        page_owners=layout.owners(pages),
        page_size=4,
    )


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"logical_len": -1, "owned_positions": [], "host_indices": []}, "logical_len"),
        ({"logical_len": 4, "owned_positions": [2, 1], "host_indices": [8, 9]}, "sorted"),
        ({"logical_len": 4, "owned_positions": [1, 1], "host_indices": [8, 9]}, "sorted"),
        ({"logical_len": 4, "owned_positions": [1, 2], "host_indices": [9]}, "same length"),
        (
            {"logical_len": 4, "owned_positions": [1, 2], "host_indices": [8, 9], "draft_host_indices": [9]},
            "draft_host_indices .* same length",
        ),
        ({"logical_len": 4, "owned_positions": [4], "host_indices": [9]}, r"\[0, logical_len\)"),
        ({"logical_len": 4, "owned_positions": [-1], "host_indices": [9]}, r"\[0, logical_len\)"),
        ({"logical_len": 4, "owned_positions": [0], "host_indices": [-9]}, "host slots are 0 or more"),
        ({"logical_len": 4, "owned_positions": [0.5], "host_indices": [9]}, "dtype torch.float32: give integers"),
        ({"logical_len": 4, "owned_positions": torch.zeros(1, 1), "host_indices": [9]}, "one dimension"),
    ],
)
def test_impossible_metadata_is_refused(arguments: dict[str, Any], text: str) -> None:
    """R3: each impossible combination raises a ValueError whose text names what is wrong."""
    with pytest.raises(ValueError, match=text):
        CpHiCacheNodeMetadata(**arguments)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"page_owners": [0, 1, 2], "page_size": 4}, "needs 2, one a page"),
        ({"page_owners": [0, 1, 2]}, "page_size too"),
        ({"page_owners": []}, "page_size too"),
        ({"page_owners": [0, 1], "page_size": 0}, "page_size is 0"),
        ({"page_size": 4}, "page_size is 4 without page_owners"),
        ({"page_owners": [0, -1], "page_size": 4}, "owners are ranks"),
        ({"page_owners": [0, 1], "page_size": 4, "owned_positions": [0, 1, 2], "host_indices": [7, 8, 9]}, "whole pages"),
        ({"page_owners": [0, 1], "page_size": 4, "owned_positions": [0, 4], "host_indices": [7, 8]}, "whole pages"),
        ({"page_owners": [0, 0], "page_size": 4, "owned_positions": [0, 1, 2, 3], "host_indices": [6, 7, 8, 9]}, "whole pages"),
    ],
)
def test_page_owners_must_agree_with_the_rest(arguments: dict[str, Any], text: str) -> None:
    """R3: page_owners has one entry a page, and the owned positions are all the whole pages of one owner."""
    with pytest.raises(ValueError, match=text):
        CpHiCacheNodeMetadata(**{"logical_len": 8, "owned_positions": [], "host_indices": [], **arguments})


def test_vectors_are_int64_on_the_cpu() -> None:
    """R3: sequences and integer tensors alike become int64 CPU vectors; zero owned positions are valid."""
    metadata = CpHiCacheNodeMetadata(
        logical_len=8, owned_positions=(1, 3), host_indices=torch.tensor([4, 5], dtype=torch.int32), draft_host_indices=[6, 7]
    )
    assert metadata.draft_host_indices is not None
    for vector in (metadata.owned_positions, metadata.host_indices, metadata.draft_host_indices):
        assert (vector.dtype, vector.device.type) == (torch.int64, "cpu")
    assert metadata.owned_len == 2
    empty = CpHiCacheNodeMetadata(logical_len=8, owned_positions=[], host_indices=torch.tensor([]))
    assert parts(empty) == (8, [], [])
    assert empty.host_indices.dtype == torch.int64
    assert "logical_len=8, owned_positions=[1, 3], host_indices=[4, 5], draft_host_indices=[6, 7]" in repr(metadata)
    assert "draft_host_indices=None" in repr(empty)


def test_arguments_are_keyword_only() -> None:
    """R3: positions and slots cannot be exchanged by order: the constructor takes keywords only."""
    with pytest.raises(TypeError):
        CpHiCacheNodeMetadata(8, [1], [2])  # type: ignore[call-arg]


def test_split_without_owners() -> None:
    """R3: the worked splits without owners, draft slots alike."""
    whole = CpHiCacheNodeMetadata(logical_len=8, owned_positions=[1, 3, 7], host_indices=[10, 11, 12])
    head, tail = whole.split(0)
    assert parts(head) == (0, [], [])
    assert parts(tail) == (8, [1, 3, 7], [10, 11, 12])
    assert head.draft_host_indices is None
    assert tail.draft_host_indices is None
    whole = CpHiCacheNodeMetadata(
        logical_len=10, owned_positions=[0, 2, 5, 9], host_indices=[20, 21, 22, 23], draft_host_indices=[30, 31, 32, 33]
    )
    head, tail = whole.split(5)
    assert parts(head) == (5, [0, 2], [20, 21])
    assert parts(tail) == (5, [0, 4], [22, 23])
    assert head.require_draft().tolist() == [30, 31]
    assert tail.require_draft().tolist() == [32, 33]
    assert parts(whole.drop_head(5)) == parts(tail)


@pytest.mark.parametrize("split_len", [5, -1])
def test_split_outside_the_node_is_refused(split_len: int) -> None:
    """R3: split(5) and split(-1) of 4 raise, naming split_len."""
    with pytest.raises(ValueError, match=f"split_len is {split_len}"):
        CpHiCacheNodeMetadata(logical_len=4, owned_positions=[], host_indices=[]).split(split_len)


def test_split_with_owners() -> None:
    """R3: rank 1 of 4..19: split(8) leaves the child owning nothing, split(4) the parent; owners are divided by page."""
    whole = backup(1, 4, 19)
    head, tail = whole.split(8)
    assert (head.page_owners, tail.page_owners) == ((0, 1), (2, 3))
    assert parts(head) == (8, [4, 5, 6, 7], [100, 101, 102, 103])
    assert parts(tail) == (8, [], [])
    head, tail = whole.split(4)
    assert parts(head) == (4, [], [])
    assert parts(tail) == (12, [0, 1, 2, 3], [100, 101, 102, 103])
    assert (head.page_owners, tail.page_owners) == ((0,), (1, 2, 3))
    with pytest.raises(ValueError, match="split_len is 6: give a multiple of page_size 4"):
        whole.split(6)


def test_page_size_may_be_left_out_for_whole_pages() -> None:
    """R3: the constructor call without page_size stays legal with owners: whole pages tell it, and none does for an empty node."""
    whole = CpHiCacheNodeMetadata(logical_len=16, owned_positions=[4, 5, 6, 7], host_indices=[1, 2, 3, 4], page_owners=[0, 1, 2, 3])
    assert whole.page_size == 4
    empty = CpHiCacheNodeMetadata(logical_len=0, owned_positions=[], host_indices=[], page_owners=[])
    assert [half.page_owners for half in empty.split(0)] == [(), ()]


def test_short_last_page() -> None:
    """R3: ceil(logical_len / page_size) owners; the last page may be short, and the end of the node is a border too."""
    whole = CpHiCacheNodeMetadata(logical_len=6, owned_positions=[4, 5], host_indices=[8, 9], page_owners=[0, 1], page_size=4)
    head, tail = whole.split(6)
    assert parts(head) == parts(whole)
    assert (tail.logical_len, tail.page_owners) == (0, ())
    assert parts(whole.drop_head(4)) == (2, [0, 1], [8, 9])


@pytest.mark.parametrize(
    ("base", "source", "target", "locs", "physical"),
    [
        (1, (4, 19), (68, 83), [72, 73, 74, 75], [20, 21, 22, 23]),
        (1, (4, 19), (52, 67), [56, 57, 58, 59], [16, 17, 18, 19]),
        (0, (16, 31), (64, 79), [68, 69, 70, 71], [16, 17, 18, 19]),
    ],
)
def test_load_back_targets_of_rank_1(
    base: int, source: tuple[int, int], target: tuple[int, int], locs: list[int], physical: list[int]
) -> None:
    """R4: rank 1 restores positions 4..7 from its four host slots onto the worked locs and physical locs."""
    metadata = backup(1, *source, base=base)
    layout = CpSharedKVLayout(4, 4, 1, base)
    pages = pages_of(*target)
    metadata.check_owners(layout.owners(pages))
    positions, found = owned_locs(layout, pages)
    assert positions.dtype == found.dtype == torch.int64
    assert positions.tolist() == metadata.owned_positions.tolist() == [4, 5, 6, 7]
    extent = layout.locs(pages)
    assert [extent[position] for position in positions.tolist()] == locs
    assert found.tolist() == physical
    assert metadata.host_indices.tolist() == [100, 101, 102, 103]


def test_load_back_onto_other_owners_is_refused() -> None:
    """R4: 64..79 has owners [3,0,1,2]: a restore of 4..19 onto it is refused on every rank, also where nothing is owned."""
    for rank in range(4):
        owners = CpSharedKVLayout(4, 4, rank).owners(pages_of(64, 79))
        with pytest.raises(ValueError, match=r"\[3, 0, 1, 2\], the backup has \[0, 1, 2, 3\]: .*alloc_for_owners"):
            backup(rank, 4, 19).check_owners(owners)
    with pytest.raises(ValueError, match="page_owners is None"):
        CpHiCacheNodeMetadata(logical_len=4, owned_positions=[], host_indices=[]).check_owners([0])


def test_zero_owned_load_copies_nothing() -> None:
    """R4: a load of one page onto 68..71 on rank 3 has no positions and no physical locs to copy."""
    layout = CpSharedKVLayout(4, 4, 3)
    positions, physical = owned_locs(layout, pages_of(68, 71))
    assert (positions.tolist(), physical.tolist()) == ([], [])
    assert positions.dtype == physical.dtype == torch.int64


def test_missing_draft_slots_raise() -> None:
    """R5: draft metadata that is missing where a draft pool is configured raises; nothing falls back to target-only."""
    with pytest.raises(ValueError, match="draft_host_indices is None but a draft pool is configured"):
        backup(1, 4, 19).require_draft()


@settings(derandomize=True, max_examples=80, deadline=None)
@given(data=st.data(), page_size=st.integers(1, 5), owners=st.lists(st.integers(0, 2), min_size=1, max_size=8))
def test_split_agrees_with_a_list_of_tokens(data: st.DataObject, page_size: int, owners: list[int]) -> None:
    """R3: a split divides (position, slot, draft slot) triples like a slice of a plain token list, for any owner pattern."""
    rank = data.draw(st.integers(0, 3))
    length = len(owners) * page_size - data.draw(st.integers(0, page_size - 1))
    tokens: list[tuple[int, int] | None] = [
        (10 + 7 * at, 90 - at) if owners[at // page_size] == rank else None for at in range(length)
    ]

    def build(part: list[tuple[int, int] | None]) -> list[list[int]]:
        owned = [(at, pair) for at, pair in enumerate(part) if pair is not None]
        return [[at for at, _ in owned], [pair[0] for _, pair in owned], [pair[1] for _, pair in owned]]

    positions, slots, draft = build(tokens)
    whole = CpHiCacheNodeMetadata(
        logical_len=length,
        owned_positions=positions,
        host_indices=slots,
        draft_host_indices=draft,
        page_owners=owners,
        page_size=page_size,
    )
    pages = data.draw(st.integers(0, len(owners)))
    cut = min(pages * page_size, length)
    for half, part, half_owners in zip(
        whole.split(cut), (tokens[:cut], tokens[cut:]), (owners[:pages], owners[pages:]), strict=True
    ):
        vectors = [half.owned_positions.tolist(), half.host_indices.tolist(), half.require_draft().tolist()]
        assert vectors == build(part)
        assert half.logical_len == len(part)
        assert half.page_owners == tuple(half_owners)


@settings(derandomize=True, max_examples=120, deadline=None)
@given(data=st.data(), page_size=st.integers(1, 4), owners=st.lists(st.integers(0, 2), min_size=0, max_size=8), draft=st.booleans())
def test_metadata_of_pages_says_what_the_checked_vectors_say(
    data: st.DataObject, page_size: int, owners: list[int], draft: bool
) -> None:
    """R3: made of page numbers, without a check, it equals what the checked constructor makes of the same slots, before and after any
    split; and that constructor takes all of it."""
    rank = data.draw(st.integers(0, 2))
    places = [page for page, owner in enumerate(owners) if owner == rank]
    host = data.draw(st.lists(st.integers(0, 30), min_size=len(places), max_size=len(places)))
    paged = CpHiCacheNodeMetadata.of_pages(
        tuple(owners), page_size, OwnedPages(places, host, [page + 40 for page in host] if draft else None)
    )

    def tokens(pages: Sequence[int]) -> list[int]:
        return [page * page_size + offset for page in pages for offset in range(page_size)]

    checked = CpHiCacheNodeMetadata(
        logical_len=len(owners) * page_size,
        owned_positions=tokens(places),
        host_indices=tokens(host),
        draft_host_indices=tokens([page + 40 for page in host]) if draft else None,
        page_owners=owners,
        page_size=page_size,
    )
    cut = data.draw(st.integers(0, len(owners))) * page_size
    for one, other in ((paged, checked), *zip(paged.split(cut), checked.split(cut), strict=True)):
        assert repr(one) == repr(other)
        assert one.owned_len == other.owned_len == one.owned_positions.numel()
        assert one.host_indices.dtype == torch.int64
    assert paged.split(cut)[1].owned_pages.host == host[len(paged.split(cut)[0].owned_pages.host) :]


def test_metadata_of_vectors_has_no_page_numbers() -> None:
    """R3: host pages are known only where whole pages were given out."""
    with pytest.raises(ValueError, match=r"of_pages"):
        _ = backup(1, 4, 19).owned_pages
