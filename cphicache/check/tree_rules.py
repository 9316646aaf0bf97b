"""Rules of the outside checker on the tree and the device: structure, pages, sizes, locks, holds, contiguity."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from cphicache.check.findings import ROOT, Book, Rule
from cphicache.lifecycle import State

N, R, L, C, B = (
    State.DEVICE_VALID_HOST_NONE,
    State.RESERVED,
    State.LAYERS_IN_FLIGHT,
    State.COMMITTED,
    State.ROLLED_BACK,
)


def check_structure(book: Book) -> None:
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


def check_device(book: Book) -> None:
    """Each usable page is free, cached, a request's or a parked insert's, and only that; a reserved page is nowhere."""
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


def check_rows(book: Book) -> None:
    """The protected front of a row is the prefix that the request's lock keeps."""
    for request in book.everybody:
        path = [page for node in reversed(list(book.up(request.lock))) for page in node.pages or ()]
        protected = list(request.row[: request.protected_pages])
        if len(protected) != request.protected_pages or path[: len(protected)] != protected:
            expected = f"the first {request.protected_pages} pages of {request.rid}'s row to be those of its locked path"
            book.note(Rule.ROWS, expected, f"row {protected}, path {path}", request.lock)


def check_sizes(book: Book) -> None:
    """Evictable, protected and host-only sizes by own count."""
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


def check_locks(book: Book) -> None:
    """``lock_ref`` is the number of holders at the node or below it, and what is locked is on the device."""
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


def check_holds(book: Book) -> None:
    """``host_ref`` is the number of extents, load-backs and pins that keep the node on the host; no pin outlives its tick."""
    counts = Counter[int]()
    for op in book.census.operations:
        if op.host_hold is not None:
            counts.update(node.id for node in book.range_up(*op.host_hold, Rule.HOLDS, f"extent {op.node}"))
        # A bound backup keeps its ancestors by its lock; an extent without a node pins what it hangs on.
        expected = None if op.bound else op.parent
        book.same(Rule.HOLDS, "pinned parent", expected, None if op.host_hold is None else op.host_hold[0], op.node)
    for load in book.census.loads:
        counts.update(node.id for node in book.range_up(load.last, load.pages, Rule.HOLDS, f"load-back {load.load}"))
    for pin in book.census.pins:
        counts.update(node.id for node in book.range_up(pin.node, pin.pages, Rule.HOLDS, "pin"))
        if pin.expires_tick <= book.census.tick:
            book.note(Rule.HOLDS, f"a pin that ends after tick {book.census.tick}", pin.expires_tick, pin.node)
    for node in book.below_root:
        book.same(Rule.HOLDS, "host_ref", counts[node.id], node.host_ref, node.id)


def check_contiguity(book: Book) -> None:
    """What is evicted is COMMITTED; what is backed up hangs on what is; what is on the device hangs on what is there."""
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
