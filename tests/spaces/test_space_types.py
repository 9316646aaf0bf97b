"""The type checker keeps the number spaces apart."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import cphicache

SNIPPET = """\
from cphicache.spaces.layout import CpSharedKVLayout
from cphicache.spaces.tensors import HostSlots, PhysicalLocs, owned_locs
from cphicache.spaces.types import HostSlot, LogicalLoc, LogicalPage, PhysicalLoc


def free_slots(slots: HostSlots) -> None: ...


def free_slot(slot: HostSlot) -> None: ...


layout = CpSharedKVLayout(4, 4, 0)
logical = LogicalLoc(5)
physical = layout.physical(logical)
layout.owner(logical)
layout.logical(physical)
positions, locs = owned_locs(layout, [layout.page_of(logical)])
layout.owner(physical)  # mix-up
layout.physical(physical)  # mix-up
layout.logical(logical)  # mix-up
layout.owner(5)  # mix-up
layout.owner_of_page(logical)  # mix-up
free_slot(physical)  # mix-up
free_slots(locs)  # mix-up
"""

TORCH_STUB = """\
from typing import Any

class Tensor:
    def __getattr__(self, name: str) -> Any: ...
    def __mul__(self, other: int) -> Tensor: ...
    def __add__(self, other: Tensor) -> Tensor: ...
    def __getitem__(self, index: Any) -> Tensor: ...
    def reshape(self, *shape: int) -> Tensor: ...

int64: Any
def tensor(data: Any, *, dtype: Any = ...) -> Tensor: ...
def arange(stop: int, *, dtype: Any = ...) -> Tensor: ...
"""


def test_mypy_rejects_a_mix_up_of_spaces(tmp_path: Path) -> None:
    """R1: mypy --strict accepts correct use and rejects each line that passes a number or tensor of another space, and no other."""
    (tmp_path / "snippet.py").write_text(SNIPPET)
    stubs = tmp_path / "stubs"
    stubs.mkdir()
    (stubs / "torch.pyi").write_text(TORCH_STUB)  # type-checking all of torch would take most of a minute
    package_root = Path(cphicache.__file__).parents[1]
    command = ["-m", "mypy", "--strict", "--config-file=", "--follow-imports=silent", "--no-error-summary", "snippet.py"]
    result = subprocess.run(
        [sys.executable, *command],
        cwd=tmp_path,
        env={**os.environ, "MYPYPATH": os.pathsep.join([str(stubs), str(package_root)])},
        capture_output=True,
        text=True,
        check=False,
    )
    errors = [line for line in result.stdout.splitlines() if ": error: " in line]
    mixed_up = [number for number, line in enumerate(SNIPPET.splitlines(), 1) if line.endswith("# mix-up")]
    assert [int(line.split(":")[1]) for line in errors] == mixed_up, result.stdout + result.stderr
    assert all("[arg-type]" in line for line in errors)
    assert 'has incompatible type "PhysicalLoc"; expected "LogicalLoc"' in errors[0]
