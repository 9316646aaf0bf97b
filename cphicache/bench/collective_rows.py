"""How often ranks have to agree, and how long a scheduler waits for it."""

from __future__ import annotations

import multiprocessing
import time
from multiprocessing.connection import Connection
from threading import Event
from typing import TypeAlias

import torch
import torch.distributed as dist

from cphicache.agree.distributed import DistributedReducer, connect_store, host_store, make_group
from cphicache.agree.membership import Membership
from cphicache.agree.port import NO_FAILURE
from cphicache.bench.engine_rows import BATCH, Engine
from cphicache.bench.harness import Effort, Measured, Spread
from cphicache.bench.ports import NoStreams

RANKS = 2
TICKS = 40
FORWARD_S = 0.03
"""A decode step, as the studies have it. The GPU computes and the scheduler's thread sleeps on it, so that gloo's own thread has its
core; what makes a reduction late is mostly the other rank, which comes to its tick later."""
TIMEOUT_S = 60.0
Sides: TypeAlias = tuple[list[float], list[float], list[float]]
"""Microseconds of each tick of a round: waits for the reduction of the tick before, blocking calls, issues."""


def collectives(effort: Effort) -> Measured:
    """Reductions of an engine: those of reservations and of ticks with nothing in flight must be none, which is checked."""
    engine = Engine(NoStreams(), overlap=False)
    counters = engine.cache.counters
    for _ in range(effort.size(16)):
        before = counters.reductions
        for _ in range(4):
            engine.cache.begin_tick()
        engine.reserve()
        assert counters.reductions == before, "idle ticks and reservations ask nobody"
        engine.cache.end_payload(BATCH, 0)
        engine.end()
    value = counters.reductions / counters.ticks_in_flight
    return Measured(
        Spread(value, value, value), "x", 1, {"to reserve": 0, "in idle ticks": 0, "in flight": counters.ticks_in_flight}
    )


def blocked_share(effort: Effort) -> Measured:
    """Two processes over gloo: seconds in the wait for a reduction that was issued a forward before, over those in the same reduction as
    one blocking call, which is what SGLang's tick makes. Everything that a wait takes is counted, the wait for a rank that comes late
    included. Issuing blocks nobody; what it takes is among the details."""
    context = multiprocessing.get_context("spawn")
    hosted = host_store("127.0.0.1", "bench", TIMEOUT_S)
    ticks = effort.size(TICKS, least=5)
    results, senders = zip(*(context.Pipe(duplex=False) for _ in range(RANKS)), strict=True)
    ranks = [context.Process(target=_rank, args=(rank, hosted.port, ticks, effort.rounds, senders[rank])) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    try:
        for sender in senders:
            sender.close()
        waited: list[list[Sides]] = [receiver.recv() for receiver in results]
    finally:
        for process in ranks:
            process.join(TIMEOUT_S)
            if process.is_alive():
                process.kill()
    rounds = [[[us for rank in of_round for us in rank[side]] for side in range(3)] for of_round in zip(*waited, strict=True)]
    shares = Spread.of([sum(later) / sum(blocking) for later, blocking, _ in rounds])
    details: dict[str, float] = {"ticks": ticks, "forward us": FORWARD_S * 1e6}
    for side, name in enumerate(("a forward later", "blocking call", "issue")):
        every = sorted(us for of_round in rounds for us in of_round[side])
        details |= {
            f"{name} us": round(sum(every) / len(every), 2),
            f"{name}, median us": round(every[len(every) // 2], 2),
            f"{name}, longest us": round(every[-1], 2),
        }
    return Measured(shares, "x", effort.rounds, details)


def _rank(rank: int, port: int, ticks: int, rounds: int, results: Connection) -> None:
    store = connect_store("127.0.0.1", port, "bench", TIMEOUT_S)
    membership = Membership(lambda: connect_store("127.0.0.1", port, "bench", TIMEOUT_S), rank, RANKS, TIMEOUT_S, Event())
    group = make_group(store, rank, RANKS, TIMEOUT_S)
    reducer = DistributedReducer(group, membership)
    found: list[Sides] = []
    for _ in range(rounds):
        later_us, blocking_us, issue_us = [], [], []
        for tick in range(ticks):
            start = time.monotonic()
            reducer.issue(tick, NO_FAILURE)
            issue_us.append((time.monotonic() - start) * 1e6)
            time.sleep(FORWARD_S)
            before = reducer.blocked_s
            reducer.wait()
            later_us.append((reducer.blocked_s - before) * 1e6)
        for tick in range(ticks):
            time.sleep(FORWARD_S)
            start = time.monotonic()
            sample = torch.tensor([tick, NO_FAILURE])
            dist.all_reduce(sample, op=dist.ReduceOp.MIN, group=group)
            sample.tolist()
            blocking_us.append((time.monotonic() - start) * 1e6)
        found.append((later_us, blocking_us, issue_us))
    results.send(found)
    membership.close()
