"""Golden stories: what a reviewer wants to read, kept true."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.golden.story import StoryError, retell

STORIES = Path(__file__).parent / "stories"
NAMES = sorted(path.stem for path in STORIES.glob("*.txt"))


@pytest.mark.parametrize("name", NAMES)
def test_a_story_is_told_as_it_was(name: str, request: pytest.FixtureRequest) -> None:
    """R13, R14, R16, R17, R18, R21, R22, R25: the real engine, over recorded ports, does what the story says: states, locks, host
    slots, reductions, and what it asks of the local half. ``--rewrite-golden`` writes what it does now: read the difference."""
    path = STORIES / f"{name}.txt"
    text = path.read_text(encoding="utf-8")
    now = retell(text)
    if request.config.getoption("--rewrite-golden"):
        path.write_text(now, encoding="utf-8")
    else:
        assert now.splitlines() == text.splitlines()


def test_every_story_that_is_asked_for_is_there() -> None:
    """R30: the stories cover the lives of a backup that a reviewer asks about first."""
    assert set(NAMES) >= {
        "abort_mid_flight",
        "chunked_prompt",
        "draft_fails",
        "happy_path",
        "host_full",
        "load_back_during_eviction",
        "rank_fails",
        "reset",
        "split_during_backup",
    }


WORLD = "world cp_size=1 usable_pages=8 host_slots=4 payloads=target:1\nrequest a pages 1 2 chunks 2 forwards 0\n"


@pytest.mark.parametrize(
    ("commands", "why"),
    [
        ("insert a", "insert a: cannot come here, but tick, admit a"),
        ("admit a\nstore 0\ninsert a\ntick", "tick: no answer to node 1"),
        ("tick | ended", "tick | ended: 1 answers given, 0 asked for"),
        ("tick | |", "give one group of answers, or one for each of 1 ranks"),
    ],
)
def test_what_cannot_come_is_refused(commands: str, why: str) -> None:
    """R35: a script that the engine's driver cannot follow names the line and what could come instead."""
    with pytest.raises(StoryError) as caught:
        retell(WORLD + commands)
    assert why in str(caught.value)
