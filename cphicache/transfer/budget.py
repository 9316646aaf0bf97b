"""How much host memory a rank's host pools may take: one budget for target, indexer and draft. Integers only, no torch.

A token of the cache has a host slot in every payload, so one number of slots follows from one number of bytes. The memory that is there
is looked up before anything is allocated: the limits of the control groups (cgroup v1 and v2) and of the system.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path, PurePosixPath
from typing import NamedTuple

GIB = 1 << 30
KEEP_FREE_BYTES = 4 * GIB
"""Left to everything else on the machine: the engine's own processes, page tables, network buffers. Of a small limit, an eighth."""
_NO_LIMIT_BYTES = 1 << 60
"""cgroup v1 writes "no limit" as a huge number that depends on the page size."""

MOST_SLOTS = 1 << 48
"""Token slots of a rank, more than any machine has: keeps slips from becoming numbers without end."""

Reader = Callable[[str], str | None]
"""The text of a file by its absolute path; None when it is not there or may not be read."""


class HostBudgetError(ValueError):
    """A host pool that cannot be. One line: option and value, size, limit, remedy."""


class MemoryLimit(NamedTuple):
    """``available_bytes`` more may be allocated under the limit ``name``, which is ``limit_bytes`` in all."""

    name: str
    limit_bytes: int
    available_bytes: int


@dataclass(frozen=True, slots=True)
class HostBudget:
    """One rank's host pools: ``slots`` token slots of each payload, whole pages. ``token_bytes``: one token, by payload, all layers."""

    slots: int
    page_size: int
    token_bytes: Mapping[str, int]

    @property
    def size_bytes(self) -> int:
        """All payloads together."""
        return self.slots * sum(self.token_bytes.values())


def host_budget(
    token_bytes: Mapping[str, int],
    page_size: int,
    *,
    tokens: int | None = None,
    gib: float | None = None,
    ratio: float | None = None,
    device_slots: int = 0,
    ranks_here: int = 1,
    tokens_over_ranks: int = 1,
    limits: Sequence[MemoryLimit] = (),
    keep_free_bytes: int = KEEP_FREE_BYTES,
    agree: Callable[[int], int] = int,
) -> HostBudget:
    """One rank's budget, rounded down to whole pages.

    Exactly one of ``tokens`` (host slots), ``gib`` (GiB of 2**30 bytes for all payloads together) and ``ratio`` (to ``device_slots``, the
    token slots of the rank's device pool). ``token_bytes``: bytes of one token by payload; a DSA payload's contain its indexer keys.
    ``ranks_here``: ranks that take as much on the same machine. ``tokens_over_ranks``: ranks that ``tokens`` counts together.
    ``limits``: from :func:`memory_limits`; of each, ``keep_free_bytes`` stay free (an eighth of a limit below eight times that).
    ``agree``: returns the smallest number of slots of all ranks; called once, last. Raises :class:`HostBudgetError`.
    """
    given = {option: value for option, value in (("tokens", tokens), ("gib", gib), ("ratio", ratio)) if value is not None}
    if len(given) != 1:
        raise HostBudgetError(f"{_names(given)} given: give exactly one of --host-tokens, --host-gib and --host-ratio")
    [(option, value)] = given.items()
    shown = f"--host-{option} {value}"
    if min(page_size, ranks_here, tokens_over_ranks) < 1 or not token_bytes or min(token_bytes.values()) < 1:
        raise HostBudgetError(
            f"{shown}: page_size={page_size}, ranks_here={ranks_here}, token_bytes={dict(token_bytes)} must be positive"
        )
    try:
        exact = Fraction(str(value))
    except ValueError as error:
        raise HostBudgetError(f"{shown}: is not a finite number; give a positive one") from error
    if exact <= 0:
        raise HostBudgetError(f"{shown}: leaves no host pool; give a positive number")
    per_token = sum(token_bytes.values())
    wanted = {"tokens": exact / tokens_over_ranks, "gib": exact * GIB / per_token, "ratio": exact * device_slots}[option]
    slots = int(wanted) // page_size * page_size
    if not slots:
        raise HostBudgetError(
            f"{shown}: is below one page of {page_size} tokens ({page_size * per_token} bytes for {_names(token_bytes)}); give more"
        )
    if slots > MOST_SLOTS:
        raise HostBudgetError(f"{shown}: is more than {MOST_SLOTS} tokens on a rank; give less")
    for limit in limits:
        kept = min(keep_free_bytes, limit.limit_bytes // 8)
        room = max(limit.available_bytes - kept, 0) // ranks_here
        if slots * per_token > room:
            most = room // per_token // page_size * page_size
            remedy = f"give at most --host-tokens {most * tokens_over_ranks}" if most else "free memory or raise the limit"
            raise HostBudgetError(
                f"{shown}: needs {describe_bytes(slots * per_token)} on each of {ranks_here} ranks here, more than the "
                f"{describe_bytes(room)} that {limit.name} leaves ({describe_bytes(limit.available_bytes)} of "
                f"{describe_bytes(limit.limit_bytes)} free, {describe_bytes(kept)} kept free); {remedy}"
            )
    return HostBudget(agree(slots), page_size, dict(token_bytes))


def memory_limits(read: Reader | None = None) -> list[MemoryLimit]:
    """Every limit on this process's memory that can be read, the tightest first. Clean page cache counts as available."""
    read = read or read_file
    limits = _cgroup_limits(read)
    meminfo = _fields(read("/proc/meminfo") or "")
    if "MemTotal:" in meminfo and "MemAvailable:" in meminfo:
        limits.append(
            MemoryLimit("the system's memory (/proc/meminfo)", meminfo["MemTotal:"] * 1024, meminfo["MemAvailable:"] * 1024)
        )
    return sorted(limits, key=lambda limit: limit.available_bytes)


def read_file(path: str) -> str | None:
    """The :data:`Reader` of the real machine."""
    try:
        return Path(path).read_text(encoding="ascii", errors="replace")
    except OSError:  # not there, no permission, or a control group that is gone: no limit can be read from it
        return None


def describe_bytes(size_bytes: int) -> str:
    """Exact bytes, and GiB to two places (cut, so that nothing reads larger than it is)."""
    hundredths = size_bytes * 100 // GIB
    return f"{size_bytes} bytes ({hundredths // 100}.{hundredths % 100:02d} GiB)"


class _Files(NamedTuple):
    """Names of one cgroup version."""

    limit: str
    usage: str
    reclaimable: str


_V1 = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Files("memory.max", "memory.current", "inactive_file")


def _cgroup_limits(read: Reader) -> list[MemoryLimit]:
    limits = []
    for line in (read("/proc/self/cgroup") or "").splitlines():
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if "memory" in controllers.split(","):
            limits += _along(read, "/sys/fs/cgroup/memory", path, _V1)
        elif hierarchy == "0" and not controllers:
            limits += _along(read, "/sys/fs/cgroup", path, _V2)
    return limits


def _along(read: Reader, mount: str, path: str, files: _Files) -> list[MemoryLimit]:
    """Limits of a control group and of all that it is in: each of them binds. Inside a container the mount may begin at its own group,
    and then only the root is found."""
    limits = []
    group = PurePosixPath(path)
    for folder in (group, *group.parents):
        where = f"{mount}{str(folder).rstrip('/')}"
        limit, usage = ((read(f"{where}/{name}") or "").strip() for name in (files.limit, files.usage))
        if limit.isdigit() and usage.isdigit() and int(limit) < _NO_LIMIT_BYTES:
            reclaimable = _fields(read(f"{where}/memory.stat") or "").get(files.reclaimable, 0)
            free = max(int(limit) - max(int(usage) - reclaimable, 0), 0)
            limits.append(MemoryLimit(f"{where}/{files.limit}", int(limit), free))
    return limits


def _fields(text: str) -> dict[str, int]:
    """``name number ...`` lines."""
    words = [line.split() for line in text.splitlines()]
    return {line[0]: int(line[1]) for line in words if len(line) > 1 and line[1].isdigit()}


def _names(names: Mapping[str, object]) -> str:
    return " and ".join(names) or "nothing"
