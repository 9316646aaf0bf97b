"""What a cache may be configured as: each limit at its edge, and what is refused beyond it (R35)."""

from __future__ import annotations

import re
from typing import Any

import pytest

from cphicache.engine import CacheConfig, WriteBackShort, WritePolicy
from tests.engine.rig import rig_config

AT_THE_EDGE: tuple[dict[str, Any], ...] = (
    {"payloads": (("target", 1),)},
    {"host_slots": 2},
    {"selective_hits": 1},
    {"max_deferral_ticks": 0},
    {"max_retries": 0},
    {"load_back_threshold": 0},
    {"usable_pages": 2},
    {"cp_size": 1, "kv_replicated": True},
    {"cp_size": 1, "usable_pages": 1},
)
BEYOND_IT: tuple[tuple[dict[str, Any], str], ...] = (
    ({"payloads": ()}, "give at least one payload"),
    ({"payloads": (("target", 2), ("draft", 0))}, "each with at least one layer"),
    ({"payloads": (("target", 2), ("target", 1))}, "give each payload a name of its own"),
    ({"host_slots": 1}, "host pool of 1 slots a rank and payload is below one page of 2"),
    ({"selective_hits": 0}, "selective_hits 0: give at least 1"),
    ({"max_deferral_ticks": -1}, "max_deferral_ticks -1: give at least 0"),
    ({"max_retries": -1}, "max_retries -1: give at least 0"),
    ({"load_back_threshold": -1}, "load_back_threshold -1: give at least 0"),
    ({"policy": "write_never"}, "policy 'write_never': give one of write_through, write_through_selective, write_back"),
    ({"write_back_short": "hope"}, "write_back_short 'hope': give one of wait, drop"),
    ({"cp_size": 2, "kv_replicated": True}, "kv_replicated with cp_size 2: each rank owns every page then; give cp_size 1"),
    ({"usable_pages": 0}, "usable_pages 0: give a positive multiple of cp_size 2"),
    ({"usable_pages": 3}, "usable_pages 3: give a positive multiple of cp_size 2"),
    ({"page_size": 0}, "page_size"),
    ({"cp_size": 0}, "cp_size"),
)


@pytest.mark.parametrize("options", AT_THE_EDGE, ids=str)
def test_the_least_of_everything_is_enough(options: dict[str, Any]) -> None:
    """R35: the smallest value that an option may have is accepted as given."""
    config = rig_config(**options)
    assert {name: getattr(config, name) for name in options} == options


@pytest.mark.parametrize(("options", "said"), BEYOND_IT, ids=[str(options) for options, _ in BEYOND_IT])
def test_what_cannot_be_served_is_refused_with_the_remedy(options: dict[str, Any], said: str) -> None:
    """R35: one below that is refused, by the name of the option, its value and what to give."""
    with pytest.raises(ValueError, match=re.escape(said)) as caught:
        rig_config(**options)
    assert "\n" not in str(caught.value)


def test_a_plain_name_is_as_good_as_the_member() -> None:
    """R35: policies may be given by name; what the configuration holds are the members, and equal configurations are equal."""
    named = rig_config(policy="write_back", write_back_short="drop")
    assert named == rig_config(policy=WritePolicy.WRITE_BACK, write_back_short=WriteBackShort.DROP)
    assert (named.policy is WritePolicy.WRITE_BACK, named.write_back_short is WriteBackShort.DROP) == (True, True)


def test_what_is_not_given_is_what_the_documents_say() -> None:
    """R16, R17, R19, R25, R35: the defaults: write-through in LRU order with overlap, no reclaim, two hits, 64 ticks, four retries, loads
    from 10 tokens on, an eviction that waits, KV that ranks share, page numbers from 1."""
    config = CacheConfig(page_size=2, cp_size=2, usable_pages=4, payloads=(("target", 1),), host_slots=4)
    assert (config.policy, config.eviction_policy, config.overlap, config.reclaim_device_valid) == (
        "write_through",
        "lru",
        True,
        False,
    )
    assert (config.selective_hits, config.max_deferral_ticks, config.max_retries, config.load_back_threshold) == (2, 64, 4, 10)
    assert (config.write_back_short, config.kv_replicated, config.base) == ("wait", False, 1)


def test_the_layout_is_that_of_the_rank() -> None:
    """R2: owners and reserved pages are those of the configuration on every rank; the rank is the one that asks."""
    layouts = [rig_config().layout(rank) for rank in (0, 1)]
    assert [layout.cp_rank for layout in layouts] == [0, 1]
    assert layouts[0].owners([1, 2, 3]) == layouts[1].owners([1, 2, 3]) == (0, 1, 0)  # type: ignore[list-item]
    assert rig_config().payload_names == ("target", "draft")
