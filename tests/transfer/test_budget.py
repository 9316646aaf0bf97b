"""One host budget a rank: sizes by hand, limits from written-down cgroup files, errors that name what to change."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cphicache.transfer.budget import GIB, HostBudgetError, MemoryLimit, host_budget, memory_limits, read_file

PAYLOADS = {"target": 61 * (576 * 2 + 132), "draft": 576 * 2 + 132}
"""DeepSeek-V3.2 in bfloat16: 61 layers of 1,152 latent bytes and 132 indexer bytes, and one draft layer: 78,324 + 1,284 = 79,608."""


def test_tokens_gib_and_ratio_size_the_same_budget() -> None:
    """R31: one number of slots covers target, indexer and draft: 100 GiB / 79,608 bytes = 1,348,786.3 tokens, 21,074 pages of 64."""
    budget = host_budget(PAYLOADS, 64, gib=100)
    assert budget.slots == 21_074 * 64 == 1_348_736
    assert budget.size_bytes == 1_348_736 * 79_608
    assert budget.size_bytes <= 100 * GIB < budget.size_bytes + 64 * 79_608
    assert host_budget(PAYLOADS, 64, tokens=1_348_799).slots == 1_348_736
    assert host_budget(PAYLOADS, 64, ratio=2.5, device_slots=1000).slots == 2496


@settings(derandomize=True, max_examples=100, deadline=None)
@given(gib=st.integers(1, 4000), tenths=st.integers(0, 9), page=st.sampled_from([1, 16, 64]), token=st.integers(1, 10**7))
def test_a_budget_is_the_largest_number_of_pages_that_fits(gib: int, tenths: int, page: int, token: int) -> None:
    """R31: for any size the bytes are at most what was given, and one more page would be too many; no rounding of floats."""
    given_bytes = Fraction(f"{gib}.{tenths}") * GIB
    slots = host_budget({"target": token}, page, gib=float(f"{gib}.{tenths}")).slots if token * page <= given_bytes else 0
    assert slots % page == 0
    assert slots * token <= given_bytes < (slots + page) * token


def test_the_ranks_agree_once_on_the_smallest() -> None:
    """R31: the slots of a rank are what all ranks agreed on, asked once, after everything else was checked."""
    asked: list[int] = []

    def smallest(slots: int) -> int:
        asked.append(slots)
        return 128

    assert host_budget(PAYLOADS, 64, tokens=640, agree=smallest).slots == 128
    assert asked == [640]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "exactly one of --host-tokens, --host-gib and --host-ratio"),
        ({"tokens": 64, "gib": 1}, "tokens and gib given"),
        ({"tokens": 63}, r"--host-tokens 63: is below one page of 64 tokens \(5094912 bytes for target and draft\)"),
        ({"gib": 0.001}, "--host-gib 0.001: is below one page"),
        ({"ratio": 2.0}, "--host-ratio 2.0: is below one page"),
        ({"gib": -1}, "--host-gib -1: leaves no host pool"),
        ({"gib": float("inf")}, "--host-gib inf: is not a finite number"),
        ({"ratio": float("nan")}, "--host-ratio nan: is not a finite number"),
        ({"tokens": 64, "ranks_here": 0}, "ranks_here=0"),
    ],
)
def test_impossible_sizes_are_refused_in_one_line(options: dict[str, float], message: str) -> None:
    """R31, R35: a size that cannot be is one line that names the option and its value."""
    with pytest.raises(HostBudgetError, match=message) as caught:
        host_budget(PAYLOADS, 64, **options)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_a_budget_above_a_limit_names_size_limit_and_option() -> None:
    """R31: eight ranks of 50 GiB do not fit 300 GiB less 4 kept free: 37 GiB a rank, 7,797 pages of 64 tokens."""
    limits = [MemoryLimit("/sys/fs/cgroup/memory.max", 400 * GIB, 300 * GIB)]
    with pytest.raises(HostBudgetError) as caught:
        host_budget(PAYLOADS, 64, gib=50, ranks_here=8, limits=limits)
    text = str(caught.value)
    assert text.startswith("--host-gib 50: needs ")
    assert "on each of 8 ranks here, more than the 39728447488 bytes (37.00 GiB) that /sys/fs/cgroup/memory.max leaves" in text
    assert "(322122547200 bytes (300.00 GiB) of 429496729600 bytes (400.00 GiB) free" in text
    assert text.endswith(f"give at most --host-tokens {7797 * 64}")
    assert host_budget(PAYLOADS, 64, tokens=7797 * 64, ranks_here=8, limits=limits).slots == 7797 * 64
    with pytest.raises(HostBudgetError, match="give at most"):
        host_budget(PAYLOADS, 64, tokens=7798 * 64, ranks_here=8, limits=limits)
    with pytest.raises(HostBudgetError, match="free memory or raise the limit"):
        host_budget(PAYLOADS, 64, tokens=64, limits=[MemoryLimit("full", GIB, 0)])


MEMINFO = "MemTotal:       1048576 kB\nMemFree:        1 kB\nMemAvailable:    524288 kB\n"


def limits_of(files: dict[str, str]) -> list[MemoryLimit]:
    return memory_limits({"/proc/meminfo": MEMINFO, **files}.get)


def test_cgroup_v2_limits_bind_on_every_level() -> None:
    """R31: memory.max less memory.current of the group and of its parents, clean page cache counted as free, "max" is no limit."""
    limits = limits_of(
        {
            "/proc/self/cgroup": "0::/kube/pod\n",
            "/sys/fs/cgroup/kube/pod/memory.max": "1000\n",
            "/sys/fs/cgroup/kube/pod/memory.current": "700\n",
            "/sys/fs/cgroup/kube/pod/memory.stat": "anon 500\ninactive_file 150\n",
            "/sys/fs/cgroup/kube/memory.max": "800\n",
            "/sys/fs/cgroup/kube/memory.current": "790\n",
            "/sys/fs/cgroup/memory.max": "max\n",
            "/sys/fs/cgroup/memory.current": "5\n",
        }
    )
    assert limits == [
        MemoryLimit("/sys/fs/cgroup/kube/memory.max", 800, 10),
        MemoryLimit("/sys/fs/cgroup/kube/pod/memory.max", 1000, 450),
        MemoryLimit("the system's memory (/proc/meminfo)", 1 << 30, 1 << 29),
    ]


def test_inside_a_container_the_limit_is_at_the_root() -> None:
    """R31: when the group's own path is not mounted, the files at the root of the mount are those of the container."""
    files = {
        "/proc/self/cgroup": "0::/docker/abc\n",
        "/sys/fs/cgroup/memory.max": "4096\n",
        "/sys/fs/cgroup/memory.current": "5000\n",
    }
    assert limits_of(files)[0] == MemoryLimit("/sys/fs/cgroup/memory.max", 4096, 0)


def test_cgroup_v1_limits() -> None:
    """R31: version 1 has its own names, and a huge number for no limit."""
    files = {
        "/proc/self/cgroup": "5:cpu,cpuacct:/a\n4:memory:/a/b\n0::/\n",
        "/sys/fs/cgroup/memory/a/b/memory.limit_in_bytes": "2048\n",
        "/sys/fs/cgroup/memory/a/b/memory.usage_in_bytes": "1024\n",
        "/sys/fs/cgroup/memory/a/b/memory.stat": "total_inactive_file 24\n",
        "/sys/fs/cgroup/memory/a/memory.limit_in_bytes": "9223372036854771712\n",
        "/sys/fs/cgroup/memory/a/memory.usage_in_bytes": "1024\n",
    }
    assert limits_of(files) == [
        MemoryLimit("/sys/fs/cgroup/memory/a/b/memory.limit_in_bytes", 2048, 1048),
        MemoryLimit("the system's memory (/proc/meminfo)", 1 << 30, 1 << 29),
    ]


def test_without_any_file_there_is_no_limit() -> None:
    """R31: a system that tells nothing sets no limit; the real one's answers are consistent."""
    assert memory_limits(lambda path: None) == []
    assert read_file("/nonexistent/memory.max") is None
    real = memory_limits()
    assert all(0 <= limit.available_bytes <= limit.limit_bytes for limit in real)
    assert [limit.available_bytes for limit in real] == sorted(limit.available_bytes for limit in real)


def test_tokens_may_count_several_ranks_together() -> None:
    """R31: an option that counts all ranks is divided among them, and the remedy is told in the same measure."""
    assert host_budget({"target": 8}, 4, tokens=1030, tokens_over_ranks=8).slots == 128
    with pytest.raises(HostBudgetError, match=r"^--host-tokens 1030: needs 1024 bytes .* give at most --host-tokens 800$"):
        host_budget({"target": 8}, 4, tokens=1030, tokens_over_ranks=8, ranks_here=8, limits=[MemoryLimit("x", 8192, 7424)])


def test_of_a_small_limit_an_eighth_is_kept_free() -> None:
    """R31: a machine with less memory than is kept free on a large one can still run: 8192 - 1024 bytes are left."""
    limits = [MemoryLimit("x", 8192, 8192)]
    assert host_budget({"target": 8}, 1, tokens=896, limits=limits).size_bytes == 7168
    with pytest.raises(HostBudgetError, match=r"1024 bytes \(0.00 GiB\) kept free"):
        host_budget({"target": 8}, 1, tokens=897, limits=limits)
