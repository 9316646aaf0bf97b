"""What an engine is told once, at construction. Equal on all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from cphicache.spaces.layout import CpSharedKVLayout


class WritePolicy(StrEnum):
    """When a node is backed up (R19)."""

    WRITE_THROUGH = "write_through"
    WRITE_THROUGH_SELECTIVE = "write_through_selective"
    WRITE_BACK = "write_back"


class WriteBackShort(StrEnum):
    """What an eviction under write_back does when the nodes that are backed up do not suffice."""

    WAIT = "wait"
    DROP = "drop"


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """Validated configuration of one :class:`~cphicache.engine.cache.CpHiRadixCache`.

    ``usable_pages``: logical device pages over all ranks, a multiple of ``cp_size``. ``payloads``: (name, layers) in the order in which
    the forward stores them, the target first. ``host_slots``: token slots of each rank's host pool, for each payload.
    """

    page_size: int
    cp_size: int
    usable_pages: int
    payloads: tuple[tuple[str, int], ...]
    host_slots: int
    base: int = 1
    policy: WritePolicy = WritePolicy.WRITE_THROUGH
    eviction_policy: str = "lru"
    reclaim_device_valid: bool = False
    overlap: bool = True
    selective_hits: int = 2
    max_deferral_ticks: int = 64
    max_retries: int = 4
    load_back_threshold: int = 10
    write_back_short: WriteBackShort = WriteBackShort.WAIT
    kv_replicated: bool = False
    """Every rank of the group stores all of the KV (``cp_size`` is 1): when a rank is lost, the others go on from the device."""

    def __post_init__(self) -> None:
        if not self.payloads or any(layers < 1 for _, layers in self.payloads):
            raise ValueError(f"payloads {self.payloads}: give at least one payload, each with at least one layer")
        if len({name for name, _ in self.payloads}) != len(self.payloads):
            raise ValueError(f"payloads {self.payloads}: give each payload a name of its own")
        if self.host_slots < self.page_size:
            raise ValueError(
                f"host pool of {self.host_slots} slots a rank and payload is below one page of {self.page_size}: "
                "give more host tokens, or a smaller page size"
            )
        for name, least in (("selective_hits", 1), ("max_deferral_ticks", 0), ("max_retries", 0), ("load_back_threshold", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} {getattr(self, name)}: give at least {least}")
        for name, kind in (("policy", WritePolicy), ("write_back_short", WriteBackShort)):
            if getattr(self, name) not in list(kind):
                raise ValueError(f"{name} {getattr(self, name)!r}: give one of {', '.join(kind)}")
            object.__setattr__(self, name, kind(getattr(self, name)))  # a plain name is as good as the member
        if self.kv_replicated and self.cp_size != 1:
            raise ValueError(f"kv_replicated with cp_size {self.cp_size}: each rank owns every page then; give cp_size 1")
        self.layout(0)  # page size, cp size and base are checked where they are used
        if self.usable_pages < self.cp_size or self.usable_pages % self.cp_size:
            raise ValueError(f"usable_pages {self.usable_pages}: give a positive multiple of cp_size {self.cp_size}")

    def layout(self, cp_rank: int) -> CpSharedKVLayout:
        """The layout as one rank sees it. Owners and reserved pages are the same on all."""
        return CpSharedKVLayout(self.page_size, self.cp_size, cp_rank, self.base)

    @property
    def payload_names(self) -> tuple[str, ...]:
        """Names of the payloads, in order."""
        return tuple(name for name, _ in self.payloads)
