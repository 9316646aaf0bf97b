"""Speculative decoding: the draft model's KV is backed up and brought back together with the target's."""

import json

import pytest
from drafts import PARTED
from serving import models, run_script, served

CHAIN = {"speculative_num_steps": 2, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 3}
RUNS = {
    "EAGLE": ("drafted", "eagle", {"page_size": 16}),
    "NEXTN": ("mtp", None, {"page_size": 1, "hicache_mem_layout": "page_first_direct"}),
    "STANDALONE": ("drafted", "standalone", {"page_size": 64, "chunked_prefill_size": 128}),
}
"""Model, draft model and options by algorithm."""
REQUESTS = 12
SMALL = {"max_total_tokens": 768, "chunked_prefill_size": 64}
LARGE = {"max_total_tokens": 2048}
NOISE = 0.02


def speculative(algorithm):
    _, draft, _ = RUNS[algorithm]
    path = {} if draft is None else {"speculative_draft_model_path": str(models() / draft)}
    return {"speculative_algorithm": algorithm, **CHAIN, **path}


def run(algorithm):
    model, _, options = RUNS[algorithm]
    options = SMALL | options | speculative(algorithm)
    return served(model, "drafts", requests=REQUESTS, options=options)


def told(result):
    return {rid: one for rid, one in result["served"].items() if isinstance(one, dict) and "tokens" in one}


def accept_length(*requests):
    """Tokens a verification, the target's own included."""
    return 1 + sum(one["drafted_right"] for one in requests) / sum(one["verified"] for one in requests)


@pytest.mark.parametrize("algorithm", RUNS)
def test_draft_kv_comes_back_from_the_host(algorithm):
    """R5, R31: the tokens of a run without drafts and cache; host hits; the bytes of both models; the D2H of both overlaps the forward."""
    result = run(algorithm)
    plain = served(RUNS[algorithm][0], "drafts", "none", requests=REQUESTS, options=LARGE)
    assert {rid: one["tokens"] for rid, one in told(result).items()} == {rid: one["tokens"] for rid, one in told(plain).items()}
    assert result["served"]["back"]["host"] > 0
    assert set(result["served"]["same_bytes"]) == {"target", "draft"}
    assert all(all(layers) for layers in result["served"]["same_bytes"].values())
    assert result["watch"]["findings"] == []
    assert result["watch"]["early"] == result["watch"]["draft_early"] == result["watch"]["forwards_with_backup"] > 0


@pytest.mark.parametrize("algorithm", RUNS)
def test_a_prefix_ends_one_token_earlier_with_a_draft(algorithm):
    """R28: the draft's KV of a token depends on the next one: two prompts that part behind a page share the pages before it."""
    served, page_size = run(algorithm)["served"], RUNS[algorithm][2]["page_size"]
    assert served["parted"]["device"] == PARTED - page_size
    assert served["back"]["cached"] == (served["length"] - 2) // page_size * page_size  # the last token is computed, and its pair


@pytest.mark.parametrize("algorithm", RUNS)
def test_drafts_are_right_as_often_as_without_a_cache(algorithm):
    """R5: the accept length of a run with host hits is that of a run without any cache."""
    result = told(run(algorithm))
    uncached = told(served(RUNS[algorithm][0], "drafts", "none", requests=REQUESTS, options=LARGE | speculative(algorithm)))
    same = [rid for rid in result if rid != "forgotten"]
    assert sum(result[rid]["host"] for rid in same) > 0
    assert accept_length(*(result[rid] for rid in same)) == pytest.approx(
        accept_length(*(uncached[rid] for rid in same)), rel=NOISE
    )


@pytest.mark.parametrize("algorithm", RUNS)
def test_draft_kv_that_is_not_brought_back_shows(algorithm):
    """R5: with the target's KV brought back and the draft's not, the tokens are right, and drafts less often (control of the above)."""
    result = run(algorithm)["served"]
    assert result["forgotten"]["host"] > 0
    assert result["forgotten"]["tokens"] == result["first"]["tokens"]
    assert all(result["forgotten_bytes"]["target"])
    assert not any(result["forgotten_bytes"]["draft"])
    assert accept_length(result["forgotten"]) < (1 - 5 * NOISE) * accept_length(result["back"])


def test_dsa_pool_moves_latent_and_indexer_keys():
    """R31: pages of SGLang's real DSA pool come back on other pages, byte for byte, and nothing else is written."""
    done = run_script("dsa.py")
    assert done.returncode == 0, done.stderr[-4000:]
    moved = json.loads(done.stdout.splitlines()[-1])
    assert len(moved["equal"]) == 7
    assert all(moved["equal"])
    assert all(moved["untouched"])
    assert moved["token_bytes"] == 4 * 2 * (512 + 64) + 3 * (128 + 4)
