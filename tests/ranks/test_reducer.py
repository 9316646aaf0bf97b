"""The reduction over ``torch.distributed``, and how it parts from a group that breaks. What torch answers is told, and so is the time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch

from cphicache.agree.distributed import DistributedReducer
from cphicache.agree.membership import mark_gone, read
from cphicache.agree.port import NO_FAILURE, Excluded, GroupBroken
from tests.ranks.test_membership import LIMIT_S, Group

RESULT = (3, 9)


class Told:
    """An all-reduce that comes, fails, or does not end, as it is told; each wait that is in vain takes its time."""

    def __init__(self, how: str, tensor: torch.Tensor, pass_s: Callable[[float], None]) -> None:
        self._how = how
        self._tensor = tensor
        self._pass_s = pass_s

    def is_completed(self) -> bool:
        return self._how != "hangs"

    def wait(self, timeout: timedelta) -> bool:
        if self._how == "comes":
            self._tensor.copy_(torch.tensor(RESULT))
            return True
        self._pass_s(timeout.total_seconds())
        raise RuntimeError("timed out" if self._how == "hangs" else "connection closed by peer")


class Rig:
    """Rank 0 of three, the other two by hand: ``ways`` tells how each of its reductions goes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        self.ways: deque[str] = deque()
        self.between: Callable[[], None] = lambda: None
        """Happens whenever time passes."""
        self.group = Group()
        for rank in range(3):
            self.group.beat(rank, 4)
        self.reducer = DistributedReducer(None, self.group.members[0])  # type: ignore[arg-type]  # no torch is asked
        monkeypatch.setattr("cphicache.agree.membership.time.monotonic", lambda: self.now_s)
        monkeypatch.setattr("cphicache.agree.membership.time.sleep", self.pass_s)
        monkeypatch.setattr("cphicache.agree.distributed.dist.all_reduce", self._all_reduce)

    def pass_s(self, seconds: float) -> None:
        self.now_s += seconds
        self.between()

    def _all_reduce(self, tensor: torch.Tensor, **options: Any) -> Told | None:
        how = self.ways.popleft()
        return None if how == "of others" else Told(how, tensor, self.pass_s)

    def reduce(self, how: str) -> tuple[int, int]:
        """One reduction, which goes this way. In the end torch must have been asked."""
        self.ways.append(how)
        self.reducer.issue(5, NO_FAILURE)
        assert not self.ways
        return self.reducer.wait()


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    made = Rig(monkeypatch)
    yield made
    made.group.close()


def test_at_most_one_reduction_is_outstanding(rig: Rig) -> None:
    """R21: a second issue before the wait, and a wait without an issue, are our bug; nothing is sent, and nothing is counted."""
    with pytest.raises(AssertionError, match="no reduction is outstanding"):
        rig.reducer.wait()
    rig.ways.append("comes")
    rig.reducer.issue(5, NO_FAILURE)
    with pytest.raises(AssertionError, match="reduction 0 is outstanding"):
        rig.reducer.issue(6, NO_FAILURE)
    assert rig.reducer.wait() == RESULT
    assert (rig.reducer.issued, rig.reducer.waited) == (1, 1)


def test_a_survivor_gets_the_result_that_it_has_missed_and_gives_up_with_the_others(rig: Rig) -> None:
    """R22: a reduction that failed here and came through on another survivor has that one's result here too; the next one ends the group
    on both, with the rank that has gone, and is not sent any more."""
    assert rig.reduce("comes") == RESULT
    mark_gone(rig.group.store, 1, "was killed by SIGKILL")
    rig.group.store.set("last/2", "[2, [8, 7]]")
    assert rig.reduce("fails") == (8, 7)
    rig.reducer.issue(6, NO_FAILURE)
    for _ in range(2):
        with pytest.raises(GroupBroken, match=r"rank 1 does not answer reduction 1 .*: it was killed by SIGKILL") as caught:
            rig.reducer.wait()
        assert caught.value.ranks == (1,)
    assert (rig.reducer.issued, rig.reducer.waited) == (3, 2)


def test_a_group_that_breaks_at_its_first_reduction_has_no_result(rig: Rig) -> None:
    """R22: when no survivor has any result the group ends where it is."""
    mark_gone(rig.group.store, 1, "ended with status 1")
    rig.group.store.set("last/2", "[0, null]")
    with pytest.raises(GroupBroken, match="rank 1 does not answer reduction 0"):
        rig.reduce("fails")
    assert read(rig.group.store, "settled") == b"[0, null]"


def test_a_reduction_that_hangs_although_all_are_there_ends_the_group(rig: Rig) -> None:
    """R22: with every rank alive and ahead nobody can be blamed; after twice the limit the wait ends all the same, and names nobody."""

    def all_live() -> None:
        for rank in (1, 2):
            rig.group.beat(rank, 9)

    rig.between = all_live
    for rank in (1, 2):
        rig.group.store.set(f"last/{rank}", "[0, null]")
    with pytest.raises(GroupBroken, match=r"^reduction 0 has not come in 10\.\d s although every rank is there$") as caught:
        rig.reduce("hangs")
    assert caught.value.ranks == ()
    assert rig.now_s - 100.0 == pytest.approx(2 * LIMIT_S, abs=0.2)
    assert read(rig.group.store, "verdict") is None


def test_a_failed_reduction_is_not_asked_for_without_a_pause(rig: Rig) -> None:
    """R22: what has failed answers at once, so that the survivor lets time pass before it looks for the culprit again."""
    passed: list[float] = []

    def gone_after_a_while() -> None:
        passed.append(rig.now_s)
        if len(passed) == 6:
            mark_gone(rig.group.store, 1, "was killed by SIGKILL")
            rig.group.store.set("last/2", "[0, null]")

    rig.between = gone_after_a_while
    with pytest.raises(GroupBroken, match="it was killed by SIGKILL"):
        rig.reduce("fails")
    assert len(passed) >= 6


@pytest.mark.parametrize("excluded", [False, True])
def test_a_rank_that_has_to_end_does_not_part_with_the_others(rig: Rig, excluded: bool) -> None:
    """R22: a rank that is interrupted, or given up by the others, ends at once: it takes no part in where the survivors part."""
    if excluded:
        rig.group.store.set("verdict", '[[0], "rank 0 does not answer"]')
    else:
        rig.between = rig.group.stops[0].set
    with pytest.raises(Excluded if excluded else GroupBroken, match="rank 0 does not answer" if excluded else "^interrupted$"):
        rig.reduce("hangs")
    assert read(rig.group.store, "last/0") is None
    assert read(rig.group.store, "settled") is None


def test_a_group_of_others_is_told(rig: Rig) -> None:
    """R35: torch has no reduction for a rank that is no member of the group: that is said, and does not look like a result."""
    with pytest.raises(AssertionError, match="reduction 0: expected it to be on its way, found none"):
        rig.reduce("of others")
