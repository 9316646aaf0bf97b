"""What the logical half of a rank asks of its local half. No torch here.

The engine speaks in logical pages and operation keys. Host slots, physical locs, tensors and streams stay behind this port.
An implementation never changes a logical decision: whatever fails here is remembered and reported by :meth:`TransferPort.status`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum
from typing import NamedTuple, Protocol

from cphicache.spaces.types import LogicalPage


class Wait(Enum):
    """Why one party waits for another; every ordering that keeps bytes right has a name here (R34)."""

    STORE_TO_COPY = "store_to_copy"
    """A D2H copy of a layer starts after the forward has stored that layer."""
    COPY_TO_REUSE = "copy_to_reuse"
    """A device page is written again only after the D2H copies that read it."""
    LOAD_TO_READ = "load_to_read"
    """The forward reads a loaded layer only after its H2D copy."""
    READ_TO_LOAD = "read_to_load"
    """An H2D copy writes a device page only after the forward's last use of it."""
    DRAIN_TO_FREE = "drain_to_free"
    """Host slots, pages and locks of an operation are given back only after its copies have ended."""


class OpKey(NamedTuple):
    """Identity of one backup: a node may be backed up again under a later generation."""

    node: int
    generation: int


class CopyStatus(NamedTuple):
    """Local progress of an operation. ``drained``: none of its copies is queued or running. ``failed``: at least one copy failed."""

    drained: bool
    failed: bool


class LoadItem(NamedTuple):
    """One node of a load-back: restore ``node``'s host copy onto ``pages`` (same owner pattern, page by page)."""

    node: int
    pages: Sequence[LogicalPage]


class HostSlotsExhausted(RuntimeError):
    """The local host pool has fewer slots than the ledger says. Nothing was reserved."""


class OwnerMismatch(ValueError):
    """A load-back onto pages with another owner pattern than the one that the bytes were backed up with. Nothing was queued."""


class TransferPort(Protocol):
    """One rank's copies and host slots, keyed by operation and node. All methods run on the scheduler thread and never block,
    except ``wait_*`` and ``synchronize``."""

    # -- backup: reserve, submit, end -------------------------------------------------------------------------------------
    def reserve(self, op: OpKey, pages: Sequence[LogicalPage]) -> None:
        """Take host slots for the owned part of ``pages``, all payloads or none; compute metadata and physical locs; queue nothing.

        Raises :class:`HostSlotsExhausted` with nothing taken. Owning nothing is success.
        """

    def submit_layers(self, ops: Iterable[OpKey], payload: str, layers: Sequence[int]) -> None:
        """Queue the D2H copies of ``layers`` of ``payload`` for all ``ops`` on the write stream, after everything that the compute
        stream holds now (the layers' KV stores). One submission a layer for all ops together. A failing copy is remembered."""

    def status(self, op: OpKey) -> CopyStatus:
        """Local progress of a backup; never blocks."""

    def wait_backup(self, op: OpKey) -> None:
        """Block until every copy of ``op`` that was submitted has ended (drain rounds only)."""

    def shrink(self, op: OpKey, head_pages: int, *, free_now: bool) -> None:
        """Cut the first ``head_pages`` pages from the operation: their slots are freed now, or when the operation ends."""

    def commit(self, op: OpKey) -> None:
        """The operation's metadata becomes that of node ``op.node``; slots kept from :meth:`shrink` are freed."""

    def release(self, op: OpKey) -> None:
        """Free every host slot of an operation that ended without commit. Its copies have drained (our bug if not)."""

    # -- committed nodes ----------------------------------------------------------------------------------------------------
    def free_node(self, node: int) -> None:
        """Free the host slots of a committed node."""

    def split_node(self, node: int, head: int, head_pages: int) -> None:
        """Divide the metadata of committed ``node``: its first ``head_pages`` pages become node ``head``, the rest stays ``node``."""

    # -- load-back ----------------------------------------------------------------------------------------------------------
    def queue_load(self, load: int, items: Sequence[LoadItem]) -> None:
        """Remember a load-back; no copy starts. Raises :class:`OwnerMismatch` before anything is queued."""

    def start_loads(self) -> int:
        """Start the H2D copies of all queued loads, layer by layer on the load stream, as one producer.

        Returns its index (never reused), or -1 when nothing is queued.
        """

    def load_status(self, load: int) -> CopyStatus:
        """Local progress of a load-back (not drained before it was started)."""

    def wait_load(self, load: int) -> None:
        """Block until a started load-back has ended (drain rounds only). A load that was never started is started first."""

    def end_load(self, load: int) -> None:
        """Forget a load-back that has drained on every rank."""

    # -- the forward pass ---------------------------------------------------------------------------------------------------
    def before_store(self, pages: Sequence[LogicalPage]) -> None:
        """The forward is about to write ``pages``: make the compute stream wait for copies that still read (or load) them."""

    def wait_layer(self, producer: int, payload: str, layer: int) -> None:
        """Make the compute stream wait for a producer's H2D copy of one layer. ``-1`` and finished producers wait for nothing."""

    # -- the outside ----------------------------------------------------------------------------------------------------------
    def free_slots(self) -> dict[str, int]:
        """Free host slots of this rank by payload (tokens)."""
