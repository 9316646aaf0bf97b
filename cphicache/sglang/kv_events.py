"""``--kv-events-config``: what routers are told of blocks that appear on, or go from, the device and the host.

A block is a page. Its hash is the one that SGLang's own trees publish: SHA-256 of the hash of the page before (of the first page: of the
cache salt, if there is one) and the page's tokens as 32-bit little-endian integers, so that a split changes none.
"""

from __future__ import annotations

import hashlib
from array import array
from typing import Any

from sglang.srt.disaggregation.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, StorageMedium

from cphicache.engine.records import Backup
from cphicache.sglang.requests import split_namespace
from cphicache.tree import Node, RadixKey

MEDIA = {"device": StorageMedium.GPU, "host": StorageMedium.CPU}
SALT_SEED = b"sglang-cache-salt-v1\0"
"""What SGLang begins the hashes of a salted namespace with."""


class ServerEvents:
    """Collects the events of one cache."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._events: list[Any] = []
        self._hashes: dict[int, list[bytes]] = {}
        """By node: the hashes of its pages; of a node that was divided since, which is the tail now, those of its former head too."""

    def hear(self, stored: bool, medium: str, node: Node[Backup]) -> None:
        """A node's KV appeared in, or goes from, ``device`` or ``host``; it is in the tree."""
        blocks = [_published(digest) for digest in self._hashes_of(node)]
        if not stored:
            self._events.append(BlockRemoved(block_hashes=blocks, medium=MEDIA[medium]))
            if node.pages is None or (medium == "device" and not node.backup.has_host_copy):
                self._hashes.pop(node.id)  # it is nowhere now
            return
        parent, key = node.parent, node.key
        above = None if parent is None or parent.is_root else _published(self._hashes_of(parent)[-1])
        values = array("q", key.data).tolist()
        tokens = list(zip(values[0::2], values[1::2], strict=True)) if key.is_bigram else values
        self._events.append(
            BlockStored(
                block_hashes=blocks,
                parent_block_hash=above,
                token_ids=tokens,
                block_size=self._page_size,
                lora_id=None,
                medium=MEDIA[medium],
                cache_salt=split_namespace(key.extra_key)[1],
            )
        )

    def cleared(self) -> None:
        """The whole cache is empty: one event for all of it."""
        self._events = [AllBlocksCleared()]
        self._hashes.clear()

    def take(self) -> list[Any]:
        """The events since the last call, in order."""
        events, self._events = self._events, []
        return events

    def _hashes_of(self, node: Node[Backup]) -> list[bytes]:
        """The digests of the node's pages."""
        missing: list[Node[Backup]] = []
        at: Node[Backup] | None = node
        while at is not None and not at.is_root and at.id not in self._hashes:
            missing.append(at)
            at = at.parent
        prior = _seed(node.key.extra_key) if at is None or at.is_root else self._hashes[at.id][-1]
        for below in reversed(missing):
            self._hashes[below.id] = _page_hashes(below.key, prior)
            prior = self._hashes[below.id][-1]
        return self._hashes[node.id][-node.length_pages :]


def _seed(namespace: str | None) -> bytes:
    """What comes before the first page of a namespace; an extra key alone is no part of published hashes."""
    salt = split_namespace(namespace)[1]
    return b"" if salt is None else hashlib.sha256(SALT_SEED + salt.encode()).digest()


def _page_hashes(key: RadixKey, prior: bytes) -> list[bytes]:
    hashes = []
    for page in range(key.pages):
        words = array("I", array("q", key.page(page)))
        prior = hashlib.sha256(prior + words.tobytes()).digest()
        hashes.append(prior)
    return hashes


def _published(digest: bytes) -> int:
    """The signed 64-bit integer that stands for a digest in events."""
    return int.from_bytes(digest[:8], "big", signed=True)
