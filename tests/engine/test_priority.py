"""Priorities of requests reach the nodes of their KV (R27)."""

from __future__ import annotations

from tests.engine.rig import Rig
from tests.engine.rig_extra import ALL_TOKENS, back_up


def serve_at(rig: Rig, rid: str, text: str, priority: int) -> None:
    """A whole request of that priority."""

    def admit(side):  # type: ignore[no-untyped-def]
        found = side.cache.match_prefix(rig.key(text))
        side.cache.admit(rid, found.device_node, len(found.device_pages), priority=priority)
        row = list(found.device_pages)
        row += side.cache.alloc(len(text) - len(row), row[-1] if row else None) or []
        return side.cache.finish(rid, rig.key(text), row)

    rig.each(admit)


def test_the_kv_of_a_request_gets_its_priority() -> None:
    """R27: new nodes get the priority of the request that stored them; those that it only read are raised to it, and none is lowered."""
    rig = Rig(eviction_policy="priority")
    serve_at(rig, "low", "ab", 1)
    assert rig.node("ab").priority == 1
    serve_at(rig, "high", "abcd", 5)
    assert [rig.node(text).priority for text in ("ab", "abcd")] == [5, 5]
    serve_at(rig, "lower", "abcd", 2)
    serve_at(rig, "lower still", "abcdef", 3)
    assert [rig.node(text).priority for text in ("ab", "abcd", "abcdef")] == [5, 5, 3]
    rig.settle()
    rig.rest()


def test_what_somebody_important_has_read_stays_longer() -> None:
    """R27: a prefix that a request of high priority has used goes after one that is younger but unimportant."""
    rig = Rig(eviction_policy="priority")
    back_up(rig, "ab", "cd")
    serve_at(rig, "important", "ab", 9)
    serve_at(rig, "again", "cd", 0)
    rig.settle()
    rig.evict(4)
    assert (rig.node("ab").pages is None, rig.node("cd").pages is None) == (False, True)
    rig.evict(ALL_TOKENS)
    assert rig.node("ab").pages is None
    rig.rest()
