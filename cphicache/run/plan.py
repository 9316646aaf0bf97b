"""What fits: tokens, pages, bytes and seconds for a model's KV on device and host. Integers only; no torch, no GPU.

Where the numbers of the presets come from is told in docs/plan.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from difflib import get_close_matches
from fractions import Fraction
from types import MappingProxyType
from typing import Any

from cphicache.transfer.budget import GIB, MOST_SLOTS, HostBudgetError, MemoryLimit, describe_bytes, host_budget
from cphicache.transfer.support import COMPONENTS_BY_KIND, KV_DTYPES, indexer_item_bytes, packed_row_bytes

DEFAULT_GB_PER_S = 50.0
"""One direction of a PCIe 5.0 x16 link in practice; ``cphicache doctor`` measures yours."""
GB = 10**9
LEAST_GB_PER_S, MOST_GB_PER_S = 1e-6, 1e6
MOST_OF_A_MODEL = 1 << 20
"""Of each dimension of a model."""


class PlanError(ValueError):
    """A plan that cannot work. One line: option, value, what is wrong, remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What a model stores for one token. ``draft_layers``: layers of an MTP or EAGLE draft of the same kind (0: none).

    MLA and DSA: ``latent_dim + rope_dim`` elements a layer; DSA adds an indexer key of ``index_dim`` bytes and its scales in
    ``indexer_layers`` of the target's layers (None: all) and in every draft layer. MHA: K and V of ``kv_heads * head_dim`` each.
    """

    kind: str
    layers: int
    draft_layers: int = 0
    latent_dim: int = 0
    rope_dim: int = 0
    index_dim: int = 0
    indexer_layers: int | None = None
    kv_heads: int = 0
    head_dim: int = 0

    def __post_init__(self) -> None:
        if self.kind not in COMPONENTS_BY_KIND:
            raise PlanError(f"--kv {self.kind}: is unknown; choose one of {', '.join(COMPONENTS_BY_KIND)}")
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int) and value > MOST_OF_A_MODEL:
                raise PlanError(f"--{field.name.replace('_', '-')} {value}: is too much; give at most {MOST_OF_A_MODEL}")
        if self.layers < 1:
            raise PlanError(f"--layers {self.layers}: a model has at least one layer")
        if self.draft_layers < 0:
            raise PlanError(f"--draft-layers {self.draft_layers}: give 0 for no draft, or more")
        needed = {"mha": ("kv_heads", "head_dim"), "mla": ("latent_dim",), "dsa": ("latent_dim", "index_dim")}[self.kind]
        for name in needed:
            if getattr(self, name) < 1:
                raise PlanError(f"--{name.replace('_', '-')} {getattr(self, name)}: kv {self.kind} needs at least 1")
        if self.rope_dim < 0:
            raise PlanError(f"--rope-dim {self.rope_dim}: give 0 or more")
        if self.indexer_layers is not None and not 0 < self.indexer_layers <= self.layers:
            raise PlanError(f"--indexer-layers {self.indexer_layers}: give 1 to {self.layers} (--layers)")

    def component_bytes(self, kv_dtype: str, *, draft: bool) -> dict[str, int]:
        """Bytes of one token by component, all layers of the target or of the draft together."""
        layers = self.draft_layers if draft else self.layers
        dtype = KV_DTYPES[kv_dtype]
        if self.kind == "mha":
            return dict.fromkeys(("k", "v"), layers * self.kv_heads * self.head_dim * dtype.element_bytes)
        row = packed_row_bytes(self.latent_dim, self.rope_dim) if dtype.packed else self.latent_dim + self.rope_dim
        components = {"latent": layers * row * dtype.element_bytes}
        if self.kind == "dsa":
            with_indexer = layers if draft or self.indexer_layers is None else self.indexer_layers
            components["indexer"] = with_indexer * indexer_item_bytes(self.index_dim)
        return components


PRESETS: Mapping[str, ModelShape] = MappingProxyType(
    {
        "deepseek-v3.2": ModelShape(kind="dsa", layers=61, draft_layers=1, latent_dim=512, rope_dim=64, index_dim=128),
        "glm-5": ModelShape(kind="dsa", layers=78, draft_layers=1, latent_dim=512, rope_dim=64, index_dim=128),
        "llama-3-70b": ModelShape(kind="mha", layers=80, kv_heads=8, head_dim=128),
        "qwen3-235b": ModelShape(kind="mha", layers=94, kv_heads=4, head_dim=128),
    }
)


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """One pool, target and draft: of one rank, and of all CP ranks together (a token is stored on one of them)."""

    tokens_per_rank: int
    pages_per_rank: int
    bytes_per_rank: int
    tokens: int
    fill_seconds: float
    """Time to copy all of one rank's bytes at the given bandwidth; ranks copy side by side."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What :func:`plan` found. ``payload_bytes``: bytes of one token by payload; ``component_bytes``: by payload and component."""

    model: str
    shape: ModelShape
    kv_dtype: str
    cp_size: int
    tp_size: int
    page_size: int
    gb_per_s: float
    component_bytes: dict[str, dict[str, int]]
    payload_bytes: dict[str, int]
    token_bytes: int
    page_bytes: int
    device: PoolPlan
    host: PoolPlan
    warnings: list[str]

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def model_shape(model: str | None, **changes: int | str | None) -> ModelShape:
    """A preset, or a shape from scratch, with the given options (None: not given) on top. Raises :class:`PlanError`."""
    given: dict[str, Any] = {name: value for name, value in changes.items() if value is not None}
    if model is None:
        if "kind" not in given or "layers" not in given:
            raise PlanError(
                f"--model: is not given; choose one of {', '.join(PRESETS)}, or describe a model with --kv and --layers"
            )
        return ModelShape(**given)
    if model not in PRESETS:
        near = get_close_matches(model, PRESETS, n=1)
        raise PlanError(
            f"--model {model}: is unknown; {f'did you mean {near[0]}?' if near else f'choose one of {chr(44).join(PRESETS)}'}"
        )
    return replace(PRESETS[model], **given)


def plan(
    model: str,
    shape: ModelShape,
    *,
    kv_dtype: str = "bf16",
    cp_size: int = 1,
    tp_size: int = 1,
    page_size: int = 64,
    device_gib: float | None = None,
    device_tokens: int | None = None,
    host_gib: float | None = None,
    host_tokens: int | None = None,
    host_ratio: float | None = None,
    gb_per_s: float = DEFAULT_GB_PER_S,
    ranks_here: int = 1,
    limits: list[MemoryLimit] | None = None,
) -> Plan:
    """What fits. Sizes in GiB (2**30 bytes) and tokens are those of **one rank**; ``gb_per_s`` counts 10**9 bytes.

    ``cp_size``: each rank stores 1/N of the tokens. ``tp_size``: MHA heads are divided (never below one), MLA latents are not.
    ``limits``: of this machine, checked for ``ranks_here`` ranks; None: not checked. Raises :class:`PlanError` and
    :class:`~cphicache.transfer.budget.HostBudgetError`.
    """
    _check(kv_dtype, shape, cp_size=cp_size, tp_size=tp_size, page_size=page_size, gb_per_s=gb_per_s)
    stored = replace(shape, kv_heads=max(shape.kv_heads // tp_size, 1)) if shape.kind == "mha" else shape
    payloads = ["target", *(["draft"] if shape.draft_layers else [])]
    components = {payload: stored.component_bytes(kv_dtype, draft=payload == "draft") for payload in payloads}
    payload_bytes = {payload: sum(parts.values()) for payload, parts in components.items()}
    token_bytes = sum(payload_bytes.values())
    device_slots = _device_slots(token_bytes, page_size, gib=device_gib, tokens=device_tokens)
    budget = host_budget(
        payload_bytes,
        page_size,
        tokens=host_tokens,
        gib=host_gib,
        ratio=host_ratio,
        device_slots=device_slots,
        ranks_here=ranks_here,
        limits=limits or [],
    )

    def pool(slots: int) -> PoolPlan:
        size_bytes = slots * token_bytes
        seconds = Fraction(size_bytes) / (Fraction(str(gb_per_s)) * GB)
        return PoolPlan(slots, slots // page_size, size_bytes, slots * cp_size, float(round(seconds, 3)))

    device, host = pool(device_slots), pool(budget.slots)
    return Plan(
        model,
        shape,
        kv_dtype,
        cp_size,
        tp_size,
        page_size,
        gb_per_s,
        components,
        payload_bytes,
        token_bytes,
        token_bytes * page_size,
        device,
        host,
        _warnings(device, host),
    )


def _warnings(device: PoolPlan, host: PoolPlan) -> list[str]:
    if host.tokens_per_rank >= device.tokens_per_rank:
        return []
    return [
        f"the host pool ({host.tokens_per_rank} tokens a rank) is smaller than the device pool ({device.tokens_per_rank}): backups will "
        "be refused once it is full of nodes that are on the device too; make it larger, or use --reclaim-device-valid"
    ]


def _device_slots(token_bytes: int, page_size: int, *, gib: float | None, tokens: int | None) -> int:
    if (gib is None) == (tokens is None):
        raise PlanError(
            f"{'--device-gib and --device-tokens' if gib is not None else 'nothing'} given: give exactly one of the two"
        )
    option, value = ("--device-gib", gib) if gib is not None else ("--device-tokens", tokens)
    try:
        exact = Fraction(str(value))
    except ValueError as error:
        raise PlanError(f"{option} {value}: is not a finite number; give a positive one") from error
    slots = int(exact if gib is None else exact * GIB / token_bytes) // page_size * page_size
    if slots < page_size:
        raise PlanError(
            f"{option} {value}: is below one page of {page_size} tokens ({describe_bytes(page_size * token_bytes)}); give more"
        )
    if slots > MOST_SLOTS:
        raise PlanError(f"{option} {value}: is more than {MOST_SLOTS} tokens; give less")
    return slots


def _check(kv_dtype: str, shape: ModelShape, *, cp_size: int, tp_size: int, page_size: int, gb_per_s: float) -> None:
    dtype = KV_DTYPES.get(kv_dtype)
    if dtype is None:
        raise PlanError(f"--kv-dtype {kv_dtype}: is unknown; choose one of {', '.join(KV_DTYPES)}")
    if dtype.reason is not None:
        raise PlanError(f"--kv-dtype {kv_dtype}: is not supported: {dtype.reason}; give bf16, fp16, fp8_e4m3 or fp8_packed")
    if dtype.packed and shape.kind == "mha":
        raise PlanError(f"--kv-dtype {kv_dtype}: has no MHA form; give fp8_e4m3")
    for option, value, most in (("--cp-size", cp_size, 1024), ("--tp-size", tp_size, 1024), ("--page-size", page_size, 1024)):
        if not 1 <= value <= most:
            raise PlanError(f"{option} {value}: is not in range; give 1 to {most}")
    if shape.kind == "mha" and shape.kv_heads % tp_size and tp_size % shape.kv_heads:
        raise PlanError(f"--tp-size {tp_size}: does not divide {shape.kv_heads} KV heads; give a divisor or a multiple")
    if not LEAST_GB_PER_S <= gb_per_s <= MOST_GB_PER_S:
        raise PlanError(f"--gb-per-s {gb_per_s}: is not a bandwidth; give {LEAST_GB_PER_S:g} to {MOST_GB_PER_S:g}")


__all__ = ["DEFAULT_GB_PER_S", "PRESETS", "HostBudgetError", "ModelShape", "Plan", "PlanError", "PoolPlan", "model_shape", "plan"]
