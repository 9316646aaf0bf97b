"""`cphicache plan`: figures worked out by hand, and one line for whatever cannot be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from cphicache.run.plan import PRESETS, PlanError, model_shape, plan
from cphicache.run.plan_command import plan_command
from cphicache.transfer.budget import GIB, MemoryLimit


def run(*arguments: str) -> Any:
    return CliRunner().invoke(plan_command, arguments)


def test_deepseek_by_hand() -> None:
    """R31: DeepSeek-V3.2 in bfloat16, CP 8, 40 GiB device, 100 GiB host a rank, pages of 64.

    A token: latent (512 + 64) x 2 = 1,152 bytes a layer, indexer 128 + 4 = 132. Target, 61 layers: 70,272 + 8,052 = 78,324. Draft, 1
    layer: 1,284. Together 79,608; a page 5,094,912. Device: 40 x 2^30 / 5,094,912 = 8,429.8 pages; host: 21,074.8 pages. Host fill:
    21,074 x 5,094,912 bytes at 50 x 10^9 a second.
    """
    found = plan("deepseek-v3.2", PRESETS["deepseek-v3.2"], cp_size=8, device_gib=40, host_gib=100)
    assert found.component_bytes == {
        "target": {"latent": 70_272, "indexer": 8_052},
        "draft": {"latent": 1_152, "indexer": 132},
    }
    assert found.payload_bytes == {"target": 78_324, "draft": 1_284}
    assert (found.token_bytes, found.page_bytes) == (79_608, 5_094_912)
    assert (found.device.pages_per_rank, found.device.tokens_per_rank, found.device.tokens) == (8_429, 539_456, 4_315_648)
    assert (found.host.pages_per_rank, found.host.tokens_per_rank, found.host.tokens) == (21_074, 1_348_736, 10_789_888)
    assert found.host.bytes_per_rank == 21_074 * 5_094_912 == 107_370_175_488
    assert found.host.fill_seconds == 2.147
    assert found.warnings == []


def test_llama_by_hand() -> None:
    """R31: Llama-3-70B, TP 8 (one KV head a rank), 2^20 device tokens, half as many on the host, 25 GB/s.

    K and V: 80 layers x 1 head x 128 x 2 bytes = 20,480 each; a token 40,960; in FP8 half of it. Device: 40 GiB; host 20 GiB, which
    takes 0.859 s at 25 GB/s.
    """
    shape = PRESETS["llama-3-70b"]
    found = plan("llama-3-70b", shape, tp_size=8, device_tokens=1 << 20, host_ratio=0.5, gb_per_s=25)
    assert found.component_bytes == {"target": {"k": 20_480, "v": 20_480}}
    assert found.device.bytes_per_rank == 40 * GIB
    assert found.host.tokens_per_rank == 1 << 19
    assert found.host.bytes_per_rank == 20 * GIB
    assert found.host.fill_seconds == 0.859
    assert len(found.warnings) == 1
    assert "the host pool (524288 tokens a rank) is smaller than the device pool (1048576)" in found.warnings[0]
    assert plan("x", shape, kv_dtype="fp8_e4m3", device_tokens=64, host_tokens=64).token_bytes == 2 * 80 * 8 * 128
    assert plan("x", shape, tp_size=16, device_tokens=64, host_tokens=64).token_bytes == 40_960


@pytest.mark.parametrize(
    ("model", "token_bytes"),
    [
        ("deepseek-v3.2", 62 * (1152 + 132)),
        ("glm-5", 79 * (1152 + 132)),
        ("llama-3-70b", 80 * 2 * 8 * 128 * 2),
        ("qwen3-235b", 94 * 2 * 4 * 128 * 2),
    ],
)
def test_bytes_of_a_token_of_every_preset(model: str, token_bytes: int) -> None:
    """R31: layers x (item bytes) of each preset in bfloat16, the MTP layer included."""
    assert plan(model, PRESETS[model], device_tokens=64, host_tokens=64).token_bytes == token_bytes


def test_packed_rows_and_partial_indexers() -> None:
    """R31: packed FP8 MLA rows have 656 bytes; layers without indexer keys store none; draft layers have theirs."""
    shape = model_shape("deepseek-v3.2", indexer_layers=20)
    found = plan("x", shape, kv_dtype="fp8_packed", device_tokens=64, host_tokens=64)
    assert found.component_bytes["target"] == {"latent": 61 * 656, "indexer": 20 * 132}
    assert found.component_bytes["draft"] == {"latent": 656, "indexer": 132}


def test_a_model_of_ones_own() -> None:
    """R31: a shape can be described from scratch; without a draft there is one payload."""
    result = run("--kv", "mla", "--layers", "3", "--latent-dim", "6", "--rope-dim", "2", "--page-size", "4", "--device-tokens", "8",
                 "--host-tokens", "19", "--json")  # fmt: skip
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["payload_bytes"] == {"target": 48}
    assert (found["host"]["tokens_per_rank"], found["host"]["bytes_per_rank"]) == (16, 768)
    assert found["shape"]["draft_layers"] == 0


def test_the_table_has_the_figures_and_the_warning() -> None:
    """R31: a person reads the same numbers as a program, and the warning on stderr."""
    result = run("--model", "deepseek-v3.2", "--device-gib", "40", "--host-gib", "20")
    assert result.exit_code == 0, result.output
    for figure in ("79,608", "5,094,912", "539,456", "8,429", "39.99"):
        assert figure in result.stdout
    assert result.stderr.startswith("warning: the host pool")
    assert json.loads(run("--model", "deepseek-v3.2", "--device-gib", "40", "--host-gib", "20", "--json").stdout)["warnings"]


HOST = ("--device-gib", "40", "--host-gib", "100")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "llama3", *HOST), "--model llama3: is unknown; did you mean llama-3-70b?"),
        (("--model", "zzz", *HOST), "--model zzz: is unknown; choose one of deepseek-v3.2"),
        (HOST, "--model: is not given"),
        (("--kv", "dsa", "--layers", "2", "--latent-dim", "8", *HOST), "--index-dim 0: kv dsa needs at least 1"),
        (("--kv", "mamba", "--layers", "2", *HOST), "--kv mamba: is unknown"),
        (("--model", "glm-5", "--indexer-layers", "79", *HOST), "--indexer-layers 79: give 1 to 78"),
        (("--model", "glm-5", "--layers", "0", *HOST), "--layers 0:"),
        (("--model", "glm-5", "--draft-layers", "-1", *HOST), "--draft-layers -1:"),
        (("--model", "glm-5", "--kv-dtype", "int4", *HOST), "--kv-dtype int4: is unknown"),
        (("--model", "glm-5", "--kv-dtype", "fp8_token_scales", *HOST), "--kv-dtype fp8_token_scales: is not supported"),
        (("--model", "llama-3-70b", "--kv-dtype", "fp8_packed", *HOST), "--kv-dtype fp8_packed: has no MHA form"),
        (("--model", "llama-3-70b", "--tp-size", "3", *HOST), "--tp-size 3: does not divide 8 KV heads"),
        (("--model", "glm-5", "--cp-size", "0", *HOST), "--cp-size 0: is not in range"),
        (("--model", "glm-5", "--page-size", "2048", *HOST), "--page-size 2048: is not in range"),
        (("--model", "glm-5", "--gb-per-s", "nan", *HOST), "--gb-per-s nan: is not a bandwidth"),
        (("--model", "glm-5", "--gb-per-s", "1e-300", *HOST), "--gb-per-s 1e-300: is not a bandwidth; give 1e-06 to 1e+06"),
        (("--model", "glm-5", "--device-gib", "1e308", "--host-gib", "1"), "--device-gib 1e+308: is more than 281474976710656 tokens"),
        (("--model", "glm-5", "--device-tokens", "9" * 99, "--host-gib", "1"), "999: is more than 281474976710656 tokens"),
        (("--model", "glm-5", "--device-gib", "1", "--host-gib", "1e308"), "--host-gib 1e+308: is more than 281474976710656 tokens"),
        (("--model", "glm-5", "--device-gib", "1", "--host-ratio", "1e308"), "--host-ratio 1e+308: is more than"),
        (("--model", "glm-5", "--layers", "9" * 99, *HOST), "999: is too much; give at most 1048576"),
        (("--kv", "mha", "--layers", "2", "--kv-heads", "1048577", *HOST), "--kv-heads 1048577: is too much"),
        (("--model", "glm-5", "--host-gib", "1"), "nothing given: give exactly one"),
        (("--model", "glm-5", "--device-tokens", "64", *HOST), "--device-gib and --device-tokens given"),
        (("--model", "glm-5", "--device-gib", "inf", "--host-gib", "1"), "--device-gib inf: is not a finite number"),
        (("--model", "glm-5", "--device-gib", "0", "--host-gib", "1"), "--device-gib 0.0: is below one page of 64 tokens"),
        (("--model", "glm-5", "--device-gib", "40", "--host-gib", "0.001"), "--host-gib 0.001: is below one page"),
        (("--model", "glm-5", "--ranks-here", "8", *HOST), "--ranks-here: is for --check-memory"),
        (("--model", "glm-5", "--device-gib", "40"), "give exactly one of --host-tokens, --host-gib and --host-ratio"),
        (("--model", "glm-5", "--device-gib", "40", "--host-gib", "1000000", "--check-memory"), "--host-gib 1000000.0: needs"),
    ],
)  # fmt: skip
def test_impossible_input_is_one_line_and_exit_status_2(arguments: tuple[str, ...], message: str) -> None:
    """R35: what cannot be planned is one line that names the option and its value."""
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("cphicache: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_the_memory_of_the_machine_is_checked_for_all_its_ranks() -> None:
    """R31: with limits given, what all ranks of the machine take must fit them."""
    limits = [MemoryLimit("memory.max", 900 * GIB, 804 * GIB)]
    shape = PRESETS["glm-5"]
    assert plan("glm-5", shape, device_gib=40, host_gib=100, ranks_here=8, limits=limits).host.pages_per_rank
    with pytest.raises(ValueError, match=r"--host-gib 101: needs .* on each of 8 ranks"):
        plan("glm-5", shape, device_gib=40, host_gib=101, ranks_here=8, limits=limits)


def test_a_shape_checks_itself() -> None:
    """R35: a model without heads is refused where it is described."""
    with pytest.raises(PlanError, match="--kv-heads 0"):
        model_shape(None, kind="mha", layers=2, head_dim=8)


def test_the_example_in_the_docs_is_what_is_printed() -> None:
    """R31: docs/plan.md shows the command's own output."""
    text = (Path(__file__).resolve().parent.parent.parent / "docs" / "plan.md").read_text(encoding="utf-8")
    shown = [line.strip() for line in text.splitlines() if line.startswith("    ")]
    assert shown[0].startswith("cphicache plan ")
    result = run(*shown[0].split()[2:])
    assert result.exit_code == 0
    assert [line.strip() for line in result.stdout.splitlines()] == shown[1 : 1 + len(result.stdout.splitlines())]
