"""What a backup layer by layer gains over one of all layers after the forward, on a stream of prefill chunks.

Every chunk is a request of its own with fresh tokens. Its node cannot be evicted before its backup has committed, so that with few pages
the next chunk may have to wait: the exposed stall.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from cphicache.engine import CpHiRadixCache
from cphicache.lifecycle import State
from cphicache.run.study.serve import ServeConfig
from cphicache.run.study.transfer import Clock, MetadataTransfer
from cphicache.spaces.types import LogicalPage

TICK_US = 200.0
"""Virtual time of a scheduler step in which nothing is computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """``tokens`` a chunk over all ``cp_size`` ranks; ``compute_us``: a chunk's compute in one layer; ``gb_per_s``: D2H of one rank;
    ``token_layer_bytes``: KV of one token in one layer; ``pool_chunks``: what the device pool holds, in chunks."""

    layers: int = 61
    compute_us: float = 4_500.0
    gb_per_s: float = 50.0
    cp_size: int = 8
    tokens: int = 8192
    token_layer_bytes: int = 1152
    pool_chunks: float = 2.0
    chunks: int = 40
    page_size: int = 64

    @property
    def copy_us(self) -> float:
        """Time in which one rank copies its share of a chunk's layer."""
        return self.tokens * self.token_layer_bytes / self.cp_size / (self.gb_per_s * 1e3)


PRESETS: Mapping[str, Setting] = MappingProxyType(
    {
        "h100": Setting(compute_us=4_500.0, gb_per_s=50.0),
        "gb300": Setting(compute_us=1_500.0, gb_per_s=180.0),
    }
)
"""H100 on PCIe 5.0 (50 GB/s), GB300 on NVLink-C2C (180 GB/s). Compute a layer: 8,192 tokens of a 61-layer MLA model, assumed: about 30,000
and 90,000 tokens a second for the group of ranks. Give your own with the options."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one mode gave.

    ``copied_us``: from a chunk's last KV store to the end of its copies (mean). ``visible_us``, ``longest_us``: to the tick in which its
    backup is host-visible (mean, most). ``held_chunks``, ``held_bytes``: device pages of a rank that are kept for backups after their
    forward (mean over time). ``copy_engine``: share of the time in which the link copies. ``stall``: share of the time in which the
    forward waits for device pages. ``total_us``: to the end of the last forward.
    """

    overlap: bool
    copied_us: float
    visible_us: float
    longest_us: float
    held_chunks: float
    held_bytes: float
    copy_engine: float
    stall: float
    total_us: float


class _Stream:
    def __init__(self, setting: Setting, *, overlap: bool) -> None:
        self.setting = setting
        pages = int(setting.tokens * setting.pool_chunks) // setting.page_size
        config = ServeConfig(
            device_tokens=-(-pages // setting.cp_size) * setting.cp_size * setting.page_size,
            host_tokens=setting.tokens * (setting.chunks + 1),
            page_size=setting.page_size,
            cp_size=setting.cp_size,
            layers=setting.layers,
            token_layer_bytes=setting.token_layer_bytes,
            d2h_gb_per_s=setting.gb_per_s,
            overlap=overlap,
        )
        self.clock: Clock
        self.transfer: MetadataTransfer
        self.cache: CpHiRadixCache
        self.clock, self.transfer, self.cache = config.parts()
        self.stored_us: dict[int, float] = {}
        self.waits_us: list[float] = []
        self.copies_us: list[float] = []
        self.stalled_us = 0.0

    def tick(self) -> None:
        self.cache.begin_tick()
        tree = self.cache.state.tree
        for node_id, stored_us in list(self.stored_us.items()):
            node = tree.find(node_id)
            if node is None or node.backup.state is State.COMMITTED:
                self.waits_us.append(self.clock.now - stored_us)
                del self.stored_us[node_id]

    def pages_for_chunk(self) -> list[LogicalPage]:
        """Pages of a chunk; while there are none, time goes on from one end of a copy, or one tick, to the next."""
        count = self.setting.tokens // self.setting.page_size
        while (pages := self.cache.alloc(count, None)) is None:
            before = self.clock.now
            ends_us = self.transfer.next_end_us()
            self.clock.now = max(before + TICK_US, ends_us or 0.0)
            self.stalled_us += self.clock.now - before
            self.tick()
        return pages

    def chunk(self, number: int) -> None:
        cache, setting, clock, rid = self.cache, self.setting, self.clock, f"r{number}"
        self.tick()
        row = self.pages_for_chunk()
        key = cache.key([number] * setting.tokens)
        cache.admit(rid, cache.state.tree.root, 0)
        cache.stores(rid, number, 0)
        cache.reserve(rid, number, key, row)
        clock.compute = clock.now
        for layer in range(setting.layers):
            clock.compute += setting.compute_us
            cache.layer_stored(number, 0, layer)
        cache.end_payload(number, 0)
        cache.end_forward(number)
        clock.now = clock.compute
        self.copies_us.append(max(0.0, self.transfer.d2h.free_us - clock.now))
        cache.finish(rid, key, row)
        node = cache.match_prefix(key).walk.path[-1]
        self.stored_us[node.id] = clock.now


def run(setting: Setting, *, overlap: bool) -> Outcome:
    """The stream of chunks in one mode, until everything is host-visible. ValueError for a pool below one chunk."""
    if setting.pool_chunks < 1 or setting.chunks < 1 or setting.tokens % (setting.page_size * setting.cp_size):
        raise ValueError(
            f"{setting}: give a pool of at least one chunk, at least one chunk, and chunks of whole pages on every rank "
            f"(multiples of {setting.page_size * setting.cp_size} tokens)"
        )
    stream = _Stream(setting, overlap=overlap)
    for number in range(1, setting.chunks + 1):
        stream.chunk(number)
    computed_us = stream.clock.now
    while stream.stored_us:
        stream.clock.now = max(stream.clock.now + TICK_US, stream.transfer.next_end_us() or 0.0)
        stream.tick()
    held = sum(stream.waits_us) / computed_us
    chunk_bytes = setting.tokens * setting.token_layer_bytes * setting.layers / setting.cp_size
    return Outcome(
        overlap=overlap,
        copied_us=sum(stream.copies_us) / len(stream.copies_us),
        visible_us=sum(stream.waits_us) / len(stream.waits_us),
        longest_us=max(stream.waits_us),
        held_chunks=held,
        held_bytes=held * chunk_bytes,
        copy_engine=stream.transfer.d2h.busy_us / stream.clock.now,
        stall=stream.stalled_us / computed_us,
        total_us=computed_us,
    )


def over_bandwidths(setting: Setting, gb_per_s: list[float]) -> list[dict[str, float]]:
    """Both modes at each bandwidth, as plain rows."""
    rows = []
    for value in gb_per_s:
        changed = replace(setting, gb_per_s=value)
        layered, whole = (run(changed, overlap=overlap) for overlap in (True, False))
        rows.append(
            {
                "gb_per_s": value,
                "copy over compute": changed.copy_us / changed.compute_us,
                "per layer copied ms": layered.copied_us / 1e3,
                "all layers copied ms": whole.copied_us / 1e3,
                "per layer visible ms": layered.visible_us / 1e3,
                "all layers visible ms": whole.visible_us / 1e3,
                "per layer stall": layered.stall,
                "all layers stall": whole.stall,
                "per layer held chunks": layered.held_chunks,
                "all layers held chunks": whole.held_chunks,
                "copy engine": layered.copy_engine,
            }
        )
    return rows
