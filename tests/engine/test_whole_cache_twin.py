"""The whole cache against its naive twin on random histories."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.engine.rig import Rig
from tests.engine.twin import Twin

TEXTS = st.text("ab", min_size=1, max_size=6)
"""Few letters: so that prompts share, extend and divide each other."""
PAGE = 2
DEVICE_PAGES, HOST_SLOTS = 256, 512


class Histories(RuleBasedStateMachine):
    """Requests, evictions, resets and flushes; after each the dust settles."""

    @initialize()
    def begin(self) -> None:
        self.rig = Rig(cp_size=1, usable_pages=DEVICE_PAGES, host_slots=HOST_SLOTS, page_size=PAGE)
        self.twin = Twin()
        self.count = 0

    @rule(text=TEXTS)
    def serve(self, text: str) -> None:
        self.count += 1
        self.rig.serve(f"r{self.count}", text)
        self.rig.settle()
        self.twin.serve(text)

    @rule(text=TEXTS)
    def abort(self, text: str) -> None:
        """In the middle of its forward; what it has loaded back stays."""
        self.count += 1
        rid = f"r{self.count}"
        if self.twin.match(text)[1]:
            return
        assert self.rig.begin(rid, text)
        self.rig.chunk(rid)
        self.rig.layer(0, 0)
        self.rig.abort(rid)
        self.rig.end_forward()
        self.rig.settle()
        self.twin.now += 1
        self.use_matched(text)

    def use_matched(self, text: str) -> None:
        """An admission uses the nodes that it matches, the last one though it may be matched in part."""
        for name, node in self.twin.nodes.items():
            if node.on_device and name[: node.start + 1] == text[: node.start + 1] and len(text) > node.start:
                self.twin.nodes[name] = type(node)(node.start, self.twin.now, node.on_device)

    @rule(pages=st.integers(1, 8))
    def evict(self, pages: int) -> None:
        assert self.rig.evict(pages * PAGE).num_tokens_evicted == self.twin.evict(pages) * PAGE

    @rule()
    def reset(self) -> None:
        """With nothing pending it changes nothing."""
        self.rig.each(lambda side: side.cache.reset_backups())

    @rule()
    def flush(self) -> None:
        self.rig.each(lambda side: side.cache.flush())
        self.twin = Twin()

    @rule(text=TEXTS)
    def match(self, text: str) -> None:
        found = self.rig.match(text)
        device, host = self.twin.match(text)
        assert len(found.device_pages) == device
        assert sum(node.length_pages for node in found.host_nodes[:-1]) + (found.host_tail_pages if found.host_nodes else 0) == host

    @invariant()
    def the_books_agree(self) -> None:
        if hasattr(self, "twin"):
            assert self.rig.cache.available_size() == (DEVICE_PAGES - self.twin.device_pages) * PAGE
            assert self.rig.free_slots() == [HOST_SLOTS - self.twin.host_pages * PAGE]
            assert self.rig.cache.state.tree.node_count == len(self.twin.nodes)

    def teardown(self) -> None:
        if hasattr(self, "rig"):
            self.rig.rest()


TestHistories = Histories.TestCase
TestHistories.__doc__ = (
    """R8, R16, R24, R25, R30: at rest the cache has exactly what the twin has, on both media, down to pages and slots."""
)
TestHistories.settings = settings(
    max_examples=25, stateful_step_count=25, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck)
)
