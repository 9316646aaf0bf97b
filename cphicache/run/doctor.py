"""What works here: every (KV kind, host layout, copy backend) is copied and compared byte by byte; with a GPU it is timed as well."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from cphicache import __version__
from cphicache.run.doctor_copies import Lab, Way, WrongBytes, compare, measure, open_lab, pinned_limit, ways
from cphicache.transfer.backends import BackendUnavailable
from cphicache.transfer.budget import MemoryLimit, memory_limits
from cphicache.transfer.support import SUPPORT, Support

PACKAGES = ("torch", "triton", "sglang-kernel", "sgl-kernel", "sglang")
NOT_VERIFIED = "not verified on a GPU: there is none here that torch can use"
ON_CPU_NOTE = (
    "without a GPU, kernel and direct run on stand-ins of sglang-kernel's operators and triton in its interpreter: this checks our "
    "calls, addresses and bytes, not those packages"
)

Ways = Callable[[Support, str], list[Callable[[], Way]]]


@dataclass(slots=True)
class PairResult:
    """One combination. ``status``: ok, wrong bytes, failed, unavailable (a package or a GPU is missing) or unsupported (nothing copies
    it). ``runs_on``: what stood behind it. Rates in 10**9 bytes a second, None without a GPU."""

    kind: str
    layout: str
    io_backend: str
    status: str = "ok"
    runs_on: str = ""
    reason: str = ""
    d2h_layer_gb_per_s: float | None = None
    d2h_all_gb_per_s: float | None = None
    h2d_layer_gb_per_s: float | None = None


@dataclass(slots=True)
class Report:
    """What was found. ``pinned_*``: the measured speed of one large copy to and from pinned memory, the limit of every pair."""

    cphicache: str
    python: str
    system: str
    packages: dict[str, str | None]
    cuda: str | None
    gpu: str | None
    compute_capability: str | None
    memory_limits: list[MemoryLimit]
    pinned_d2h_gb_per_s: float | None = None
    pinned_h2d_gb_per_s: float | None = None
    pairs: list[PairResult] = field(default_factory=list)

    @property
    def healthy(self) -> bool:
        """Nothing that could run went wrong."""
        return all(pair.status not in ("wrong bytes", "failed") for pair in self.pairs)

    @property
    def notes(self) -> list[str]:
        """How to read the results."""
        return [ON_CPU_NOTE] if self.gpu is None else []

    @property
    def verdict(self) -> str:
        """One line."""
        counts = Counter(pair.status for pair in self.pairs)
        told = ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))
        return f"{told}; {NOT_VERIFIED if self.gpu is None else f'verified on {self.gpu}' if self.healthy else 'not verified'}"

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            **asdict(self),
            "memory_limits": [limit._asdict() for limit in self.memory_limits],
            "healthy": self.healthy,
            "notes": self.notes,
            "verdict": self.verdict,
        }


def examine(*, device: str = "auto", find_ways: Ways = ways, on_pair: Callable[[PairResult], None] | None = None) -> Report:
    """Try everything. ``device``: ``cuda``, ``cpu``, or ``auto``: a GPU where there is one. ``on_pair`` hears of each result.

    Raises :class:`~cphicache.transfer.streams.cuda.CudaUnavailable` for ``cuda`` without a GPU.
    """
    on_gpu = torch.cuda.is_available() if device == "auto" else device == "cuda"
    with open_lab(on_gpu=on_gpu) as lab:
        report = Report(
            cphicache=__version__,
            python=platform.python_version(),
            system=f"{platform.system()} {platform.release()} {platform.machine()}",
            packages={name: _version(name) for name in PACKAGES},
            cuda=torch.version.cuda,
            gpu=torch.cuda.get_device_name(lab.device) if on_gpu else None,
            compute_capability="{}.{}".format(*torch.cuda.get_device_capability(lab.device)) if on_gpu else None,
            memory_limits=memory_limits(),
        )
        if on_gpu:
            report.pinned_d2h_gb_per_s, report.pinned_h2d_gb_per_s = pinned_limit(lab)
        for row in SUPPORT:
            for find in find_ways(row, lab.device.type):
                result = _examine_pair(lab, row, find)
                report.pairs.append(result)
                if on_pair is not None:
                    on_pair(result)
                if result.status == "unsupported":
                    break
    return report


def _examine_pair(lab: Lab, row: Support, find: Callable[[], Way]) -> PairResult:
    result = PairResult(row.kind, row.layout, row.io_backend)
    if row.reason is not None:
        result.status, result.reason = "unsupported", row.reason
        return result
    try:
        way = find()
        result.runs_on = way.runs_on
        compare(lab, row, way)
        if lab.device.type == "cuda":
            rates = measure(lab, row, way)
            result.d2h_layer_gb_per_s, result.d2h_all_gb_per_s, result.h2d_layer_gb_per_s = rates
    except BackendUnavailable as error:
        result.status, result.reason = "unavailable", str(error)
    except WrongBytes as error:
        result.status, result.reason = "wrong bytes", str(error)
    except Exception as error:  # whatever a driver or a package raises is what the user should read beside the pair
        result.status, result.reason = "failed", f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return result


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
