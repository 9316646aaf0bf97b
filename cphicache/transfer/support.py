"""What copies what: one table of every (pool kind, host layout, copy backend), and the KV dtypes. No torch here.

The table decides at start (R32, R35): a combination that is not supported is refused by its reason, and nothing falls back to
another backend. It is also docs/pools.md. Operator names are those of ``sgl_kernel.kvcacheio`` (sgl-kernel 0.3.21,
sglang-kernel 0.4.10), without their prefix ``transfer_kv_``.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from types import MappingProxyType
from typing import Literal, NamedTuple, get_args

Kind = Literal["mla", "mha", "dsa"]
Layout = Literal["layer_first", "page_first", "page_first_direct"]
Backend = Literal["torch", "direct", "kernel", "triton"]

COMPONENTS_BY_KIND: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"mla": ("latent",), "mha": ("k", "v"), "dsa": ("latent", "indexer")}
)
"""The buffers of a layer, in copy order. MLA: one latent buffer. MHA: K and V. DSA (NSA): the MLA latent, then the indexer's keys."""

BY_PAGE = frozenset({"indexer"})
"""Components whose device buffer is indexed by page: ``[pages, page_size * item]``, at slot // page_size."""


class Support(NamedTuple):
    """One row. ``reason`` says why the combination is not supported and what to use; None: it is, both ways, layer by layer.

    ``d2h_layer``, ``d2h_all``, ``h2d_layer``: what moves one layer out, all layers out and one layer in.
    """

    kind: str
    layout: str
    io_backend: str
    reason: str | None
    d2h_layer: str = ""
    d2h_all: str = ""
    h2d_layer: str = ""

    @property
    def carries(self) -> str:
        """The components, in copy order."""
        return " then ".join(f"{name} by page" if name in BY_PAGE else name for name in COMPONENTS_BY_KIND[self.kind])


class KVDtype(NamedTuple):
    """A KV dtype by its option value. ``torch_name``: the dtype of a buffer's elements. ``packed``: a row of bytes that holds FP8
    values, their scales and BF16 rope values. ``reason``: why it is refused, None when it is supported."""

    torch_name: str
    element_bytes: int
    packed: bool = False
    reason: str | None = None


_SCALES_STAY = "its scales lie in a buffer of their own, which no copy would move: restored bytes would be read with other scales"

KV_DTYPES: Mapping[str, KVDtype] = MappingProxyType(
    {
        "bf16": KVDtype("bfloat16", 2),
        "fp16": KVDtype("float16", 2),
        "fp8_e4m3": KVDtype("float8_e4m3fn", 1),
        "fp8_e5m2": KVDtype("float8_e5m2", 1),
        "fp8_packed": KVDtype("uint8", 1, packed=True),
        "fp8_token_scales": KVDtype("float8_e4m3fn", 1, reason=_SCALES_STAY),
        "fp4_e2m1": KVDtype("uint8", 1, reason=_SCALES_STAY),
    }
)
"""``fp8_e4m3`` and ``fp8_e5m2`` have one scale a layer, a constant of the model. ``fp8_packed``: see :func:`packed_row_bytes`."""

QUANT_BLOCK = 128
"""Elements that share one float32 scale in packed rows and in indexer keys."""


def packed_row_bytes(latent_dim: int, rope_dim: int) -> int:
    """Bytes of a packed FP8 MLA row: latent (1 byte an element), one float32 scale for each 128 of them, rope in BF16; padded to a
    multiple of 8. 512 and 64: 512 + 16 + 128 = 656."""
    return _padded(latent_dim + -(-latent_dim // QUANT_BLOCK) * 4 + rope_dim * 2)


def indexer_item_bytes(index_dim: int) -> int:
    """Bytes of one token's indexer key: 1 byte an element, one float32 scale for each 128 of them. 128: 132."""
    return index_dim + -(-index_dim // QUANT_BLOCK) * 4


def _padded(size_bytes: int) -> int:
    return -(-size_bytes // 8) * 8


_NO_DIRECT_PAGE_FIRST = (
    "the direct operators copy whole pages, and a page of one layer is not contiguous in page_first: use layout page_first_direct"
)
_NO_KERNEL_PAGE_FIRST_DIRECT = (
    "the kernel operators address a page-first host pool by token slot, not by [page][layer][token]: use layout page_first, or "
    "io_backend direct"
)


def _row(kind: str, layout: str, io_backend: str) -> Support:
    if (io_backend, layout) == ("direct", "page_first"):
        return Support(kind, layout, io_backend, _NO_DIRECT_PAGE_FIRST)
    if (io_backend, layout) == ("kernel", "page_first_direct"):
        return Support(kind, layout, io_backend, _NO_KERNEL_PAGE_FIRST_DIRECT)
    mla = "" if kind == "mha" else "_mla"
    match io_backend, layout:
        case "torch", _:
            moves = ("slices or gather", "the same, layer by layer", "slices or gather")
        case "triton", _:
            moves = ("own kernel", "own kernel, a launch a layer", "own kernel")
        case "direct", "layer_first":
            moves = ("direct", "direct", "direct")
        case "direct", _:
            moves = (
                "all_layer_direct_lf_pf, one source, dst[:, layer:layer+1]",
                "all_layer_direct_lf_pf",
                "per_layer_direct_pf_lf",
            )
        case _, "layer_first":
            moves = (f"per_layer{mla}", f"all_layer{mla}", f"per_layer{mla}")
        case _:
            moves = (f"all_layer{mla}_lf_pf, one-entry table; or triton", f"all_layer{mla}_lf_pf", f"per_layer{mla}_pf_lf")
    return Support(kind, layout, io_backend, None, *moves)


SUPPORT: tuple[Support, ...] = tuple(
    _row(kind, layout, io_backend) for io_backend in get_args(Backend) for layout in get_args(Layout) for kind in get_args(Kind)
)
"""Every combination of the known kinds, layouts and backends, each once."""

_BY_KEY = MappingProxyType({(row.kind, row.layout, row.io_backend): row for row in SUPPORT})


class UnsupportedCombination(ValueError):
    """A pool kind, host layout and copy backend that do not work together."""


def support_of(kind: str, layout: str, io_backend: str) -> Support:
    """The table's row. Raises :class:`UnsupportedCombination` for a kind, layout or backend that is not known, naming it."""
    row = _BY_KEY.get((kind, layout, io_backend))
    if row is None:
        wrong = [
            f"{column} {value!r} is not one of {sorted(get_args(known))}"
            for column, value, known in (("kind", kind, Kind), ("layout", layout, Layout), ("io_backend", io_backend, Backend))
            if value not in get_args(known)
        ]
        raise UnsupportedCombination(_refusal(kind, layout, io_backend, "; ".join(wrong)))
    return row


def require_supported(kind: str, layout: str, io_backend: str) -> None:
    """Raise :class:`UnsupportedCombination`, naming combination and reason, unless the table supports it."""
    reason = support_of(kind, layout, io_backend).reason
    if reason is not None:
        raise UnsupportedCombination(_refusal(kind, layout, io_backend, reason))


def _refusal(kind: str, layout: str, io_backend: str, reason: str) -> str:
    return f"kind={kind!r}, layout={layout!r}, io_backend={io_backend!r} is not supported: {reason}"


def support_hash() -> str:
    """Twelve hex digits that change with the tables."""
    return sha256(repr((SUPPORT, dict(KV_DTYPES), dict(COMPONENTS_BY_KIND))).encode()).hexdigest()[:12]
