"""Execution of event logs of level ``ops`` on a real engine, and their reduction to test cases (R37)."""

from cphicache.reexecute.case import run_case
from cphicache.reexecute.execute import Difference, Execution
from cphicache.reexecute.player import Unplayable
from cphicache.reexecute.recorded import RecordedLog, Refused
from cphicache.reexecute.shrink import Case, NothingFails, shrink
from cphicache.reexecute.write import case_text, write_case

__all__ = [
    "Case",
    "Difference",
    "Execution",
    "NothingFails",
    "RecordedLog",
    "Refused",
    "Unplayable",
    "case_text",
    "run_case",
    "shrink",
    "write_case",
]
