"""Imports one source file from other code, so that a change can be tried without touching the file."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, ModuleType


class Replaced(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the module of ``path``, and runs ``code`` as its body."""

    def __init__(self, path: Path, code: CodeType) -> None:
        self._path = path
        self._code = code

    def install(self) -> None:
        """From the next import on."""
        sys.meta_path.insert(0, self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """See ``importlib``."""
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is None or spec.origin != str(self._path):
            return None
        spec.loader = self
        return spec

    def exec_module(self, module: ModuleType) -> None:
        """See ``importlib``."""
        exec(self._code, module.__dict__)
