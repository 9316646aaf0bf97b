"""The scheduler of one explored rank: turns events into legal calls of the engine, and says which events may come next.

It decides from logical state only, so the drivers of all ranks say the same; the explorer checks that they do.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, TypeAlias

from cphicache.engine import CpHiRadixCache, Match, WritePolicy
from cphicache.engine.canonical import Outlook
from cphicache.engine.records import Backup
from cphicache.explore.script import SHUTDOWN, TICK, RequestScript, World
from cphicache.spaces.types import LogicalPage
from cphicache.tree import Node, RadixKey

Image: TypeAlias = tuple[Any, ...]


class Phase(StrEnum):
    """Where a request is."""

    NEW = "new"
    WAITING = "waiting"
    """Deferred: its match would divide a pending node."""
    RUNNING = "running"
    PARKED = "parked"
    """Finished, its insert waits."""
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Progress:
    """A request's: ``row`` of pages; chunks ``reserved``, ``inserted``; ``stored``: bit mask of chunks whose forward has ended."""

    phase: Phase = Phase.NEW
    row: tuple[LogicalPage, ...] = ()
    reserved: int = 0
    stored: int = 0
    inserted: int = 0


@dataclass(frozen=True, slots=True)
class Forward:
    """A forward that is open: layers issued so far (of all payloads, in order) and who computes which chunk in it."""

    layers: int = 0
    members: tuple[tuple[str, int], ...] = ()


class Driver:
    """Calls one rank's engine for the requests of a world."""

    def __init__(self, world: World, cache: CpHiRadixCache) -> None:
        self._world = world
        self._cache = cache
        self._scripts = {script.rid: script for script in world.requests}
        self._layers = [(payload, layer) for payload, (_, layers) in enumerate(world.config.payloads) for layer in range(layers)]
        self._requests = {rid: Progress() for rid in self._scripts}
        self._forwards: dict[int, Forward] = {}
        self._down = False
        self._keys: dict[tuple[str, int], RadixKey] = {}
        self.deferred = False
        """Whether the last event was an admission that was put off."""
        self._calls: dict[str, Callable[[str], None]] = {
            TICK: self._tick,
            "admit": self._admit,
            "chunk": self._chunk,
            "start": lambda _: self._start(),
            "store": lambda batch: self._store(int(batch)),
            "unreported": lambda batch: self._unreported(int(batch)),
            "no_draft": lambda batch: self._end_forward(int(batch)),
            "insert": self._insert,
            "abort": self._abort,
            "evict": lambda _: self._evict(),
            "reset": lambda _: self._cache.reset_backups(),
            "flush": lambda _: self._flush(),
            SHUTDOWN: lambda _: self._shutdown(),
        }

    # -- state as data ----------------------------------------------------------------------------------------------------------
    def snapshot(self) -> Image:
        """All of it, immutable."""
        return tuple(self._requests.values()), tuple(sorted(self._forwards.items())), self._down

    def restore(self, image: Image) -> None:
        """Become what :meth:`snapshot` was asked of."""
        requests, forwards, self._down = image
        self._requests = dict(zip(self._scripts, requests, strict=True))
        self._forwards = dict(forwards)

    def canonical(self, page_name: Callable[[LogicalPage], Hashable]) -> Hashable:
        """Equal for drivers that go on alike, with the names of pages in place of their numbers."""
        requests = [
            (request.phase, tuple(map(page_name, request.row)), request.reserved, request.stored, request.inserted)
            for request in self._requests.values()
        ]
        return tuple(requests), tuple(sorted((batch, f.layers, f.members) for batch, f in self._forwards.items())), self._down

    def outlook(self) -> Outlook:
        """What may still come. A forward that is cut short by a shutdown lacks payloads too, but then its requests end with it."""
        world = self._world
        mid_prompt = frozenset(
            rid
            for rid, request in self._requests.items()
            if request.phase is Phase.RUNNING and request.reserved < len(self._scripts[rid].chunks)
        )
        inserting = any(request.phase not in (Phase.ENDED, Phase.PARKED) for request in self._requests.values())
        return Outlook(mid_prompt, world.draft_may_lack, inserting or world.config.policy is WritePolicy.WRITE_BACK)

    def rows(self) -> dict[str, tuple[LogicalPage, ...]]:
        """Rows of the running requests."""
        return {rid: request.row for rid, request in self._requests.items() if request.phase is Phase.RUNNING}

    def prompts(self) -> list[RadixKey]:
        """Keys of all requests of the world."""
        return [self._key(script, len(script.pages)) for script in self._scripts.values()]

    @property
    def is_down(self) -> bool:
        """Whether the engine was shut down."""
        return self._down

    def is_quiet(self) -> bool:
        """Whether all requests have ended and no forward is open."""
        return not self._forwards and all(request.phase is Phase.ENDED for request in self._requests.values())

    # -- events -----------------------------------------------------------------------------------------------------------------
    def events(self) -> tuple[str, ...]:
        """What may happen next, in an order of its own that is the same in every run."""
        return () if self._down else tuple(self._events())

    def perform(self, event: str) -> None:
        """Make the calls of an event that :meth:`events` has named."""
        name, _, rest = event.partition(" ")
        self.deferred = False
        self._calls[name](rest)

    def _events(self) -> Iterator[str]:
        world, cache, outside = self._world, self._cache, self._world.outside
        if world.tick_in_forward or not any(forward.layers for forward in self._forwards.values()):
            yield TICK
        for rid, request in self._requests.items():
            script = self._scripts[rid]
            if request.phase in (Phase.NEW, Phase.WAITING):
                comes = all(self._requests[other].phase is Phase.ENDED for other in script.after)
                if comes and not cache.is_waiting(rid) and self._joins(script.batches[0]):
                    yield f"admit {rid}"
            if request.phase is Phase.RUNNING:
                if request.reserved == request.inserted and self._joins(script.batches[request.reserved]):
                    yield f"chunk {rid}"
                early = world.insert_early and request.inserted < request.reserved < len(script.chunks)
                if early or request.stored >> request.inserted & 1:
                    yield f"insert {rid}"
            if "abort" in outside and request.phase not in (Phase.NEW, Phase.ENDED):
                yield f"abort {rid}"
        for batch, forward in sorted(self._forwards.items()):
            yield f"store {batch}"
            payload, layer = self._layers[forward.layers]
            if world.unreported:
                yield f"unreported {batch}"
            if world.draft_may_lack and payload and not layer:
                yield f"no_draft {batch}"
        if any(load.producer is None for load in cache.state.loads.values()):
            yield "start"
        if "evict" in outside and cache.state.tree.next_device_victim() is not None:
            yield "evict"
        if "reset" in outside and cache.state.pending:
            yield "reset"
        if "flush" in outside and not self.rows() and cache.state.tree.node_count:
            yield "flush"
        if SHUTDOWN in outside:
            yield SHUTDOWN

    def _joins(self, batch: int) -> bool:
        """Whether a chunk may join this forward: it has not begun to store, and (one at a time) no other is open."""
        forward = self._forwards.get(batch)
        if forward is not None:
            return not forward.layers
        return not (self._world.one_forward and self._forwards)

    # -- the tick ---------------------------------------------------------------------------------------------------------------
    def _tick(self, _: str) -> None:
        report = self._cache.begin_tick()
        for rid in (*report.inserted, *report.dropped):
            self._requests[rid] = Progress(Phase.ENDED)
        for rid in report.poisoned:
            if self._requests[rid].phase is Phase.RUNNING:
                self._end(rid, "retract")

    # -- requests ---------------------------------------------------------------------------------------------------------------
    def _admit(self, rid: str) -> None:
        cache, script = self._cache, self._scripts[rid]
        found = cache.prepare(rid, self._key(script, len(script.pages) - 1), self._key(script, len(script.pages)))
        if found is None:
            self._requests[rid] = Progress(Phase.WAITING)
            self.deferred = True
            return
        loaded, node = self._load(script, found)
        row = (*found.device_pages, *loaded)
        done = next(index for index, end in enumerate(script.chunks) if end > len(row))
        cache.admit(rid, node, len(row))
        self._requests[rid] = Progress(Phase.RUNNING, row, done, 0, done)
        self._chunk(rid)

    def _load(self, script: RequestScript, found: Match) -> tuple[list[LogicalPage], Node[Backup]]:
        if not found.host_nodes:
            return [], found.device_node
        extend = (len(script.pages) - len(found.device_pages)) * self._world.config.page_size
        answer = self._cache.load_back(script.rid, found, extend)
        return answer.pages, found.device_node if answer.node is None else answer.node

    def _chunk(self, rid: str) -> None:
        """The next chunk gets pages and a reservation, and joins its forward; without pages the request is given up."""
        script, request = self._scripts[rid], self._requests[rid]
        index = request.reserved
        end, batch = script.chunks[index], script.batches[index]
        fresh = self._cache.alloc(end - len(request.row), request.row[-1] if request.row else None)
        if fresh is None:
            self._end(rid, "no_pages")
            return
        row = (*request.row, *fresh)
        self._cache.reserve(rid, batch, self._key(script, end), row)
        self._requests[rid] = replace(request, row=row, reserved=index + 1)
        forward = self._forwards.get(batch, Forward())
        self._forwards[batch] = replace(forward, members=(*forward.members, (rid, index)))

    def _insert(self, rid: str) -> None:
        cache, script, request = self._cache, self._scripts[rid], self._requests[rid]
        end = script.chunks[request.inserted]
        key = self._key(script, end)
        if end == len(script.pages):
            done = cache.finish(rid, key, request.row)
            self._requests[rid] = Progress(Phase.ENDED if done else Phase.PARKED)
            return
        row = cache.insert_unfinished(rid, key, request.row, chunked=True)
        kept = request.row if row is None else (*row, *request.row[len(row) :])
        self._requests[rid] = replace(request, row=kept, inserted=request.inserted + 1)

    def _abort(self, rid: str) -> None:
        self._end(rid, "abort")

    def _end(self, rid: str, reason: str) -> None:
        """The forward that computes a chunk of it goes on without it."""
        self._cache.end_request(rid, self._requests[rid].row, reason)
        self._requests[rid] = Progress(Phase.ENDED)
        for batch, forward in self._forwards.items():
            self._forwards[batch] = replace(forward, members=tuple(member for member in forward.members if member[0] != rid))

    # -- the forward ------------------------------------------------------------------------------------------------------------
    def _start(self) -> None:
        self._cache.start_loads()

    def _store(self, batch: int) -> None:
        """The forward's next layer: loads are waited for, its KV is stored and reported."""
        forward, cache = self._forwards[batch], self._cache
        payload, layer = self._layers[forward.layers]
        if not forward.layers:
            cache.start_loads()
            cache.before_store([page for rid, index in forward.members for page in self._new_pages(rid, index)])
        cache.wait_layer(batch, self._world.config.payload_names[payload], layer)
        cache.layer_stored(batch, payload, layer)
        self._forwards[batch] = replace(forward, layers=forward.layers + 1)
        self._end_payload(batch, payload, forward.layers + 1)

    def _unreported(self, batch: int) -> None:
        """The rest of the payload's layers is stored, and nobody reports it."""
        forward = self._forwards[batch]
        if not forward.layers:
            self._cache.start_loads()
        payload, _ = self._layers[forward.layers]
        end = next((at for at in range(forward.layers, len(self._layers)) if self._layers[at][0] != payload), len(self._layers))
        self._forwards[batch] = replace(forward, layers=end)
        self._end_payload(batch, payload, end)

    def _end_payload(self, batch: int, payload: int, layers: int) -> None:
        if layers < len(self._layers) and self._layers[layers][0] == payload:
            return
        self._cache.end_payload(batch, payload)
        if layers == len(self._layers):
            self._end_forward(batch)

    def _end_forward(self, batch: int) -> None:
        self._cache.end_forward(batch)
        for rid, index in self._forwards.pop(batch).members:
            request = self._requests[rid]
            self._requests[rid] = replace(request, stored=request.stored | 1 << index)

    def _new_pages(self, rid: str, index: int) -> tuple[LogicalPage, ...]:
        chunks = self._scripts[rid].chunks
        return self._requests[rid].row[chunks[index - 1] if index else 0 : chunks[index]]

    # -- from outside -----------------------------------------------------------------------------------------------------------
    def _evict(self) -> None:
        """One leaf goes."""
        self._cache.evict(1)

    def _flush(self) -> None:
        for rid in [rid for rid, request in self._requests.items() if request.phase is Phase.WAITING]:
            self._end(rid, "flush")
        self._cache.flush()
        self._requests = {rid: Progress(Phase.ENDED) if r.phase is Phase.PARKED else r for rid, r in self._requests.items()}

    def _shutdown(self) -> None:
        """The engine is shut down wherever it is; then everybody goes."""
        self._cache.shutdown()
        for batch in sorted(self._forwards):
            self._cache.end_forward(batch)
        self._forwards.clear()
        for rid, request in self._requests.items():
            if request.phase in (Phase.RUNNING, Phase.WAITING):
                self._end(rid, "shutdown")
            self._requests[rid] = Progress(Phase.ENDED)
        self._down = True

    def _key(self, script: RequestScript, pages: int) -> RadixKey:
        key = self._keys.get((script.rid, pages))
        if key is None:
            size = self._world.config.page_size
            key = self._cache.key([label for label in script.pages[:pages] for _ in range(size)])
            self._keys[script.rid, pages] = key
        return key
