"""Radix tree of logical pages by token prefix, its keys and its eviction order. No torch; see ``radix.py``."""

from cphicache.tree.eviction import POLICIES, Policy, Rank, policy_named
from cphicache.tree.keys import PAGE_SIZE_MAX, ChildKey, RadixKey, check_page_size
from cphicache.tree.node import ROOT_ID, Node, TreeInternalError, child_key_of, depth
from cphicache.tree.radix import RadixTree, Walk

__all__ = [
    "PAGE_SIZE_MAX",
    "POLICIES",
    "ROOT_ID",
    "ChildKey",
    "Node",
    "Policy",
    "RadixKey",
    "RadixTree",
    "Rank",
    "TreeInternalError",
    "Walk",
    "check_page_size",
    "child_key_of",
    "depth",
    "policy_named",
]
