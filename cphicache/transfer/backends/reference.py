"""The operators of ``sgl_kernel.kvcacheio`` on CPU memory: the same signatures and argument checks, byte addresses computed one by one.

Names, parameters and checks as in sgl-kernel 0.3.21 (``kvcacheio.py``, ``transfer.cu``); the implementation is our own and for tests
and trials: it moves every item with one ``memmove`` from address to address, so that an argument that would make the real operator
read or write a wrong byte does so here. Stricter than the real ones in three things: negative rows are refused (the kernels skip
them), the direct operators want whole aligned pages and equal dtypes, and every address must lie in memory that is known: a
tensor that was passed, or, for the addresses of a pointer table, one that was registered before.

Addresses in bytes, for item size ``i``, layer ``l``, token slot ``t``, ``L`` layers:

    layer first        base(l) + t * i
    page first         base + t * layout_dim + l * i            (layout_dim = L * i)
    page first direct  base + ((t // page) * L + l) * page * i  for the page that begins at t
"""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Callable, Sequence

import torch

Address = Callable[[int], int]
"""Byte address of a row."""


class _Span:
    """Known memory from ``base`` on: what a raw address may touch."""

    __slots__ = ("base", "end", "name")

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        if tensor.device.type != "cpu":
            raise ValueError(
                f"{name} is on {tensor.device}: the reference operators work on CPU memory; use the package sglang-kernel"
            )
        storage = tensor.untyped_storage()
        self.name = name
        self.base = tensor.data_ptr()
        self.end = storage.data_ptr() + storage.nbytes()

    def check(self, address: int, size_bytes: int) -> None:
        if not self.base <= address <= self.end - size_bytes:
            raise IndexError(
                f"{self.name}: {size_bytes} bytes at {address - self.base:+} leave the {self.end - self.base} bytes from its address on"
            )


class ReferenceOperators:
    """Stands in for the module ``sgl_kernel.kvcacheio``. ``index_device``: device type of indices and pointer tables of the kernel
    operators (the real ones: ``cuda``). :meth:`register` the buffers whose addresses stand in pointer tables."""

    def __init__(self, index_device: str = "cpu") -> None:
        self._index_device = index_device
        self._registered: list[tuple[int, _Span]] = []

    def register(self, *tensors: torch.Tensor) -> None:
        """Addresses of pointer tables may point into these tensors, from their first byte to the end of their storage."""
        known = {base for base, _ in self._registered}
        spans = [_Span("a registered buffer", tensor) for tensor in tensors]
        self._registered += [(span.base, span) for span in spans if span.base not in known]
        self._registered.sort(key=lambda entry: entry[0])

    # -- kernels: one layer --------------------------------------------------------------------------------------------------
    def transfer_kv_per_layer(
        self,
        src_k: torch.Tensor,
        dst_k: torch.Tensor,
        src_v: torch.Tensor,
        dst_v: torch.Tensor,
        src_indices: torch.Tensor,
        dst_indices: torch.Tensor,
        item_size: int,
        block_quota: int = 2,
        num_warps_per_block: int = 32,
    ) -> None:
        """One layer of K and V, layer first on both sides."""
        self._check_kernel(src_indices, dst_indices, item_size, block_quota, num_warps_per_block)
        for src, dst in ((src_k, dst_k), (src_v, dst_v)):
            self._move(_rows(src, item_size), _rows(dst, item_size), src_indices, dst_indices, item_size)

    def transfer_kv_per_layer_mla(
        self,
        src: torch.Tensor,
        dst: torch.Tensor,
        src_indices: torch.Tensor,
        dst_indices: torch.Tensor,
        item_size: int,
        block_quota: int = 2,
        num_warps_per_block: int = 32,
    ) -> None:
        """One layer of one buffer, layer first on both sides."""
        self._check_kernel(src_indices, dst_indices, item_size, block_quota, num_warps_per_block)
        self._move(_rows(src, item_size), _rows(dst, item_size), src_indices, dst_indices, item_size)

    def transfer_kv_per_layer_pf_lf(
        self,
        src_k: torch.Tensor,
        dst_k: torch.Tensor,
        src_v: torch.Tensor,
        dst_v: torch.Tensor,
        src_indices: torch.Tensor,
        dst_indices: torch.Tensor,
        layer_id: int,
        item_size: int,
        src_layout_dim: int,
        block_quota: int = 2,
        num_warps_per_block: int = 32,
    ) -> None:
        """One layer of K and V from page first to layer first."""
        self._check_kernel(src_indices, dst_indices, item_size, block_quota, num_warps_per_block)
        for src, dst in ((src_k, dst_k), (src_v, dst_v)):
            source = _page_first(src, src_layout_dim, layer_id, item_size)
            self._move(source, _rows(dst, item_size), src_indices, dst_indices, item_size)

    def transfer_kv_per_layer_mla_pf_lf(
        self,
        src: torch.Tensor,
        dst: torch.Tensor,
        src_indices: torch.Tensor,
        dst_indices: torch.Tensor,
        layer_id: int,
        item_size: int,
        src_layout_dim: int,
        block_quota: int = 2,
        num_warps_per_block: int = 32,
    ) -> None:
        """One layer of one buffer from page first to layer first."""
        self._check_kernel(src_indices, dst_indices, item_size, block_quota, num_warps_per_block)
        source = _page_first(src, src_layout_dim, layer_id, item_size)
        self._move(source, _rows(dst, item_size), src_indices, dst_indices, item_size)

    # -- kernels: all layers, by pointer tables --------------------------------------------------------------------------------
    def transfer_kv_all_layer(
        self,
        src_k_layers: torch.Tensor,
        dst_k_layers: torch.Tensor,
        src_v_layers: torch.Tensor,
        dst_v_layers: torch.Tensor,
        src_indices: torch.Tensor,
        dst_indices: torch.Tensor,
        item_size: int,
        num_layers: int,
        block_quota: int = 2,
        num_warps_per_block: int = 32,
    ) -> None:
        """All layers of K and V, layer first on both sides."""
        self._check_kernel(src_indices, dst_indices, item_size, block_quota, num_warps_per_block)
        for sources, destinations in ((src_k_layers, dst_k_layers), (src_v_layers, dst_v_layers)):
            self._between_tables(sources, destinations, src_indices, dst_indices, item_size, num_layers)

    def transfer_kv_all_layer_mla(
        self,
        src_layers: torch.Tensor,
        dst_layers: torch.Tensor,
        src_indices: torch.Tensor,
        dst_indices: torch.Tensor,
        item_size: int,
        num_layers: int,
        block_quota: int = 2,
        num_warps_per_block: int = 32,
    ) -> None:
        """All layers of one buffer, layer first on both sides."""
        self._check_kernel(src_indices, dst_indices, item_size, block_quota, num_warps_per_block)
        self._between_tables(src_layers, dst_layers, src_indices, dst_indices, item_size, num_layers)

    def transfer_kv_all_layer_lf_pf(
        self,
        src_k_layers: torch.Tensor,
        dst_k: torch.Tensor,
        src_v_layers: torch.Tensor,
        dst_v: torch.Tensor,
        src_indices: torch.Tensor,
        dst_indices: torch.Tensor,
        item_size: int,
        dst_layout_dim: int,
        num_layers: int,
        block_quota: int = 2,
        num_warps_per_block: int = 32,
    ) -> None:
        """All layers of K and V from layer first to page first."""
        self._check_kernel(src_indices, dst_indices, item_size, block_quota, num_warps_per_block)
        for sources, dst in ((src_k_layers, dst_k), (src_v_layers, dst_v)):
            self._to_page_first(sources, dst, src_indices, dst_indices, item_size, dst_layout_dim, num_layers)

    def transfer_kv_all_layer_mla_lf_pf(
        self,
        src_layers: torch.Tensor,
        dst: torch.Tensor,
        src_indices: torch.Tensor,
        dst_indices: torch.Tensor,
        item_size: int,
        dst_layout_dim: int,
        num_layers: int,
        block_quota: int = 2,
        num_warps_per_block: int = 32,
    ) -> None:
        """All layers of one buffer from layer first to page first."""
        self._check_kernel(src_indices, dst_indices, item_size, block_quota, num_warps_per_block)
        self._to_page_first(src_layers, dst, src_indices, dst_indices, item_size, dst_layout_dim, num_layers)

    # -- the copy engine -------------------------------------------------------------------------------------------------------
    def transfer_kv_direct(
        self,
        src_layers: Sequence[torch.Tensor],
        dst_layers: Sequence[torch.Tensor],
        src_indices: torch.Tensor,
        dst_indices: torch.Tensor,
        page_size: int,
    ) -> None:
        """Every source buffer to the destination buffer at the same place, row by row."""
        if len(src_layers) != len(dst_layers):
            raise RuntimeError(f"{len(src_layers)} source and {len(dst_layers)} destination layers: give the same number of layers")
        self._check_direct(src_indices, dst_indices, page_size)
        for src, dst in zip(src_layers, dst_layers, strict=True):
            _check_alike(src[0], dst[0])
            row_bytes = src[0].numel() * src.itemsize
            self._move(_strided(src, row_bytes), _strided(dst, row_bytes), src_indices, dst_indices, row_bytes)

    def transfer_kv_per_layer_direct_pf_lf(
        self,
        src_ptrs: Sequence[torch.Tensor],
        dst_ptrs: Sequence[torch.Tensor],
        src_indices: torch.Tensor,
        dst_indices: torch.Tensor,
        layer_id: int,
        page_size: int,
    ) -> None:
        """From ``[pages, layers, page_size, ...]`` (one buffer, or K and V) to layer-first buffers: those of ``layer_id`` and on."""
        self._check_direct(src_indices, dst_indices, page_size, pages=(src_indices, dst_indices))
        layers = len(dst_ptrs) // len(src_ptrs)
        for at, src in enumerate(src_ptrs):
            for layer in range(layers):
                dst = dst_ptrs[at * layers + layer]
                source, page_bytes = _paged(src, layer_id + layer, page_size, dst)
                target = _strided(dst, page_bytes // page_size)
                self._move(source, target, src_indices[::page_size], dst_indices[::page_size], page_bytes)

    def transfer_kv_all_layer_direct_lf_pf(
        self,
        src_ptrs: Sequence[torch.Tensor],
        dst_ptrs: Sequence[torch.Tensor],
        src_indices: torch.Tensor,
        dst_indices: torch.Tensor,
        page_size: int,
    ) -> None:
        """From layer-first buffers (of one component, or of K and then of V) to ``[pages, layers, page_size, ...]``, layer 0 and on."""
        self._check_direct(src_indices, dst_indices, page_size, pages=(src_indices, dst_indices))
        layers = len(src_ptrs) // len(dst_ptrs)
        for at, dst in enumerate(dst_ptrs):
            for layer in range(layers):
                src = src_ptrs[at * layers + layer]
                target, page_bytes = _paged(dst, layer, page_size, src)
                source = _strided(src, page_bytes // page_size)
                self._move(source, target, src_indices[::page_size], dst_indices[::page_size], page_bytes)

    # -- inside ----------------------------------------------------------------------------------------------------------------
    def _check_kernel(
        self, src_indices: torch.Tensor, dst_indices: torch.Tensor, item_size: int, block_quota: int, num_warps_per_block: int
    ) -> None:
        for name, indices in (("Source", src_indices), ("Destination", dst_indices)):
            if indices.device.type != self._index_device:
                raise RuntimeError(f"{name} indices must be a {self._index_device} tensor, found {indices.device}")
        _check_indices(src_indices, dst_indices)
        if item_size % 8 or item_size < 1:
            raise RuntimeError(f"Item byte size must be divisible by 8, found {item_size}")
        if block_quota < 1 or num_warps_per_block < 1:
            raise RuntimeError(f"block_quota={block_quota}, num_warps_per_block={num_warps_per_block}: both are at least 1")
        if not src_indices.numel():
            raise RuntimeError("no indices: the kernels are launched with at least one item")

    def _check_direct(self, src: torch.Tensor, dst: torch.Tensor, page_size: int, pages: Sequence[torch.Tensor] = ()) -> None:
        _check_indices(src, dst)
        if src.device.type != "cpu" or dst.device.type != "cpu":
            raise RuntimeError("indices on a GPU make the direct operators synchronise: give CPU indices")
        if page_size < 1:
            raise RuntimeError(f"Page size must be positive, found {page_size}")
        if src.numel() % page_size:
            raise RuntimeError(f"Source indices size must be divisible by page size: {src.numel()} by {page_size}")
        for indices in pages:
            firsts = indices[::page_size, None]
            if (firsts % page_size).any() or not torch.equal(indices, (firsts + torch.arange(page_size)).reshape(-1)):
                raise RuntimeError(f"indices must be whole aligned pages of {page_size}, found {indices.tolist()[:16]}")

    def _between_tables(
        self,
        sources: torch.Tensor,
        destinations: torch.Tensor,
        src_indices: torch.Tensor,
        dst_indices: torch.Tensor,
        item_size: int,
        num_layers: int,
    ) -> None:
        from_layers, to_layers = self._table(sources, num_layers), self._table(destinations, num_layers)
        for source, destination in zip(from_layers, to_layers, strict=True):
            self._move(_at(source, item_size), _at(destination, item_size), src_indices, dst_indices, item_size)

    def _to_page_first(
        self,
        sources: torch.Tensor,
        dst: torch.Tensor,
        src_indices: torch.Tensor,
        dst_indices: torch.Tensor,
        item_size: int,
        dst_layout_dim: int,
        num_layers: int,
    ) -> None:
        for layer, source in enumerate(self._table(sources, num_layers)):
            target = _page_first(dst, dst_layout_dim, layer, item_size)
            self._move(_at(source, item_size), target, src_indices, dst_indices, item_size)

    def _table(self, table: torch.Tensor, num_layers: int) -> list[_Span]:
        """The memory that each address of a pointer table begins."""
        if table.dtype != torch.uint64 or table.dim() != 1 or table.device.type != self._index_device:
            raise RuntimeError(
                f"a pointer table is a vector of uint64 on {self._index_device}, found {table.dtype} on {table.device}"
            )
        if table.numel() != num_layers:
            raise RuntimeError(f"Number of layers in source tensor does not match num_layers: {table.numel()} and {num_layers}")
        spans = []
        for address in table.tolist():
            at = bisect_right(self._registered, address, key=lambda entry: entry[0]) - 1
            if at < 0 or self._registered[at][0] != address:
                raise IndexError(f"pointer table: address {address:#x} begins no registered buffer")
            spans.append(self._registered[at][1])
        return spans

    def _move(
        self,
        source: tuple[_Span, Address],
        destination: tuple[_Span, Address],
        src_indices: torch.Tensor,
        dst_indices: torch.Tensor,
        size_bytes: int,
    ) -> None:
        (source_span, source_at), (destination_span, destination_at) = source, destination
        for source_row, destination_row in zip(src_indices.tolist(), dst_indices.tolist(), strict=True):
            if source_row < 0 or destination_row < 0:
                raise IndexError(f"row {min(source_row, destination_row)} is negative")
            from_address, to_address = source_at(source_row), destination_at(destination_row)
            source_span.check(from_address, size_bytes)
            destination_span.check(to_address, size_bytes)
            ctypes.memmove(to_address, from_address, size_bytes)


def _check_indices(src_indices: torch.Tensor, dst_indices: torch.Tensor) -> None:
    for name, indices in (("Source", src_indices), ("Destination", dst_indices)):
        if indices.dtype != torch.int64 or indices.dim() != 1:
            raise RuntimeError(f"{name} indices must be of type long, a vector, found {indices.dtype} {list(indices.shape)}")
    if src_indices.numel() != dst_indices.numel():
        raise RuntimeError(
            f"Source and destination indices must have the same length, found {src_indices.numel()} and {dst_indices.numel()}"
        )


def _check_alike(source: torch.Tensor, destination: torch.Tensor) -> None:
    if source.dtype != destination.dtype or source.shape != destination.shape:
        raise RuntimeError(
            f"a copy between {source.dtype} {list(source.shape)} and {destination.dtype} {list(destination.shape)} would convert: "
            "give alike buffers"
        )
    if not (source.is_contiguous() and destination.is_contiguous()):
        raise RuntimeError("a row is not contiguous: give buffers with dense rows")


def _at(span: _Span, item_size: int) -> tuple[_Span, Address]:
    return span, lambda row: span.base + row * item_size


def _rows(tensor: torch.Tensor, item_size: int) -> tuple[_Span, Address]:
    """Layer first: the address comes from the base and the item size alone, as in the kernels, whatever the tensor's strides."""
    return _at(_Span("a buffer", tensor), item_size)


def _page_first(tensor: torch.Tensor, layout_dim: int, layer: int, item_size: int) -> tuple[_Span, Address]:
    span = _Span("a page-first buffer", tensor)
    return span, lambda row: span.base + row * layout_dim + layer * item_size


def _strided(tensor: torch.Tensor, row_bytes: int) -> tuple[_Span, Address]:
    """A buffer that the copy engine slices: rows by the tensor's own stride."""
    span = _Span("a buffer", tensor)
    stride = tensor.stride(0) * tensor.itemsize
    if stride != row_bytes:
        raise RuntimeError(f"rows of {row_bytes} bytes lie {stride} apart: give buffers with dense rows")
    return span, lambda row: span.base + row * stride


def _paged(tensor: torch.Tensor, layer: int, page_size: int, rows: torch.Tensor) -> tuple[tuple[_Span, Address], int]:
    """One layer of ``[pages, layers, page_size, ...]``: the address of the page that begins at a row, and a page's bytes."""
    if not 0 <= layer < tensor.shape[1]:
        raise IndexError(f"layer {layer} of a buffer with {tensor.shape[1]} layers")
    if tensor.shape[2] != page_size:
        raise RuntimeError(f"pages of {tensor.shape[2]} rows for page_size {page_size}: use one")
    _check_alike(rows[0], tensor[0, layer, 0])
    span = _Span("a page-first buffer", tensor)
    page_bytes = tensor[0, layer].numel() * tensor.itemsize
    page_stride, layer_stride = (tensor.stride(at) * tensor.itemsize for at in (0, 1))
    return (span, lambda row: span.base + row // page_size * page_stride + layer * layer_stride), page_bytes
