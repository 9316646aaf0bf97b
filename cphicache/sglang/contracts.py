"""The versions of SGLang that cphicache fits: what it looks for in each, and the class that serves there.

A contract is told by what ``BasePrefixCache`` has, not by the version's number: versions between two tested ones have one or the other.
Nothing heavy is imported here: SGLang loads plug-ins in every process of the server.
"""

from __future__ import annotations

import pkgutil
from dataclasses import dataclass
from typing import Any

SRT = "sglang.srt."
BASE = SRT + "mem_cache.base_prefix_cache."


@dataclass(frozen=True, slots=True, kw_only=True)
class Contract:
    """``version``: the one that it is tested with. ``adapter``: ``module:class`` of the cache. ``names``: what SGLang calls or reads in a
    cache, and what the cache uses of SGLang's, as far as it is not the same in every version."""

    version: str
    adapter: str
    names: tuple[str, ...]

    def lacking(self) -> list[str]:
        """The names that the installed SGLang does not have."""
        return [name for name in self.names if not _exists(name)]

    def cache_class(self) -> Any:
        """The cache's class."""
        return pkgutil.resolve_name(self.adapter)


CONTRACTS = (
    Contract(
        version="0.5.20",
        adapter="cphicache.sglang.contract_0520:PrefixCache",
        names=(
            BASE + "BasePrefixCache.cache_unfinished_req",
            BASE + "BasePrefixCache.cache_finished_req",
            BASE + "MatchResult.device_indices",
        ),
    ),
)


def installed_contract() -> Contract:
    """The contract of the installed SGLang: the one that it lacks least of."""
    return min(CONTRACTS, key=lambda contract: len(contract.lacking()))


def _exists(target: str) -> bool:
    owner, _, name = target.rpartition(".")
    try:
        return hasattr(pkgutil.resolve_name(owner), name)
    except (ImportError, AttributeError):
        return False
