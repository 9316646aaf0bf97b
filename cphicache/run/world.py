"""A whole run: one engine a CP rank, in lockstep as threads of this process, each with its own pools, ledger, tree, log and inputs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from threading import Event, Thread

from cphicache.agree.digests import DigestCheck, LocalBoard
from cphicache.agree.local import InProcessGroup, SingleReducer
from cphicache.agree.port import Excluded, GroupBroken, Reducer
from cphicache.check.conservation import Census, InvariantBroken, check_quiet, require
from cphicache.check.reference import ReferenceKV
from cphicache.engine import CacheConfig, Counters, CpHiRadixCache, StateDigest, WriteBackShort, WritePolicy
from cphicache.events import EventLog, EventLogError, Level, rank_log_path
from cphicache.metrics import CacheMetrics
from cphicache.run.census import take_census
from cphicache.run.config import RunConfig
from cphicache.run.gone import gone_text
from cphicache.run.jobs import Job, make_jobs, sized_for
from cphicache.run.model import COMPUTE_US_PER_TOKEN, ReferenceModel, Verdict
from cphicache.run.pools import kv_shape, make_pools
from cphicache.run.scheduler import Scheduler, Served
from cphicache.run.trace import TraceRequest
from cphicache.spaces.layout import CpSharedKVLayout
from cphicache.transfer.faults import CopyFaults
from cphicache.transfer.pools.memory import HostMemory
from cphicache.transfer.rank import RankTransfer, TransferCounters
from cphicache.transfer.streams.cuda import CudaStreams
from cphicache.transfer.streams.port import Streams
from cphicache.transfer.streams.threads import ThreadStreams
from cphicache.transfer.streams.virtual import VirtualStreams

COPY_OVER_COMPUTE = 0.5
"""Virtual time of a layer's copy over that of its compute, for a batch that is backed up whole, before jitter."""
JITTER = 0.5
"""Spread of virtual copy durations, so that copies complete in many orders."""
CHECK_TICKS = 16
"""The outside checker proves conservation every so many ticks (not with ``verify`` off), and at the end."""

_NOT_IN_HEADER = frozenset({"log", "out", "json", "launch", "rank_timeout_s", "check_ranks"})
"""Options that change nothing about what is served: equal runs give equal logs, however they are launched."""

StreamsFactory = Callable[[RunConfig, int], Streams]


@dataclass(frozen=True, slots=True)
class RankResult:
    """What one rank reports."""

    rank: int
    served: Served
    counters: Counters
    transfer: TransferCounters
    verdict: Verdict
    ticks: int
    collectives: int
    """Reductions that this rank took part in, counted at the port."""
    checks: int
    leaks: int
    """Findings of the checker at the end; one during the run ends it."""
    log: Path | None
    waits: int = 0
    """Reductions that this rank waited for as a process, and how long that kept its scheduler: in all, and at most (seconds)."""
    blocked_s: float = 0.0
    longest_s: float = 0.0
    digests: int = 0
    """Ticks at which this rank has compared the ranks' digests."""
    quarantined: str | None = None
    """Why its host tier was given up."""
    broken: str | None = None
    """Why it ended before everything was served."""
    gone: str | None = None
    """Which pages were lost with that."""


class RunFailed(RuntimeError):
    """A rank ended with an error; the text names it. ``kind``: "failed", "broken invariant", or "unusable" input."""

    def __init__(self, text: str, kind: str = "failed") -> None:
        super().__init__(text)
        self.kind = kind


def kind_of(error: BaseException) -> str:
    """What sort of trouble an error is, see :class:`RunFailed`."""
    if isinstance(error, EventLogError):
        return "unusable"
    return "broken invariant" if isinstance(error, InvariantBroken) else "failed"


def cache_config(config: RunConfig) -> CacheConfig:
    """The engine's part of a run's configuration."""
    payloads = [("target", config.layers)]
    if config.draft_layers:
        payloads.append(("draft", config.draft_layers))
    return CacheConfig(
        page_size=config.page_size,
        cp_size=config.owners,
        kv_replicated=config.kv_replicated,
        usable_pages=config.device_pages,
        payloads=tuple(payloads),
        host_slots=config.host_tokens_per_rank,
        policy=WritePolicy(config.policy),
        eviction_policy=config.eviction_policy,
        reclaim_device_valid=config.reclaim_device_valid,
        overlap=config.overlap,
        selective_hits=config.selective_hits,
        max_deferral_ticks=config.max_deferral_ticks,
        max_retries=config.max_retries,
        load_back_threshold=config.load_back_threshold,
        write_back_short=WriteBackShort(config.write_back_wait),
    )


def make_streams(config: RunConfig, rank: int) -> Streams:
    """Streams of one rank: real threads, CUDA streams, or a virtual clock with an order of completion of its own."""
    match config.streams:
        case "threads":
            return ThreadStreams()
        case "cuda":
            return CudaStreams()
    return VirtualStreams(seed=config.seed * 1009 + rank, jitter=JITTER)


class CountingReducer:
    """Counts what goes through a reducer, so that the number of collectives is measured where they are, not where they are meant."""

    def __init__(self, reducer: Reducer) -> None:
        self._reducer = reducer
        self.issued = 0

    def issue(self, count: int, first_failed: int) -> None:
        """See :class:`~cphicache.agree.port.Reducer`."""
        self.issued += 1
        self._reducer.issue(count, first_failed)

    def wait(self) -> tuple[int, int]:
        """See :class:`~cphicache.agree.port.Reducer`."""
        return self._reducer.wait()


class RankWorld:
    """One rank: pools, transfer, engine, model and scheduler, wired."""

    def __init__(
        self,
        config: RunConfig,
        rank: int,
        requests: list[TraceRequest],
        reducer: Reducer,
        *,
        streams: Streams,
        faults: CopyFaults | None = None,
        on_tick: Callable[[Scheduler], None] | None = None,
        on_done: Callable[[Job], None] | None = None,
        digests: DigestCheck | None = None,
    ) -> None:
        self.rank = rank
        self.owner = 0 if config.kv_replicated else rank
        self.streams = streams
        self.checks = 0
        self._checking = config.verify != "off"  # a check looks at every node; the one at the end is always made
        self.reducer = CountingReducer(reducer)
        self._on_tick = on_tick
        self._observe: Callable[[], None] | None = None
        self._watch: Callable[[Scheduler], None] | None = None
        self._digests = digests
        self._digest_ticks = config.check_ranks
        self._digested_tick = 0
        self._leaks = 0
        self._broken: str | None = None
        self._gone: str | None = None
        self.log: EventLog | None = None
        self.log_path = None if config.log is None else rank_log_path(config.log, rank, config.cp_size)
        self._memory = HostMemory.for_device(config.device_type)
        try:
            self._wire(config, requests, faults, on_done or _ignore)
        except BaseException:
            self.close()
            raise

    def _wire(
        self, config: RunConfig, requests: list[TraceRequest], faults: CopyFaults | None, on_done: Callable[[Job], None]
    ) -> None:
        engine_config = cache_config(config)
        layout = CpSharedKVLayout(config.page_size, config.owners, self.owner)
        slots = layout.physical_pages_total(config.device_pages) * config.page_size
        self.device_pools, self.host_pools = make_pools(
            config, engine_config.payloads, slots, config.host_tokens_per_rank, memory=self._memory
        )
        rate = self.device_pools["target"].shape.layer_bytes / (COMPUTE_US_PER_TOKEN * COPY_OVER_COMPUTE * config.owners)
        self.transfer = RankTransfer(
            layout,
            self.device_pools,
            self.host_pools,
            self.streams,
            io_backend=config.backend,
            d2h_bytes_per_us=rate,
            h2d_bytes_per_us=rate,
            faults=faults,
        )
        self.log = _open_log(config, self.rank, self.log_path)
        self.cache = CpHiRadixCache(engine_config, self.transfer, self.reducer, self.log)
        reference = ReferenceKV(config.seed)
        self.verdict = Verdict()
        model = ReferenceModel(
            layout, self.device_pools, self.streams, reference, self.verdict, rank=self.rank, stores=config.verify != "off"
        )
        self.scheduler = Scheduler(
            config,
            self.cache,
            model,
            self.streams,
            make_jobs(config, requests, reference),
            on_tick=self._after_tick,
            on_done=on_done,
        )

    def run(self) -> RankResult:
        """Serve everything and prove that nothing is left.

        Raises :class:`GroupBroken` when the ranks cannot go on together; then the backups have been shut down through the normal release
        path, and :meth:`result` says what is left.
        """
        try:
            try:
                self.scheduler.run()
            except GroupBroken as broken:
                self._wind_down(broken)
                raise
            self._leaks = len(check_quiet(self.census()))
            if self._digests is not None:
                self._digests.finish()
        finally:
            self.close()
        return self.result()

    def close(self) -> None:
        """Let copies end, give the host memory back, and close the log, each even if one before it fails. Idempotent; :meth:`run` does
        it when it ends."""
        with ExitStack() as ending:
            if self.log is not None:
                ending.callback(self.log.close)
            ending.callback(self._memory.close)
            ending.callback(self.streams.close)

    def _wind_down(self, broken: GroupBroken) -> None:
        self._broken = str(broken)
        if broken.ranks and not isinstance(broken, Excluded):
            self._gone = gone_text(self.cache, broken.ranks)
        self.cache.quarantine(self._broken)
        self.scheduler.abandon("group_broken")
        self._leaks = len(check_quiet(self.census()))
        if self._digests is not None:
            self._digests.finish()

    def result(self) -> RankResult:
        """What this rank has to report; :meth:`run` has ended."""
        return RankResult(
            self.rank,
            self.scheduler.served,
            self.cache.counters,
            self.transfer.counters,
            self.verdict,
            self.scheduler.tick,
            self.reducer.issued,
            self.checks,
            self._leaks,
            self.log_path,
            digests=0 if self._digests is None else self._digests.compared,
            quarantined=self.cache.quarantined,
            broken=self._broken,
            gone=self._gone,
        )

    def _after_tick(self, scheduler: Scheduler) -> None:
        if self._checking and scheduler.tick % CHECK_TICKS == 0:
            require(self.census())
            self.checks += 1
        # The last call of a run comes with the tick of the one before it.
        if self._digests is not None and scheduler.tick % self._digest_ticks == 0 and scheduler.tick > self._digested_tick:
            self._digested_tick = scheduler.tick
            self._digests.post(scheduler.tick, self.cache.digest())
        if self._on_tick is not None:
            self._on_tick(scheduler)
        if self._observe is not None:
            self._observe()
        if self._watch is not None:
            self._watch(scheduler)

    def watch_with(self, on_tick: Callable[[Scheduler], None]) -> None:
        """Let ``on_tick`` hear of this rank's ticks, in its thread and after everything else. What it raises ends the rank."""
        self._watch = on_tick

    def observe_with(self, metrics: CacheMetrics, token_bytes: int) -> None:
        """Let ``metrics`` watch this rank."""
        metrics.watch(
            self.rank,
            self.cache,
            lambda: self.transfer.counters,
            token_bytes=token_bytes,
            tokens=self.scheduler.served,
            log=self.log,
        )
        self._observe = partial(metrics.tick, self.rank)

    def census(self) -> Census:
        """What the outside checker looks at, between any two calls of the engine."""
        return take_census(self.cache, self.scheduler.rows, self.transfer.free_slots(), self.owner)


def run_world(
    config: RunConfig,
    requests: list[TraceRequest],
    *,
    on_done: Callable[[Job], None] | None = None,
    on_tick: Callable[[Scheduler], None] | None = None,
    streams: StreamsFactory = make_streams,
    faults: Mapping[int, CopyFaults] | None = None,
    metrics: CacheMetrics | None = None,
    on_world: Callable[[RankWorld], None] | None = None,
) -> list[RankResult]:
    """Run all ranks to the end and return their results in rank order.

    ``on_done`` and ``on_tick`` hear of rank 0 only; ``metrics`` watches all ranks, and ``on_world`` is given each rank's world in its own
    thread before it runs. Raises :class:`RunFailed` with the first error of any rank. An interrupt ends every rank after its tick, and
    is raised when all have ended: their logs are whole lines.
    """
    config = sized_for(config, requests)
    group = InProcessGroup(config.cp_size, config.rank_timeout_s)
    board = LocalBoard()
    begin, interrupted = Event(), Event()
    ended = [Event() for _ in range(config.cp_size)]
    results: list[RankResult | None] = [None] * config.cp_size
    errors: list[tuple[int, BaseException]] = []

    def after_tick(rank: int, scheduler: Scheduler) -> None:
        if interrupted.is_set():
            raise GroupBroken("interrupted")
        if rank == 0 and on_tick is not None:
            on_tick(scheduler)

    def serve(rank: int) -> None:
        try:
            begin.wait()
            if interrupted.is_set():
                raise GroupBroken("interrupted")
            reducer = SingleReducer() if config.cp_size == 1 else group.member(rank)
            world = RankWorld(
                config,
                rank,
                requests,
                reducer,
                streams=streams(config, rank),
                faults=None if faults is None else faults.get(rank),
                on_tick=partial(after_tick, rank),
                on_done=on_done if rank == 0 else None,
                digests=DigestCheck(board, rank, config.cp_size, StateDigest._fields) if config.check_ranks else None,
            )
            with closing(world):
                if metrics is not None:
                    world.observe_with(metrics, sum(kv_shape(config, n).token_bytes for _, n in cache_config(config).payloads))
                if on_world is not None:
                    on_world(world)
                results[rank] = world.run()
        except BaseException as error:  # whatever ends a rank must end the others too, and is raised below
            errors.append((rank, error))
            group.break_off(f"rank {rank} ended: {type(error).__name__}: {error}")
        finally:
            ended[rank].set()

    threads = [Thread(target=serve, args=(rank,), name=f"rank{rank}", daemon=True) for rank in range(config.cp_size)]
    try:
        for thread in threads:
            thread.start()
        begin.set()
        for event in ended:  # not by join(): interrupted, it takes a running thread for an ended one (Python before 3.13)
            while not event.wait(0.2):
                pass
    except BaseException:  # an interrupt, or a thread that cannot be started
        interrupted.set()
        begin.set()
        group.break_off("interrupted")
        raise
    finally:
        for thread in threads:
            if thread.ident is not None:  # else it never starts, or finds that all is over and makes nothing
                thread.join()
    if errors:
        rank, error = next((item for item in errors if not isinstance(item[1], GroupBroken)), errors[0])
        raise RunFailed(f"rank {rank}: {type(error).__name__}: {error}", kind_of(error)) from error
    return [result for result in results if result is not None]


def _open_log(config: RunConfig, rank: int, path: Path | None) -> EventLog | None:
    if path is None or config.log_level == "off":
        return None
    header = {name: value for name, value in asdict(config).items() if name not in _NOT_IN_HEADER}
    header["token_layer_bytes"] = {name: kv_shape(config, layers).layer_bytes for name, layers in cache_config(config).payloads}
    header["trace"] = None if config.trace is None else config.trace.name
    wall_clock = None if config.streams == "virtual" else time.time
    return EventLog(path, rank=rank, level=Level[config.log_level.upper()], wall_clock=wall_clock, header=header)


def _ignore(job: Job) -> None:
    """Nobody asked."""
