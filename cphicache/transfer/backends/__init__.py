"""Copy backends, and the one table of what works with what.

A combination that is not in the table is refused at construction; nothing falls back to another backend.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from cphicache.transfer.backends.port import CopyBackend
from cphicache.transfer.backends.torch_backend import TorchBackend


class Combination(NamedTuple):
    """Device pool kind, host layout, copy backend."""

    kind: str
    layout: str
    io_backend: str


SUPPORTED: frozenset[Combination] = frozenset(
    {
        Combination("mla", "layer_first", "torch"),
        Combination("mha", "layer_first", "torch"),
    }
)
"""Every combination that copies per layer, both ways."""

_BACKENDS: Mapping[str, CopyBackend] = MappingProxyType({"torch": TorchBackend()})


class UnsupportedCombination(ValueError):
    """A pool kind, host layout and copy backend that do not work together."""


def require_supported(kind: str, layout: str, io_backend: str) -> None:
    """Raise :class:`UnsupportedCombination`, naming combination and reason, unless :data:`SUPPORTED` has it."""
    asked = Combination(kind, layout, io_backend)
    if asked in SUPPORTED:
        return
    reasons = []
    for column, value in zip(Combination._fields, asked, strict=True):
        known = sorted({getattr(row, column) for row in SUPPORTED})
        if value not in known:
            reasons.append(f"{column} {value!r} is not one of {known}")
    works = ", ".join("/".join(row) for row in sorted(SUPPORTED))
    raise UnsupportedCombination(
        f"kind={kind!r}, layout={layout!r}, io_backend={io_backend!r} is not supported: "
        f"{'; '.join([*reasons, f'combinations that work are {works}'])}"
    )


def copy_backend(io_backend: str) -> CopyBackend:
    """The backend of that name (checked by :func:`require_supported` before)."""
    return _BACKENDS[io_backend]
