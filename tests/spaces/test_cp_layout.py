"""Placement of logical pages on context-parallel ranks."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cphicache.spaces import CpSharedKVLayout, LogicalLoc, LogicalPage, PhysicalLoc, PhysicalPage


def pages_of(first_loc: int, last_loc: int, page_size: int = 4) -> list[LogicalPage]:
    return [LogicalPage(page) for page in range(first_loc // page_size, last_loc // page_size + 1)]


def ranks(base: int = 1, cp_size: int = 4, page_size: int = 4) -> list[CpSharedKVLayout]:
    return [CpSharedKVLayout(page_size, cp_size, rank, base) for rank in range(cp_size)]


layouts = st.integers(1, 6).flatmap(
    lambda cp_size: st.builds(
        CpSharedKVLayout, st.integers(1, 9), st.just(cp_size), st.integers(0, cp_size - 1), st.sampled_from([0, 1])
    )
)


@pytest.mark.parametrize(("rank", "positions"), [(0, range(4)), (1, range(4, 8)), (2, range(8, 12)), (3, range(12, 16))])
def test_worked_numbers_of_base_1(rank: int, positions: range) -> None:
    """R2: page 4, cp 4, base 1, logical 4..19: each rank owns its four positions, each at physical 4..7."""
    layout = CpSharedKVLayout(4, 4, rank)
    extent = layout.locs(pages_of(4, 19))
    assert extent == list(range(4, 20))
    owned = [position for position, loc in enumerate(extent) if layout.owner(loc) == rank]
    assert owned == list(positions)
    assert [layout.physical(extent[position]) for position in owned] == [4, 5, 6, 7]


def test_rank_that_owns_nothing_of_an_extent() -> None:
    """R2: logical 4..7 on rank 3: nothing owned."""
    layout = CpSharedKVLayout(4, 4, 3)
    assert layout.owned_pages(pages_of(4, 7)) == []
    assert not layout.owns_page(LogicalPage(1))


@pytest.mark.parametrize(("rank", "owned"), [(0, [(0, 4)]), (1, [(1, 5)]), (2, [(2, 6)]), (3, [(3, 7)])])
def test_worked_numbers_of_base_0(rank: int, owned: list[tuple[int, int]]) -> None:
    """R4: base 0: backup of 16..31: page k of the extent is on rank k, physical 4..7; 64..79 is at physical 16..19."""
    layout = CpSharedKVLayout(4, 4, rank, base=0)
    assert layout.owned_pages(pages_of(16, 31)) == owned
    assert layout.physical_page(LogicalPage(owned[0][1])) == 1
    (_, target), *rest = layout.owned_pages(pages_of(64, 79))
    assert rest == []
    assert [layout.physical(loc) for loc in layout.locs([target])] == [16, 17, 18, 19]


@pytest.mark.parametrize(
    ("first", "last", "owners"), [(4, 19, (0, 1, 2, 3)), (68, 83, (0, 1, 2, 3)), (52, 67, (0, 1, 2, 3)), (64, 79, (3, 0, 1, 2))]
)
def test_owner_patterns_of_load_back_targets(first: int, last: int, owners: tuple[int, ...]) -> None:
    """R4: the owner pattern of an extent is the same on every rank and as in the worked numbers."""
    assert {layout.owners(pages_of(first, last)) for layout in ranks()} == {owners}


def test_reserved_pages_follow_the_base() -> None:
    """R2: base 1 reserves page 0; base 0 reserves pages 0..cp_size-1; the first usable page belongs to rank 0 at physical 1."""
    for base, reserved in ((1, range(1)), (0, range(4))):
        layout = ranks(base)[0]
        assert layout.reserved_pages == reserved
        first = LogicalPage(reserved.stop)
        assert not layout.is_reserved_page(first)
        assert layout.owner_of_page(first) == 0
        assert layout.physical_page(first) == 1


@pytest.mark.parametrize(("base", "page"), [(1, 0), (0, 0), (0, 3)])
def test_reserved_pages_are_never_owned(base: int, page: int) -> None:
    """R2: no rank owns a reserved page; asking for its owner, share or physical page is an error that says so."""
    reserved = LogicalPage(page)
    for layout in ranks(base):
        assert layout.is_reserved_page(reserved)
        assert not layout.owns_page(reserved)
        for ask in (layout.owner_of_page, layout.physical_page):
            with pytest.raises(ValueError, match=f"logical page {page} is reserved.*usable pages start at"):
                ask(reserved)
        for ask_all in (layout.owners, layout.owned_pages):
            with pytest.raises(ValueError, match="is reserved"):
                ask_all([LogicalPage(5), reserved])
        with pytest.raises(ValueError, match="is reserved"):
            layout.owner(LogicalLoc(page * 4))


def test_physical_loc_of_a_foreign_loc_is_an_error() -> None:
    """R2: the physical loc of a loc that this rank does not own is an error naming the owner and the remedy."""
    with pytest.raises(ValueError, match="page 2 is owned by rank 1, not by rank 0: ask owns_page first"):
        CpSharedKVLayout(4, 4, 0).physical(LogicalLoc(9))


@settings(derandomize=True, max_examples=150, deadline=None)
@given(layout=layouts, number=st.integers(0, 400))
def test_round_trip_is_the_identity(layout: CpSharedKVLayout, number: int) -> None:
    """R2: logical -> physical -> logical is the identity on its owner, keeps the offset, and is an error everywhere else."""
    loc = LogicalLoc(layout.reserved_pages.stop * layout.page_size + number)
    page = layout.page_of(loc)
    holders = 0
    for rank in range(layout.cp_size):
        view = CpSharedKVLayout(layout.page_size, layout.cp_size, rank, layout.base)
        if view.owns_page(page):
            holders += 1
            physical = view.physical(loc)
            assert view.logical(physical) == loc
            assert physical % layout.page_size == loc % layout.page_size
            assert view.logical_page(view.physical_page(page)) == page
            assert view.owner(loc) == rank
        else:
            with pytest.raises(ValueError, match="is owned by rank"):
                view.physical(loc)
    assert holders == 1


@settings(derandomize=True, max_examples=60, deadline=None)
@given(layout=layouts, rounds=st.integers(1, 6))
def test_pool_holds_exactly_the_usable_pages(layout: CpSharedKVLayout, rounds: int) -> None:
    """R2: the usable pages of a rank fill its pool from physical page 1 to the end, without gap or overlap."""
    usable = rounds * layout.cp_size
    first = layout.reserved_pages.stop
    mine = [LogicalPage(page) for page in range(first, first + usable) if layout.owns_page(LogicalPage(page))]
    total = layout.physical_pages_total(usable)
    assert [layout.physical_page(page) for page in mine] == list(range(1, total))


def test_pool_of_an_uneven_share_fits_the_fullest_rank() -> None:
    """R2: a pool has the same size on every rank, enough for the one that stores most."""
    assert [layout.physical_pages_total(5) for layout in ranks()] == [3, 3, 3, 3]


def test_locs_of_a_short_last_page() -> None:
    """R25: a zero-owned load of one page onto 68..71 still names its logical locs; tokens cut the last page."""
    layout = CpSharedKVLayout(4, 4, 3)
    assert layout.locs(pages_of(68, 71)) == [68, 69, 70, 71]
    assert layout.owned_pages(pages_of(68, 71)) == []
    assert layout.locs([LogicalPage(2), LogicalPage(5)], tokens=5) == [8, 9, 10, 11, 20]
    with pytest.raises(ValueError, match=r"tokens is 9: 2 pages of 4 hold 0\.\.8; pass more pages"):
        layout.locs([LogicalPage(2), LogicalPage(5)], tokens=9)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((0, 4, 0, 1), "page_size is 0: give"),
        ((4, 0, 0, 1), "cp_size is 0: give"),
        ((4, 4, 4, 1), r"cp_rank is 4: give a rank in 0\.\.3"),
        ((4, 4, -1, 1), "cp_rank is -1"),
        ((4, 4, 0, 2), "base is 2: use 1 .* or 0"),
    ],
)
def test_impossible_layouts_are_refused(arguments: tuple[int, int, int, int], text: str) -> None:
    """R35: a layout that cannot work fails when it is made, naming the value and the remedy."""
    with pytest.raises(ValueError, match=text):
        CpSharedKVLayout(*arguments)


def test_numbers_outside_their_space_are_refused() -> None:
    """R2: negative numbers, the reserved physical page and an empty pool are errors, never wrapped around."""
    layout = CpSharedKVLayout(4, 4, 0)
    with pytest.raises(ValueError, match="logical loc is -1"):
        layout.page_of(LogicalLoc(-1))
    with pytest.raises(ValueError, match="logical page is -1"):
        layout.owner_of_page(LogicalPage(-1))
    with pytest.raises(ValueError, match="physical page is 0: page 0 is reserved"):
        layout.logical_page(PhysicalPage(0))
    with pytest.raises(ValueError, match="physical page is 0"):
        layout.logical(PhysicalLoc(3))
    with pytest.raises(ValueError, match="usable_logical_pages is 0"):
        layout.physical_pages_total(0)


def test_logical_packages_do_not_import_torch() -> None:
    """R1: spaces, allocator and ledger are integers only: importing them leaves torch unloaded."""
    code = "import sys, cphicache.spaces, cphicache.alloc, cphicache.ledger; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
