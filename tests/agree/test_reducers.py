"""The in-process reducers: a group of one, and ranks as threads. No test sleeps: threads are ordered by what they wait for."""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cphicache.agree.local import GroupMember, InProcessGroup, SingleReducer
from cphicache.agree.port import NO_FAILURE, GroupBroken, Reducer

Sample = tuple[int, int]
SAMPLES = st.tuples(st.integers(0, 50), st.integers(0, 50) | st.just(NO_FAILURE))


def on_threads(size: int, work: Callable[[int], object]) -> list[object]:
    """Run ``work(rank)`` on a thread a rank; what each returned or raised, in rank order."""
    outcomes: list[object] = [None] * size

    def run(rank: int) -> None:
        try:
            outcomes[rank] = work(rank)
        except Exception as error:
            outcomes[rank] = error

    threads = [Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def reduce_all(reducer: Reducer, samples: list[Sample]) -> list[Sample]:
    """Issue and wait for each sample in turn."""
    results = []
    for sample in samples:
        reducer.issue(*sample)
        results.append(reducer.wait())
    return results


def test_a_group_of_one_gets_its_own_sample() -> None:
    """R23: one rank needs no group: the minimum is its sample, "no failure" included."""
    samples = [(0, NO_FAILURE), (7, 3), (9, NO_FAILURE)]
    assert reduce_all(SingleReducer(), samples) == samples
    assert reduce_all(InProcessGroup(1).member(0), samples) == samples


@given(st.integers(1, 4).flatmap(lambda ranks: st.lists(st.lists(SAMPLES, min_size=ranks, max_size=ranks), min_size=1, max_size=6)))
@settings(derandomize=True, max_examples=40, deadline=None)
def test_all_ranks_get_the_elementwise_minimum_of_each_round(rounds: list[list[Sample]]) -> None:
    """R21: however the threads run, every rank gets the minimum count and the minimum failure of each round, in order."""
    size = len(rounds[0])
    group = InProcessGroup(size)
    results = on_threads(size, lambda rank: reduce_all(group.member(rank), [samples[rank] for samples in rounds]))
    expected = [(min(count for count, _ in samples), min(failed for _, failed in samples)) for samples in rounds]
    assert results == [expected] * size


def test_issue_returns_at_once_and_a_rank_may_be_one_round_ahead() -> None:
    """R21: contributing never blocks; a rank that has its result may issue the next round before the others have read this one."""
    group = InProcessGroup(2)
    first, second = group.member(0), group.member(1)
    first.issue(5, NO_FAILURE)
    second.issue(3, 9)
    assert first.wait() == (3, 9)
    first.issue(8, NO_FAILURE)
    assert second.wait() == (3, 9)
    second.issue(6, NO_FAILURE)
    assert (second.wait(), first.wait()) == ((6, NO_FAILURE), (6, NO_FAILURE))


@pytest.mark.parametrize("make", [SingleReducer, lambda: InProcessGroup(1).member(0)])
def test_at_most_one_reduction_is_outstanding(make: Callable[[], Reducer]) -> None:
    """R21: a second issue before the wait, and a wait without an issue, are our bug and change nothing."""
    reducer = make()
    with pytest.raises(AssertionError, match="no reduction is outstanding"):
        reducer.wait()
    reducer.issue(1, NO_FAILURE)
    with pytest.raises(AssertionError, match="is outstanding"):
        reducer.issue(2, NO_FAILURE)
    assert reducer.wait() == (1, NO_FAILURE)
    with pytest.raises(AssertionError, match="no reduction is outstanding"):
        reducer.wait()


def test_a_group_has_ranks_and_knows_them() -> None:
    """R35: a group of no rank and a rank outside the group are refused in one line that names the value."""
    with pytest.raises(ValueError, match="group size 0"):
        InProcessGroup(0)
    for rank in (-1, 2):
        with pytest.raises(ValueError, match=rf"rank {rank} of a group of 2: ranks are 0\.\.1"):
            InProcessGroup(2).member(rank)


def test_a_rank_that_does_not_come_is_named() -> None:
    """R22: a rank that stops answering is a clear error that names the rank and the reduction, not a hang; the group is broken then."""
    group = InProcessGroup(3, timeout_s=0.01)
    for rank in (0, 2):
        group.member(rank).issue(1, NO_FAILURE)
    waiting = member_with_issue(group, 0)
    with pytest.raises(GroupBroken, match=r"ranks \[1\] did not contribute to reduction 0 within 0.01 s"):
        waiting.wait()
    with pytest.raises(GroupBroken, match=r"ranks \[1\]"):
        member_with_issue(group, 1).wait()


def member_with_issue(group: InProcessGroup, rank: int) -> GroupMember:
    """A member that has issued its first sample."""
    member = group.member(rank)
    member.issue(1, NO_FAILURE)
    return member


def test_breaking_off_ends_a_rank_that_waits() -> None:
    """R22: a rank that ends early says why, and a rank that waits for it hears that at once."""
    group = InProcessGroup(2)
    reached: SimpleQueue[str] = SimpleQueue()

    def work(rank: int) -> object:
        if rank == 0:
            member = member_with_issue(group, 0)
            reached.put("issued")
            return member.wait()
        reached.get()
        group.break_off("rank 1 ended: ValueError: no")
        return None

    waited, broke_off = on_threads(2, work)
    assert broke_off is None
    assert isinstance(waited, GroupBroken)
    assert str(waited) == "rank 1 ended: ValueError: no"


def test_a_broken_group_is_not_used_again() -> None:
    """R22: every later wait ends with the first reason, a round that all have contributed to included."""
    group = InProcessGroup(2)
    members = [member_with_issue(group, rank) for rank in range(2)]
    group.break_off("interrupted")
    group.break_off("later")
    for member in members:
        with pytest.raises(GroupBroken, match="interrupted"):
            member.wait()
