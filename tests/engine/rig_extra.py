"""What tests of waiting, load-back, eviction and reset ask of a rig beyond a request's plain way."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

from cphicache.engine import Refusal
from cphicache.engine.records import Load
from cphicache.engine.state import KVEvent
from cphicache.spaces.types import LogicalPage
from cphicache.transfer.port import OpKey
from tests.engine.rig import Rig, RigOver, Side

ALL_TOKENS = 10**6
"""More than any rig's device holds."""


class Answer(NamedTuple):
    """A load-back's answer without node objects: its pages, the id of the node they end in, or why not."""

    pages: list[LogicalPage]
    node: int | None
    refused: Refusal | None


def back_up(rig: RigOver[Any], *texts: str, owners: Sequence[int] | None = None) -> None:
    """Serve these prompts one after the other; whatever is new of each becomes a committed node of its own."""
    for index, text in enumerate(texts):
        rig.serve(f"warm{index}:{text}", text, owners=owners)
        rig.settle()


def to_host(rig: RigOver[Any], *texts: str, owners: Sequence[int] | None = None) -> None:
    """Back these prompts up and take all that is not locked from the device, so that they are on the host only."""
    back_up(rig, *texts, owners=owners)
    rig.evict(ALL_TOKENS)
    for text in texts:
        assert rig.node(text).pages is None, f"{text} is still on the device"


def ask_load(rig: RigOver[Any], rid: str, text: str, real_tokens: int = 0) -> Answer:
    """Match ``text`` and load its host part back, ``real_tokens`` being left to compute; nobody is admitted."""

    def ask(side: Side[Any]) -> Answer:
        found = side.cache.match_prefix(rig.key(text))
        answer = side.cache.load_back(rid, found, found.host_hit_tokens + real_tokens)
        return Answer(answer.pages, None if answer.node is None else answer.node.id, answer.refused)

    return rig.each(ask)


def load_of(rig: RigOver[Any], load_id: int) -> Load:
    """A load-back in flight."""
    return rig.cache.state.loads[load_id]


def owners_of(rig: RigOver[Any], pages: Sequence[LogicalPage]) -> list[int]:
    """Owning rank of each page."""
    return list(rig.cache.state.owners(pages))


def queued_pages(side: Side[Any]) -> list[tuple[int, tuple[int, ...]]]:
    """(node, pages) of every item of every load-back that the local half was asked for."""
    return [item for _, items in side.transfer.called("queue_load") for item in items]


def frozen(rig: RigOver[Any]) -> list[tuple[object, Hashable]]:
    """All that an engine is, twice told: what the outside sees and its canonical form. Equal before and after: nothing was changed."""
    return [(side.census(), side.cache.canonical()) for side in rig.sides]


def kv_events(rig: RigOver[Any]) -> list[KVEvent]:
    """(stored, medium, node, pages) since the last call."""
    return rig.each(lambda side: side.cache.take_events())


def next_numbers(rig: RigOver[Any]) -> tuple[int, ...]:
    """The next number, generation, node id, load id: none of them is ever given out twice."""
    state = rig.cache.state
    return state.next_number, state.next_generation, state.next_node_id, state.next_load_id


def host_only_slots(rig: RigOver[Any]) -> list[int]:
    """Slots by rank in host-only nodes, counted anew from the tree."""
    slots = [0] * rig.config.cp_size
    for node in rig.cache.state.tree.nodes():
        if node.pages is None:
            for owner in node.backup.owners:
                slots[owner] += rig.config.page_size
    return slots


def fail_backup(rig: Rig, key: OpKey, rank: int) -> None:
    """A copy of a backup fails on one rank; all others of it end well, everywhere."""
    rig.fail_copies(key, rank)
    rig.finish_copies(key)
