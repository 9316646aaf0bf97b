"""The peer: SGLang's own ``RadixCache`` and ``HiRadixCache``, from the installed ``sglang`` wheel, on a machine without what the rest of
SGLang needs.

Only the modules that these caches are made of are imported for real. Everything else that they name at import (kernels, metrics,
pools, serving) is a module of placeholders, which the measured calls do not touch.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from types import ModuleType
from typing import Any

from cphicache.bench.harness import PeerMissing

VERSION = "0.5.20"
REMEDY = f"sglang {VERSION} is not installed here: make bench-peer installs it into an environment of its own"
_REAL = frozenset(
    f"sglang.srt.{name}"
    for name in (
        "managers.cache_controller",
        "mem_cache.base_prefix_cache",
        "mem_cache.cache_init_params",
        "mem_cache.events",
        "mem_cache.evict_policy",
        "mem_cache.hicache_storage",
        "mem_cache.hiradix_cache",
        "mem_cache.l2_transfer",
        "mem_cache.pool_host.base",
        "mem_cache.radix_cache",
        "mem_cache.utils",
    )
)
"""What is measured, and what it is made of."""
_FOLDERS = frozenset({"sglang", "sglang.srt", "sglang.srt.managers", "sglang.srt.mem_cache", "sglang.srt.mem_cache.pool_host"})
"""Packages on the way: their folders are real, their ``__init__`` is not run."""


_NOT_ON_THE_PATH = frozenset({"psutil"})
"""What the real modules import from elsewhere for other purposes (the host pool's: to size itself)."""


def _is_peers(name: str) -> bool:
    return name.partition(".")[0] == "sglang" or name in _NOT_ON_THE_PATH


class _AnyAttribute(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Placeholder()


class _Placeholder(metaclass=_AnyAttribute):
    """Stands for anything: it can be called, subscripted, inherited from and asked for attributes; its values mean nothing."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __init_subclass__(cls, **_: object) -> None:
        pass

    def __class_getitem__(cls, _: object) -> type:
        return cls

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Placeholder()

    def __call__(self, *_: object, **__: object) -> Any:
        return _Placeholder()

    def __bool__(self) -> bool:
        return False


class _PlaceholderModule(ModuleType):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (_Placeholder,), {})
        setattr(self, name, made)
        return made


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Answers for every module below ``sglang`` that is not real here, and for what those that are import from elsewhere."""

    def __init__(self, root: str) -> None:
        self._root = root

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name in _REAL or not _is_peers(name):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _PlaceholderModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ in _FOLDERS:
            module.__path__ = ["/".join([self._root, *module.__name__.split(".")[1:]])]


def _root() -> str:
    try:
        found = metadata.version("sglang")
    except metadata.PackageNotFoundError as error:
        raise PeerMissing(REMEDY) from error
    if found != VERSION:
        raise PeerMissing(f"sglang {found} is installed, rows are for {VERSION}: make bench-peer installs that")
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        raise PeerMissing(REMEDY)
    return spec.submodule_search_locations[0]


@contextmanager
def sglang_radix() -> Iterator[ModuleType]:
    """SGLang's ``radix_cache`` module, with others of it in ``sys.modules``; nothing of it afterwards. Raises :class:`PeerMissing`."""
    if any(name.partition(".")[0] == "sglang" for name in sys.modules):
        raise AssertionError("sglang is imported already: expected a process that has not used it")
    before = {name for name in sys.modules if _is_peers(name)}
    finder = _Finder(_root())
    sys.meta_path.insert(0, finder)
    try:
        yield importlib.import_module("sglang.srt.mem_cache.radix_cache")
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if _is_peers(name) and name not in before]:
            del sys.modules[name]
