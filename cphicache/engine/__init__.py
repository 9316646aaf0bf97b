"""The logical half of a rank. :class:`CpHiRadixCache` is what a scheduler talks to."""

from cphicache.engine.cache import CacheMisuse, CpHiRadixCache
from cphicache.engine.config import CacheConfig, WriteBackShort, WritePolicy
from cphicache.engine.counters import Counters
from cphicache.engine.digest import StateDigest
from cphicache.engine.eviction import EvictResult
from cphicache.engine.loadback import load_back_quota
from cphicache.engine.records import LoadAnswer, Match, Refusal, TickReport

__all__ = [
    "CacheConfig",
    "CacheMisuse",
    "Counters",
    "CpHiRadixCache",
    "EvictResult",
    "LoadAnswer",
    "Match",
    "Refusal",
    "StateDigest",
    "TickReport",
    "WriteBackShort",
    "WritePolicy",
    "load_back_quota",
]
