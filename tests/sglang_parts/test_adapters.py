"""SGLang's allocator, pools and hooks as cphicache sees them. The stand-ins have the few methods of SGLang's that are used."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cphicache.agree.local import SingleReducer
from cphicache.engine import CacheConfig, CpHiRadixCache
from cphicache.sglang import hooks
from cphicache.sglang.allocator import ServerAllocator
from cphicache.sglang.checks import check_speculative
from cphicache.sglang.counter import LayerCounter
from cphicache.sglang.pools import adopt_pool, adopt_pools, by_payload
from cphicache.sglang.refusal import SglangRefused
from cphicache.sglang.streams import CurrentStream, HostForwardStreams
from cphicache.spaces import CpSharedKVLayout, LogicalPage
from cphicache.transfer.pools.device import DevicePool, KVShape
from cphicache.transfer.pools.host import make_host_pool
from cphicache.transfer.port import Wait
from cphicache.transfer.rank import RankTransfer
from tests.streams.fake_cuda import FakeCuda

PAGE = 4


class PagedServer:
    """A page allocator with the interface of SGLang's."""

    def __init__(self, pages: int) -> None:
        self.size, self.page_size, self.device = pages * PAGE, PAGE, "cpu"
        self.free_pages = torch.arange(1, pages + 1)

    def available_size(self) -> int:
        return len(self.free_pages) * PAGE

    def alloc(self, tokens: int) -> torch.Tensor | None:
        count = tokens // PAGE
        if count > len(self.free_pages):
            return None
        taken, self.free_pages = self.free_pages[:count], self.free_pages[count:]
        return (taken[:, None] * PAGE + torch.arange(PAGE)).reshape(-1)

    def free_page_ids(self, pages: torch.Tensor) -> None:
        self.free_pages = torch.cat([pages, self.free_pages])

    def get_all_free_pages(self) -> torch.Tensor:
        return self.free_pages


def test_pages_come_from_the_server_and_go_back_to_it() -> None:
    """R29: pages are handed out by SGLang's allocator and freed into it; a demand that it cannot meet changes nothing."""
    server = PagedServer(6)
    alloc = ServerAllocator(server)
    assert alloc.usable_pages == range(1, 7)
    first = alloc.alloc(2)
    assert first == [1, 2]
    assert (alloc.available_size(), alloc.lane_free()) == (16, (4,))
    assert alloc.alloc_for_owners([0] * 5) is None
    assert alloc.lane_shortage_for_owners([0] * 5) == (1,)
    assert alloc.lane_shortage(4) == (0,)
    alloc.free([LogicalPage(2)])
    assert alloc.snapshot().free == ((2, 3, 4, 5, 6),)
    assert alloc.alloc(0) == []
    alloc.free([])
    assert "allocator_available_size=20" in alloc.out_of_memory_text(8, None)
    assert alloc.out_of_memory_text(8, None).startswith("Available tokens: 28 ")
    with pytest.raises(ValueError, match="belong to the server"):
        alloc.restore(alloc.canonical())


def test_an_engine_on_a_servers_allocator_evicts_and_loads_back() -> None:
    """R25, R27, R29: an engine whose pages are SGLang's evicts into its allocator, loads back out of it, and leaves nothing behind."""
    server = PagedServer(6)
    shape = KVShape("mha", 2, {"k": 8, "v": 8}, torch.float32)
    device = DevicePool(shape, server.size + PAGE)
    streams = HostForwardStreams()
    host = make_host_pool("layer_first", shape, 16 * PAGE, PAGE)
    transfer = RankTransfer(CpSharedKVLayout(PAGE, 1, 0), {"target": device}, {"target": host}, streams)
    config = CacheConfig(
        page_size=PAGE, cp_size=1, usable_pages=6, payloads=(("target", 2),), host_slots=16 * PAGE, load_back_threshold=1
    )
    cache = CpHiRadixCache(config, transfer, SingleReducer(), allocator=ServerAllocator(server))
    key = cache.key(range(16))
    found = cache.prepare("a", key)
    assert found is not None
    cache.admit("a", found.device_node, 0)
    row = cache.alloc(4, None)
    assert row is not None
    device.rows(1, "v")[:] = torch.arange(device.rows(1, "v").numel()).view_as(device.rows(1, "v")) % 251
    stored = device.read(1, locs(row))["v"]
    cache.reserve("a", 1, key, row)
    for layer in range(2):
        cache.layer_stored(1, 0, layer)
    cache.end_payload(1, 0)
    cache.end_forward(1)
    assert cache.finish("a", key, row)
    for operation in list(cache.state.pending.values()):
        transfer.wait_backup(operation.key)
    cache.begin_tick()
    cache.begin_tick()
    assert cache.counters.committed == 1
    assert server.available_size() + cache.evictable_size() == server.size
    assert cache.evict(16).num_tokens_evicted == 16
    assert server.available_size() == server.size
    device.rows(1, "v").zero_()
    found = cache.prepare("b", key)
    assert found is not None
    answer = cache.load_back("b", found, 16)
    assert len(answer.pages) == 4
    assert server.available_size() + cache.protected_size() == server.size
    cache.start_loads()
    transfer.wait_load(1)
    assert torch.equal(device.read(1, locs(answer.pages))["v"], stored)
    cache.begin_tick()
    cache.begin_tick()
    cache.flush()
    assert server.available_size() == server.size
    streams.close()


def locs(pages: Sequence[LogicalPage]) -> list[int]:
    return [page * PAGE + offset for page in pages for offset in range(PAGE)]


def test_the_forward_on_the_host_waits_by_blocking() -> None:
    """R34: what the calling thread has issued has run, and its wait for a copy returns when the copy has run."""
    streams = HostForwardStreams()
    compute, load = streams.stream("compute"), streams.stream("load")
    assert compute is streams.stream("compute")
    assert (compute.name, compute.takes_whole) == ("compute", True)
    ran: list[str] = []
    load.wait(compute.record(), Wait.READ_TO_LOAD)
    load.submit(lambda: ran.append("load"))
    compute.wait(load.record(), Wait.LOAD_TO_READ)
    compute.submit(lambda: ran.append("forward"))
    assert ran == ["load", "forward"]
    assert streams.query(load.record(), Wait.DRAIN_TO_FREE)
    assert streams.now_us is None
    streams.pause(1.0)
    streams.close()


def test_the_forward_of_the_whole_scheduler_is_the_current_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """R34: without the overlap schedule a copy is ordered after what the stream has been given that is current when it is asked."""
    cuda = FakeCuda()
    monkeypatch.setattr(torch.cuda, "current_stream", cuda.current_stream)
    forward, side = CurrentStream(torch.device("cuda")), cuda.Stream()
    with cuda.stream(side):
        event = forward.record_event()
    forward.wait_event(event)
    forward.synchronize()
    assert cuda.calls == [f"{side.name}.record {event.name}", f"forward.wait {event.name}", "forward.synchronize"]


def named(name: str, **fields: Any) -> Any:
    return type(name, (), {})() if not fields else type(name, (), fields)()


def test_device_pools_are_adopted_not_copied() -> None:
    """R35: an MHA and an MLA pool of SGLang's are used where they lie."""
    tensors = [torch.zeros(12, 2, 4) for _ in range(4)]
    pool = adopt_pool(named("MHATokenToKVPool", k_buffer=tensors[:2], v_buffer=tensors[2:], kv_cache_layout="nhd"), PAGE)
    assert (pool.shape.kind, pool.shape.layers, dict(pool.shape.components)) == ("mha", 2, {"k": 8, "v": 8})
    assert pool.buffer(1, "v").data_ptr() == tensors[3].data_ptr()
    latent = [torch.zeros(12, 1, 10) for _ in range(3)]
    pool = adopt_pool(named("MLATokenToKVPool", kv_buffer=latent), PAGE)
    assert (pool.shape.kind, pool.shape.layers, dict(pool.shape.components)) == ("mla", 3, {"latent": 10})


def dsa(keys: Sequence[int], **fields: Any) -> Any:
    """A DSA pool of two pages; the layers with ``keys`` have indexer keys."""
    latent = [torch.zeros(2 * PAGE, 1, 10) for _ in range(3)]
    indexer = [torch.zeros(2 if layer in keys else 0, PAGE * 6, dtype=torch.uint8) for layer in range(3)]
    return named("DSATokenToKVPool", kv_buffer=latent, index_k_with_scale_buffer=indexer, index_kpool=fields.get("index_kpool", 1))


def test_dsa_pools_are_adopted_with_the_layers_that_have_indexer_keys() -> None:
    """R31: latent and indexer keys, which only some layers have; a pool in which no layer has any is that of its latent."""
    pool = adopt_pool(dsa([0, 2]), PAGE)
    assert (pool.shape.kind, pool.shape.indexer_layers, dict(pool.shape.components)) == (
        "dsa",
        (0, 2),
        {"latent": 10, "indexer": 6},
    )
    assert pool.slots == 2 * PAGE
    assert adopt_pool(dsa([]), PAGE).shape.kind == "mla"


def test_a_draft_pool_is_a_payload_of_its_own() -> None:
    """R5, R31: target and draft have their own layers and kinds, and the same token locations."""
    target = named("MLATokenToKVPool", kv_buffer=[torch.zeros(12, 1, 10) for _ in range(3)])
    draft = named("MLATokenToKVPool", kv_buffer=[torch.zeros(12, 1, 8)])
    small = named("MLATokenToKVPool", kv_buffer=[torch.zeros(8, 1, 8)])
    assert list(by_payload(target, ())) == ["target"]
    pools = adopt_pools(by_payload(target, (draft,)), PAGE)
    assert {payload: pool.shape.layers for payload, pool in pools.items()} == {"target": 3, "draft": 1}
    with pytest.raises(SglangRefused, match="every token location must be in both"):
        adopt_pools(by_payload(target, (small,)), PAGE)
    with pytest.raises(SglangRefused, match="2 draft pools are not supported"):
        by_payload(target, (draft, draft))


def test_each_pool_has_a_counter_of_its_own() -> None:
    """R25: a read of the draft's first layer waits for the draft's copies, whatever the index that SGLang has passed last."""
    waited: list[tuple[str, int]] = []
    counter = LayerCounter(SimpleNamespace(wait_layer=lambda payload, layer: waited.append((payload, layer))), "draft")
    counter.set_consumer(3)
    counter.wait_until(0)
    assert waited == [("draft", 0)]
    assert counter.consumer_index == 3


@pytest.mark.parametrize(
    ("pool", "says"),
    [
        (named("SWAKVPool"), "device pool SWAKVPool is not supported"),
        (dsa([0], index_kpool=4), "index_kpool 4 is not supported"),
        (named("MHATokenToKVPool", kv_cache_layout="hnd"), "layout 'hnd' is not supported"),
        (named("MHATokenToKVPool", is_quantized_kv_cache=True), "scales would not be moved"),
        (named("MLATokenToKVPool", kv_buffer=[torch.zeros(8, 10).T]), "is not contiguous"),
    ],
)
def test_other_device_pools_are_refused(pool: Any, says: str) -> None:
    """R35: a pool that cannot be moved is refused, by its name."""
    with pytest.raises(SglangRefused, match=says):
        adopt_pool(pool, PAGE)


def test_hooks_leave_other_backends_alone() -> None:
    """R36: where the tree cache is not cphicache's, every hook calls what it stands around, once, with what it was given."""
    calls: list[tuple[Any, ...]] = []

    def original(*given: Any) -> str:
        calls.append(given)
        return "answer"

    other = SimpleNamespace(tree_cache=SimpleNamespace())
    assert hooks.around_run_batch(original, other, "batch") == "answer"
    assert hooks.around_add_one_req(original, other, "req", False, None) == "answer"
    assert hooks.around_preempt(original, other, "req") == "answer"
    assert hooks.around_flush(original, other) == "answer"
    assert hooks.around_new_prefill(original, other, "running") == "answer"
    assert calls == [(other, "batch"), (other, "req", False, None), (other, "req"), (other,), (other, "running")]
    assert hooks.after_prepare_for_extend(None, other) is None
    assert hooks.after_attention("out", None, None, None, None, SimpleNamespace(layer_id=0), None) is None


@pytest.mark.parametrize("requeued", [True, False], ids=["by SGLang", "by nobody"])
def test_preempted_requests_are_queued_again_once(requeued: bool) -> None:
    """R17: who was preempted in a round is in the queue after it, once, whether or not SGLang has put him there itself."""
    cache = SimpleNamespace(is_cphicache=True, must_wait=lambda req: False, preempted=["of an earlier round"])
    adder = SimpleNamespace(tree_cache=cache, preempt_list=[])
    queue: list[str] = ["urgent"]
    scheduler = SimpleNamespace(tree_cache=cache, waiting_queue=queue, _add_request_to_queue=queue.append)

    def preempt(adder: Any, req: str) -> bool:
        adder.preempt_list.append("slow")
        return True

    def plan(scheduler: Any) -> str:
        assert hooks.around_preempt(preempt, adder, "urgent")
        if requeued:
            queue.append("slow")
        return "plan"

    assert hooks.around_new_prefill(plan, scheduler) == "plan"
    assert queue == ["urgent", "slow"]


def test_the_factory_finds_the_draft_pools_while_its_cache_is_made() -> None:
    """R5: SGLang tells the builder of the draft's pools, not the factory; a cache of ours needs no registration of them afterwards."""
    plan = SimpleNamespace(device_pools=("draft pool",))
    assert hooks.around_build_cache(lambda **given: hooks.draft_pools(), hicache_draft_plan=plan) == ("draft pool",)
    assert hooks.around_build_cache(lambda **given: hooks.draft_pools(), hicache_draft_plan=None) == ()
    assert hooks.draft_pools() == ()
    registered: list[Any] = []
    for cache in (SimpleNamespace(is_cphicache=True), SimpleNamespace()):
        hooks.around_register_draft(lambda **given: registered.append(given), tree_cache=cache, draft_plan=plan)
    assert [given["tree_cache"] for given in registered] == [cache]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"speculative_algorithm": "NGRAM"}, "--speculative-algorithm NGRAM is not supported: use EAGLE, NEXTN or STANDALONE"),
        ({"speculative_eagle_topk": 4}, "--speculative-eagle-topk 4 is not supported: use 1"),
        ({"speculative_adaptive": True}, "--speculative-adaptive is not supported"),
        ({"enable_multi_layer_eagle": True}, "--enable-multi-layer-eagle is not supported"),
    ],
)
def test_other_ways_of_speculative_decoding_are_refused(changes: dict[str, Any], says: str) -> None:
    """R35: a draft whose KV would not be backed up whole is refused, by its option; one that works is not."""
    works = {
        "speculative_algorithm": "EAGLE", "speculative_eagle_topk": 1, "speculative_adaptive": False, "enable_multi_layer_eagle": False,
    }  # fmt: skip
    check_speculative(SimpleNamespace(**works))
    check_speculative(SimpleNamespace(speculative_algorithm=None))
    with pytest.raises(SglangRefused, match=says):
        check_speculative(SimpleNamespace(**works | changes))
