"""The worlds that ``cphicache explore`` knows. Pages are of one token, so that a page is a slot; prompts are written as page numbers."""

from __future__ import annotations

from typing import Any

from cphicache.engine import CacheConfig, WritePolicy
from cphicache.explore.script import RequestScript, World

_PAYLOADS = (("target", 2), ("draft", 1))
_OUTSIDE = frozenset({"abort", "reset", "shutdown", "evict"})


def _config(**options: Any) -> CacheConfig:
    """Two ranks, two target layers and one draft layer, 8 device pages, one retry."""
    chosen: dict[str, Any] = {
        "page_size": 1,
        "cp_size": 2,
        "usable_pages": 8,
        "payloads": _PAYLOADS,
        "host_slots": 1,
        "load_back_threshold": 1,
        "max_deferral_ticks": 2,
        "max_retries": 1,
    }
    return CacheConfig(**(chosen | options))


def _chain(end: int, *pages: int) -> RequestScript:
    """A parent and a child of ``end`` pages each: two chunks of one prompt, each with a forward of its own."""
    return RequestScript(rid="a", pages=pages, chunks=(end, 2 * end), batches=(0, 1))


def _single(rid: str, *pages: int, batch: int, after: tuple[str, ...] = ()) -> RequestScript:
    return RequestScript(rid=rid, pages=pages, chunks=(len(pages),), batches=(batch,), after=after)


_ALL = (
    World(
        name="chain-1",
        about="parent and child, host room for one of them; their forwards overlap, so the child may be numbered first",
        config=_config(host_slots=1),
        requests=(_chain(2, 1, 2, 3, 4),),
        outside=_OUTSIDE,
        insert_early=True,
        one_forward=False,
        unreported=True,
        draft_may_lack=True,
        reserve_may_fail=True,
    ),
    World(
        name="chain-2",
        about="parent and child, host room for both; their forwards overlap, so the child may be numbered first",
        config=_config(host_slots=2),
        requests=(_chain(2, 1, 2, 3, 4),),
        outside=_OUTSIDE,
        insert_early=True,
        one_forward=False,
        draft_may_lack=True,
    ),
    World(
        name="chain-disjoint",
        about="parent and child of one page each, on different ranks: each rank has no copy of one of them",
        config=_config(host_slots=1),
        requests=(_chain(1, 1, 2),),
        outside=_OUTSIDE,
        insert_early=True,
        one_forward=False,
        draft_may_lack=True,
    ),
    World(
        name="siblings-1",
        about="two siblings, host room for one: the second evicts the first where it may",
        config=_config(host_slots=1),
        requests=(_single("a", 1, 2, batch=0), _single("b", 3, 4, batch=0)),
        outside=_OUTSIDE,
        draft_may_lack=True,
    ),
    World(
        name="siblings-reclaim",
        about="two siblings, host room for one, and host copies of nodes on the device may be reclaimed: nobody does so for ever",
        config=_config(host_slots=1, reclaim_device_valid=True, max_retries=2),
        requests=(_single("a", 1, 2, batch=0), _single("b", 3, 4, batch=1), _single("c", 1, 2, 5, 6, batch=2, after=("a",))),
        outside=frozenset({"evict"}),
    ),
    World(
        name="siblings-2",
        about="two siblings, host room for both",
        config=_config(host_slots=2),
        requests=(_single("a", 1, 2, batch=0), _single("b", 3, 4, batch=1)),
        outside=_OUTSIDE,
        one_forward=False,
        draft_may_lack=True,
    ),
    World(
        name="write-back",
        about="two siblings that are backed up when they are evicted, which waits for their copies in drain rounds",
        config=_config(host_slots=1, policy=WritePolicy.WRITE_BACK),
        requests=(_single("a", 1, 2, batch=0), _single("b", 3, 4, batch=1), _single("c", 1, 2, 5, 6, batch=2, after=("a",))),
        outside=frozenset({"abort", "evict", "shutdown"}),
    ),
    World(
        name="split",
        about="three nodes: one is divided, by an insert that may be parked and for a request that may be deferred; one rank",
        config=_config(cp_size=1, payloads=(("target", 1),), host_slots=3, usable_pages=6, max_deferral_ticks=1),
        requests=(_single("a", 1, 2, batch=0), _single("b", 1, 3, batch=0), _single("c", 1, 3, batch=1)),
        outside=_OUTSIDE,
    ),
    World(
        name="load-back",
        about="a load-back that needs the device pages of a node which is being backed up or evicted",
        config=_config(host_slots=2, usable_pages=6),
        requests=(
            _single("a", 1, 2, batch=0),
            _single("b", 1, 2, 3, 4, batch=1, after=("a",)),
            _single("c", 5, 6, batch=2, after=("a",)),
        ),
        outside=_OUTSIDE,
    ),
)

WORLDS: dict[str, World] = {world.name: world for world in _ALL}
"""By name, in the order in which they are explored."""
