"""Logs of calls that are made one by one, so that those come too which no run makes."""

from __future__ import annotations

from pathlib import Path
from random import Random
from types import TracebackType
from typing import Self

from cphicache.agree.port import Excluded, GroupBroken
from cphicache.engine import CpHiRadixCache
from cphicache.events import EventLog, Level
from cphicache.transfer.port import CopyStatus, OpKey
from tests.engine.small_scheduler import Loopback, SmallScheduler, Step, small_config
from tests.engine_fakes import FakeTransfer

FREQUENT = ("tick", "admit", "forward", "results")


class LoggedScheduler(SmallScheduler):
    """Its log is complete when the context ends."""

    def __init__(self, path: Path) -> None:
        super().__init__(small_config(), FakeTransfer(small_config()))
        self.path = path
        self.log = EventLog(path, rank=0, level=Level.OPS, wall_clock=None, header={})
        self.reducer = BreakingLoopback()
        self.cache = CpHiRadixCache(self.config, self.local, self.reducer, self.log)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.log.close()


class BreakingLoopback(Loopback):
    """The reducer of a rank whose group goes when it is told so."""

    breaks: GroupBroken | None = None

    def wait(self) -> tuple[int, int]:
        if self.breaks is not None:
            raise self.breaks
        return super().wait()


def random_calls(path: Path, seed: int, steps: int = 150) -> Path:
    """Legal calls drawn at random, up to a flush: copies and reservations fail, inserts park, load-backs are drained."""
    draw = Random(seed)
    names = (*(name for name in SmallScheduler.STEPS if name not in ("reset", "flush")), *FREQUENT)
    with LoggedScheduler(path) as live:
        live.run([(draw.choice(names), draw.randrange(256)) for _ in range(steps)])
        live.end()
    return path


def odd_calls(path: Path) -> Path:
    """Resets, flushes, evictions, failing copies and reservations, pins, load-backs that no prepare found, completions handed in."""
    steps: list[Step] = [
        *(("admit", 0b11010 + at * 8) for at in range(2)), ("forward", 2), ("results", 1), ("tick", 2), ("copy_fails", 0), ("no_slots", 0),
        ("admit", 37), ("forward", 1), ("results", 7), ("tick", 1), ("evict", 9), ("admit", 77), ("abort", 0), ("reset", 0), ("tick", 3),
        ("admit", 9), ("forward", 0), ("results", 1), ("tick", 1), ("evict", 15), ("admit", 12), ("tick", 0), ("flush", 0),
    ]  # fmt: skip
    with LoggedScheduler(path) as live:
        live.run(steps)
        cache = live.cache
        cache.pin_host(cache.key((1, 1, 1, 1), "tenant"), 3)
        cache.touch(cache.match_prefix(cache.key((1, 1, 1, 1), "tenant")).device_node)
        cache.agree_now()
        cache.free(cache.alloc(1, None) or [])
        live.run([("admit", 8), ("forward", 2), ("results", 1)])
        pending = next(record.key for record in cache.state.pending.values() if record.number is not None)
        live.local.finish_all()
        cache.completion(OpKey(pending.node, pending.generation + 1), CopyStatus(True, False))
        cache.completion(pending, CopyStatus(True, False))
        live.end()
        cache.quarantine("asked for")
        cache.shutdown()
    return path


def matched_without_prepare(path: Path) -> Path:
    """A caller admits what it has found on the device by itself."""
    with LoggedScheduler(path) as live:
        live.run([("admit", 11), ("forward", 2), ("results", 1), ("tick", 1), ("tick", 0)])
        cache, tokens = live.cache, (1, 1, 0, 0)
        found = cache.match_prefix(cache.key(tokens))
        assert len(found.device_pages) == 2
        cache.admit("own", found.device_node, 2)
        fresh = cache.alloc(1, found.device_pages[-1])
        assert fresh is not None
        row = [*found.device_pages, *fresh]
        cache.reserve("own", 1, cache.key((*tokens, 1, 1)), row)
        cache.end_request("own", row, "abort")
        live.end()
    return path


def load_back_without_prepare(path: Path) -> Path:
    """A caller loads back what it has found by itself, frees a page that it took too many, and ends before the load-back does."""
    with LoggedScheduler(path) as live:
        live.run([("admit", 11), ("forward", 2), ("results", 1), ("tick", 1), ("tick", 0), ("evict", 15)])
        cache, tokens = live.cache, (1, 1, 0, 0)
        found = cache.match_prefix(cache.key(tokens))
        assert found.host_nodes
        loaded = cache.load_back("own", found, len(tokens))
        assert loaded.node is not None
        cache.admit("own", loaded.node, len(loaded.pages))
        fresh = cache.alloc(2, loaded.pages[-1])
        assert fresh is not None
        cache.free(fresh[1:])
        cache.start_loads()
        live.local.finish_all()
        assert cache.confirm_loads("own")
        cache.end_request("own", [*loaded.pages, fresh[0]], "abort")
        live.end()
    return path


def lost_group(path: Path, *, excluded: bool) -> Path:
    """A backup is in flight when the reduction of the next tick finds a rank gone."""
    with LoggedScheduler(path) as live:
        live.run([("admit", 8), ("forward", 2), ("results", 1), ("tick", 0)])
        live.reducer.breaks = (Excluded if excluded else GroupBroken)("rank 1 is gone", (1,))
        try:
            live.tick(0)
        except GroupBroken:
            live.cache.shutdown()
    return path
