"""Makes recorded calls of a real engine, one by one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cphicache.agree.port import Reducer
from cphicache.engine import CacheConfig, CpHiRadixCache
from cphicache.engine.records import Backup, Match
from cphicache.events import EventLog, Level
from cphicache.reexecute.keys import StandInNames, stand_in
from cphicache.reexecute.local import ReplayTransfer
from cphicache.spaces.types import LogicalPage
from cphicache.transfer.port import CopyStatus, OpKey
from cphicache.tree import Node, Walk

EngineFactory = Callable[..., CpHiRadixCache]
Call = Mapping[str, Any]
"""One call: ``call`` is the name of the method, the rest its arguments, as the event ``op`` has them."""


class Unplayable(ValueError):
    """The call names something that is not there: another node, a match that was not made, a call that is not known."""


@dataclass(frozen=True, slots=True)
class Result:
    """What a call gave the caller: pages for a row, and the node that the row ends in."""

    pages: Sequence[LogicalPage] = ()
    node: Node[Backup] | None = None
    match: Match | None = None


NO_RESULT = Result()


def config_of(fields: Mapping[str, Any]) -> CacheConfig:
    """The configuration of the event ``engine``. Raises TypeError or ValueError for one that this version does not know."""
    return CacheConfig(**{**fields, "payloads": tuple((name, layers) for name, layers in fields["payloads"])})


class Player:
    """One engine with its replayed surroundings. Its events go into memory, from which they are taken after each call."""

    def __init__(
        self, config: CacheConfig, transfer: ReplayTransfer, reducer: Reducer, *, rank: int, engine: EngineFactory = CpHiRadixCache
    ) -> None:
        self.config = config
        self.log = EventLog(None, rank=rank, level=Level.OPS, wall_clock=None, header={}, keep=1 << 30)
        self.cache = engine(config, transfer, reducer, self.log, names=StandInNames())
        self.matches: dict[str, Match] = {}
        """The last match of each request that was prepared."""

    def play(self, call: Call) -> Result:
        """Make the call. Whatever the engine raises goes through; :class:`Unplayable`, ValueError, TypeError or KeyError for a call that
        cannot be made."""
        method = _CALLS.get(call["call"])
        if method is None:
            raise Unplayable(f"a call {call['call']!r} is not known: the log is of another version")
        return method(self, call)

    def node(self, node_id: int) -> Node[Backup]:
        """A node by its id, or by the node itself."""
        node = self.cache.state.tree.root if node_id == 0 else self.cache.state.tree.find(node_id)
        if node is None:
            raise Unplayable(f"node {node_id} is not in the tree")
        return node

    # -- calls that give something ----------------------------------------------------------------------------------------------
    def _prepare(self, call: Call) -> Result:
        size, full = self.config.page_size, call.get("full")
        found = self.cache.prepare(call["request"], stand_in(call, size), None if full is None else stand_in(full, size))
        if found is None:
            self.matches.pop(call["request"], None)
            return NO_RESULT
        self.matches[call["request"]] = found
        return Result(found.device_pages, found.device_node, found)

    def _load_back(self, call: Call) -> Result:
        answer = self.cache.load_back(call["request"], self._match(call), call["extend"])
        return Result(answer.pages, answer.node)

    def _match(self, call: Call) -> Match:
        found = call.get("match") or self.matches.get(call["request"])
        if isinstance(found, Match) and ("match" in call or _is_told(found, call)):
            return found
        device, chain = self.node(call["device_node"]), [self.node(node) for node in call["nodes"]]
        walk: Walk[Backup] = Walk([*chain], 0, 0, [], device)
        return Match(walk, [], device, chain, call["tail"], call["tokens"], chain[-1] if chain else device)

    def _admit(self, call: Call) -> Result:
        node = call["node"]
        at = self.node(node) if isinstance(node, int) else node
        self.cache.admit(call["request"], at, call["pages"], priority=call.get("priority", 0))
        return NO_RESULT

    def _touch(self, call: Call) -> Result:
        node = call["node"]
        self.cache.touch(self.node(node) if isinstance(node, int) else node)
        return NO_RESULT

    def _alloc(self, call: Call) -> Result:
        pages = self.cache.alloc(call["count"], call["after"])
        return NO_RESULT if pages is None else Result(pages)

    def _insert_unfinished(self, call: Call) -> Result:
        key = stand_in(call, self.config.page_size)
        pages = self.cache.insert_unfinished(call["request"], key, call["row"], chunked=call["chunked"])
        return NO_RESULT if pages is None else Result(pages)

    def _begin_tick(self, call: Call) -> Result:
        self.cache.begin_tick(idle=call.get("idle", False))
        return NO_RESULT

    # -- the others ---------------------------------------------------------------------------------------------------------------
    def _completion(self, call: Call) -> Result:
        key = OpKey(call["node"], call["generation"])
        self.cache.completion(key, CopyStatus(call["drained"], call["failed"]))
        return NO_RESULT

    def _reserve(self, call: Call) -> Result:
        self.cache.reserve(call["request"], call["batch"], stand_in(call, self.config.page_size), call["row"])
        return NO_RESULT

    def _finish(self, call: Call) -> Result:
        self.cache.finish(call["request"], stand_in(call, self.config.page_size), call["row"])
        return NO_RESULT

    def _pin_host(self, call: Call) -> Result:
        self.cache.pin_host(stand_in(call, self.config.page_size), call["ticks"])
        return NO_RESULT

    def _plain(self, call: Call) -> Result:
        getattr(self.cache, call["call"])(*(call[name] for name in _PLAIN[call["call"]]))
        return NO_RESULT


_PLAIN: Mapping[str, tuple[str, ...]] = {
    "confirm_loads": ("request",),
    "evict": ("tokens",),
    "batch": ("batch",),
    "stores": ("request", "batch", "start"),
    "start_loads": (),
    "agree_now": (),
    "layer_stored": ("batch", "payload", "layer"),
    "end_payload": ("batch", "payload"),
    "end_forward": ("batch",),
    "end_request": ("request", "row", "reason"),
    "free": ("pages",),
    "reset_backups": (),
    "flush": (),
    "shutdown": (),
    "quarantine": ("reason",),
}
"""Calls whose arguments are passed as they are, in this order, and whose answer is not used by later calls."""

_CALLS: Mapping[str, Callable[[Player, Call], Result]] = {
    "begin_tick": Player._begin_tick,
    "prepare": Player._prepare,
    "load_back": Player._load_back,
    "admit": Player._admit,
    "touch": Player._touch,
    "alloc": Player._alloc,
    "insert_unfinished": Player._insert_unfinished,
    "completion": Player._completion,
    "reserve": Player._reserve,
    "finish": Player._finish,
    "pin_host": Player._pin_host,
    **dict.fromkeys(_PLAIN, Player._plain),
}


def _is_told(found: Match, call: Call) -> bool:
    told = (call["device_node"], call["nodes"], call["tail"], call["tokens"])
    return (found.device_node.id, [node.id for node in found.host_nodes], found.host_tail_pages, found.host_hit_tokens) == told
