"""What the KV bytes should be, from the request's tokens alone: imports nothing of tree, allocator, pools, layouts or transfers.

Each byte is a pure function of (seed, the token's whole prefix, its position, payload, layer, component, place in the item), so a
wrong page, layer, payload, rank or prefix shows as wrong bytes. Two different prefixes meet with a probability of 2**-64.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

Words = npt.NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_TOKEN_FACTOR = np.uint64(0xD6E8FEB86659FD93)
_WORD_BYTES = 8
_BLOCK_WORDS = 1 << 14
"""Rows are made in blocks whose temporaries (128 KiB each) stay in a core's cache."""


class PrefixState(NamedTuple):
    """Where a chain of prefix hashes stands: after ``length`` tokens, whose last prefix hash is ``value``."""

    length: int
    value: int


class ReferenceKV:
    """Expected KV bytes. Two instances of one seed agree; holds no state between calls."""

    __slots__ = ("_seed",)

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed

    @property
    def start(self) -> PrefixState:
        """The empty prefix."""
        return PrefixState(0, self._key("prefix"))

    def prefix_hashes(
        self, tokens: Sequence[int] | array[int] | npt.NDArray[np.int64], start_state: PrefixState | None = None
    ) -> Words:
        """uint64 [n]: hash i is a pure function of the whole prefix that ends with ``tokens[i]`` (int64 token ids).

        Without ``start_state`` the prefix starts at ``tokens[0]``. A later chunk goes on where the one before ended:
        ``state = PrefixState(n, int(hashes[-1]))`` after n tokens in all; see also :meth:`state_after`.
        Hash i is the sum over j <= i of a strong hash of (token j, j) mod 2**64, which a cumulative sum makes for all i at once.
        """
        length, value = self.start if start_state is None else start_state
        words = np.asarray(tokens, dtype=np.int64).view(np.uint64)
        places = np.arange(length, length + len(words), dtype=np.uint64)
        terms = _mix(places * _GOLDEN + np.uint64(self._key("token")))
        terms = _mix(terms + words * _TOKEN_FACTOR)
        hashes: Words = np.cumsum(terms, dtype=np.uint64) + np.uint64(value)
        return hashes

    def state_after(self, hashes: Words, start_state: PrefixState | None = None) -> PrefixState:
        """The state after the chunk whose :meth:`prefix_hashes` from the same ``start_state`` are ``hashes`` [n]."""
        state = self.start if start_state is None else start_state
        return PrefixState(state.length + len(hashes), int(hashes[-1])) if len(hashes) else state

    def expected(
        self,
        prefix_hashes: Words,
        positions: Sequence[int] | npt.NDArray[np.int64],
        *,
        payload: str,
        layer: int,
        component: str,
        item_bytes: int,
    ) -> torch.Tensor:
        """uint8 [n, item_bytes] on CPU: row i is what ``component`` (K, V, latent, ...) of ``layer`` of ``payload`` holds for the
        token at ``positions[i]`` whose prefix hash is ``prefix_hashes[i]``. Rows may come from many requests, in any order.

        For the draft payload too the caller passes the hash of token i's prefix: if the draft model reads bigrams (token i with
        its successor), the shift is the caller's matter, and this function knows nothing of it.
        Raises ValueError for a negative layer, an item below one byte, or positions of another length than the hashes.
        """
        rows = len(prefix_hashes)
        places = np.asarray(positions, dtype=np.int64).view(np.uint64)
        if len(places) != rows:
            raise ValueError(f"{len(places)} positions for {rows} prefix hashes; give one position a hash")
        if layer < 0:
            raise ValueError(f"layer {layer} is negative; give 0 for the payload's first layer")
        if item_bytes < 1:
            raise ValueError(f"item_bytes {item_bytes} is below 1; give the bytes of one token in one layer")
        context = np.uint64(self._key(f"item {len(payload)} {payload} {layer} {component}"))
        row_keys = _mix(np.asarray(prefix_hashes, dtype=np.uint64) ^ _mix(places * _GOLDEN + context))
        row_words = -(-item_bytes // _WORD_BYTES)
        word_keys = np.arange(1, row_words + 1, dtype=np.uint64) * _GOLDEN
        words = np.empty((rows, row_words), dtype="<u8")
        step = max(1, _BLOCK_WORDS // row_words)
        for first in range(0, rows, step):
            block = row_keys[first : first + step, None] + word_keys[None, :]
            words[first : first + step] = _mix(block)
        found = words.view(np.uint8)[:, :item_bytes]
        return torch.from_numpy(np.ascontiguousarray(found))

    def _key(self, purpose: str) -> int:
        return int.from_bytes(blake2b(f"{self._seed} {purpose}".encode(), digest_size=8).digest(), "little")


def first_difference(expected: torch.Tensor, found: torch.Tensor) -> tuple[int, int] | None:
    """(row, byte) of the first difference of two uint8 [n, item_bytes] tensors, by row and then by byte; None when they are equal.

    ValueError when shapes or dtypes differ. ``found`` may lie on any device.
    """
    if expected.dtype != torch.uint8 or found.dtype != torch.uint8:
        raise ValueError(
            f"dtypes {expected.dtype} and {found.dtype} are not both torch.uint8; compare bytes, with .view(torch.uint8)"
        )
    if expected.dim() != 2 or expected.shape != found.shape:
        raise ValueError(
            f"shapes {tuple(expected.shape)} and {tuple(found.shape)} are not one [n, item_bytes]; compare the same rows"
        )
    if torch.equal(expected, found.to(expected.device)):
        return None
    different = (expected.cpu() != found.cpu()).numpy()
    row, byte = divmod(int(different.reshape(-1).argmax()), expected.shape[1])
    return row, byte


def _mix(words: Words) -> Words:
    """Scramble 64-bit words: the finaliser of splitmix64 (Steele, Lea, Flood 2014), a bijection. The argument is a temporary of
    the caller's, and is overwritten."""
    shifted = words >> np.uint64(30)
    words ^= shifted
    words *= np.uint64(0xBF58476D1CE4E5B9)
    np.right_shift(words, np.uint64(27), out=shifted)
    words ^= shifted
    words *= np.uint64(0x94D049BB133111EB)
    np.right_shift(words, np.uint64(31), out=shifted)
    words ^= shifted
    return words
