"""What happens in an explored world: who asks for what, how much room there is, and what else may come in between."""

from __future__ import annotations

from dataclasses import dataclass, field

from cphicache.engine import CacheConfig

SHUTDOWN = "shutdown"
TICK = "tick"
ONCE_OUTSIDE = ("abort", "reset", SHUTDOWN, "evict", "flush")
"""First words of events that come from outside and need never come: a world comes to rest without them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestScript:
    """A request that may come once. ``pages``: what is on each page of its prompt (equal numbers are equal pages). ``chunks``: the pages
    at which its chunks end. ``batches``: the forward that computes each chunk; two chunks of one number are computed together if
    they are admitted before it runs. ``after``: requests that have to end before this one comes."""

    rid: str
    pages: tuple[int, ...]
    chunks: tuple[int, ...]
    batches: tuple[int, ...]
    after: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.chunks or list(self.chunks) != sorted(set(self.chunks)) or self.chunks[-1] != len(self.pages):
            raise ValueError(f"chunks {self.chunks} of request {self.rid!r}: give rising ends, the last one {len(self.pages)}")
        if len(self.batches) != len(self.chunks):
            raise ValueError(f"batches {self.batches} of request {self.rid!r}: give one for each of {len(self.chunks)} chunks")


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """An explored world. Every order of its events is tried.

    ``insert_early``: a chunk may be inserted before its forward has ended, as soon as it was launched (and the next one reserved), so
    that nodes are bound before they are numbered. ``one_forward``: a forward begins only when no other is open; else forwards
    overlap, and end in any order. ``outside``: which of the events from outside may
    come (``abort``, ``reset``, ``shutdown``, ``evict``, ``flush``). ``unreported``: a forward may end with layers that nobody
    reported. ``draft_may_lack``: the draft's forward may not come. ``tick_in_forward``: ticks come between layers, too.
    ``max_faults``: failing copies in one history (None: any number). ``reserve_may_fail``: see
    :class:`~cphicache.explore.transfer.RecordedTransfer`. ``wait_may_fail``: copies may also fail
    while a drain round waits for them, but for those of operations that were rolled back, of which nobody asks any more.
    """

    name: str
    about: str
    config: CacheConfig
    requests: tuple[RequestScript, ...]
    outside: frozenset[str] = field(default_factory=frozenset)
    insert_early: bool = False
    one_forward: bool = True
    unreported: bool = False
    draft_may_lack: bool = False
    tick_in_forward: bool = True
    max_faults: int | None = None
    reserve_may_fail: bool = False
    wait_may_fail: bool = True

    def __post_init__(self) -> None:
        unknown = self.outside - set(ONCE_OUTSIDE)
        if unknown:
            raise ValueError(f"outside events {sorted(unknown)} of world {self.name!r}: give some of {', '.join(ONCE_OUTSIDE)}")
        if len({request.rid for request in self.requests}) != len(self.requests):
            raise ValueError(f"requests of world {self.name!r}: give each a name of its own")
