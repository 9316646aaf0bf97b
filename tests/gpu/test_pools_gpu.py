"""Every supported pool, layout and backend on a real GPU, on CUDA streams and pinned memory: bytes, and no waiting for the device."""

from __future__ import annotations

import pytest
import torch

from cphicache.run.doctor import examine
from cphicache.run.doctor_copies import compare, open_lab, ways
from cphicache.transfer.backends import BackendUnavailable
from cphicache.transfer.support import SUPPORT, Support
from tests.gpu import NEEDS_GPU
from tests.gpu.rank_rig import RankRig

pytestmark = NEEDS_GPU
ROWS = [pytest.param(row, id=f"{row.kind}-{row.layout}-{row.io_backend}") for row in SUPPORT if row.reason is None]
# torch gathers the strided rows of one layer of a page_first pool through pageable memory: right, but the host waits.
ASYNCHRONOUS = [
    param
    for param in ROWS
    if (param.values[0].io_backend, param.values[0].layout) != ("torch", "page_first")  # type: ignore[union-attr]
]


@pytest.mark.parametrize("page_size", [8, 16, 64])
@pytest.mark.parametrize("row", ROWS)
def test_copies_touch_exactly_their_bytes(row: Support, page_size: int) -> None:
    """R33: D2H of a layer, D2H of all layers and H2D of a layer, on the GPU, in every way that the backend has."""
    with open_lab(on_gpu=True) as lab:
        for find in ways(row, "cuda"):
            try:
                way = find()
            except BackendUnavailable as error:
                pytest.skip(str(error))
            compare(lab, row, way, page_size)


@pytest.mark.parametrize("row", ASYNCHRONOUS)
def test_a_rank_backs_up_and_loads_back_without_waiting_for_the_gpu(row: Support) -> None:
    """R34: reserve, submit, status, load and wait_layer make no synchronising call (torch would raise), and the bytes are right."""
    with open_lab(on_gpu=True) as lab:
        try:
            rig = RankRig(lab, row)
        except BackendUnavailable as error:
            pytest.skip(str(error))
        rig.warm_up()
        torch.cuda.set_sync_debug_mode("error")
        try:
            rig.submit_backups()
            rig.poll()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        rig.finish_backups()
        torch.cuda.set_sync_debug_mode("error")
        try:
            rig.start_load()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        rig.finish_load()
        rig.close()


def test_the_doctor_finds_nothing_wrong() -> None:
    """R32, R33: on this GPU every supported pair is right, or its package is missing; each that ran has its speeds."""
    report = examine(device="cuda")
    assert report.healthy, report.verdict
    assert report.pinned_d2h_gb_per_s
    for pair in report.pairs:
        assert (pair.status == "ok") is (pair.d2h_layer_gb_per_s is not None), pair
