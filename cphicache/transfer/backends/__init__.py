"""Copy backends, by the name of the option ``io_backend``.

What works with what is the table of :mod:`cphicache.transfer.support`; a combination that is not in it is refused at construction,
and nothing falls back to another backend. A backend's package is imported when the backend is asked for, once.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from cphicache.transfer.backends.kvcacheio import BackendUnavailable, DirectBackend, KernelBackend, load_operators
from cphicache.transfer.backends.port import CopyBackend, RowBackend
from cphicache.transfer.backends.rows import RowsBackend
from cphicache.transfer.backends.torch_backend import TorchBackend
from cphicache.transfer.support import SUPPORT, UnsupportedCombination, require_supported

__all__ = [
    "SUPPORTED",
    "BackendUnavailable",
    "Combination",
    "CopyBackend",
    "UnsupportedCombination",
    "copy_backend",
    "make_backend",
    "require_supported",
]


class Combination(NamedTuple):
    """Device pool kind, host layout, copy backend."""

    kind: str
    layout: str
    io_backend: str


SUPPORTED: frozenset[Combination] = frozenset(
    Combination(row.kind, row.layout, row.io_backend) for row in SUPPORT if row.reason is None
)
"""Every combination that copies per layer, both ways."""


@cache
def copy_backend(io_backend: str) -> CopyBackend:
    """The one backend of that name, with the operators of the installed packages.

    Raises :class:`BackendUnavailable` when its package is missing or does not load, :class:`UnsupportedCombination` for a name
    that is not known.
    """
    return make_backend(io_backend)


def make_backend(
    io_backend: str, *, operators: Any = None, index_device: str = "cuda", page_first_d2h: CopyBackend | None = None
) -> CopyBackend:
    """A new backend. ``operators`` and ``index_device``: for ``kernel`` and ``direct``, see
    :mod:`cphicache.transfer.backends.kvcacheio`; None: those of the package. ``page_first_d2h``: for ``kernel``."""
    match io_backend:
        case "torch":
            return RowsBackend(TorchBackend())
        case "triton":
            return RowsBackend(_triton())
        case "direct":
            return DirectBackend(operators or load_operators(io_backend), index_device=index_device)
        case "kernel":
            return KernelBackend(operators or load_operators(io_backend), index_device=index_device, page_first_d2h=page_first_d2h)
    raise UnsupportedCombination(f"io_backend {io_backend!r} is not one of {sorted({row.io_backend for row in SUPPORT})}")


def _triton() -> RowBackend:
    from cphicache.transfer.backends.triton_backend import TritonBackend, TritonUnavailable

    backend = TritonBackend()
    try:
        backend.require_available()
    except TritonUnavailable as error:
        raise BackendUnavailable(str(error)) from error
    return backend
