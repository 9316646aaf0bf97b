"""Mutants that no test can tell from the original, each with the reason."""

from __future__ import annotations

EQUIVALENT: dict[str, str] = {
    "cphicache/lifecycle/callbacks.py::_copy_layers::if submitted & reported:  # a layer is copied once, also when it is reported again "
    "together with new ones::& -> |": "taking submitted layers out of a report that has none leaves it as it is",
    "cphicache/lifecycle/record.py::Input::layers_mask: int = field(init=False, default=0, repr=False, compare=False)::False -> True #2": (
        "inputs with equal layers have equal masks, and the layers are compared"
    ),
    "cphicache/lifecycle/validate.py::assignments::if not any(forbidden <= literals for forbidden in IMPOSSIBLE):::any -> all": (
        "there is one impossible combination"
    ),
}
