"""What a trace costs the scheduler's thread: figures of one run, and a flame graph of it."""

from __future__ import annotations

import importlib
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cphicache.files import whole_file
from cphicache.run.failure import Failure
from cphicache.run.study.serve import ServeConfig, TraceServer
from cphicache.run.trace import TraceRequest

RENDERERS = {".html": "HTMLRenderer", ".json": "SpeedscopeRenderer"}
"""By the ending of the flame graph's file: a page of its own, or what https://www.speedscope.app shows."""
INTERVAL_S = 0.001
"""Between two samples of the profiler."""


class CostedRun:
    """A trace on one server. :meth:`row` may be asked for at any time: also of a run that was interrupted."""

    def __init__(self, config: ServeConfig, requests: Sequence[TraceRequest], on_request: Callable[[], object] = int) -> None:
        self.server = TraceServer(config, requests, on_request)
        self.requests = len(requests)
        self.cpu_s = 0.0

    def run(self) -> None:
        """Serve the trace."""
        start = time.thread_time()
        try:
            self.server.run()
        finally:
            self.cpu_s = time.thread_time() - start

    def row(self) -> dict[str, Any]:
        """Plain data. ``cpu s``: of the thread, making the tokens included; ``seconds by part``: the same by what it was spent on."""
        served, counters = self.server.served, self.server.cache.counters
        parts = {name: seconds for name, seconds in served.seconds.items() if name != "scheduler"}
        parts["the study's own scheduler, making tokens"] = max(0.0, self.cpu_s - sum(parts.values()))
        return {
            "requests": served.finished,
            "of": self.requests,
            "too long": served.refused,
            "retracted": served.retracted,
            "requests a second": served.finished / self.cpu_s if self.cpu_s else 0.0,
            "cpu s": self.cpu_s,
            "virtual s": self.server.clock.now / 1e6,
            "peak memory bytes": peak_memory_bytes(),
            "prompt tokens": served.prompts,
            "computed tokens": served.tokens_computed,
            "decoded tokens": served.decoded,
            "device hits": served.tokens_device,
            "host hits": served.tokens_host,
            "ticks": served.ticks,
            "backups reserved": counters.reserved,
            "backups committed": counters.committed,
            "backups rolled back": sum(counters.rolled_back.values()),
            "backups refused": sum(counters.refused.values()),
            "tokens a committed backup": counters.tokens_committed / max(1, counters.committed),
            "device evictions": counters.device_evictions,
            "evicted without host copy": counters.device_dropped_tokens,
            "host evictions": counters.host_evictions,
            "declined inserts": counters.declined_inserts,
            "seconds by part": dict(sorted(parts.items(), key=lambda part: -part[1])),
        }


def peak_memory_bytes() -> int:
    """The most memory that this process has had (resident)."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


@contextmanager
def flame_graph(path: Path | None) -> Iterator[None]:
    """Write a flame graph of what is done inside to ``path``, an interrupted part too; ``None``: do not.

    Raises :class:`Failure` for another ending than .html or .json, and when the profiler is not installed.
    """
    if path is None:
        yield
        return
    renderer = RENDERERS.get(path.suffix)
    if renderer is None:
        raise Failure(f"--flame {path}: ends in neither .html nor .json (speedscope); give one of these")
    try:
        profilers: Any = importlib.import_module("pyinstrument")
        renderers: Any = importlib.import_module("pyinstrument.renderers")
    except ImportError as error:
        raise Failure(f"--flame needs pyinstrument ({error}): pip install 'cphicache[profile]'") from error
    profiler = profilers.Profiler(interval=INTERVAL_S, async_mode="disabled")
    profiler.start()
    try:
        yield
    finally:
        profiler.stop()
        text = profiler.output(getattr(renderers, renderer)())
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with whole_file(path) as file:
                file.write_text(text, encoding="utf-8")
        except OSError as error:
            raise Failure(f"--flame {path}: cannot be written ({error.strerror or error}); give another file") from error
