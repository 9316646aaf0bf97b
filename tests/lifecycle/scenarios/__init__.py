"""Named, readable lives of a backup. ``SCENARIOS`` maps each name to a function that asserts on fresh worlds.

They are tests of their own, and the judges of the mutated tables in ``test_deletions.py``.
"""

from tests.lifecycle.scenarios import agreeing, binding, copying, faults, giving_up, reserving, tree
from tests.lifecycle.scenarios.book import SCENARIOS, Scenario, Worlds, worlds_of

__all__ = [
    "SCENARIOS",
    "Scenario",
    "Worlds",
    "agreeing",
    "binding",
    "copying",
    "faults",
    "giving_up",
    "reserving",
    "tree",
    "worlds_of",
]
