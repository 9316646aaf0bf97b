"""The workload as one rank sees it: requests with their tokens, arrival, and what will happen to them on the way, all from the seed."""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from cphicache.check.reference import ReferenceKV
from cphicache.run.config import RunConfig
from cphicache.run.synthetic import synthetic_trace
from cphicache.run.trace import TraceRequest, output_tokens, prompt_tokens, read_trace, scale_request
from cphicache.spaces.types import LogicalPage


@dataclass(slots=True)
class Job:
    """A request on its way. ``known`` tokens are to be computed before the next one is sampled; ``stored`` have their KV. Its prefill
    ends at ``target``: the prompt, and what was sampled before a retraction."""

    rid: str
    arrival_ms: float
    tokens: array[int]
    prompt: int
    output: int
    hashes: npt.NDArray[np.uint64]
    abort_after: int | None
    """Forward passes after which it is aborted (0: in the queue)."""
    abort_layer: int | None
    """If set, the abort comes between two layers of that pass."""
    retract_after: int | None
    row: list[LogicalPage] = field(default_factory=list)
    known: int = 0
    target: int = 0
    stored: int = 0
    sampled: int = 0
    passes: int = 0
    chunks: int = 0
    prefix_pages: int = 0
    check_to: int = 0
    nodes: list[tuple[int, int]] = field(default_factory=list)
    aborted: bool = False

    def restart(self) -> None:
        """Back to the queue: what was sampled so far is part of its prompt now."""
        self.row = []
        self.stored = self.passes = self.chunks = self.check_to = self.prefix_pages = 0
        self.known = self.target = self.prompt + self.sampled
        self.retract_after = None


def load_requests(config: RunConfig) -> list[TraceRequest]:
    """The trace of the run, scaled. Raises :class:`~cphicache.run.trace.TraceError`."""
    if config.trace is None:
        requests = synthetic_trace(config.request_limit or 1, config.seed)
    else:
        requests = read_trace(config.trace, config.request_limit)
    return [scale_request(request, config.scale) for request in requests]


def sized_for(config: RunConfig, requests: list[TraceRequest]) -> RunConfig:
    """The configuration with both pools given: sized for these (scaled) requests where the options leave that open."""
    return config.sized_for(max((request.input_length + request.output_length for request in requests), default=1))


def make_jobs(config: RunConfig, requests: list[TraceRequest], reference: ReferenceKV) -> list[Job]:
    """Jobs in order of arrival. Equal for equal configuration: every rank makes its own."""
    rng = random.Random(config.seed * 2 + 1)
    jobs = []
    for request in requests:
        prompt = prompt_tokens(request)
        output = max(1, request.output_length)
        tokens = prompt + output_tokens(request, output)
        abort_after = abort_layer = retract_after = None
        passes = -(-len(prompt) // config.chunk_tokens) + output
        if rng.random() < config.abort_rate:
            abort_after = rng.randrange(0, min(passes, 6) + 1)
            if abort_after and rng.random() < 0.5:
                abort_layer = rng.randrange(config.layers)
        elif rng.random() < config.retract_rate:
            retract_after = rng.randrange(1, min(passes, 8) + 1)
        jobs.append(
            Job(
                rid=f"r{request.index}",
                arrival_ms=0.0 if config.arrival == "asap" else float(request.timestamp_ms),
                tokens=tokens,
                prompt=len(prompt),
                output=output,
                hashes=reference.prefix_hashes(tokens),
                abort_after=abort_after,
                abort_layer=abort_layer,
                retract_after=retract_after,
                known=len(prompt),
                target=len(prompt),
            )
        )
    return jobs
