"""A simulated world as plain data: everything that a run depends on, drawn from one seed. No torch here.

A world is small, so that hundreds run in a minute, and pressed: pools of a few prompts, so that both tiers are always full.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from random import Random
from typing import Any, Literal, NamedTuple, get_args

from cphicache.run.config import ConfigError, EvictionPolicy, RunConfig, WriteBackWait
from cphicache.transfer.support import SUPPORT

Where = Literal["d2h", "h2d", "reserve"]
What = Literal["reset_backups", "evict", "pin"]

THREADED_SHARE = 0.03
"""Share of worlds that copy on real threads: the only ones that are not repeatable to the byte."""
LOST_SHARE = 0.05
"""Share of worlds in which a rank ends early, and takes the group with it."""
MOST_LOAD_FAULTS = 3


class Fault(NamedTuple):
    """One planned failure: the ``nth`` copy of a layer, or the ``nth`` reservation of a payload (then ``layer`` is 0), on one rank."""

    rank: int
    where: Where
    payload: str
    layer: int
    nth: int


class Action(NamedTuple):
    """What every rank does at the end of a tick besides serving; ``amount`` is tokens to evict, or ticks to pin."""

    tick: int
    what: What
    amount: int


class Lost(NamedTuple):
    """A rank that ends after a tick."""

    rank: int
    tick: int


class WorldError(ValueError):
    """A world that cannot be read. The text is one line."""


@dataclass(frozen=True, slots=True)
class DrawnWorld:
    """What runs. ``options``: of :class:`~cphicache.run.config.RunConfig`, by field name. ``slowness``: factor on the time of each rank's
    copies. ``jitter``: tail of the virtual clock. ``check_ticks``: the outside checker looks after every so many ticks."""

    options: Mapping[str, Any]
    slowness: tuple[float, ...]
    jitter: float
    faults: tuple[Fault, ...] = ()
    actions: tuple[Action, ...] = ()
    lost: Lost | None = None
    check_ticks: int = 1

    @property
    def config(self) -> RunConfig:
        """The options, checked. Raises :class:`~cphicache.run.config.ConfigError`."""
        return RunConfig.from_mapping(self.options)

    @property
    def is_repeatable(self) -> bool:
        """Does an equal world take equal steps? Not on real threads, nor when ranks end wherever they happen to be."""
        return self.options["streams"] == "virtual" and self.lost is None

    def with_options(self, **changed: Any) -> DrawnWorld:
        """The same with other options."""
        return replace(self, options={**self.options, **changed})

    def to_json(self) -> str:
        """One line that :meth:`from_json` reads."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> DrawnWorld:
        """Raises :class:`WorldError` for anything that :meth:`to_json` does not write."""
        try:
            given = json.loads(text)
            unknown = set(given) - {field.name for field in fields(cls)}
            if unknown:
                raise WorldError(f"world: unknown field {sorted(unknown)[0]!r}; give the line that `simulate` printed")
            world = cls(
                options=dict(given["options"]),
                slowness=tuple(map(float, given["slowness"])),
                jitter=float(given["jitter"]),
                faults=tuple(Fault(*fault) for fault in given["faults"]),
                actions=tuple(Action(*action) for action in given["actions"]),
                lost=None if given["lost"] is None else Lost(*given["lost"]),
                check_ticks=int(given["check_ticks"]),
            )
            ranks = world.config.cp_size
        except WorldError:
            raise
        except (ValueError, KeyError, TypeError, ConfigError) as error:
            raise WorldError(
                f"world: cannot be read ({type(error).__name__}: {error}); give the line that `simulate` printed"
            ) from error
        if len(world.slowness) != ranks or world.check_ticks < 1:
            raise WorldError(
                f"world: slowness {world.slowness} and check_ticks {world.check_ticks} do not fit cp_size {ranks}; give one factor a "
                "rank, and at least 1 tick"
            )
        return world


def draw(seed: int) -> DrawnWorld:
    """The world of a seed."""
    rng = Random(seed)
    options = _options(rng, seed)
    ranks = options["cp_size"]
    requests = options["requests"]
    calm = rng.random() < 0.3
    return DrawnWorld(
        options=options,
        slowness=tuple(rng.choice((0.5, 1.0, 1.0, 2.0, 8.0, 20.0)) for _ in range(ranks)),
        jitter=rng.choice((0.0, 0.5, 0.5, 2.0, 5.0)),
        faults=() if calm else _faults(rng, options),
        actions=tuple(
            Action(rng.randrange(1, 4 * requests), rng.choice(get_args(What)), rng.randrange(1, 64))
            for _ in range(rng.choice((0, 0, 1, 2, 4)))
        ),
        lost=Lost(rng.randrange(ranks), rng.randrange(1, 3 * requests)) if rng.random() < LOST_SHARE else None,
        check_ticks=rng.choice((1, 2, 4)),
    )


def _options(rng: Random, seed: int) -> dict[str, Any]:
    page_size = rng.choice((1, 2, 4, 4, 8, 16))
    cp_size = rng.choice((1, 2, 2, 3, 4))
    replicated = cp_size > 1 and rng.random() < 0.1
    owners = 1 if replicated else cp_size
    block = rng.choice((4, 8, 16, 16))  # tokens of a block of the workload; a prompt has 1 to 8 of them, a few have more
    chunk = page_size * rng.randrange(max(1, 8 // page_size), max(1, 64 // page_size) + 1)
    least_pages = -(-(chunk // page_size + 1) // owners) * owners
    device_pages = max(least_pages, -(-block * rng.randrange(5, 21) // page_size))
    host_tokens = max(owners * page_size, int(device_pages * page_size * rng.choice((0.25, 0.5, 1.0, 2.0, 4.0, 4.0))))
    combination = rng.choice([row for row in SUPPORT if row.reason is None and row.io_backend != "triton"])
    plain = rng.random() < 0.4
    backend = "torch" if plain else combination.io_backend
    return {
        "seed": seed,
        "requests": rng.randrange(8, 28),
        "scale": block / 512,
        "arrival": rng.choice(("trace", "trace", "asap")),
        "tick_ms": rng.choice((5.0, 20.0, 50.0)),
        "abort_rate": rng.choice((0.0, 0.1, 0.3)),
        "retract_rate": rng.choice((0.0, 0.1, 0.3)),
        "cp_size": cp_size,
        "kv_replicated": replicated,
        "check_ranks": rng.choice((0, 1, 3)),
        "page_size": page_size,
        "device_tokens": device_pages * page_size,
        "host_tokens": host_tokens,
        "kv": combination.kind,
        "kv_dtype": rng.choice(("bf16", "fp8_e4m3")),
        "layers": rng.randrange(1, 4),
        "draft_layers": rng.choice((0, 1, 1, 2)),
        "latent_dim": 12,
        "rope_dim": 4,
        "kv_heads": 1,
        "head_dim": 8,
        "index_dim": 12,
        "index_every": rng.choice((1, 2)),
        "layout": "layer_first" if plain else combination.layout,
        "backend": backend,
        "reference_operators": backend in ("kernel", "direct"),
        "chunk_tokens": chunk,
        "max_batch": rng.choice((1, 2, 4, 8)),
        "policy": rng.choice(("write_through", "write_through", "write_through_selective", "write_back")),
        "selective_hits": rng.choice((1, 2, 3)),
        "write_back_wait": rng.choice(get_args(WriteBackWait)),
        "eviction_policy": rng.choice(get_args(EvictionPolicy)),
        "reclaim_device_valid": rng.random() < 0.5,
        "overlap": rng.random() < 0.8,
        "max_deferral_ticks": rng.choice((1, 4, 16)),
        "max_retries": rng.choice((0, 1, 3)),
        "load_back_threshold": rng.choice((0, 1, 10)),
        "streams": "threads" if rng.random() < THREADED_SHARE else "virtual",
        "log_level": "off",
    }


def _faults(rng: Random, options: Mapping[str, Any]) -> tuple[Fault, ...]:
    payloads = {"target": options["layers"], **({"draft": options["draft_layers"]} if options["draft_layers"] else {})}
    faulty = rng.sample(range(options["cp_size"]), rng.randrange(1, options["cp_size"] + 1))
    counts: dict[Where, int] = {"d2h": rng.randrange(7), "h2d": rng.randrange(MOST_LOAD_FAULTS + 1), "reserve": rng.randrange(5)}
    faults = set()
    for where in (where for where, count in counts.items() for _ in range(count)):
        payload = rng.choice(list(payloads))
        layer = 0 if where == "reserve" else rng.randrange(payloads[payload])
        faults.add(Fault(rng.choice(faulty), where, payload, layer, rng.randrange(4 if where == "h2d" else 12)))
    return tuple(sorted(faults))
