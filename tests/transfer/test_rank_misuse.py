"""What one rank's host book refuses: broken promises of the engine, and pools that do not fit each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from cphicache.transfer.backends import UnsupportedCombination
from cphicache.transfer.pools.device import DevicePool
from cphicache.transfer.pools.host import HostKVPool, LayerFirstHostPool, PageFirstHostPool
from cphicache.transfer.pools.slots import TransferInternalError
from cphicache.transfer.port import LoadItem, OpKey, TransferPort, Wait
from cphicache.transfer.rank import RankTransfer
from cphicache.transfer.streams.threads import ThreadStreams
from cphicache.transfer.streams.virtual import VirtualStreams
from tests.transfer.rigs import Rig, pages, shape_of
from tests.transfer.test_rank import ALONE, OP, virtual_rig


def in_flight(rig: Rig) -> None:
    rig.rank.reserve(OP, pages(1))
    rig.submit_all(OP)


def committed(rig: Rig) -> None:
    rig.back_up(7, pages(1))


def loading(rig: Rig) -> None:
    committed(rig)
    rig.rank.split_node(7, 70, 0)
    rig.rank.queue_load(0, [LoadItem(7, pages(2))])
    rig.rank.start_loads()


def queued(rig: Rig) -> None:
    committed(rig)
    rig.rank.queue_load(0, [LoadItem(7, pages(2))])


def partly_submitted(rig: Rig) -> None:
    rig.rank.reserve(OP, pages(1))
    rig.rank.submit_layers([OP], "target", [0, 1, 2])


def split_while_loading(rig: Rig) -> None:
    loading(rig)
    rig.rank.split_node(7, 71, 1)


def backed_up_again(rig: Rig) -> None:
    committed(rig)
    rig.rank.reserve(OpKey(7, 1), pages(2))


@pytest.mark.parametrize(
    ("before", "call", "message"),
    [
        (in_flight, lambda rank: rank.reserve(OP, pages(2)), "new operation"),
        (in_flight, lambda rank: rank.submit_layers([OP], "target", [1]), "layer 1 once"),
        (in_flight, lambda rank: rank.submit_layers([OP], "target", [3]), "found 3"),
        (in_flight, lambda rank: rank.submit_layers([OP], "target", [2, 2]), "target layer 2 once, found it twice"),
        (in_flight, lambda rank: rank.submit_layers([OP], "indexer", [0]), "'indexer'"),
        (in_flight, lambda rank: rank.commit(OP), "to have ended"),
        (in_flight, lambda rank: rank.release(OP), "to have ended"),
        (in_flight, lambda rank: rank.status(OpKey(7, 1)), "none of that generation"),
        (in_flight, lambda rank: rank.reserve(OpKey(8, 0), pages(12)), r"\[0, 48\), found 51"),
        (partly_submitted, lambda rank: rank.commit(OP), "all 2 draft layers submitted, found mask 0b0"),
        (committed, lambda rank: rank.commit(OP), "none of that generation"),
        (committed, lambda rank: rank.split_node(7, 7, 0), "expected no committed copy of node 7"),
        (committed, lambda rank: rank.split_node(8, 9, 0), "committed node, found none"),
        (committed, lambda rank: rank.queue_load(0, [LoadItem(8, pages(2))]), "committed node, found none"),
        (committed, lambda rank: rank.end_load(0), "load-back in flight, found none"),
        (backed_up_again, lambda rank: rank.commit(OpKey(7, 1)), "expected no committed copy of node 7"),
        (queued, lambda rank: rank.queue_load(0, [LoadItem(7, pages(3))]), "found it queued"),
        (queued, lambda rank: rank.end_load(0), "found it queued"),
        (loading, lambda rank: rank.end_load(0), "to have ended"),
        (loading, lambda rank: rank.free_node(7), "no load-back of it, found load 0"),
        (split_while_loading, lambda rank: rank.free_node(71), "no load-back of it, found load 0"),
    ],
)
def test_a_broken_promise_of_the_engine_is_our_bug(
    before: Callable[[Rig], None], call: Callable[[RankTransfer], object], message: str
) -> None:
    """R14, R18: what must not happen to slots and copies in flight is an internal error with evidence, and changes no slot."""
    rig = virtual_rig()
    before(rig)
    free = rig.rank.free_slots()
    with pytest.raises(TransferInternalError, match=message):
        call(rig.rank)
    assert rig.rank.free_slots() == free


def test_submitting_nothing_queues_nothing() -> None:
    """R10: with no operation or no layer the hook returns at once, without an event on the compute stream."""
    rig = virtual_rig()
    rig.rank.reserve(OP, pages(1))
    rig.rank.submit_layers([], "target", [0])
    rig.rank.submit_layers([OP], "target", [])
    assert rig.rank.last_copy_event(OP) is None
    rig.rank.submit_layers([OP], "target", [0])
    event = rig.rank.last_copy_event(OP)
    assert event is not None
    assert not rig.streams.query(event, Wait.DRAIN_TO_FREE)


def test_pools_that_do_not_fit_are_refused_at_the_start() -> None:
    """R32, R35: payloads, shapes, page size, bandwidth and combination are checked once, at construction, each with its name."""
    streams, shape = VirtualStreams(), shape_of("mla", 2)
    device, host = DevicePool(shape, 16), LayerFirstHostPool(shape, 16, 4)
    draft = {"target": device, "draft": device}
    cases: list[tuple[Mapping[str, DevicePool], Mapping[str, HostKVPool], dict[str, float], str]] = [
        ({}, {"target": host}, {}, "device_pools has payloads"),
        ({"target": device}, {"target": host, "indexer": host}, {}, "host_pools has payloads"),
        (draft, {"target": host}, {}, "give both for each payload"),
        ({"target": DevicePool(shape_of("mla", 3), 16)}, {"target": host}, {}, "use one shape"),
        ({"target": device}, {"target": LayerFirstHostPool(shape, 16, 8)}, {}, "page_size=8, layout page_size=4"),
        ({"target": device}, {"target": host}, {"d2h_bytes_per_us": 0.0}, "d2h_bytes_per_us=0.0"),
        ({"target": device}, {"target": host}, {"h2d_bytes_per_us": -1.0}, "h2d_bytes_per_us=-1.0"),
    ]
    for devices, hosts, options, message in cases:
        with pytest.raises(ValueError, match=message):
            RankTransfer(ALONE, devices, hosts, streams, **options)  # type: ignore[arg-type]
    for pool, io_backend in ((HostKVPool(shape, 16, 4), "torch"), (PageFirstHostPool(shape, 16, 4), "direct")):
        with pytest.raises(UnsupportedCombination, match="is not supported"):
            RankTransfer(ALONE, {"target": device}, {"target": pool}, streams, io_backend=io_backend)


def test_the_rank_implements_the_port() -> None:
    """R20: the engine knows the port only; the rank's class has every method of it, with real threads too."""
    streams = ThreadStreams()
    port: TransferPort = Rig.of(streams, ALONE).rank
    assert port.free_slots() == {"target": 40, "draft": 40}
    streams.close()
