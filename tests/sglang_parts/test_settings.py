"""The settings that are cphicache's own inside SGLang."""

from __future__ import annotations

from pathlib import Path

import pytest

from cphicache.sglang.refusal import SglangRefused
from cphicache.sglang.settings import Settings, load_settings


def test_variables_win_over_the_file(tmp_path: Path) -> None:
    """R35: the TOML file gives the settings, a CPHICACHE_ variable wins over it, and what neither names has its default."""
    path = tmp_path / "cphicache.toml"
    path.write_text('overlap = false\nmax_deferral_ticks = 7\nlog = "events.jsonl"\n', encoding="utf-8")
    found = load_settings(
        {"CPHICACHE_CONFIG": str(path), "CPHICACHE_MAX_DEFERRAL_TICKS": "9", "CPHICACHE_LOG_LEVEL": "ops", "HOME": "/"}
    )
    assert found == Settings(overlap=False, max_deferral_ticks=9, log="events.jsonl", log_level="ops")
    assert load_settings({}) == Settings()


@pytest.mark.parametrize(("text", "expected"), [("1", True), ("On", True), ("false", False), ("0", False)])
def test_a_flag_is_given_in_words_or_digits(text: str, expected: bool) -> None:
    """R35: what people write for yes and no."""
    assert load_settings({"CPHICACHE_OVERLAP": text, "CPHICACHE_RECLAIM_DEVICE_VALID": text}) == Settings(
        overlap=expected, reclaim_device_valid=expected
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("colour = 'red'", "'colour' is not a setting"),
        ("overlap = 1", "overlap=1: give a value of type bool"),
        ("overlap =", "give a readable TOML file"),
        ("write_back_short = 'never'", "write_back_short='never': give one of 'wait', 'drop'"),
        ("log_level = 'loud'", "log_level='loud': give one of"),
        ("rank_timeout_s = 0", "rank_timeout_s=0: give at least 1 second"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(tmp_path: Path, text: str, says: str) -> None:
    """R35: an unknown name, a value of another type or another value is refused in one line that names it."""
    path = tmp_path / "cphicache.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(SglangRefused) as refused:
        load_settings({"CPHICACHE_CONFIG": str(path)})
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [
        ("CPHICACHE_COLOUR", "red", "CPHICACHE_COLOUR is not a setting"),
        ("CPHICACHE_OVERLAP", "maybe", "give true or false"),
        ("CPHICACHE_MAX_RETRIES", "few", "give an integer"),
        ("CPHICACHE_CONFIG", "/nowhere/cphicache.toml", "give a readable TOML file"),
    ],
)
def test_a_variable_that_cannot_be_used_is_refused(variable: str, value: str, says: str) -> None:
    """R35: so is a variable, which is named."""
    with pytest.raises(SglangRefused, match=variable) as refused:
        load_settings({variable: value})
    assert says in str(refused.value)
