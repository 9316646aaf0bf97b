"""A deliberately simple radix tree: a flat list of segments, and lists of the locks and holds that somebody has.

Nothing is counted incrementally: every answer is computed by looking at everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

Page = tuple[object, ...]
Path = tuple[Page, ...]


def pages_of(tokens: Sequence[int], page_size: int, is_bigram: bool) -> Path:
    elements: list[object] = list(pairwise(tokens)) if is_bigram else list(tokens)
    whole = len(elements) // page_size * page_size
    return tuple(tuple(elements[at : at + page_size]) for at in range(0, whole, page_size))


@dataclass
class Segment:
    """Pages ``path[start:]``; ``path`` is the whole way from the root."""

    id: int
    space: str | None
    path: Path
    start: int
    pages: list[int] | None
    last_access: int
    created: int
    priority: int
    hits: int = 0
    loading: int | None = None


def common(a: Path, b: Path) -> int:
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


@dataclass
class Twin:
    page_size: int
    policy: str
    segments: dict[int, Segment] = field(default_factory=dict)
    locks: list[tuple[str | None, Path]] = field(default_factory=list)
    holds: list[tuple[str | None, Path, int]] = field(default_factory=list)

    def match(self, space: str | None, path: Path) -> list[tuple[Segment, int]]:
        """Segments that share something with the path, and how many of their pages are matched, parents first."""
        found = [(s, common(s.path, path) - s.start) for s in self.segments.values() if s.space == space]
        return sorted([(s, n) for s, n in found if n > 0], key=lambda pair: pair[0].start)

    def insert(self, space: str | None, path: Path, ids: list[int], pages: list[int], *, now: int, priority: int) -> None:
        matched = self.match(space, path)
        if matched and matched[-1][1] < len(matched[-1][0].path) - matched[-1][0].start:
            self.split(matched[-1][0].id, matched[-1][1], ids[0])
        done = sum(n for _, n in matched)
        if done < len(path):
            self.segments[ids[1]] = Segment(ids[1], space, path, done, pages[: len(path) - done], now, now, priority)

    def split(self, node: int, head_pages: int, head: int) -> None:
        tail = self.segments[node]
        cut = tail.start + head_pages
        pages = None if tail.pages is None else tail.pages[:head_pages]
        self.segments[head] = replace(tail, id=head, path=tail.path[:cut], pages=pages)
        tail.start = cut
        tail.pages = None if tail.pages is None else tail.pages[head_pages:]

    def below(self, s: Segment) -> list[Segment]:
        """Segments strictly below."""
        return [o for o in self.segments.values() if o.space == s.space and o.path[: len(s.path)] == s.path and o is not s]

    def parent(self, s: Segment) -> Segment | None:
        return next((o for o in self.segments.values() if s in self.below(o) and len(o.path) == s.start), None)

    def lock_ref(self, s: Segment) -> int:
        return sum(space == s.space and path[: len(s.path)] == s.path for space, path in self.locks)

    def host_ref(self, s: Segment) -> int:
        return sum(space == s.space and path[: len(s.path)] == s.path and start <= s.start for space, path, start in self.holds)

    def order(self, s: Segment) -> tuple[int, ...]:
        by = {
            "lru": (s.last_access,),
            "lfu": (s.hits, s.last_access),
            "fifo": (s.created,),
            "mru": (-s.last_access,),
            "priority": (s.priority, s.last_access),
        }
        return (*by[self.policy], s.id)

    def device_leaves(self) -> list[Segment]:
        """In eviction order."""
        leaves = [
            s
            for s in self.segments.values()
            if s.pages is not None and not self.lock_ref(s) and all(o.pages is None for o in self.below(s))
        ]
        return sorted(leaves, key=self.order)

    def host_leaves(self, gone: Sequence[int] = ()) -> list[Segment]:
        """In eviction order, were the segments in ``gone`` removed."""
        leaves = [
            s
            for s in self.segments.values()
            if s.id not in gone
            and s.pages is None
            and s.loading is None
            and not self.lock_ref(s)
            and not self.host_ref(s)
            and all(o.id in gone for o in self.below(s))
        ]
        return sorted(leaves, key=self.order)

    def plan(self, tokens: int, refused: set[int]) -> list[int] | None:
        victims: list[int] = []
        while tokens > 0:
            leaves = [s for s in self.host_leaves(victims) if s.id not in refused]
            if not leaves:
                return None
            victims.append(leaves[0].id)
            tokens -= (len(leaves[0].path) - leaves[0].start) * self.page_size
        return victims

    def tokens(self, locked: bool) -> int:
        return sum(
            len(s.pages) * self.page_size
            for s in self.segments.values()
            if s.pages is not None and bool(self.lock_ref(s)) == locked
        )
