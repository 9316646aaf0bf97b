"""Which host copies make room for a backup (R16). Plans only: evicting is the lifecycle's work."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from cphicache.engine.records import Backup
from cphicache.engine.state import CacheState
from cphicache.ledger import Need
from cphicache.lifecycle import Trigger
from cphicache.lifecycle.names import COMMITTED, DEVICE_VALID_HOST_NONE, HOST_EVICT, RECLAIM
from cphicache.tree import Node
from cphicache.tree.eviction import Candidates

Victims: TypeAlias = list[tuple[Node[Backup], Trigger]]
"""Nodes to lose their host copy, in order, and how: ``host_evict`` for host-only ones, ``reclaim`` for those on the device too."""


class HostEviction:
    """Plans which host copies make room (R16). Pure: evicting is :meth:`Backups.evict_host`'s work."""

    def __init__(self, state: CacheState) -> None:
        self._state = state
        self._reclaimable: Candidates[Backup] = Candidates(state.tree.policy)

    def plan(self, need: Need, may_reclaim: bool) -> Victims | None:
        """Victims, in order, whose slots give every rank what it lacks; ``None`` (and nothing is evicted) if there are not enough."""
        state = self._state
        may_reclaim = may_reclaim and state.config.reclaim_device_valid
        if not may_reclaim and not state.ledger.fits_with(need, state.host_only_need):
            return None
        gained = [0] * state.config.cp_size
        victims: Victims = []

        def suffices(node: Node[Backup]) -> bool:
            for rank, slots in enumerate(node.backup.need):
                gained[rank] += slots
            return state.ledger.fits_with(need, gained)

        def enough(node: Node[Backup]) -> bool:
            victims.append((node, HOST_EVICT))
            return suffices(node)

        if state.tree.plan_host_victims(enough, lambda node: True) is not None:
            return victims
        if may_reclaim and self._plan_reclaim(victims, suffices):
            return victims
        return None

    def file(self, node: Node[Backup]) -> None:
        """A node is committed and on the device from now on: it is looked at when victims are needed, until it is one no longer."""
        if self._state.config.reclaim_device_valid:
            self._reclaimable.add(node)

    def refresh(self, node: Node[Backup]) -> None:
        """The node was used: its place in the order may have changed."""
        if self._state.config.reclaim_device_valid:
            self._reclaimable.refresh(node)

    def refile(self) -> None:
        """The tree has become another one: file all nodes that could be reclaimed, in place of those of the old one."""
        self._reclaimable.clear()
        if not self._state.config.reclaim_device_valid:
            return
        for node in self._state.tree.nodes():
            if self._keeps_host_copy(node):
                self.file(node)

    def _plan_reclaim(self, victims: Victims, suffices: Callable[[Node[Backup]], bool]) -> bool:
        """Add host copies of nodes that are on the device too, children before parents, until that suffices."""
        gone = {node.id for node, _ in victims}
        aside: list[Node[Backup]] = []
        found = False
        while not found and (node := self._reclaimable.pop()) is not None:
            if not self._keeps_host_copy(node):
                continue  # filed again when it may be reclaimed once more
            aside.append(node)
            if self._reclaims(node, gone):
                victims.append((node, RECLAIM))
                gone.add(node.id)
                found = suffices(node)
                parent = node.parent
                if parent in aside:  # it was passed over for its children's sake
                    aside.remove(parent)
                    self._reclaimable.add(parent)
        for node in aside:
            self._reclaimable.add(node)
        return found

    def _keeps_host_copy(self, node: Node[Backup]) -> bool:
        return node.backup.state is COMMITTED and node.pages is not None

    def _reclaims(self, node: Node[Backup], gone: set[int]) -> bool:
        if node.host_ref:  # what is being loaded is held, too
            return False
        return all(child.id in gone or child.backup.state is DEVICE_VALID_HOST_NONE for child in node.children.values())
