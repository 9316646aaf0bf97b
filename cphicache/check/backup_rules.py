"""Rules of the outside checker on backups and load-backs: host slots, columns of the records, the agreed sequence, who waits."""

from __future__ import annotations

from cphicache.check.findings import ROOT, Book, Rule
from cphicache.check.views import OperationView, Slots
from cphicache.lifecycle import PENDING, State

N, R, L, C, B = (
    State.DEVICE_VALID_HOST_NONE,
    State.RESERVED,
    State.LAYERS_IN_FLIGHT,
    State.COMMITTED,
    State.ROLLED_BACK,
)

_PART = {R: "reserved", L: "in flight", B: "draining"}


def check_host(book: Book) -> None:
    """Slots of every rank and payload: free and those that backups and committed nodes need by the owners of their pages."""
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


def check_local(book: Book) -> None:
    """This rank's own pools have free what the ledger says, and what its failed local reserves did not take."""
    census = book.census
    if census.local_free is None:
        return
    void = sum(op.need[census.rank] + op.wasted_need[census.rank] for op in census.operations if op.void)
    expected = {name: census.ledger_free[census.rank, name] + void for name in census.host_total}
    book.same(Rule.LOCAL, f"free slots in the pools of rank {census.rank}", expected, dict(census.local_free))


def check_columns(book: Book) -> None:
    """States and columns of the records fit each other, and each pending node its one pending backup."""
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


def _parent_is_committed(book: Book, op: OperationView) -> bool:
    node = book.nodes.get(op.node)
    return node is not None and node.parent is not None and (node.parent == ROOT or book.nodes[node.parent].state is C)


def check_sequence(book: Book) -> None:
    """Numbers given out and not passed are those of the open backups and load-backs, without a gap."""
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


def check_loads(book: Book) -> None:
    """A node is loading exactly if it is in the range of a load-back, and whoever locks it is a reader."""
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


def check_waiters(book: Book) -> None:
    """Nobody sleeps for a backup that is over."""
    for waiter in book.census.waiters:
        if not waiter.woken and waiter.node not in book.operations:
            book.note(Rule.WAITERS, f"{waiter.rid} to be woken, or its backup pending", "neither", waiter.node)


def check_tokens(book: Book) -> None:
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
