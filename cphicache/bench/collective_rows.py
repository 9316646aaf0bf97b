"""How often ranks have to agree, and how long a scheduler waits for it."""

from __future__ import annotations

import multiprocessing
import time
from multiprocessing.connection import Connection
from threading import Event

from cphicache.agree.distributed import DistributedReducer, connect_store, host_store, make_group
from cphicache.agree.membership import Membership
from cphicache.agree.port import NO_FAILURE
from cphicache.bench.engine_rows import BATCH, Engine
from cphicache.bench.harness import Effort, Measured, Spread
from cphicache.bench.ports import NoStreams

RANKS = 2
TICKS = 200
FORWARD_S = 0.005
"""What a tick does meanwhile: a scheduler sleeps so long on its forward."""
TIMEOUT_S = 60.0


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
    """Two processes over gloo: seconds waited for a reduction that was issued a tick before, over those for one waited for at once."""
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
        waited: list[list[tuple[float, float]]] = [receiver.recv() for receiver in results]
    finally:
        for process in ranks:
            process.join(TIMEOUT_S)
            if process.is_alive():
                process.kill()
    rounds = [tuple(sum(side) / RANKS for side in zip(*of_round, strict=True)) for of_round in zip(*waited, strict=True)]
    shares = Spread.of([later / at_once for later, at_once in rounds])
    each = [Spread.of([side[place] for side in rounds]).median / ticks * 1e6 for place in (0, 1)]
    return Measured(
        shares, "x", effort.rounds, {"a tick later us": round(each[0], 2), "at once us": round(each[1], 2), "ticks": ticks}
    )


def _rank(rank: int, port: int, ticks: int, rounds: int, results: Connection) -> None:
    store = connect_store("127.0.0.1", port, "bench", TIMEOUT_S)
    membership = Membership(lambda: connect_store("127.0.0.1", port, "bench", TIMEOUT_S), rank, RANKS, TIMEOUT_S, Event())
    reducer = DistributedReducer(make_group(store, rank, RANKS, TIMEOUT_S), membership)
    found = []
    for _ in range(rounds):
        sides = []
        for forward_between in (True, False):
            before = reducer.blocked_s
            for tick in range(ticks):
                reducer.issue(tick, NO_FAILURE)
                if forward_between:
                    time.sleep(FORWARD_S)
                    reducer.wait()
                else:
                    reducer.wait()
                    time.sleep(FORWARD_S)
            sides.append(reducer.blocked_s - before)
        found.append((sides[0], sides[1]))
    results.send(found)
    membership.close()
