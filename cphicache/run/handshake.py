"""What ranks must have in common before the first step, and how a rank that differs is told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from hashlib import blake2b

import torch

from cphicache import __version__
from cphicache.lifecycle import table_hash
from cphicache.run.config import RunConfig
from cphicache.run.trace import TraceRequest

_OWN_BUSINESS = frozenset({"trace", "log", "log_level", "out", "json", "launch"})
"""Options in which ranks may differ. The requests themselves are compared instead of the trace's name."""


class HandshakeRefused(ValueError):
    """This rank, or another one, was started with something else than rank 0. The text names rank, field and both values."""


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


def check_equal(hellos: Sequence[Mapping[str, str]]) -> None:
    """Raise :class:`HandshakeRefused` unless all ranks (in rank order) have told the same."""
    first = hellos[0]
    for rank, told in enumerate(hellos):
        for name in [*first, *(name for name in told if name not in first)]:
            mine, other = first.get(name, "nothing"), told.get(name, "nothing")
            if mine != other:
                raise HandshakeRefused(
                    f"rank {rank} is refused: its {name.replace('_', ' ')} is {other}, rank 0 has {mine}; "
                    "start all ranks with the same options"
                )
