"""When the group breaks the host tier is given up by local drains, and the engine serves on, or ends with its accounts in order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cphicache.agree.local import SingleReducer
from cphicache.agree.port import Excluded, GroupBroken
from cphicache.check.conservation import require_quiet
from cphicache.engine import CacheConfig, CpHiRadixCache, Refusal, WriteBackShort, WritePolicy
from cphicache.lifecycle import PENDING
from cphicache.run.gone import gone_text, runs_text
from tests.engine.rig import B, C, L, N, R, Rig
from tests.engine_server import Prompt, Server, Step
from tests.ranks.worlds import assert_well, config_of, delayed, in_threads

REPORTS = ("all", "none", "no_draft")
COPIES = ("go_on", "finish", "fail", "finish_all", "hold", "hold")


class BreakingReducer(SingleReducer):
    """The group breaks at the ``nth`` wait (from 0), and is not used after that."""

    def __init__(self, nth: int, error: GroupBroken) -> None:
        super().__init__()
        self._left = nth
        self._error = error
        self.is_broken = False

    def issue(self, count: int, first_failed: int) -> None:
        assert not self.is_broken, "a broken group is not used again"
        super().issue(count, first_failed)

    def wait(self) -> tuple[int, int]:
        result = super().wait()
        self.is_broken = self._left == 0
        self._left -= 1
        if self.is_broken:
            raise self._error
        return result


def broken_server(nth: int, **options: Any) -> tuple[Server, BreakingReducer]:
    """A server of rank 0 whose group breaks."""
    config = CacheConfig(
        **{
            "page_size": 2,
            "cp_size": 1,
            "usable_pages": 12,
            "payloads": (("target", 2), ("draft", 1)),
            "host_slots": 16,
            "load_back_threshold": 2,
            "max_deferral_ticks": 4,
            **options,
        }
    )
    server = Server(config)
    reducer = BreakingReducer(nth, GroupBroken("rank 1 has gone", (1,)))
    server.cache = CpHiRadixCache(config, server.transfer, reducer)
    return server, reducer


prompts = st.builds(Prompt, st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple), st.integers(0, 1), st.integers(0, 2))
steps = st.lists(
    st.builds(
        Step,
        prompts=st.lists(prompts, max_size=2).map(tuple),
        chunk_tokens=st.sampled_from((2, 4, 8)),
        abort=st.one_of(st.none(), st.none(), st.integers(0, 3)),
        abort_layer=st.integers(-1, 1),
        evict_tokens=st.sampled_from((0, 0, 4, 24)),
        report=st.sampled_from(REPORTS),
        copies=st.sampled_from(COPIES),
        pick=st.integers(0, 3),
        fault=st.sampled_from(("", "", "reserve", "copy")),
        reset=st.booleans(),
    ),
    min_size=3,
    max_size=10,
)
policies = st.sampled_from((WritePolicy.WRITE_THROUGH, WritePolicy.WRITE_THROUGH, *WritePolicy))


@settings(derandomize=True, max_examples=80, deadline=None)
@given(policies, st.integers(0, 8), steps)
def test_with_replicated_kv_everything_is_served_to_the_end(policy: WritePolicy, nth: int, history: Sequence[Step]) -> None:
    """R22, R23: wherever in a history the group breaks, the accounts hold after every call, no reduction follows, everything pending has
    ended by the end of the call, and all that was asked for is served from the device."""
    server, reducer = broken_server(nth, policy=policy, kv_replicated=True)
    for step in history:
        server.step(step)
        if reducer.is_broken:
            assert server.cache.quarantined is not None
            assert not server.cache.state.numbered
            assert not [record for record in server.cache.state.pending.values() if record.state in PENDING]
    server.rest()


@settings(derandomize=True, max_examples=80, deadline=None)
@given(st.sampled_from((WritePolicy.WRITE_THROUGH, WritePolicy.WRITE_THROUGH_SELECTIVE)), st.integers(0, 8), steps)
def test_with_sharded_kv_the_run_ends_in_order(policy: WritePolicy, nth: int, history: Sequence[Step]) -> None:
    """R22: with a part of the KV gone the caller hears of it, with the number that was waited for; what is pending has ended by then, and
    when the requests have been ended no slot, page or lock is left."""
    server, reducer = broken_server(nth, policy=policy)
    broken = serve_until_broken(server, history)
    if broken is None:
        return
    assert "rank 1 has gone; waiting for number" in str(broken)
    assert broken.ranks == (1,)
    assert reducer.is_broken
    server.check()
    assert not server.cache.state.pending
    server.rest()


def serve_until_broken(server: Server, history: Sequence[Step]) -> GroupBroken | None:
    """What the history, or coming to rest after it, ended with."""
    try:
        for step in history:
            server.step(step)
        server.rest()
    except GroupBroken as broken:
        return broken
    return None


def quarantined_rig(**options: Any) -> Rig:
    """Two committed pages, and then backups in every pending state."""
    rig = Rig(**options)
    rig.begin("done", "ab")
    rig.chunk("done")
    rig.forward()
    rig.finish("done")
    rig.tick()
    rig.tick()
    assert rig.states("ab") == [C]
    rig.hold()
    rig.begin("flying", "cd")
    rig.chunk("flying")
    rig.forward()
    rig.finish("flying")
    return rig


def test_a_quarantine_refuses_with_its_reason() -> None:
    """R22: after a quarantine nothing is reserved and nothing is loaded back, with the reason as a value; committed copies and the accounts
    stay, and an agreed answer is not waited for."""
    rig = quarantined_rig()
    assert rig.states("cd") == [L]
    for side in rig.sides:
        side.cache.quarantine("rank 1 has gone")
        side.cache.quarantine("again")
        assert side.cache.quarantined == "rank 1 has gone"
    assert rig.states("ab", "cd") == [C, N]
    rig.check()
    rig.begin("late", "ef")
    rig.chunk("late")
    rig.forward()
    rig.finish("late")
    assert rig.states("ef") == [N]
    for side in rig.sides:
        assert side.cache.counters.refused[Refusal.QUARANTINED] > 0
        assert side.cache.counters.rolled_back["reset"] == 1
        side.cache.evict(1000)
        found = side.cache.match_prefix(side.cache.key(rig.tokens("ab")))
        assert found.host_nodes
        assert found.host_hit_tokens == 0
        answer = side.cache.load_back("loader", found, 4)
        assert answer.refused is Refusal.QUARANTINED
    rig.rest()


def test_an_excluded_rank_stops_even_with_replicated_kv() -> None:
    """R22: a rank that finds itself excluded does not serve on: the others have gone on without it."""
    server, _ = broken_server(0, kv_replicated=True)
    server.cache = CpHiRadixCache(server.config, server.transfer, BreakingReducer(0, Excluded("rank 0 was excluded", (0,))))
    server.transfer.hold()
    server.step(Step((Prompt((1, 2)),)))
    server.tick()
    with pytest.raises(Excluded, match="rank 0 was excluded; waiting for number 0"):
        server.tick()
    assert server.cache.quarantined is not None
    server.rest()


def test_ranks_that_all_have_the_kv_agree_too() -> None:
    """R23: ranks that each own every page still agree over their group, take the same steps, and keep their bytes and accounts right."""
    config = config_of(cp_size=3, kv_replicated=True, launch="threads", check_ranks=1)
    results = in_threads(config, delayed(3))
    assert_well(results)
    assert results[0].digests > 0
    assert results[0].collectives > 0
    assert len({result.transfer.d2h_bytes for result in results}) == 1
    assert all(result.transfer.noop_completions == 0 for result in results)


def test_replicated_kv_has_one_owner() -> None:
    """R35: a configuration in which ranks both share the KV and all have it is refused."""
    with pytest.raises(ValueError, match="kv_replicated with cp_size 2"):
        CacheConfig(
            page_size=2,
            cp_size=2,
            usable_pages=4,
            payloads=(("target", 1),),
            host_slots=4,
            kv_replicated=True,
            write_back_short=WriteBackShort.WAIT,
        )


def test_the_pages_that_are_gone_are_told() -> None:
    """R22: what a lost rank owned is told in numbers: device pages of its lane, those of them that held KV, and host pages."""
    rig = quarantined_rig()
    cache = rig.sides[0].cache
    text = gone_text(cache, (1,))
    assert text.startswith("gone with rank 1: 16 of 32 device pages, of which 2 held KV (logical pages ")
    assert text.endswith("and 1 host pages")
    for side in rig.sides:
        side.cache.quarantine("over")
        require_quiet(side.census())
    assert runs_text([2, 6, 10, 18], 4) == "2..10, 18 in steps of 4"
    assert runs_text([3], 4) == "3"
    assert runs_text(list(range(0, 40, 2)), 1).endswith(" and 12 runs more")


def test_rolled_back_and_reserved_backups_end_too() -> None:
    """R14, R22: a rollback that waits for its number, and a reservation that no layer was stored of, end in the quarantine."""
    rig = quarantined_rig()
    rig.begin("undone", "gh")
    rig.chunk("undone")
    rig.forward()
    rig.abort("undone")
    side = rig.sides[0]
    states = {record.state for record in side.cache.state.pending.values()}
    assert B in states
    assert R not in states
    for each in rig.sides:
        each.cache.quarantine("rank 1 has gone")
        assert not each.cache.state.pending
    rig.check()
    rig.rest()
