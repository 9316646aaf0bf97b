"""A small run that something from outside hits, and what must be left after it: nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cphicache.events import read_events
from cphicache.run.config import RunConfig
from cphicache.run.jobs import load_requests
from cphicache.run.world import RankResult, RankWorld, run_world
from cphicache.transfer.pools.memory import HostMemory
from cphicache.transfer.streams.threads import ThreadStreams
from tests.run.worlds import small

CHUNK_BYTES = 4096
HUNG_S = 120.0
"""Longest time that a test waits for what must come, before it fails instead of hanging."""


class Pins:
    """A driver that writes down what is registered, on all ranks."""

    def __init__(self) -> None:
        self.held: set[int] = set()
        self.most = 0

    def register(self, address: int, size_bytes: int) -> None:
        self.held.add(address)
        self.most = max(self.most, len(self.held))

    def unregister(self, address: int) -> None:
        self.held.remove(address)


@contextmanager
def nothing_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pins]:
    """Within this, host memory is pinned in small chunks; afterwards none of it is, and no thread of a run is alive."""
    pins = Pins()
    monkeypatch.setattr(HostMemory, "for_device", classmethod(lambda cls, device: HostMemory(pins, CHUNK_BYTES)))
    threads = set(threading.enumerate())
    yield pins
    assert not pins.held
    assert set(threading.enumerate()) <= threads


def busy(log: Path | None = None, **changed: Any) -> RunConfig:
    """Two ranks that copy on real threads, both tiers full, with aborts, retractions and chunked prompts."""
    return small(
        **{
            "requests": 12,
            "streams": "threads",
            "layers": 1,
            "device_tokens": 512,
            "host_tokens": 512,
            "load_back_threshold": 4,
            "abort_rate": 0.2,
            "retract_rate": 0.2,
            "log": log,
            "log_level": "ops" if log is not None else "off",
            **changed,
        }
    )


def run(config: RunConfig, **options: Any) -> list[RankResult]:
    return run_world(config, load_requests(config), **options)


def whole_events(log: Path, ranks: int) -> list[int]:
    """Events of each rank's log, each of which must be readable to its last line."""
    paths = [log.with_name(f"{log.stem}.rank{rank}{log.suffix}") for rank in range(ranks)] if ranks > 1 else [log]
    return [sum(1 for _ in read_events(path)) for path in paths if path.exists()]


def nth_call(
    original: Callable[..., Any],
    nth: int,
    error: BaseException,
    thread: str | None = None,
    first: Callable[[Callable[[], Any]], None] = lambda call: None,
) -> tuple[Callable[..., Any], list[int]]:
    """A function in whose ``nth`` call (on that thread) the error is raised. The list counts the calls.

    ``first`` is called before that, with the call that was asked for: it may make it, so that the error comes after its effects.
    """
    calls = [0]
    lock = threading.Lock()

    def called(*args: Any, **options: Any) -> Any:
        if thread is None or threading.current_thread().name == thread:
            with lock:
                calls[0] += 1
                hit = calls[0] == nth
            if hit:
                first(lambda: original(*args, **options))
                raise error
        return original(*args, **options)

    return called, calls


class InFlight:
    """One rank whose copies, on real threads, have all ended after each tick; from :meth:`hold` on none ends before the rank closes."""

    COPYING = ("write", "load")

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
        self.pinned: list[int] = []
        """Chunks of the rank's host memory that were pinned when what was held on each stream ended."""
        self.holding = False
        self.copies_before = 0
        """Copies that had run when the others were held."""
        self.world: RankWorld | None = None
        self._rank = rank
        self._closing = threading.Event()
        close = ThreadStreams.close

        def announced_close(streams: ThreadStreams) -> None:
            if self.world is not None and streams is self.world.streams:
                self._closing.set()
            close(streams)

        monkeypatch.setattr(ThreadStreams, "close", announced_close)

    @property
    def copies(self) -> int:
        """Copies that have run by now."""
        return 0 if self.world is None else self.world.transfer.counters.copies

    def on_world(self, world: RankWorld) -> None:
        """Each rank's copies end with its tick, so that a run takes the same calls each time."""
        world.watch_with(lambda scheduler: self._settle(world))
        if world.rank == self._rank:
            self.world = world

    def hold(self) -> None:
        """Begin what ends only when the rank closes its streams; copies that are queued later stand behind it."""
        assert self.world is not None
        self.holding = True
        self._settle(self.world)
        self.copies_before = self.copies
        for name in self.COPYING:
            self.world.streams.stream(name).submit(self._run)

    def _settle(self, world: RankWorld) -> None:
        for name in self.COPYING:
            world.streams.synchronize(world.streams.stream(name).record())

    def _run(self) -> None:
        assert self._closing.wait(HUNG_S)
        assert self.world is not None
        self.pinned.append(self.world._memory.pinned_chunks)
