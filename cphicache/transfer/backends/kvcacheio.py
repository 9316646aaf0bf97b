"""Backends ``kernel`` and ``direct``: the operators of ``sgl_kernel.kvcacheio``, called as SGLang calls them.

The operators are a parameter: the real module, or :class:`cphicache.transfer.backends.reference.ReferenceOperators`.
``index_device`` is the device type on which ``kernel`` expects indices and pointer tables: ``cuda``, for the reference ``cpu``.

Addresses, in bytes, of a page-first host pool: ``base + token slot * (layers * item) + layer * item``. There is no operator that
copies one layer into it, so the all-layer operator is given a pointer table of one entry and a destination that begins at the
layer; ``direct`` gets one source and the view ``dst[:, layer:layer+1]`` of ``[pages, layers, page_size, item]``.
"""

from __future__ import annotations

from typing import Any

import torch

from cphicache.transfer.backends.port import CopyBackend, CopyGroup, RowPlan

WORD_BYTES = 8
"""The kernels move words of 8 bytes."""


class BackendUnavailable(RuntimeError):
    """A copy backend that cannot run here. The text is one line: what is missing and what to do."""


def load_operators(io_backend: str) -> Any:
    """The module ``sgl_kernel.kvcacheio``. Raises :class:`BackendUnavailable` when it is not there or cannot be loaded."""
    try:
        from sgl_kernel import kvcacheio  # type: ignore[import-not-found,unused-ignore]
    except ModuleNotFoundError as error:
        raise BackendUnavailable(
            f"io_backend {io_backend!r} needs the package sglang-kernel ({error}): pip install 'cphicache[cuda]', or choose another "
            "io_backend"
        ) from error
    except Exception as error:  # without a GPU or with another torch the package fails in many ways while it loads its libraries
        text = " ".join(str(error).split())[:200]
        raise BackendUnavailable(
            f"io_backend {io_backend!r}: the package sglang-kernel is installed but does not load here ({type(error).__name__}: "
            f"{text}): install the release that fits torch and the GPU, or choose another io_backend"
        ) from error
    return kvcacheio


class _Operators:
    def __init__(self, operators: Any, index_device: str) -> None:
        self._operators = operators
        self._index_device = index_device

    def _check_device(self, name: str, group: CopyGroup) -> None:
        device = group.device[0][0].device
        if device.type != self._index_device:
            raise ValueError(
                f"io_backend {name!r} copies device pools on {self._index_device!r}, and this one is on {str(device)!r}: move the "
                "pool, or use io_backend 'torch'"
            )


class KernelBackend(_Operators):
    """Kernels that read and write pinned host memory token by token. Layouts ``layer_first`` and ``page_first``.

    ``page_first_d2h``: a backend whose ``backup_layer`` copies one layer into a ``page_first`` pool (the Triton backend), or None
    for the all-layer operator with a pointer table of one entry.
    """

    name = "kernel"

    def __init__(self, operators: Any, *, index_device: str = "cuda", page_first_d2h: CopyBackend | None = None) -> None:
        super().__init__(operators, index_device)
        self._page_first_d2h = page_first_d2h

    def check(self, group: CopyGroup) -> None:
        """Items are whole words, buffers are aligned and lie where the operators work. Raises ValueError."""
        if group.item_bytes % WORD_BYTES:
            unit = "page" if group.by_page else "token"
            raise ValueError(
                f"{group.components[0]} has {group.item_bytes} bytes a {unit} and layer: io_backend 'kernel' moves words of "
                f"{WORD_BYTES} bytes; use another io_backend, or an item that is a multiple of {WORD_BYTES}"
            )
        self._check_device(self.name, group)
        if self._page_first_d2h is not None:
            self._page_first_d2h.check(group)

    def backup_layer(self, group: CopyGroup, layer: int, plan: RowPlan) -> None:
        """D2H of one layer."""
        if group.layout == "layer_first":
            self._between_layers(group, layer, plan, to_host=True)
        elif self._page_first_d2h is not None:
            self._page_first_d2h.backup_layer(group, layer, plan)
        else:
            tables = [table[layer : layer + 1] for table in group.device_tables]
            self._to_page_first(group, tables, [host[:, layer] for host in group.host], plan)

    def backup_layers(self, group: CopyGroup, plan: RowPlan) -> None:
        """D2H of every layer of the group, in one launch."""
        if group.layout == "page_first":
            self._to_page_first(group, list(group.device_tables), list(group.host), plan)
            return
        sources, destinations, rows = group.device_tables, group.host_tables, self._rows(group, plan)
        if len(sources) == 1:
            self._operators.transfer_kv_all_layer_mla(
                src_layers=sources[0],
                dst_layers=destinations[0],
                **rows,
                item_size=group.item_bytes,
                num_layers=len(group.layers),
            )
        else:
            self._operators.transfer_kv_all_layer(
                src_k_layers=sources[0],
                dst_k_layers=destinations[0],
                src_v_layers=sources[1],
                dst_v_layers=destinations[1],
                **rows,
                item_size=group.item_bytes,
                num_layers=len(group.layers),
            )

    def load_layer(self, group: CopyGroup, layer: int, plan: RowPlan) -> None:
        """H2D of one layer."""
        if group.layout == "layer_first":
            self._between_layers(group, layer, plan, to_host=False)
            return
        destinations = [layers[layer] for layers in group.device]
        rows = {
            **self._rows(group, plan),
            "layer_id": layer,
            "item_size": group.item_bytes,
            "src_layout_dim": len(group.layers) * group.item_bytes,
        }
        if len(destinations) == 1:
            self._operators.transfer_kv_per_layer_mla_pf_lf(src=group.host[0], dst=destinations[0], **rows)
        else:
            self._operators.transfer_kv_per_layer_pf_lf(
                src_k=group.host[0], dst_k=destinations[0], src_v=group.host[1], dst_v=destinations[1], **rows
            )

    def _between_layers(self, group: CopyGroup, layer: int, plan: RowPlan, *, to_host: bool) -> None:
        device = [layers[layer] for layers in group.device]
        host = [buffer[layer] for buffer in group.host]
        sources, destinations = (device, host) if to_host else (host, device)
        rows = {**self._rows(group, plan), "item_size": group.item_bytes}
        if len(sources) == 1:
            self._operators.transfer_kv_per_layer_mla(src=sources[0], dst=destinations[0], **rows)
        else:
            self._operators.transfer_kv_per_layer(
                src_k=sources[0], dst_k=destinations[0], src_v=sources[1], dst_v=destinations[1], **rows
            )

    def _to_page_first(self, group: CopyGroup, tables: list[torch.Tensor], destinations: list[torch.Tensor], plan: RowPlan) -> None:
        rows = {
            **self._rows(group, plan),
            "item_size": group.item_bytes,
            "dst_layout_dim": len(group.layers) * group.item_bytes,
            "num_layers": tables[0].numel(),
        }
        if len(tables) == 1:
            self._operators.transfer_kv_all_layer_mla_lf_pf(src_layers=tables[0], dst=destinations[0], **rows)
        else:
            self._operators.transfer_kv_all_layer_lf_pf(
                src_k_layers=tables[0], dst_k=destinations[0], src_v_layers=tables[1], dst_v=destinations[1], **rows
            )

    def _rows(self, group: CopyGroup, plan: RowPlan) -> dict[str, torch.Tensor]:
        source, destination = plan.on(group.device[0][0].device)
        return {"src_indices": source, "dst_indices": destination}


class DirectBackend(_Operators):
    """The copy engine, run by run or page by page; indices stay on the CPU. Layouts ``layer_first`` and ``page_first_direct``."""

    name = "direct"

    def __init__(self, operators: Any, *, index_device: str = "cuda") -> None:
        super().__init__(operators, index_device)

    def check(self, group: CopyGroup) -> None:
        """The device buffers lie where the operators work. Raises ValueError."""
        self._check_device(self.name, group)

    def backup_layer(self, group: CopyGroup, layer: int, plan: RowPlan) -> None:
        """D2H of one layer."""
        sources = [layers[layer] for layers in group.device]
        if group.layout == "layer_first":
            self._direct(group, sources, [host[layer] for host in group.host], plan)
        else:
            self._to_pages(group, sources, [host[:, layer : layer + 1] for host in group.host], plan)

    def backup_layers(self, group: CopyGroup, plan: RowPlan) -> None:
        """D2H of every layer of the group."""
        sources = [buffer for layers in group.device for buffer in layers]
        if group.layout == "layer_first":
            self._direct(group, sources, [buffer for host in group.host for buffer in host.unbind(0)], plan)
        else:
            self._to_pages(group, sources, list(group.host), plan)

    def load_layer(self, group: CopyGroup, layer: int, plan: RowPlan) -> None:
        """H2D of one layer."""
        destinations = [layers[layer] for layers in group.device]
        if group.layout == "layer_first":
            self._direct(group, [host[layer] for host in group.host], destinations, plan)
            return
        self._operators.transfer_kv_per_layer_direct_pf_lf(
            src_ptrs=list(group.host),
            dst_ptrs=destinations,
            src_indices=plan.source_rows,
            dst_indices=plan.destination_rows,
            layer_id=layer,
            page_size=group.page_rows,
        )

    def _direct(self, group: CopyGroup, sources: list[torch.Tensor], destinations: list[torch.Tensor], plan: RowPlan) -> None:
        self._operators.transfer_kv_direct(
            src_layers=sources,
            dst_layers=destinations,
            src_indices=plan.source_rows,
            dst_indices=plan.destination_rows,
            page_size=group.page_rows,
        )

    def _to_pages(self, group: CopyGroup, sources: list[torch.Tensor], destinations: list[torch.Tensor], plan: RowPlan) -> None:
        self._operators.transfer_kv_all_layer_direct_lf_pf(
            src_ptrs=sources,
            dst_ptrs=destinations,
            src_indices=plan.source_rows,
            dst_indices=plan.destination_rows,
            page_size=group.page_rows,
        )
