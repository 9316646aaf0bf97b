"""Serves a trace of real lengths over pools without bytes: chunked prefill, decode, retraction, load-back, on a virtual clock.

Nothing is computed, so that what is left is the cache's own work. A decoded token changes nothing in the cache but at the borders of
pages, so that steps in which nothing happens are passed over in one go.
"""

from __future__ import annotations

import heapq
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

from cphicache.agree.local import SingleReducer
from cphicache.engine import CacheConfig, CpHiRadixCache, Match, WritePolicy
from cphicache.run.study.transfer import Clock, Link, MetadataTransfer
from cphicache.run.trace import TraceRequest, output_tokens, prompt_tokens
from cphicache.spaces.types import LogicalPage
from cphicache.tree import RadixKey

T = TypeVar("T")
PAYLOAD = "target"
LONGEST_IDLE_US = 3.6e9
"""A longer time in which nothing runs, waits or is in flight is skipped: traces may count from any day, and a clock loses its microseconds
far from 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """What is served on. Token counts are logical, over all ranks; times are virtual.

    ``token_layer_bytes``: KV of one token in one layer. ``compute_us_per_token``: prefill, all layers. ``decode_us``: a step that only
    decodes. ``d2h_gb_per_s`` / ``h2d_gb_per_s``: host link of one rank, 10^9 bytes/s.
    """

    device_tokens: int = 1_000_000
    host_tokens: int = 4_000_000
    page_size: int = 64
    cp_size: int = 1
    layers: int = 61
    token_layer_bytes: int = 1152
    chunk_tokens: int = 8192
    max_batch: int = 256
    compute_us_per_token: float = 20.0
    decode_us: float = 30_000.0
    d2h_gb_per_s: float = 50.0
    h2d_gb_per_s: float = 50.0
    overlap: bool = True
    policy: WritePolicy = WritePolicy.WRITE_THROUGH
    reclaim_device_valid: bool = False

    def cache_config(self) -> CacheConfig:
        """The engine's part of it."""
        share = self.page_size * self.cp_size
        return CacheConfig(
            page_size=self.page_size,
            cp_size=self.cp_size,
            usable_pages=self.device_tokens // share * self.cp_size,
            payloads=((PAYLOAD, self.layers),),
            host_slots=self.host_tokens // share * self.page_size,
            policy=self.policy,
            reclaim_device_valid=self.reclaim_device_valid,
            overlap=self.overlap,
        )

    def parts(self) -> tuple[Clock, MetadataTransfer, CpHiRadixCache]:
        """A clock at 0, a transfer on it, and an engine over that."""
        clock = Clock()
        layer_page_bytes = self.token_layer_bytes * self.page_size
        links = [Link(gb_per_s * 1e3) for gb_per_s in (self.d2h_gb_per_s, self.h2d_gb_per_s)]
        transfer = MetadataTransfer(clock, {PAYLOAD: self.layers}, layer_page_bytes, *links, cp_size=self.cp_size)
        return clock, transfer, CpHiRadixCache(self.cache_config(), transfer, SingleReducer())


@dataclass(slots=True)
class Served:
    """What became of the requests. ``seconds``: CPU time of the thread by part, of which nothing is the model's."""

    finished: int = 0
    refused: int = 0
    """Requests that are longer than the device pool."""
    retracted: int = 0
    tokens_device: int = 0
    tokens_host: int = 0
    tokens_computed: int = 0
    decoded: int = 0
    ticks: int = 0
    prompts: int = 0
    """Tokens of the prompts of finished requests."""
    virtual_s: float = 0.0
    """Without the idle times that were skipped (:data:`LONGEST_IDLE_US`)."""
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))


def _stored_tokens(request: TraceRequest) -> int:
    return request.input_length + max(1, request.output_length) - 1  # the last token is never stored


class _Job:
    """A request on its way: ``stored`` of its tokens have KV; its prefill ends at ``target`` and it is done at ``total``."""

    __slots__ = ("key", "prompt", "request", "restarts", "rid", "row", "stored", "target", "total")

    def __init__(self, request: TraceRequest, page_size: int) -> None:
        tokens = prompt_tokens(request)
        self.prompt = self.target = len(tokens)
        self.total = _stored_tokens(request)
        self.key = RadixKey.of(tokens + output_tokens(request, self.total - self.prompt), page_size)
        self.request = request
        self.rid = f"r{request.index}"
        self.row: list[LogicalPage] = []
        self.stored = self.restarts = 0


class TraceServer:
    """One scheduler over one engine, until every request is served. ``on_done`` hears of each request that ends. ``clock``: seconds, for
    the time of the parts; a profiler is better off without it."""

    def __init__(
        self,
        config: ServeConfig,
        requests: Iterable[TraceRequest],
        on_done: Callable[[], object] = int,
        clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self.config = config
        self.clock, self.transfer, self.cache = config.parts()
        self.served = Served()
        self._arrivals: Iterator[TraceRequest] = iter(requests)
        self._next = next(self._arrivals, None)
        self._skipped_us = 0
        self._waiting: deque[TraceRequest | _Job] = deque()
        self._prefilling: list[_Job] = []
        self._running: dict[str, _Job] = {}
        self._due: list[tuple[int, int, _Job, int]] = []
        """Decoding requests by the step at which they need a page or end; (step, order, job, its restarts)."""
        self._order = self._steps = 0
        self._on_done = on_done
        self._seconds = clock

    def run(self) -> Served:
        """Serve everything and let the cache come to rest; the accounts of the engine and of the local half must agree then."""
        start = self._seconds()
        while self._next is not None or self._waiting or self._running:
            self.step()
        while self.cache.state.numbered or self.cache.state.parked:
            self._pass_time(self.config.decode_us)
            self._tick()
        self._timed("shutdown", self.cache.shutdown)
        held, counted = self.transfer.used_pages * self.config.page_size, self.cache.state.ledger.used
        if held != counted:
            raise AssertionError(f"host slots at the end: expected the ledger's {counted}, found {held}")
        self.served.virtual_s = self.clock.now / 1e6
        self.served.seconds["scheduler"] = self._seconds() - start - sum(self.served.seconds.values())
        return self.served

    def step(self) -> None:
        """One tick: admissions and one batch, or the way to the next thing that happens."""
        self._tick()
        while self._next is not None and self._arrival_us(self._next) <= self.clock.now:
            self._waiting.append(self._next)
            self._next = next(self._arrivals, None)
        budget = self.config.chunk_tokens
        chunks: list[tuple[_Job, int]] = []
        for job in list(self._prefilling):
            if budget and (end := self._grow(job, min(job.target, job.stored + budget))):
                chunks.append((job, end))
                budget -= end - job.stored
        budget = self._admit(chunks, budget)
        if chunks:
            self._forward(chunks)
            self._decode(1)
        else:
            self._decode(self._idle_steps())

    def _arrival_us(self, request: TraceRequest) -> int:
        return request.timestamp_ms * 1000 - self._skipped_us

    def _tick(self) -> None:
        self.served.ticks += 1
        report = self._timed("tick", self.cache.begin_tick)
        assert not report.poisoned, "no copy fails here"

    # -- admission ------------------------------------------------------------------------------------------------------------
    def _admit(self, chunks: list[tuple[_Job, int]], budget: int) -> int:
        size = self.config.page_size
        for _ in range(len(self._waiting)):
            if not budget or len(self._running) >= self.config.max_batch:
                break
            waiting = self._waiting[0]
            total = waiting.total if isinstance(waiting, _Job) else _stored_tokens(waiting)
            if (
                total + 2 * size * self.config.cp_size > self.config.cache_config().usable_pages * size
            ):  # before its tokens are made
                self._waiting.popleft()
                self.served.refused += 1
                self._on_done()
                continue
            job = self._waiting[0] = waiting if isinstance(waiting, _Job) else _Job(waiting, size)
            if self.cache.is_waiting(job.rid):
                self._waiting.rotate(-1)  # behind the others until its turn comes again
                continue
            found = self._timed("match", self.cache.prepare, job.rid, job.key.slice(0, (job.target - 1) // size), job.key)
            if found is None:
                self._waiting.rotate(-1)
                continue
            end = self._start(job, found, budget)
            if end is None and not self._running and not self.cache.state.numbered and found.walk.partial_pages:
                # The lock of a node that is matched in part holds all of it: compute that part again instead (R24).
                whole = job.key.slice(0, found.walk.matched_pages - found.walk.partial_pages)
                end = self._start(job, self.cache.match_prefix(whole), budget)
            if end is None:
                if not self._running and not self.cache.state.numbered:
                    raise AssertionError(f"{job.rid}: expected room for it in an idle cache, found none")
                break
            self._waiting.popleft()
            chunks.append((job, end))
            budget -= end - job.stored
        return budget

    def _start(self, job: _Job, found: Match, budget: int) -> int | None:
        """Load back, lock, and pages for the first chunk; where that ends. None: no room, and nothing is held."""
        cache, size = self.cache, self.config.page_size
        prefix = len(found.device_pages) * size
        room = cache.available_size() + cache.evictable_size()
        if room < job.target - prefix + 2 * size * (len(self._running) + 1):
            return None  # as serving engines do: do not start what would only push others out
        row, node = list(found.device_pages), found.device_node
        if found.host_nodes:
            answer = self._timed("load-back", cache.load_back, job.rid, found, job.target - prefix)
            if answer.node is not None:
                row, node = row + answer.pages, answer.node
        job.row, job.stored = row, len(row) * size
        self._timed("admit", cache.admit, job.rid, node, len(row))
        end = self._grow(job, min(job.target, job.stored + budget))
        if not end:
            self._timed("end", cache.end_request, job.rid, job.row, "no_pages")
            job.row, job.stored = [], 0
            return None
        if not job.restarts:
            self.served.tokens_device += prefix
            self.served.tokens_host += job.stored - prefix
        self._running[job.rid] = job
        self._prefilling.append(job)
        return end

    def _grow(self, job: _Job, end: int) -> int:
        """Pages for the first ``end`` tokens; ``end``, or 0 when there are none."""
        missing = -(-end // self.config.page_size) - len(job.row)
        if missing > 0:
            pages = self._timed("alloc and evict", self.cache.alloc, missing, job.row[-1] if job.row else None)
            if pages is None:
                return 0
            job.row.extend(pages)
        return end

    # -- the forward ----------------------------------------------------------------------------------------------------------
    def _forward(self, chunks: list[tuple[_Job, int]]) -> None:
        cache, clock, config, batch = self.cache, self.clock, self.config, self.served.ticks
        size = config.page_size
        for job, end in chunks:
            cache.stores(job.rid, batch, job.stored)
            self._timed("reserve", cache.reserve, job.rid, batch, job.key.slice(0, end // size), job.row)
        self._timed("load-back", cache.start_loads)
        tokens = sum(end - job.stored for job, end in chunks)
        layer_us = max(config.decode_us, tokens * config.compute_us_per_token) / config.layers
        clock.compute = clock.now
        start = self._seconds()
        for layer in range(config.layers):
            cache.wait_layer(batch, PAYLOAD, layer)
            clock.compute += layer_us
            cache.layer_stored(batch, 0, layer)
        cache.end_payload(batch, 0)
        cache.end_forward(batch)
        self.served.seconds["layers"] += self._seconds() - start
        clock.now = clock.compute
        for job, end in chunks:
            self.served.tokens_computed += end - job.stored
            job.stored = end
            more = end < job.target
            key = job.key.slice(0, end // size)
            row = self._timed("insert", cache.insert_unfinished, job.rid, key, job.row, chunked=more)
            if row is not None:
                job.row[: len(row)] = row
            if not more:
                self._prefilling.remove(job)
                self._schedule(job)

    # -- decoding -------------------------------------------------------------------------------------------------------------
    def _schedule(self, job: _Job) -> None:
        """Decode on until the row is full, or all is stored."""
        steps = min(len(job.row) * self.config.page_size, job.total) - job.stored
        self._order += 1
        heapq.heappush(self._due, (self._steps + steps, self._order, job, job.restarts))

    def _idle_steps(self) -> int:
        """Decode steps until something can happen; time goes on with them. 0: the time to the next arrival was skipped."""
        steps: int | None = 1
        if not self.cache.state.numbered and not self.cache.state.waiters:
            steps = max(1, self._due[0][0] - self._steps) if self._due else None
            if self._next is not None and not (self._waiting and self._running):
                gap_us = self._arrival_us(self._next) - self.clock.now
                if gap_us > LONGEST_IDLE_US and not self._waiting and not self._running:
                    self._skipped_us += self._arrival_us(self._next) - int(self.clock.now)
                    return 0
                to_arrival = max(1, -int(-gap_us // self.config.decode_us))
                steps = to_arrival if steps is None else min(steps, to_arrival)
        if steps is None:
            return 0
        self._pass_time(steps * self.config.decode_us)
        return steps

    def _pass_time(self, duration_us: float) -> None:
        self.clock.now += duration_us
        self.clock.compute = self.clock.now

    def _decode(self, steps: int) -> None:
        self._steps += steps
        while self._due and self._due[0][0] <= self._steps:
            _, _, job, restarts = heapq.heappop(self._due)
            if job.restarts != restarts:
                continue  # it was retracted since
            end = min(len(job.row) * self.config.page_size, job.total)
            self.served.decoded += end - job.stored
            job.stored = end
            if end == job.total:
                self._finish(job)
            elif self._grow_or_retract(job, end + 1):
                self._schedule(job)

    def _grow_or_retract(self, job: _Job, end: int) -> bool:
        """A page for the next token; whoever came last gives theirs up for it. False: that was the job itself."""
        while not self._grow(job, end):
            victim = next(reversed(self._running.values()))
            del self._running[victim.rid]
            if victim in self._prefilling:
                self._prefilling.remove(victim)
            self._timed("end", self.cache.end_request, victim.rid, victim.row, "no_pages")
            self.served.retracted += 1
            victim.restarts += 1
            victim.target = max(victim.target, victim.stored + 1)
            victim.row, victim.stored = [], 0
            self._waiting.appendleft(victim)
            if victim is job:
                return False
        return True

    def _finish(self, job: _Job) -> None:
        self._timed("finish", self.cache.finish, job.rid, job.key.slice(0, job.stored // self.config.page_size), job.row)
        del self._running[job.rid]
        self.served.finished += 1
        self.served.prompts += job.prompt
        self._on_done()

    def _timed(self, part: str, call: Callable[..., T], *args: Any, **named: Any) -> T:
        start = self._seconds()
        try:
            return call(*args, **named)
        finally:
            self.served.seconds[part] += self._seconds() - start
