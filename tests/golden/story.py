"""Stories: scripts of commands, each followed by what it did to the real engine over recorded ports.

    # Happy path: what the story is about, for the reader
    world cp_size=2 usable_pages=8 host_slots=2 payloads=target:2,draft:1
    request a pages 1 2 chunks 2 forwards 0

    admit a
      asks reserve node 1 generation 1, 2 pages
      node 1 generation 1 RESERVED layers 0/0 0/0 pages 1 2 of a
      free host slots 1 1

``world`` takes fields of :class:`~cphicache.engine.CacheConfig` (pages are of one token) and of :class:`~cphicache.explore.World`;
``request`` is a :class:`~cphicache.explore.RequestScript`. Commands are the events of ``cphicache explore`` (docs/explore.md), with the
answers of each rank's environment behind ``|`` (one group stands for all ranks), and ``match REQUEST``. What is indented is rewritten
by ``make golden``: what rank 0 asks of its local half, which lines of its state are new, and what is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from cphicache.engine import CacheConfig
from cphicache.explore import RequestScript, World
from cphicache.explore.environment import Answer, Undecided
from cphicache.explore.product import Product, WorldState
from cphicache.explore.reducer import minimum
from cphicache.explore.scenario import answers_of, describe
from cphicache.explore.script import ONCE_OUTSIDE
from cphicache.run.census import take_census
from cphicache.transfer.port import OpKey

_BOOLEANS = {"yes": True, "no": False}
_WORLD_FIELDS = ("insert_early", "one_forward", "wait_may_fail", "reserve_may_fail")
_TOLD = (
    "reserve", "submit_layers", "shrink", "commit", "release", "free_node", "split_node", "queue_load", "start_loads", "wait_layer",
    "end_load",
)  # fmt: skip


class StoryError(ValueError):
    """The script is no story: which line, and why."""


def retell(text: str) -> str:
    """The script with what its commands do now. The world, the requests, comments and blank lines stay as they are."""
    lines = [line.rstrip() for line in text.splitlines() if not line.startswith(" ")]
    script = [line for line in lines if line and not line.startswith("#")]
    teller = _Teller(_world(script))
    told: list[str] = []
    for line in lines:
        told.append(line)
        if line and line.split()[0] not in ("#", "world", "request"):
            told.extend(f"  {effect}" for effect in teller.tell(line))
    return "\n".join(told) + "\n"


class _Teller:
    """Performs commands on all ranks, and says what rank 0 did."""

    def __init__(self, world: World) -> None:
        self._product = Product(world, take_census)
        self._at: WorldState = self._product.first
        self._asked: list[str] = []
        first = self._product.ranks[0]
        self._state = list(describe(first.cache, None))
        for name in _TOLD:
            setattr(first.transfer, name, partial(self._ask, name, getattr(first.transfer, name)))

    def _ask(self, name: str, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        answer = call(*args, **options)
        if answer != -1:  # loads that were started; nothing was queued
            self._asked.append(f"asks {name} {_arguments(name, args, options)}".rstrip())
        return answer

    def tell(self, line: str) -> Iterator[str]:
        """What a command did."""
        name, _, rest = line.partition(" ")
        if name == "match":
            yield from self._match(rest)
            return
        event, *groups = (part.strip() for part in line.split("|"))
        ranks = self._product.ranks
        answers = [answers_of(group) for group in groups] or [()]
        if len(answers) not in (1, len(ranks)):
            raise StoryError(f"{line}: give one group of answers, or one for each of {len(ranks)} ranks")
        legal = ranks[0].states[self._at.ranks[0]].events
        if event not in legal:
            raise StoryError(f"{line}: cannot come here, but {', '.join(legal)}")
        self._step(line, event, answers * (len(ranks) if len(answers) == 1 else 1))
        now = list(describe(ranks[0].cache, self._at.pending))
        yield from self._asked
        yield from (state for state in now if state not in self._state)
        here = {_name(state) for state in now}
        yield from (f"{_name(state)} is gone" for state in self._state if _name(state) not in here)
        self._state = now

    def _step(self, line: str, event: str, answers: list[tuple[Answer, ...]]) -> None:
        self._asked = []
        reached, samples = [], []
        for rank, at, given in zip(self._product.ranks, self._at.ranks, answers, strict=True):
            try:
                outcome = rank.step(at, event, self._at.pending, given)
            except Undecided as undecided:
                raise StoryError(f"{line}: no answer to {undecided}") from undecided
            if outcome.broken is not None or outcome.state is None:
                raise StoryError(f"{line}: {outcome.broken or f'waits for a reduction of {outcome.sample}'}")
            if outcome.answers != given:
                raise StoryError(f"{line}: {len(given)} answers given, {len(outcome.answers)} asked for")
            reached.append(outcome.state)
            samples.append(outcome.sample)
        assert len({rank.states[at].logical for rank, at in zip(self._product.ranks, reached, strict=True)}) == 1, line
        issued = [sample for sample in samples if sample is not None]
        self._at = WorldState(tuple(reached), minimum(issued) if issued else None, None)
        self._product.ranks[0].restore(reached[0])  # an equal state that was met before may have other numbers

    def _match(self, rid: str) -> Iterator[str]:
        first = self._product.ranks[0]
        found = first.cache.match_prefix(first.driver.prompts()[[r.rid for r in self._product.world.requests].index(rid)])
        host = " ".join(str(node.id) for node in found.host_nodes) or "none"
        yield f"on the device: {len(found.device_pages)} pages; on the host only: nodes {host}, {found.host_hit_tokens} tokens to load back"


def _world(script: list[str]) -> World:
    options: dict[str, Any] = {"page_size": 1, "load_back_threshold": 1, "max_retries": 1}
    chosen: dict[str, bool] = {"wait_may_fail": False}
    requests: list[RequestScript] = []
    for line in script:
        words = line.split()
        if words[0] == "world":
            for word in words[1:]:
                name, _, value = word.partition("=")
                (chosen if name in _WORLD_FIELDS else options)[name] = _value(name, value)
        elif words[0] == "request":
            requests.append(_request(line))
    config = CacheConfig(**options)
    return World(
        name="story",
        about="told by a golden file",
        config=config,
        requests=tuple(requests),
        outside=frozenset(ONCE_OUTSIDE),
        draft_may_lack=True,
        unreported=True,
        **chosen,
    )


def _value(name: str, value: str) -> Any:
    if name == "payloads":
        pairs = (pair.split(":") for pair in value.split(","))
        return tuple((payload, int(layers)) for payload, layers in pairs)
    if value in _BOOLEANS:
        return _BOOLEANS[value]
    return int(value) if value.isdigit() else value


def _request(line: str) -> RequestScript:
    """``request a pages 1 2 chunks 2 forwards 0 after b``: by words that begin a part."""
    parts: dict[str, list[str]] = {}
    words = line.split()
    for word in words[2:]:
        if word in ("pages", "chunks", "forwards", "after"):
            parts[word] = []
        else:
            parts[list(parts)[-1]].append(word)
    numbers = {name: tuple(map(int, parts[name])) for name in ("pages", "chunks", "forwards")}
    return RequestScript(
        rid=words[1],
        pages=numbers["pages"],
        chunks=numbers["chunks"],
        batches=numbers["forwards"],
        after=tuple(parts.get("after", ())),
    )


def _name(state: str) -> str:
    """What a line of a state is about: ``node 1``, ``load-back 1``, ``free host``."""
    return " ".join(state.split()[:2])


def _arguments(name: str, args: tuple[Any, ...], options: dict[str, Any]) -> str:
    if name == "submit_layers":
        operations, payload, layers = args
        return f"{payload} {' '.join(map(str, layers))} of {', '.join(map(_key, operations)) or 'nothing'}"
    if name == "reserve":
        return f"{_key(args[0])}, pages {' '.join(map(str, args[1]))}"
    if name == "queue_load":
        return f"load-back {args[0]}: " + ", ".join(
            f"node {item.node} to pages {' '.join(map(str, item.pages))}" for item in args[1]
        )
    if name == "split_node":
        return f"node {args[0]}: its first {args[2]} pages become node {args[1]}"
    if name == "shrink":
        return f"{_key(args[0])} by {args[1]} pages, {'now' if options['free_now'] else 'freed at its end'}"
    if name == "wait_layer":
        return f"for {args[1]} {args[2]} of the load-backs that were started as {args[0]}"
    what = "load-back" if name == "end_load" else "node"
    return " ".join(_key(arg) if isinstance(arg, OpKey) else f"{what} {arg}" for arg in args)


def _key(key: OpKey) -> str:
    return f"node {key.node} generation {key.generation}"
