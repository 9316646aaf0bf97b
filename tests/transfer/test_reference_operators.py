"""The stand-ins of the package's operators: worked byte addresses, agreement with plain indexing, and the argument checks."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

from cphicache.transfer.backends.reference import ReferenceOperators

LAYERS, ITEM, PAGE = 3, 16, 4
Operators = ReferenceOperators


def rows(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def buffer(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def table(*buffers: torch.Tensor) -> torch.Tensor:
    return torch.tensor([tensor.data_ptr() for tensor in buffers], dtype=torch.uint64)


def written(before: torch.Tensor, after: torch.Tensor) -> list[int]:
    """Offsets of the bytes that changed."""
    return torch.nonzero(before.flatten() != after.flatten()).flatten().tolist()


def test_page_first_by_token_slot() -> None:
    """R32: 3 layers, item 16: slot 5, layer 2 is byte 272 (5 x 48 + 32) of a page-first pool, by the all-layer operator and from it."""
    operators, host = Operators(), torch.zeros(8, LAYERS, ITEM, dtype=torch.uint8)
    device = [buffer(8, ITEM, seed=layer) for layer in range(LAYERS)]
    operators.register(*device)
    operators.transfer_kv_all_layer_mla_lf_pf(table(*device), host, rows(1), rows(5), ITEM, LAYERS * ITEM, LAYERS)
    flat = host.flatten()
    assert written(torch.zeros_like(host), host) == list(range(240, 288))
    assert torch.equal(flat[272:288], device[2][1])
    back = torch.zeros(8, ITEM, dtype=torch.uint8)
    operators.transfer_kv_per_layer_mla_pf_lf(host, back, rows(5), rows(3), 2, ITEM, LAYERS * ITEM)
    assert torch.equal(back[3], flat[272:288])
    assert written(torch.zeros_like(back), back) == list(range(48, 64))


def test_one_entry_pointer_table_with_the_base_shifted_by_the_layer() -> None:
    """R32: one layer by a one-entry table and a base shifted by layer x item = 32: 32 + 5 x 48 = 272, and nothing else."""
    operators, host = Operators(), torch.zeros(8, LAYERS, ITEM, dtype=torch.uint8)
    device = [buffer(8, ITEM, seed=layer) for layer in range(LAYERS)]
    operators.register(*device)
    destination = host[:, 2]
    assert destination.data_ptr() - host.data_ptr() == 32
    operators.transfer_kv_all_layer_mla_lf_pf(table(*device)[2:3], destination, rows(1), rows(5), ITEM, LAYERS * ITEM, 1)
    assert written(torch.zeros_like(host), host) == list(range(272, 288))
    assert torch.equal(host.flatten()[272:288], device[2][1])


def test_page_first_direct_by_page() -> None:
    """R32: page 4, slot 8, layer 2 is byte (2 x 3 + 2) x 4 x 16 = 512, by the all-layer operator, by one source and the view
    ``dst[:, layer:layer+1]``, and back."""
    operators = Operators()
    device = [buffer(16, ITEM, seed=layer) for layer in range(LAYERS)]
    whole = torch.zeros(4, LAYERS, PAGE, ITEM, dtype=torch.uint8)
    operators.transfer_kv_all_layer_direct_lf_pf(device, [whole], rows(4, 5, 6, 7), rows(8, 9, 10, 11), PAGE)
    assert written(torch.zeros_like(whole), whole) == list(range(384, 576))
    one = torch.zeros_like(whole)
    operators.transfer_kv_all_layer_direct_lf_pf([device[2]], [one[:, 2:3]], rows(4, 5, 6, 7), rows(8, 9, 10, 11), PAGE)
    assert written(torch.zeros_like(one), one) == list(range(512, 576))
    for host in (whole, one):
        assert torch.equal(host.flatten()[512:576], device[2][4:8].flatten())
    back = torch.zeros(16, ITEM, dtype=torch.uint8)
    operators.transfer_kv_per_layer_direct_pf_lf([one], [back], rows(8, 9, 10, 11), rows(12, 13, 14, 15), 2, PAGE)
    assert torch.equal(back[12:], device[2][4:8])
    assert not back[:12].any()


def test_layer_first_by_base_and_item() -> None:
    """R32: layer first on both sides: row x item from the base; all layers by two pointer tables; K and V each to its own."""
    operators = Operators()
    device, host = [buffer(6, ITEM, seed=layer) for layer in range(4)], torch.zeros(4, 6, ITEM, dtype=torch.uint8)
    operators.transfer_kv_per_layer_mla(device[1], host[1], rows(2, 0), rows(5, 3), ITEM)
    assert written(torch.zeros_like(host), host) == [*range(96 + 48, 96 + 64), *range(96 + 80, 96 + 96)]
    host.zero_()
    operators.transfer_kv_per_layer(device[0], host[0], device[1], host[1], rows(4), rows(1), ITEM)
    assert torch.equal(host[0, 1], device[0][4])
    assert torch.equal(host[1, 1], device[1][4])
    assert len(written(torch.zeros_like(host), host)) == 2 * ITEM
    host.zero_()
    operators.register(*device, *host.unbind(0))
    operators.transfer_kv_all_layer_mla(table(*device), table(*host.unbind(0)), rows(4), rows(1), ITEM, 4)
    assert all(torch.equal(host[layer, 1], device[layer][4]) for layer in range(4))
    host.zero_()
    sources, destinations = table(*device), table(*host.unbind(0))
    operators.transfer_kv_all_layer(sources[:2], destinations[:2], sources[2:], destinations[2:], rows(4), rows(1), ITEM, 2)
    assert all(torch.equal(host[layer, 1], device[layer][4]) for layer in range(4))
    host.zero_()
    operators.transfer_kv_direct(device, list(host.unbind(0)), rows(4, 5), rows(1, 0), 2)
    assert all(torch.equal(host[layer, [1, 0]], device[layer][4:]) for layer in range(4))
    assert len(written(torch.zeros_like(host), host)) == 4 * 2 * ITEM


def test_k_and_v_in_page_first_pools() -> None:
    """R32: K and V have tables, buffers and sources of their own, in the kernels and in the direct operators."""
    operators = Operators()
    k, v = ([buffer(8, ITEM, seed=seed + layer) for layer in range(2)] for seed in (0, 10))
    operators.register(*k, *v)
    k_host, v_host = (torch.zeros(8, 2, ITEM, dtype=torch.uint8) for _ in "kv")
    operators.transfer_kv_all_layer_lf_pf(table(*k), k_host, table(*v), v_host, rows(1, 2), rows(6, 3), ITEM, 2 * ITEM, 2)
    for layer in range(2):
        assert torch.equal(k_host[[6, 3], layer], k[layer][1:3])
        assert torch.equal(v_host[[6, 3], layer], v[layer][1:3])
    k_back, v_back = (torch.zeros(8, ITEM, dtype=torch.uint8) for _ in "kv")
    operators.transfer_kv_per_layer_pf_lf(k_host, k_back, v_host, v_back, rows(6), rows(0), 1, ITEM, 2 * ITEM)
    assert torch.equal(k_back[0], k[1][1])
    assert torch.equal(v_back[0], v[1][1])
    k_pages, v_pages = (torch.zeros(2, 2, PAGE, ITEM, dtype=torch.uint8) for _ in "kv")
    operators.transfer_kv_all_layer_direct_lf_pf([*k, *v], [k_pages, v_pages], rows(0, 1, 2, 3), rows(4, 5, 6, 7), PAGE)
    assert torch.equal(k_pages[1, 1], k[1][:4])
    assert torch.equal(v_pages[1, 0], v[0][:4])
    operators.transfer_kv_per_layer_direct_pf_lf([k_pages, v_pages], [k_back, v_back], rows(4, 5, 6, 7), rows(4, 5, 6, 7), 1, PAGE)
    assert torch.equal(k_back[4:], k[1][:4])
    assert torch.equal(v_back[4:], v[1][:4])


SIGNATURES = {
    "transfer_kv_per_layer": "src_k dst_k src_v dst_v src_indices dst_indices item_size",
    "transfer_kv_per_layer_pf_lf": "src_k dst_k src_v dst_v src_indices dst_indices layer_id item_size src_layout_dim",
    "transfer_kv_all_layer": "src_k_layers dst_k_layers src_v_layers dst_v_layers src_indices dst_indices item_size num_layers",
    "transfer_kv_all_layer_lf_pf": (
        "src_k_layers dst_k src_v_layers dst_v src_indices dst_indices item_size dst_layout_dim num_layers"
    ),
    "transfer_kv_direct": "src_layers dst_layers src_indices dst_indices page_size",
    "transfer_kv_per_layer_direct_pf_lf": "src_ptrs dst_ptrs src_indices dst_indices layer_id page_size",
    "transfer_kv_all_layer_direct_lf_pf": "src_ptrs dst_ptrs src_indices dst_indices page_size",
    "transfer_kv_per_layer_mla": "src dst src_indices dst_indices item_size",
    "transfer_kv_per_layer_mla_pf_lf": "src dst src_indices dst_indices layer_id item_size src_layout_dim",
    "transfer_kv_all_layer_mla": "src_layers dst_layers src_indices dst_indices item_size num_layers",
    "transfer_kv_all_layer_mla_lf_pf": "src_layers dst src_indices dst_indices item_size dst_layout_dim num_layers",
}
"""Parameters of sgl-kernel 0.3.21's ``kvcacheio.py``; the kernels' end with ``block_quota=2, num_warps_per_block=32``."""


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_those_of_the_package(name: str) -> None:
    """R32: each operator takes the parameters of the package's, by name and in order."""
    launch = [] if "direct" in name else ["block_quota", "num_warps_per_block"]
    assert list(inspect.signature(getattr(Operators(), name)).parameters) == [*SIGNATURES[name].split(), *launch]


def mla(**changes: Any) -> Callable[[Operators], None]:
    arguments = {"src": buffer(8, 16), "dst": buffer(8, 16), "src_indices": rows(1), "dst_indices": rows(2), "item_size": 16}
    return lambda operators: operators.transfer_kv_per_layer_mla(**{**arguments, **changes})


def direct(**changes: Any) -> Callable[[Operators], None]:
    pages = {"src_indices": rows(0, 1, 2, 3), "dst_indices": rows(4, 5, 6, 7), "page_size": 4}
    arguments = {"src_ptrs": [buffer(8, 16)], "dst_ptrs": [buffer(2, 1, 4, 16)], **pages}
    return lambda operators: operators.transfer_kv_all_layer_direct_lf_pf(**{**arguments, **changes})


def between(sources: list[torch.Tensor], destinations: list[torch.Tensor]) -> Callable[[Operators], None]:
    return lambda operators: operators.transfer_kv_direct(sources, destinations, rows(0), rows(0), 1)


def by_table(sources: torch.Tensor, num_layers: int) -> Callable[[Operators], None]:
    return lambda operators: operators.transfer_kv_all_layer_mla_lf_pf(sources, buffer(8, 16), rows(1), rows(1), 16, 16, num_layers)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (mla(item_size=12), RuntimeError, "divisible by 8"),
        (mla(item_size=0), RuntimeError, "divisible by 8"),
        (mla(block_quota=0), RuntimeError, "block_quota=0"),
        (mla(src_indices=rows(1).int()), RuntimeError, "type long"),
        (mla(dst_indices=rows(2)[None]), RuntimeError, "a vector"),
        (mla(dst_indices=rows(2, 3)), RuntimeError, "same length, found 1 and 2"),
        (mla(src_indices=rows(), dst_indices=rows()), RuntimeError, "at least one item"),
        (mla(src_indices=rows(-1)), IndexError, "negative"),
        (mla(src_indices=rows(8)), IndexError, "leave the 128 bytes"),
        (mla(dst_indices=rows(8)), IndexError, "leave the 128 bytes"),
        (mla(src=torch.empty(8, 16, device="meta")), ValueError, "on meta"),
        (by_table(torch.tensor([1], dtype=torch.int64), 1), RuntimeError, "uint64"),
        (by_table(table(buffer(8, 16)), 2), RuntimeError, "1 and 2"),
        (by_table(torch.tensor([64], dtype=torch.uint64), 1), IndexError, "no registered buffer"),
        (direct(page_size=0), RuntimeError, "positive"),
        (direct(page_size=3), RuntimeError, "4 by 3"),
        (direct(src_indices=rows(1, 2, 3, 4)), RuntimeError, "whole aligned pages"),
        (direct(dst_indices=rows(4, 5, 7, 6)), RuntimeError, "whole aligned pages"),
        (direct(dst_ptrs=[buffer(4, 1, 2, 16)]), RuntimeError, "pages of 2 rows"),
        (direct(dst_ptrs=[buffer(2, 1, 4, 8)]), RuntimeError, "alike buffers"),
        (direct(src_ptrs=[buffer(8, 16), buffer(8, 16)]), IndexError, "layer 1 of a buffer with 1 layers"),
        (direct(dst_ptrs=[buffer(2, 1, 4, 16).view(torch.int8)]), RuntimeError, "would convert"),
        (direct(src_ptrs=[buffer(8, 32)[:, ::2]]), RuntimeError, "not contiguous"),
        (direct(src_ptrs=[buffer(8, 32)[:, :16]]), RuntimeError, "lie 32 apart"),
        (between([buffer(2, 8)], []), RuntimeError, "same number of layers"),
    ],
)
def test_arguments_are_checked_as_the_package_does_and_more(
    call: Callable[[Operators], None], error: type[Exception], message: str
) -> None:
    """R32, R33: types, lengths, divisibility, whole pages and tables are checked as the package does; beyond it, no address leaves
    memory that was passed or registered, and no copy converts."""
    operators = Operators()
    operators.register(buffer(8, 16))
    with pytest.raises(error, match=message):
        call(operators)


def test_where_indices_and_tables_must_lie_is_a_parameter() -> None:
    """R32: kernel indices and tables must be on the device that the operators are for (the package: cuda); direct indices on the CPU."""
    operators, indices = Operators(index_device="meta"), torch.empty(1, dtype=torch.int64, device="meta")
    with pytest.raises(RuntimeError, match="must be a meta tensor, found cpu"):
        mla()(operators)
    with pytest.raises(RuntimeError, match="must be a meta tensor, found cpu"):
        mla(src_indices=indices)(operators)
    with pytest.raises(RuntimeError, match="give CPU indices"):
        direct(src_indices=torch.empty(4, dtype=torch.int64, device="meta"))(Operators())
