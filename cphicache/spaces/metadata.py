"""What a node's host copy consists of, on one rank: which of its positions this rank stores, and in which host slots (R3).

Positions are token offsets into the node, so they survive eviction and load-back onto other pages. Physical locs are never kept
here: they live in copy jobs only (R1).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from cphicache.spaces.tensors import HostSlots, tokens_of


class OwnedPages(NamedTuple):
    """The pages of a node that one rank stores: ``places`` are page numbers within the node (ascending), ``host`` and ``draft`` the host
    page of each in the target's and in the draft's host pool (``None``: no draft payload)."""

    places: Sequence[int]
    host: Sequence[int]
    draft: Sequence[int] | None = None

    def split(self, pages: int) -> tuple[OwnedPages, OwnedPages]:
        """Those within the node's first ``pages`` pages, and the rest, whose places count from there."""
        cut = bisect_left(self.places, pages)
        draft = self.draft
        return (
            OwnedPages(self.places[:cut], self.host[:cut], None if draft is None else draft[:cut]),
            OwnedPages([place - pages for place in self.places[cut:]], self.host[cut:], None if draft is None else draft[cut:]),
        )


class CpHiCacheNodeMetadata:
    """Host copy of one radix node on one rank. Immutable: a split makes two new ones.

    * ``logical_len``: tokens of the node, on all ranks together.
    * ``owned_positions``: strictly ascending positions in [0, logical_len) that this rank stores; may be empty.
    * ``host_indices``, ``draft_host_indices``: host slot of each owned position, in the target's and in the draft's host pool
      (``None``: no draft payload).
    * ``page_owners``: owner rank of each page of the node, ``None`` when the node is not laid out by pages. When given, it has
      ceil(logical_len / page_size) entries, and the owned positions are exactly the whole pages of one rank (the last page of the
      node may be short).
    * ``page_size``: tokens a page. May be left out next to ``page_owners`` when all pages are whole, since it is then
      logical_len / len(page_owners).

    Vectors are int64 on the CPU; sequences and other integer tensors are converted, an int64 CPU tensor is kept uncopied and must
    not be written to afterwards. Raises :class:`ValueError` for anything else.

    Where whole host pages are given out, :meth:`of_pages` makes it from page numbers: right by construction, nothing is checked, and
    the vectors are made when somebody asks for them.
    """

    __slots__ = ("_draft", "_host", "_pages", "_positions", "logical_len", "page_owners", "page_size")

    def __init__(
        self,
        *,
        logical_len: int,
        owned_positions: Sequence[int] | torch.Tensor,
        host_indices: Sequence[int] | torch.Tensor,
        draft_host_indices: Sequence[int] | torch.Tensor | None = None,
        page_owners: Sequence[int] | None = None,
        page_size: int | None = None,
    ) -> None:
        if logical_len < 0:
            raise ValueError(f"logical_len is {logical_len}: give the node's tokens, 0 or more")
        self.logical_len = int(logical_len)
        positions = _index_vector("owned_positions", owned_positions)
        self._positions: torch.Tensor | None = positions
        self._host: HostSlots | None = _slot_vector("host_indices", host_indices, positions)
        self._draft = None if draft_host_indices is None else _slot_vector("draft_host_indices", draft_host_indices, positions)
        self._pages: OwnedPages | None = None
        _check_positions(positions, self.logical_len)
        self.page_owners = None if page_owners is None else tuple(int(owner) for owner in page_owners)
        self.page_size = _page_size_of(self.logical_len, self.page_owners, page_size)
        if self.page_owners and self.page_size is not None:
            _check_whole_pages(positions, self.logical_len, self.page_owners, self.page_size)

    @classmethod
    def of_pages(cls, page_owners: tuple[int, ...], page_size: int, owned: OwnedPages) -> CpHiCacheNodeMetadata:
        """Of whole pages: ``owned`` names those of them that this rank stores, all pages of one owner. Nothing is checked or copied."""
        made = object.__new__(cls)
        made.logical_len = len(page_owners) * page_size
        made.page_owners = page_owners
        made.page_size = page_size
        made._pages = owned
        made._positions = made._host = made._draft = None
        return made

    def __repr__(self) -> str:
        draft = None if self.draft_host_indices is None else self.draft_host_indices.tolist()
        return (
            f"CpHiCacheNodeMetadata(logical_len={self.logical_len}, owned_positions={self.owned_positions.tolist()}, "
            f"host_indices={self.host_indices.tolist()}, draft_host_indices={draft}, page_owners={self.page_owners}, "
            f"page_size={self.page_size})"
        )

    @property
    def owned_pages(self) -> OwnedPages:
        """What :meth:`of_pages` was given. Raises :class:`ValueError` for metadata made of vectors."""
        if self._pages is None:
            raise ValueError("metadata made of vectors has no page numbers: make it with CpHiCacheNodeMetadata.of_pages")
        return self._pages

    @property
    def owned_positions(self) -> torch.Tensor:
        """Positions that this rank stores (int64, CPU, ascending)."""
        if self._positions is None:
            self._positions = self._vector(self.owned_pages.places)
        return self._positions

    @property
    def host_indices(self) -> HostSlots:
        """Host slot of each owned position in the target's pool (int64, CPU)."""
        if self._host is None:
            self._host = HostSlots(self._vector(self.owned_pages.host))
        return self._host

    @property
    def draft_host_indices(self) -> HostSlots | None:
        """Host slot of each owned position in the draft's pool (int64, CPU); ``None``: there is no draft payload."""
        if self._draft is None and self._pages is not None and self._pages.draft is not None:
            self._draft = HostSlots(self._vector(self._pages.draft))
        return self._draft

    def _vector(self, pages: Sequence[int]) -> torch.Tensor:
        assert self.page_size is not None, "made of pages"
        return tokens_of(pages, self.page_size)

    @property
    def owned_len(self) -> int:
        """Tokens that this rank stores: host slots in each payload."""
        if self._pages is not None and self.page_size is not None:
            return len(self._pages.places) * self.page_size
        return self.owned_positions.numel()

    def split(self, split_len: int) -> tuple[CpHiCacheNodeMetadata, CpHiCacheNodeMetadata]:
        """Divide into the first ``split_len`` tokens and the rest, whose positions count from its own start.

        Raises :class:`ValueError` when ``split_len`` is outside [0, logical_len], or off a page border where owners are known.
        """
        if not 0 <= split_len <= self.logical_len:
            raise ValueError(f"split_len is {split_len}: give 0..{self.logical_len} (logical_len)")
        pages = None
        if self.page_owners is not None:
            pages = self._pages_before(split_len)
        if self._pages is not None and self.page_size is not None and self.page_owners is not None and pages is not None:
            first, second = self._pages.split(pages)
            return (
                CpHiCacheNodeMetadata.of_pages(self.page_owners[:pages], self.page_size, first),
                CpHiCacheNodeMetadata.of_pages(self.page_owners[pages:], self.page_size, second),
            )
        cut = int(torch.searchsorted(self.owned_positions, split_len))
        draft = self.draft_host_indices
        head = CpHiCacheNodeMetadata(
            logical_len=split_len,
            owned_positions=self.owned_positions[:cut],
            host_indices=self.host_indices[:cut],
            draft_host_indices=None if draft is None else draft[:cut],
            page_owners=None if self.page_owners is None else self.page_owners[:pages],
            page_size=self.page_size,
        )
        tail = CpHiCacheNodeMetadata(
            logical_len=self.logical_len - split_len,
            owned_positions=self.owned_positions[cut:] - split_len,
            host_indices=self.host_indices[cut:],
            draft_host_indices=None if draft is None else draft[cut:],
            page_owners=None if self.page_owners is None else self.page_owners[pages:],
            page_size=self.page_size,
        )
        return head, tail

    def drop_head(self, head_len: int) -> CpHiCacheNodeMetadata:
        """What is left without the first ``head_len`` tokens. Raises like :meth:`split`."""
        return self.split(head_len)[1]

    def check_owners(self, new_owners: Sequence[int]) -> None:
        """Refuse a load-back onto pages of another owner pattern (R4): their bytes lie in another rank's host pool.

        Raises :class:`ValueError` on a mismatch, and when the pattern of the backup is not known.
        """
        if self.page_owners is None:
            raise ValueError("page_owners is None: give the owners at backup, a load-back cannot be checked without them")
        found = tuple(new_owners)
        if found != self.page_owners:
            raise ValueError(
                f"owner pattern of the target pages is {list(found)}, the backup has {list(self.page_owners)}: "
                "allocate the pages with alloc_for_owners(page_owners)"
            )

    def require_draft(self) -> HostSlots:
        """Draft slots of the owned positions, where a draft pool is configured. Raises :class:`ValueError` when there are none:
        nothing falls back to target-only (R5)."""
        if self.draft_host_indices is None:
            raise ValueError("draft_host_indices is None but a draft pool is configured: reserve target and draft slots together")
        return self.draft_host_indices

    def _pages_before(self, split_len: int) -> int:
        size = self.page_size or 1  # None only for the empty node, which splits at 0 alone
        if split_len % size and split_len != self.logical_len:
            raise ValueError(f"split_len is {split_len}: give a multiple of page_size {size}, splits fall on page borders")
        return -(-split_len // size)


def _index_vector(name: str, values: Sequence[int] | torch.Tensor) -> torch.Tensor:
    vector = values if isinstance(values, torch.Tensor) else torch.tensor(list(values))
    if vector.ndim != 1:
        raise ValueError(f"{name} has shape {tuple(vector.shape)}: give one dimension")
    if vector.numel() == 0:
        return torch.empty(0, dtype=torch.int64)
    if vector.dtype not in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8):
        raise ValueError(f"{name} has dtype {vector.dtype}: give integers, they are kept as int64")
    return vector.to(device="cpu", dtype=torch.int64)


def _slot_vector(name: str, values: Sequence[int] | torch.Tensor, positions: torch.Tensor) -> HostSlots:
    slots = _index_vector(name, values)
    if slots.numel() != positions.numel():
        raise ValueError(
            f"{name} has {slots.numel()} entries, owned_positions has {positions.numel()}: they must have the same length, "
            "one host slot for each owned position"
        )
    if slots.numel() and (least := int(slots.numpy().min())) < 0:
        raise ValueError(f"{name} holds {least}: host slots are 0 or more")
    return HostSlots(slots)


def _check_positions(positions: torch.Tensor, logical_len: int) -> None:
    if positions.numel() == 0:
        return
    values = positions.numpy()  # the same memory; a call on a small array costs a fifth of torch's
    steps = values[1:] <= values[:-1]
    if steps.any():
        at = int(steps.argmax())
        raise ValueError(f"owned_positions holds {values[at]} before {values[at + 1]}: give them sorted, each position once")
    low, high = int(values[0]), int(values[-1])
    if low < 0 or high >= logical_len:
        wrong = low if low < 0 else high
        raise ValueError(f"owned_positions holds {wrong}: give positions in [0, logical_len), logical_len is {logical_len}")


def _page_size_of(logical_len: int, owners: tuple[int, ...] | None, page_size: int | None) -> int | None:
    """The page size to keep, once it agrees with the number of owners."""
    if owners is None:
        if page_size is not None:
            raise ValueError(f"page_size is {page_size} without page_owners: give both or neither")
        return None
    if page_size is None:
        if not owners and logical_len == 0:
            return None
        if not owners or logical_len == 0 or logical_len % len(owners):
            raise ValueError(
                f"page_owners has {len(owners)} entries for logical_len {logical_len}, not whole pages: give page_size too"
            )
        return logical_len // len(owners)
    if page_size < 1:
        raise ValueError(f"page_size is {page_size}: give the tokens a page, at least 1")
    pages = -(-logical_len // page_size)
    if len(owners) != pages:
        raise ValueError(
            f"page_owners has {len(owners)} entries: logical_len {logical_len} in pages of {page_size} needs {pages}, one a page"
        )
    return page_size


def _check_whole_pages(positions: torch.Tensor, logical_len: int, owners: tuple[int, ...], page_size: int) -> None:
    """The owned positions are all the pages of one owner; which rank that is follows from the first of them."""
    if min(owners) < 0:
        raise ValueError(f"page_owners holds {min(owners)}: owners are ranks, 0 or more")
    if positions.numel() == 0:
        return
    values = positions.numpy()
    rank = owners[int(values[0]) // page_size]
    starts = np.array([page * page_size for page, owner in enumerate(owners) if owner == rank], dtype=np.int64)
    expected = (starts[:, None] + np.arange(page_size)).reshape(-1)
    expected = expected[: np.searchsorted(expected, logical_len)]
    if not np.array_equal(values, expected):
        raise ValueError(
            f"owned_positions is {positions.tolist()}: page_owners {list(owners)} with page_size {page_size} gives rank {rank} "
            f"{expected.tolist()}, whole pages of one rank"
        )
