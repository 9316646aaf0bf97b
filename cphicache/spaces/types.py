"""The number spaces of the KV cache, as distinct types, so that a type checker rejects a mix-up.

* *logical*: the KV space that every context-parallel (CP) rank shares. Tree, scheduler, ledger and requests use it.
* *physical*: one rank's own device pool. Appears in copy jobs only.
* *host slot*: one rank's own host pool.

A loc is a token slot number; a page is ``loc // page_size``. All are non-negative integers.
"""

from typing import NewType

LogicalLoc = NewType("LogicalLoc", int)
LogicalPage = NewType("LogicalPage", int)
PhysicalLoc = NewType("PhysicalLoc", int)
PhysicalPage = NewType("PhysicalPage", int)
HostSlot = NewType("HostSlot", int)
