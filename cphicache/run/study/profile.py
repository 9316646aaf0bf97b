"""What a trace costs the scheduler's thread: figures of one run, and a flame graph of it."""

from __future__ import annotations

import importlib
import resource
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import orjson

from cphicache.files import whole_file
from cphicache.run.failure import Failure
from cphicache.run.study.flame import draw
from cphicache.run.study.results import require_place
from cphicache.run.study.serve import ServeConfig, TraceServer
from cphicache.run.trace import TraceRequest

ENDINGS = (".html", ".json", ".svg")
"""Of the flame graph's file: pyinstrument's own page, what https://www.speedscope.app shows, or a picture."""
INTERVAL_S = 0.001
"""Between two samples of the profiler."""


class CostedRun:
    """A trace on one server. :meth:`row` may be asked for at any time: also of a run that was interrupted.

    ``parts``: take the time of the parts, which under a profiler would be a good part of what it sees.
    """

    def __init__(
        self, config: ServeConfig, requests: Sequence[TraceRequest], on_request: Callable[[], object] = int, *, parts: bool = True
    ) -> None:
        self.server = TraceServer(config, requests, on_request, time.thread_time if parts else float)
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
        rest = self.cpu_s - sum(parts.values())
        parts = {name: seconds for name, seconds in parts.items() if seconds} | {"the study's own scheduler, making tokens": rest}
        if len(parts) == 1:
            parts = {"all (time of the parts was not taken)": self.cpu_s}
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


class FlameGraph:
    """A context that profiles what is done inside; :meth:`write` draws it to ``path``, an interrupted part too. ``None``: neither.

    Raises :class:`Failure` for another ending than those of :data:`ENDINGS`, when the profiler is not installed, and when the file cannot
    be written: as far as that can be known, before anything is done inside.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._profiler: Any = None
        if path is None:
            return
        if path.suffix not in ENDINGS:
            raise Failure(f"--flame {path}: ends in none of {', '.join(ENDINGS)}; give one of these")
        try:
            profilers, self._renderers, self._processors = (
                importlib.import_module(f"pyinstrument{part}") for part in ("", ".renderers", ".processors")
            )
        except ImportError as error:
            raise Failure(f"--flame needs pyinstrument ({error}): pip install 'cphicache[profile]'") from error
        require_place("--flame", path)
        self._profiler = profilers.Profiler(interval=INTERVAL_S, async_mode="disabled")

    def __enter__(self) -> None:
        if self._path is not None:
            self._profiler.start()

    def __exit__(self, *_: object) -> None:
        if self._path is not None:
            self._profiler.stop()

    def write(self) -> None:
        """Draw the graph."""
        if self._path is None:
            return
        text = _rendered(self._profiler, self._renderers, self._processors, self._path.suffix)
        try:
            with whole_file(self._path) as file:
                file.write_text(text, encoding="utf-8")
        except OSError as error:
            raise Failure(f"--flame {self._path}: cannot be written ({error.strerror or error}); give another file") from error


def _rendered(profiler: Any, renderers: Any, processors: Any, ending: str) -> str:
    if ending == ".html":
        return str(profiler.output(renderers.HTMLRenderer()))
    renderer = renderers.SpeedscopeRenderer()
    renderer.processors = [
        processors.aggregate_repeated_calls,
        processors.remove_irrelevant_nodes,
    ]  # not by time: thousands of forwards
    text = str(profiler.output(renderer))
    return draw(orjson.loads(text), "the scheduler's thread") if ending == ".svg" else text
