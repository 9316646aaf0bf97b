"""What SGLang's device pools and its worker call so that the forward waits for a load-back, layer by layer."""

from __future__ import annotations

from typing import Protocol


class LayerGate(Protocol):
    """Who knows which load-backs the running forward reads."""

    def wait_layer(self, payload: str, layer: int) -> None:
        """Make the forward wait for the copies of one layer of a payload."""


class LayerCounter:
    """The layer counter of one payload's pool: ``set_consumer`` once a batch, ``wait_until`` at every read of a layer's KV.

    A batch waits for the load-backs that its own requests read, which the engine knows: the index that SGLang passes is sticky (later
    decode steps pass that of the prefill again) and would name one producer only. The draft's pool is never told of a consumer.
    """

    def __init__(self, gate: LayerGate, payload: str) -> None:
        self._gate = gate
        self._payload = payload
        self.consumer_index = -1

    def set_consumer(self, index: int) -> None:
        """Remember the producer index of the batch."""
        self.consumer_index = index

    def wait_until(self, layer: int) -> None:
        """The forward is about to read ``layer`` (counted from the pool's first)."""
        self._gate.wait_layer(self._payload, layer)
