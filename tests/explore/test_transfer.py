"""The local half as data refuses what its port forbids, so that an engine that does it is found."""

from __future__ import annotations

import pytest

from cphicache.explore.environment import Environment, Fate
from cphicache.explore.transfer import ContractBroken, RecordedTransfer
from cphicache.spaces.types import LogicalPage
from cphicache.transfer.port import CopyStatus, LoadItem, OpKey
from tests.explore.worlds import tiny

KEY = OpKey(1, 1)
PAGES = [LogicalPage(1), LogicalPage(2)]


def committed() -> tuple[RecordedTransfer, Environment]:
    """Node 1 is backed up."""
    environment = Environment()
    environment.begin([Fate.ENDED], chooses=False)
    transfer = RecordedTransfer(tiny().config, 0, environment)
    transfer.reserve(KEY, PAGES)
    transfer.submit_layers([KEY], "target", [0])
    assert transfer.status(KEY) == CopyStatus(True, False)
    transfer.commit(KEY)
    return transfer, environment


def test_both_parts_of_a_node_that_is_read_stay() -> None:
    """R9, R25: where a node is divided while a load-back reads it, neither part may lose its slots until that has ended; a load-back of
    another node is none of its business."""
    transfer, environment = committed()
    transfer.reserve(OpKey(3, 2), [LogicalPage(3)])
    transfer.queue_load(7, [LoadItem(1, PAGES)])
    transfer.split_node(1, 2, 1)
    for node in (1, 2):
        with pytest.raises(ContractBroken, match=rf"free_node {node}: expected no load-back of it, found \[7\]"):
            transfer.free_node(node)
    environment.begin([Fate.ENDED], chooses=False)
    transfer.wait_load(7)
    transfer.wait_load(7)  # it has ended: nothing is asked of the environment any more
    transfer.end_load(7)
    transfer.free_node(2)
    transfer.free_node(1)
    assert transfer.free_slots() == {"target": 3}


def test_a_division_leaves_other_load_backs_alone() -> None:
    """R25: only those read the new node that read the old one."""
    transfer, environment = committed()
    transfer.queue_load(7, [LoadItem(1, PAGES)])
    environment.begin([Fate.ENDED], chooses=False)
    transfer.reserve(OpKey(3, 2), PAGES)
    transfer.submit_layers([OpKey(3, 2)], "target", [0])
    assert transfer.status(OpKey(3, 2)).drained
    transfer.commit(OpKey(3, 2))
    transfer.split_node(3, 4, 1)
    transfer.free_node(4)
    with pytest.raises(ContractBroken, match="free_node 1: expected no load-back of it"):
        transfer.free_node(1)
