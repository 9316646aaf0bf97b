"""What simulated worlds have found, each as the shrunk world that showed it."""

from __future__ import annotations

import pytest

from cphicache.run.simulate.drawn import DrawnWorld, draw
from cphicache.run.simulate.judge import simulate
from cphicache.run.simulate.outcome import Code

LOCKED_WHOLE = DrawnWorld(
    options={
        "seed": 46,
        "requests": 9,
        "scale": 0.015625,
        "arrival": "asap",
        "abort_rate": 0.0,
        "retract_rate": 0.0,
        "cp_size": 1,
        "page_size": 1,
        "device_tokens": 72,
        "host_tokens": 288,
        "layers": 1,
        "draft_layers": 0,
        "latent_dim": 12,
        "rope_dim": 4,
        "chunk_tokens": 48,
        "max_batch": 1,
        "policy": "write_back",
        "write_back_wait": "drop",
        "max_deferral_ticks": 1,
        "max_retries": 0,
        "streams": "virtual",
    },
    slowness=(2.0,),
    jitter=5.0,
)


def test_a_request_is_served_although_the_node_that_it_matches_in_part_fills_the_pool() -> None:
    """R13, R24: the lock of a partly matched node holds all of it. A request that fits the pool, but not beside that node, gives up that
    part of its match once nothing else runs, and is served."""
    outcome = simulate(LOCKED_WHOLE)
    assert outcome.code is Code.FINE, outcome.text
    assert outcome.seen["requests"] == 9


@pytest.mark.parametrize("seed", [943, 993])
def test_a_forward_waits_for_the_load_backs_of_a_request_that_was_aborted_inside_it(seed: int) -> None:
    """R25: the batch reads a loading node to the end of its forward, so it waits for every layer, the reader's abort notwithstanding."""
    outcome = simulate(draw(seed))
    assert outcome.code is Code.FINE, outcome.text
