"""Images of a rank, packed: an exploration keeps millions of them.

The engine's image is plain data and becomes bytes, without what all images of an engine have in common. As bytes it takes a tenth of
the memory, and the garbage collector has nothing to look through. What the ports and the driver hold recurs in many states, and is kept
once.
"""

from __future__ import annotations

from collections.abc import Hashable
from marshal import dumps, loads
from typing import Any, TypeAlias, TypeVar

from cphicache.engine.image import Image

PackedImage: TypeAlias = tuple[bytes, Any, Any, Any, Any]
"""The engine's image but for its allocator and its ledger; these; those of the local half and of the driver."""

_FORMAT = 2
"""Of ``marshal``: without references, which takes a third of the time of the latest one."""
H = TypeVar("H", bound=Hashable)


class Images:
    """Packs and unpacks the images of one engine and what is around it."""

    def __init__(self) -> None:
        self._names: tuple[str, ...] = ()
        self._counters: tuple[str, ...] = ()
        self._config: object = None
        self._known: dict[Any, Any] = {}

    def pack(self, engine: Image, local: Hashable, driver: Hashable) -> PackedImage:
        """``engine`` is the caller's no more."""
        counters = engine["counters"]
        if not self._names:
            self._names, self._counters, self._config = tuple(engine), tuple(counters), engine["config"]
        alloc, ledger = engine["alloc"], engine["ledger"]
        engine |= {"config": None, "alloc": None, "ledger": None, "counters": tuple(counters.values())}
        return dumps(tuple(engine.values()), _FORMAT), self.same(alloc), self.same(ledger), self.same(local), self.same(driver)

    def unpack(self, packed: PackedImage) -> tuple[Image, Any, Any]:
        """What was packed."""
        image, alloc, ledger, local, driver = packed
        engine = dict(zip(self._names, loads(image), strict=True))
        counters = dict(zip(self._counters, engine["counters"], strict=True))
        engine |= {"config": self._config, "alloc": alloc, "ledger": ledger, "counters": counters}
        return engine, local, driver

    def same(self, value: H) -> H:
        """The first one equal to it."""
        same: H = self._known.setdefault(value, value)
        return same
