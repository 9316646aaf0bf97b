"""cphicache: KV-cache backup from device to host, layer by layer, as an explicit state machine per radix node."""

__version__ = "0.1.0"
