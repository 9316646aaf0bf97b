"""Who of a group is alive, and who is not: a heartbeat of each rank in a store that the launcher hosts, outside of any collective (R22).

Keys of the store, all of one run:

    beat/R      rank R's latest heartbeat, written by a thread of its own, so that a stopped process and a stuck scheduler look different
    gone/R      why rank R will not come back; written by the launcher, or by the rank itself when it ends with an error
    verdict     which ranks are out, and why; the first survivor that has waited too long writes it, once for all
    last/R      how far survivor R has got, and the last result that it has
    settled     the reduction at which every survivor gives the group up; the first one that knows it writes it
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from threading import Event, Lock, Thread
from typing import NamedTuple, Protocol

from cphicache.agree.port import Excluded, GroupBroken

BEATS_PER_TIMEOUT = 10
LONGEST_BEAT_S = 0.5
"""A heartbeat comes every tenth of the time limit, and at least this often."""
SILENT_S = 10.0
"""When a reduction has failed, a rank that has been silent for so long is given up without waiting for the time limit."""
SLICE_S = 0.05
"""A rank that waits looks at the heartbeats every so often."""


class KeyStore(Protocol):
    """What is used of a ``torch.distributed`` store. Every call is one round trip."""

    def set(self, key: str, value: str) -> None:
        """Write a key."""

    def get(self, key: str) -> bytes:
        """Read a key that is there (a store blocks on one that is not)."""

    def check(self, keys: list[str]) -> bool:
        """Are all of these keys there?"""

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Write ``desired`` if the key is not there (``expected`` empty); the value that is there then."""


class Beat(NamedTuple):
    """A rank's heartbeat. ``issued``: reductions that it has contributed to. ``served``: requests that it is done with."""

    beat: int
    issued: int
    tick: int
    served: int


class Settled(NamedTuple):
    """The survivors give the group up at reduction ``at``; ``result`` is that of the one before, for who has not got it."""

    at: int
    result: tuple[int, int] | None


def read(store: KeyStore, key: str) -> bytes | None:
    """The value of a key, ``None`` if it is not there."""
    return store.get(key) if store.check([key]) else None


def mark_gone(store: KeyStore, rank: int, why: str) -> None:
    """Tell the group that a rank will not come back. The first reason stays."""
    store.compare_set(f"gone/{rank}", "", why.encode(errors="backslashreplace").decode())  # a path in it need not be UTF-8


def read_beat(store: KeyStore, rank: int) -> Beat | None:
    """The latest heartbeat of a rank."""
    found = read(store, f"beat/{rank}")
    return None if found is None else Beat(*json.loads(found))


class Membership:
    """One rank's part: it writes its own heartbeat, and finds out who has gone when a reduction does not come.

    ``make_store``: a connection of its own for the heartbeat thread, and one for the rank; ``host``: whose store it is. ``stop`` is set
    from outside (a signal), or by the thread when the store is gone or the rank finds itself excluded: the rank ends at its next step.
    Only own waiting counts towards ``timeout_s``, so that a process that was stopped does not blame the others for that time.
    """

    def __init__(
        self,
        make_store: Callable[[], KeyStore],
        rank: int,
        size: int,
        timeout_s: float,
        stop: Event,
        *,
        host: str = "the launcher",
    ) -> None:
        self.rank = rank
        self.size = size
        self.timeout_s = timeout_s
        self.stop = stop
        self.why_stopped: GroupBroken | None = None
        self.issued = self.tick = self.served = 0
        self.store = make_store()
        self._host = host
        self._ending = Event()
        self._lock = Lock()
        self._beat_s = min(timeout_s / BEATS_PER_TIMEOUT, LONGEST_BEAT_S)
        self._parent = os.getppid()
        self._thread = Thread(target=self._beat, args=(make_store(),), name="heartbeat", daemon=True)
        self._thread.start()

    # -- the own heartbeat ----------------------------------------------------------------------------------------------------
    def _beat(self, store: KeyStore) -> None:
        beat = 0
        while not self._ending.wait(self._beat_s if beat else 0.0):
            beat += 1
            try:
                store.set(f"beat/{self.rank}", json.dumps([beat, self.issued, self.tick, self.served]))
                verdict = self._read_verdict(store)
            except RuntimeError as error:  # what a torch store raises when its host is gone
                self._stop_with(GroupBroken(f"rank {self.rank}: {self._host}'s store does not answer ({_first_line(error)})"))
                return
            if os.getppid() != self._parent:
                self._stop_with(GroupBroken(f"rank {self.rank}: the launcher has gone"))
                return
            if verdict is not None and self.rank in verdict[0]:
                self._stop_with(self._excluded(verdict[1]))
                return

    def _stop_with(self, why: GroupBroken) -> None:
        with self._lock:
            self.why_stopped = self.why_stopped or why
        self.stop.set()

    def _excluded(self, why: str) -> Excluded:
        return Excluded(f"rank {self.rank} was excluded from the group: {why}", (self.rank,))

    def check_stop(self) -> None:
        """Raise :class:`GroupBroken` if this rank has to end: it was interrupted, is excluded, or its launcher has gone."""
        if self.stop.is_set():
            raise self.why_stopped or GroupBroken("interrupted")

    def close(self) -> None:
        """Stop the heartbeat."""
        self._ending.set()
        self._thread.join()

    # -- waiting for the others -----------------------------------------------------------------------------------------------
    def wait_for_keys(self, prefix: str, what: str, timeout_s: float) -> list[bytes]:
        """``prefix/R`` of every rank R, in order. Raises :class:`GroupBroken` that names who has not ``what`` in time."""
        watch = Watch()
        while True:
            missing = [rank for rank in range(self.size) if not self.store.check([f"{prefix}/{rank}"])]
            if not missing:
                return [self.store.get(f"{prefix}/{rank}") for rank in range(self.size)]
            self.check_stop()
            for rank in missing:
                gone = read(self.store, f"gone/{rank}")
                if gone is not None:
                    raise GroupBroken(f"rank {rank} {gone.decode()}, before it {what}", (rank,))
            if watch.waited_s >= timeout_s:
                raise GroupBroken(f"ranks {missing} have not {what} within {timeout_s:g} s", tuple(missing))
            watch.sleep()

    def find_out(self, reduction: int, watch: Watch, *, failed: bool = False) -> None:
        """Called again and again while ``reduction`` has not come: returns while there is hope.

        ``failed``: it has ended with an error, so that a rank without a sign of life is not waited for until the limit.
        Raises :class:`GroupBroken` that names the ranks that are out and how long they were waited for, :class:`Excluded` if this one is.
        """
        self.check_stop()
        verdict = self._read_verdict(self.store)
        if verdict is None:
            blamed = self._blame(reduction, watch, failed)
            if blamed:
                # The text is the same for whoever writes it first; others read it.
                told = "; ".join(blamed[rank] for rank in sorted(blamed))
                self.store.compare_set("verdict", "", json.dumps([sorted(blamed), told]))
                verdict = self._read_verdict(self.store)
        if verdict is None:
            return
        ranks, text = verdict
        if self.rank in ranks:
            raise self._excluded(text)
        raise GroupBroken(text, ranks)

    def _blame(self, reduction: int, watch: Watch, failed: bool) -> dict[int, str]:
        waited = f"reduction {reduction} (waited {watch.waited_s:.1f} s of at most {self.timeout_s:g} s)"
        blamed = {}
        for rank in self._others():
            gone = read(self.store, f"gone/{rank}")
            if gone is not None:
                blamed[rank] = f"rank {rank} does not answer {waited}: it {gone.decode()}"
        if blamed:
            return blamed
        beats = {rank: read_beat(self.store, rank) for rank in self._others()}
        watch.note(beats)
        over = watch.waited_s >= self.timeout_s
        for rank, beat in beats.items():
            silent_s = watch.silent_s(rank)
            if not over and not (failed and silent_s > SILENT_S):
                continue
            if beat is None:
                blamed[rank] = f"rank {rank} does not answer {waited}: it has never given a sign of life"
                continue
            got = f"at tick {beat.tick}, after {beat.issued} reductions"
            if silent_s > 4 * self._beat_s:
                blamed[rank] = f"rank {rank} does not answer {waited}: no sign of life for {silent_s:.1f} s, last seen {got}"
            elif beat.issued <= reduction:
                blamed[rank] = f"rank {rank} does not answer {waited}: it is alive, {got}"
        return blamed

    def _others(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank]

    @staticmethod
    def _read_verdict(store: KeyStore) -> tuple[tuple[int, ...], str] | None:
        found = read(store, "verdict")
        if found is None:
            return None
        ranks, text = json.loads(found)
        return tuple(ranks), text

    # -- the survivors' last common reduction ---------------------------------------------------------------------------------
    def settle(self, at: int, last_result: tuple[int, int] | None, out: Sequence[int]) -> Settled:
        """Agree with the other survivors on the reduction at which the group is given up: the furthest that any of them waits for.

        A reduction may have come through on one survivor and not on another; that one gets its result here, so that all of them apply the
        same and quarantine in the same step. Raises :class:`Excluded` if the others have gone on without this rank.
        """
        self.store.set(f"last/{self.rank}", json.dumps([at, last_result]))
        survivors = [rank for rank in range(self.size) if rank not in out]
        watch = Watch()
        while not self.store.check(["settled"]):
            self.check_stop()
            found = [read(self.store, f"last/{rank}") for rank in survivors]
            known = [json.loads(value) for value in found if value is not None]
            if len(known) == len(survivors) or watch.waited_s >= self.timeout_s:
                self.store.compare_set("settled", "", json.dumps(max(known, key=lambda entry: int(entry[0]))))
                break
            watch.sleep()
        settled_at, result = json.loads(self.store.get("settled"))
        if settled_at < at:
            raise self._excluded(f"the others have given the group up at reduction {settled_at}, it was at {at}")
        return Settled(settled_at, None if result is None else (result[0], result[1]))


class Watch:
    """How long this process has waited, in slices that it really spent waiting, and which ranks showed a sign of life meanwhile."""

    def __init__(self, since_s: float | None = None) -> None:
        """``since_s``: when the wait began, of ``time.monotonic``; None: now."""
        self.waited_s = 0.0
        self._last_s = time.monotonic() if since_s is None else since_s
        self._beats: dict[int, tuple[Beat | None, float]] = {}

    def pass_slice(self) -> None:
        """A slice is over: at most four slices' worth of it count, the rest this process was not running."""
        now_s = time.monotonic()
        self.waited_s += min(now_s - self._last_s, 4 * SLICE_S)
        self._last_s = now_s

    def sleep(self) -> None:
        """Let a slice pass."""
        time.sleep(SLICE_S)
        self.pass_slice()

    def note(self, beats: dict[int, Beat | None]) -> None:
        """These are the heartbeats now."""
        for rank, beat in beats.items():
            known = self._beats.get(rank)
            if known is None or known[0] is None or beat is None or known[0].beat != beat.beat:
                self._beats[rank] = (beat, self.waited_s if known is not None else 0.0)

    def silent_s(self, rank: int) -> float:
        """Seconds of waiting since a rank's heartbeat last changed."""
        return self.waited_s - self._beats[rank][1]


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
