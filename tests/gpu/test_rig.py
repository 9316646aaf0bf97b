"""The rig of the GPU tests, tried on the CPU, so that a red GPU test is not the rig's own fault."""

from __future__ import annotations

import pytest

from cphicache.run.doctor_copies import open_lab
from cphicache.transfer.support import SUPPORT, Support
from tests.gpu.rank_rig import RankRig

ROWS = [pytest.param(row, id=f"{row.kind}-{row.layout}-{row.io_backend}") for row in SUPPORT if row.reason is None]


@pytest.mark.parametrize("row", ROWS)
def test_the_rig_passes_on_threads(row: Support) -> None:
    """R33: two nodes backed up and one loaded back, target and draft, for every supported combination on real threads."""
    with open_lab(on_gpu=False) as lab:
        rig = RankRig(lab, row)
        rig.warm_up()
        rig.submit_backups()
        rig.poll()
        rig.finish_backups()
        rig.start_load()
        rig.finish_load()
        rig.close()
