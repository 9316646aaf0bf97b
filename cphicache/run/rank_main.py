"""One rank as a process: ``python -m cphicache.run.rank_main`` with the options of ``cphicache run``.

``cphicache run --launch processes`` starts these; so does ``torchrun --nproc-per-node N -m cphicache.run.rank_main --cp-size N ...``, where
rank 0 prints the result. Either of them hosts the store at ``MASTER_ADDR:MASTER_PORT``, so that any rank may die and be named. With one
process a rank there is no shared memory: ranks meet in one reduction a tick, and in the store when something is wrong.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from threading import Event
from types import FrameType
from typing import Any, NoReturn

import click

from cphicache.run.config import ConfigError, RunConfig

LAUNCHED = "CPHICACHE_LAUNCHED"
"""Set by our own launcher, which reports for the ranks."""
RUN_ID = "run"
"""Its store serves one run."""
CONNECT_TIMEOUT_S = 20.0
"""For the connection to the store, which is there before the ranks are."""
START_TIMEOUT_S = 120.0
"""For the start of all ranks: they import, connect and compare their options."""
INTERRUPTED = 130
UNUSABLE = 2


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the rank that the environment names, and exit with its status."""
    stop = Event()
    stop_on_signals(stop)
    sys.exit(run_rank(sys.argv[1:] if arguments is None else arguments, stop))


def stop_on_signals(stop: Event) -> None:
    """An interrupt, or a launcher that gives up, ends the rank at its next step, so that its log is whole."""

    def handle(number: int, frame: FrameType | None) -> None:
        stop.set()

    signal.signal(signal.SIGINT, handle)
    signal.signal(signal.SIGTERM, handle)


def parse(arguments: Sequence[str]) -> RunConfig:
    """The options of ``cphicache run`` as a configuration. Raises :class:`ConfigError` and click's usage errors."""
    from cphicache.run.cli import make_folder, run, with_out

    with run.make_context("rank_main", list(arguments)) as context:
        config = RunConfig.from_mapping(with_out({name: value for name, value in context.params.items() if name != "metrics_port"}))
    make_folder(config)
    return config


def run_rank(arguments: Sequence[str], stop: Event, **hooks: Any) -> int:
    """Run one rank; returns the exit status. ``hooks``: see :class:`Rank`."""
    try:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    except (KeyError, ValueError) as error:
        click.echo(
            f"cphicache: rank_main: {error} is not in the environment: start ranks with torchrun, or --launch processes", err=True
        )
        return UNUSABLE
    try:
        config = parse(arguments)
        if config.cp_size != size:
            raise ConfigError(f"--cp-size {config.cp_size}: {size} ranks were started; give as many as that")
    except (ConfigError, click.ClickException) as error:
        click.echo(f"cphicache: rank {rank}: {error}", err=True)
        return UNUSABLE
    return Rank(config, rank, stop, **hooks).run(address, port)


class Rank:
    """A rank's life: connect, compare options, serve, report.

    Hooks for tests: ``streams(config, rank)`` makes the streams, ``faults(rank)`` plans faults, ``wrap(reducer)`` stands between engine and
    reducer.
    """

    def __init__(
        self,
        config: RunConfig,
        rank: int,
        stop: Event,
        *,
        streams: Callable[[RunConfig, int], Any] | None = None,
        faults: Callable[[int], Any] | None = None,
        wrap: Callable[[Any, int], Any] | None = None,
    ) -> None:
        self._config = config
        self._rank = rank
        self._stop = stop
        self._streams = streams
        self._faults = faults
        self._wrap = wrap
        self._reports = LAUNCHED not in os.environ and rank == 0

    def run(self, address: str, port: int) -> int:
        """Serve to the end; returns the exit status."""
        import torch
        from torch.distributed import DistError

        from cphicache.agree.distributed import connect_store
        from cphicache.agree.membership import KeyStore, Membership
        from cphicache.agree.port import GroupBroken

        torch.set_num_threads(1)  # ranks share the cores
        size = self._config.cp_size
        run_id = RUN_ID if LAUNCHED in os.environ else f"torchrun.{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"

        if self._stop.is_set():
            return INTERRUPTED

        def connect() -> KeyStore:
            return connect_store(address, port, run_id, CONNECT_TIMEOUT_S)

        try:
            membership = Membership(connect, self._rank, size, self._config.rank_timeout_s, self._stop)
        except RuntimeError as error:
            line = (str(error).splitlines() or ["no reason given"])[0]
            click.echo(f"cphicache: rank {self._rank}: no store at {address}:{port} ({line}); a launcher hosts one", err=True)
            return UNUSABLE
        try:
            return self._live(membership)
        except DistError as error:  # the store's host is gone, whatever this rank had to tell it
            lines = str(error).splitlines() or ["no reason given"]
            told = str(membership.why_stopped or f"rank {self._rank}: the launcher's store does not answer ({lines[0]})")
            before = error.__context__
            if before is not None and not isinstance(before, DistError | GroupBroken):
                told += f", after {type(before).__name__}: {before}"
            click.echo(f"cphicache: {told}; it stops", err=True)
            _leave_at_once(1)

    def _live(self, membership: Any) -> int:
        """Serve, and tell the launcher how that went. Raises torch's DistError when the store is gone."""
        from cphicache.agree.handshake import HandshakeRefused
        from cphicache.agree.membership import mark_gone
        from cphicache.agree.port import Excluded, GroupBroken
        from cphicache.run.trace import TraceError
        from cphicache.run.wire import encode
        from cphicache.run.world import kind_of

        store = membership.store
        status, broken = 1, True
        try:
            result = self._serve(membership)
            store.set(f"result/{self._rank}", encode(result))
            broken = result.quarantined is not None
            status = 1 if result.broken is not None else 0
        except Excluded as excluded:
            click.echo(f"cphicache: {excluded}; it stops", err=True)
        except GroupBroken as error:
            if self._stop.is_set() and membership.why_stopped is None:
                status = INTERRUPTED
            elif membership.why_stopped is not None:  # nobody is left to be told, or to be asked what came of the others
                click.echo(f"cphicache: {membership.why_stopped}; it stops", err=True)
                _leave_at_once(1)
            else:
                self._tell(store, "group", str(error))
        except (HandshakeRefused, TraceError, ConfigError) as error:
            self._tell(store, "unusable", str(error))
            status = UNUSABLE
        except Exception as error:  # whatever ends a rank must end the others too
            mark_gone(store, self._rank, f"ended: {type(error).__name__}: {error}")
            self._tell(store, kind_of(error), f"rank {self._rank}: {type(error).__name__}: {error}")
            status = UNUSABLE if kind_of(error) == "unusable" else 1
        if self._reports and status in (0, 1):
            status = self._report(store, status)
        if broken or not self._leave(membership):
            # A broken group cannot be taken down: that would wait for who has gone.
            _leave_at_once(status)
        membership.close()
        return status

    def _tell(self, store: Any, kind: str, text: str) -> None:
        store.set(f"error/{self._rank}", json.dumps([kind, text]))
        if LAUNCHED not in os.environ:
            click.echo(f"cphicache: {text}", err=True)

    def _serve(self, membership: Any) -> Any:
        from cphicache.agree.digests import DigestCheck, StoreBoard
        from cphicache.agree.distributed import DistributedReducer, make_group
        from cphicache.agree.handshake import check_equal
        from cphicache.agree.local import SingleReducer
        from cphicache.agree.port import Excluded, GroupBroken
        from cphicache.engine import StateDigest
        from cphicache.run.handshake import hello
        from cphicache.run.jobs import Job, load_requests, sized_for
        from cphicache.run.scheduler import Scheduler
        from cphicache.run.world import RankWorld, make_streams

        rank, size = self._rank, self._config.cp_size
        requests = load_requests(self._config)
        config = sized_for(self._config, requests)
        membership.store.set(f"hello/{rank}", json.dumps(hello(config, requests)))
        check_equal([json.loads(told) for told in membership.wait_for_keys("hello", "said hello", START_TIMEOUT_S)])

        membership.check_stop()
        reducer = None if size == 1 else DistributedReducer(make_group(membership.store, rank, size, START_TIMEOUT_S), membership)
        agreeing = reducer or SingleReducer()

        def after_tick(scheduler: Scheduler) -> None:
            membership.tick = scheduler.tick
            membership.check_stop()

        def after_request(job: Job) -> None:
            membership.served += 1

        board = StoreBoard(membership.store)
        world = RankWorld(
            config,
            rank,
            requests,
            agreeing if self._wrap is None else self._wrap(agreeing, rank),
            streams=(self._streams or make_streams)(config, rank),
            faults=None if self._faults is None else self._faults(rank),
            on_tick=after_tick,
            on_done=after_request,
            digests=DigestCheck(board, rank, size, StateDigest._fields) if config.check_ranks else None,
        )
        with closing(world):  # run() does so itself, but the others may not get ready
            membership.check_stop()
            membership.store.set(f"ready/{rank}", "")
            membership.wait_for_keys("ready", "got ready", START_TIMEOUT_S)
            try:
                world.run()
            except GroupBroken as error:
                if isinstance(error, Excluded) or self._stop.is_set():
                    raise
        if reducer is None:
            return world.result()
        return replace(world.result(), waits=reducer.waited, blocked_s=reducer.blocked_s, longest_s=reducer.longest_s)

    def _report(self, store: Any, status: int) -> int:
        """Rank 0 of a launcher that is not ours: print the result of all ranks."""
        from cphicache.agree.membership import Watch, read
        from cphicache.run.cli import report_run
        from cphicache.run.failure import Failure
        from cphicache.run.launch import outcome_of
        from cphicache.run.world import RunFailed

        watch = Watch()
        while watch.waited_s < self._config.rank_timeout_s:
            if all(
                any(store.check([f"{kind}/{rank}"]) for kind in ("result", "error", "gone")) for rank in range(self._config.cp_size)
            ):
                break
            watch.sleep()
        verdict = read(store, "verdict")
        lost = {} if verdict is None else dict.fromkeys(json.loads(verdict)[0], "was given up by the others")
        try:
            return max(status, report_run(self._config, outcome_of(self._config, store, lost), bare=False))
        except RunFailed as error:
            click.echo(f"cphicache: {error.kind}: {error}", err=True)
            return max(status, 1)
        except Failure as error:
            error.show()
            return UNUSABLE

    def _leave(self, membership: Any) -> bool:
        """Take the group down, when nobody is in its last reduction any more. False: a rank went before that."""
        import torch.distributed as dist

        from cphicache.agree.port import GroupBroken

        membership.store.set(f"done/{self._rank}", "")
        try:
            membership.wait_for_keys("done", "come to its end", membership.timeout_s)
        except GroupBroken:
            return False
        if dist.is_initialized():
            dist.destroy_process_group()
        return True


def _leave_at_once(status: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
