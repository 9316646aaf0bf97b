"""Runs a drawn world on the classes that serve, and judges what came of it by accounts that are kept outside of them.

Two phases. While requests are left, planned faults strike. After the last one nothing fails any more, and everything that is in
flight must come to rest, which is checked down to the last slot, lock and hold.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from hashlib import sha256

from cphicache.agree.digests import RanksDiverged
from cphicache.agree.port import GroupBroken
from cphicache.check.conservation import InvariantBroken, check_quiet, require
from cphicache.run.config import RunConfig
from cphicache.run.jobs import load_requests
from cphicache.run.model import Mismatch
from cphicache.run.report import summarize
from cphicache.run.scheduler import NoProgress, Scheduler
from cphicache.run.simulate.drawn import Action, DrawnWorld, Fault
from cphicache.run.simulate.outcome import Code, Outcome
from cphicache.run.simulate.planted import Canary, plant_in_cache, shape_streams
from cphicache.run.world import RankResult, RankWorld, RunFailed, run_world
from cphicache.transfer.faults import CopyFaults, Direction
from cphicache.transfer.port import LoadItem, OpKey
from cphicache.transfer.streams.port import Streams
from cphicache.transfer.streams.threads import ThreadStreams
from cphicache.transfer.streams.virtual import VirtualStreams

MOST_TICKS = 12_000
"""A world that is not done by then makes no progress. Most take below 100 ticks; long tails of slow copies take some thousand."""
DEFAULT_CPU_S = 60.0
"""Of processor time: a busy machine makes no world fail."""
_MOST_EVIDENCE = 1_000_000
_PINNED_TOKENS = 64
_THREAD_DELAY_US = 300.0


class PhasedFaults(CopyFaults):
    """Faults of the first phase: none strikes once :attr:`over` is set."""

    __slots__ = ("over",)

    def __init__(self, planned: Sequence[Fault]) -> None:
        super().__init__()
        self.over = False
        for fault in planned:
            if fault.where == "reserve":
                self.fail_reserve(fault.payload, nth=fault.nth)
            else:
                self.fail_copy(fault.where, fault.payload, fault.layer, nth=fault.nth)

    def check_copy(self, direction: Direction, payload: str, layer: int, job: OpKey | int) -> None:
        """See :class:`~cphicache.transfer.faults.CopyFaults`."""
        if not self.over:
            super().check_copy(direction, payload, layer, job)

    def check_reserve(self, payload: str, op: OpKey) -> None:
        """See :class:`~cphicache.transfer.faults.CopyFaults`."""
        if not self.over:
            super().check_reserve(payload, op)


class FailedLoads:
    """An account of which nodes each load-back restores, kept beside one rank's transfer.

    A load-back that fails leaves its nodes' device pages unwritten until all ranks have agreed on it; whoever reads them meanwhile is
    retracted. Wrong bytes there are what the fault means (R25), wrong bytes anywhere else are not.
    """

    def __init__(self, world: RankWorld, faults: PhasedFaults) -> None:
        self._verdict = world.verdict
        self._faults = faults
        self._nodes: dict[int, set[int]] = {}
        transfer = world.transfer
        queue_load, split_node = transfer.queue_load, transfer.split_node

        def queued(load: int, items: Sequence[LoadItem]) -> None:
            queue_load(load, items)
            self._nodes[load] = {item.node for item in items}

        def split(node: int, head: int, head_pages: int) -> None:
            split_node(node, head, head_pages)
            for nodes in self._nodes.values():
                if node in nodes:
                    nodes.add(head)

        for name, listener in (("queue_load", queued), ("split_node", split)):
            setattr(transfer, name, listener)

    def explains(self, mismatch: Mismatch) -> bool:
        """Was that read of a node whose load-back failed here?"""
        failed = [call.job for call in self._faults.fired if call.direction == "h2d"]
        return any(isinstance(load, int) and mismatch.node in self._nodes.get(load, ()) for load in failed)

    def unexplained(self) -> list[str]:
        """Wrong reads that no failed load-back explains."""
        return [mismatch.describe() for mismatch in self._verdict.evidence if not self.explains(mismatch)]


class _Watcher:
    """Looks at one rank after its ticks, in its thread."""

    def __init__(self, drawn: DrawnWorld, world: RankWorld, faults: PhasedFaults, requests: int, deadline_cpu_s: float) -> None:
        self.world = world
        self.faults = faults
        self.loads = FailedLoads(world, faults)
        self.checks = 0
        self.trail = sha256()
        self._drawn = drawn
        self._requests = requests
        self._deadline_cpu_s = deadline_cpu_s
        self._due = sorted(drawn.actions)
        world.verdict.kept = _MOST_EVIDENCE
        world.watch_with(self._after_tick)

    def _after_tick(self, scheduler: Scheduler) -> None:
        served, tick = scheduler.served, scheduler.tick
        if served.finished + served.aborted + served.refused >= self._requests:
            self.faults.over = True
        if tick % self._drawn.check_ticks == 0:
            self._look()
        if tick > MOST_TICKS or time.process_time() > self._deadline_cpu_s:
            raise NoProgress(f"tick {tick}: not done, {len(self.world.cache.state.pending)} backups pending, served {served}")
        if self._drawn.lost is not None and (self.world.rank, tick) == self._drawn.lost:
            raise GroupBroken(f"rank {self.world.rank} ends after tick {tick}, as planned")
        while self._due and self._due[0].tick <= tick and not self.faults.over:
            self._act(self._due.pop(0))
            self._look()

    def _look(self) -> None:
        require(self.world.census())
        self.trail.update(repr(self.world.cache.digest()).encode())
        self.checks += 1

    def _act(self, action: Action) -> None:
        cache = self.world.cache
        match action.what:
            case "reset_backups":
                cache.reset_backups()
            case "evict":
                cache.evict(action.amount)
            case "pin":
                node = next((node for node in cache.state.tree.nodes() if not node.is_root), None)
                if node is not None:
                    cache.pin_host(node.key, action.amount)

    def fingerprint(self) -> str:
        """Of what the engine decided, and when."""
        self.trail.update(repr((self.world.scheduler.served, self.world.cache.counters, self.world.verdict)).encode())
        return self.trail.hexdigest()


def simulate(drawn: DrawnWorld, *, canary: Canary | None = None, cpu_s: float = DEFAULT_CPU_S) -> Outcome:
    """Run a world to its end, and say what came of it. Raises nothing but what a caller's interrupt raises."""
    config = drawn.config
    requests = load_requests(config)
    faults = {rank: PhasedFaults([fault for fault in drawn.faults if fault.rank == rank]) for rank in range(config.cp_size)}
    watchers: dict[int, _Watcher] = {}
    deadline_cpu_s = time.process_time() + cpu_s

    def watch(world: RankWorld) -> None:
        plant_in_cache(canary, world.cache)
        watchers[world.rank] = _Watcher(drawn, world, faults[world.rank], len(requests), deadline_cpu_s)

    def streams(config: RunConfig, rank: int) -> Streams:
        seed = config.seed * 1009 + rank
        if config.streams == "threads":
            return shape_streams(ThreadStreams(seed, _THREAD_DELAY_US), 1.0, canary)
        return shape_streams(VirtualStreams(seed, drawn.jitter), drawn.slowness[rank], canary)

    try:
        results = run_world(config, requests, streams=streams, faults=faults, on_world=watch)
    except RunFailed as failed:
        cause = failed.__cause__
        if drawn.lost is None or not isinstance(cause, GroupBroken) or "as planned" not in str(cause):
            return _failure(cause, str(failed))
        results = [watchers[rank].world.result() for rank in sorted(watchers)]
    return _judge(config, results, [watchers[rank] for rank in sorted(watchers)], lost=drawn.lost is not None)


def _failure(cause: BaseException | None, text: str) -> Outcome:
    name = type(cause).__name__
    match cause:
        case InvariantBroken():
            return Outcome(Code.BROKEN_INVARIANT, str(cause.findings[0].rule), text)
        case NoProgress():
            return Outcome(Code.NO_PROGRESS, name, text)
        case GroupBroken():
            return Outcome(Code.NO_PROGRESS, name, text)  # a rank that did not come in time
        case RanksDiverged() | AssertionError():
            return Outcome(Code.BROKEN_INVARIANT, name, text)
    return Outcome(Code.CRASH, name, text)


def _judge(config: RunConfig, results: Sequence[RankResult], watchers: Sequence[_Watcher], *, lost: bool) -> Outcome:
    wrong = [line for watcher in watchers for line in watcher.loads.unexplained()]
    if wrong:
        return Outcome(Code.WRONG_BYTES, "bytes", f"{len(wrong)} wrong reads, first: {wrong[0]}")
    leaks = sum(result.leaks for result in results)
    if leaks:
        return Outcome(Code.BROKEN_INVARIANT, "left over", f"{leaks} findings at rest, first: {_first_leak(watchers)}")
    summary = summarize(config, results)
    prints = [watcher.fingerprint() for watcher in watchers]
    if not lost and not summary["ranks_agree"]:
        return Outcome(Code.BROKEN_INVARIANT, "ranks differ", "the ranks' logical figures differ")
    served = sum(summary["requests"].values())
    if not lost and served != config.requests:
        return Outcome(
            Code.BROKEN_INVARIANT, "requests", f"expected {config.requests} requests served, aborted or refused, found {served}"
        )
    return Outcome(Code.FINE, fingerprint=sha256("".join(prints).encode()).hexdigest(), seen=_seen(results, watchers))


def _first_leak(watchers: Sequence[_Watcher]) -> str:
    findings = [finding for watcher in watchers for finding in check_quiet(watcher.world.census())]
    return str(findings[0])


def _seen(results: Sequence[RankResult], watchers: Sequence[_Watcher]) -> Counter[str]:
    first = results[0]
    counters = first.counters
    fired = Counter(call.direction for watcher in watchers for call in watcher.faults.fired)
    return Counter(
        {
            "requests": first.served.finished + first.served.aborted + first.served.refused + first.served.abandoned,
            "ticks": first.ticks,
            "committed": counters.committed,
            "rolled back": sum(counters.rolled_back.values()),
            "refused": sum(counters.refused.values()),
            "host evictions": counters.host_evictions,
            "device evictions": counters.device_evictions,
            "deferred splits": counters.deferred_splits,
            "parked inserts": counters.parked_inserts,
            "duplicate binds": counters.duplicate_binds,
            "load-backs": counters.load_backs,
            "load-backs failed": counters.load_backs_failed,
            "aborted": first.served.aborted,
            "retracted": first.served.retracted,
            "D2H faults": fired["d2h"],
            "H2D faults": fired["h2d"],
            "reservation faults": sum(len(watcher.faults.fired_reserves) for watcher in watchers),
            "ranks lost": int(first.broken is not None),
            "checks": sum(watcher.checks for watcher in watchers),
            "bytes compared": sum(result.verdict.bytes_checked for result in results),
        }
    )
