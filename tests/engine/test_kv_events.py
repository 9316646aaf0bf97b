"""KV events: who hears of them, how many are kept (R27)."""

from __future__ import annotations

from cphicache.engine import CpHiRadixCache
from cphicache.tree import Node
from tests.engine.rig import Rig, rig_config
from tests.engine.rig_extra import ALL_TOKENS, back_up, kv_events
from tests.engine.small_scheduler import Loopback
from tests.engine_fakes import FakeTransfer

KEPT = 65_536


def test_a_listener_hears_of_each_event_while_its_node_is_in_the_tree() -> None:
    """R27: whoever listens hears the same events as whoever asks, at once: a node that is about to go can still be looked at. One that
    stops listening hears nothing more."""
    rig = Rig(host_slots=4)
    heard: list[tuple[bool, str, int, int]] = []

    def listen(stored: bool, medium: str, node: Node[object]) -> None:
        assert rig.cache.state.tree.find(node.id) is node
        heard.append((stored, medium, node.id, node.length_pages))

    rig.cache.listen(listen)  # type: ignore[arg-type]
    back_up(rig, "ab", "abcd")
    rig.serve("plain", "xyz")
    rig.evict(ALL_TOKENS)
    rig.serve("needs room", "pq")
    assert {(stored, medium) for stored, medium, _, _ in heard} == {
        (True, "device"), (True, "host"), (False, "device"), (False, "host"),
    }  # fmt: skip
    assert heard == kv_events(rig)
    assert kv_events(rig) == []
    before = len(heard)
    rig.cache.listen(None)
    rig.settle()
    rig.evict(ALL_TOKENS)
    assert len(heard) == before
    assert kv_events(rig)
    rig.rest()


def test_events_that_nobody_asks_for_are_bounded() -> None:
    """R27, R30: the youngest 65,536 events are kept, those that had to go are counted one by one, and a restored engine tells the same."""
    config = rig_config()
    cache = CpHiRadixCache(config, FakeTransfer(config), Loopback())
    for number in range(KEPT):
        cache.state.kv_event(stored=bool(number), medium="device", node=cache.state.tree.root)
    assert cache.state.kv_events_lost == 0
    for lost in (1, 2, 3):
        cache.state.kv_event(stored=True, medium="host", node=cache.state.tree.root)
        assert cache.state.kv_events_lost == lost
    events = cache.take_events()
    assert len(events) == KEPT
    assert [event.medium for event in events[-4:]] == ["device", "host", "host", "host"]
    assert all(event.stored for event in events), "the first one, which was not, is the first to go"
    cache.state.kv_event(stored=True, medium="host", node=cache.state.tree.root)
    assert (cache.state.kv_events_lost, len(cache.take_events())) == (3, 1)
