"""The number spaces as tensors: int64 vectors of locs or slots, distinct to the type checker like their scalars (R1)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import NewType

import numpy as np
import numpy.typing as npt
import torch

from cphicache.spaces.layout import CpSharedKVLayout
from cphicache.spaces.types import LogicalPage

LogicalLocs = NewType("LogicalLocs", torch.Tensor)
PhysicalLocs = NewType("PhysicalLocs", torch.Tensor)
HostSlots = NewType("HostSlots", torch.Tensor)


def owned_locs(layout: CpSharedKVLayout, pages: Iterable[LogicalPage]) -> tuple[torch.Tensor, PhysicalLocs]:
    """The part of whole ``pages`` that this rank stores, for a copy job.

    Returns two int64 CPU vectors of equal length: positions (token offsets into the extent ``pages``, ascending) and the physical
    loc of each. Both are empty when the rank owns nothing. Raises :class:`ValueError` on a reserved page.
    """
    owned = layout.owned_pages(pages)
    indices = [index for index, _ in owned]
    physical = [layout.physical_page(page) for _, page in owned]
    return tokens_of(indices, layout.page_size), PhysicalLocs(tokens_of(physical, layout.page_size))


def tokens_of(pages: Sequence[int], page_size: int) -> torch.Tensor:
    """The tokens of whole pages, page by page, as an int64 CPU vector."""
    count = len(pages)
    if count and (first := pages[0]) + count == pages[-1] + 1 and (count < 3 or list(pages) == list(range(first, first + count))):
        return torch.from_numpy(np.arange(first * page_size, (first + count) * page_size))
    starts = np.array(pages, dtype=np.int64) * page_size
    return torch.from_numpy((starts[:, None] + _offsets(page_size)).reshape(-1))


@cache
def _offsets(page_size: int) -> npt.NDArray[np.int64]:
    return np.arange(page_size)
