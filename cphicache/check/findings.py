"""What the outside checker finds, and the book in which it looks things up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from cphicache.check.views import Census, NodeView, OperationView, RequestView, Slots

ROOT = 0
"""Id of the root."""
FINDINGS_SHOWN = 5
"""Findings that an error's text holds in full."""


class Rule(StrEnum):
    """What a finding is about."""

    STRUCTURE = "structure"
    DEVICE = "device"
    ROWS = "rows"
    SIZES = "sizes"
    HOST = "host"
    LOCAL = "local"
    LOCKS = "locks"
    HOLDS = "holds"
    CONTIGUITY = "contiguity"
    COLUMNS = "columns"
    SEQUENCE = "sequence"
    LOADS = "loads"
    WAITERS = "waiters"
    TOKENS = "tokens"
    QUIET = "quiet"


@dataclass(frozen=True, slots=True)
class Finding:
    """One broken rule. ``node``: the node (or extent) that it is about, if it is about one."""

    rule: Rule
    expected: str
    found: str
    node: int | None
    tick: int

    def __str__(self) -> str:
        where = "" if self.node is None else f", node {self.node}"
        return f"{self.rule} at tick {self.tick}{where}: expected {self.expected}, found {self.found}"


class InvariantBroken(AssertionError):
    """Our bug: what an engine holds contradicts itself. ``findings`` has all that was found."""

    def __init__(self, findings: list[Finding]) -> None:
        self.findings = findings
        shown = [str(finding) for finding in findings[:FINDINGS_SHOWN]]
        if len(findings) > FINDINGS_SHOWN:
            shown.append(f"and {len(findings) - FINDINGS_SHOWN} more")
        super().__init__("; ".join(shown))


@dataclass(slots=True)
class Book:
    """A census by id, and what was found so far."""

    census: Census
    findings: list[Finding] = field(default_factory=list)
    nodes: dict[int, NodeView] = field(init=False)
    operations: dict[int, OperationView] = field(init=False)

    def __post_init__(self) -> None:
        self.nodes = {node.id: node for node in self.census.nodes}
        self.operations = {op.node: op for op in self.census.operations}

    @property
    def below_root(self) -> Iterator[NodeView]:
        """All nodes but the root, parents first."""
        return (node for node in self.census.nodes if node.parent is not None)

    @property
    def everybody(self) -> tuple[RequestView, ...]:
        """Running and parked requests."""
        return (*self.census.requests, *self.census.parked)

    def note(self, rule: Rule, expected: str, found: object, node: int | None = None) -> None:
        """Note a finding."""
        self.findings.append(Finding(rule, expected, str(found), node, self.census.tick))

    def same(self, rule: Rule, what: str, expected: object, found: object, node: int | None = None) -> None:
        """Note a finding unless both are equal."""
        if expected != found:
            self.note(rule, f"{what} {expected}", found, node)

    def up(self, node: int) -> Iterator[NodeView]:
        """The node and what is above it, without the root; nothing for a node that is not in the tree."""
        at = self.nodes.get(node)
        while at is not None and at.parent is not None:
            yield at
            at = self.nodes[at.parent]

    def range_up(self, last: int, pages: int, rule: Rule, who: str) -> list[NodeView]:
        """The whole nodes that make up the last ``pages`` pages before the end of ``last``."""
        members, left = [], pages
        for node in self.up(last):
            if left <= 0:
                break
            members.append(node)
            left -= node.length_pages
        if left or not members:
            self.note(rule, f"{pages} pages up from the node of {who} to end at a node's start", f"{left} pages left over", last)
        return members

    def need_of(self, owners: Iterable[int]) -> Slots:
        """Host slots by rank of whole pages with these owners."""
        counts = Counter(owners)
        return tuple(counts[rank] * self.census.page_size for rank in range(self.census.cp_size))
