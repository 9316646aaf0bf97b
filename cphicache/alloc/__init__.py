"""Logical device pages, handed out by owner lane."""

from cphicache.alloc.pages import AllocatorSnapshot, PageAccountingError, PageAllocator, allocator_state_text

__all__ = ["AllocatorSnapshot", "PageAccountingError", "PageAllocator", "allocator_state_text"]
