"""A small server over one engine and a fake local half, whose every step is data; it has the engine checked after every call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from cphicache.agree.local import SingleReducer
from cphicache.check.conservation import Census, require, require_quiet
from cphicache.engine import CacheConfig, CpHiRadixCache, Match
from cphicache.engine.records import Backup
from cphicache.run.census import take_census
from cphicache.spaces import LogicalPage
from cphicache.tree import Node
from tests.engine_fakes import FakeTransfer


class Prompt(NamedTuple):
    """``blocks``: whole pages, equal numbers are equal pages; ``tail``: tokens of a last, short page; ``output``: tokens decoded."""

    blocks: tuple[int, ...]
    tail: int = 0
    output: int = 0


@dataclass(frozen=True, slots=True)
class Step:
    """One scheduler step.

    ``chunk_tokens`` a request and forward; ``abort``: index of the running request that is aborted before layer ``abort_layer`` of the
    first payload (negative: before admission); ``report``: which layers are reported ("all", "none", "no_draft": no draft forward
    comes); ``copies``: what happens to copies in flight before the step; ``pick``: which one; ``fault``: what fails next.
    """

    prompts: tuple[Prompt, ...] = ()
    chunk_tokens: int = 8
    abort: int | None = None
    abort_layer: int = -1
    evict_tokens: int = 0
    report: str = "all"
    copies: str = "go_on"
    pick: int = 0
    fault: str = ""
    reset: bool = False


@dataclass(slots=True)
class Served:
    """A request: ``stored`` of its ``tokens`` have KV. ``output`` of them are decoded when the other ones, the prompt, are stored."""

    rid: str
    tokens: list[int]
    output: int
    row: list[LogicalPage]
    stored: int = 0

    @property
    def prompt_tokens(self) -> list[int]:
        return self.tokens[: len(self.tokens) - self.output]


class Server:
    """Serves prompts step by step. ``served``: what requests ended in ("finished", "parked", "aborted", "retracted")."""

    def __init__(self, config: CacheConfig, rank: int = 0) -> None:
        self.config = config
        self.rank = rank
        self.transfer = FakeTransfer(config, rank)
        self.cache = CpHiRadixCache(config, self.transfer, SingleReducer())
        self.waiting: list[Served] = []
        self.running: dict[str, Served] = {}
        self.ended: dict[str, str] = {}
        self._next_rid = 0
        self._batch = 0

    def census(self) -> Census:
        return take_census(self.cache, {rid: r.row for rid, r in self.running.items()}, self.transfer.free_slots(), self.rank)

    def check(self) -> None:
        require(self.census())

    def tokens_of(self, prompt: Prompt) -> list[int]:
        size = self.config.page_size
        pages = [block * size + at for block in prompt.blocks for at in range(size)]
        return pages + [1000 + at for at in range(prompt.tail)] + [2000 + at for at in range(prompt.output)]

    # -- whole steps ------------------------------------------------------------------------------------------------------------
    def step(self, step: Step) -> None:
        """Tick, aborts, admission, forward, results."""
        self._copies(step)
        self.tick()
        if step.reset:
            self.cache.reset_backups()
            self.check()
        if step.abort is not None and step.abort_layer < 0:
            self.abort(step.abort)
        if step.evict_tokens:
            self.cache.evict(step.evict_tokens)
            self.check()
        for prompt in step.prompts:
            self.waiting.append(Served(f"r{self._next_rid}", self.tokens_of(prompt), prompt.output, []))
            self._next_rid += 1
        for request in [request for request in self.waiting if not self.cache.is_waiting(request.rid)]:
            self.admit(request)
        self.forward(step)

    def serve(self, *prompts: Prompt) -> None:
        """Serve these prompts to the end, in steps in which nothing unusual happens."""
        self.step(Step(prompts))
        while self.running or self.waiting:
            self.step(Step())

    def rest(self) -> None:
        """Let everything end, prove that the engine is quiet, then flush it and prove that again."""
        self.transfer.hold(False)
        self.transfer.finish_all()
        for request in [*self.running.values(), *self.waiting]:
            self.end(request, "aborted")
        self.waiting.clear()
        for _ in range(4 * (self.config.max_deferral_ticks + self.config.max_retries) + 8):
            self.cache.start_loads()
            self.tick()
        require_quiet(self.census())
        self.cache.flush()
        require_quiet(self.census())
        assert self.cache.state.tree.node_count == 0
        assert self.transfer.free_slots() == dict.fromkeys(self.config.payload_names, self.config.host_slots)

    # -- parts of a step ----------------------------------------------------------------------------------------------------------
    def tick(self) -> None:
        report = self.cache.begin_tick()
        self.check()
        for rid in report.poisoned:
            self.end(self.running[rid], "retracted")

    def abort(self, index: int) -> None:
        if self.running:
            self.end(list(self.running.values())[index % len(self.running)], "aborted")

    def end(self, request: Served, how: str) -> None:
        self.running.pop(request.rid, None)
        self.ended[request.rid] = how
        self.cache.end_request(request.rid, request.row, how)
        self.check()

    def admit(self, request: Served) -> bool:
        """Match, load back, lock and allocate nothing yet. False: deferred."""
        cache, size = self.cache, self.config.page_size
        found = cache.prepare(request.rid, cache.key(request.prompt_tokens[:-1]), cache.key(request.prompt_tokens))
        self.check()
        if found is None:
            return False
        self.waiting.remove(request)
        pages, node = self._load(request, found)
        request.row = list(found.device_pages) + pages
        request.stored = len(request.row) * size
        cache.admit(request.rid, node, len(request.row))
        self.running[request.rid] = request
        self.check()
        return True

    def _load(self, request: Served, found: Match) -> tuple[list[LogicalPage], Node[Backup]]:
        if not found.host_nodes:
            return [], found.device_node
        extend = len(request.prompt_tokens) - len(found.device_pages) * self.config.page_size
        answer = self.cache.load_back(request.rid, found, extend)
        self.check()
        return (answer.pages, found.device_node) if answer.node is None else (answer.pages, answer.node)

    def forward(self, step: Step) -> None:
        """One chunk of the prompt, or all of the output, of every running request that gets pages."""
        cache = self.cache
        self._batch += 1
        ends: dict[str, int] = {}
        for request in list(self.running.values()):
            if request.rid not in self.running:
                continue
            prompt = len(request.prompt_tokens)
            end = len(request.tokens) if request.stored >= prompt else min(prompt, request.stored + step.chunk_tokens)
            if self._grow(request, end):
                ends[request.rid] = end
        for rid, end in ends.items():
            request = self.running[rid]
            if end > len(request.prompt_tokens):
                continue
            cache.reserve(rid, self._batch, cache.key(request.tokens[:end]), request.row)
            self.check()
        cache.start_loads()
        self.check()
        self._layers(step)
        cache.end_forward(self._batch)
        self.check()
        for rid, end in ends.items():
            if rid in self.running:
                self._result(self.running[rid], end)

    def _grow(self, request: Served, end: int) -> bool:
        missing = -(-end // self.config.page_size) - len(request.row)
        pages = self.cache.alloc(missing, request.row[-1] if request.row else None) if missing > 0 else []
        if pages is None:
            self.end(request, "retracted")
            return False
        request.row.extend(pages)
        self.check()
        return True

    def _layers(self, step: Step) -> None:
        cache = self.cache
        for payload, (name, layers) in enumerate(self.config.payloads):
            if payload and step.report == "no_draft":
                continue
            for layer in range(layers):
                if payload == 0 and layer == step.abort_layer and step.abort is not None:
                    self.abort(step.abort)
                cache.wait_layer(self._batch, name, layer)
                if step.report != "none":
                    cache.layer_stored(self._batch, payload, layer)
                    self.check()
            cache.end_payload(self._batch, payload)
            self.check()

    def _result(self, request: Served, end: int) -> None:
        cache, prompt = self.cache, len(request.prompt_tokens)
        request.stored = end
        if end <= prompt:
            key = cache.key(request.tokens[:end])
            row = cache.insert_unfinished(request.rid, key, request.row, chunked=end < prompt)
            if row is not None:
                request.row[: len(row)] = row
            self.check()
        if end == len(request.tokens):
            done = cache.finish(request.rid, cache.key(request.tokens), request.row)
            del self.running[request.rid]
            self.ended[request.rid] = "finished" if done else "parked"
            self.check()

    def _copies(self, step: Step) -> None:
        transfer, flying = self.transfer, self.transfer.in_flight()
        end_one: dict[str, Callable[[], None]] = {
            "finish": lambda: transfer.finish(flying[step.pick % len(flying)]),
            "fail": lambda: transfer.fail(flying[step.pick % len(flying)], drained=step.pick % 2 == 0),
        }
        if step.copies in end_one and flying:
            end_one[step.copies]()
        elif step.copies == "finish_all":
            transfer.finish_all()
            transfer.hold(False)
        elif step.copies == "hold":
            transfer.hold()
        transfer.fail_reserve_next = step.fault == "reserve"
        transfer.fail_copy_next = step.fault == "copy"
