"""The backup lifecycle of a radix node, as data. The only place where an edge is defined.

The running machine, the diagrams, the docs, replay and the tests read ``ROWS``. Every (state, trigger) cell is decided:

* an **edge** (``dest``): the machine takes it; ``before`` runs before the state changes (work that can fail), ``after`` when it has;
* a **stale** no-op (``stale``): something that came too late; logged under its own name, answered before the machine;
* an **error** (``error``): our bug; nothing changes.

``when`` holds guards, ``!`` negates. In each cell the rows exclude each other and leave no combination undecided (tested), so the
order of rows carries no meaning. The guards ``bound``, ``numbered`` and ``agreed`` are columns of the record:

* ``bound``: the backup belongs to a node in the tree (else it is a reservation for KV that is being computed);
* ``numbered``: it has its place in the sequence that all ranks agree on;
* ``agreed``: that number has been passed by every rank, so all copies of all layers and payloads are done everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from hashlib import sha256


class State(StrEnum):
    """Where a node's host backup is."""

    DEVICE_VALID_HOST_NONE = "DEVICE_VALID_HOST_NONE"
    RESERVED = "RESERVED"
    LAYERS_IN_FLIGHT = "LAYERS_IN_FLIGHT"
    COMMITTED = "COMMITTED"
    ROLLED_BACK = "ROLLED_BACK"


class Trigger(StrEnum):
    """What can happen to a backup. The comment says who says so."""

    RESERVE = "reserve"  # engine: back this node (or extent) up
    RESERVE_RETRY = "reserve_retry"  # engine: once more, after host eviction made room
    HIT = "hit"  # a request's insert passed through the node
    LAYER_STORED = "layer_stored"  # forward: these layers' KV stores have been issued
    FORWARD_ENDED = "forward_ended"  # forward: no further layer will be reported
    COPY_DONE = "copy_done"  # this rank's copies have ended (local: decides nothing)
    COPY_FAILED = "copy_failed"  # a copy failed on this rank (local: decides nothing)
    AGREED = "agreed"  # reduction: every rank has passed its number
    AGREED_FAILED = "agreed_failed"  # reduction: it is the first failed operation
    PARENT_COMMITTED = "parent_committed"  # the parent's backup committed
    PARENT_LOST = "parent_lost"  # the parent's backup rolled back or was refused
    BIND = "bind"  # insert: the extent is now this node
    BIND_DUPLICATE_PART = "bind_duplicate_part"  # insert: the extent's head is in the tree already
    BIND_DUPLICATE_WHOLE = "bind_duplicate_whole"  # insert: all of the extent is in the tree already
    ABORT = "abort"  # the request was aborted, retracted, or its insert was given up
    RESET = "reset"  # flush or shutdown
    DRAINED = "drained"  # a rolled-back backup has no copy left on any rank
    QUARANTINED = "quarantined"  # the group is gone, and this rank's own copies have ended
    SPLIT_WANTED = "split_wanted"  # a request or insert would divide the node
    SPLIT = "split"  # the node is divided
    DEVICE_EVICT = "device_evict"  # the node's device pages are taken
    HOST_EVICT = "host_evict"  # a host-only node's slots are taken
    RECLAIM = "reclaim"  # the host copy of a node that is also on the device is taken
    LOAD_QUEUED = "load_queued"  # load-back: pages published, copies to come
    LOAD_AGREED = "load_agreed"  # load-back: done on every rank
    LOAD_FAILED = "load_failed"  # load-back: failed on some rank, still draining
    LOAD_DRAINED = "load_drained"  # failed load-back: no copy left on any rank


@dataclass(frozen=True, slots=True)
class Row:
    """One decided possibility. Exactly one of ``dest``, ``stale`` and ``error`` is set."""

    source: State
    trigger: Trigger
    dest: State | None = None
    stale: str | None = None
    error: str | None = None
    when: tuple[str, ...] = ()
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()

    @property
    def is_edge(self) -> bool:
        """Whether the machine takes this row."""
        return self.dest is not None


_N, _R, _L, _C, _B = (
    State.DEVICE_VALID_HOST_NONE,
    State.RESERVED,
    State.LAYERS_IN_FLIGHT,
    State.COMMITTED,
    State.ROLLED_BACK,
)
_T = Trigger


def _edge(
    source: State,
    trigger: Trigger,
    dest: State,
    *,
    when: Sequence[str] = (),
    before: Sequence[str] = (),
    after: Sequence[str] = (),
) -> Row:
    return Row(source, trigger, dest=dest, when=tuple(when), before=tuple(before), after=tuple(after))


def _stale(trigger: Trigger, **names: str) -> list[Row]:
    return [Row(_BY_LETTER[letter], trigger, stale=name) for letter, name in names.items()]


def _error(trigger: Trigger, **whys: str) -> list[Row]:
    return [Row(_BY_LETTER[letter], trigger, error=why) for letter, why in whys.items()]


_BY_LETTER = {"N": _N, "R": _R, "L": _L, "C": _C, "B": _B}


def _rolls_back(trigger: Trigger, *also: str) -> list[Row]:
    """Give a pending backup up. It ends at once when no copy can be in flight anywhere (nothing submitted, or all agreed); else it
    needs a number (its own, or the next), because its slots return on every rank at the tick at which all have drained."""
    return [
        _edge(_R, trigger, _B, when=also, after=["lose_children", "drain_now"]),
        _edge(_L, trigger, _B, when=[*also, "!numbered"], before=["take_number"], after=["lose_children"]),
        _edge(_L, trigger, _B, when=[*also, "numbered", "!agreed"], after=["lose_children"]),
        _edge(_L, trigger, _B, when=[*also, "agreed"], after=["lose_children", "drain_now"]),
    ]


def _bound_already(trigger: Trigger) -> list[Row]:
    """A second bind would hold the node's device pages twice."""
    return [Row(state, trigger, error="bound once already", when=("bound",)) for state in (_R, _L)]


_COMMIT_AFTER = ("commit_children", "wake")

ROWS: tuple[Row, ...] = (
    # -- reserve: fit -> room -> else evict and try once more -> else refused -------------------------------------------------
    _edge(_N, _T.RESERVE, _N, when=["!fit"], before=["refuse"]),
    _edge(_N, _T.RESERVE, _R, when=["fit", "room"], before=["reserve_slots"]),
    _edge(_N, _T.RESERVE, _N, when=["fit", "!room", "victims_suffice"], before=["evict_host"], after=["reserve_again"]),
    _edge(_N, _T.RESERVE, _N, when=["fit", "!room", "!victims_suffice"], before=["refuse"]),
    *_stale(_T.RESERVE, C="already_backed", B="still_draining"),
    *_error(_T.RESERVE, R="reserved once already", L="reserved once already"),
    _edge(_N, _T.RESERVE_RETRY, _R, when=["room"], before=["reserve_slots"]),
    _edge(_N, _T.RESERVE_RETRY, _N, when=["!room"], before=["refuse"]),
    *_error(
        _T.RESERVE_RETRY,
        R="the retry follows a refused first try",
        L="the retry follows a refused first try",
        C="the retry follows a refused first try",
        B="the retry follows a refused first try",
    ),
    # -- hits are counted in every state and start nothing here ---------------------------------------------------------------
    *(_edge(state, _T.HIT, state, before=["count_hit"]) for state in State),
    # -- layers ---------------------------------------------------------------------------------------------------------------
    _edge(_R, _T.LAYER_STORED, _L, before=["copy_layers"]),
    _edge(_L, _T.LAYER_STORED, _L, when=["new_layers"], before=["copy_layers"]),
    Row(_L, _T.LAYER_STORED, stale="layer_twice", when=("!new_layers",)),
    *_stale(_T.LAYER_STORED, N="not_pending", C="already_committed", B="rolled_back"),
    _edge(_L, _T.FORWARD_ENDED, _L, when=["complete", "!numbered"], before=["take_number"]),
    _edge(_L, _T.FORWARD_ENDED, _B, when=["!complete", "!numbered"], before=["take_number"], after=["lose_children"]),
    Row(_L, _T.FORWARD_ENDED, error="the forward that stores a backup's layers ends once", when=("numbered",)),
    _edge(_R, _T.FORWARD_ENDED, _B, after=["lose_children", "drain_now"]),
    *_stale(_T.FORWARD_ENDED, N="not_pending", B="rolled_back"),
    *_error(_T.FORWARD_ENDED, C="committed before its forward ended"),
    # -- this rank's copies: remembered for the next sample, no decision --------------------------------------------------------
    _edge(_L, _T.COPY_DONE, _L, before=["confirm"]),
    _edge(_B, _T.COPY_DONE, _B, before=["confirm"]),
    *_stale(_T.COPY_DONE, N="stale_generation"),
    *_error(_T.COPY_DONE, R="no copy was submitted", C="committed before its copies were done"),
    _edge(_L, _T.COPY_FAILED, _L, before=["remember_failure"]),
    _edge(_B, _T.COPY_FAILED, _B, before=["remember_failure"]),
    *_stale(_T.COPY_FAILED, N="stale_generation"),
    *_error(_T.COPY_FAILED, R="no copy was submitted", C="committed before its copies were done"),
    # -- agreement ------------------------------------------------------------------------------------------------------------
    _edge(
        _L,
        _T.AGREED,
        _C,
        when=["numbered", "!agreed", "bound", "parent_committed"],
        before=["commit", "mark_agreed"],  # in this order, so that nothing has changed when the commit fails
        after=_COMMIT_AFTER,
    ),
    _edge(_L, _T.AGREED, _L, when=["numbered", "!agreed", "bound", "!parent_committed"], before=["mark_agreed"]),
    _edge(_L, _T.AGREED, _L, when=["numbered", "!agreed", "!bound"], before=["mark_agreed"]),
    _edge(_B, _T.AGREED, _N, when=["numbered", "!agreed"], before=["release"], after=["wake"]),
    *(Row(state, _T.AGREED, error="it has no number", when=("!numbered",)) for state in (_L, _B)),
    *(Row(state, _T.AGREED, error="its number was passed already", when=("agreed",)) for state in (_L, _B)),
    *_error(_T.AGREED, N="it has no number", R="it has no number", C="its number was passed already"),
    _edge(_L, _T.AGREED_FAILED, _B, when=["numbered", "!agreed"], after=["lose_children"]),
    Row(_L, _T.AGREED_FAILED, error="it has no number", when=("!numbered",)),
    Row(_L, _T.AGREED_FAILED, error="its number was passed already", when=("agreed",)),
    *_stale(_T.AGREED_FAILED, B="already_rolled_back"),
    *_error(_T.AGREED_FAILED, N="it has no number", R="it has no number", C="its number was passed already"),
    # -- parents first ----------------------------------------------------------------------------------------------------------
    _edge(_L, _T.PARENT_COMMITTED, _C, when=["bound", "agreed"], before=["commit"], after=_COMMIT_AFTER),
    Row(_L, _T.PARENT_COMMITTED, stale="not_agreed_yet", when=("!agreed",)),
    Row(_L, _T.PARENT_COMMITTED, stale="not_bound_yet", when=("!bound", "agreed")),
    *_stale(_T.PARENT_COMMITTED, N="not_pending", R="not_agreed_yet", B="rolled_back"),
    *_error(_T.PARENT_COMMITTED, C="committed before its parent"),
    *_rolls_back(_T.PARENT_LOST),
    *_stale(_T.PARENT_LOST, N="nothing_held", B="already_rolled_back"),
    *_error(_T.PARENT_LOST, C="committed under a parent that is not"),
    # -- the insert binds an extent to its node -----------------------------------------------------------------------------------
    _edge(_R, _T.BIND, _R, when=["!bound"], before=["attach"]),
    _edge(_L, _T.BIND, _C, when=["!bound", "agreed", "parent_committed"], before=["attach", "commit"], after=_COMMIT_AFTER),
    _edge(_L, _T.BIND, _L, when=["!bound", "agreed", "!parent_committed"], before=["attach"]),
    _edge(_L, _T.BIND, _L, when=["!bound", "!agreed"], before=["attach"]),
    *_bound_already(_T.BIND),
    *_stale(_T.BIND, B="rolled_back"),
    *_error(_T.BIND, N="nothing is reserved", C="bound once already"),
    _edge(_R, _T.BIND_DUPLICATE_PART, _R, when=["!bound"], before=["shrink_now"]),
    _edge(_L, _T.BIND_DUPLICATE_PART, _L, when=["!bound", "agreed"], before=["shrink_now"]),
    _edge(_L, _T.BIND_DUPLICATE_PART, _L, when=["!bound", "!agreed"], before=["shrink_at_end"]),
    *_bound_already(_T.BIND_DUPLICATE_PART),
    *_stale(_T.BIND_DUPLICATE_PART, B="rolled_back"),
    *_error(_T.BIND_DUPLICATE_PART, N="nothing is reserved", C="bound once already"),
    *_rolls_back(_T.BIND_DUPLICATE_WHOLE, "!bound"),
    *_bound_already(_T.BIND_DUPLICATE_WHOLE),
    *_stale(_T.BIND_DUPLICATE_WHOLE, B="already_rolled_back"),
    *_error(_T.BIND_DUPLICATE_WHOLE, N="nothing is reserved", C="bound once already"),
    # -- giving up --------------------------------------------------------------------------------------------------------------
    *_rolls_back(_T.ABORT),
    *_stale(_T.ABORT, N="nothing_held", C="already_committed", B="already_rolled_back"),
    *_rolls_back(_T.RESET),
    _edge(_C, _T.RESET, _N, before=["release_host"]),
    *_stale(_T.RESET, N="nothing_held", B="already_rolled_back"),
    _edge(_B, _T.DRAINED, _N, when=["!numbered"], before=["release"], after=["wake"]),
    _edge(_B, _T.DRAINED, _N, when=["agreed"], before=["release"], after=["wake"]),
    Row(_B, _T.DRAINED, error="its copies may be in flight on another rank", when=("numbered", "!agreed")),
    *_error(
        _T.DRAINED,
        N="nothing was rolled back",
        R="nothing was rolled back",
        L="nothing was rolled back",
        C="nothing was rolled back",
    ),
    # With the group gone nobody will pass the number any more: what is left is this rank's own copies, and those have ended.
    _edge(_B, _T.QUARANTINED, _N, when=["numbered", "!agreed"], before=["release"], after=["wake"]),
    *(Row(_B, _T.QUARANTINED, error="it ends in its own step", when=(guard,)) for guard in ("!numbered", "agreed")),
    *_error(
        _T.QUARANTINED,
        N="nothing was rolled back",
        R="it is rolled back first",
        L="it is rolled back first",
        C="a committed copy stays",
    ),
    # -- splits -------------------------------------------------------------------------------------------------------------------
    *(_edge(state, _T.SPLIT_WANTED, state, before=["defer_split"]) for state in (_R, _L, _B)),
    *_stale(_T.SPLIT_WANTED, N="splits_at_once", C="splits_at_once"),
    _edge(_N, _T.SPLIT, _N, before=["fork"]),
    _edge(_C, _T.SPLIT, _C, before=["fork"]),
    *_error(_T.SPLIT, R="split while pending", L="split while pending", B="split while draining"),
    # -- eviction -------------------------------------------------------------------------------------------------------------------
    _edge(_N, _T.DEVICE_EVICT, _N, before=["drop_device"]),
    _edge(_C, _T.DEVICE_EVICT, _C, before=["drop_device"]),
    *_error(
        _T.DEVICE_EVICT,
        R="evicted while its copy reads the pages",
        L="evicted while its copy reads the pages",
        B="evicted while its copy reads the pages",
    ),
    _edge(_C, _T.HOST_EVICT, _N, when=["!on_device"], before=["release_host"]),
    Row(_C, _T.HOST_EVICT, error="a node on the device is reclaimed, not evicted", when=("on_device",)),
    _edge(_C, _T.RECLAIM, _N, when=["on_device"], before=["release_host"]),
    Row(_C, _T.RECLAIM, error="a host-only node is evicted, not reclaimed", when=("!on_device",)),
    *_error(_T.HOST_EVICT, N="nothing on the host", R="not committed", L="not committed", B="not committed"),
    *_error(_T.RECLAIM, N="nothing on the host", R="not committed", L="not committed", B="not committed"),
    # -- load-back ------------------------------------------------------------------------------------------------------------------
    _edge(_C, _T.LOAD_QUEUED, _C, before=["begin_load"]),
    _edge(_C, _T.LOAD_AGREED, _C, before=["end_load"]),
    _edge(_C, _T.LOAD_FAILED, _C, before=["fail_load"]),
    _edge(_C, _T.LOAD_DRAINED, _C, before=["undo_load"]),
    *(
        Row(state, trigger, error="only a committed node is loaded")
        for trigger in (_T.LOAD_QUEUED, _T.LOAD_AGREED, _T.LOAD_FAILED, _T.LOAD_DRAINED)
        for state in (_N, _R, _L, _B)
    ),
)

IMPOSSIBLE: tuple[frozenset[str], ...] = (frozenset({"agreed", "!numbered"}),)
"""Guard combinations that no record can have: only a numbered operation is agreed."""

PENDING = frozenset({_R, _L, _B})
"""A node in one of these keeps a split waiting and its device pages locked."""

COLUMNS = ("bound", "numbered", "agreed")
"""Guards that are columns of the record (and of the printed table)."""


def cells(rows: Iterable[Row] = ROWS) -> Mapping[tuple[State, Trigger], tuple[Row, ...]]:
    """The rows by (state, trigger), in table order."""
    found: dict[tuple[State, Trigger], list[Row]] = {}
    for row in rows:
        found.setdefault((row.source, row.trigger), []).append(row)
    return {cell: tuple(members) for cell, members in found.items()}


def table_hash(rows: Iterable[Row] = ROWS) -> str:
    """Twelve hex digits that change whenever the table does. Stored in generated files and in event logs."""
    text = "\n".join(
        "|".join((r.source, r.trigger, r.dest or "", r.stale or "", r.error or "", *r.when, "/", *r.before, "/", *r.after))
        for r in rows
    )
    return sha256(text.encode()).hexdigest()[:12]
