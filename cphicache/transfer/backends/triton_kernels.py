"""The Triton kernel of backend ``triton``, and the ways to make it run: on a GPU, in Triton's interpreter, or compiled for a named GPU.

Importing this module imports triton; :mod:`cphicache.transfer.backends.triton_backend` does so at the first copy.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.interpreter import InterpretedFunction

TILE_WORDS = 1024
"""Words that one program moves at a time: 8 KiB of 8-byte words."""
WARPS = 4
OPTIONS = {"num_warps": WARPS, "enable_fp_fusion": False}
"""Compile options. Nothing here is floating point; saying so keeps Triton from warning about its changing default."""
WARP_SIZE = 32


def copy_rows_kernel(  # noqa: PLR0917 (Triton passes arguments by position)
    source: tl.tensor,
    destination: tl.tensor,
    source_rows: tl.tensor,
    destination_rows: tl.tensor,
    count: tl.tensor,
    words: tl.tensor,
    source_page_words: tl.tensor,
    source_slot_words: tl.tensor,
    destination_page_words: tl.tensor,
    destination_slot_words: tl.tensor,
    SOURCE_PAGE: tl.constexpr,
    DESTINATION_PAGE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
) -> None:
    """Copy ``words`` neighbouring words from row ``source_rows[i]`` to row ``destination_rows[i]`` for ``i`` in ``0 .. count - 1``.

    Row ``r`` begins ``r // PAGE * page_words + r % PAGE * slot_words`` words behind its base. A fixed number of programs takes the
    tiles of ``BLOCK_ROWS x BLOCK_WORDS`` in turn, so that a copy at the speed of the host link does not fill the GPU.
    """
    word_blocks = (words + BLOCK_WORDS - 1) // BLOCK_WORDS
    tiles = (count + BLOCK_ROWS - 1) // BLOCK_ROWS * word_blocks
    tile = tl.program_id(0)
    while tile < tiles:
        index = (tile // word_blocks).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        word = (tile % word_blocks).to(tl.int64) * BLOCK_WORDS + tl.arange(0, BLOCK_WORDS)
        live = index < count
        # Host pools exceed 2**31 words: rows are int64, and so is everything that is multiplied with them.
        source_row = tl.load(source_rows + index, mask=live, other=0)
        destination_row = tl.load(destination_rows + index, mask=live, other=0)
        source_at = source_row // SOURCE_PAGE * source_page_words + source_row % SOURCE_PAGE * source_slot_words
        destination_at = (
            destination_row // DESTINATION_PAGE * destination_page_words
            + destination_row % DESTINATION_PAGE * destination_slot_words
        )
        mask = live[:, None] & (word < words)[None, :]
        value = tl.load(source + source_at[:, None] + word[None, :], mask=mask)
        tl.store(destination + destination_at[:, None] + word[None, :], value, mask=mask)
        tile += tl.num_programs(0)


def compiled() -> Any:
    """The kernel as Triton compiles it at its first launch on a GPU (one variant for each word width, page size and block shape)."""
    return triton.JITFunction(copy_rows_kernel, do_not_specialize=["count"])


def interpreted() -> Any:
    """The kernel in Triton's interpreter: numpy on the CPU, in any process, whatever ``TRITON_INTERPRET`` says."""
    return InterpretedFunction(copy_rows_kernel)


def compile_for(compute_capability: int, *, word_bits: int = 64, page_size: int = 64) -> Any:
    """Compile for ``sm_<compute_capability>`` (80, 90, 100, ...); needs no GPU. Returns Triton's kernel: ``.asm["ptx"]``, ``["cubin"]``.

    ``word_bits``: 8, 16, 32 or 64. The source is taken as one dense buffer, the destination as pages of ``page_size`` tokens.
    """
    constants = {
        "SOURCE_PAGE": 1,
        "DESTINATION_PAGE": page_size,
        "BLOCK_ROWS": TILE_WORDS // 256,
        "BLOCK_WORDS": 256,
    }
    strides = ("words", "source_page_words", "source_slot_words", "destination_page_words", "destination_slot_words")
    signature = {
        "source": f"*i{word_bits}",
        "destination": f"*i{word_bits}",
        "source_rows": "*i64",
        "destination_rows": "*i64",
        "count": "i32",
        **dict.fromkeys(strides, "i32"),
        **dict.fromkeys(constants, "constexpr"),
    }
    source = ASTSource(compiled(), signature, constants)
    return triton.compile(source, target=GPUTarget("cuda", compute_capability, WARP_SIZE), options=OPTIONS)
