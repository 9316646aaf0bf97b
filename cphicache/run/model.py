"""The reference model: it "computes" KV whose every byte is known from the tokens, and reads back what it reuses.

Stores and reads are work of the rank's compute stream, as kernels are on a GPU, so that a copy, a load-back or a reuse of pages that is
not ordered after (or before) them shows as wrong bytes. The target's layers come first, the draft's in a second pass of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from cphicache.check.reference import ReferenceKV, first_difference
from cphicache.engine import CpHiRadixCache
from cphicache.spaces.layout import CpSharedKVLayout
from cphicache.spaces.tensors import owned_locs
from cphicache.spaces.types import LogicalPage
from cphicache.transfer.pools.device import DevicePool
from cphicache.transfer.streams.port import Streams

COMPUTE_US_PER_LAYER = 20.0
"""Virtual time in which one layer computes whatever batch, and more with each token:"""
COMPUTE_US_PER_TOKEN = 1.0
MISMATCHES_KEPT = 8

Words = npt.NDArray[np.uint64]


@dataclass(slots=True)
class Segment:
    """One request's part in a forward: it stores tokens ``start`` .. ``end`` and reads (and has checked) ``check_from`` .. ``check_to``.

    ``hashes``: prefix hash of each token of the request. ``row``: its logical pages. ``nodes``: (first page behind it, node id) of the
    reused prefix, for evidence.
    """

    rid: str
    row: Sequence[LogicalPage]
    hashes: Words
    start: int
    end: int
    check_to: int = 0
    nodes: Sequence[tuple[int, int]] = ()


class Mismatch(NamedTuple):
    """The first wrong byte of a read: where it was, what it should have been and what it was."""

    rid: str
    node: int | None
    rank: int
    payload: str
    layer: int
    component: str
    position: int
    byte: int
    expected: int
    found: int

    def describe(self) -> str:
        """One line."""
        return (
            f"request {self.rid} node {self.node} rank {self.rank} {self.payload} layer {self.layer} {self.component} "
            f"position {self.position} byte {self.byte}: expected {self.expected:#04x}, found {self.found:#04x}"
        )


@dataclass(slots=True)
class Verdict:
    """What the checks found on this rank."""

    mismatches: int = 0
    bytes_checked: int = 0
    evidence: list[Mismatch] = field(default_factory=list)
    kept: int = MISMATCHES_KEPT
    """Most entries of ``evidence``; later mismatches are only counted."""


class _Rows(NamedTuple):
    """This rank's part of some tokens: device slots, positions, prefix hashes, and the segment that each belongs to."""

    slots: torch.Tensor
    positions: npt.NDArray[np.int64]
    hashes: Words
    segments: npt.NDArray[np.int64]


class ReferenceModel:
    """One rank's model: stores the tokens of its own pages, for all payloads and layers."""

    def __init__(
        self,
        layout: CpSharedKVLayout,
        pools: Mapping[str, DevicePool],
        streams: Streams,
        reference: ReferenceKV,
        verdict: Verdict,
        *,
        rank: int | None = None,
        stores: bool = True,
    ) -> None:
        """``stores=False``: nobody will look at the bytes, so none are computed; the forward takes the same virtual time."""
        self._layout = layout
        self._stores = stores
        self._rank = layout.cp_rank if rank is None else rank  # for evidence; ranks that all have the KV have one layout
        self._pools = pools
        self._compute = streams.stream("compute")
        self._reference = reference
        self._verdict = verdict

    def forward(
        self, batch_id: int, segments: Sequence[Segment], cache: CpHiRadixCache, after_layer: Callable[[str, int], None]
    ) -> None:
        """Issue one forward pass; ``after_layer(payload, layer)`` is called when a layer has been issued and reported."""
        stored = self._rows(segments, [(s.start, s.end) if self._stores else (0, 0) for s in segments])
        checked = self._rows(segments, [(0, s.check_to) for s in segments])
        cost_us = COMPUTE_US_PER_LAYER + COMPUTE_US_PER_TOKEN * sum(s.end - s.start for s in segments)
        for index, (payload, pool) in enumerate(self._pools.items()):
            for layer in range(pool.shape.layers):
                cache.wait_layer(batch_id, payload, layer)
                if checked.slots.numel():
                    self._compute.submit(self._check(pool, payload, layer, checked, segments))
                self._compute.submit(self._store(pool, payload, layer, stored), cost_us=cost_us)
                cache.layer_stored(batch_id, index, layer)
                after_layer(payload, layer)
            cache.end_payload(batch_id, index)
        cache.end_forward(batch_id)

    def _rows(self, segments: Sequence[Segment], spans: Sequence[tuple[int, int]]) -> _Rows:
        size = self._layout.page_size
        slots, positions, hashes, owners = [], [], [], []
        for index, (segment, (start, end)) in enumerate(zip(segments, spans, strict=True)):
            if start >= end:
                continue
            first = start // size
            relative, physical = owned_locs(self._layout, segment.row[first : -(-end // size)])
            at = relative.numpy() + first * size
            inside = (at >= start) & (at < end)
            at = at[inside]
            slots.append(physical[torch.from_numpy(inside)])
            positions.append(at)
            hashes.append(segment.hashes[at])
            owners.append(np.full(len(at), index, dtype=np.int64))
        if not slots:
            return _Rows(torch.empty(0, dtype=torch.int64), np.empty(0, np.int64), np.empty(0, np.uint64), np.empty(0, np.int64))
        return _Rows(torch.cat(slots), np.concatenate(positions), np.concatenate(hashes), np.concatenate(owners))

    def _expected(self, pool: DevicePool, payload: str, layer: int, component: str, rows: _Rows) -> torch.Tensor:
        return self._reference.expected(
            rows.hashes,
            rows.positions,
            payload=payload,
            layer=layer,
            component=component,
            item_bytes=pool.shape.item_bytes(component),
        )

    def _store(self, pool: DevicePool, payload: str, layer: int, rows: _Rows) -> Callable[[], None]:
        def store() -> None:
            names = pool.shape.components_of(layer)
            pool.store(layer, rows.slots, {name: self._expected(pool, payload, layer, name, rows) for name in names})

        return store if rows.slots.numel() else _nothing

    def _check(self, pool: DevicePool, payload: str, layer: int, rows: _Rows, segments: Sequence[Segment]) -> Callable[[], None]:
        def check() -> None:
            for component, found in pool.read(layer, rows.slots).items():
                expected = self._expected(pool, payload, layer, component, rows)
                self._verdict.bytes_checked += expected.numel()
                difference = first_difference(expected, found.cpu())
                if difference is None:
                    continue
                self._verdict.mismatches += 1
                if len(self._verdict.evidence) < self._verdict.kept:
                    row, byte = difference
                    segment, position = segments[int(rows.segments[row])], int(rows.positions[row])
                    page = position // self._layout.page_size
                    self._verdict.evidence.append(
                        Mismatch(
                            segment.rid,
                            next((node for end, node in segment.nodes if page < end), None),
                            self._rank,
                            payload,
                            layer,
                            component,
                            position,
                            byte,
                            int(expected[row, byte]),
                            int(found[row, byte]),
                        )
                    )

        return check


def _nothing() -> None:
    """This rank stores nothing of the batch; its kernel still takes its time."""
