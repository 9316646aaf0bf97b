"""Speculative decoding: the draft model's KV is backed up and brought back together with the target's."""

import json

import pytest
from test_scheduler import call, models, served

CHAIN = {"speculative_num_steps": 2, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 3}
RUNS = {
    "EAGLE": ("drafted", "eagle", {"page_size": 16}),
    "NEXTN": ("mtp", None, {"page_size": 1, "hicache_mem_layout": "page_first_direct"}),
    "STANDALONE": ("drafted", "standalone", {"page_size": 64, "chunked_prefill_size": 128}),
}
"""Model, draft model and options by algorithm."""
REQUESTS = 14
SMALL = {"max_total_tokens": 768, "chunked_prefill_size": 64}
NOISE = 0.02


def run(algorithm, backend="cphicache", **config):
    model, draft, options = RUNS[algorithm]
    options = {"speculative_algorithm": algorithm, **CHAIN} | (
        SMALL | options if backend == "cphicache" else {"max_total_tokens": 2048}
    )
    if draft is not None:
        options["speculative_draft_model_path"] = str(models() / draft)
    return served(model, "drafts", backend, requests=REQUESTS, options=options, **config)


def plain(model):
    return served(model, "drafts", "none", requests=REQUESTS, options={"max_total_tokens": 2048})


def told(result):
    return {rid: one for rid, one in result["served"].items() if rid != "same_bytes"}


def accept_length(result):
    """Tokens a verification, the target's own included."""
    verified = sum(one["verified"] for one in told(result).values())
    return 1 + sum(one["drafted_right"] for one in told(result).values()) / verified


def tokens(result):
    return {rid: one["tokens"] for rid, one in told(result).items()}


@pytest.mark.parametrize("algorithm", RUNS)
def test_draft_kv_comes_back_from_the_host(algorithm):
    """R5, R31: equal tokens, host hits, the bytes of both models, and drafts that are right as often as in a run without any cache."""
    result, uncached = run(algorithm), run(algorithm, "none")
    assert tokens(result) == tokens(plain(RUNS[algorithm][0]))
    assert result["served"]["back"]["host"] > 0
    assert set(result["served"]["same_bytes"]) == {"target", "draft"}
    assert all(all(layers) for layers in result["served"]["same_bytes"].values())
    assert result["watch"]["findings"] == []
    assert result["watch"]["early"] == result["watch"]["draft_early"] == result["watch"]["forwards_with_backup"] > 0
    assert accept_length(result) == pytest.approx(accept_length(uncached), rel=NOISE)


@pytest.mark.parametrize("algorithm", ["EAGLE", "NEXTN"])
def test_draft_kv_that_is_not_brought_back_shows(algorithm):
    """R5: with the target's KV brought back and the draft's not, the tokens are right and drafts less often (control)."""
    control = run(algorithm, forget_draft=True)
    assert tokens(control) == tokens(plain(RUNS[algorithm][0]))
    assert all(control["served"]["same_bytes"]["target"])
    assert not any(control["served"]["same_bytes"]["draft"])
    assert accept_length(control) < (1 - 5 * NOISE) * accept_length(run(algorithm))


def test_dsa_pool_moves_latent_and_indexer_keys():
    """R31: pages of SGLang's real DSA pool come back on other pages, byte for byte, and nothing else is written."""
    done = call("dsa.py")
    assert done.returncode == 0, done.stderr[-4000:]
    moved = json.loads(done.stdout.splitlines()[-1])
    assert len(moved["equal"]) == 7
    assert all(moved["equal"])
    assert all(moved["untouched"])
    assert moved["token_bytes"] == 4 * 2 * (512 + 64) + 3 * (128 + 4)
