"""The outside checker, on a census made by hand that holds everything an engine can hold, and on planted violations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from cphicache.check.conservation import (
    Census,
    Finding,
    InvariantBroken,
    LoadView,
    NodeView,
    NumberedView,
    OperationView,
    ParkedView,
    PinView,
    RequestView,
    Rule,
    WaiterView,
    check,
    check_quiet,
    require,
    require_quiet,
)
from cphicache.lifecycle import State

N, R, L, C, B = (
    State.DEVICE_VALID_HOST_NONE,
    State.RESERVED,
    State.LAYERS_IN_FLIGHT,
    State.COMMITTED,
    State.ROLLED_BACK,
)
TICK = 17
PAGE_BYTES = 4


def segment(number: int, pages: int) -> bytes:
    return b"".join(bytes([number, at, 0, 0]) for at in range(pages))


def node(of: int, parent: int, pages: tuple[int, ...] | None, state: State, **fields: Any) -> NodeView:
    length = fields.pop("length_pages", len(pages or ()))
    given: dict[str, Any] = {
        "id": of,
        "parent": parent,
        "parent_link": parent,
        "filed_under": segment(of, 1),
        "segment": segment(of, length),
        "page_bytes": PAGE_BYTES,
        "extra_key": None,
        "length_pages": length,
        "pages": pages,
        "device_children": 0,
        "lock_ref": 0,
        "host_ref": 0,
        "loading": None,
        "state": state,
        "number": None,
        "record_fits": True,
        "host_owners": (),
    }
    return NodeView(**{**given, **fields})


def root(device_children: int) -> NodeView:
    return replace(node(0, 0, (), N), parent=None, parent_link=None, filed_under=None, segment=b"", device_children=device_children)


def operation(of: int, state: State, pages: tuple[int, ...], **fields: Any) -> OperationView:
    owners = tuple((page - 1) % 2 for page in pages)
    given: dict[str, Any] = {
        "node": of,
        "generation": of,
        "state": state,
        "bound": False,
        "in_tree": False,
        "number": None,
        "agreed": False,
        "submitted": (0, 0),
        "confirmed": (0, 0),
        "request": "",
        "pages": pages,
        "owners": owners,
        "need": (owners.count(0) * 2, owners.count(1) * 2),
        "wasted_need": (0, 0),
        "wasted_pages": 0,
        "host_hold": None,
        "parent": None,
        "parent_state": None,
        "void": False,
    }
    return OperationView(**{**given, **fields})


def busy() -> Census:
    """Pages 1..12 of two tokens over two ranks (odd pages on rank 0), payloads of 2 and 1 layers, 16 host slots a rank.

    1 committed; 2 below it in flight, locked by r1, whose next extent 7 is reserved; 3 not backed up; 4 host-only; 5 and 6 are being
    loaded, read by r3; 8 was aborted and drains, one page of it wasted before; the parked insert p1 holds 1.
    """
    nodes = (
        root(3),
        node(1, 0, (1, 2), C, lock_ref=3, device_children=1, host_owners=(0, 1), number=1),
        node(2, 1, (3,), L, lock_ref=2, host_ref=1, number=4),
        node(3, 0, (4, 5), N),
        node(4, 0, None, C, length_pages=1, host_owners=(1,), extra_key="lora", filed_under=("lora", segment(4, 1))),
        node(5, 0, (6,), C, lock_ref=2, host_ref=1, loading=1, device_children=1, host_owners=(1,)),
        node(6, 5, (7,), C, lock_ref=2, host_ref=1, loading=1, host_owners=(0,)),
    )
    operations = (
        operation(2, L, (3,), bound=True, in_tree=True, number=4, submitted=(3, 1), confirmed=(3, 1)),
        operation(7, R, (8, 9), request="r1", host_hold=(2, 1), parent=2, parent_state=L),
        operation(8, B, (10,), number=5, submitted=(1, 0), wasted_need=(2, 0), wasted_pages=1),
    )
    return Census(
        tick=TICK,
        page_size=2,
        cp_size=2,
        base=1,
        usable=range(1, 13),
        payload_layers=(("target", 2), ("draft", 1)),
        host_total={"target": 16, "draft": 16},
        nodes=nodes,
        operations=operations,
        loads=(LoadView(1, 6, 2, 6, False, frozenset({"r3"})),),
        requests=(
            RequestView("r1", (1, 2, 3, 8, 9), 3, 2, frozenset()),
            RequestView("r3", (6, 7, 11), 2, 6, frozenset({1})),
        ),
        parked=(ParkedView("p1", (1, 2, 12), 2, 1, frozenset()),),
        pins=(),
        waiters=(WaiterView("w1", 2, False), WaiterView("w2", 3, True)),
        free_pages=(10,),
        ledger_free={(rank, payload): 6 for rank in range(2) for payload in ("target", "draft")},
        rank=0,
        local_free={"target": 6, "draft": 6},
        numbered=(NumberedView(4, 2, 2, None), NumberedView(5, 8, 8, None), NumberedView(6, None, 0, 1)),
        next_number=7,
        resolved=4,
        outstanding=True,
        open_batches=1,
        evictable_tokens=4,
        protected_tokens=10,
        host_only_need=(0, 2),
        tokens_submitted=20,
        tokens_committed=10,
        tokens_wasted=4,
    )


def quiet() -> Census:
    """One committed node of page 1, all else free."""
    return replace(
        busy(),
        nodes=(root(1), node(1, 0, (1,), C, host_owners=(0,), number=3)),
        operations=(),
        loads=(),
        requests=(),
        parked=(),
        pins=(),
        waiters=(),
        free_pages=tuple(range(2, 13)),
        ledger_free={(0, "target"): 14, (0, "draft"): 14, (1, "target"): 16, (1, "draft"): 16},
        local_free={"target": 14, "draft": 14},
        numbered=(),
        resolved=7,
        outstanding=False,
        open_batches=0,
        evictable_tokens=2,
        protected_tokens=0,
        host_only_need=(0, 0),
        tokens_submitted=14,
    )


Change = Callable[[Census], Census]


def on_node(of: int, **fields: Any) -> Change:
    return lambda c: replace(c, nodes=tuple(replace(n, **fields) if n.id == of else n for n in c.nodes))


def on_op(of: int, **fields: Any) -> Change:
    return lambda c: replace(c, operations=tuple(replace(o, **fields) if o.node == of else o for o in c.operations))


def on_request(rid: str, **fields: Any) -> Change:
    return lambda c: replace(c, requests=tuple(replace(r, **fields) if r.rid == rid else r for r in c.requests))


def on_load(**fields: Any) -> Change:
    return lambda c: replace(c, loads=tuple(replace(load, **fields) for load in c.loads))


def census(**fields: Any) -> Change:
    return lambda c: replace(c, **fields)


def both(*changes: Change) -> Change:
    def change(c: Census) -> Census:
        for each in changes:
            c = each(c)
        return c

    return change


def without_op(number: int) -> Change:
    return lambda c: replace(c, operations=tuple(o for o in c.operations if o.node != number))


def on_ledger(rank: int, payload: str, free: int) -> Change:
    return lambda c: replace(c, ledger_free={**c.ledger_free, (rank, payload): free})


PLANTED: dict[str, tuple[Rule, int | None, Change]] = {
    "id given twice": (Rule.STRUCTURE, 3, on_node(6, id=3)),
    "no root": (Rule.STRUCTURE, None, lambda c: replace(c, nodes=())),
    "root evicted": (Rule.STRUCTURE, 0, on_node(0, pages=None)),
    "root locked": (Rule.STRUCTURE, 0, on_node(0, lock_ref=1)),
    "parent not in the tree": (Rule.STRUCTURE, 2, on_node(2, parent=99)),
    "child names another parent": (Rule.STRUCTURE, 2, on_node(2, parent_link=3)),
    "filed under another key": (Rule.STRUCTURE, 2, on_node(2, filed_under=segment(3, 1))),
    "namespace missing under the root": (Rule.STRUCTURE, 4, on_node(4, filed_under=segment(4, 1))),
    "key shorter than the node": (Rule.STRUCTURE, 1, on_node(1, segment=segment(1, 1))),
    "pages shorter than the node": (Rule.STRUCTURE, 1, on_node(1, pages=(1,))),
    "device children miscounted": (Rule.STRUCTURE, 1, on_node(1, device_children=0)),
    "page leaked": (Rule.DEVICE, None, census(free_pages=())),
    "page free and cached": (Rule.DEVICE, 3, census(free_pages=(10, 4))),
    "page of two requests": (Rule.DEVICE, None, on_request("r3", row=(6, 7, 8))),
    "page free twice": (Rule.DEVICE, None, census(free_pages=(10, 10))),
    "page parked and free": (Rule.DEVICE, None, census(free_pages=(10, 12))),
    "reserved page cached": (Rule.DEVICE, 3, on_node(3, pages=(4, 0))),
    "row is not the tree's": (Rule.ROWS, 2, on_request("r1", row=(1, 4, 3, 8, 9))),
    "row shorter than its prefix": (Rule.ROWS, 2, on_request("r1", row=(1, 2))),
    "evictable tokens": (Rule.SIZES, None, census(evictable_tokens=6)),
    "protected tokens": (Rule.SIZES, None, census(protected_tokens=8)),
    "host-only slots": (Rule.SIZES, None, census(host_only_need=(2, 2))),
    "ledger has too much": (Rule.HOST, None, on_ledger(1, "draft", 8)),
    "ledger has too little": (Rule.HOST, None, on_ledger(0, "target", 4)),
    "need of other owners": (Rule.HOST, 2, on_op(2, need=(0, 2))),
    "owners of other pages": (Rule.HOST, 2, on_op(2, owners=(1,))),
    "wasted slots miscounted": (Rule.HOST, 8, on_op(8, wasted_pages=2)),
    "host copy shorter than the node": (Rule.HOST, 1, on_node(1, host_owners=(0,))),
    "local pool leaks": (Rule.LOCAL, None, census(local_free={"target": 6, "draft": 4})),
    "lock leaked": (Rule.LOCKS, 3, on_node(3, lock_ref=1)),
    "lock lost": (Rule.LOCKS, 1, on_node(1, lock_ref=2)),
    "lock on no node": (Rule.LOCKS, 99, on_load(last=99)),
    "locked and evicted": (Rule.LOCKS, 6, both(on_node(6, pages=None), on_node(5, device_children=0))),
    "hold leaked": (Rule.HOLDS, 4, on_node(4, host_ref=1)),
    "hold lost": (Rule.HOLDS, 2, on_node(2, host_ref=0)),
    "extent pins nothing": (Rule.HOLDS, 7, both(on_op(7, host_hold=None), on_node(2, host_ref=0))),
    "pin that should have gone": (Rule.HOLDS, 3, both(census(pins=(PinView(3, 1, TICK),)), on_node(3, host_ref=1))),
    "hold ends inside a node": (Rule.HOLDS, 2, on_op(7, host_hold=(2, 2))),
    "evicted without host copy": (Rule.CONTIGUITY, 4, on_node(4, state=N, host_owners=())),
    "committed under one that is not": (Rule.CONTIGUITY, 6, on_node(5, state=N, host_owners=())),
    "device node under a host-only one": (Rule.CONTIGUITY, 6, both(on_node(5, pages=None), on_node(0, device_children=2))),
    "pending under one that is lost": (Rule.CONTIGUITY, 2, on_node(1, state=N, host_owners=())),
    "extent behind one that is lost": (Rule.CONTIGUITY, 7, on_op(7, parent_state=B)),
    "record of another node": (Rule.COLUMNS, 3, on_node(3, record_fits=False)),
    "pending node without backup": (Rule.COLUMNS, 2, without_op(2)),
    "extent drains under the id of a node": (Rule.COLUMNS, 3, on_op(8, node=3)),
    "number without backup": (Rule.COLUMNS, 3, on_node(3, number=2)),
    "bound to no node": (Rule.COLUMNS, 2, on_op(2, in_tree=False)),
    "in the tree and not bound": (Rule.COLUMNS, 7, on_op(7, in_tree=True)),
    "agreed without number": (Rule.COLUMNS, 7, on_op(7, agreed=True)),
    "reserved with a layer": (Rule.COLUMNS, 7, on_op(7, submitted=(1, 0))),
    "reserved with a number": (Rule.COLUMNS, 7, on_op(7, number=6)),
    "in flight without a layer": (Rule.COLUMNS, 2, on_op(2, submitted=(0, 0), confirmed=(0, 0))),
    "numbered with layers missing": (Rule.COLUMNS, 2, on_op(2, submitted=(1, 1), confirmed=(1, 1))),
    "rolled back without a number": (Rule.COLUMNS, 8, on_op(8, number=None)),
    "more layers than there are": (Rule.COLUMNS, 8, on_op(8, submitted=(4, 0))),
    "confirmed beyond submitted": (Rule.COLUMNS, 8, on_op(8, confirmed=(2, 0))),
    "operation in a final state": (Rule.COLUMNS, 8, on_op(8, state=C)),
    "agreed and never committed": (Rule.COLUMNS, 2, on_op(2, agreed=True)),
    "number lost": (Rule.SEQUENCE, None, census(next_number=8)),
    "number of another generation": (Rule.SEQUENCE, 8, on_op(8, generation=9)),
    "number out of order": (Rule.SEQUENCE, None, lambda c: replace(c, numbered=c.numbered[::-1])),
    "passed number still open": (Rule.SEQUENCE, None, census(resolved=5)),
    "agreed before its number was passed": (Rule.SEQUENCE, 2, on_op(2, agreed=True)),
    "reduction for nothing": (Rule.SEQUENCE, None, both(lambda _: quiet(), census(outstanding=True))),
    "loading without load-back": (Rule.LOADS, 3, on_node(3, loading=1)),
    "load-back of a node that is not loading": (Rule.LOADS, 5, on_node(5, loading=None)),
    "load-back of an uncommitted node": (Rule.LOADS, 6, on_node(6, state=N, host_owners=())),
    "reader forgotten by its request": (Rule.LOADS, 6, on_request("r3", loads=frozenset())),
    "reader forgotten by the load-back": (Rule.LOADS, 6, on_load(readers=frozenset())),
    "nobody will wake it": (Rule.WAITERS, 3, census(waiters=(WaiterView("w1", 3, False),))),
    "tokens lost": (Rule.TOKENS, None, census(tokens_committed=8)),
}


def test_a_sound_census_has_no_findings() -> None:
    """R30: nothing is found where locks, holds, slots, pages, columns and numbers agree, in a busy engine and in a quiet one."""
    assert check(busy()) == []
    assert check_quiet(quiet()) == []
    require(busy())
    require_quiet(quiet())


@pytest.mark.parametrize("name", PLANTED)
def test_each_planted_violation_is_found(name: str) -> None:
    """R30: a violation of each rule is found under the rule's own name, for the node that it is about, with the tick."""
    rule, about, change = PLANTED[name]
    found = [finding for finding in check(change(busy())) if finding.rule is rule]
    assert about in {finding.node for finding in found}
    assert {finding.tick for finding in found} == {TICK}


def test_every_rule_has_a_planted_violation() -> None:
    """R30: no rule is without its test."""
    assert {rule for rule, _, _ in PLANTED.values()} | {Rule.QUIET} == set(Rule)


def test_the_error_says_expected_found_node_and_tick() -> None:
    """R30: the error's text names rule, tick, node, what was expected and what was found, and counts what it leaves out."""
    with pytest.raises(InvariantBroken) as caught:
        require(on_node(3, lock_ref=1)(busy()))
    text = "locks at tick 17, node 3: expected lock_ref 0 ([] here, the others below), found 1"
    assert text in str(caught.value)
    assert caught.value.findings[0].rule is Rule.SIZES
    many = [Finding(Rule.QUIET, "nothing", "something", None, 1)] * 7
    assert str(InvariantBroken(many)).endswith("; and 2 more")


def test_a_broken_structure_is_reported_alone() -> None:
    """R30: while nodes cannot be told apart, no account over them is drawn up."""
    broken = both(on_node(6, id=3), census(free_pages=()))(busy())
    assert {finding.rule for finding in check(broken)} == {Rule.STRUCTURE}


def test_void_operations_hold_no_local_slots() -> None:
    """R22, R30: slots that a local reserve fault left untaken are free in this rank's pool and in use in the ledger."""
    void = on_op(8, void=True)
    assert [finding.rule for finding in check(void(busy()))] == [Rule.LOCAL]
    assert check(both(void, census(local_free={"target": 8, "draft": 8}))(busy())) == []
    assert check(both(void, census(local_free=None))(busy())) == []


def test_base_zero_owners() -> None:
    """R2, R30: the checker's owners follow the base: with base 0 page 10 belongs to rank 0."""
    shifted = census(base=0)(busy())
    assert (Rule.HOST, 8) in {(finding.rule, finding.node) for finding in check(shifted)}


QUIET: dict[str, Change] = {
    "pending backup": census(operations=busy().operations),
    "load-back": census(loads=busy().loads),
    "running request": census(requests=busy().requests),
    "parked insert": census(parked=busy().parked),
    "waiter": census(waiters=busy().waiters),
    "number outstanding": census(numbered=busy().numbered),
    "reduction outstanding": census(outstanding=True),
    "open batch": census(open_batches=1),
    "lock_ref": on_node(1, lock_ref=1),
    "host_ref": on_node(1, host_ref=1),
    "slot of rank 1": on_ledger(1, "draft", 14),
}


@pytest.mark.parametrize("what", QUIET)
def test_quiet_means_nothing_is_left(what: str) -> None:
    """R30: at rest there is no backup, load-back, request, waiter or number, no lock or hold, and no host slot in use but committed
    ones; each leftover is named."""
    with pytest.raises(InvariantBroken) as caught:
        require_quiet(QUIET[what](quiet()))
    assert any(finding.rule is Rule.QUIET and what in finding.expected for finding in caught.value.findings)
