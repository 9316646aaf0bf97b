"""The outside checker (R30): keeps its own accounts and compares them with what an engine says of itself.

    device      free + cached + request-owned + parked = usable, each page in exactly one place
    host        free + reserved + in flight + draining + committed + wasted = total, for each rank and payload
    locks       lock_ref = requests (parked ones too), bound pending backups and load-backs at the node or below it
    holds       host_ref = unbound reservations and load-backs whose range holds the node

It imports nothing of what it checks. All rules hold between any two calls of an engine.
"""

from __future__ import annotations

from collections.abc import Callable

from cphicache.check.backup_rules import (
    check_columns,
    check_host,
    check_loads,
    check_local,
    check_sequence,
    check_tokens,
    check_waiters,
)
from cphicache.check.findings import Book, Finding, InvariantBroken, Rule
from cphicache.check.tree_rules import (
    check_contiguity,
    check_device,
    check_holds,
    check_locks,
    check_rows,
    check_sizes,
    check_structure,
)
from cphicache.check.views import (
    Census,
    LoadView,
    NodeView,
    NumberedView,
    OperationView,
    ParkedView,
    PinView,
    RequestView,
    WaiterView,
)

__all__ = [
    "Census",
    "Finding",
    "InvariantBroken",
    "LoadView",
    "NodeView",
    "NumberedView",
    "OperationView",
    "ParkedView",
    "PinView",
    "RequestView",
    "Rule",
    "WaiterView",
    "check",
    "check_quiet",
    "require",
    "require_quiet",
]

_RULES: tuple[Callable[[Book], None], ...] = (
    check_device,
    check_rows,
    check_sizes,
    check_host,
    check_local,
    check_locks,
    check_holds,
    check_contiguity,
    check_columns,
    check_sequence,
    check_loads,
    check_waiters,
    check_tokens,
)


def check(census: Census) -> list[Finding]:
    """Every broken rule. While the structure is broken nothing else is looked at. O(nodes + pages + paths of requests)."""
    book = Book(census)
    check_structure(book)
    if not book.findings:
        for rule in _RULES:
            rule(book)
    return book.findings


def check_quiet(census: Census) -> list[Finding]:
    """:meth:`check`, and that nothing is left of any request, backup or load-back but committed host copies and pins."""
    findings = check(census)
    left: list[tuple[str, object, int | None]] = [
        ("no pending backup", [(op.node, op.state.value) for op in census.operations], None),
        ("no load-back", [load.load for load in census.loads], None),
        ("no running request", [request.rid for request in census.requests], None),
        ("no parked insert", [parked.rid for parked in census.parked], None),
        ("no waiter", [waiter.rid for waiter in census.waiters], None),
        ("no number outstanding", [entry.number for entry in census.numbered], None),
        ("no reduction outstanding", census.outstanding, None),
        ("no open batch", census.open_batches, None),
        *(("lock_ref 0", node.lock_ref, node.id) for node in census.nodes),
        # Pins end by themselves, at a tick that may be far off; :func:`check_holds` has compared host_ref with them.
        *(("host_ref 0", node.host_ref, node.id) for node in census.nodes if not census.pins),
    ]
    used = [0] * census.cp_size
    for node in census.nodes:
        for owner in node.host_owners:
            used[owner] += census.page_size
    for (rank, payload), free in census.ledger_free.items():
        extra = census.host_total[payload] - free - used[rank]
        left.append((f"no {payload} slot of rank {rank} in use but committed ones ({used[rank]})", extra, None))
    findings += [Finding(Rule.QUIET, expected, str(found), node, census.tick) for expected, found, node in left if found]
    return findings


def require(census: Census) -> None:
    """Raise :class:`InvariantBroken` unless all rules hold."""
    _raise_if_any(check(census))


def require_quiet(census: Census) -> None:
    """Raise :class:`InvariantBroken` unless all rules hold and nothing is left (see :func:`check_quiet`)."""
    _raise_if_any(check_quiet(census))


def _raise_if_any(findings: list[Finding]) -> None:
    if findings:
        raise InvariantBroken(findings)
