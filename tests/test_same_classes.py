"""What is explored and simulated is what serves."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import cphicache
from cphicache.engine import CpHiRadixCache
from cphicache.explore import WORLDS
from cphicache.explore.product import Product
from cphicache.run.census import take_census
from cphicache.run.jobs import load_requests
from cphicache.run.scheduler import Scheduler
from cphicache.run.simulate.drawn import draw
from cphicache.run.simulate.judge import simulate
from cphicache.run.world import RankResult, RankWorld, run_world
from cphicache.transfer.rank import RankTransfer
from tests.run.worlds import small

PORTS = ("_transfer", "_log", "_ops")
"""What stands behind a port differs, and who writes a log has one."""


def parts(cache: CpHiRadixCache) -> dict[str, type]:
    """Classes of everything that an engine is made of."""
    own = {name: type(part) for name, part in vars(cache).items() if name not in PORTS}
    return own | {
        f"state.{name}": type(part) for name, part in vars(cache.state).items() if name not in ("outstanding", "quarantined")
    }


def served() -> list[RankWorld]:
    """The ranks of a run."""
    worlds: list[RankWorld] = []
    config = small(requests=2)
    run_world(config, load_requests(config), on_world=worlds.append)
    return worlds


def test_the_explored_engine_is_the_serving_one() -> None:
    """R30: each rank of an explored world has the engine of a serving rank, part by part; nothing of it is replaced or derived."""
    (first, *_) = served()
    for rank in Product(WORLDS["chain-1"], take_census).ranks:
        assert type(rank.cache) is type(first.cache) is CpHiRadixCache
        assert parts(rank.cache) == parts(first.cache)
    assert not [each for each in CpHiRadixCache.__subclasses__() if each.__module__.startswith(cphicache.__name__)]


def test_simulated_ranks_are_the_serving_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """R30: a simulated world is run by what a run is run by, with its engine, its transfer and its scheduler."""
    (first, *_) = served()
    seen: list[RankWorld] = []
    as_it_is = RankWorld.run

    def run(world: RankWorld) -> RankResult:
        seen.append(world)
        return as_it_is(world)

    monkeypatch.setattr(RankWorld, "run", run)
    assert not simulate(draw(1)).code
    assert seen
    for world in seen:
        assert (type(world), type(world.transfer), type(world.scheduler)) == (RankWorld, RankTransfer, Scheduler)
        assert parts(world.cache) == parts(first.cache)


def test_servers_and_tests_construct_one_engine() -> None:
    """R30: the engine is constructed in these places, by its own name: nobody has another one."""
    root = Path(cphicache.__file__).parent
    found = {
        path.relative_to(root).parts[0]
        for path in root.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "CpHiRadixCache"
    }
    assert found == {"bench", "explore", "run", "sglang"}
