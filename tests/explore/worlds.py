"""Worlds that are explored in a second or two."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cphicache.engine import CacheConfig
from cphicache.explore import WORLDS, Report, RequestScript, World, explore
from cphicache.run.census import take_census


def single(rid: str, *pages: int, batch: int = 0, after: tuple[str, ...] = ()) -> RequestScript:
    return RequestScript(rid=rid, pages=pages, chunks=(len(pages),), batches=(batch,), after=after)


def tiny(*requests: RequestScript, outside: str = "", config: dict[str, Any] | None = None, **options: Any) -> World:
    """One rank and one layer, 8 device pages and 4 host pages; one request of two pages."""
    small: dict[str, Any] = {
        "page_size": 1,
        "cp_size": 1,
        "usable_pages": 8,
        "payloads": (("target", 1),),
        "host_slots": 4,
        "load_back_threshold": 1,
        "max_deferral_ticks": 2,
        "max_retries": 1,
    }
    return World(
        name="tiny",
        about="made up by a test",
        config=CacheConfig(**(small | (config or {}))),
        requests=requests or (single("a", 1, 2),),
        outside=frozenset(outside.split()),
        **options,
    )


CHAIN = RequestScript(rid="a", pages=(1, 2), chunks=(1, 2), batches=(0, 1))
"""A parent and a child of a page each."""
SPLIT = tiny(single("a", 1, 2), single("b", 1, 3), outside="abort shutdown")
"""One divides what the other stores."""
LOAD_BACK = tiny(single("a", 1, 2), single("b", 1, 2, 3, batch=1, after=("a",)), outside="evict abort")
"""One reads from the host what the other has stored."""


def two_ranks(name: str, outside: str = "") -> World:
    """A world of the command, with fewer events from outside."""
    return replace(WORLDS[name], outside=frozenset(outside.split()), draft_may_lack=False, unreported=False)


def run(world: World, **bounds: Any) -> Report:
    return explore(world, take_census, **bounds)
