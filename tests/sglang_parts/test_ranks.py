"""The ranks of a server that decide together: processes of a ``torch.distributed`` group, without SGLang."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from cphicache.agree.port import NO_FAILURE, GroupBroken
from cphicache.sglang import ranks
from cphicache.sglang.refusal import SglangRefused

HERE = Path(__file__).parent
START_S = 300
"""Two processes import torch: seconds, and on a busy machine minutes."""


def start(scenario: str) -> list[Any]:
    """What the ranks printed; None of one that was killed."""
    store = dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
    )
    environment = os.environ | {"PYTHONPATH": str(HERE.parents[1])}
    members = [
        subprocess.Popen(
            [sys.executable, str(HERE / "rank_member.py"), str(rank), str(store.port), scenario],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        )
        for rank in range(2)
    ]  # fmt: skip
    told = []
    for member in members:
        out, errors = member.communicate(timeout=START_S)
        assert member.returncode == 0, errors
        told.append(json.loads(out) if out else None)
    return told


def test_ranks_of_a_server_reduce_beside_its_own_traffic() -> None:
    """R21, R23: over a group of their own, ranks get the minimum of what they gave, whatever the server's group does meanwhile."""
    assert start("agree") == [[rank, 2, [[3, 7], [4, 7]]] for rank in range(2)]


def test_a_rank_that_was_started_with_something_else_is_refused_on_all() -> None:
    """R35: the line names the rank, the setting and both values."""
    line = "rank 1 is refused: its max retries is 5, rank 0 has 4; start all ranks with the same options"
    assert start("differ") == [line, line]


def test_a_lost_rank_is_named() -> None:
    """R22: a reduction that does not come ends with an error that names the rank and how long it was waited for."""
    (text, lost), gone = start("lose")
    assert gone is None
    assert lost == [1]
    assert text.startswith("rank 1 does not answer reduction 1 (waited ")
    assert "of at most 1 s): no sign of life for " in text


def test_one_rank_needs_no_group() -> None:
    """R23: a server of one rank agrees with itself: no group, no store, no thread."""
    alone = ranks.Ranks([0], 1.0)
    alone.check_equal({"page_size": "16"})
    alone.note_tick(1)
    alone.reducer.issue(5, NO_FAILURE)
    assert alone.reducer.wait() == (5, NO_FAILURE)
    alone.leave()


@pytest.mark.parametrize(
    ("groups", "members"),
    [
        ({"tp": [0, 1, 2, 3], "cp": [0, 2], "attention": [0, 1]}, [0, 1, 2, 3]),
        ({"tp": [1], "cp": [1, 3], "attention": [1]}, [1, 3]),
        ({"tp": [5], "cp": [5], "attention": None}, [5]),
        ({"tp": None, "cp": None, "attention": None}, [0]),
    ],
)
def test_the_widest_group_shares_the_decisions(
    groups: dict[str, list[int] | None], members: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """R23: the group over TP holds attention CP and attention TP; where SGLang gives another one for it, the widest counts."""
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: group)
    params = SimpleNamespace(tp_cache_group=groups["tp"], attn_cp_cache_group=groups["cp"], attn_tp_cache_group=groups["attention"])
    assert ranks.members_of(params) == members


def test_groups_of_which_none_holds_all_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """R35: where no group holds all ranks that get the same requests, nothing could be agreed over it."""
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: group)
    with pytest.raises(SglangRefused, match=r"process groups \[0, 1\] \[0, 2\] \[0, 1\]: none of them holds all"):
        ranks.members_of(SimpleNamespace(tp_cache_group=[0, 1], attn_cp_cache_group=[0, 2], attn_tp_cache_group=[0, 1]))


@pytest.mark.parametrize("error", [GroupBroken("rank 1 does not answer"), dist.DistStoreError("connection reset"), None])
def test_whoever_ends_last_ends_all_the_same(error: Exception | None) -> None:
    """R23: at the end a rank tells that it has come there and waits for the others; if those have gone already it goes too."""
    told: list[str] = []

    def wait_for_keys(name: str, what: str, timeout_s: float) -> None:
        told.append(f"wait {name}")
        if error is not None:
            raise error

    member = ranks.Ranks([0], 1.0)
    member._membership = SimpleNamespace(  # type: ignore[assignment]
        store=SimpleNamespace(set=lambda key, value: told.append(f"set {key}")),
        wait_for_keys=wait_for_keys,
        close=lambda: told.append("close"),
    )
    member.leave()
    assert told == ["set done/0", "wait done", "close"]
