"""Who keeps what: device locks and host holds of backups, and the bookkeeping of nodes that are on the host alone."""

from __future__ import annotations

from collections.abc import Sequence

from cphicache.engine.host_eviction import HostEviction
from cphicache.engine.records import Backup
from cphicache.engine.state import CacheState
from cphicache.spaces.types import LogicalPage
from cphicache.tree import Node


class Holds:
    """Takes and gives back what a backup keeps on the device and on the host while it is pending."""

    def __init__(self, state: CacheState, host_eviction: HostEviction) -> None:
        self._state = state
        self._host_eviction = host_eviction

    # -- the device ---------------------------------------------------------------------------------------------------------
    def hold_device(self, record: Backup) -> None:
        """The node's pages stay on the device while its copies read them; an extent's are the request's to keep."""
        if record.node is not None:
            self._state.tree.lock(record.node)

    def release_device(self, record: Backup) -> None:
        """Give the hold of :meth:`hold_device` back."""
        if record.node is not None:
            self._state.tree.unlock(record.node)

    def adopt(self, node: Node[Backup], pages: Sequence[LogicalPage]) -> None:
        """A host-only node gets device pages: recomputed ones, or those that a load-back will fill."""
        self._state.tree.set_device(node, pages)
        self.count_host_only(node.backup, -1)
        self._state.kv_event(stored=True, medium="device", node=node)
        self._host_eviction.file(node)

    def count_host_only(self, record: Backup, sign: int) -> None:
        """The slots of a node that lost its device pages (``sign`` 1), or that got some or lost its host copy (-1)."""
        for rank, slots in enumerate(record.need):
            self._state.host_only_need[rank] += sign * slots

    # -- the host -----------------------------------------------------------------------------------------------------------
    def host_anchor(self, record: Backup) -> tuple[Node[Backup], int] | None:
        """The node that the extent hangs on: it must not lose its host copy for the extent's sake, or before it is bound."""
        parent = record.node.parent if record.node is not None else None if record.parent is None else record.parent.node
        return None if parent is None or parent.is_root else (parent, parent.length_pages)

    def hold_anchor(self, record: Backup) -> None:
        """Keep the host copy that an extent hangs on until the extent is bound, or gone."""
        record.hold = self.host_anchor(record)
        if record.hold is not None:
            self._state.tree.hold_host(*record.hold)

    def unlink(self, record: Backup) -> None:
        """An extent is bound, or gone: it keeps its parent's host copy no longer."""
        if record.hold is not None:
            self._state.tree.release_host(*record.hold)
            record.hold = None
        if record.parent is not None:
            record.parent.heirs.remove(record)
            record.parent = None

    def hang(self, record: Backup, node: Node[Backup]) -> None:
        """An extent that is about to be bound hangs on this node, which need not be what it was reserved behind: that was divided, or
        somebody else's KV is there now."""
        self.unlink(record)
        if not node.is_root:
            record.parent = node.backup
            node.backup.heirs.append(record)
