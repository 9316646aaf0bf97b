"""Device and host pools: shapes, adoption, and byte-exact copies on every stream kind."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cphicache.transfer.backends import UnsupportedCombination, require_supported
from cphicache.transfer.backends.port import PageSlots, RowPair, RowPlan, plan_pages, plan_rows
from cphicache.transfer.backends.torch_backend import TorchBackend
from cphicache.transfer.pools.device import DevicePool, KVShape
from cphicache.transfer.pools.host import HostKVPool, LayerFirstHostPool, make_host_pool
from cphicache.transfer.streams.port import Streams
from cphicache.transfer.streams.threads import ThreadStreams
from cphicache.transfer.streams.virtual import VirtualStreams
from cphicache.transfer.support import indexer_item_bytes, packed_row_bytes
from tests.transfer.rigs import assert_same, fill, random_items, same, shape_of, snapshot

STREAMS: dict[str, Callable[[], Streams]] = {
    "threads": lambda: ThreadStreams(seed=1, max_delay_us=20.0),
    "virtual": lambda: VirtualStreams(seed=1, jitter=1.0),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("kind", ["mla", "mha", "dsa"])
def test_store_and_read_move_bits(kind: str, dtype: torch.dtype) -> None:
    """R31: every bit pattern of every dtype (NaNs too) goes in and comes out unchanged; other slots and layers stay."""
    pool = DevicePool(shape_of(kind, 2, dtype), 6, page_size=2)
    fill(pool, 5)
    before = snapshot(pool)
    items = random_items(pool.shape, 2, seed=9)
    pool.store(1, [4, 0], items)
    assert same(pool.read(1, [4, 0]), items)
    for (layer, name), rows in snapshot(pool).items():
        untouched = [slot for slot in range(6) if layer == 0 or slot not in (0, 4)]
        assert torch.equal(rows[untouched], before[layer, name][untouched])
        assert pool.buffer(layer, name).dtype is (torch.uint8 if name == "indexer" else dtype)


def test_a_pool_adopts_the_buffers_of_a_model_runner() -> None:
    """R31: adopted buffers keep their own shape and memory: what a copy writes is seen by the model runner."""
    shape = KVShape(kind="mha", layers=2, components={"v": 6, "k": 8}, dtype=torch.float16)
    buffers = {
        "k": [torch.zeros(5, 2, 4, dtype=torch.float16) for _ in range(2)],
        "v": [torch.zeros(5, 2, 3).half() for _ in range(2)],
    }
    pool = DevicePool.adopt(shape, buffers)
    items = random_items(shape, 1, seed=3)
    pool.store(1, [2], items)
    assert pool.slots == 5
    assert torch.equal(buffers["k"][1][2].flatten().view(torch.uint8), items["k"][0])
    assert torch.equal(buffers["v"][1][2].flatten().view(torch.uint8), items["v"][0])
    assert not buffers["v"][0].any()
    assert list(shape.components) == ["k", "v"]


def test_indexer_keys_are_stored_by_page_and_only_where_there_are_some() -> None:
    """R31: an indexer buffer is [pages, page_size * item], at slot // page_size; a layer without keys has none, in pools and copies."""
    shape = KVShape("dsa", 3, {"latent": 8, "indexer": 6}, torch.bfloat16, indexer_layers=(1,))
    pool = DevicePool(shape, 12, page_size=4)
    assert pool.buffer(1, "indexer").shape == (3, 24)
    items = random_items(shape, 1, seed=1)
    for layer in range(3):
        pool.store(layer, [6], items)
    assert torch.equal(pool.buffer(1, "indexer")[1, 12:18], items["indexer"][0])
    assert pool.buffer(1, "indexer").count_nonzero() == items["indexer"].count_nonzero()
    assert [list(pool.read(layer, [6])) for layer in range(3)] == [["latent"], ["latent", "indexer"], ["latent"]]
    assert [shape.bytes_in_layer(layer) for layer in range(3)] == [16, 22, 16]
    assert (shape.layer_bytes, shape.token_bytes) == (22, 54)
    host = make_host_pool("page_first", shape, 8, 4)
    assert host.buffer("latent").shape == (8, 3, 16)
    assert host.buffer("indexer").shape == (2, 1, 24)
    with pytest.raises(IndexError, match="layer 3 is none"):
        host.backup_from_device_per_layer(pool, torch.arange(4), torch.arange(4), 3, "torch")


def test_an_adopted_dsa_pool_may_have_spare_pages_and_empty_layers() -> None:
    """R31: as a serving engine owns them: more indexer pages than the slots need, and None or an empty tensor for layers without."""
    shape = KVShape("dsa", 3, {"latent": 4, "indexer": 6}, torch.bfloat16, indexer_layers=(2,))
    latents: list[torch.Tensor | None] = [torch.zeros(9, 1, 4, dtype=torch.bfloat16) for _ in range(3)]
    keys = [None, torch.empty(0, 24, dtype=torch.uint8), torch.zeros(4, 24, dtype=torch.uint8)]
    pool = DevicePool.adopt(shape, {"latent": latents, "indexer": keys}, page_size=4)
    assert pool.slots == 8
    pool.store(2, [7], random_items(shape, 1, seed=1))
    assert keys[2] is not None
    assert keys[2][1, 18:].any()
    assert not keys[2][2:].any()
    for changed, message in (
        ([torch.zeros(4, 24, dtype=torch.uint8), None, keys[2]], r"indexer'\]\[0\] has bytes"),
        ([None, None, None], r"indexer'\]\[2\] is None"),
        ([None, None, torch.zeros(2, 24, dtype=torch.uint8)], "9 slots need 3"),
        ([None, None, torch.zeros(4, 12, dtype=torch.uint8)], "24 elements a page"),
    ):
        with pytest.raises(ValueError, match=message):
            DevicePool.adopt(shape, {"latent": latents, "indexer": changed}, page_size=4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scales": "buffer"}, "would not be moved"),
        ({"dtype": torch.int64}, "dtype=torch.int64 is not supported"),
        ({"indexer_dtype": torch.complex64}, "indexer_dtype=torch.complex64"),
        ({"indexer_layers": ()}, "at least one"),
        ({"indexer_layers": (1, 0)}, "ascending"),
        ({"indexer_layers": (2,)}, r"\[0, 2\)"),
        ({"kind": "mla", "components": {"latent": 4}, "indexer_layers": (0,)}, "only dsa"),
    ],
)
def test_what_could_not_be_moved_whole_is_refused(change: dict[str, object], message: str) -> None:
    """R35: scales in a buffer of their own, element types and indexer layers that make no sense are refused, naming them."""
    fitting: dict[str, object] = {"kind": "dsa", "layers": 2, "components": {"latent": 4, "indexer": 4}, "dtype": torch.bfloat16}
    KVShape(**fitting)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        KVShape(**{**fitting, **change})  # type: ignore[arg-type]


def test_page_sizes_must_agree() -> None:
    """R35: a DSA device pool needs the page size, in whole pages, and the host pool's must be the same."""
    shape = shape_of("dsa", 1)
    for options, message in (({}, "page_size=None"), ({"page_size": 0}, "page_size=0"), ({"page_size": 3}, "whole pages of 3")):
        with pytest.raises(ValueError, match=message):
            DevicePool(shape, 8, **options)
    with pytest.raises(ValueError, match="device pool page_size=4, host pool page_size=8"):
        make_host_pool("layer_first", shape, 8, 8).check_twin(DevicePool(shape, 8, page_size=4), "torch")


def test_indexer_keys_move_in_whole_pages() -> None:
    """R31: rows that are not whole, aligned pages are refused where a component goes by page, before its bytes move."""
    shape = shape_of("dsa", 1)
    device, host = DevicePool(shape, 16, page_size=4), make_host_pool("layer_first", shape, 16, 4)
    whole = torch.arange(4)
    for rows in (torch.arange(3), torch.arange(1, 5), torch.tensor([0, 1, 3, 2])):
        with pytest.raises(ValueError, match="not whole pages of 4"):
            host.backup_from_device_per_layer(device, rows, whole[: rows.numel()], 0, "torch")


@pytest.mark.parametrize(("latent_dim", "rope_dim", "size_bytes"), [(512, 64, 656), (32, 8, 56), (128, 0, 136), (129, 1, 144)])
def test_packed_rows(latent_dim: int, rope_dim: int, size_bytes: int) -> None:
    """R31: a packed FP8 MLA row is latent, a float32 scale for each 128, rope in BF16: 512 + 16 + 128 = 656; whole words of 8."""
    assert packed_row_bytes(latent_dim, rope_dim) == size_bytes
    assert indexer_item_bytes(128) == 132


@pytest.mark.parametrize(
    ("buffers", "message"),
    [
        ({"k": [torch.zeros(4, 8)]}, "exactly"),
        ({"latent": [torch.zeros(4, 8)]}, "for each of the 2 layers"),
        ({"latent": [torch.zeros(4, 8), torch.zeros(4, 8).half()]}, r"buffers\['latent'\]\[1\] is torch.float16"),
        ({"latent": [torch.zeros(4, 8), torch.zeros(4, 9)]}, "8 elements a slot"),
        ({"latent": [torch.zeros(4, 8), torch.zeros(8, 4).t()]}, "not contiguous"),
        ({"latent": [torch.zeros(4, 8), torch.zeros(32)]}, "8 elements a slot"),
        ({"latent": [torch.zeros(4, 8), torch.zeros(5, 8)]}, "5 slots"),
    ],
)
def test_adoption_refuses_buffers_that_do_not_fit(buffers: dict[str, list[torch.Tensor]], message: str) -> None:
    """R35: a buffer that is not what the shape says is refused, naming component and layer."""
    shape = KVShape(kind="mla", layers=2, components={"latent": 8}, dtype=torch.float32)
    with pytest.raises(ValueError, match=message):
        DevicePool.adopt(shape, buffers)


@pytest.mark.parametrize(
    ("kind", "layers", "components", "message"),
    [
        ("gqa", 1, {"k": 1}, "'gqa' is not supported"),
        ("mha", 1, {"k": 1}, "exactly"),
        ("mla", 0, {"latent": 1}, "layers=0"),
        ("mla", 1, {"latent": 0}, "latent"),
    ],
)
def test_impossible_shapes_are_refused(kind: str, layers: int, components: dict[str, int], message: str) -> None:
    """R35: a pool kind that is not supported is named; so is everything else that cannot be a token's KV."""
    with pytest.raises(ValueError, match=message):
        KVShape(kind=kind, layers=layers, components=components, dtype=torch.bfloat16)


def test_pools_need_room_for_a_page() -> None:
    """R35: a host pool below one page, or of broken pages, and an empty device pool are refused at construction."""
    shape = shape_of("mla", 1)
    for slots, page_size in ((0, 4), (6, 4), (4, 0)):
        with pytest.raises(ValueError, match=r"slots=|page_size="):
            LayerFirstHostPool(shape, slots, page_size)
    with pytest.raises(ValueError, match="slots=0"):
        DevicePool(shape, 0)


def test_the_base_class_copies_nothing() -> None:
    """R32: the base class raises NotImplementedError for each of SGLang's method names."""
    shape = shape_of("mla", 1)
    base, device, rows = HostKVPool(shape, 4, 4), DevicePool(shape, 4), torch.arange(4)
    with pytest.raises(NotImplementedError):
        base.load_to_device_per_layer(device, rows, rows, 0, "torch")
    with pytest.raises(NotImplementedError):
        base.backup_from_device_all_layer(device, rows, rows, "torch")
    with pytest.raises(NotImplementedError):
        base.backup_from_device_per_layer(device, rows, rows, 0, "torch")
    with pytest.raises(NotImplementedError):
        base.read(0, [0])


@pytest.mark.parametrize(
    ("combination", "reason"),
    [
        (("gqa", "layer_first", "torch"), "kind 'gqa' is not one of"),
        (("mla", "none", "torch"), "layout 'none' is not one of"),
        (("mla", "layer_first", "magic"), "io_backend 'magic' is not one of"),
        (("dsa", "page_first", "direct"), "use layout page_first_direct"),
        (("mha", "page_first_direct", "kernel"), "use layout page_first, or io_backend direct"),
    ],
)
def test_unsupported_combinations_are_named_with_their_reason(combination: tuple[str, str, str], reason: str) -> None:
    """R32: a pool kind, layout and backend that do not work together raise, naming all three and the reason."""
    with pytest.raises(UnsupportedCombination, match=reason) as caught:
        require_supported(*combination)
    assert all(repr(value) in str(caught.value) for value in combination)


def test_a_copy_names_what_is_wrong_with_its_arguments() -> None:
    """R33: rows outside a pool, of another type or number, or a pool of another shape are refused before a byte moves."""
    shape = shape_of("mla", 1)
    device, host = DevicePool(shape, 8), LayerFirstHostPool(shape, 4, 4)
    fill(device, 1)
    before, rows = snapshot(host), torch.arange(2)
    for host_rows, device_rows, error in (
        (torch.tensor([0, -1]), rows, IndexError),
        (torch.tensor([3, 4]), rows, IndexError),
        (rows, torch.tensor([7, 8]), IndexError),
        (rows.int(), rows, ValueError),
        (rows[None], rows[None], ValueError),
        (rows[:1], rows, ValueError),
    ):
        with pytest.raises(error):
            host.backup_from_device_per_layer(device, host_rows, device_rows, 0, "torch")
    with pytest.raises(ValueError, match="use the same shape"):
        host.backup_from_device_per_layer(DevicePool(shape_of("mla", 2), 8), rows, rows, 0, "torch")
    with pytest.raises(UnsupportedCombination):
        host.load_to_device_per_layer(device, rows, rows, 0, "magic")
    assert_same(snapshot(host), before)


def test_unknown_layouts_are_named() -> None:
    """R35: a layout that is not known is refused with those that are."""
    with pytest.raises(UnsupportedCombination, match="'page_head' is not one of"):
        make_host_pool("page_head", shape_of("mla", 1), 4, 4)


def test_torch_copies_rows_that_lie_apart_on_the_cpu_only() -> None:
    """R32, R34: with a GPU, torch on page_first would block the scheduler thread at every copy: refused at start, with what to use. The
    other layouts, and any on the CPU, are not."""
    device = torch.empty(8, 16, dtype=torch.uint8, device="meta")
    apart, paged = torch.empty(8, 3, 16, dtype=torch.uint8), torch.empty(2, 3, 4, 16, dtype=torch.uint8)
    with pytest.raises(ValueError, match="use io_backend kernel or triton, or layout"):
        TorchBackend().check_pair(RowPair(device, apart[:, 1]))
    for source, destination in ((device, apart.view(3, 8, 16)[1]), (device, paged[:, 1]), (apart[:, 0], apart[:, 1])):
        TorchBackend().check_pair(RowPair(source, destination))


@pytest.mark.parametrize("stride", ["dense", "apart"])
@pytest.mark.parametrize("direction", ["to pages", "from pages"])
def test_torch_copies_parts_of_pages_and_runs_of_pages(direction: str, stride: str) -> None:
    """R32, R33: between rows and pages, runs that begin or end inside a page, and runs of several pages, move their rows and no other."""
    generator = torch.Generator().manual_seed(3)
    flat = torch.randint(256, (23, 2 if stride == "apart" else 1, 5), dtype=torch.uint8, generator=generator)[:, 0]
    paged = torch.randint(256, (6, 2, 4, 5), dtype=torch.uint8, generator=generator)[:, 1]
    pair = RowPair(flat, paged) if direction == "to pages" else RowPair(paged, flat)
    for at, to, length in ((8, 4, 12), (3, 6, 9), (4, 0, 4), (1, 2, 17), (0, 0, 20)):
        plan = plan_rows(torch.arange(at, at + length), torch.arange(to, to + length), 23, 23)
        wanted = pair.destination.clone().reshape(-1, 5)
        wanted[to : to + length] = pair.source.clone().reshape(-1, 5)[at : at + length]
        TorchBackend().copy_rows([pair], plan)
        assert torch.equal(pair.destination.reshape(-1, 5), wanted), (at, to, length)


def test_plans_of_one_batch_are_made_once_and_never_go_stale() -> None:
    """R33: a caller that writes to its index tensors between two copies gets what they say at each copy."""
    shape = shape_of("mla", 2)
    device, host = DevicePool(shape, 8), LayerFirstHostPool(shape, 8, 1)
    fill(device, 1)
    to, at = torch.tensor([1, 2]), torch.tensor([5, 6])
    host.backup_from_device_per_layer(device, to, at, 0, "torch")
    to += 3
    host.backup_from_device_per_layer(device, to, at, 1, "torch")
    assert same(host.read(0, [1, 2]), device.read(0, [5, 6]))
    assert same(host.read(1, [4, 5]), device.read(1, [5, 6]))
    assert not host.read(1, [1, 2])["latent"].any()


def test_rows_are_merged_into_maximal_runs() -> None:
    """R33: a plan covers each row once, in runs that are neighbours on both sides."""
    plan = plan_rows(torch.tensor([4, 5, 6, 7, 1]), torch.tensor([0, 1, 3, 4, 5]), 8, 8)
    assert plan.runs == ((4, 0, 2), (6, 3, 2), (1, 5, 1))


@settings(derandomize=True, max_examples=200, deadline=None)
@given(st.data(), st.integers(1, 4))
def test_plans_of_pages_are_plans_of_their_tokens(data: st.DataObject, page_size: int) -> None:
    """R33: whole pages, given by number, are planned as the vectors of their tokens: the same rows, runs and pages."""
    to = data.draw(st.permutations(range(9)))[: data.draw(st.integers(0, 9))]
    at = data.draw(st.lists(st.integers(0, 8), min_size=len(to), max_size=len(to)))
    if data.draw(st.booleans()):
        at, to = sorted(at), sorted(to)
    slots = 9 * page_size
    by_pages = plan_pages(PageSlots(at, page_size), PageSlots(to, page_size), slots, slots)
    vectors = [[page * page_size + offset for page in pages for offset in range(page_size)] for pages in (at, to)]
    by_tokens = plan_rows(*(torch.tensor(vector, dtype=torch.int64) for vector in vectors), slots, slots)
    pairs = [(by_pages, by_tokens)]
    if to:
        pairs.append((by_pages.by_page(page_size), by_tokens.by_page(page_size)))
        assert by_pages.by_whole_pages(page_size) is by_pages.by_page(page_size)
    for one, other in pairs:
        assert torch.equal(one.source_rows, other.source_rows)
        assert torch.equal(one.destination_rows, other.destination_rows)
        assert one.runs == other.runs
        assert one.row_count == other.row_count == one.source_rows.numel()
    if page_size > 1 and to:
        assert (by_pages.by_whole_pages(page_size + 1) is None) == (by_tokens.by_whole_pages(page_size + 1) is None)


@pytest.mark.parametrize(
    ("at", "to", "size", "error", "message"),
    [
        ([0, 1], [3], 4, ValueError, "2 source pages for 1 destination pages"),
        ([0, 1], [3, 3], 4, ValueError, "destination page 3 is given twice"),
        ([-1], [0], 4, IndexError, r"source pages -1\.\.-1 of 4 tokens leave the buffer's slots 0\.\.19"),
        ([0], [5], 4, IndexError, "destination pages 5"),
        ([0], [0], 2, ValueError, "source pages of 4 tokens, destination pages of 2"),
    ],
)
def test_pages_that_cannot_be_copied_are_refused(
    at: list[int], to: list[int], size: int, error: type[Exception], message: str
) -> None:
    """R35: pages are checked before anything moves, as slots are."""
    with pytest.raises(error, match=message):
        plan_pages(PageSlots(at, 4), PageSlots(to, size), 20, 20)


def test_both_sides_of_a_copy_come_in_one_form() -> None:
    """R35: slots on one side and pages on the other are a misuse; so is a plan of slots without its runs."""
    shape = shape_of("mla", 1)
    device, host = DevicePool(shape, 8), LayerFirstHostPool(shape, 8, 4)
    with pytest.raises(TypeError, match="give both in one form"):
        host.backup_from_device_per_layer(device, PageSlots([0], 4), torch.arange(4), 0, "torch")
    with pytest.raises(TypeError, match="runs are left out"):
        _ = RowPlan(torch.arange(4), torch.arange(4)).runs
