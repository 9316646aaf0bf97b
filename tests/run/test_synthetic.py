"""The synthetic workload, and writing traces."""

from collections import Counter
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path

import pytest

from cphicache.run.synthetic import synthetic_trace, write_trace
from cphicache.run.trace import TraceError, TraceRequest, read_trace, scale_request

SEEDS = range(12)


def shared_blocks(a: TraceRequest, b: TraceRequest) -> int:
    count = 0
    for x, y in zip(a.hash_ids, b.hash_ids, strict=False):
        if x != y:
            break
        count += 1
    return count


def test_a_seed_gives_one_trace_on_every_platform(tmp_path: Path) -> None:
    """R20: equal seeds give equal bytes (known ones: no platform's arithmetic is in them); other seeds give other traces."""
    path = tmp_path / "trace.jsonl"
    write_trace(path, synthetic_trace(120, 0))
    assert blake2b(path.read_bytes(), digest_size=8).hexdigest() == "492b026b923fe5a6"
    assert synthetic_trace(120, 5) == synthetic_trace(120, 5)
    assert synthetic_trace(120, 5) != synthetic_trace(120, 6)


def test_a_shorter_trace_is_the_beginning_of_a_longer_one() -> None:
    """R20: the first N requests of a seed do not depend on how many are asked for."""
    whole = synthetic_trace(150, 3)
    for requests in (1, 2, 40, 149):
        assert synthetic_trace(requests, 3) == whole[:requests]


@pytest.mark.parametrize("seed", SEEDS)
def test_lengths_and_arrivals_are_moderate(seed: int) -> None:
    """R24: arrivals never go back, prompts are 1 to 16 blocks with most at 8 or fewer, and outputs are a small share of them."""
    trace = synthetic_trace(120, seed)
    assert [r.index for r in trace] == list(range(120))
    assert all(a.timestamp_ms <= b.timestamp_ms for a, b in pairwise(trace))
    blocks = [len(r.hash_ids) for r in trace]
    assert max(blocks) <= 16
    assert sum(count <= 8 for count in blocks) >= 100
    assert all(16 <= r.output_length <= 256 for r in trace)
    assert 2_000 < trace[-1].timestamp_ms < 120_000


@pytest.mark.parametrize("seed", SEEDS)
def test_every_kind_of_arrival_is_there(seed: int) -> None:
    """R12, R17, R25: each seed brings duplicates at once, branches inside a chain at once and soon after, growing conversations,
    returns after a pause, shared system prompts, prompts of many chunks, and partial last blocks."""
    trace = synthetic_trace(60, seed)
    pairs = list(pairwise(trace))
    at_once = [(a, b) for a, b in pairs if a.timestamp_ms == b.timestamp_ms]
    soon = [(a, b) for a, b in zip(trace, trace[2:], strict=False) if 0 < b.timestamp_ms - a.timestamp_ms < 50]
    assert any(a.hash_ids == b.hash_ids and a.input_length == b.input_length for a, b in at_once)
    assert any(2 <= shared_blocks(a, b) < min(len(a.hash_ids), len(b.hash_ids)) for a, b in at_once)
    assert any(2 <= shared_blocks(a, b) < min(len(a.hash_ids), len(b.hash_ids)) for a, b in soon)
    assert any(len(r.hash_ids) >= 10 for r in trace)
    assert {r.input_length % 512 == 0 for r in trace} == {True, False}
    assert max(Counter(r.hash_ids[0] for r in trace).values()) >= 5
    grown = [
        b.timestamp_ms - a.timestamp_ms
        for place, b in enumerate(trace)
        for a in trace[:place]
        if len(b.hash_ids) > len(a.hash_ids) >= 3 and b.hash_ids[: len(a.hash_ids)] == a.hash_ids
    ]
    assert len(grown) >= 5
    assert max(grown) >= 500


def test_bad_counts_and_seeds_are_refused() -> None:
    """R35: counts below 1 and negative seeds (which Python's generator would fold onto positive ones) are refused by value."""
    with pytest.raises(ValueError, match="requests 0 is below 1"):
        synthetic_trace(0, 1)
    with pytest.raises(ValueError, match="seed -1 is negative"):
        synthetic_trace(1, -1)


def test_a_written_trace_reads_back(tmp_path: Path) -> None:
    """R24: the synthetic workload is in the public form: written and read again it is the same, and an older file is replaced."""
    path = tmp_path / "trace.jsonl"
    path.write_text("old")
    trace = synthetic_trace(80, 1)
    write_trace(path, trace)
    assert read_trace(path) == trace
    assert [entry.name for entry in tmp_path.iterdir()] == ["trace.jsonl"]


def test_a_failed_write_leaves_nothing_behind(tmp_path: Path) -> None:
    """R35: a scaled request or an unwritable target is refused in one line; the old file stays and no temporary one is left."""
    path = tmp_path / "trace.jsonl"
    path.write_text("old")
    trace = synthetic_trace(3, 1)
    with pytest.raises(ValueError, match="request 1 has blocks of 64 tokens"):
        write_trace(path, [trace[0], scale_request(trace[1], 0.125)])
    assert path.read_text() == "old"
    (tmp_path / "folder").mkdir()
    for target in (tmp_path / "folder", tmp_path / "absent" / "trace.jsonl"):
        with pytest.raises(TraceError, match=r"cannot be written \(.*\); give a file in a writable folder") as caught:
            write_trace(target, trace)
        assert str(caught.value).isprintable()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["folder", "trace.jsonl"]
