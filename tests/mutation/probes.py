"""Which lines run: a probe before each statement of the live functions. Costs next to nothing; tracing takes several times as long."""

from __future__ import annotations

import ast

HITS = "__statements_run__"
"""Global of a probed module: a byte for each of its statements, 1 once it has run."""


def put_probes(tree: ast.Module) -> dict[int, int]:
    """Put a probe before each statement inside a function. Returns the statement that each line belongs to, the innermost one."""
    owners: dict[int, int] = {}
    _into_functions(tree, owners)
    ast.fix_missing_locations(tree)
    return owners


def _into_functions(node: ast.AST, owners: dict[int, int]) -> None:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef):
            child.body = _probed(child.body, owners)
        else:
            _into_functions(child, owners)


def _probed(body: list[ast.stmt], owners: dict[int, int]) -> list[ast.stmt]:
    probed: list[ast.stmt] = []
    for statement in body:
        number = max(owners.values(), default=-1) + 1
        owners.update(dict.fromkeys(range(statement.lineno, (statement.end_lineno or statement.lineno) + 1), number))
        probe = ast.parse(f"{HITS}[{number}] = 1").body[0]
        probed += [ast.copy_location(probe, statement), statement]
        for part in (statement, *getattr(statement, "handlers", ()), *getattr(statement, "cases", ())):
            for field in ("body", "orelse", "finalbody"):
                inner = getattr(part, field, None)
                if inner and isinstance(inner, list):
                    setattr(part, field, _probed(inner, owners))
    return probed
