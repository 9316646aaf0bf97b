"""The narrow port through which the lifecycle reaches the world. In serving the engine implements it, in proofs a recorder does."""

from __future__ import annotations

from typing import Protocol, TypeVar

from cphicache.lifecycle.record import BackupRecord, Input

R_contra = TypeVar("R_contra", bound=BackupRecord, contravariant=True)


class LifecyclePort(Protocol[R_contra]):
    """Questions have no side effect. Work named ``before`` in the table may raise, and then nothing has changed; work named
    ``after`` only notes what is to follow and must not fail."""

    # -- questions (guards) -----------------------------------------------------------------------------------------------
    def fit(self, record: R_contra) -> bool:
        """May it be backed up now: its parent is committed or pending (or the root), and nobody waits to split it."""

    def room(self, record: R_contra) -> bool:
        """Does every rank have the host slots that it needs, in every payload?"""

    def victims_suffice(self, record: R_contra) -> bool:
        """Would evicting host victims give every rank what it lacks?"""

    def parent_committed(self, record: R_contra) -> bool:
        """Is the parent committed (or the root)?"""

    def on_device(self, record: R_contra) -> bool:
        """Does the node have its device pages?"""

    def layers_of(self, payload: int) -> int:
        """Number of layers of a payload."""

    # -- work before the state changes --------------------------------------------------------------------------------------
    def refuse(self, record: R_contra, given: Input) -> None:
        """Log why nothing was reserved, with what was needed and what there was."""

    def reserve_slots(self, record: R_contra, given: Input) -> None:
        """Take host slots on every rank in the ledger and on this rank in the pool, and start a new generation."""

    def evict_host(self, record: R_contra, given: Input) -> None:
        """Evict the victims that suffice."""

    def copy_layers(self, record: R_contra, given: Input) -> None:
        """Submit the copies of the given layers."""

    def take_number(self, record: R_contra) -> int:
        """The next number of the sequence that all ranks agree on."""

    def commit(self, record: R_contra) -> None:
        """Make the node host-visible and give its device hold back, once."""

    def release(self, record: R_contra) -> None:
        """Free the slots of all payloads and the device hold, once."""

    def release_host(self, record: R_contra, given: Input) -> None:
        """Free the host slots of a committed node."""

    def attach(self, record: R_contra, given: Input) -> None:
        """The extent became the given node: hold it on the device."""

    def shrink(self, record: R_contra, pages: int, *, free_now: bool) -> None:
        """The first pages are in the tree already: their slots go now, or with the operation."""

    def defer_split(self, record: R_contra, given: Input) -> None:
        """Note who waits until this backup has ended."""

    def fork(self, record: R_contra, given: Input) -> None:
        """Divide what the node holds between its two halves."""

    def drop_device(self, record: R_contra) -> None:
        """Free the node's device pages."""

    def begin_load(self, record: R_contra, given: Input) -> None:
        """Publish the pages that the host copy is loaded onto; pin the source."""

    def end_load(self, record: R_contra) -> None:
        """The pages are valid everywhere: unpin the source, give the hold back."""

    def fail_load(self, record: R_contra) -> None:
        """The pages will not become valid: nobody may start to read them."""

    def undo_load(self, record: R_contra) -> None:
        """The node is host-only again: free the pages, unpin the source, give the hold back."""

    # -- what follows when the state has changed ------------------------------------------------------------------------------
    def reserve_again(self, record: R_contra) -> None:
        """Room was made: reserve once more (trigger ``reserve_retry``)."""

    def commit_children(self, record: R_contra) -> None:
        """Tell pending children that their parent is committed."""

    def lose_children(self, record: R_contra) -> None:
        """Tell pending children that their parent is lost."""

    def drain_now(self, record: R_contra) -> None:
        """No copy is in flight anywhere: end the rollback in this step (trigger ``drained``)."""

    def wake(self, record: R_contra) -> None:
        """The backup has ended: wake who waits for it."""
