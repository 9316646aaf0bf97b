"""A rank process with a planned fault: ``python -m tests.ranks.faulty_rank`` with the options of a rank; the plan is in the environment.

The plan is JSON: ``{"rank": 1, "point": ..., "kind": ..., "nth": 3, "delay_us": 0, "seed": 0}``. Points: ``reserve`` (before slots are
taken), ``layer`` (inside the copy of a layer), ``reduction`` (between a last layer and the reduction), ``load`` (inside a load-back's
copy), ``none``. Kinds: ``raise`` (the copy fails), ``stop`` (SIGSTOP), ``kill`` (SIGKILL), ``hang`` (the scheduler stands still, the
process lives). ``delay_us``: copies are late on real threads by random times.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from threading import Event
from typing import Any

from cphicache.agree.port import Reducer
from cphicache.run.config import RunConfig
from cphicache.run.rank_main import run_rank, stop_on_signals
from cphicache.run.world import make_streams
from cphicache.transfer.faults import CopyFault, CopyFaults, Direction
from cphicache.transfer.port import HostSlotsExhausted, OpKey
from cphicache.transfer.streams.port import Streams
from cphicache.transfer.streams.threads import ThreadStreams

PLAN = "TEST_RANK_FAULT"


class Plan:
    """The fault of one rank, if it is this one's."""

    def __init__(self, rank: int) -> None:
        plan: dict[str, Any] = json.loads(os.environ.get(PLAN, "{}"))
        self.rank = rank
        mine = bool(plan.get("rank") == rank)
        self.point = plan.get("point", "none") if mine else "none"
        self.kind = plan.get("kind", "")
        self.nth: int = plan.get("nth", 0)
        self.delay_us = plan.get("delay_us", 0.0)
        self.seed = plan.get("seed", 0)
        self._seen = 0

    def due(self, point: str) -> bool:
        """Is it the planned time to come here?"""
        if point != self.point:
            return False
        self._seen += 1
        return self._seen == self.nth + 1

    def strike(self) -> None:
        """What happens then, if it is not an exception."""
        if self.kind == "hang":
            time.sleep(3600)
        elif self.kind in ("stop", "kill"):
            os.kill(os.getpid(), signal.SIGSTOP if self.kind == "stop" else signal.SIGKILL)


class PlannedFaults(CopyFaults):
    """Copies and reservations of this rank."""

    __slots__ = ("_plan",)

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self._plan = plan

    def check_copy(self, direction: Direction, payload: str, layer: int, job: OpKey | int) -> None:
        if self._plan.due("layer" if direction == "d2h" else "load"):
            self._plan.strike()
            if self._plan.kind == "raise":
                raise CopyFault("planned")

    def check_reserve(self, payload: str, op: OpKey) -> None:
        if self._plan.due("reserve"):
            self._plan.strike()
            if self._plan.kind == "raise":
                raise HostSlotsExhausted("planned")


class PlannedReducer:
    """Something happens to the rank right before it contributes."""

    def __init__(self, reducer: Reducer, plan: Plan) -> None:
        self._reducer = reducer
        self._plan = plan

    def issue(self, count: int, first_failed: int) -> None:
        if self._plan.due("reduction"):
            self._plan.strike()
        self._reducer.issue(count, first_failed)

    def wait(self) -> tuple[int, int]:
        return self._reducer.wait()


def main() -> int:
    """The rank, with its fault."""
    plan = Plan(int(os.environ["RANK"]))

    def streams(config: RunConfig, rank: int) -> Streams:
        return (
            ThreadStreams(seed=plan.seed * 64 + rank, max_delay_us=plan.delay_us) if plan.delay_us else make_streams(config, rank)
        )

    stop = Event()
    stop_on_signals(stop)
    return run_rank(
        sys.argv[1:],
        stop,
        streams=streams,
        faults=lambda rank: PlannedFaults(plan),
        wrap=lambda reducer, rank: PlannedReducer(reducer, plan),
    )


if __name__ == "__main__":
    sys.exit(main())
