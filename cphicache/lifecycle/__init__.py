"""The backup lifecycle: a table, a machine, a record and a port. Read ``table.py`` first."""

from cphicache.lifecycle.machine import LifecycleError, LifecycleMachine
from cphicache.lifecycle.port import LifecyclePort
from cphicache.lifecycle.record import NO_INPUT, BackupRecord, Input
from cphicache.lifecycle.table import PENDING, ROWS, Row, State, Trigger, table_hash
from cphicache.lifecycle.validate import TableError, validate

__all__ = [
    "NO_INPUT",
    "PENDING",
    "ROWS",
    "BackupRecord",
    "Input",
    "LifecycleError",
    "LifecycleMachine",
    "LifecyclePort",
    "Row",
    "State",
    "TableError",
    "Trigger",
    "table_hash",
    "validate",
]
