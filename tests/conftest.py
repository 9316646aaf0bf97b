"""Options of a session, a fixture that packages share, and what is printed at the end: the conformance combinations run and skipped."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Iterator

import pytest

PREFIX = "combinations "


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--rewrite-golden``, see tests/golden."""
    parser.addoption("--rewrite-golden", action="store_true", help="write golden files anew; read the difference before it is kept")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Sum up what tests recorded under names that begin with "combinations" (worker processes send them with their reports)."""
    totals: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if getattr(report, "when", None) == "call":
                for name, value in report.user_properties:
                    if name.startswith(PREFIX) and isinstance(value, int):
                        totals[name.removeprefix(PREFIX)] += value
    if totals:
        terminalreporter.section("conformance of copies")
        terminalreporter.line(
            "pool x layout x backend x stream kind x page size x index pattern, each D2H by layer, D2H whole, H2D:"
        )
        for name, count in sorted(totals.items(), key=lambda entry: entry[0] != "run"):
            terminalreporter.line(f"{count:6d} {name}")


@pytest.fixture
def default_sigint() -> Iterator[None]:
    """As in a foreground process: an interrupt is a KeyboardInterrupt."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
