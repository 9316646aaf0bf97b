"""Mutants that no test can tell from the original, each with the reason."""

from __future__ import annotations

STAMP = "the number is compared only between entries of one node, which equal tuples hold just as well"

EQUIVALENT: dict[str, str] = {
    "cphicache/lifecycle/callbacks.py::_copy_layers::if submitted & reported:  # a layer is copied once, also when it is reported again "
    "together with new ones::& -> |": "taking submitted layers out of a report that has none leaves it as it is",
    "cphicache/lifecycle/record.py::Input::layers_mask: int = field(init=False, default=0, repr=False, compare=False)::False -> True #2": (
        "inputs with equal layers have equal masks, and the layers are compared"
    ),
    "cphicache/lifecycle/validate.py::assignments::if not any(forbidden <= literals for forbidden in IMPOSSIBLE):::any -> all": (
        "there is one impossible combination"
    ),
    "cphicache/tree/eviction.py::Candidates.__init__::self._stamp = 0  # makes entries of the same node differ, so that nodes themselves "
    "are never compared::0 -> 1": STAMP,
    "cphicache/tree/eviction.py::Candidates._push::self._stamp += 1::left out": STAMP,
    "cphicache/tree/eviction.py::Candidates._push::self._stamp += 1::+= -> -=": STAMP,
    "cphicache/tree/eviction.py::Candidates._push::self._stamp += 1::1 -> 2": STAMP,
    "cphicache/tree/eviction.py::Candidates.peek::self._stamp += 1::left out": STAMP,
    "cphicache/tree/eviction.py::Candidates.peek::self._stamp += 1::+= -> -=": STAMP,
    "cphicache/tree/eviction.py::Candidates.peek::self._stamp += 1::1 -> 2": STAMP,
    "cphicache/tree/image.py::canonical_form::(node.lock_ref, node.host_ref, node.loading is not None),::is not -> is": (
        "forms are only compared with each other, and the answer is turned round in all of them"
    ),
    'cphicache/tree/image.py::canonical_form::raise TreeInternalError(f"canonical: expected a parent, found none for {node}")::left out': (
        "every node that is reached below the root has a parent; mypy has to be told"
    ),
    "cphicache/tree/eviction.py::plan_host_victims::if joined and (node is None or joined[0][:2] < candidates.order(node)):::2 -> 3": (
        "two nodes differ in their ids, so that what stands behind is not compared"
    ),
    "cphicache/tree/keys.py::RadixKey.common_pages::limit = min(self.pages - start_page, other.pages - other_start_page)::- -> +": (
        "where this key ends first, the search finds its end"
    ),
}
