"""Options of a run: one frozen dataclass, checked as a whole when it is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, get_args

from cphicache.transfer import support

KvKind = support.Kind
HostLayout = support.Layout
CopyBackendName = support.Backend
PageFirstD2H = Literal["pointer_table", "triton"]
WritePolicy = Literal["write_through", "write_through_selective", "write_back"]
EvictionPolicy = Literal["lru", "lfu", "fifo", "mru", "priority"]
Arrival = Literal["trace", "asap"]
StreamKind = Literal["threads", "virtual", "cuda"]
Verify = Literal["all", "sample", "off"]
WriteBackWait = Literal["wait", "drop"]
LogLevel = Literal["off", "lifecycle", "ops"]
Launch = Literal["threads", "processes"]

SYNTHETIC_POOL_TOKENS = 2560
"""Device pool, and host pool, of the default run: small enough that both are always full."""
SYNTHETIC_REQUESTS = 400
"""Requests of the synthetic workload when ``requests`` is not given."""
WORD_BYTES = 8
"""The operators of backend ``kernel`` move words of 8 bytes."""


class ConfigError(ValueError):
    """A run that cannot work. The text is one line: option, value, what is wrong, remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """Everything that a run depends on. :class:`ConfigError` for a value, or a combination, that cannot work.

    Token counts are logical: a token is stored once, on the CP rank that owns its page. Every payload (target, draft) has device
    and host pools of the same number of tokens. The defaults suit a small machine and press on both pools.
    """

    # -- workload
    trace: Path | None = None
    """Mooncake JSONL file; None for the synthetic workload."""
    requests: int | None = None
    """The first so many requests; None for all of a trace, or for :data:`SYNTHETIC_REQUESTS`."""
    scale: float = 0.125
    """Share by which lengths shrink: blocks of 512 tokens become blocks of 64."""
    seed: int = 0
    arrival: Arrival = "trace"
    """``trace``: at the trace's timestamps, on a clock of ``tick_ms``; ``asap``: all at once, in order."""
    tick_ms: float = 20.0
    """Trace time that one scheduler step stands for."""
    abort_rate: float = 0.05
    """Share of requests that are aborted somewhere on their way, chosen by the seed."""
    retract_rate: float = 0.05
    """Share of requests that are retracted once and come back, chosen by the seed (lack of pages retracts others)."""

    # -- ranks and pools
    cp_size: int = 4
    page_size: int = 16
    device_tokens: int | None = None
    """Device pool of all ranks together, without reserved pages; see :attr:`device_pages`. None: sized by :meth:`sized_for`."""
    host_tokens: int | None = None
    """Host pool of all ranks together; see :attr:`host_tokens_per_rank`. None: sized by :meth:`sized_for`."""

    kv_replicated: bool = False
    """Each of the ``cp_size`` ranks stores all of the KV, as tensor-parallel ranks of a latent do, instead of the pages that it owns."""
    launch: Launch = "threads"
    """Ranks as threads of this process, or as processes that agree over ``torch.distributed``."""
    rank_timeout_s: float = 60.0
    """Longest wait for another rank, in seconds of wall time; after that it is given up."""
    check_ranks: int = 0
    """Ranks compare digests of their state every so many ticks; 0: never."""

    # -- model
    kv: KvKind = "mla"
    kv_dtype: str = "bf16"
    """One of :data:`cphicache.transfer.support.KV_DTYPES`. ``fp8_packed``: MLA rows that hold their scales (512 and 64: 656 bytes)."""
    layers: int = 4
    draft_layers: int = 1
    """0: no draft payload."""
    latent_dim: int = 32
    """MLA: elements of the latent, stored with ``rope_dim`` more as one item of a token and layer."""
    rope_dim: int = 8
    kv_heads: int = 2
    """MHA: K and V are items of ``kv_heads * head_dim`` elements each."""
    head_dim: int = 16
    index_dim: int = 16
    """DSA: elements of a token's indexer key, one byte each, with a float32 scale for each 128 of them."""
    index_every: int = 1
    """DSA: layers 0, ``index_every``, ... have indexer keys."""

    # -- copies
    layout: HostLayout = "layer_first"
    backend: CopyBackendName = "torch"
    page_first_d2h: PageFirstD2H = "pointer_table"
    """How backend ``kernel`` copies one layer into a ``page_first`` pool: the all-layer operator with a pointer table of one entry, or
    the Triton kernel."""
    reference_operators: bool = False
    """Backends ``kernel`` and ``direct`` on our own CPU stand-ins of the package's operators, which compute the same addresses."""

    # -- scheduler
    chunk_tokens: int = 128
    """Most prompt tokens of one request in one prefill step; whole pages."""
    max_batch: int = 8

    # -- cache
    policy: WritePolicy = "write_through"
    selective_hits: int = 2
    """Hits from which ``write_through_selective`` backs a node up."""
    write_back_wait: WriteBackWait = "wait"
    """What an eviction under ``write_back`` does about nodes whose backup has not ended: wait for it, or drop the node."""
    eviction_policy: EvictionPolicy = "lru"
    reclaim_device_valid: bool = False
    overlap: bool = True
    """False: all layers are submitted after the forward."""
    max_deferral_ticks: int = 16
    max_retries: int = 3
    load_back_threshold: int = 10
    """Shortest host hit (tokens) that is loaded back rather than computed again."""

    # -- running and reporting
    streams: StreamKind = "virtual"
    """``cuda``: device pools on the GPU, host pools pinned, copies on CUDA streams."""
    verify: Verify = "all"
    log: Path | None = None
    log_level: LogLevel = "lifecycle"
    out: Path | None = None
    json: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            _check_value(field.name, getattr(self, field.name))
        self._check_together()

    @classmethod
    def from_mapping(cls, options: Mapping[str, Any]) -> RunConfig:
        """From options by field name (``-`` reads as ``_``, a path may be a string). :class:`ConfigError` for an unknown name."""
        known = [field.name for field in fields(cls)]
        values: dict[str, Any] = {}
        for given, value in options.items():
            name = given.replace("-", "_")
            if name not in known:
                near = get_close_matches(name, known, n=1)
                remedy = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
                raise ConfigError(f"{given!r} = {value!r}: no such option; {remedy}")
            if name in values:
                raise ConfigError(f"{given!r} = {value!r}: the option is given twice; give it once")
            values[name] = Path(value) if name in _PATHS and isinstance(value, str) and value else value
        return cls(**values)

    # -- what follows from the options --------------------------------------------------------------------------------------
    @property
    def request_limit(self) -> int | None:
        """Requests to take: ``requests``, else all (None) of a trace and :data:`SYNTHETIC_REQUESTS` of the synthetic workload."""
        if self.requests is None and self.trace is None:
            return SYNTHETIC_REQUESTS
        return self.requests

    def sized_for(self, longest_tokens: int) -> RunConfig:
        """This configuration with both pools given. The synthetic workload has pools that it presses on from both sides; a trace has a
        device pool for twice its longest request (``longest_tokens``, prompt and output) and a host pool half as large again."""
        device_tokens = self.device_tokens
        if device_tokens is None:
            whole = self.page_size * self.owners
            least = max(2 * (self.chunk_tokens + self.page_size), longest_tokens + 2 * whole)
            if self.trace is not None or longest_tokens > SYNTHETIC_POOL_TOKENS // 2:
                least = max(least, 2 * longest_tokens)
            device_tokens = max(SYNTHETIC_POOL_TOKENS, -(-least // whole) * whole)
        host_tokens = self.host_tokens
        if host_tokens is None:
            host_tokens = device_tokens if device_tokens == SYNTHETIC_POOL_TOKENS else device_tokens * 3 // 2
        return replace(self, device_tokens=device_tokens, host_tokens=host_tokens)

    @property
    def owners(self) -> int:
        """Ranks that share the KV: the engine's ``cp_size``, 1 if every rank has all of it."""
        return 1 if self.kv_replicated else self.cp_size

    @property
    def device_pages(self) -> int:
        """Usable logical device pages: whole pages of ``device_tokens``, the same number for every owner."""
        return _given(self.device_tokens) // self.page_size // self.owners * self.owners

    @property
    def host_tokens_per_rank(self) -> int:
        """Host slots of one rank for each payload: its share of ``host_tokens``, rounded down to whole pages."""
        return _given(self.host_tokens) // self.owners // self.page_size * self.page_size

    @property
    def host_smaller_than_device(self) -> bool:
        """Can the device hold more tokens than the host? Then backups starve without ``reclaim_device_valid`` (R16)."""
        return self.host_tokens_per_rank * self.owners < self.device_pages * self.page_size

    @property
    def device_type(self) -> Literal["cuda", "cpu"]:
        """Where the device pools lie."""
        return "cuda" if self.streams == "cuda" else "cpu"

    @property
    def item_elements(self) -> int:
        """Elements of one component (MLA and DSA: the latent with its rope part; MHA: K or V) of one token in one layer."""
        if self.kv == "mha":
            return self.kv_heads * self.head_dim
        if support.KV_DTYPES[self.kv_dtype].packed:
            return support.packed_row_bytes(self.latent_dim, self.rope_dim)
        return self.latent_dim + self.rope_dim

    @property
    def item_bytes(self) -> int:
        """Bytes of one component of one token in one layer."""
        return self.item_elements * support.KV_DTYPES[self.kv_dtype].element_bytes

    @property
    def index_item_bytes(self) -> int:
        """Bytes of one token's indexer key in one layer (DSA)."""
        return support.indexer_item_bytes(self.index_dim)

    def _check_copies(self) -> None:
        dtype = support.KV_DTYPES[self.kv_dtype]
        if dtype.reason is not None:
            raise _error("kv_dtype", self.kv_dtype, f"is not supported: {dtype.reason}", "give bf16, fp16, fp8_e4m3 or fp8_packed")
        if dtype.packed and self.kv == "mha":
            raise _error("kv_dtype", self.kv_dtype, "has no MHA form", "give fp8_e4m3, or kv mla or dsa")
        combination = support.support_of(self.kv, self.layout, self.backend)
        if combination.reason is not None:
            what, _, remedy = combination.reason.partition(": ")
            raise _error("backend", self.backend, f"does not copy kv {self.kv} with layout {self.layout}: {what}", remedy)
        if self.reference_operators and self.backend not in ("kernel", "direct"):
            raise _error(
                "reference_operators",
                True,
                f"is of no use with backend {self.backend}",
                "choose backend kernel or direct, or drop it",
            )
        if self.reference_operators and self.device_type != "cpu":
            raise _error("reference_operators", True, "compute on CPU buffers", "choose streams threads or virtual, or drop it")
        if self.page_first_d2h == "triton" and (self.backend, self.layout) != ("kernel", "page_first"):
            raise _error(
                "page_first_d2h",
                "triton",
                f"is of no use with backend {self.backend} and layout {self.layout}",
                "it is for backend kernel and layout page_first",
            )
        rows = {"item": self.item_bytes, **({"indexer page": self.index_item_bytes * self.page_size} if self.kv == "dsa" else {})}
        for name, size_bytes in rows.items():
            if self.backend == "kernel" and size_bytes % WORD_BYTES:
                raise _error(
                    "backend",
                    "kernel",
                    f"moves words of {WORD_BYTES} bytes, and one {name} has {size_bytes}",
                    "change the model's dimensions or the page size, or choose another backend",
                )

    def _check_together(self) -> None:
        self._check_copies()
        if self.chunk_tokens % self.page_size:
            below = self.chunk_tokens // self.page_size * self.page_size
            raise _error(
                "chunk_tokens",
                self.chunk_tokens,
                f"is not a multiple of page_size {self.page_size}",
                f"give {below or self.page_size}, or a page size that divides it",
            )
        needed_pages = -(-(self.chunk_tokens // self.page_size + 1) // self.owners) * self.owners
        if self.device_tokens is not None and self.device_pages < needed_pages:
            raise _error(
                "device_tokens",
                self.device_tokens,
                f"leaves {self.device_pages} usable pages, below one chunk and one page on {self.owners} ranks",
                f"give at least {needed_pages * self.page_size}, or a smaller chunk",
            )
        if self.host_tokens is not None and self.host_tokens_per_rank < self.page_size:
            raise _error(
                "host_tokens",
                self.host_tokens,
                "is below one page a payload on each rank",
                f"give at least {self.owners * self.page_size} (cp_size {self.owners} x page_size {self.page_size})",
            )
        if self.log is not None and self.log_level == "off":
            raise _error(
                "log", str(self.log), "would stay empty with log_level off", "choose log_level lifecycle or ops, or no log"
            )


def _given(tokens: int | None) -> int:
    if tokens is None:
        raise AssertionError("pool size: expected a configuration that sized_for() has returned, found one without it")
    return tokens


# Every option is in one of these tables, or a flag. Upper bounds only keep slips from filling the memory.
MOST_REQUESTS, MOST_TOKENS, MOST_SEED = 10**9, 2**31, 2**63 - 1
_INTS: Mapping[str, tuple[int, int]] = {
    "requests": (1, MOST_REQUESTS),
    "seed": (0, MOST_SEED),
    "cp_size": (1, 8),
    "check_ranks": (0, 10**9),
    "page_size": (1, 1024),
    "device_tokens": (1, MOST_TOKENS),
    "host_tokens": (1, MOST_TOKENS),
    "layers": (1, 1024),
    "draft_layers": (0, 1024),
    "latent_dim": (1, 2**16),
    "rope_dim": (0, 2**16),
    "kv_heads": (1, 1024),
    "head_dim": (1, 1024),
    "index_dim": (1, 2**16),
    "index_every": (1, 1024),
    "chunk_tokens": (1, 2**31),
    "max_batch": (1, 2**16),
    "selective_hits": (1, 2**31),
    "max_deferral_ticks": (1, 2**31),
    "max_retries": (0, 2**31),
    "load_back_threshold": (0, 2**31),
}
_CHOICES: Mapping[str, tuple[str, ...]] = {
    "kv": get_args(KvKind),
    "kv_dtype": tuple(support.KV_DTYPES),
    "layout": get_args(HostLayout),
    "backend": get_args(CopyBackendName),
    "page_first_d2h": get_args(PageFirstD2H),
    "policy": get_args(WritePolicy),
    "eviction_policy": get_args(EvictionPolicy),
    "arrival": get_args(Arrival),
    "streams": get_args(StreamKind),
    "verify": get_args(Verify),
    "write_back_wait": get_args(WriteBackWait),
    "log_level": get_args(LogLevel),
    "launch": get_args(Launch),
}
_PATHS = ("trace", "log", "out")
_NUMBERS: Mapping[str, tuple[float, float, bool]] = {
    "scale": (0.0, 1.0, False),
    "tick_ms": (0.0, 1e6, False),
    "abort_rate": (0.0, 1.0, True),
    "retract_rate": (0.0, 1.0, True),
    "rank_timeout_s": (0.5, 3600.0, True),
}
"""(least, most, is the least value itself allowed)."""


def _check_value(name: str, value: object) -> None:
    if name in _INTS:
        least, most = _INTS[name]
        if name in ("requests", "device_tokens", "host_tokens") and value is None:
            return
        if type(value) is not int or not least <= value <= most:
            raise _error(name, value, "is not a whole number in range", f"give {least} to {most}")
    elif name in _NUMBERS:
        low, high, closed = _NUMBERS[name]
        number = isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high  # NaN compares false
        if not number or (value == low and not closed):
            raise _error(
                name, value, "is not a number in range", f"give {'at least' if closed else 'more than'} {low:g}, at most {high:g}"
            )
    elif name in _CHOICES:
        if not isinstance(value, str) or value not in _CHOICES[name]:
            raise _error(name, value, "is unknown", f"choose one of {', '.join(_CHOICES[name])}")
    elif name in _PATHS:
        if value is not None and not isinstance(value, Path):
            raise _error(name, value, "is not a path", "give a file or folder name")
    elif type(value) is not bool:
        raise _error(name, value, "is not a flag", "give True or False")


def _error(name: str, value: object, wrong: str, remedy: str) -> ConfigError:
    shown = value if isinstance(value, str) and value.isprintable() and value else repr(value)
    return ConfigError(f"--{name.replace('_', '-')} {shown}: {wrong}; {remedy}")
