"""Keys out of page hashes: one stand-in page for each hash, and the same hash when the key is named again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cphicache.tree import RadixKey

_WORD_BYTES = 8


def stand_in(fields: Mapping[str, Any], page_size: int) -> RadixKey:
    """The key that the fields ``keys``, ``namespace`` and ``bigram`` of an operation stand for.

    Every page is its hash, repeated: the hashes are chained, so two keys share as many stand-in pages as the real ones share pages.
    """
    bigram = bool(fields.get("bigram", False))
    page_bytes = page_size * _WORD_BYTES * (2 if bigram else 1)
    repeats = page_bytes // _WORD_BYTES
    names = fields["keys"]
    data = b"".join(_word(name) * repeats for name in names)
    return RadixKey(data, page_size, fields.get("namespace"), bigram, len(names), page_bytes)


def _word(name: object) -> bytes:
    word = bytes.fromhex(name) if isinstance(name, str) else b""
    if len(word) != _WORD_BYTES:
        raise ValueError(f"page hash {name!r}: {2 * _WORD_BYTES} hex digits were expected")
    return word


class StandInNames:
    """Implements :class:`~cphicache.engine.oplog.KeyNames` for keys of :func:`stand_in`: the names that they were made of."""

    def pages(self, key: RadixKey) -> list[str]:
        """See the protocol."""
        return [key.page(index)[:_WORD_BYTES].hex() for index in range(key.pages)]

    def namespace(self, extra_key: str) -> str:
        """See the protocol."""
        return extra_key
