"""The reduction over ``torch.distributed``: one asynchronous all-reduce (MIN) of two integers a tick, waited for one tick later (R21)."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist

from cphicache.agree.membership import SLICE_S, KeyStore, Membership, Settled, Watch
from cphicache.agree.port import GroupBroken

_SLICE = timedelta(seconds=SLICE_S)
POLL_S = 2e-5
"""Pause between two looks at a reduction whose wait has no time limit (NCCL)."""


class HostedStore(NamedTuple):
    """A store that this process hosts, and the port at which others find it (on every interface that ``address`` names)."""

    store: KeyStore
    port: int


def host_store(address: str, run_id: str, timeout_s: float) -> HostedStore:
    """Host a store for one run at a free port; it lives as long as the answer."""
    host = dist.TCPStore(  # type: ignore[attr-defined]
        address, 0, None, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
    )
    return HostedStore(dist.PrefixStore(f"cphicache/{run_id}", host), host.port)  # type: ignore[attr-defined]


def connect_store(address: str, port: int, run_id: str, timeout_s: float) -> KeyStore:
    """A connection of its own to a store that somebody hosts. Raises RuntimeError, from torch, when there is none."""
    store = dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=timeout_s))  # type: ignore[attr-defined]
    return cast(KeyStore, dist.PrefixStore(f"cphicache/{run_id}", store))  # type: ignore[attr-defined]


def make_group(store: KeyStore, rank: int, size: int, timeout_s: float) -> dist.ProcessGroup:
    """Make this process's default group, over gloo, of all ranks that meet in ``store``."""
    prefixed = dist.PrefixStore("group", store)  # type: ignore[attr-defined,arg-type]
    dist.init_process_group("gloo", store=prefixed, rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s))
    return cast(dist.ProcessGroup, dist.group.WORLD)


def join_subgroup(members: Sequence[int], timeout_s: float) -> dist.ProcessGroup:
    """Make a gloo group of some ranks of a default group that is there already (a server's). All members call this, and nobody else."""
    timeout = timedelta(seconds=timeout_s)
    group = dist.new_group(list(members), timeout=timeout, backend="gloo", use_local_synchronization=True)
    return cast(dist.ProcessGroup, group)


def connect_group_store(group: dist.ProcessGroup) -> KeyStore:
    """A connection of its own to the store in which the group has met, with keys that nobody else uses."""
    return cast(KeyStore, dist.PrefixStore("cphicache", group.get_group_store().clone()))  # type: ignore[attr-defined]


def tell_all(group: dist.ProcessGroup, told: Mapping[str, str]) -> list[Mapping[str, str]]:
    """What each rank of the group tells at start, in rank order. Blocks until all have come."""
    answers: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(answers, dict(told), group=group)
    return answers


class DistributedReducer:
    """A group of processes; see :class:`~cphicache.agree.port.Reducer`.

    ``group``: a process group of all ranks that share the decision (gloo, or NCCL with ``device`` a CUDA device); nobody else uses it.
    The sample lies in one persistent tensor of two int64. ``waits`` and ``blocked_s`` measure what the scheduler thread spends in
    :meth:`wait`; ``longest_s`` is the longest of them.

    A rank that does not answer within the membership's time limit is a :class:`GroupBroken` that names it. Survivors then agree, through
    the store alone, on the reduction at which they give the group up; it is not used again.
    """

    def __init__(self, group: dist.ProcessGroup, membership: Membership, device: str = "cpu") -> None:
        self._group = group
        self._membership = membership
        self._values = array("q", (0, 0))
        # On the host the array's own memory: a scheduler that comes out of a forward pass finds torch's code cold, and the array's not.
        on_host = torch.frombuffer(self._values, dtype=torch.int64)
        self._tensor = on_host.to(device)
        # On a GPU the reduction has a stream of its own: reading its result must not wait for the forward pass.
        self._stream = torch.cuda.Stream(device) if self._tensor.is_cuda else None  # type: ignore[no-untyped-call]
        self._is_completed: Callable[[], bool]
        self._wait_for: Callable[[timedelta], object]
        self._last: tuple[int, int] | None = None
        self._settled: Settled | None = None
        self.issued = 0
        self.waited = 0
        self.blocked_s = 0.0
        self.longest_s = 0.0
        self.broken: GroupBroken | None = None

    def issue(self, count: int, first_failed: int) -> None:
        """See :class:`~cphicache.agree.port.Reducer`. Raises :class:`GroupBroken` if this rank has to end."""
        if self.issued != self.waited:
            raise AssertionError(f"reduction {self.waited} is outstanding: expected it to be waited for before the next is issued")
        if self.broken is None:
            self._values[0], self._values[1] = count, first_failed
            if self._stream is None:
                self._all_reduce()
            else:
                with torch.cuda.stream(self._stream):
                    self._tensor.copy_(torch.tensor([count, first_failed], dtype=torch.int64))
                    self._all_reduce()
        self.issued += 1
        self._membership.issued = self.issued

    def wait(self) -> tuple[int, int]:
        """See :class:`~cphicache.agree.port.Reducer`. Raises :class:`GroupBroken` when a rank has gone, now or earlier."""
        if self.issued == self.waited:
            raise AssertionError("no reduction is outstanding: expected an issue before the wait")
        started_s = time.monotonic()
        if self.broken is None and not self._came():
            self._wait_on(started_s)
        if self.broken is not None:
            result = self._take_settled(self.broken)
        elif self._stream is None:
            result = self._values[0], self._values[1]
        else:
            result = self._read(self._stream)
        self._last = result
        spent_s = time.monotonic() - started_s
        self.waited += 1
        self.blocked_s += spent_s
        self.longest_s = max(self.longest_s, spent_s)
        return result

    def _wait_on(self, since_s: float) -> None:
        """A slice has passed since then: wait on for the reduction; on a broken group, find out who has gone."""
        watch, came = Watch(since_s), False
        try:
            while not came:
                watch.pass_slice()
                failed = self._is_completed()  # only the store can say why
                self._membership.find_out(self.waited, watch, failed=failed)
                if watch.waited_s >= 2 * self._membership.timeout_s:
                    raise GroupBroken(
                        f"reduction {self.waited} has not come in {watch.waited_s:.1f} s although every rank is there"
                    )
                if failed:  # then the next look at it returns at once
                    watch.sleep()
                came = self._came()
        except GroupBroken as broken:
            self.broken = broken
            if self._membership.stop.is_set() or self._membership.rank in broken.ranks:
                raise

    def _all_reduce(self) -> None:
        work: dist.Work | None = dist.all_reduce(self._tensor, op=dist.ReduceOp.MIN, group=self._group, async_op=True)
        if work is None:
            raise AssertionError(
                f"reduction {self.issued}: expected it to be on its way, found none: is this rank one of the group?"
            )
        self._is_completed, self._wait_for = work.is_completed, work.wait  # looked up now, when torch's code is not cold

    def _read(self, stream: torch.cuda.Stream) -> tuple[int, int]:
        with torch.cuda.stream(stream):
            count, first_failed = self._tensor.tolist()
        return count, first_failed

    def _came(self) -> bool:
        """Wait a slice for the reduction. False: it is not here yet, or it has failed."""
        try:
            if self._stream is not None:  # NCCL's wait has no time limit
                deadline_s = time.monotonic() + SLICE_S
                while not self._is_completed():
                    if time.monotonic() > deadline_s:
                        return False
                    time.sleep(POLL_S)
            self._wait_for(_SLICE)
        except RuntimeError:
            return False
        return True

    def _take_settled(self, broken: GroupBroken) -> tuple[int, int]:
        """Where the survivors give the group up: here, or one reduction later, with the result that this rank has missed."""
        if self._settled is None:
            self._settled = self._membership.settle(self.waited, self._last, broken.ranks)
        if self._settled.result is None or self.waited >= self._settled.at:
            raise broken
        return self._settled.result
