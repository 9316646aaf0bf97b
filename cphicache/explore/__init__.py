"""Explicit-state exploration of the real engine: every order of events of a small world, on all ranks (see ``script.World``)."""

from cphicache.explore.audit import RuleBroken, TakeCensus
from cphicache.explore.scenario import ScenarioError
from cphicache.explore.script import RequestScript, World
from cphicache.explore.search import Happening, Report, Violation, explore
from cphicache.explore.worlds import WORLDS

__all__ = [
    "WORLDS",
    "Happening",
    "Report",
    "RequestScript",
    "RuleBroken",
    "ScenarioError",
    "TakeCensus",
    "Violation",
    "World",
    "explore",
]
