"""What a rank of ``cphicache run`` tells the others before the first step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from hashlib import blake2b

import torch

from cphicache import __version__
from cphicache.lifecycle import table_hash
from cphicache.run.config import RunConfig
from cphicache.run.trace import TraceRequest

_OWN_BUSINESS = frozenset({"trace", "log", "log_level", "out", "json", "launch"})
"""Options in which ranks may differ. The requests themselves are compared instead of the trace's name."""


def hello(config: RunConfig, requests: Sequence[TraceRequest]) -> dict[str, str]:
    """What a rank tells the others at start: fields by name."""
    digest = blake2b(digest_size=8)
    for request in requests:
        digest.update(repr(request).encode())
    options = {field.name: str(getattr(config, field.name)) for field in fields(config) if field.name not in _OWN_BUSINESS}
    return {
        "version": __version__,
        "torch": str(torch.__version__),
        "transition table": table_hash(),
        **options,
        "workload": f"{len(requests)} requests with digest {digest.hexdigest()}",
    }
