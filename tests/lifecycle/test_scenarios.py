"""Every scenario, once, on the table as it is."""

from __future__ import annotations

import pytest

from cphicache.lifecycle import ROWS
from tests.lifecycle.scenarios import SCENARIOS, Worlds, worlds_of


@pytest.fixture(scope="module", params=[False, True], ids=["compiled", "stock"])
def worlds(request: pytest.FixtureRequest) -> Worlds:
    """Worlds of the real table, on one machine of either form."""
    return worlds_of(ROWS, stock=request.param)


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario(name: str, worlds: Worlds) -> None:
    """R6: each named scenario (its docstring has the property and its requirement) holds on the table as it is,
    compiled and as the package steps it."""
    SCENARIOS[name](worlds)


def test_every_scenario_names_its_requirement() -> None:
    """R6: scenarios are the named tests of the table, so each says which requirement it stands for."""
    assert all((scenario.__doc__ or "")[:1] == "R" and ":" in (scenario.__doc__ or "") for scenario in SCENARIOS.values())
