"""The radix tree of the logical half: logical pages by token prefix, locks, host holds, and the order of eviction.

It knows nothing of the backup lifecycle, of tensors or of ranks. Every rank runs the same calls and holds the same tree.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, Generic, NamedTuple

from cphicache.spaces.types import LogicalPage
from cphicache.tree.eviction import Candidates, Rank, plan_host_victims, policy_named
from cphicache.tree.image import canonical_form, dump_nodes, key_order, load_nodes
from cphicache.tree.keys import RadixKey, check_page_size
from cphicache.tree.node import ROOT_ID, B, Node, TreeInternalError


class Walk(NamedTuple, Generic[B]):
    """What a key matches; a handle into the tree that is good until the tree changes.

    ``path``: matched nodes below the root, parents first; all fully matched but perhaps the last.
    ``partial_pages``: pages matched inside the last node if that is only partly matched, else 0.
    ``matched_pages``: all matched pages. ``device_pages``: logical pages of the matched prefix up to the first node that is not on
    the device, cut at the end of the match. ``last_device_node``: the node in which that prefix ends, the root if it is empty.
    """

    path: list[Node[B]]
    partial_pages: int
    matched_pages: int
    device_pages: list[LogicalPage]
    last_device_node: Node[B]


class RadixTree(Generic[B]):
    """Radix tree of pages of ``page_size`` tokens (1..1024), evicted in the order of ``policy`` (see ``eviction.py``).

    ``make_backup(node)`` makes the opaque backup object of each new node (the root's too). Node fields are read freely and written
    through the methods here only, ``backup`` excepted. ``now`` is the caller's logical clock; give every call that takes it a value
    of its own and no two victims tie. Wrong arguments raise ValueError; a broken rule of the tree raises TreeInternalError. In both
    cases nothing has changed.
    """

    def __init__(self, page_size: int, policy: str, make_backup: Callable[[Node[B]], B]) -> None:
        self.page_size = check_page_size(page_size)
        self.policy = policy_named(policy)
        self.evictable_tokens = 0
        """Tokens on the device in nodes without a lock (whole nodes)."""
        self.protected_tokens = 0
        """Tokens on the device in nodes with a lock (whole nodes)."""
        self._make_backup = make_backup
        self._device: Candidates[B] = Candidates(self.policy)
        self._host: Candidates[B] = Candidates(self.policy)
        self._by_id: dict[int, Node[B]] = {}
        empty = RadixKey.of((), page_size)
        self.root: Node[B] = Node(ROOT_ID, None, empty, empty.data, [], now=0)
        self.root.backup = make_backup(self.root)

    # -- reading ----------------------------------------------------------------------------------------------------------
    @property
    def device_tokens(self) -> int:
        """Tokens on the device: evictable and protected."""
        return self.evictable_tokens + self.protected_tokens

    @property
    def node_count(self) -> int:
        """Nodes below the root."""
        return len(self._by_id)

    @property
    def heap_operations(self) -> int:
        """Heap pushes, pops and moves since the tree was made; what eviction costs."""
        return self._device.operations + self._host.operations

    def find(self, node_id: int) -> Node[B] | None:
        """The node with that id, if it is in the tree (the root included)."""
        return self.root if node_id == ROOT_ID else self._by_id.get(node_id)

    def nodes(self) -> Iterator[Node[B]]:
        """All nodes below the root, parents first, siblings in the order of ``children``. Do not change the tree meanwhile."""
        stack = list(reversed(self.root.children.values()))
        while stack:
            node = stack.pop()
            yield node
            stack.extend(reversed(node.children.values()))

    def eviction_order(self, node: Node[B]) -> tuple[Rank, int]:
        """What victims are sorted by, lowest first: the policy's rank, then the node id."""
        return self.policy.rank(node), node.id

    def walk(self, key: RadixKey) -> Walk[B]:
        """Match ``key`` from the root. Changes nothing, not even access times (R24). The rest of the key is never copied."""
        self._check_key(key)
        path: list[Node[B]] = []
        device_pages: list[LogicalPage] = []
        last_device_node = node = self.root
        matched = partial = 0
        while matched < key.pages:
            child = node.children.get(key.child_key(matched, at_root=node is self.root))
            if child is None:
                break
            common = key.common_pages(matched, child.key)
            path.append(child)
            matched += common
            whole = common == child.length_pages
            if child.pages is not None:  # then so is all above: set_device and drop_device leave no gap
                device_pages.extend(child.pages if whole else child.pages[:common])
                last_device_node = child
            if not whole:
                partial = common
                break
            node = child
        return Walk(path, partial, matched, device_pages, last_device_node)

    # -- access -----------------------------------------------------------------------------------------------------------
    def touch(self, nodes: Iterable[Node[B]], now: int) -> None:
        """Set the access time of ``nodes``; their place in the eviction order follows when they surface."""
        for node in nodes:
            node.last_access = now
            self._refresh(node)

    def count_hit(self, node: Node[B]) -> int:
        """Count a hit; returns the new count."""
        node.hits += 1
        self._refresh(node)
        return node.hits

    def set_priority(self, node: Node[B], priority: int) -> None:
        """Set the priority of a node; lower ones are evicted first under the policy of that name."""
        node.priority = priority
        self._refresh(node)

    def set_loading(self, node: Node[B], loading: Any) -> None:
        """Set or clear (None) the load-back that a node waits for. It must be plain data for :meth:`snapshot`."""
        node.loading = loading
        self._refile(node)

    # -- shape ------------------------------------------------------------------------------------------------------------
    def add_child(
        self, parent: Node[B], segment: RadixKey, pages: Sequence[LogicalPage], node_id: int, now: int, *, priority: int = 0
    ) -> Node[B]:
        """Add a node of ``segment`` (what follows ``parent``) on device ``pages``; returns it. ``node_id`` must be new and > 0."""
        self._check_key(segment)
        if not segment.pages or len(pages) != segment.pages:
            raise ValueError(f"{len(pages)} pages for a segment of {segment.pages}: give one page a page of a non-empty segment")
        if not (parent.is_root or parent.key.is_same_kind(segment)):
            raise ValueError(
                f"segment of namespace {segment.extra_key!r} (bigram {segment.is_bigram}) under {parent}: cut it there"
            )
        self._check_id(node_id)
        child_key = segment.child_key(0, at_root=parent.is_root)
        if child_key in parent.children:
            raise TreeInternalError(f"add_child: expected no child with this first page, found {parent.children[child_key]}")
        if parent.pages is None or not self._holds(parent):
            raise TreeInternalError(f"add_child: expected a parent in the tree and on the device, found {parent}")
        node: Node[B] = Node(node_id, parent, segment, child_key, list(pages), now=now, priority=priority)
        node.backup = self._make_backup(node)
        parent.children[child_key] = node
        self._by_id[node_id] = node
        self._enter_device(node)
        return node

    def split(self, node: Node[B], head_pages: int, head_id: int, head_backup: B | None = None) -> Node[B]:
        """Cut ``node`` after ``head_pages``; returns the new node with the first pages, which is inserted above it.

        The node object stays as the tail, so whoever holds it goes on holding all of it. Locks, holds, hits, priority, times and
        ``loading`` are copied to the head (R28). ``head_backup`` is the head's backup object, ``make_backup(head)`` if None.
        """
        parent = node.parent
        if parent is None or not self._holds(node):
            raise TreeInternalError(f"split: expected a node below the root, found {node}")
        if not 0 < head_pages < node.length_pages:
            raise ValueError(f"split after {head_pages} of {node.length_pages} pages: cut inside the node")
        self._check_id(head_id)
        head_key = node.key.slice(0, head_pages)
        pages = node.pages
        head: Node[B] = Node(head_id, parent, head_key, node.child_key, None if pages is None else pages[:head_pages], now=0)
        head.lock_ref, head.host_ref = node.lock_ref, node.host_ref
        head.hits, head.priority = node.hits, node.priority
        head.last_access, head.created = node.last_access, node.created
        head.loading = node.loading
        head.backup = self._make_backup(head) if head_backup is None else head_backup
        node.key = node.key.slice(head_pages, node.length_pages)
        node.length_pages = node.key.pages
        if pages is not None:
            node.pages = pages[head_pages:]
            head.device_children = 1
        parent.children[head.child_key] = head
        node.child_key = node.key.child_key(0, at_root=False)
        node.parent = head
        head.children[node.child_key] = node
        self._by_id[head_id] = head
        # Counters and candidates stay as they are: the head has the node's lock count, and is no leaf of either kind.
        return head

    def remove(self, node: Node[B]) -> list[LogicalPage]:
        """Take a node without children, lock, hold or load-back out of the tree; returns its device pages (host-only: none)."""
        parent = node.parent
        busy = node.children or node.lock_ref or node.host_ref or node.loading is not None
        if parent is None or busy or not self._holds(node):
            raise TreeInternalError(f"remove: expected a leaf of the tree without lock, hold or load-back, found {node}")
        pages = [] if node.pages is None else self._leave_device(node)
        del parent.children[node.child_key]
        del self._by_id[node.id]
        node.parent = None
        self._refile(node)
        self._refile(parent)
        return pages

    # -- device and host --------------------------------------------------------------------------------------------------
    def drop_device(self, node: Node[B]) -> list[LogicalPage]:
        """Make an unlocked device leaf host-only; returns the pages that it had."""
        if not node.is_device_leaf:
            raise TreeInternalError(f"drop_device: expected an unlocked device leaf, found {node}")
        return self._leave_device(node)

    def set_device(self, node: Node[B], pages: Sequence[LogicalPage]) -> None:
        """Give a host-only node device ``pages``: a load-back is published, or recomputed pages are adopted. Parents first."""
        if len(pages) != node.length_pages:
            raise ValueError(f"{len(pages)} pages for {node}: give one page a page of the node")
        if node.pages is not None or node.parent is None or node.parent.pages is None:
            raise TreeInternalError(f"set_device: expected a host-only node under a device node, found {node} under {node.parent}")
        node.pages = list(pages)
        self._enter_device(node)

    def lock(self, node: Node[B]) -> int:
        """Lock the node and all above it on the device (the root is not counted); returns the change of ``evictable_tokens``."""
        self._check_held(node)
        before = self.evictable_tokens
        while node.parent is not None:
            node.lock_ref += 1
            if node.lock_ref == 1:
                if node.pages is not None:
                    self.evictable_tokens -= node.length_tokens
                    self.protected_tokens += node.length_tokens
                self._refile(node)
            node = node.parent
        return self.evictable_tokens - before

    def unlock(self, node: Node[B]) -> int:
        """Take back one :meth:`lock` of the same node; returns the change of ``evictable_tokens``."""
        self._check_held(node)
        # No node has fewer locks than a node below it, so the first one decides.
        if node.parent is not None and node.lock_ref < 1:
            raise TreeInternalError(f"unlock: expected lock_ref >= 1, found {node}")
        before = self.evictable_tokens
        while node.parent is not None:
            node.lock_ref -= 1
            if node.lock_ref == 0:
                if node.pages is not None:
                    self.evictable_tokens += node.length_tokens
                    self.protected_tokens -= node.length_tokens
                self._refile(node)
            node = node.parent
        return self.evictable_tokens - before

    def hold_host(self, node: Node[B], pages: int) -> None:
        """Pin the last ``pages`` pages up to the end of ``node`` on the host: whole nodes, from ``node`` upwards."""
        for member in self._range_up(node, pages):
            member.host_ref += 1
            self._refile(member)

    def release_host(self, node: Node[B], pages: int) -> None:
        """Take back one :meth:`hold_host` with the same arguments, from every fragment that splits have made since (R28)."""
        members = self._range_up(node, pages)
        for member in members:
            if member.host_ref < 1:
                raise TreeInternalError(f"release_host: expected host_ref >= 1, found {member}")
        for member in members:
            member.host_ref -= 1
            self._refile(member)

    # -- victims ----------------------------------------------------------------------------------------------------------
    def next_device_victim(
        self, accept: Callable[[Node[B]], bool] | None = None, aside: list[Node[B]] | None = None
    ) -> Node[B] | None:
        """The first device leaf in eviction order that ``accept`` takes, or None. It stays a candidate until the caller drops,
        removes or locks it.

        Rejected ones are put back before the return, O(log n) each. A caller that asks again and again passes a list ``aside``: it
        takes the rejected ones, which are not looked at again before :meth:`put_back`.
        """
        return self._device.first(accept, aside)

    def put_back(self, aside: Iterable[Node[B]]) -> None:
        """Make nodes that were set aside candidates again, as far as they still are leaves."""
        for node in aside:
            self._refile(node)

    def plan_host_victims(self, enough: Callable[[Node[B]], bool], accept: Callable[[Node[B]], bool]) -> list[Node[B]] | None:
        """Evict host leaves on paper, in eviction order, until they suffice; the tree is not changed.

        ``accept(node)`` says whether a leaf may be a victim; a parent joins when all its children are victims and nothing else
        keeps it. ``enough(node)`` is called once for each victim, in order, and answers True when the victims so far suffice.
        Returns the victims, which can be removed in that order, or None if there are not enough. O(k log n) for k leaves looked at.
        """
        return plan_host_victims(self._host, enough, accept)

    # -- state as data ----------------------------------------------------------------------------------------------------
    def snapshot(self, dump_backup: Callable[[B], object]) -> dict[str, object]:
        """The tree as plain data (key segments as bytes) that shares nothing mutable with it."""
        return {"page_size": self.page_size, "policy": self.policy.name, "nodes": dump_nodes(self.root, self.nodes(), dump_backup)}

    def restore(self, image: dict[str, Any], load_backup: Callable[[Node[B], Any], B]) -> None:
        """Become the tree of a :meth:`snapshot`; all nodes are new objects. ``load_backup(node, data)`` makes backup objects."""
        found, expected = (image["page_size"], image["policy"]), (self.page_size, self.policy.name)
        if found != expected:
            raise ValueError(
                f"snapshot of a tree with page size and policy {found}, this one has {expected}: restore into its like"
            )
        self.root, self._by_id = load_nodes(self.root.key, image["nodes"], load_backup)
        self._device.clear()
        self._host.clear()
        self.evictable_tokens = self.protected_tokens = 0
        for node in self._by_id.values():
            if node.pages is not None:
                self._count(node, node.length_tokens)
            self._refile(node)

    def key_order(self) -> list[Node[B]]:
        """The root and all nodes, parents first, in an order that depends on their keys only: that of :meth:`canonical`."""
        return key_order(self.root)

    def canonical(
        self,
        backup_canonical: Callable[[Node[B]], Hashable],
        page_name: Callable[[LogicalPage], Hashable] | None = None,
        *,
        ordered: Sequence[Node[B]] | None = None,
    ) -> Hashable:
        """Equal for two trees that behave alike from here on: ids become positions, clock values become an order among the nodes that
        may compete, and of the fields for eviction only those that the policy reads count. Holds if no two calls shared a value of the
        clock. ``page_name``: what stands in the form for a page (asked for parents first). ``ordered``: :meth:`key_order`, if at hand."""
        return canonical_form(key_order(self.root) if ordered is None else ordered, self.policy, backup_canonical, page_name)

    # -- inner parts ------------------------------------------------------------------------------------------------------
    def _check_key(self, key: RadixKey) -> None:
        if key.page_size != self.page_size:
            raise ValueError(f"key of page size {key.page_size} in a tree of page size {self.page_size}: build the key with that")

    def _check_id(self, node_id: int) -> None:
        if node_id <= ROOT_ID or node_id in self._by_id:
            raise ValueError(f"node id {node_id} is taken or not positive: give every node an id of its own, above 0")

    def _holds(self, node: Node[B]) -> bool:
        return node is self.root or self._by_id.get(node.id) is node

    def _check_held(self, node: Node[B]) -> None:
        if not self._holds(node):
            raise TreeInternalError(f"expected a node of this tree, found {node}, which was removed or belongs to another")

    def _range_up(self, node: Node[B], pages: int) -> list[Node[B]]:
        """The nodes that make up the last ``pages`` pages before the end of ``node``, deepest first."""
        self._check_held(node)
        members: list[Node[B]] = []
        left, at = pages, node
        while left > 0 and at.parent is not None:
            members.append(at)
            left -= at.length_pages
            at = at.parent
        if left or not members:
            raise ValueError(f"{pages} pages up from {node} do not end at the start of a node: hold or release whole nodes")
        return members

    def _count(self, node: Node[B], tokens: int) -> None:
        if node.lock_ref:
            self.protected_tokens += tokens
        else:
            self.evictable_tokens += tokens

    def _enter_device(self, node: Node[B]) -> None:
        self._count(node, node.length_tokens)
        self._shift_parent(node, 1)

    def _leave_device(self, node: Node[B]) -> list[LogicalPage]:
        pages = node.pages
        if pages is None:
            raise TreeInternalError(f"expected a node on the device, found {node}")
        node.pages = None
        self._count(node, -node.length_tokens)
        self._shift_parent(node, -1)
        return pages

    def _shift_parent(self, node: Node[B], change: int) -> None:
        if node.parent is not None:
            node.parent.device_children += change
            self._refile(node.parent)
        self._refile(node)

    def _refresh(self, node: Node[B]) -> None:
        self._device.refresh(node)
        self._host.refresh(node)

    def _refile(self, node: Node[B]) -> None:
        """Put the node where it belongs after a change: among the device leaves, the host leaves, or neither."""
        if node.is_device_leaf:
            self._host.discard(node)
            self._device.add(node)
            return
        self._device.discard(node)
        if node.is_host_leaf:
            self._host.add(node)
        else:
            self._host.discard(node)
