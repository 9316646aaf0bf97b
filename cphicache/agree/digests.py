"""Do all ranks hold the same state? Each posts a digest every K ticks, and the first rank compares: a check for those who look for a bug.

Nothing waits for it. Posts are compared when all of one tick are there; what is left is compared when the run ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from threading import Lock
from typing import Protocol

from cphicache.agree.membership import KeyStore, read

Digests = tuple[int, ...]


class RanksDiverged(AssertionError):
    """Our bug: a rank's state is not that of the others. The text names the first tick at which it shows, the ranks and the part."""


class DigestBoard(Protocol):
    """Where ranks post their digests. Integers only."""

    def post(self, tick: int, rank: int, digests: Digests) -> None:
        """Post a rank's digests of one tick."""

    def fetch(self, tick: int, rank: int) -> Digests | None:
        """What a rank posted, ``None`` if it has not (yet)."""


class LocalBoard:
    """For ranks that are threads of one process."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._posts: dict[tuple[int, int], Digests] = {}

    def post(self, tick: int, rank: int, digests: Digests) -> None:
        """See :class:`DigestBoard`."""
        with self._lock:
            self._posts[tick, rank] = digests

    def fetch(self, tick: int, rank: int) -> Digests | None:
        """See :class:`DigestBoard`."""
        with self._lock:
            return self._posts.get((tick, rank))


class StoreBoard:
    """For ranks that are processes, over the launcher's store."""

    def __init__(self, store: KeyStore) -> None:
        self._store = store

    def post(self, tick: int, rank: int, digests: Digests) -> None:
        """See :class:`DigestBoard`."""
        self._store.set(f"digest/{tick}/{rank}", " ".join(map(str, digests)))

    def fetch(self, tick: int, rank: int) -> Digests | None:
        """See :class:`DigestBoard`."""
        found = read(self._store, f"digest/{tick}/{rank}")
        return None if found is None else tuple(map(int, found.split()))


class DigestCheck:
    """One rank's part. ``parts`` names the digests, in order; rank 0 compares."""

    def __init__(self, board: DigestBoard, rank: int, size: int, parts: Sequence[str]) -> None:
        self._board = board
        self._rank = rank
        self._size = size
        self._parts = parts
        self._open: deque[int] = deque()
        self.compared = 0

    def post(self, tick: int, digests: Digests) -> None:
        """Post this rank's digests; on rank 0, compare what all have posted. Raises :class:`RanksDiverged`."""
        self._board.post(tick, self._rank, digests)
        if self._rank == 0:
            self._open.append(tick)
            while self._open and self._compare(self._open[0], whole=True):
                self._open.popleft()
                self.compared += 1

    def finish(self) -> None:
        """The run is over, or a rank has gone: compare what is there of the rest. Raises :class:`RanksDiverged`."""
        while self._open:
            self._compare(self._open.popleft(), whole=False)

    def _compare(self, tick: int, *, whole: bool) -> bool:
        """Compare one tick's posts; False if some rank's are not there and ``whole`` is wanted."""
        found = [self._board.fetch(tick, rank) for rank in range(self._size)]
        if whole and None in found:
            return False
        first = found[0]
        for rank, digests in enumerate(found):
            if digests is not None and first is not None and digests != first:
                parts = [part for part, mine, its in zip(self._parts, first, digests, strict=True) if mine != its]
                raise RanksDiverged(f"tick {tick}: ranks 0 and {rank} differ in {' and '.join(parts)}")
        return True
