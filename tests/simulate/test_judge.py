"""What the judge says of worlds that end in another way than they should: each way has its code, and what was planned is no failure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from cphicache.agree.digests import RanksDiverged
from cphicache.agree.port import GroupBroken
from cphicache.engine import CpHiRadixCache
from cphicache.run.scheduler import NoProgress
from cphicache.run.simulate import judge
from cphicache.run.simulate.drawn import Action, DrawnWorld, Lost, draw
from cphicache.run.simulate.judge import simulate
from cphicache.run.simulate.outcome import Code
from cphicache.run.world import RankResult, RunFailed
from cphicache.tree import RadixKey

Results = list[RankResult]


def world(**changed: Any) -> DrawnWorld:
    """Two ranks that are fine, with nothing planned."""
    quiet = replace(draw(3).with_options(cp_size=2, kv_replicated=False, requests=6), slowness=(1.0, 1.0), faults=(), actions=())
    return replace(quiet, **changed)


def served(result: RankResult, finished: int) -> RankResult:
    """With so many more requests."""
    return replace(result, served=replace(result.served, finished=result.served.finished + finished))


@pytest.mark.parametrize(
    ("change", "code", "kind", "said"),
    [
        (lambda found: found, Code.FINE, "", ""),
        (
            lambda found: [found[0], replace(found[1], ticks=found[1].ticks + 1)],
            Code.BROKEN_INVARIANT,
            "ranks differ",
            "the ranks' logical figures differ",
        ),
        (
            lambda found: [served(result, -1) for result in found],
            Code.BROKEN_INVARIANT,
            "requests",
            "expected 6 requests served, aborted or refused, found 5",
        ),
    ],
    ids=["fine", "ranks", "requests"],
)
def test_figures_are_compared_in_the_end(
    change: Callable[[Results], Results], code: Code, kind: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R20, R30: ranks that report other figures, or lose a request, are a broken invariant although every byte and slot was right."""
    run_world = judge.run_world
    monkeypatch.setattr(judge, "run_world", lambda *arguments, **named: change(run_world(*arguments, **named)))
    outcome = simulate(world())
    assert (outcome.code, outcome.kind, outcome.text) == (code, kind, said)


@pytest.mark.parametrize("lost", [None, Lost(1, 4)])
@pytest.mark.parametrize(
    ("cause", "code"),
    [
        (NoProgress("tick 9"), Code.NO_PROGRESS),
        (GroupBroken("rank 1 did not come"), Code.NO_PROGRESS),
        (RanksDiverged("tick 4: ranks 0 and 1 differ"), Code.BROKEN_INVARIANT),
        (AssertionError("expected a page"), Code.BROKEN_INVARIANT),
        (ZeroDivisionError("planned"), Code.CRASH),
        (None, Code.CRASH),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_ended_a_world_has_its_code(
    cause: Exception | None, code: Code, lost: Lost | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R34: by what a rank ended with, also where another end was planned; the kind is what a shrunk world has to end with again."""

    def fails(*arguments: Any, **named: Any) -> Results:
        raise RunFailed("rank 0: it ended") from cause

    monkeypatch.setattr(judge, "run_world", fails)
    outcome = simulate(world(lost=lost))
    assert (outcome.code, outcome.kind, outcome.text) == (code, type(cause).__name__, "rank 0: it ended")


@pytest.mark.parametrize("limit", ["ticks", "processor time"])
def test_a_world_that_takes_too_long_makes_no_progress(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """R13: too many ticks, or too much processor time, end a world; the text says how far it has come."""
    if limit == "ticks":
        monkeypatch.setattr(judge, "MOST_TICKS", 4)
    outcome = simulate(world(), **({} if limit == "ticks" else {"cpu_s": 0.0}))
    assert (outcome.code, outcome.kind) == (Code.NO_PROGRESS, "NoProgress")
    assert f"tick {5 if limit == 'ticks' else 1}: not done, " in outcome.text


def test_a_rank_that_is_lost_as_planned_is_no_failure() -> None:
    """R22: the others end in order, with requests given up; no slot, page or lock is left, and the loss is counted."""
    outcome = simulate(world(lost=Lost(1, 4)))
    assert outcome.code is Code.FINE, outcome.text
    assert outcome.seen["ranks lost"] == 1
    assert outcome.seen["ticks"] < simulate(world()).seen["ticks"]
    assert outcome.fingerprint


def test_pinning_in_an_empty_cache_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """R34: an action that comes when there is nothing to act on is passed over, on all ranks, and the world goes on."""
    pinned: list[RadixKey] = []
    pin_host = CpHiRadixCache.pin_host

    def pin(cache: CpHiRadixCache, key: RadixKey, ticks: int) -> object:
        pinned.append(key)
        return pin_host(cache, key, ticks)

    monkeypatch.setattr(CpHiRadixCache, "pin_host", pin)
    actions = [Action(tick, what, amount) for tick in range(1, 20) for what, amount in (("evict", 10**6), ("pin", 1))]
    alone = {"max_batch": 1, "policy": "write_through_selective", "selective_hits": 50}  # what ends is evicted, and leaves nothing
    outcome = simulate(world(actions=tuple(actions)).with_options(**alone))
    assert outcome.code is Code.FINE, outcome.text
    assert outcome.seen["requests"] == 6
    assert 0 < len(pinned) < 2 * 19
