"""A scheduler of a few lines that makes legal calls of the cache out of pairs of small integers, for random histories."""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from cphicache.engine import CacheConfig, CpHiRadixCache
from cphicache.spaces.types import LogicalPage
from tests.engine_fakes import FakeTransfer

LAYERS = 2
Step = tuple[str, int]


def small_config(**options: Any) -> CacheConfig:
    """12 device pages of 2 tokens and 4 host pages on each of 2 ranks; two target layers and one draft layer."""
    small: dict[str, Any] = {
        "page_size": 2,
        "cp_size": 2,
        "usable_pages": 12,
        "payloads": (("target", LAYERS), ("draft", 1)),
        "host_slots": 8,
        "load_back_threshold": 2,
        "max_deferral_ticks": 2,
    }
    return CacheConfig(**(small | options))


class Loopback:
    """The reducer of a group of one rank."""

    def __init__(self) -> None:
        self.sample: tuple[int, int] | None = None

    def issue(self, count: int, first_failed: int) -> None:
        assert self.sample is None
        self.sample = (count, first_failed)

    def wait(self) -> tuple[int, int]:
        assert self.sample is not None
        sample, self.sample = self.sample, None
        return sample


@dataclass
class Running:
    tokens: tuple[int, ...]
    row: list[LogicalPage]


class SmallScheduler:
    """One batch at a time; requests are chunked, deferred, aborted and parked as the cache says. Copies end when ``tick`` says so."""

    STEPS = ("tick", "admit", "chunk", "forward", "results", "finish", "abort", "evict", "copy_fails", "no_slots", "reset", "flush")

    def __init__(self, config: CacheConfig, local: FakeTransfer | None = None) -> None:
        self.config = config
        self.local = FakeTransfer(config) if local is None else local
        self.local.hold()
        self.reducer = Loopback()
        self.cache = CpHiRadixCache(config, self.local, self.reducer)
        self.running: dict[str, Running] = {}
        self.parked: list[str] = []
        self.waiting: dict[str, tuple[int, ...]] = {}
        self.batch: list[str] = []
        self.batch_id = 0
        self.next_rid = 0
        self.forwarding = False

    # -- all but the logical half ---------------------------------------------------------------------------------------------
    def save(self) -> dict[str, Any]:
        """Everything around the logical half, the local half and the reducer included."""
        around = {name: value for name, value in vars(self).items() if name not in {"cache", "config"}}
        return deepcopy(around)

    def load(self, around: dict[str, Any]) -> None:
        around = deepcopy(around)
        for name in ("local", "reducer"):  # the cache holds these very objects
            kept, loaded = getattr(self, name), around.pop(name)
            for field in getattr(type(loaded), "__slots__", vars(loaded)):
                setattr(kept, field, getattr(loaded, field))
        for name, value in around.items():
            setattr(self, name, value)

    # -- steps ------------------------------------------------------------------------------------------------------------------
    def run(self, steps: Iterable[Step]) -> list[Any]:
        return [self.step(name, arg) for name, arg in steps]

    def step(self, name: str, arg: int) -> Any:
        """Take a step; returns all that the cache answered, asked of its port and reported as events."""
        done = len(self.local.calls)
        answer = getattr(self, name)(arg)
        return name, answer, self.local.calls[done:], self.cache.take_events()

    def tick(self, arg: int) -> Any:
        flying = self.local.in_flight()
        if arg % 4 == 1:
            self.local.finish_all()
        elif arg % 4 == 2 and flying:
            self.local.finish(flying[0])
        elif arg % 4 == 3 and flying:
            self.local.fail(flying[0])
        report = self.cache.begin_tick()
        for rid in (*report.inserted, *report.dropped):
            self.parked.remove(rid)
        for rid in report.poisoned:
            self._end(rid, "poisoned")
        return report

    def admit(self, arg: int) -> Any:
        if self.forwarding:
            return None
        rid = next((rid for rid in self.waiting if not self.cache.is_waiting(rid)), None)
        if rid is None:
            rid, self.next_rid = f"r{self.next_rid}", self.next_rid + 1
            pages = 1 + arg % 5
            tokens = tuple(arg >> (3 + page) & 1 for page in range(pages) for _ in range(self.config.page_size))
        else:
            tokens = self.waiting.pop(rid)
        found = self.cache.prepare(rid, self.cache.key(tokens[: -self.config.page_size]), self.cache.key(tokens))
        if found is None:
            self.waiting[rid] = tokens
            return "deferred"
        row, node = list(found.device_pages), found.device_node
        if found.host_nodes:
            answer = self.cache.load_back(rid, found, len(tokens) - len(row) * self.config.page_size)
            if answer.node is not None:
                row, node = row + answer.pages, answer.node
        self.cache.admit(rid, node, len(row))
        self.running[rid] = Running(tokens, row)
        return list(row), self._grow(rid, 1 + arg % 3)

    def chunk(self, arg: int) -> Any:
        more = [rid for rid, request in self.running.items() if rid not in self.batch and not self._is_whole(request)]
        return self._grow(more[arg % len(more)], 1 + arg % 3) if more and not self.forwarding else None

    def forward(self, arg: int) -> Any:
        """Begin the forward: no layer or several may have been stored when the next step comes."""
        if self.forwarding or not self.batch:
            return None
        self.forwarding = True
        producer = self.cache.start_loads()
        for layer in range(LAYERS):
            self.cache.wait_layer(self.batch_id, "target", layer)
        for layer in range(arg % (LAYERS + 1)):
            self.cache.layer_stored(self.batch_id, 0, layer)
        return producer

    def results(self, arg: int) -> Any:
        """End the forward (without the draft's, rarely) and insert; a whole request is finished, or goes on decoding."""
        if not self.forwarding:
            return None
        self.forwarding = False
        for payload in range(1 if arg % 8 == 7 else 2):
            self.cache.end_payload(self.batch_id, payload)
        self.cache.end_forward(self.batch_id)
        self.batch_id += 1
        answers: list[Any] = []
        for rid in self.batch:
            request = self.running[rid]
            if self._is_whole(request) and arg % 2:
                answers.append(self._finish(rid))
            else:
                chunked = not self._is_whole(request)
                pages = self.cache.insert_unfinished(rid, self._key(request), request.row, chunked=chunked)
                if pages is not None:  # not the whole row where a payload was not stored
                    request.row[: len(pages)] = pages
                answers.append(pages)
        self.batch.clear()
        return answers

    def finish(self, arg: int) -> Any:
        idle = [rid for rid, request in self.running.items() if rid not in self.batch and self._is_whole(request)]
        return self._finish(idle[arg % len(idle)]) if idle else None

    def abort(self, arg: int) -> Any:
        known = [*self.running, *self.parked, *self.waiting]
        if known:
            self._end(known[arg % len(known)], "abort")

    def evict(self, arg: int) -> Any:
        return self.cache.evict(arg % 16)

    def copy_fails(self, arg: int) -> None:
        self.local.fail_copy_next = arg % 2 == 0

    def no_slots(self, arg: int) -> None:
        self.local.fail_reserve_next = arg % 2 == 0

    def reset(self, arg: int) -> None:
        if arg % 4 == 0:
            self.cache.reset_backups()

    def flush(self, arg: int) -> Any:
        if self.running or arg % 2:
            return None
        self.cache.flush()
        self.parked.clear()
        return "flushed"

    def end(self) -> None:
        """Abort everybody, forget everything; nothing may be left."""
        for rid in [*self.running, *self.parked, *self.waiting]:
            self._end(rid, "abort")
        self.cache.flush()
        state = self.cache.state
        assert state.alloc.available_size() == self.config.usable_pages * self.config.page_size
        assert state.ledger.least_free() == self.config.host_slots
        assert self.local.free_slots() == dict.fromkeys(self.config.payload_names, self.config.host_slots)
        assert not any((state.pending, state.loads, state.numbered, state.requests, state.waiters, state.waiting_for))
        assert state.host_only_need == [0] * self.config.cp_size

    # -- inner parts --------------------------------------------------------------------------------------------------------------
    def _key(self, request: Running) -> Any:
        return self.cache.key(request.tokens[: len(request.row) * self.config.page_size])

    def _is_whole(self, request: Running) -> bool:
        return len(request.row) * self.config.page_size == len(request.tokens)

    def _grow(self, rid: str, pages: int) -> Any:
        request = self.running[rid]
        pages = min(pages, len(request.tokens) // self.config.page_size - len(request.row))
        fresh = self.cache.alloc(pages, request.row[-1] if request.row else None)
        if fresh is None:
            self._end(rid, "no_pages")
            return None
        request.row.extend(fresh)
        self.batch.append(rid)
        return fresh, self.cache.reserve(rid, self.batch_id, self._key(request), request.row)

    def _finish(self, rid: str) -> bool:
        request = self.running.pop(rid)
        done = self.cache.finish(rid, self._key(request), request.row)
        if not done:
            self.parked.append(rid)
        return done

    def _end(self, rid: str, reason: str) -> None:
        request = self.running.pop(rid, None)
        self.cache.end_request(rid, [] if request is None else request.row, reason)
        if rid in self.batch:
            self.batch.remove(rid)
        if rid in self.parked:
            self.parked.remove(rid)
        self.waiting.pop(rid, None)
