"""One rank of a small group, as SGLang would start it.  Usage: rank_member.py RANK PORT SCENARIO   (prints what came out, in JSON)"""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from cphicache.agree.handshake import HandshakeRefused
from cphicache.agree.port import NO_FAILURE, GroupBroken
from cphicache.sglang.ranks import Ranks, members_of

SIZE = 2
TIMEOUT_S = 1.0


def meet() -> Ranks:
    """As the factory does, over a group of all ranks."""
    everyone = dist.group.WORLD
    alone = [dist.new_group([rank]) for rank in range(SIZE)][dist.get_rank()]
    assert members_of(SimpleNamespace(tp_cache_group=alone, attn_cp_cache_group=alone, attn_tp_cache_group=alone)) == [
        dist.get_rank()
    ]
    found = members_of(SimpleNamespace(tp_cache_group=alone, attn_cp_cache_group=everyone, attn_tp_cache_group=None))
    return Ranks(found, TIMEOUT_S)


def agree(rank: int) -> Any:
    """Two reductions, with SGLang's own traffic between issue and wait."""
    ranks = meet()
    ranks.check_equal({"page_size": "16"})
    results = []
    for tick in range(2):
        ranks.note_tick(tick)
        ranks.reducer.issue(3 + rank + tick, NO_FAILURE if tick == rank else 7)
        dist.barrier()
        results.append(ranks.reducer.wait())
    ranks.leave()
    return [ranks.rank, ranks.size, results]


def differ(rank: int) -> Any:
    """Started with something else."""
    try:
        meet().check_equal({"page_size": "16", "max_retries": str(4 + rank)})
    except HandshakeRefused as refused:
        return str(refused)
    return None


def lose(rank: int) -> Any:
    """One rank is killed between two reductions."""
    ranks = meet()
    ranks.reducer.issue(1, NO_FAILURE)
    ranks.reducer.wait()
    if rank == 1:
        os._exit(0)
    ranks.reducer.issue(2, NO_FAILURE)
    try:
        ranks.reducer.wait()
    except GroupBroken as broken:
        return [str(broken), list(broken.ranks)]
    return None


if __name__ == "__main__":
    rank, port, scenario = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=SIZE, timeout=timedelta(seconds=60))
    print(json.dumps({"agree": agree, "differ": differ, "lose": lose}[scenario](rank)), flush=True)
    os._exit(0)  # a group of which a rank has gone cannot be taken down
