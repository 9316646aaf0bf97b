"""One node of the radix tree, and the error for what must never happen to it."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

from cphicache.spaces.types import LogicalPage
from cphicache.tree.keys import ChildKey, RadixKey

B = TypeVar("B")
"""Type of the opaque backup object that every node carries (the engine's record)."""

ROOT_ID = 0


class TreeInternalError(AssertionError):
    """A rule of the tree was broken by our own code; the message holds what was expected and what was found."""


class Node(Generic[B]):
    """A run of whole pages below ``parent``. Only the tree writes the fields; ``backup`` belongs to the caller.

    * ``key`` its own segment, ``length_pages`` its length; ``child_key`` what it is filed under in ``parent.children``.
    * ``pages`` one logical page a page of the key, or None: not on the device (host-only).
    * ``lock_ref`` device locks on the node or below it; ``host_ref`` host holds and pins.
    * ``device_children`` number of children that are on the device.
    * ``last_access``, ``created`` values of the caller's logical clock; ``hits``, ``priority`` plain integers.
    * ``loading`` opaque plain data of the load-back in flight, or None; set with ``RadixTree.set_loading``.

    The root has id 0, an empty key and no pages; it counts as on the device. A removed node has no parent.
    """

    __slots__ = (
        "backup",
        "child_key",
        "children",
        "created",
        "device_children",
        "hits",
        "host_ref",
        "id",
        "key",
        "last_access",
        "length_pages",
        "loading",
        "lock_ref",
        "pages",
        "parent",
        "priority",
    )

    backup: B

    def __init__(
        self,
        node_id: int,
        parent: Node[B] | None,
        key: RadixKey,
        child_key: ChildKey,
        pages: list[LogicalPage] | None,
        *,
        now: int,
        priority: int = 0,
    ) -> None:
        self.id = node_id
        self.parent = parent
        self.key = key
        self.child_key = child_key
        self.children: dict[ChildKey, Node[B]] = {}
        self.pages = pages
        self.length_pages = key.pages
        self.device_children = 0
        self.lock_ref = 0
        self.host_ref = 0
        self.last_access = now
        self.created = now
        self.hits = 0
        self.priority = priority
        self.loading: Any = None

    @property
    def is_root(self) -> bool:
        """Whether this is the root, which is never evicted."""
        return self.id == ROOT_ID

    @property
    def on_device(self) -> bool:
        """Whether the node has device pages."""
        return self.pages is not None

    @property
    def length_tokens(self) -> int:
        """Length in tokens (bigram: in elements)."""
        return self.length_pages * self.key.page_size

    @property
    def is_device_leaf(self) -> bool:
        """Whether the node may lose its device pages: on the device, no child there, unlocked, in a tree, not the root."""
        return self.pages is not None and not self.device_children and not self.lock_ref and self.parent is not None

    @property
    def is_host_removable(self) -> bool:
        """Whether nothing but its children keeps a host-only node: neither lock nor hold nor load-back."""
        return self.pages is None and not self.host_ref and not self.lock_ref and self.loading is None and self.parent is not None

    @property
    def is_host_leaf(self) -> bool:
        """Whether the node may lose its host copy: host-only, no children, no lock, hold or load-back."""
        return not self.children and self.is_host_removable

    def __repr__(self) -> str:
        where = "root" if self.is_root else "device" if self.on_device else "host"
        return (
            f"<node {self.id} {where} pages={self.length_pages} children={len(self.children)}"
            f" on_device={self.device_children} lock={self.lock_ref} hold={self.host_ref} loading={self.loading!r}>"
        )


def child_key_of(node: Node[B]) -> ChildKey:
    """``key(child)`` of R30, computed from the node's own segment and its place: ``parent.children[child_key_of(n)] is n``."""
    return node.key.child_key(0, at_root=node.parent is not None and node.parent.is_root)


def depth(node: Node[B]) -> int:
    """Number of nodes above ``node``: 0 for the root. Sorting by it puts parents first. Costs one step a level."""
    steps = 0
    while node.parent is not None:
        node = node.parent
        steps += 1
    return steps
