"""The ranks that decide together: which of SGLang's process groups holds them, and how they agree.

Every rank of it has its own scheduler, cache, pools and log, and gets the same requests in the same order: SGLang broadcasts them at each
iteration. Under tensor parallelism each rank stores its own heads of every token; under attention CP, SGLang 0.5.20 stores the whole KV
on every rank. Either way a rank copies its own share of all pages, and nothing but the end of the copies has to be agreed.
"""

from __future__ import annotations

from collections.abc import Mapping
from threading import Event
from typing import Any

import torch.distributed as dist

from cphicache.agree.distributed import DistributedReducer, connect_group_store, join_subgroup, tell_all
from cphicache.agree.handshake import check_equal
from cphicache.agree.local import SingleReducer
from cphicache.agree.membership import Membership
from cphicache.agree.port import GroupBroken, Reducer
from cphicache.sglang.refusal import SglangRefused

LEAVE_S = 2.0
"""At the end, ranks wait so long for those that are still in the last reduction."""


class Ranks:
    """This rank's place among those that decide together. ``reducer``: how they agree."""

    def __init__(self, members: list[int], timeout_s: float) -> None:
        """``members``: their ranks in the default process group. Each of them makes one of these at the same point of its start.

        ``timeout_s``: how long a rank is waited for, before the others name it and end.
        """
        self.size = len(members)
        self.rank = 0
        self.reducer: Reducer = SingleReducer()
        self._membership: Membership | None = None
        if self.size == 1:
            return
        group = self._group = join_subgroup(members, timeout_s)
        self.rank = dist.get_rank(group)
        self._membership = Membership(
            lambda: connect_group_store(group), self.rank, self.size, timeout_s, Event(), host="the first rank"
        )
        self.reducer = DistributedReducer(group, self._membership)

    def check_equal(self, told: Mapping[str, str]) -> None:
        """Every rank tells what it was started with. Raises :class:`~cphicache.agree.handshake.HandshakeRefused` where they differ."""
        if self.size > 1:
            check_equal(tell_all(self._group, told))

    def note_tick(self, tick: int) -> None:
        """For the heartbeat: how far this rank has got."""
        if self._membership is not None:
            self._membership.tick = tick

    def leave(self) -> None:
        """The end: nobody takes the group down while another rank is in its last reduction."""
        if self._membership is None:
            return
        try:
            self._membership.store.set(f"done/{self.rank}", "")
            self._membership.wait_for_keys("done", "come to its end", LEAVE_S)
        except (GroupBroken, dist.DistError):
            pass  # the others have gone before: there is nobody to wait for
        self._membership.close()


def members_of(params: Any) -> list[int]:
    """The ranks that share one scheduler's decisions. ``params``: SGLang's ``CacheInitParams``. Raises :class:`SglangRefused`.

    Its groups over TP, attention CP and attention TP: the widest holds all ranks that get the same requests.
    """
    given = (params.tp_cache_group, params.attn_cp_cache_group, params.attn_tp_cache_group)
    groups = [dist.get_process_group_ranks(group) for group in given if group is not None]
    widest = max(groups, key=len, default=[0])
    if any(not set(ranks) <= set(widest) for ranks in groups):
        raise SglangRefused(
            f"process groups {' '.join(map(str, groups))}: none of them holds all ranks that share a queue; "
            "serve this with the built-in cache"
        )
    return sorted(widest)
