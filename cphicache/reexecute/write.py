"""Writes a failing script as a test case."""

from __future__ import annotations

from pathlib import Path
from pprint import pformat
from typing import Any

from cphicache.files import whole_file
from cphicache.reexecute.shrink import Case

_CASE = '''"""Reduced from an event log of {recorded} operations, which failed so:

{text}
"""

from typing import Any

from cphicache.reexecute import run_case

CONFIG: dict[str, Any] = {config}

OPERATIONS: list[dict[str, Any]] = {operations}

EXPECTED: list[list[str]] | None = {expected}
FIELDS: list[str] = {fields}


def test_the_reduced_operations() -> None:
    """R37: these calls end without an error, with the expected events and in a state with which the outside checker agrees."""
    trouble = run_case(CONFIG, OPERATIONS, EXPECTED, fields=FIELDS)
    assert trouble is None, trouble
'''
_WIDTH = 118


def case_text(case: Case) -> str:
    """The module with the test."""
    text = case.text.encode("unicode_escape").decode().replace('"', "'")
    return _CASE.format(
        recorded=case.recorded,
        text=text,
        config=_literal({name: _plain(value) for name, value in case.config.items()}),
        operations=_literal([dict(call) for call in case.operations]),
        expected=_literal(None if case.expected is None else [list(each) for each in case.expected]),
        fields=_literal(list(case.fields)),
    )


def write_case(case: Case, path: Path) -> None:
    """Write the test case, so that it is there as a whole or not at all. Raises OSError."""
    with whole_file(path) as place:
        place.write_text(case_text(case), encoding="utf-8")


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, str) else value  # members of enumerations are told by their values


def _literal(value: object) -> str:
    return pformat(value, width=_WIDTH, sort_dicts=False, compact=True)
