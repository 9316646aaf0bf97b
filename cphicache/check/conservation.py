"""The outside checker (R30): keeps its own accounts and compares them with what an engine says of itself.

    device      free + cached + request-owned + parked = usable, each page in exactly one place
    host        free + reserved + in flight + draining + committed + wasted = total, for each rank and payload
    locks       lock_ref = requests (parked ones too), bound pending backups and load-backs at the node or below it
    holds       host_ref = unbound reservations and load-backs whose range holds the node

It imports nothing of what it checks. All rules hold between any two calls of an engine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from cphicache.check.views import (
    Census,
    LoadView,
    NodeView,
    NumberedView,
    OperationView,
    ParkedView,
    RequestView,
    Slots,
    WaiterView,
)
from cphicache.lifecycle import PENDING, State

__all__ = [
    "Census",
    "Finding",
    "InvariantBroken",
    "LoadView",
    "NodeView",
    "NumberedView",
    "OperationView",
    "ParkedView",
    "RequestView",
    "Rule",
    "WaiterView",
    "check",
    "check_quiet",
    "require",
    "require_quiet",
]

ROOT = 0
FINDINGS_SHOWN = 5
"""Findings that an error's text holds in full."""

N, R, L, C, B = (
    State.DEVICE_VALID_HOST_NONE,
    State.RESERVED,
    State.LAYERS_IN_FLIGHT,
    State.COMMITTED,
    State.ROLLED_BACK,
)


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


def check(census: Census) -> list[Finding]:
    """Every broken rule. While the structure is broken nothing else is looked at. O(nodes + pages + paths of requests)."""
    book = _Book(census)
    _check_structure(book)
    if not book.findings:
        for rule in _RULES:
            rule(book)
    return book.findings


def check_quiet(census: Census) -> list[Finding]:
    """:meth:`check`, and that nothing is left of any request, backup or load-back but committed host copies."""
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
        *(("host_ref 0", node.host_ref, node.id) for node in census.nodes),
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


@dataclass(slots=True)
class _Book:
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
        return (node for node in self.census.nodes if node.parent is not None)

    @property
    def everybody(self) -> tuple[RequestView, ...]:
        """Running and parked requests."""
        return (*self.census.requests, *self.census.parked)

    def note(self, rule: Rule, expected: str, found: object, node: int | None = None) -> None:
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
        counts = Counter(owners)
        return tuple(counts[rank] * self.census.page_size for rank in range(self.census.cp_size))


def _check_structure(book: _Book) -> None:
    """For every child, ``parent.children[key(child)] is child``; one root, which is never evicted; ids are unique."""
    rule, seen, on_device = Rule.STRUCTURE, set[int](), Counter[int]()
    for node in book.census.nodes:
        if node.id in seen:
            book.note(rule, "ids that are given once", "a second node of this id", node.id)
        if node.parent is None:
            root = (ROOT, None, (), 0, 0, 0, N)
            is_root = (node.id, node.parent_link, node.pages, node.length_pages, node.lock_ref, node.host_ref, node.state)
            book.same(rule, "a root with (id, parent, pages, length, lock_ref, host_ref, state)", root, is_root, node.id)
        elif node.parent not in seen:
            book.note(rule, "a parent that is in the tree and comes first", f"parent {node.parent}", node.id)
        else:
            book.same(rule, "parent", node.parent, node.parent_link, node.id)
            first_page = node.segment[: node.page_bytes]
            key = first_page if node.parent != ROOT or node.extra_key is None else (node.extra_key, first_page)
            if node.filed_under != key:
                book.note(rule, f"to be filed in node {node.parent} under its first page", "another key", node.id)
            if not node.segment or len(node.segment) != node.length_pages * node.page_bytes:
                book.note(rule, f"a key of {node.length_pages} pages, at least 1", f"{len(node.segment)} bytes", node.id)
            if node.pages is not None:
                book.same(rule, "device pages", node.length_pages, len(node.pages), node.id)
                on_device[node.parent] += 1
        seen.add(node.id)
    book.same(rule, "roots", 1, sum(node.parent is None for node in book.census.nodes))
    for node in book.census.nodes:
        book.same(rule, "children on the device", on_device[node.id], node.device_children, node.id)


def _check_device(book: _Book) -> None:
    census, places = book.census, dict[int, str]()

    def put(pages: Iterable[int], place: str, node: int | None = None) -> None:
        for page in pages:
            if page not in census.usable:
                usable = f"{census.usable.start}..{census.usable.stop - 1}"
                book.note(Rule.DEVICE, f"pages in {usable}", f"page {page} in {place}", node)
            elif page in places:
                book.note(Rule.DEVICE, f"page {page} in one place", f"it in {places[page]} and in {place}", node)
            else:
                places[page] = place

    put(census.free_pages, "the free lists")
    for node in book.below_root:
        put(node.pages or (), f"node {node.id}", node.id)
    for request in census.requests:
        put(request.row[request.protected_pages :], f"request {request.rid}")
    for parked in census.parked:
        put(parked.row[parked.protected_pages :], f"parked insert {parked.rid}")
    lost = [page for page in census.usable if page not in places]
    if lost:
        parts = f"free + cached + request-owned + parked = {len(census.usable)} pages"
        book.note(Rule.DEVICE, parts, f"{len(places)}: pages {lost[:8]} are nowhere")


def _check_rows(book: _Book) -> None:
    """The protected front of a row is the prefix that the request's lock keeps."""
    for request in book.everybody:
        path = [page for node in reversed(list(book.up(request.lock))) for page in node.pages or ()]
        protected = list(request.row[: request.protected_pages])
        if len(protected) != request.protected_pages or path[: len(protected)] != protected:
            expected = f"the first {request.protected_pages} pages of {request.rid}'s row to be those of its locked path"
            book.note(Rule.ROWS, expected, f"row {protected}, path {path}", request.lock)


def _check_sizes(book: _Book) -> None:
    census = book.census
    locked, free, host_only = 0, 0, [0] * census.cp_size
    for node in book.below_root:
        if node.pages is None:
            host_only = [have + more for have, more in zip(host_only, book.need_of(node.host_owners), strict=True)]
        elif node.lock_ref:
            locked += node.length_pages * census.page_size
        else:
            free += node.length_pages * census.page_size
    book.same(Rule.SIZES, "evictable tokens", free, census.evictable_tokens)
    book.same(Rule.SIZES, "protected tokens", locked, census.protected_tokens)
    book.same(Rule.SIZES, "slots by rank in host-only nodes", tuple(host_only), census.host_only_need)


_PART = {R: "reserved", L: "in flight", B: "draining"}


def _check_host(book: _Book) -> None:
    census = book.census
    parts: dict[str, list[int]] = {name: [0] * census.cp_size for name in (*_PART.values(), "committed", "wasted")}

    def add(part: str, slots: Slots) -> None:
        for rank, count in enumerate(slots):
            parts[part][rank] += count

    for op in census.operations:
        owners = tuple((page - census.base) % census.cp_size for page in op.pages)
        book.same(Rule.HOST, "owners", owners, op.owners, op.node)
        book.same(Rule.HOST, "slots by rank", book.need_of(owners), op.need, op.node)
        book.same(Rule.HOST, "wasted slots", op.wasted_pages * census.page_size, sum(op.wasted_need), op.node)
        add(_PART.get(op.state, "in flight"), book.need_of(owners))
        add("wasted", op.wasted_need)
    for node in book.below_root:
        if node.state is C or node.host_owners:
            book.same(
                Rule.HOST, "owners of host pages", node.length_pages if node.state is C else 0, len(node.host_owners), node.id
            )
        add("committed", book.need_of(node.host_owners))
    for (rank, payload), free in census.ledger_free.items():
        used = {part: slots[rank] for part, slots in parts.items()}
        if free + sum(used.values()) != census.host_total[payload]:
            text = " + ".join(f"{part} {slots}" for part, slots in used.items())
            book.note(Rule.HOST, f"rank {rank} {payload}: free + {text} = {census.host_total[payload]}", f"free {free}")


def _check_local(book: _Book) -> None:
    census = book.census
    if census.local_free is None:
        return
    void = sum(op.need[census.rank] + op.wasted_need[census.rank] for op in census.operations if op.void)
    expected = {name: census.ledger_free[census.rank, name] + void for name in census.host_total}
    book.same(Rule.LOCAL, f"free slots in the pools of rank {census.rank}", expected, dict(census.local_free))


def _check_locks(book: _Book) -> None:
    holders: dict[int, list[str]] = {}
    for request in book.everybody:
        holders.setdefault(request.lock, []).append(request.rid)
    for op in book.census.operations:
        if op.bound:
            holders.setdefault(op.node, []).append(f"backup {op.node}")
    for load in book.census.loads:
        holders.setdefault(load.last, []).append(f"load-back {load.load}")
    counts = {node: len(names) for node, names in holders.items()}
    for node_id, names in holders.items():
        if node_id not in book.nodes:
            book.note(Rule.LOCKS, f"{names} to lock a node of the tree", "it is not there", node_id)
    for node in reversed(book.census.nodes):  # children before parents
        if node.parent is not None:
            count = counts.get(node.id, 0)
            counts[node.parent] = counts.get(node.parent, 0) + count
            if count != node.lock_ref:
                here = holders.get(node.id, [])
                book.note(Rule.LOCKS, f"lock_ref {count} ({here} here, the others below)", node.lock_ref, node.id)
            if count and node.pages is None:
                book.note(Rule.LOCKS, "a locked node to be on the device", "host-only", node.id)


def _check_holds(book: _Book) -> None:
    counts = Counter[int]()
    for op in book.census.operations:
        if op.host_hold is not None:
            counts.update(node.id for node in book.range_up(*op.host_hold, Rule.HOLDS, f"extent {op.node}"))
        # A bound backup keeps its ancestors by its lock; an extent without a node pins what it hangs on.
        expected = None if op.bound else op.parent
        book.same(Rule.HOLDS, "pinned parent", expected, None if op.host_hold is None else op.host_hold[0], op.node)
    for load in book.census.loads:
        counts.update(node.id for node in book.range_up(load.last, load.pages, Rule.HOLDS, f"load-back {load.load}"))
    for node in book.below_root:
        book.same(Rule.HOLDS, "host_ref", counts[node.id], node.host_ref, node.id)


def _check_contiguity(book: _Book) -> None:
    rule = Rule.CONTIGUITY
    for node in book.below_root:
        parent = book.nodes[node.parent if node.parent is not None else ROOT]
        if node.pages is None and node.state is not C:
            book.note(rule, "an evicted node to be COMMITTED", node.state, node.id)
        if node.pages is not None and parent.pages is None:
            book.note(rule, "no device node under a host-only one", f"host-only parent {parent.id}", node.id)
        if node.state is C and parent.state is not C and parent.id != ROOT:
            book.note(rule, "a COMMITTED parent", f"parent {parent.id} {parent.state}", node.id)
        if node.state in (R, L) and parent.state not in (C, R, L) and parent.id != ROOT:
            book.note(rule, "a parent that is COMMITTED or pending", f"parent {parent.id} {parent.state}", node.id)
    for op in book.census.operations:
        if op.state in (R, L) and op.parent_state not in (None, C, R, L):
            book.note(rule, "an extent to hang on what is COMMITTED or pending", op.parent_state, op.node)


def _check_columns(book: _Book) -> None:
    full = [(1 << layers) - 1 for _, layers in book.census.payload_layers]
    for node in book.below_root:
        op = book.operations.get(node.id)
        if not node.record_fits:
            book.note(Rule.COLUMNS, "a bound record that names its node", "another record", node.id)
        pending = node.state if node.state in PENDING else None
        book.same(Rule.COLUMNS, "pending backup in state", pending, None if op is None else op.state, node.id)
        if node.state is N and node.number is not None:
            book.note(Rule.COLUMNS, "no number", node.number, node.id)
    for op in book.census.operations:
        submitted = any(op.submitted)
        rules = [
            (op.state in PENDING, "a pending state"),
            (op.bound == op.in_tree, "to be bound exactly if the node in the tree has this record"),
            (op.number is not None or not op.agreed, "a number if it is agreed"),
            (op.state is not R or (op.number is None and not submitted), "neither number nor submitted layer while RESERVED"),
            (op.state is not L or submitted, "a submitted layer when LAYERS_IN_FLIGHT"),
            (op.state is not B or (op.number is not None and not op.agreed), "a number to drain to when ROLLED_BACK"),
            (all(s & ~f == 0 for s, f in zip(op.submitted, full, strict=True)), f"submitted layers within {full}"),
            (all(c & ~s == 0 for c, s in zip(op.confirmed, op.submitted, strict=True)), "confirmed layers within submitted ones"),
            (op.state is not L or op.number is None or list(op.submitted) == full, f"all layers {full} once numbered in flight"),
            (not (op.bound and op.agreed and _parent_is_committed(book, op)), "to be committed: agreed, bound, parent committed"),
        ]
        for holds, expected in rules:
            if not holds:
                found = (
                    f"{op.state} generation {op.generation} bound={op.bound} in_tree={op.in_tree} number={op.number} "
                    f"agreed={op.agreed} submitted={op.submitted} confirmed={op.confirmed}"
                )
                book.note(Rule.COLUMNS, expected, found, op.node)


def _parent_is_committed(book: _Book, op: OperationView) -> bool:
    node = book.nodes.get(op.node)
    return node is not None and node.parent is not None and (node.parent == ROOT or book.nodes[node.parent].state is C)


def _check_sequence(book: _Book) -> None:
    census = book.census
    window = list(range(census.resolved, census.next_number))
    book.same(Rule.SEQUENCE, "numbers given out and not passed", window, [entry.number for entry in census.numbered])
    open_ones: dict[int, tuple[int | None, int, int | None]] = {
        op.number: (op.node, op.generation, None) for op in census.operations if op.number is not None and not op.agreed
    }
    open_ones |= {load.number: (None, 0, load.load) for load in census.loads if not load.drained}
    entries = {entry.number: (entry.node, entry.generation, entry.load) for entry in census.numbered}
    for number in sorted(open_ones.keys() | entries.keys()):
        have, found = open_ones.get(number), entries.get(number)
        node = next((each[0] for each in (have, found) if each is not None), None)
        book.same(Rule.SEQUENCE, f"number {number} (node, generation, load)", have, found, node)
    for op in census.operations:
        if op.agreed and op.number is not None and op.number >= census.resolved:
            book.note(Rule.SEQUENCE, f"an agreed number below {census.resolved}", op.number, op.node)
    if census.outstanding and not census.numbered:
        book.note(Rule.SEQUENCE, "a reduction only for open numbers", "one is outstanding, no number is open")


def _check_loads(book: _Book) -> None:
    loading = dict[int, int]()
    for load in book.census.loads:
        for node in book.range_up(load.last, load.pages, Rule.LOADS, f"load-back {load.load}"):
            loading[node.id] = load.load
            if node.state is not C or node.pages is None:
                book.note(
                    Rule.LOADS, "a loading node to be COMMITTED and on the device", f"{node.state}, pages {node.pages}", node.id
                )
    for node in book.below_root:
        book.same(Rule.LOADS, "load-back", loading.get(node.id), node.loading, node.id)
    readers: dict[int, set[str]] = {load.load: set() for load in book.census.loads}
    for request in book.everybody:
        reads = {node.loading for node in book.up(request.lock) if node.loading is not None}
        book.same(Rule.LOADS, f"load-backs that {request.rid} reads", reads, set(request.loads), request.lock)
        for load_id in reads & readers.keys():
            readers[load_id].add(request.rid)
    for load in book.census.loads:
        book.same(Rule.LOADS, f"readers of load-back {load.load}", readers[load.load], set(load.readers), load.last)


def _check_waiters(book: _Book) -> None:
    """Nobody sleeps for a backup that is over."""
    for waiter in book.census.waiters:
        if not waiter.woken and waiter.node not in book.operations:
            book.note(Rule.WAITERS, f"{waiter.rid} to be woken, or its backup pending", "neither", waiter.node)


def _check_tokens(book: _Book) -> None:
    """Tokens committed + wasted + still in flight = tokens submitted (R13)."""
    census = book.census
    open_pages = sum(len(op.pages) + op.wasted_pages for op in census.operations if any(op.submitted))
    ended = census.tokens_committed + census.tokens_wasted
    book.same(
        Rule.TOKENS,
        "tokens submitted = committed + wasted + open =",
        ended + open_pages * census.page_size,
        census.tokens_submitted,
    )


_RULES: tuple[Callable[[_Book], None], ...] = (
    _check_device,
    _check_rows,
    _check_sizes,
    _check_host,
    _check_local,
    _check_locks,
    _check_holds,
    _check_contiguity,
    _check_columns,
    _check_sequence,
    _check_loads,
    _check_waiters,
    _check_tokens,
)
