"""What the cache was asked, as events of level ``ops``: enough to ask it again, without a token in the clear."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any, Protocol

from cphicache.engine.state import CacheState
from cphicache.events import EventLog, page_hashes
from cphicache.events.hashes import DIGEST_BYTES
from cphicache.tree import RadixKey


class KeyNames(Protocol):
    """Names that stand for the pages and the namespaces of keys in a log."""

    def pages(self, key: RadixKey) -> list[str]:
        """A name a page: equal names mean equal pages after equal prefixes."""

    def namespace(self, extra_key: str) -> str:
        """A name for the namespace of a key: equal names mean equal namespaces."""


class KeyedNames:
    """Keyed hashes, see :func:`~cphicache.events.page_hashes`. ``secret``: 1..64 bytes."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def pages(self, key: RadixKey) -> list[str]:
        """See :class:`KeyNames`."""
        return page_hashes((key.page(index) for index in range(key.pages)), self._secret)

    def namespace(self, extra_key: str) -> str:
        """See :class:`KeyNames`."""
        return blake2b(extra_key.encode(), digest_size=DIGEST_BYTES, key=self._secret).hexdigest()


class OpLog:
    """Writes the events of level ``ops`` into ``log``. An engine whose log has another level has none of these."""

    def __init__(self, log: EventLog, state: CacheState, names: KeyNames) -> None:
        self._log = log
        self._state = state
        self._names = names

    def call(self, name: str, *, local: bool = False, **fields: object) -> None:
        """A call that is about to change something. ``local``: other ranks may not have it, or not now."""
        where = {"local": True} if local else {}
        self._log.op(self._state.tick, "op", call=name, **where, **fields)

    def note(self, event: str, **fields: object) -> None:
        """Another fact of level ``ops``."""
        self._log.op(self._state.tick, event, **fields)

    def pages(self, key: RadixKey) -> list[str]:
        """Names of the key's pages."""
        return self._names.pages(key)

    def key(self, key: RadixKey) -> dict[str, Any]:
        """The key by names: ``keys``, and where it has one its ``namespace``, and whether it is ``bigram``."""
        told: dict[str, Any] = {"keys": self._names.pages(key)}
        if key.extra_key is not None:
            told["namespace"] = self._names.namespace(key.extra_key)
        if key.is_bigram:
            told["bigram"] = True
        return told
