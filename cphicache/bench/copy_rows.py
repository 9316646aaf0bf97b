"""How near copies of one layer come to a plain copy of as many bytes."""

from __future__ import annotations

from collections.abc import Callable

import torch

from cphicache.bench.harness import Effort, Measured, looped, ratio
from cphicache.transfer.backends.port import PageSlots
from cphicache.transfer.pools.device import DevicePool, KVShape
from cphicache.transfer.pools.host import make_host_pool

LAYERS = 16
PAGE_SIZE = 64
TOKENS = 8192
RUN_TOKENS = 1024
LATENT_ELEMENTS = 576


def backup_of_layer(layout: str, run_tokens: int) -> Callable[[Effort], Measured]:
    """memcpy's time over that of one layer's backup: runs of ``run_tokens`` neighbours, in random places on both sides."""

    def measure(effort: Effort) -> Measured:
        tokens = effort.size(TOKENS, least=2 * RUN_TOKENS)
        layers = effort.size(LAYERS, least=2)
        shape = KVShape("mla", layers, {"latent": LATENT_ELEMENTS}, torch.bfloat16)
        device = DevicePool(shape, tokens, page_size=PAGE_SIZE)
        host = make_host_pool(layout, shape, tokens, PAGE_SIZE)
        generator = torch.Generator().manual_seed(1)
        on_host, on_device = (_runs(tokens, run_tokens, generator) for _ in range(2))

        def backup(operations: int) -> None:
            for number in range(operations):
                host.backup_from_device_per_layer(device, on_host, on_device, number % layers, "torch")

        # The same buffers' bytes, in order: what no copy of a layer can pass.
        sources = [device.copy_rows(layer, "latent") for layer in range(layers)]
        destinations = torch.zeros(layers, *sources[0].shape, dtype=torch.uint8)

        def memcpy(operations: int) -> None:
            for number in range(operations):
                destinations[number % layers].copy_(sources[number % layers])

        return ratio("memcpy", "ours", {"ours": looped(backup), "memcpy": looped(memcpy)}, effort)

    return measure


def _runs(tokens: int, run_tokens: int, generator: torch.Generator) -> PageSlots:
    """All pages in runs of that many tokens, the runs in random order: page numbers, as a backup has them."""
    run_pages = run_tokens // PAGE_SIZE
    order: list[int] = torch.randperm(tokens // run_tokens, generator=generator).tolist()
    return PageSlots([run * run_pages + page for run in order for page in range(run_pages)], PAGE_SIZE)
