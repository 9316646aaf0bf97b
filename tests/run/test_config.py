"""The options of a run: what is accepted, what is refused, and what follows from them."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from cphicache.run.config import SYNTHETIC_POOL_TOKENS, SYNTHETIC_REQUESTS, ConfigError, RunConfig

BAD_VALUES: list[tuple[str, Any, str]] = [
    ("trace", 3, "file or folder"),
    ("requests", 0, "1 to"),
    ("requests", True, "1 to"),
    ("scale", 0, "more than 0"),
    ("scale", -0.5, "more than 0"),
    ("scale", 1.01, "at most 1"),
    ("scale", float("nan"), "more than 0"),
    ("scale", 10**400, "at most 1"),
    ("scale", "1", "more than 0"),
    ("seed", -1, "0 to"),
    ("arrival", "later", "trace, asap"),
    ("tick_ms", 0.0, "more than 0"),
    ("tick_ms", float("inf"), "more than 0"),
    ("abort_rate", -0.01, "at least 0"),
    ("abort_rate", True, "at least 0"),
    ("retract_rate", 1.5, "at most 1"),
    ("cp_size", 0, "1 to 8"),
    ("cp_size", 9, "1 to 8"),
    ("kv_replicated", 1, "True or False"),
    ("launch", "fork", "threads, processes"),
    ("rank_timeout_s", 0.1, "at least 0.5"),
    ("check_ranks", -1, "0 to"),
    ("page_size", 0, "1 to 1024"),
    ("page_size", -16, "1 to 1024"),
    ("page_size", 1025, "1 to 1024"),
    ("page_size", 16.0, "1 to 1024"),
    ("device_tokens", 0, "1 to"),
    ("host_tokens", -1, "1 to"),
    ("kv", "gqa", "mla, mha, dsa"),
    ("kv_dtype", "int8", "bf16, fp16"),
    ("layout", "page_head", "layer_first, page_first, page_first_direct"),
    ("backend", "magic", "torch, direct, kernel, triton"),
    ("page_first_d2h", "loop", "pointer_table, triton"),
    ("reference_operators", 1, "True or False"),
    ("index_dim", 0, "1 to"),
    ("index_every", 0, "1 to"),
    ("layers", 0, "1 to"),
    ("draft_layers", -1, "0 to"),
    ("latent_dim", 0, "1 to"),
    ("rope_dim", -1, "0 to"),
    ("kv_heads", 0, "1 to"),
    ("head_dim", 0, "1 to"),
    ("chunk_tokens", 0, "1 to"),
    ("max_batch", 0, "1 to"),
    ("policy", "write_around", "write_through, write_through_selective, write_back"),
    ("policy", None, "write_through, write_through_selective, write_back"),
    ("selective_hits", 0, "1 to"),
    ("write_back_wait", "maybe", "wait, drop"),
    ("eviction_policy", "random", "lru, lfu, fifo, mru, priority"),
    ("reclaim_device_valid", 1, "True or False"),
    ("overlap", None, "True or False"),
    ("max_deferral_ticks", 0, "1 to"),
    ("max_retries", -1, "0 to"),
    ("load_back_threshold", -1, "0 to"),
    ("streams", "metal", "threads, virtual, cuda"),
    ("verify", ["all"], "all, sample, off"),
    ("log", "", "file or folder"),
    ("log_level", "debug", "off, lifecycle, ops"),
    ("out", 1.5, "file or folder"),
    ("json", "yes", "True or False"),
]


def refusal(**options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        RunConfig.from_mapping(options)
    text = str(caught.value)
    assert text.isprintable()
    return text


@pytest.mark.parametrize(("name", "value", "remedy"), BAD_VALUES)
def test_a_bad_value_is_refused_in_one_line(name: str, value: Any, remedy: str) -> None:
    """R35: a value that cannot work is refused at start, in one line that names option, value and remedy."""
    text = refusal(**{name: value})
    shown = value if isinstance(value, str) and value else repr(value)
    assert text.startswith(f"--{name.replace('_', '-')} {shown}: ")
    assert remedy in text


def test_every_option_is_checked() -> None:
    """R35: no option is accepted unchecked: each one has a bad value above, and an object of no use is refused by each."""
    names = {field.name for field in fields(RunConfig)}
    assert {name for name, _, _ in BAD_VALUES} == names
    for name in names:
        assert f"--{name.replace('_', '-')} " in refusal(**{name: object()})


def test_the_defaults_work_and_press_on_the_host_pool_from_above() -> None:
    """R16: the default run is a legal one whose host pool is not the smaller one, so that nothing starves for want of a switch."""
    config = RunConfig().sized_for(100)
    assert config.request_limit == SYNTHETIC_REQUESTS == 400
    assert (config.cp_size, config.page_size, config.scale) == (4, 16, 0.125)
    assert not config.host_smaller_than_device
    assert not config.reclaim_device_valid
    assert config.load_back_threshold == 10


def test_a_page_size_that_does_not_divide_the_chunk_is_refused() -> None:
    """R35: a chunk is whole pages; the refusal names both numbers and a chunk that works."""
    text = refusal(page_size=48, chunk_tokens=128)
    assert text.startswith("--chunk-tokens 128: ")
    assert "page_size 48" in text
    assert "give 96" in text
    assert "give 1024" in refusal(page_size=1024)
    for page_size in (1, 16, 64):
        assert RunConfig(page_size=page_size).sized_for(100).device_pages > 0


def test_a_device_pool_holds_one_chunk_and_one_page() -> None:
    """R35: the usable device pool (whole pages, equal for every rank) holds a chunk and a page more; the named minimum works."""
    options: dict[str, Any] = {"cp_size": 4, "page_size": 16, "chunk_tokens": 128}
    text = refusal(device_tokens=191, **options)
    assert text.startswith("--device-tokens 191: leaves 8 usable pages")
    assert "give at least 192" in text
    assert RunConfig(device_tokens=192, **options).device_pages == 12


def test_a_host_pool_holds_one_page_a_payload_on_each_rank() -> None:
    """R35: a host budget below one page a payload and rank is refused, and the named minimum works."""
    text = refusal(host_tokens=63, cp_size=4, page_size=16)
    assert text.startswith("--host-tokens 63: is below one page a payload")
    assert "give at least 64" in text
    assert RunConfig(host_tokens=64, cp_size=4, page_size=16).host_tokens_per_rank == 16


def test_pools_are_rounded_down_to_whole_pages_a_rank() -> None:
    """R4: ranks have equal lanes: device pages are a multiple of cp_size, and each rank's host share is whole pages."""
    config = RunConfig(cp_size=3, page_size=16, device_tokens=1000, host_tokens=1000)
    assert config.device_pages == 60  # 62 whole pages, 20 a rank
    assert config.host_tokens_per_rank == 320  # 333 slots a rank, 20 pages


@pytest.mark.parametrize(("host_tokens", "smaller"), [(768, True), (3071, True), (3072, False), (4096, False)])
def test_a_smaller_host_pool_is_told(host_tokens: int, smaller: bool) -> None:
    """R16: the configuration knows when the usable host pool is the smaller one, so that start-up can warn and name the switch."""
    assert RunConfig(device_tokens=3072, host_tokens=host_tokens).host_smaller_than_device is smaller


def test_item_sizes_follow_from_kind_and_shape() -> None:
    """R31: MLA holds latent and rope part as one bf16 item; MHA's K and V are items of heads x dim each."""
    assert RunConfig(kv="mla").item_elements == 40
    assert RunConfig(kv="mla").item_bytes == 80
    assert RunConfig(kv="mha").item_elements == 32
    assert RunConfig(kv="mha", kv_heads=3, head_dim=8).item_bytes == 48

    assert RunConfig(kv="dsa", index_dim=128).index_item_bytes == 132
    assert RunConfig(kv="mla", kv_dtype="fp8_e5m2").item_bytes == 40
    assert RunConfig(kv="dsa", kv_dtype="fp8_packed", latent_dim=512, rope_dim=64).item_bytes == 656


@pytest.mark.parametrize(
    ("options", "option", "why"),
    [
        ({"kv_dtype": "fp8_token_scales"}, "--kv-dtype fp8_token_scales", "scales lie in a buffer of their own"),
        ({"kv_dtype": "fp4_e2m1"}, "--kv-dtype fp4_e2m1", "scales lie in a buffer of their own"),
        ({"kv": "mha", "kv_dtype": "fp8_packed"}, "--kv-dtype fp8_packed", "has no MHA form"),
        ({"backend": "direct", "layout": "page_first"}, "--backend direct", "use layout page_first_direct"),
        ({"backend": "kernel", "layout": "page_first_direct"}, "--backend kernel", "use layout page_first"),
        ({"backend": "kernel", "rope_dim": 2}, "--backend kernel", "one item has 68"),
        ({"backend": "kernel", "kv": "dsa", "index_dim": 128, "page_size": 1}, "--backend kernel", "one indexer page has 132"),
        ({"reference_operators": True}, "--reference-operators", "choose backend kernel or direct"),
        ({"page_first_d2h": "triton", "backend": "kernel"}, "--page-first-d2h triton", "layout page_first"),
    ],
)
def test_copies_that_cannot_work_are_refused(options: dict[str, Any], option: str, why: str) -> None:
    """R32, R35: a KV dtype whose scales would not be moved, and a kind, layout and backend that do not work together, are refused at
    the arguments, in one line with the reason."""
    text = refusal(**options)
    assert text.startswith(f"{option} ") or text.startswith(f"{option}:")
    assert why in text


def test_unknown_and_repeated_names_are_refused() -> None:
    """R35: a misspelt option is refused with the nearest name, one that resembles none with all, a repeated one as such."""
    assert "'cp-sise' = 4: no such option; did you mean cp_size?" in refusal(**{"cp-sise": 4})
    assert "known are trace, requests" in refusal(zzzzzz=1)
    assert "given twice" in refusal(**{"cp_size": 4, "cp-size": 2})
    with pytest.raises(TypeError, match="cp_sise"):
        RunConfig(cp_sise=4)  # type: ignore[call-arg]


def test_options_come_from_a_mapping() -> None:
    """R35: a mapping with either spelling gives the same configuration as the constructor; paths may be strings."""
    given = RunConfig.from_mapping({"cp-size": 2, "trace": "requests.jsonl", "scale": 1, "requests": None})
    assert given == RunConfig(cp_size=2, trace=Path("requests.jsonl"), scale=1)
    assert given.request_limit is None
    assert RunConfig(trace=Path("requests.jsonl"), requests=7).request_limit == 7


def test_a_log_that_would_stay_empty_is_refused() -> None:
    """R36: asking for a log file and switching logging off contradict each other."""
    assert "log_level off" in refusal(log="events.jsonl", log_level="off")
    assert RunConfig(log_level="off").log is None


def test_pools_are_sized_where_the_options_leave_them_open() -> None:
    """R31: the default workload gets pools that it presses on, a trace one for twice its longest request; what is given stays."""
    default = RunConfig().sized_for(700)
    assert (default.device_tokens, default.host_tokens) == (SYNTHETIC_POOL_TOKENS, SYNTHETIC_POOL_TOKENS)
    traced = RunConfig(trace=Path("any.jsonl")).sized_for(5000)
    assert traced.device_pages * traced.page_size >= 10_000
    assert not traced.host_smaller_than_device
    given = RunConfig(trace=Path("any.jsonl"), device_tokens=4096, host_tokens=1024).sized_for(5000)
    assert (given.device_tokens, given.host_tokens) == (4096, 1024)


def test_a_gpu_run_needs_the_packages_and_not_their_stand_ins() -> None:
    """R35: with streams on the GPU the device pools lie there, and the CPU stand-ins of operators are refused."""
    assert RunConfig(streams="cuda").device_type == "cuda"
    assert RunConfig(streams="threads").device_type == "cpu"
    with pytest.raises(ConfigError, match=r"--reference-operators True: compute on CPU buffers"):
        RunConfig(streams="cuda", backend="kernel", reference_operators=True)
