"""Whole worlds from one seed: they pass, they repeat, and planted bugs are caught under their exit codes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from cphicache.run.config import ConfigError, RunConfig
from cphicache.run.simulate.drawn import Action, DrawnWorld, Fault, Lost, WorldError, draw
from cphicache.run.simulate.judge import FailedLoads, simulate
from cphicache.run.simulate.outcome import Code, Outcome
from cphicache.run.simulate.planted import CANARIES
from cphicache.run.simulate.shrink import shrink

SEEDS = range(1, 26)
LOAD_FAILS = 28
"""A seed with a load-back that fails and is read."""


def test_seeded_worlds_pass() -> None:
    """R7, R13-R18, R22, R30: whole worlds with delays, failing copies and reservations, aborts, retractions, resets and lost ranks keep
    every invariant, serve only right bytes, and come to rest with nothing left; and between them they walk the paths that matter."""
    seen = Counter[str]()
    for seed in SEEDS:
        outcome = simulate(draw(seed))
        assert outcome.code is Code.FINE, f"seed {seed}: {outcome.text}"
        seen += outcome.seen
    for name in ("committed", "rolled back", "host evictions", "load-backs", "deferred splits", "D2H faults", "reservation faults"):
        assert seen[name] > 0, name
    assert seen["checks"] > seen["ticks"]
    assert seen["bytes compared"] > 0


def test_every_seed_draws_a_world_that_can_run() -> None:
    """R34: drawing is total: each of a thousand seeds gives a valid configuration, and its JSON line reads back equal."""
    for seed in range(1000):
        world = draw(seed)
        assert isinstance(world.config, RunConfig)
        assert DrawnWorld.from_json(world.to_json()) == world


def test_the_seeds_draw_all_kinds_of_worlds() -> None:
    """R34: sizes, policies, pools, layouts, backends, streams and phases all occur."""
    worlds = [draw(seed) for seed in range(1000)]
    for name, values in {
        "kv": {"mla", "mha", "dsa"},
        "layout": {"layer_first", "page_first", "page_first_direct"},
        "backend": {"torch", "direct", "kernel"},
        "policy": {"write_through", "write_through_selective", "write_back"},
        "streams": {"virtual", "threads"},
        "kv_replicated": {False, True},
        "draft_layers": {0, 1, 2},
        "cp_size": {1, 2, 3, 4},
    }.items():
        assert {world.options[name] for world in worlds} == values
    assert {fault.where for world in worlds for fault in world.faults} == {"d2h", "h2d", "reserve"}
    assert {action.what for world in worlds for action in world.actions} == {"reset_backups", "evict", "pin"}
    assert any(world.lost for world in worlds)
    assert any(not world.faults for world in worlds)


@pytest.mark.parametrize("seed", [3, 8, 11])
def test_a_seed_takes_the_same_steps_again(seed: int) -> None:
    """R36: two runs of a seed agree in every count, every digest of every rank's state at every check, and all that was served."""
    world = draw(seed)
    assert world.is_repeatable
    once, again = simulate(world), simulate(world)
    assert once == again
    assert once.fingerprint


def test_another_seed_takes_other_steps() -> None:
    """R36: the fingerprint tells runs apart."""
    assert simulate(draw(3)).fingerprint != simulate(draw(8)).fingerprint


@pytest.mark.parametrize("name", [name for name in CANARIES if name != "never-admitted"])  # slow, and in test_command.py
def test_every_canary_is_caught(name: str) -> None:
    """R34: a bug planted at the ports of the serving classes fails a world within a few seeds, and under the code that says what it is."""
    outcomes = (simulate(draw(seed), canary=CANARIES[name]) for seed in range(1, 60))
    failed = next((outcome for outcome in outcomes if outcome.code), None)
    assert failed is not None
    assert failed.code in CANARIES[name].codes, failed.text


def test_a_failed_load_back_explains_its_wrong_reads_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """R22, R25: what is read of a load-back that failed is wrong by the fault alone; without that account it is told as wrong bytes."""
    world = draw(LOAD_FAILS)
    outcome = simulate(world)
    assert outcome.code is Code.FINE
    assert outcome.seen["load-backs failed"] > 0
    monkeypatch.setattr(FailedLoads, "explains", lambda self, mismatch: False)
    assert simulate(world).code is Code.WRONG_BYTES


def test_a_failing_world_is_shrunk_while_it_fails_in_the_same_way() -> None:
    """R34: the shrunk world fails with the same code and kind, and is smaller in requests, faults and ranks."""
    world = draw(1)
    canary = CANARIES["lost-page"]
    failed = simulate(world, canary=canary)
    assert failed.code is Code.BROKEN_INVARIANT
    small, how = shrink(world, failed, lambda candidate: simulate(candidate, canary=canary), tries=60)
    assert how.fails_like(failed)
    assert simulate(small, canary=canary).fails_like(failed)
    assert small.config.requests is not None
    assert small.config.requests < world.options["requests"]
    assert len(small.faults) + len(small.actions) == 0


def test_shrinking_finds_the_one_fault_that_matters() -> None:
    """R34: of all requests, faults, ranks and options only what the failure needs is left. (The failure is made up: it needs one fault
    and four requests.)"""
    needed = Fault(1, "d2h", "target", 0, 5)
    world = replace(
        draw(1).with_options(
            cp_size=4, kv_replicated=False, requests=27, device_tokens=512, host_tokens=512, page_size=4, chunk_tokens=16
        ),
        slowness=(1.0, 2.0, 8.0, 1.0),
        faults=(Fault(0, "h2d", "target", 0, 1), needed, Fault(3, "reserve", "target", 0, 2)),
        actions=(Action(3, "evict", 5), Action(4, "pin", 9)),
        lost=Lost(3, 9),
    )
    failed = Outcome(Code.CRASH, "made up")

    def run(candidate: DrawnWorld) -> Outcome:
        return failed if needed in candidate.faults and candidate.options["requests"] >= 4 else Outcome(Code.FINE)

    small, _ = shrink(world, failed, run)
    assert small.faults == (needed,)
    assert (small.actions, small.lost, small.jitter, small.slowness) == ((), None, 0.0, (1.0, 1.0))
    assert (small.options["requests"], small.options["cp_size"], small.options["layers"]) == (4, 2, 1)


def test_shrinking_stops_when_its_tries_are_spent() -> None:
    """R34: shrinking is bounded; without tries the world stays as it is."""
    world, failed = draw(1), Outcome(Code.CRASH, "made up")
    assert shrink(world, failed, lambda candidate: failed, tries=0) == (world, failed)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "cannot be read"),
        ("{}", "KeyError"),
        ('{"surprise":1}', "unknown field 'surprise'"),
        (draw(1).with_options(cp_size=9).to_json(), "ConfigError"),
        (replace(draw(1), slowness=()).to_json(), "one factor a rank"),
    ],
)
def test_a_world_that_cannot_be_read_is_refused_in_one_line(text: str, said: str) -> None:
    """R35: the error names what is wrong and what to give."""
    with pytest.raises((WorldError, ConfigError), match=said) as error:
        DrawnWorld.from_json(text)
    assert "\n" not in str(error.value)
