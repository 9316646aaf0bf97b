"""What a backup remembers. The machine reads and writes it; nobody else writes ``state``, ``bound``, ``number`` or ``agreed``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from cphicache.lifecycle.table import State


@dataclass(frozen=True, slots=True)
class Input:
    """What comes along with a trigger. Unused fields keep their defaults."""

    reason: str = ""
    """Why, in the log's words."""
    payload: int = 0
    """Index of the payload whose layers were stored."""
    layers: Sequence[int] = ()
    """Layers of that payload whose KV stores have been issued."""
    pages: int = 0
    """Pages cut from, or divided off, the head of the extent."""
    who: str = ""
    """The request that asks (split_wanted)."""
    target: object | None = None
    """The node that an extent is bound to, or the upper half of a split."""
    layers_mask: int = field(init=False, default=0, repr=False, compare=False)
    """``layers`` as bits: made once here, asked for by every node of a batch."""

    def __post_init__(self) -> None:
        layers = self.layers
        if layers:
            if type(layers) is range and layers.step == 1:
                mask = (1 << layers.stop) - (1 << layers.start)
            else:
                mask = 0
                for layer in layers:
                    mask |= 1 << layer
            object.__setattr__(self, "layers_mask", mask)


NO_INPUT = Input()


class BackupRecord:
    """The backup of one radix node (or of an extent that is about to become one). Models of the shared machine; never registered.

    ``submitted`` and ``confirmed`` are bit masks of layers by payload: confirmed is within submitted, submitted within
    ``(1 << layers) - 1``. They are tuples: whoever keeps one, as the event log does, keeps the masks of now.
    """

    __slots__ = (
        "agreed",
        "bound",
        "confirmed",
        "failed_here",
        "generation",
        "hits",
        "node_id",
        "number",
        "state",
        "submitted",
        "wasted_pages",
    )

    def __init__(self, node_id: int, payloads: int, *, bound: bool) -> None:
        self.state: State = State.DEVICE_VALID_HOST_NONE
        self.node_id = node_id
        self.generation = 0
        self.bound = bound
        self.number: int | None = None
        self.agreed = False
        self.hits = 0
        self.submitted: tuple[int, ...] = (0,) * payloads
        self.confirmed = self.submitted
        self.failed_here = False
        self.wasted_pages = 0

    def watermarks(self) -> list[tuple[int, int]]:
        """(layers submitted, layers confirmed) by payload."""
        return [(s.bit_count(), c.bit_count()) for s, c in zip(self.submitted, self.confirmed, strict=True)]

    def describe(self) -> str:
        """One line for errors, logs and golden files."""
        marks = " ".join(f"{s}/{c}" for s, c in self.watermarks())
        flags = ("bound " if self.bound else "") + ("agreed " if self.agreed else "")
        number = "" if self.number is None else f"number {self.number} "
        return f"node {self.node_id} generation {self.generation} {self.state} {number}{flags}layers {marks}"

    def fork_into(self, head: BackupRecord) -> None:
        """Give ``head`` (the upper half of a split) this record's state and columns. Only a node that is not pending is divided, so
        there is no number to share."""
        head.state = self.state
        head.bound = self.bound
        head.generation = self.generation
        head.hits = self.hits
