"""Logical device pages, handed out by owner lane."""

from cphicache.alloc.pages import AllocatorSnapshot, PageAccountingError, PageAllocator, allocator_state_text
from cphicache.alloc.port import AllocatorPort

__all__ = ["AllocatorPort", "AllocatorSnapshot", "PageAccountingError", "PageAllocator", "allocator_state_text"]
