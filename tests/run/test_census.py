"""The census of real engines: it can be taken between any two calls, and the outside checker finds nothing wrong with it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cphicache.engine import CacheConfig, WriteBackShort, WritePolicy
from cphicache.lifecycle import State
from cphicache.run.census import take_census
from tests.engine_server import Server, Step


def config(**changed: Any) -> CacheConfig:
    given: dict[str, Any] = {
        "page_size": 2,
        "cp_size": 2,
        "usable_pages": 16,
        "payloads": (("target", 2), ("draft", 1)),
        "host_slots": 12,
        "load_back_threshold": 2,
        "max_deferral_ticks": 3,
        "max_retries": 2,
    }
    return CacheConfig(**{**given, **changed})


PROMPTS = st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=5).map(tuple), st.integers(0, 1))
STEPS = st.builds(
    Step,
    prompts=st.lists(PROMPTS, max_size=2).map(tuple),
    chunk_tokens=st.sampled_from([3, 4, 20]),
    abort=st.none() | st.integers(0, 2),
    abort_layer=st.integers(-1, 1),
    evict_tokens=st.sampled_from([0, 0, 4, 20]),
    report=st.sampled_from(["all", "all", "none", "no_draft"]),
    copies=st.sampled_from(["go_on", "hold", "finish", "fail", "finish_all"]),
    pick=st.integers(0, 3),
    fault=st.sampled_from(["", "", "reserve", "copy"]),
    reset=st.sampled_from([False] * 15 + [True]),
)
CONFIGS = st.builds(
    config,
    cp_size=st.sampled_from([1, 2]),
    payloads=st.sampled_from([(("target", 2),), (("target", 2), ("draft", 1))]),
    base=st.sampled_from([0, 1]),
    host_slots=st.sampled_from([4, 8, 40]),
    policy=st.sampled_from([WritePolicy.WRITE_THROUGH] * 2 + list(WritePolicy)),
    reclaim_device_valid=st.booleans(),
    overlap=st.booleans(),
    write_back_short=st.sampled_from(list(WriteBackShort)),
)


@given(CONFIGS, st.integers(0, 1), st.lists(STEPS, min_size=3, max_size=12))
@settings(derandomize=True, max_examples=150, deadline=None)
def test_conservation_holds_after_every_call(settings_: CacheConfig, rank: int, steps: list[Step]) -> None:
    """R30: after every call of a random history, with faults, aborts, evictions and resets, all accounts agree; then all is quiet."""
    server = Server(settings_, rank % settings_.cp_size)
    for step in steps:
        server.step(step)
    server.rest()
