"""Backend ``triton``: its kernel in Triton's interpreter, byte by byte, and compiled for GPUs that are not here.

The interpreter is asked for explicitly (``interpret=True``), which works in any process. ``TRITON_INTERPRET=1`` is an option of users; it
has to be in the environment before triton is imported, so its test runs in a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode

from cphicache.transfer.backends.port import RowPair, plan_rows
from cphicache.transfer.backends.triton_backend import TritonBackend, TritonUnavailable

ROOT = Path(__file__).resolve().parent.parent.parent
BACKEND = TritonBackend(interpret=True)


def buffer(*shape: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def flat_row(rows: torch.Tensor, number: int) -> torch.Tensor:
    """Token row ``number`` of ``[slots, item]`` or ``[pages, page_size, item]``."""
    return rows[number] if rows.dim() == 2 else rows[number // rows.shape[1], number % rows.shape[1]]


def slots_of(rows: torch.Tensor) -> int:
    return rows.shape[0] if rows.dim() == 2 else rows.shape[0] * rows.shape[1]


def copy(pairs: list[RowPair], source_rows: list[int], destination_rows: list[int], backend: TritonBackend = BACKEND) -> None:
    first = pairs[0]
    plan = plan_rows(
        torch.tensor(source_rows, dtype=torch.int64),
        torch.tensor(destination_rows, dtype=torch.int64),
        slots_of(first.source),
        slots_of(first.destination),
    )
    backend.copy_rows(pairs, plan)


def view(whole: torch.Tensor, layout: str, layer: int) -> torch.Tensor:
    """One layer of a host buffer: layer_first ``[layers, slots, item]``, page_first ``[slots, layers, item]``, page_first_direct
    ``[pages, layers, page_size, item]``."""
    return whole[layer] if layout == "layer_first" else whole[:, layer]


LAYERS, PAGE, PAGES = 3, 4, 6
WHOLE = {
    "layer_first": (LAYERS, PAGES * PAGE),
    "page_first": (PAGES * PAGE, LAYERS),
    "page_first_direct": (PAGES, LAYERS, PAGE),
}
"""Shape of a host buffer without its item, by layout."""
PATTERNS = {
    "one page": ([2], [5]),
    "neighbours": ([1, 2, 3], [3, 4, 5]),
    "scattered": ([5, 0, 3], [1, 4, 0]),
    "reversed": ([3, 2, 1], [5, 4, 3]),
}


@pytest.mark.parametrize("direction", ["d2h", "h2d"])
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("item_bytes", [16, 132, 656, 10, 7])
@pytest.mark.parametrize("layout", WHOLE)
def test_a_layer_is_copied_to_and_from_every_layout(layout: str, item_bytes: int, pattern: str, direction: str) -> None:
    """R32, R33: one layer of whole pages between a layer-first buffer and each host layout: every planned byte, and no other."""
    device = buffer(PAGES * PAGE, item_bytes, seed=1)
    host = buffer(*WHOLE[layout], item_bytes, seed=2)
    device_pages, host_pages = PATTERNS[pattern]
    device_rows, host_rows = ([page * PAGE + at for page in pages for at in range(PAGE)] for pages in (device_pages, host_pages))
    pair, rows = RowPair(device, view(host, layout, 1)), (device_rows, host_rows)
    if direction == "h2d":
        pair, rows = pair.reversed(), (host_rows, device_rows)
    before = {"device": device.clone(), "host": host.clone()}
    copy([pair], *rows)
    device_after, host_after = before["device"].clone(), before["host"].clone()
    expected = RowPair(device_after, view(host_after, layout, 1))
    if direction == "h2d":
        expected = expected.reversed()
    for at, to in zip(*rows, strict=True):
        flat_row(expected.destination, to).copy_(flat_row(expected.source, at))
    assert torch.equal(device, device_after)
    assert torch.equal(host, host_after)
    changed = {"d2h": "host", "h2d": "device"}[direction]
    assert not torch.equal({"device": device, "host": host}[changed], before[changed])


def test_the_worked_addresses() -> None:
    """R32: 3 layers, item 16: page_first slot 5, layer 2 begins at byte 272; page_first_direct, page 4 tokens, slot 8, layer 2 at 512."""
    device = buffer(12, 16, seed=1)
    page_first = torch.zeros(12, 3, 16, dtype=torch.uint8)
    copy([RowPair(device, page_first[:, 2])], [7], [5])
    assert torch.equal(page_first.flatten()[272:288], device[7])
    assert page_first.count_nonzero() == device[7].count_nonzero()
    direct = torch.zeros(3, 3, 4, 16, dtype=torch.uint8)
    copy([RowPair(device, direct[:, 2])], [7], [8])
    assert torch.equal(direct.flatten()[512:528], device[7])
    assert direct.count_nonzero() == device[7].count_nonzero()


@st.composite
def _copies(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, list[int], list[int]]:
    item = draw(st.sampled_from([1, 2, 4, 6, 8, 24, 40]))
    sides = []
    for seed in (1, 2):
        page, pages = draw(st.sampled_from([1, 2, 3, 4, 8])), draw(st.integers(1, 6))
        row_gap, page_gap, offset = draw(st.integers(0, 9)), draw(st.integers(0, 9)), draw(st.integers(0, 9))
        stride = page * (item + row_gap) + page_gap
        flat = buffer(offset + pages * stride, seed=seed)
        sides.append(flat.as_strided((pages, page, item), (stride, item + row_gap, 1), offset))
        if page == 1:
            sides[-1] = sides[-1][:, 0]
    most = min(map(slots_of, sides))
    count = draw(st.integers(0, most))
    start = draw(st.integers(0, most - count))
    rows = list(range(slots_of(sides[1])))
    to = draw(st.one_of(st.just(rows[start : start + count]), st.permutations(rows).map(lambda order: order[:count])))
    at = draw(
        st.one_of(
            st.just(list(range(start, start + count))),
            st.lists(st.integers(0, slots_of(sides[0]) - 1), min_size=count, max_size=count),
        )
    )
    return sides[0], sides[1], at, to


@settings(derandomize=True, max_examples=150, deadline=None)
@given(case=_copies(), max_programs=st.integers(1, 3))
def test_any_strides_and_rows(case: tuple[torch.Tensor, torch.Tensor, list[int], list[int]], max_programs: int) -> None:
    """R33: for any strides, gaps, alignment, rows and number of programs the kernel does what a row-by-row copy does, gaps included."""
    source, destination, at, to = case
    whole = torch.empty(0, dtype=torch.uint8).set_(destination.untyped_storage())
    before = whole.clone()
    copy([RowPair(source, destination)], at, to, TritonBackend(interpret=True, max_programs=max_programs))
    twin = before.as_strided(destination.shape, destination.stride(), destination.storage_offset())
    for source_row, row in zip(at, to, strict=True):
        flat_row(twin, row).copy_(flat_row(source, source_row))
    assert torch.equal(whole, before)


def test_pairs_of_different_items_share_a_plan() -> None:
    """R31: a layer's components (latent and indexer) have items of their own size; one plan moves both."""
    latent, indexer = buffer(8, 576, seed=1), buffer(8, 33, seed=2)
    to_latent, to_indexer = torch.zeros(8, 3, 576, dtype=torch.uint8), torch.zeros(2, 4, 33, dtype=torch.uint8)
    copy([RowPair(latent, to_latent[:, 1]), RowPair(indexer, to_indexer)], [4, 5, 6, 7], [0, 1, 2, 3])
    assert torch.equal(to_latent[:4, 1], latent[4:])
    assert torch.equal(to_indexer[0], indexer[4:])
    assert to_latent.count_nonzero() == latent[4:].count_nonzero()
    assert not to_indexer[1].any()


def test_nothing_to_copy_needs_no_triton() -> None:
    """R33: an empty plan touches nothing and launches nothing."""
    host = buffer(4, 8, seed=1)
    before = host.clone()
    copy([RowPair(buffer(4, 8, seed=2), host)], [], [], TritonBackend(interpret=False))
    assert torch.equal(host, before)


def test_buffers_that_a_kernel_cannot_reach_are_refused() -> None:
    """R32: CPU buffers without the interpreter are refused, not copied another way; so are items of two sizes and no programs."""
    pair = RowPair(buffer(4, 8, seed=1), buffer(4, 8, seed=2))
    with pytest.raises(ValueError, match="needs a GPU"):
        copy([pair], [0], [0], TritonBackend(interpret=False))
    with pytest.raises(ValueError, match="item_bytes 8 and 9"):
        copy([RowPair(pair.source, buffer(4, 9, seed=3))], [0], [0])
    with pytest.raises(ValueError, match="max_programs=0"):
        TritonBackend(max_programs=0)


@pytest.mark.parametrize(
    ("source", "destination", "interpret", "said"),
    [
        ("cuda:0", "cpu", True, "buffer on cuda:0: Triton's interpreter copies CPU buffers; unset TRITON_INTERPRET"),
        ("cuda:0", "cpu", False, "the host buffer is not pinned: .* pin the host pool"),
        ("cpu", "cuda:0", False, "the host buffer is not pinned: .* pin the host pool"),
        ("cuda:0", "cuda:1", False, r"buffers on \['cuda:0', 'cuda:1'\]: a copy is between one GPU and the host"),
        ("cuda:1", "cuda:1", False, None),
    ],
)
def test_buffers_of_a_gpu_are_checked_before_a_kernel_reads_them(
    source: str, destination: str, interpret: bool, said: str | None
) -> None:
    """R32: an address that a kernel cannot read would end the process: pageable memory and a second GPU are refused in one line."""
    with FakeTensorMode():  # tensors that say where they are, and have no memory there
        pair = RowPair(*(torch.empty(4, 8, dtype=torch.uint8, device=where) for where in (source, destination)))
        backend = TritonBackend(interpret=interpret)
        if said is None:
            backend.check_pair(pair)
        else:
            with pytest.raises(ValueError, match=said):
                backend.check_pair(pair)


def test_without_the_package_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """R32: a missing triton is one clear error that says what to install, and the backend can be made without it."""
    monkeypatch.setitem(sys.modules, "cphicache.transfer.backends.triton_kernels", None)
    monkeypatch.delattr("cphicache.transfer.backends.triton_kernels", raising=False)
    backend = TritonBackend()
    with pytest.raises(TritonUnavailable, match=r"pip install 'cphicache\[triton\]'"):
        backend.require_available()


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(("value", "fails"), [("1", False), ("0", True)])
def test_the_environment_chooses_the_interpreter(value: str, fails: bool) -> None:
    """R32: without ``interpret`` the backend does what TRITON_INTERPRET says, also when the whole process runs interpreted."""
    code = """
import torch
from cphicache.transfer.backends.port import RowPair, plan_rows
from cphicache.transfer.backends.triton_backend import TritonBackend
source, destination = torch.arange(64, dtype=torch.uint8).view(8, 8), torch.zeros(8, 8, dtype=torch.uint8)
rows = torch.tensor([5, 6, 1])
TritonBackend().copy_rows([RowPair(source, destination)], plan_rows(rows, rows.flip(0), 8, 8))
assert destination[[1, 6, 5]].equal(source[[5, 6, 1]])
"""
    done = python(code, TRITON_INTERPRET=value)
    assert (done.returncode != 0) is fails, done.stderr
    assert ("needs a GPU" in done.stderr) is fails


def test_the_kernel_compiles_for_gpus_that_are_not_here(tmp_path: Path) -> None:
    """R32: for each word width the kernel compiles to PTX for sm_80, sm_90 and sm_100, and Triton's own assembler takes the PTX.

    In a process of its own: some releases of Triton compile no more in a process that has interpreted.
    """
    code = """
from cphicache.transfer.backends.triton_kernels import compile_for
for compute_capability in (80, 90, 100):
    for word_bits in (8, 16, 32, 64):
        asm = compile_for(compute_capability, word_bits=word_bits).asm
        assert f".target sm_{compute_capability}" in asm["ptx"], asm["ptx"][:200]
        assert f"ld.global.b{word_bits}" in asm["ptx"]
        assert f"st.global.b{word_bits}" in asm["ptx"]
        assert asm["cubin"][:4] == bytes([0x7F]) + b"ELF"
        print(compute_capability, word_bits)
"""
    done = python(code, TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET="0")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 12
