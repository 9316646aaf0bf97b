"""What ranks must have in common before the first step, and how one that differs is told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class HandshakeRefused(ValueError):
    """This rank, or another one, was started with something else than rank 0. The text names rank, field and both values."""


def check_equal(hellos: Sequence[Mapping[str, str]]) -> None:
    """Raise :class:`HandshakeRefused` unless all ranks (in rank order) have told the same: fields by name."""
    first = hellos[0]
    for rank, told in enumerate(hellos):
        for name in [*first, *(name for name in told if name not in first)]:
            mine, other = first.get(name, "nothing"), told.get(name, "nothing")
            if mine != other:
                raise HandshakeRefused(
                    f"rank {rank} is refused: its {name.replace('_', ' ')} is {other}, rank 0 has {mine}; "
                    "start all ranks with the same options"
                )
