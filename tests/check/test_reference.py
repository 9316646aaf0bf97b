"""The reference bytes: a pure function of everything that they should depend on, and of nothing else."""

from array import array
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cphicache.check.reference import PrefixState, ReferenceKV, first_difference

ITEM_SIZES = (1, 7, 8, 80, 1152)


def rows_of(kv: ReferenceKV, tokens: list[int], item_bytes: int = 80) -> torch.Tensor:
    return kv.expected(
        kv.prefix_hashes(tokens), range(len(tokens)), payload="target", layer=0, component="latent", item_bytes=item_bytes
    )


@settings(derandomize=True, max_examples=80, deadline=None)
@given(tokens=st.lists(st.integers(0, 131071), min_size=1, max_size=40), data=st.data())
def test_one_changed_token_changes_every_later_row(tokens: list[int], data: st.DataObject) -> None:
    """R33: another token at place i changes the bytes of every token from i on, and of none before."""
    place = data.draw(st.integers(0, len(tokens) - 1))
    other = data.draw(st.integers(0, 131071).filter(lambda token: token != tokens[place]))
    kv = ReferenceKV()
    before, after = rows_of(kv, tokens), rows_of(kv, [*tokens[:place], other, *tokens[place + 1 :]])
    assert (before != after).any(dim=1).tolist() == [False] * place + [True] * (len(tokens) - place)


@pytest.mark.parametrize("item_bytes", ITEM_SIZES)
def test_every_argument_changes_the_bytes(item_bytes: int) -> None:
    """R33: prefix, position, payload, layer, component and seed each change the bytes (but for 1 in 256, as chance has it)."""
    kv = ReferenceKV(3)
    count = 4000 // item_bytes + 200
    hashes = kv.prefix_hashes(range(count))
    positions = np.arange(count)
    base = kv.expected(hashes, positions, payload="target", layer=2, component="k", item_bytes=item_bytes)
    assert base.shape == (count, item_bytes)
    assert base.dtype == torch.uint8
    assert base.is_contiguous()
    others = [
        kv.expected(
            kv.prefix_hashes(range(1, count + 1)), positions, payload="target", layer=2, component="k", item_bytes=item_bytes
        ),
        kv.expected(hashes, positions + 1, payload="target", layer=2, component="k", item_bytes=item_bytes),
        kv.expected(hashes, positions, payload="draft", layer=2, component="k", item_bytes=item_bytes),
        kv.expected(hashes, positions, payload="target", layer=3, component="k", item_bytes=item_bytes),
        kv.expected(hashes, positions, payload="target", layer=2, component="v", item_bytes=item_bytes),
        ReferenceKV(4).expected(hashes, positions, payload="target", layer=2, component="k", item_bytes=item_bytes),
    ]
    for other in others:
        assert (other != base).float().mean() > 0.97
    for one, two in pairwise(others):
        assert (one != two).float().mean() > 0.97


def test_names_that_run_together_stay_apart() -> None:
    """R33: payload, layer and component cannot be confused by where one ends and the next begins."""
    kv = ReferenceKV()
    hashes = kv.prefix_hashes([1, 2])
    calls = [("target", 1, "1 k"), ("target 1", 1, "k"), ("target", 11, "k"), ("target 1 1", 1, "k"), ("target", 1, "k")]
    assert len(
        {kv.expected(hashes, [0, 1], payload=p, layer=n, component=c, item_bytes=16).numpy().tobytes() for p, n, c in calls}
    ) == len(calls)


@pytest.mark.parametrize("item_bytes", ITEM_SIZES)
def test_rows_are_pure_and_do_not_depend_on_their_company(item_bytes: int) -> None:
    """R33: a row is the same alone, among others in any order, by another instance and in another item size (a longer item begins
    with the shorter one), also across the borders of the inner blocks."""
    count = 5000 if item_bytes < 100 else 300
    kv = ReferenceKV(7)
    hashes = kv.prefix_hashes(range(count))
    rows = kv.expected(hashes, range(count), payload="target", layer=0, component="latent", item_bytes=item_bytes)
    order = np.random.default_rng(0).permutation(count)
    shuffled = ReferenceKV(7).expected(hashes[order], order, payload="target", layer=0, component="latent", item_bytes=item_bytes)
    assert torch.equal(shuffled, rows[torch.from_numpy(order)])
    assert torch.equal(
        kv.expected(hashes[17:18], [17], payload="target", layer=0, component="latent", item_bytes=item_bytes), rows[17:18]
    )
    assert torch.equal(
        kv.expected(hashes, range(count), payload="target", layer=0, component="latent", item_bytes=item_bytes + 1)[:, :item_bytes],
        rows,
    )


def test_known_bytes() -> None:
    """R33: the bytes are the same on every platform and in every release: a log that was written once can be checked again."""
    assert rows_of(ReferenceKV(), [5, 6, 7], 12)[2].tolist() == [81, 54, 98, 106, 151, 11, 17, 132, 68, 215, 67, 250]


@settings(derandomize=True, max_examples=60, deadline=None)
@given(tokens=st.lists(st.integers(0, 2**40), max_size=60), cuts=st.lists(st.integers(0, 60), max_size=4))
def test_chunks_hash_like_the_whole(tokens: list[int], cuts: list[int]) -> None:
    """R33: hashing chunk after chunk (empty ones too), each from the state of the one before, equals hashing the whole."""
    kv = ReferenceKV(1)
    whole = kv.prefix_hashes(tokens)
    state = kv.start
    parts = []
    borders = [0, *sorted(min(cut, len(tokens)) for cut in cuts), len(tokens)]
    for first, last in pairwise(borders):
        hashes = kv.prefix_hashes(tokens[first:last], state)
        state = kv.state_after(hashes, state)
        parts.append(hashes)
    assert np.array_equal(np.concatenate(parts), whole)
    assert state == (kv.state_after(whole) if tokens else kv.start)
    assert not tokens or state == PrefixState(len(tokens), int(whole[-1]))


def test_token_containers_are_equal() -> None:
    """R33: a list, an array('q') and a numpy array of the same tokens have the same hashes, a seed of its own has others."""
    tokens = [3, 1, 131071]
    hashes = ReferenceKV().prefix_hashes(tokens)
    assert hashes.dtype == np.uint64
    assert np.array_equal(hashes, ReferenceKV().prefix_hashes(array("q", tokens)))
    assert np.array_equal(hashes, ReferenceKV().prefix_hashes(np.array(tokens)))
    assert not (hashes == ReferenceKV(1).prefix_hashes(tokens)).any()


def test_no_collisions_among_prefixes() -> None:
    """R33: 100,000 prefixes made to be close (small alphabets, swaps, repeats) and as many random ones: wherever prefixes differ,
    their hashes and their 8-byte items do."""
    kv = ReferenceKV()
    rng = np.random.default_rng(1)
    sequences = [np.zeros(4000, dtype=np.int64), np.ones(4000, dtype=np.int64)]
    base = np.arange(1, 40, dtype=np.int64)
    for i in range(39):
        for j in range(i):
            swapped = base.copy()
            swapped[[i, j]] = swapped[[j, i]]
            sequences.append(swapped)
    sequences += [rng.integers(0, 3, 40) for _ in range(1200)]
    sequences += [rng.integers(0, 131072, 100) for _ in range(1000)]
    prefixes: dict[bytes, int] = {}
    items: set[bytes] = set()
    for tokens in sequences:
        hashes = kv.prefix_hashes(tokens)
        rows = kv.expected(hashes, range(len(tokens)), payload="target", layer=0, component="k", item_bytes=8).numpy()
        for end, (hashed, row) in enumerate(zip(hashes.tolist(), rows, strict=True), start=1):
            assert prefixes.setdefault(tokens[:end].tobytes(), hashed) == hashed
            items.add(row.tobytes())
    assert len(prefixes) > 100_000
    assert len(set(prefixes.values())) == len(prefixes)
    assert len(items) == len(prefixes)


def test_bytes_are_spread_evenly() -> None:
    """R33: every byte value occurs about equally often in every place of an item, so a slip is not hidden by a favourite value."""
    rows = rows_of(ReferenceKV(), list(range(20_000)), 16)
    for place in range(16):
        counts = torch.bincount(rows[:, place].long(), minlength=256)
        assert counts.min() > 30
        assert counts.max() < 140


def test_bad_calls_are_refused() -> None:
    """R33: misuse of the reference is told by value, not by wrong expectations; no rows are no error."""
    kv = ReferenceKV()
    hashes = kv.prefix_hashes([1, 2])
    with pytest.raises(ValueError, match="1 positions for 2 prefix hashes"):
        kv.expected(hashes, [0], payload="target", layer=0, component="k", item_bytes=8)
    with pytest.raises(ValueError, match="layer -1 is negative"):
        kv.expected(hashes, [0, 1], payload="target", layer=-1, component="k", item_bytes=8)
    with pytest.raises(ValueError, match="item_bytes 0 is below 1"):
        kv.expected(hashes, [0, 1], payload="target", layer=0, component="k", item_bytes=0)
    for item_bytes in ITEM_SIZES:
        assert kv.expected(kv.prefix_hashes([]), [], payload="target", layer=0, component="k", item_bytes=item_bytes).shape == (
            0,
            item_bytes,
        )


def test_the_first_difference_is_found() -> None:
    """R33: the evidence is the first differing (row, byte), rows before bytes; equal tensors have none."""
    expected = rows_of(ReferenceKV(), list(range(50)), 9)
    assert first_difference(expected, expected.clone()) is None
    assert first_difference(expected[:0], expected[:0]) is None
    found = expected.clone()
    for row, byte in ((49, 8), (30, 0), (7, 5), (7, 4), (0, 8), (0, 0)):
        found[row, byte] += 1
        assert first_difference(expected, found) == (row, byte)


def test_incomparable_tensors_are_refused() -> None:
    """R33: other shapes and dtypes are misuse, never an equality by broadcast or conversion."""
    rows = torch.zeros((4, 8), dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"shapes \(4, 8\) and \(1, 8\)"):
        first_difference(rows, rows[:1])
    with pytest.raises(ValueError, match=r"shapes \(8,\) and \(8,\)"):
        first_difference(rows[0], rows[0])
    with pytest.raises(ValueError, match=r"torch.uint8 and torch.int64"):
        first_difference(rows, rows.long())
