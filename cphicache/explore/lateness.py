"""Copies that end unseen may as well end later: which of the ways in which a step can go need not be followed.

What a rank tells of its copies is its sample, and all that is applied is the minimum of the samples. A copy that has ended behind one
that still flies, or on one rank while another still copies, changes no minimum. So of two states that a step can lead to, equal but
for such a copy, the one in which it still flies can do everything that the other can: it may end at the very next look, right before
it is asked about. The other state is dropped. It was reached by the real code and audited like all others, and it is dropped only
where the engine did give the same sample and the same logical half: an engine that looks behind a gap, say, gives another sample.

Nothing is lost by that. Every history of a dropped state is one of the kept state up to the next look, and from there on the same.
A dropped state that cannot come to rest leads, by a look at which all copies have ended, to states that cannot either, and such a
look of the kept state reaches the same ones. A cycle on which nothing gets on has an equal one through kept states.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias


class Standing(NamedTuple):
    """How an operation stands on a rank: its copies in flight, failed, and what of that was sampled. ``void``: it has no slots here."""

    flying: bool
    failed: bool
    done_here: bool
    failed_here: bool
    void: bool = False


Standings: TypeAlias = tuple[Standing, ...]
"""Of each operation of a rank, by its place among the logical ones."""

_FLYING = Standing(True, False, False, False)
_ENDED = Standing(False, False, True, False)
_FAILED = Standing(False, True, True, True)
_FAILING = Standing(True, True, False, True)

_LATER = {(_FLYING, _ENDED), (_FAILING, _FAILED)}
_FAILS_LATER = {(_FLYING, _FAILING), (_FLYING, _FAILED)}


def may_become(kept: Sequence[Standings], dropped: Sequence[Standings], *, wait_may_fail: bool) -> bool:
    """Whether copies that stand as in ``kept`` on each rank may come to stand as in ``dropped`` by ending later. ``wait_may_fail``: they
    may also fail later, even where the next look is a drain round's, which waits for them."""
    pairs = {pair for one, other in zip(kept, dropped, strict=True) for pair in zip(one, other, strict=True)}
    return all(one == other or (one, other) in _LATER or (wait_may_fail and (one, other) in _FAILS_LATER) for one, other in pairs)


def latest(states: Sequence[Sequence[Standings]], *, wait_may_fail: bool) -> list[int]:
    """Indices of those of ``states`` (standings by rank) that none of the others may become, in their order. Equal ones: the first."""
    kept: list[int] = []
    for index, state in enumerate(states):
        if any(may_become(states[other], state, wait_may_fail=wait_may_fail) for other in kept):
            continue
        kept = [other for other in kept if not may_become(state, states[other], wait_may_fail=wait_may_fail)]
        kept.append(index)
    return kept


class Together(NamedTuple):
    """How an operation stands on all ranks together: whether any still copies, all are done, any will tell of a failure, any has told.

    That is all that matters of it. The minimum over the samples follows from whether all ranks are done and any has failed it. Whether one
    rank copies or two, at the next look all may have ended or not; and whether one has failed or two, the operation fails.
    """

    flying: bool
    done: bool
    failed: bool
    failed_here: bool


def together(standings: Sequence[Standing]) -> Together:
    """Of one operation, from how it stands on each rank."""
    return Together(
        any(standing.flying for standing in standings),
        all(standing.done_here for standing in standings),
        any(standing.failed for standing in standings),
        any(standing.failed_here for standing in standings),
    )


def latest_together(states: Sequence[tuple[tuple[Together, ...], int]], *, wait_may_fail: bool) -> list[int]:
    """Indices of those of ``states`` (how each operation stands, and how many faults that took) that none of the others may become, in
    their order. Equal ones: the first of those with fewest faults."""
    kept: list[int] = []
    for index, state in enumerate(states):
        if any(_covers(states[other], state, wait_may_fail) for other in kept):
            continue
        kept = [other for other in kept if not _covers(state, states[other], wait_may_fail)]
        kept.append(index)
    return kept


def _covers(kept: tuple[tuple[Together, ...], int], dropped: tuple[tuple[Together, ...], int], wait_may_fail: bool) -> bool:
    """Whether ``kept`` may come to stand as ``dropped`` by copies that end later, and took no more faults: so it may have as many more."""
    if kept[1] > dropped[1]:
        return False
    return all(one == other or _ends_as(one, other, wait_may_fail) for one, other in zip(kept[0], dropped[0], strict=True))


def _ends_as(kept: Together, dropped: Together, wait_may_fail: bool) -> bool:
    if not kept.flying or not (dropped.flying or dropped.done):
        return False
    fails_later = (kept.failed, kept.failed_here) != (dropped.failed, dropped.failed_here)
    return not fails_later or (wait_may_fail and not kept.failed and dropped.failed_here)
