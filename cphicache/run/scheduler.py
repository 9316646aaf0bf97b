"""The embedded scheduler of one rank: continuous batching with chunked prefill, decode, retraction and abort over the cache.

It follows the order of calls of a serving engine: tick, aborts, admission, load start, forward, results. It decides from logical
state only, so all ranks schedule alike.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from cphicache.engine import CpHiRadixCache, Match
from cphicache.run.config import RunConfig
from cphicache.run.jobs import Job
from cphicache.run.model import ReferenceModel, Segment
from cphicache.spaces.types import LogicalPage
from cphicache.transfer.streams.port import Streams

TICK_US = 20.0
"""Virtual time that the scheduler itself takes for one step, a small part of a forward's."""
IDLE_US = 400.0
"""Virtual time of a step in which nothing runs: about a forward's, so that time goes on at the same pace."""
RESERVED_PAGES_PER_REQUEST = 2
"""Pages left to each running request for what it will decode, when another is admitted."""
QUIET_TICKS = 10_000
"""A run that has no request left must be quiet within so many ticks."""


class NoProgress(AssertionError):
    """Nothing moves any more although work is left."""


@dataclass(slots=True)
class Served:
    """What became of the requests, and where their tokens came from."""

    finished: int = 0
    aborted: int = 0
    refused: int = 0
    """Requests that can never fit the device pool."""
    retracted: int = 0
    chunked: int = 0
    tokens_device: int = 0
    tokens_host: int = 0
    tokens_computed: int = 0
    forwards: int = 0
    idle_jumps: int = 0
    abandoned: int = 0
    """Requests that were not served to their end because a rank was lost."""
    refusals: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Pass:
    """One job's part in the coming forward."""

    job: Job
    start: int
    end: int
    prefill: bool


class Scheduler:
    """Serves jobs on one rank until all are done and the cache is quiet."""

    def __init__(
        self,
        config: RunConfig,
        cache: CpHiRadixCache,
        model: ReferenceModel,
        streams: Streams,
        jobs: Sequence[Job],
        *,
        on_tick: Callable[[Scheduler], None],
        on_done: Callable[[Job], None],
    ) -> None:
        self._config = config
        self._cache = cache
        self._model = model
        self._streams = streams
        self._arriving = deque(jobs)
        self._waiting: deque[Job] = deque()
        self._running: list[Job] = []
        self._on_tick = on_tick
        self._on_done = on_done
        self._clock_ms = jobs[0].arrival_ms if jobs else 0.0
        self._compute = streams.stream("compute")
        self.served = Served()
        self.tick = 0
        self._idle_ticks = 0

    @property
    def rows(self) -> dict[str, Sequence[LogicalPage]]:
        """Rows of the running requests."""
        return {job.rid: job.row for job in self._running}

    def run(self) -> None:
        """Serve everything, then let the cache come to rest and shut it down."""
        while self._arriving or self._waiting or self._running:
            self.step()
        for _ in range(QUIET_TICKS):
            if not self._cache.state.parked and not self._cache.state.numbered and not self._cache.state.loads:
                break
            self.step()
        else:
            raise NoProgress(
                f"tick {self.tick}: expected the cache to come to rest, found {len(self._cache.state.pending)} pending"
            )
        self._cache.shutdown()
        self._on_tick(self)

    def abandon(self, reason: str) -> None:
        """Serve nothing more: end every request where it stands, and shut the cache down. Legal after an error of any call."""
        for job in [*self._running, *self._waiting]:
            self._cache.end_request(job.rid, job.row, reason)
        self.served.abandoned += len(self._running) + len(self._waiting) + len(self._arriving)
        self._running.clear()
        self._waiting.clear()
        self._arriving.clear()
        self._cache.shutdown()

    def step(self) -> None:
        """One tick."""
        self._streams.pause(TICK_US)
        report = self._cache.begin_tick()
        self.tick = report.tick
        for rid in report.poisoned:
            self._retract(next(job for job in self._running if job.rid == rid), "load_failed")
        self._arrive()
        self._abort_planned()
        passes = self._plan_running()
        passes += self._admit(passes)
        self._forward(passes)
        self._results(passes)
        self._on_tick(self)
        self._idle_ticks = 0 if passes or self._arriving else self._idle_ticks + 1
        if self._idle_ticks > QUIET_TICKS:
            raise NoProgress(
                f"tick {self.tick}: nothing ran for {QUIET_TICKS} ticks; waiting: {[job.rid for job in self._waiting]}"
            )
        if not passes:
            self._streams.pause(IDLE_US)
            if self._streams.now_us is None:
                time.sleep(IDLE_US / 1e6)  # real copies need real time, and the processor: steps alone would count it up in no time
            self._skip_idle()

    # -- arrivals, aborts, retractions ------------------------------------------------------------------------------------------
    def _arrive(self) -> None:
        self._clock_ms += self._config.tick_ms
        while self._arriving and self._arriving[0].arrival_ms <= self._clock_ms:
            self._waiting.append(self._arriving.popleft())

    def _skip_idle(self) -> None:
        """Nothing runs, waits or is in flight: go to the next arrival."""
        busy = self._waiting or self._running or self._cache.state.numbered
        if self._arriving and not busy and self._arriving[0].arrival_ms > self._clock_ms:
            self._clock_ms = self._arriving[0].arrival_ms
            self.served.idle_jumps += 1

    def _abort_planned(self) -> None:
        for job in [job for job in self._waiting if job.abort_after == 0]:
            self._waiting.remove(job)
            self._end_aborted(job)
        for job in [job for job in self._running if job.abort_layer is None and job.abort_after == job.passes and job.passes]:
            self._running.remove(job)
            self._end_aborted(job)
        for job in [job for job in self._running if job.retract_after is not None and job.passes >= job.retract_after]:
            self._retract(job, "retract")

    def _end_aborted(self, job: Job) -> None:
        self._cache.end_request(job.rid, job.row, "abort")
        job.aborted = True
        self.served.aborted += 1
        self._on_done(job)

    def _retract(self, job: Job, reason: str) -> None:
        self._running.remove(job)
        self._cache.end_request(job.rid, job.row, reason)
        self.served.retracted += 1
        job.restart()
        self._waiting.appendleft(job)

    # -- planning -----------------------------------------------------------------------------------------------------------------
    def _plan_running(self) -> list[_Pass]:
        """Next passes of running requests; whoever finds no page makes the youngest others give theirs up."""
        passes: list[_Pass] = []
        decoding = sum(job.stored >= job.target for job in self._running)
        for job in list(self._running):
            if job not in self._running:
                continue
            end = min(job.known, job.stored + self._chunk(decoding))
            while not self._grow(job, end):
                victim = next((other for other in reversed(self._running) if other is not job), None)
                if victim is None:
                    self._retract(job, "no_pages")
                    break
                self._retract(victim, "no_pages")
                passes = [planned for planned in passes if planned.job is not victim]
            else:
                passes.append(_Pass(job, job.stored, end, prefill=job.stored < job.target))
        return passes

    def _chunk(self, decoding: int) -> int:
        """Prompt tokens of one step: decode tokens of the same batch count, so that chunks may end inside a page."""
        return max(self._config.page_size, self._config.chunk_tokens - decoding)

    def _grow(self, job: Job, end: int) -> bool:
        """Give the job's row the pages for its first ``end`` tokens."""
        missing = -(-end // self._config.page_size) - len(job.row)
        if missing <= 0:
            return True
        pages = self._cache.alloc(missing, job.row[-1] if job.row else None)
        if pages is None:
            return False
        job.row.extend(pages)
        return True

    def _admit(self, passes: list[_Pass]) -> list[_Pass]:
        admitted: list[_Pass] = []
        decoding = sum(not planned.prefill for planned in passes)
        for job in list(self._waiting):
            if len(self._running) >= self._config.max_batch:
                break
            if self._is_too_long(job):
                self._waiting.remove(job)
                self._on_done(job)
                continue
            if self._cache.is_waiting(job.rid):
                continue
            found = self._cache.prepare(
                job.rid, self._cache.key(job.tokens[: job.known - 1]), self._cache.key(job.tokens[: job.known])
            )
            if found is None:
                continue
            planned = self._start(job, found, decoding) or self._start_without_part(job, found, decoding)
            if planned is None:
                if not self._running:
                    continue  # another may fit, and this one will when pending backups let go of their pages
                break
            self._waiting.remove(job)
            self._running.append(job)
            admitted.append(planned)
        return admitted

    def _is_too_long(self, job: Job) -> bool:
        capacity = self._config.device_pages * self._config.page_size
        needed = job.prompt + job.output + self._config.owners * self._config.page_size
        if needed <= capacity:
            return False
        self.served.refused += 1
        self.served.refusals.append(
            f"request {job.rid} needs {needed} tokens, the device pool has {capacity}: raise --device-tokens"
        )
        return True

    def _start(self, job: Job, found: Match, decoding: int) -> _Pass | None:
        """Load back, lock and give pages for the first chunk. ``None``: no pages, and nothing is held."""
        size = self._config.page_size
        device_pages, node = list(found.device_pages), found.device_node
        room = self._cache.available_size() + self._cache.evictable_size()
        if self._running and room < job.known - len(device_pages) * size + RESERVED_PAGES_PER_REQUEST * size * (
            len(self._running) + 1
        ):
            return None  # as a serving engine does: do not start what would only push others out
        loaded: list[LogicalPage] = []
        if found.host_nodes:
            answer = self._cache.load_back(job.rid, found, job.known - len(device_pages) * size)
            if answer.node is not None:
                loaded, node = answer.pages, answer.node
        job.row = device_pages + loaded
        self._cache.admit(job.rid, node, len(job.row))
        job.stored = len(job.row) * size
        end = min(job.known, job.stored + self._chunk(decoding))
        if not self._grow(job, end):
            self._cache.end_request(job.rid, job.row, "no_pages")
            job.row, job.stored = [], 0
            return None
        self.served.tokens_device += len(device_pages) * size
        self.served.tokens_host += len(loaded) * size
        job.prefix_pages = len(device_pages) + len(loaded)
        job.check_to = job.stored if self._is_checked(job) else 0
        job.nodes = self._nodes_of(job)
        return _Pass(job, job.stored, end, prefill=True)

    def _start_without_part(self, job: Job, found: Match, decoding: int) -> _Pass | None:
        """The lock of a node that is matched in part holds all of it (R24). When nothing runs or is in flight, and those pages are what
        is missing, they never come free while the request insists on its match: compute that part again instead."""
        if self._running or self._cache.state.numbered or not found.walk.partial_pages:
            return None
        whole_pages = found.walk.matched_pages - found.walk.partial_pages
        whole = self._cache.match_prefix(self._cache.key(job.tokens[: whole_pages * self._config.page_size]))
        return self._start(job, whole, decoding)

    def _is_checked(self, job: Job) -> bool:
        return self._config.verify == "all" or (self._config.verify == "sample" and int(job.rid[1:]) % 8 == 0)

    def _nodes_of(self, job: Job) -> list[tuple[int, int]]:
        nodes, at = [], 0
        for node in self._cache.match_prefix(self._cache.key(job.tokens[: job.stored])).walk.path:
            at += node.length_pages
            nodes.append((at, node.id))
        return nodes

    # -- the forward ----------------------------------------------------------------------------------------------------------------
    def _forward(self, passes: list[_Pass]) -> None:
        if not passes:
            self._cache.start_loads()
            return
        cache, batch_id, size = self._cache, self.tick, self._config.page_size
        segments = []
        for planned in passes:
            job = planned.job
            cache.stores(job.rid, batch_id, planned.start)
            if planned.prefill:
                cache.reserve(job.rid, batch_id, cache.key(job.tokens[: planned.end]), job.row)
            segments.append(Segment(job.rid, list(job.row), job.hashes, planned.start, planned.end, job.check_to, job.nodes))
            job.check_to = 0
        cache.start_loads()
        cache.before_store([p for s in segments for p in s.row[s.start // size : -(-s.end // size)]])
        self._model.forward(batch_id, segments, cache, self._between_layers)
        self.served.forwards += 1
        self._streams.synchronize(self._compute.record())

    def _between_layers(self, payload: str, layer: int) -> None:
        """Aborts that come while the forward is running."""
        if payload != "target":
            return
        for job in [job for job in self._running if job.abort_layer == layer and job.abort_after == job.passes + 1]:
            self._running.remove(job)
            self._end_aborted(job)

    # -- results --------------------------------------------------------------------------------------------------------------------
    def _results(self, passes: list[_Pass]) -> None:
        cache = self._cache
        for planned in passes:
            job = planned.job
            if job.aborted:
                continue
            self.served.tokens_computed += planned.end - planned.start
            job.stored = planned.end
            job.passes += 1
            if planned.prefill:
                job.chunks += 1
                more = job.stored < job.known
                self.served.chunked += job.chunks == 2
                row = cache.insert_unfinished(job.rid, cache.key(job.tokens[: job.stored]), job.row, chunked=more)
                if row is not None:
                    job.row[: len(row)] = row
                if more:
                    continue
            job.sampled += 1
            job.known = job.prompt + job.sampled
            if job.sampled >= job.output:
                self._running.remove(job)
                cache.finish(job.rid, cache.key(job.tokens[: job.stored]), job.row)
                self.served.finished += 1
                self._on_done(job)
