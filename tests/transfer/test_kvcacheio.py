"""Backends kernel and direct: where their operators come from, and what they refuse before a byte moves."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch

from cphicache.transfer.backends import BackendUnavailable, UnsupportedCombination, copy_backend, make_backend
from cphicache.transfer.backends.port import plan_rows
from cphicache.transfer.backends.reference import ReferenceOperators
from cphicache.transfer.pools.device import DevicePool, KVShape
from cphicache.transfer.pools.host import make_host_pool
from tests.transfer.rigs import shape_of


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """An installed package whose operators are known."""
    package, kvcacheio = ModuleType("sgl_kernel"), ModuleType("sgl_kernel.kvcacheio")
    package.kvcacheio = kvcacheio  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sgl_kernel", package)
    monkeypatch.setitem(sys.modules, "sgl_kernel.kvcacheio", kvcacheio)
    copy_backend.cache_clear()
    return kvcacheio


@pytest.mark.parametrize("name", ["kernel", "direct"])
def test_without_the_package_one_line_says_what_to_install(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """R32: the package is asked for when the backend is, and one line names the backend, the package and the command."""
    monkeypatch.setitem(sys.modules, "sgl_kernel", None)
    copy_backend.cache_clear()
    for make in (copy_backend, make_backend):
        with pytest.raises(
            BackendUnavailable, match=rf"'{name}' needs the package sglang-kernel .*pip install 'cphicache\[cuda\]'"
        ) as caught:
            make(name)
        assert "\n" not in str(caught.value)


def test_a_package_that_does_not_load_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """R32: an installed package whose libraries do not load here is named with the reason, in one line."""

    class Broken(ModuleType):
        def __getattr__(self, name: str) -> object:
            raise OSError("libcuda.so.1:\n cannot open")

    monkeypatch.setitem(sys.modules, "sgl_kernel", Broken("sgl_kernel"))
    with pytest.raises(BackendUnavailable, match=r"does not load here \(OSError: libcuda.so.1: cannot open\)"):
        make_backend("kernel")


def test_the_package_is_loaded_once(package: ModuleType) -> None:
    """R32: a backend is made once, with the package's operators; it wants its pools on a GPU and says so."""
    kernel = copy_backend("kernel")
    assert copy_backend("kernel") is kernel
    shape = shape_of("mla", 1)
    for name in ("kernel", "direct"):
        host = make_host_pool("layer_first", shape, 8, 4)
        with pytest.raises(ValueError, match=f"'{name}' copies device pools on 'cuda', and this one is on 'cpu'"):
            host.check_twin(DevicePool(shape, 8), name)
    copy_backend.cache_clear()


def test_rows_are_moved_to_a_device_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """R11: every layer of an operation asks for the same rows: they cross once to each device, through pinned memory, and not at all
    to the CPU."""
    pinned: list[torch.Tensor] = []

    def pin(rows: torch.Tensor) -> torch.Tensor:
        pinned.append(rows)
        return rows

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    source, destination = torch.tensor([3, 4]), torch.tensor([0, 7])
    plan = plan_rows(source, destination, 8, 8)
    assert plan.on(torch.device("cpu")) == (source, destination)
    assert not pinned
    moved = plan.on(torch.device("meta"))
    assert [rows.device.type for rows in moved] == ["meta", "meta"]
    assert plan.on(torch.device("meta")) is moved
    assert len(pinned) == 2


def test_unknown_backends_are_named() -> None:
    """R35: a backend that is not known is refused with those that are."""
    with pytest.raises(UnsupportedCombination, match="'magic' is not one of"):
        make_backend("magic")


@pytest.mark.parametrize(
    ("shape", "page_size", "message"),
    [
        (KVShape("mla", 1, {"latent": 10}, torch.bfloat16), 4, "latent has 20 bytes a token and layer"),
        (KVShape("mha", 1, {"k": 8, "v": 5}, torch.float8_e4m3fn), 4, "v has 5 bytes a token"),
        (KVShape("dsa", 1, {"latent": 8, "indexer": 132}, torch.bfloat16), 1, "indexer has 132 bytes a page"),
    ],
)
def test_kernel_moves_words(shape: KVShape, page_size: int, message: str) -> None:
    """R32: an item that is not whole words of 8 bytes is refused when the pools are put together, naming the component; 132-byte
    indexer keys fit in pages of 2 tokens and more."""

    def backends(name: str) -> object:
        return make_backend(name, operators=ReferenceOperators(), index_device="cpu")

    host = make_host_pool("page_first", shape, 8, page_size, backends=backends)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        host.check_twin(DevicePool(shape, 8, page_size=page_size), "kernel")
    if shape.kind == "dsa":
        wider = make_host_pool("page_first", shape, 8, 2, backends=backends)  # type: ignore[arg-type]
        wider.check_twin(DevicePool(shape, 8, page_size=2), "kernel")
