"""Engines of several ranks in one thread, in lockstep: every call goes to each rank in turn, each with its own copy of what it needs.

After every call the outside checker looks at each rank, all ranks must hold the same logical state and have given the same answer.
A page of a prompt is a letter: ``"abc"`` are three pages, equal letters are equal tokens; ``tail`` adds tokens that do not fill a page.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from threading import Thread
from typing import Any, Generic, TypeVar

from cphicache.agree.local import InProcessGroup
from cphicache.agree.port import NO_FAILURE, Reducer
from cphicache.check.conservation import Census, require, require_quiet
from cphicache.engine import CacheConfig, CpHiRadixCache, EvictResult, Match, TickReport
from cphicache.engine.records import Backup
from cphicache.events import EventLog, Level, logical_view
from cphicache.lifecycle import State
from cphicache.run.census import take_census
from cphicache.spaces.types import LogicalPage
from cphicache.transfer.port import OpKey, TransferPort
from cphicache.tree import Node, RadixKey
from tests.engine_fakes import FakeTransfer

T = TypeVar("T", bound=TransferPort)
A = TypeVar("A")

N, R, L, C, B = (
    State.DEVICE_VALID_HOST_NONE,
    State.RESERVED,
    State.LAYERS_IN_FLIGHT,
    State.COMMITTED,
    State.ROLLED_BACK,
)

GROUP_TIMEOUT_S = 10.0
"""Nobody waits in lockstep: whoever does waits for a rank that will not come."""


def rig_config(**options: Any) -> CacheConfig:
    """Pages of 2 tokens on 2 ranks; 32 device pages and 32 host pages a rank; three target layers and two draft layers."""
    small: dict[str, Any] = {
        "page_size": 2,
        "cp_size": 2,
        "usable_pages": 32,
        "payloads": (("target", 3), ("draft", 2)),
        "host_slots": 64,
        "load_back_threshold": 2,
    }
    return CacheConfig(**(small | options))


class Tap:
    """Passes reductions on, and remembers what was issued and what came back: (count, first failed or None)."""

    def __init__(self, reducer: Reducer) -> None:
        self._reducer = reducer
        self.issued: list[tuple[int, int | None]] = []
        self.applied: list[tuple[int, int | None]] = []

    def issue(self, count: int, first_failed: int) -> None:
        self.issued.append(_sample(count, first_failed))
        self._reducer.issue(count, first_failed)

    def wait(self) -> tuple[int, int]:
        found = self._reducer.wait()
        self.applied.append(_sample(*found))
        return found


def _sample(count: int, first_failed: int) -> tuple[int, int | None]:
    return count, None if first_failed == NO_FAILURE else first_failed


@dataclass
class Side(Generic[T]):
    """One rank."""

    rank: int
    cache: CpHiRadixCache
    transfer: T
    tap: Tap
    log: EventLog
    rows: dict[str, list[LogicalPage]] = field(default_factory=dict)
    found: dict[str, Match] = field(default_factory=dict)

    def census(self) -> Census:
        return take_census(self.cache, self.rows, self.transfer.free_slots(), self.rank)

    def node(self, key: RadixKey) -> Node[Backup]:
        """The node in which a match of ``key`` ends."""
        walk = self.cache.state.tree.walk(key)
        assert walk.matched_pages == key.pages, f"{key.pages} pages wanted, {walk.matched_pages} are in the tree"
        return walk.path[-1]


@dataclass
class Prompt:
    """What a request is to store, and how far this chunk goes (tokens)."""

    tokens: list[int]
    upto: int = 0


class RigOver(Generic[T]):
    """Ranks ``ranks`` (all, if None) of an engine, over local halves that ``make_transfer(config, rank)`` makes."""

    def __init__(
        self,
        config: CacheConfig,
        make_transfer: Callable[[CacheConfig, int], T],
        ranks: Sequence[int] | None = None,
        level: Level = Level.OPS,
    ) -> None:
        self.config = config
        self.batch = 1
        self.prompts: dict[str, Prompt] = {}
        members = range(config.cp_size) if ranks is None else ranks
        group = InProcessGroup(len(members), GROUP_TIMEOUT_S)
        self.sides: list[Side[T]] = []
        for index, rank in enumerate(members):
            transfer, tap = make_transfer(config, rank), Tap(group.member(index))
            log = EventLog(None, rank=rank, level=level, wall_clock=None, header={})
            self.sides.append(Side(rank, CpHiRadixCache(config, transfer, tap, log), transfer, tap, log))

    # -- all ranks ----------------------------------------------------------------------------------------------------------
    def each(self, call: Callable[[Side[T]], A]) -> A:
        """Do it on every rank in turn; the answers must be equal, and everything is checked. Returns the first rank's answer."""
        answers = [call(side) for side in self.sides]
        assert all(_plain(answer) == _plain(answers[0]) for answer in answers)
        self.check()
        return answers[0]

    def together(self, call: Callable[[Side[T]], object]) -> None:
        """Do it on all ranks at once, each in a thread of its own: for what blocks until all ranks have come (drain rounds)."""
        errors: list[BaseException] = []

        def run(side: Side[T]) -> None:
            try:
                call(side)
            except BaseException as error:  # raised below, in the test's thread
                errors.append(error)

        threads = [Thread(target=run, args=(side,)) for side in self.sides]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        self.check()

    def check(self) -> None:
        """Every rank is sound, and all are alike."""
        alike = None
        for side in self.sides:
            census = side.census()
            require(census)
            logical = _logical(census)
            assert alike is None or logical == alike, f"rank {side.rank} differs from rank {self.sides[0].rank}"
            alike = logical

    def logs_agree(self) -> None:
        """All ranks logged the same, what is local excepted."""
        views = [[view for event in side.log.events if (view := logical_view(event)) is not None] for side in self.sides]
        assert all(view == views[0] for view in views)

    # -- reading (first rank: all are alike) ----------------------------------------------------------------------------------
    @property
    def cache(self) -> CpHiRadixCache:
        return self.sides[0].cache

    def key(self, text: str, tail: int = 0) -> RadixKey:
        return self.cache.key(self.tokens(text, tail))

    def tokens(self, text: str, tail: int = 0) -> list[int]:
        tokens = [ord(letter) * 10_000 + at for letter in text for at in range(self.config.page_size)]
        return tokens + [-1 - at for at in range(tail)]

    def node(self, text: str) -> Node[Backup]:
        return self.sides[0].node(self.key(text))

    def state(self, text: str) -> State:
        """State of the node in which a match of ``text`` ends."""
        return self.node(text).backup.state

    def states(self, *texts: str) -> list[State]:
        return [self.state(text) for text in texts]

    def has(self, text: str) -> bool:
        """Whether all of ``text`` is in the tree, on whatever medium."""
        return self.cache.state.tree.walk(self.key(text)).matched_pages == len(text)

    def op(self, rid: str, index: int = -1) -> Backup:
        """A reservation of a running request that is not bound yet."""
        return self.cache.state.requests[rid].ops[index]

    def row(self, rid: str) -> list[LogicalPage]:
        return self.sides[0].rows[rid]

    def free_slots(self) -> list[int]:
        """Free host slots by rank, as every rank's ledger has them (the payload with fewest)."""
        ledger = self.cache.state.ledger
        return [min(ledger.free(rank, name) for name in self.config.payload_names) for rank in range(self.config.cp_size)]

    def events(self, event: str, **fields: object) -> list[dict[str, Any]]:
        """Events of that name with these fields in the first rank's log."""
        return [e for e in self.sides[0].log.events if e["event"] == event and all(e.get(k) == v for k, v in fields.items())]

    def match(self, text: str, tail: int = 0) -> Match:
        return self.each(lambda side: side.cache.match_prefix(self.key(text, tail)))

    # -- a request's way ----------------------------------------------------------------------------------------------------
    def tick(self, ticks: int = 1) -> TickReport:
        """The last tick's report; parked inserts and their rows are the caches' affair."""
        for _ in range(ticks):
            report = self.each(lambda side: side.cache.begin_tick())
        return report

    def begin(self, rid: str, text: str, tail: int = 0) -> bool:
        """Match, load back what is on the host, admit. False: deferred."""
        prompt = Prompt(self.tokens(text, tail))

        def prepare(side: Side[T]) -> bool:
            found = side.cache.prepare(rid, side.cache.key(prompt.tokens))
            if found is not None:
                side.found[rid] = found
            return found is not None

        if not self.each(prepare):
            return False
        self.prompts[rid] = prompt
        self.each(lambda side: self._admit(side, rid, prompt))
        return True

    def _admit(self, side: Side[T], rid: str, prompt: Prompt) -> list[LogicalPage]:
        found = side.found.pop(rid)
        row, node = list(found.device_pages), found.device_node
        if found.host_nodes:
            answer = side.cache.load_back(rid, found, len(prompt.tokens) - len(row) * self.config.page_size)
            if answer.node is not None:
                row, node = row + answer.pages, answer.node
        side.cache.admit(rid, node, len(row))
        side.rows[rid] = row
        return list(row)

    def chunk(self, rid: str, upto: int | None = None, owners: Sequence[int] | None = None) -> bool:
        """The request's next chunk, up to token ``upto`` (all): pages (of these owners, if given), and the reservation's answer."""
        self.grow(rid, upto, owners)
        return self.reserve(rid)

    def grow(self, rid: str, upto: int | None = None, owners: Sequence[int] | None = None) -> None:
        """Pages for the request's tokens up to ``upto`` (all)."""
        prompt = self.prompts[rid]
        prompt.upto = len(prompt.tokens) if upto is None else upto

        def take(side: Side[T]) -> list[LogicalPage]:
            row = side.rows[rid]
            missing = -(-prompt.upto // self.config.page_size) - len(row)
            if owners is None:
                pages = side.cache.alloc(missing, row[-1] if row else None) if missing > 0 else []
            else:
                assert len(owners) == missing
                pages = side.cache.state.alloc.alloc_for_owners(owners)
            assert pages is not None, f"no pages for {rid}"
            row.extend(pages)
            return pages

        self.each(take)

    def reserve(self, rid: str) -> bool:
        key = self.stored_key(rid)
        return self.each(lambda side: side.cache.reserve(rid, self.batch, key, side.rows[rid]))

    def stored_key(self, rid: str) -> RadixKey:
        return self.cache.key(self.prompts[rid].tokens[: self.prompts[rid].upto])

    def layer(self, payload: int, *layers: int) -> None:
        """These layers of the current batch have been stored."""
        for layer in layers:
            self.each(lambda side, layer=layer: side.cache.layer_stored(self.batch, payload, layer))  # type: ignore[misc]

    def end_payload(self, payload: int) -> None:
        self.each(lambda side: side.cache.end_payload(self.batch, payload))

    def end_forward(self) -> None:
        """The current batch is over; the next one begins."""
        self.each(lambda side: side.cache.end_forward(self.batch))
        self.batch += 1

    def forward(self, payloads: int | None = None) -> None:
        """All layers of the first ``payloads`` payloads (all), one by one, and the end."""
        for payload, (_, layers) in enumerate(self.config.payloads[:payloads]):
            self.layer(payload, *range(layers))
            self.end_payload(payload)
        self.end_forward()

    def insert(self, rid: str, *, chunked: bool = False) -> list[LogicalPage] | None:
        """Insert what the request has stored; ``None``: declined."""
        key = self.stored_key(rid)

        def insert(side: Side[T]) -> list[LogicalPage] | None:
            pages = side.cache.insert_unfinished(rid, key, side.rows[rid], chunked=chunked)
            if pages is not None:
                side.rows[rid][: len(pages)] = pages
            return pages

        return self.each(insert)

    def finish(self, rid: str) -> bool:
        """False: parked."""
        key = self.stored_key(rid)
        del self.prompts[rid]
        return self.each(lambda side: side.cache.finish(rid, key, side.rows.pop(rid)))

    def abort(self, rid: str, reason: str = "abort") -> None:
        self.prompts.pop(rid, None)
        self.each(lambda side: side.cache.end_request(rid, side.rows.pop(rid, []), reason))

    def serve(self, rid: str, text: str, owners: Sequence[int] | None = None) -> None:
        """A whole request in one forward, insert and all."""
        assert self.begin(rid, text), f"{rid} was deferred"
        self.chunk(rid, owners=owners)
        self.start_loads()
        self.forward()
        self.finish(rid)

    def start_loads(self) -> None:
        self.each(lambda side: side.cache.start_loads())

    def evict(self, tokens: int) -> EvictResult:
        return self.each(lambda side: side.cache.evict(tokens))

    def settle(self) -> None:
        """Ticks until nothing is numbered. Copies must have ended, or end by themselves."""
        for _ in range(64):
            if not self.cache.state.numbered:
                return
            self.tick()
        raise AssertionError(f"still numbered: {self.cache.state.numbered}")

    def rest(self) -> None:
        """End every request, flush, and prove that nothing is left anywhere and that all ranks tell the same story."""
        for rid in dict.fromkeys([*self.prompts, *self.cache.state.parked, *self.cache.state.waiters]):
            self.abort(rid)
        self.each(lambda side: side.cache.end_forward(self.batch))
        self.together(lambda side: side.cache.flush())
        for side in self.sides:
            require_quiet(side.census())
            assert side.cache.state.tree.node_count == 0
            assert side.cache.available_size() == self.config.usable_pages * self.config.page_size
        assert self.free_slots() == [self.config.host_slots] * self.config.cp_size
        self.logs_agree()


class Rig(RigOver[FakeTransfer]):
    """Engines over :class:`~tests.engine_fakes.FakeTransfer`, whose copies end when the test says so."""

    def __init__(self, ranks: Sequence[int] | None = None, level: Level = Level.OPS, **options: Any) -> None:
        super().__init__(rig_config(**options), FakeTransfer, ranks, level)

    def hold(self, holding: bool = True) -> None:
        """Copies submitted from now on stay in flight."""
        for side in self.sides:
            side.transfer.hold(holding)

    def finish_all(self, *ranks: int) -> None:
        """What is in flight on these ranks (all) has ended."""
        for side in self.sides:
            if not ranks or side.rank in ranks:
                side.transfer.finish_all()

    def finish_copies(self, op: OpKey, *ranks: int) -> None:
        """The copies of one backup have ended on these ranks (on all that have some in flight)."""
        for side in self.sides:
            if (not ranks or side.rank in ranks) and op in side.transfer.in_flight():
                side.transfer.finish(op)

    def fail_copies(self, op: OpKey, rank: int, *, drained: bool = True) -> None:
        """A copy of one backup fails on one rank."""
        self.local(rank).fail(op, drained=drained)

    def local(self, rank: int) -> FakeTransfer:
        """The local half of one rank."""
        return next(side.transfer for side in self.sides if side.rank == rank)


def _logical(census: Census) -> Census:
    """What must be equal on all ranks: all but local progress, local faults and the rank's own pools."""
    operations = tuple(replace(op, confirmed=(), void=False) for op in census.operations)
    return replace(census, operations=operations, rank=0, local_free=None)


def _plain(answer: object) -> object:
    """An answer without node objects, which are each rank's own."""
    if isinstance(answer, Match):
        nodes = [answer.device_node, *answer.host_nodes, answer.last_host_node, *answer.walk.path]
        return answer.device_pages, [node.id for node in nodes], answer.host_tail_pages, answer.host_hit_tokens
    return answer
