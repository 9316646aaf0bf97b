"""The planted bugs of docs/testing.md can be planted, and the page tells of the very same."""

from __future__ import annotations

import re

import pytest

from tests.planted.__main__ import CAUGHT, rows
from tests.planted.bugs import BUGS, ROOT, Bug


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_bug_can_be_planted(bug: Bug) -> None:
    """R30: its text stands in the source once, what takes its place is another program, and its catcher is there."""
    assert compile(bug.source, str(bug.path), "exec") != compile(bug.path.read_text(), str(bug.path), "exec")
    assert bug.kind in CAUGHT
    assert bug.kind != "test" or (ROOT / re.split(r"::| ", bug.catcher)[1]).exists()


def test_the_page_tells_of_these_bugs() -> None:
    """R30: the table that `make planted` writes names every bug, its place and what catches it."""
    assert len(BUGS) == len({bug.name for bug in BUGS}) == len({bug.place + bug.old for bug in BUGS}) == 20
    page = (ROOT / "docs" / "testing.md").read_text()
    for row in rows({})[2:]:
        assert re.search(re.escape(row.removesuffix("|").rstrip()) + r" *(\d+\.\d )?\|", page), row
