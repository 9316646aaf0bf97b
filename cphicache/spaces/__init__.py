"""The number spaces and the one translation between them. Importing this package never imports torch:
tensors of locs are in :mod:`cphicache.spaces.tensors`, node metadata in :mod:`cphicache.spaces.metadata`."""

from cphicache.spaces.layout import CpSharedKVLayout
from cphicache.spaces.types import HostSlot, LogicalLoc, LogicalPage, PhysicalLoc, PhysicalPage

__all__ = ["CpSharedKVLayout", "HostSlot", "LogicalLoc", "LogicalPage", "PhysicalLoc", "PhysicalPage"]
