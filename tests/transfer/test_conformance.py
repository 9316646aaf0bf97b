"""One suite for every pool, layout and backend: each byte that a copy should write, and each that it should not.

A test runs every index pattern; how many combinations of pool, layout, backend, stream kind, page size and pattern ran, and why others
did not, is printed at the end of the session.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from cphicache.transfer.backends import UnsupportedCombination, copy_backend
from cphicache.transfer.backends.kvcacheio import BackendUnavailable
from cphicache.transfer.pools.device import DevicePool
from cphicache.transfer.pools.host import make_host_pool
from cphicache.transfer.support import SUPPORT
from tests.transfer.copy_rig import PATTERNS, SHAPES, STREAMS, CopyRig

Record = Callable[[str, object], None]
PAGE_SIZES = (1, 16, 64)
PAIRS = [(row.layout, row.io_backend) for row in SUPPORT if row.kind == "mla" and row.reason is None]
PAIRS.append(("page_first", "kernel+triton"))
REFUSED = [row for row in SUPPORT if row.reason is not None]
EACH = len(STREAMS) * len(PAGE_SIZES) * (len(PATTERNS) + 1)
"""Combinations of a pool, layout and backend; one pattern more is aliasing, which is refused."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small copies are slower on many threads, and test processes share the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("stream_kind", STREAMS)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
@pytest.mark.parametrize("pool", SHAPES)
def test_copies_touch_exactly_their_bytes(
    pool: str, pair: tuple[str, str], page_size: int, stream_kind: str, record_property: Record
) -> None:
    """R31, R32, R33: D2H of each layer, of all layers and H2D of each layer write every byte they should and no other, in pools and
    around them; latent, then indexer, each once; the same host slot given twice is refused before a byte moves."""
    layout, backend = pair
    rig = CopyRig(SHAPES[pool], layout, backend, page_size)
    streams = STREAMS[stream_kind]()
    for pattern, (device_pages, host_pages) in PATTERNS.items():
        assert rig.problems(streams, device_pages, host_pages) == [], pattern
    streams.close()
    before = rig.raw()
    device, twice = rig.tokens([1, 2]), rig.tokens([4, 4])
    for direction, layer in (("d2h", 0), ("d2h", None)):
        with pytest.raises(ValueError, match="given twice"):
            rig.copy(direction, layer, device, twice)
    with pytest.raises(ValueError, match="given twice"):
        rig.copy("h2d", 0, twice, device)
    assert all((rig.raw()[key] == content).all() for key, content in before.items())
    record_property("combinations run", len(PATTERNS) + 1)


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: "-".join(row[:3]))
def test_what_is_not_supported_is_refused_at_start(row: tuple[str, str, str, str], record_property: Record) -> None:
    """R32, R35: a combination that the table does not support raises, with kind, layout, backend and the table's reason, when the pools
    are put together."""
    kind, layout, io_backend, reason = row[:4]
    shapes = [shape for shape in SHAPES.values() if shape.kind == kind]
    for shape in shapes:
        device = DevicePool(shape, 32, page_size=16)
        host = make_host_pool(layout, shape, 32, 16)
        with pytest.raises(UnsupportedCombination) as caught:
            host.check_twin(device, io_backend)
        assert str(caught.value).endswith(f": {reason}")
        assert all(repr(value) in str(caught.value) for value in (kind, layout, io_backend))
    record_property(f"combinations skipped: {io_backend} with {layout}: {reason}", len(shapes) * EACH)


@pytest.mark.gpu
@pytest.mark.parametrize("io_backend", ["kernel", "direct"])
def test_the_packages_operators_are_there(io_backend: str, record_property: Record) -> None:
    """R32: with a GPU and the package, kernel and direct are made from the package's own operators."""
    if not torch.cuda.is_available():
        pairs = sum(name == io_backend for _, name in PAIRS)
        record_property(f"combinations skipped: {io_backend} with the package's operators: no GPU here", pairs * len(SHAPES) * EACH)
        pytest.skip("no GPU: torch.cuda.is_available() is False")
    try:
        assert copy_backend(io_backend).name == io_backend
    except BackendUnavailable as error:
        pytest.skip(str(error))
