"""The consistency check between ranks: silent while they agree, exact when they do not."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cphicache.agree.digests import DigestCheck, LocalBoard, RanksDiverged
from cphicache.engine import CpHiRadixCache, StateDigest
from cphicache.engine.digest import digest_state
from cphicache.spaces.types import LogicalPage
from tests.engine.rig import Rig
from tests.ranks.worlds import config_of, delayed, in_threads

PARTS = ("tree", "states", "ledger", "allocator")


def checks(size: int) -> list[DigestCheck]:
    board = LocalBoard()
    return [DigestCheck(board, rank, size, PARTS) for rank in range(size)]


def test_the_first_divergence_is_named() -> None:
    """R20: the check names the first tick at which ranks differ, the ranks, and every part; the ticks before it were compared."""
    zero, one, two = checks(3)
    for check in (one, two, zero):
        check.post(4, (1, 2, 3, 4))
    assert zero.compared == 1
    one.post(8, (1, 2, 3, 4))
    two.post(8, (1, 0, 3, 0))
    two.post(12, (0, 0, 0, 0))
    with pytest.raises(RanksDiverged, match=r"^tick 8: ranks 0 and 2 differ in states and allocator$"):
        zero.post(8, (1, 2, 3, 4))


def test_a_rank_that_is_behind_is_compared_when_it_comes() -> None:
    """R20: nothing waits: a tick that a rank has not posted yet is compared later, and at the end what is there is."""
    zero, one = checks(2)
    zero.post(4, (1, 1, 1, 1))
    zero.post(8, (1, 1, 1, 1))
    assert zero.compared == 0
    one.post(4, (1, 1, 1, 1))
    zero.post(12, (1, 1, 1, 1))
    assert zero.compared == 1
    one.post(12, (1, 2, 1, 1))
    with pytest.raises(RanksDiverged, match="tick 12: ranks 0 and 1 differ in states"):
        zero.finish()


CHANGES: dict[str, Callable[[CpHiRadixCache], object]] = {
    "tree": lambda cache: cache.state.tree.lock(next(iter(cache.state.tree.nodes()))),
    "states": lambda cache: setattr(next(iter(cache.state.tree.nodes())).backup, "hits", 99),
    "ledger": lambda cache: cache.state.ledger.take((2, 0)),
    "allocator": lambda cache: cache.state.alloc.alloc(1, LogicalPage(1)),
}


@pytest.mark.parametrize("part", PARTS)
def test_each_part_sees_its_own(part: str) -> None:
    """R20: a change of one part of the state changes the digest of that part and of no other."""
    rig = Rig()
    rig.begin("r", "abcd")
    rig.chunk("r")
    rig.forward()
    rig.finish("r")
    before = rig.sides[0].cache.digest()
    assert before == rig.sides[1].cache.digest()
    CHANGES[part](rig.sides[0].cache)
    after = digest_state(rig.sides[0].cache.state)
    assert [name for name in StateDigest._fields if getattr(before, name) != getattr(after, name)] == [part]


def test_what_only_one_rank_knows_is_in_no_digest() -> None:
    """R20, R21: the end of a rank's own copies is no part of the digest."""
    rig = Rig()
    rig.hold()
    rig.begin("r", "abcd")
    rig.chunk("r")
    rig.forward()
    side = rig.sides[0]
    side.transfer.finish_all()
    rig.tick()
    assert any(record.done_here for record in side.cache.state.pending.values())
    assert side.cache.digest() == rig.sides[1].cache.digest()


@pytest.mark.parametrize("seed", range(3))
def test_ranks_that_agree_pass_the_check_every_tick(seed: int) -> None:
    """R20: over whole runs with random delays the digests of all ranks are equal at every tick."""
    results = in_threads(config_of(cp_size=3, check_ranks=1), delayed(seed))
    assert results[0].digests >= results[0].ticks - 1
