"""Backends that copy rows between any two buffers (torch, triton), behind the port of groups."""

from __future__ import annotations

from cphicache.transfer.backends.port import CopyGroup, RowBackend, RowPair, RowPlan


class RowsBackend:
    """A :class:`~cphicache.transfer.backends.port.CopyBackend` that moves the rows of each buffer of a group by a row backend."""

    __slots__ = ("_rows", "name")

    def __init__(self, rows: RowBackend) -> None:
        self._rows = rows
        self.name = rows.name

    def check(self, group: CopyGroup) -> None:
        """Raise ValueError for buffers that the row backend cannot copy between."""
        for pair in _pairs(group, 0):
            self._rows.check_pair(pair)

    def backup_layer(self, group: CopyGroup, layer: int, plan: RowPlan) -> None:
        """D2H of one layer."""
        self._rows.copy_rows(_pairs(group, layer), plan)

    def backup_layers(self, group: CopyGroup, plan: RowPlan) -> None:
        """D2H of every layer of the group."""
        self._rows.copy_rows([pair for layer in range(len(group.layers)) for pair in _pairs(group, layer)], plan)

    def load_layer(self, group: CopyGroup, layer: int, plan: RowPlan) -> None:
        """H2D of one layer."""
        self._rows.copy_rows([pair.reversed() for pair in _pairs(group, layer)], plan)


def _pairs(group: CopyGroup, layer: int) -> list[RowPair]:
    return [RowPair(layers[layer], group.host_rows(at, layer)) for at, layers in enumerate(group.device)]
