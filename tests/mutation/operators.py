"""The mutants of a module: each one small change of its syntax tree, by name.

Changed are comparisons, ``and`` / ``or``, ``not``, arithmetic, integers and truth values, conditions, returned values, ``break`` /
``continue``, ``min`` / ``max``, ``any`` / ``all``; and statements are left out. Left alone is what only people read or what does not run
(text of messages, docstrings, annotations, type variables, decorators, bodies of protocols), and assertions, which no input reaches
(``assert``, ``if ...: raise AssertionError(...)``, ``zip(strict=True)``).
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitOr,
}
CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}

Change = Callable[[], None]
"""Changes the tree in place."""


@dataclass(frozen=True)
class Mutant:
    """One change of the tree of ``path``. ``name`` is stable as long as the line that it changes is."""

    path: str
    scope: str
    line: str
    what: str
    turn: int
    first_line: int
    last_line: int
    in_function: bool
    apply: Change

    @property
    def name(self) -> str:
        """What and where, without line numbers; ``#n`` tells equal changes of equal lines of a scope apart."""
        return f"{self.path}::{self.scope}::{self.line}::{self.what}" + (f" #{self.turn}" if self.turn else "")


class Module:
    """A parsed source file and its mutants."""

    def __init__(self, path: str, root: Path) -> None:
        self.path = path
        self.source = (root / path).read_text()
        self.tree = ast.parse(self.source)
        self._lines = self.source.splitlines()
        self._seen: Counter[str] = Counter()
        self.mutants = list(self._visit(self.tree, "", False))

    def _visit(self, node: ast.AST, scope: str, in_function: bool) -> Iterator[Mutant]:
        if _is_left_alone(node):
            return
        for field, value in ast.iter_fields(node):
            if field in ("annotation", "returns", "decorator_list", "type_params", "bases"):
                continue
            inner, inside = scope, in_function
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                inner = f"{scope}.{node.name}" if scope else node.name
                inside = in_function or (isinstance(node, ast.FunctionDef) and field == "body")
            elif isinstance(node, ast.Lambda):
                inside = in_function or field == "body"
            for at, child in enumerate(value if isinstance(value, list) else [value]):
                if isinstance(child, ast.AST):
                    put = _putter(node, field, at if isinstance(value, list) else None)
                    for what, change in _changes(child, put, inside):
                        place = child if hasattr(child, "lineno") else node  # a comprehension has no place of its own
                        yield self._mutant(place, inner, what, change, inside)
                    yield from self._visit(child, inner, inside)

    def _mutant(self, place: ast.AST, scope: str, what: str, change: Change, inside: bool) -> Mutant:
        first, last = getattr(place, "lineno", 1), getattr(place, "end_lineno", 1)
        if isinstance(place, (ast.If, ast.While)):
            last = place.test.end_lineno or last
        line = self._lines[first - 1].strip()
        key = f"{scope}::{line}::{what}"
        self._seen[key] += 1
        return Mutant(self.path, scope or "<module>", line, what, self._seen[key] - 1, first, last, inside, change)


def _is_left_alone(node: ast.AST) -> bool:
    match node:
        case ast.If() if _is_assertion(node):
            return True
        case ast.Raise() | ast.JoinedStr() | ast.Assert() | ast.keyword(arg="strict") | ast.Call(func=ast.Name(id="TypeVar")):
            return True
        case ast.ClassDef(bases=bases):
            return any(isinstance(base, ast.Name) and base.id == "Protocol" for base in map(_plain, bases))
    return False


def _is_assertion(node: ast.If) -> bool:
    match node:
        case ast.If(body=[ast.Raise(exc=ast.Call(func=ast.Name(id="AssertionError")))], orelse=[]):
            return True
    return False


def _plain(base: ast.expr) -> ast.expr:
    return base.value if isinstance(base, ast.Subscript) else base


def _putter(node: ast.AST, field: str, at: int | None) -> Callable[[ast.AST], Change]:
    def put(new: ast.AST) -> Change:
        def change() -> None:
            if at is None:
                setattr(node, field, new)
            else:
                getattr(node, field)[at] = new

        return change

    return put


def _changes(node: ast.AST, put: Callable[[ast.AST], Change], inside: bool) -> Iterator[tuple[str, Change]]:
    if isinstance(node, ast.expr):
        yield from _of_expression(node, put, inside)
    elif isinstance(node, ast.stmt):
        yield from _of_statement(node, put)
    elif isinstance(node, ast.comprehension):
        for at, test in enumerate(node.ifs):
            yield f"not ({ast.unparse(test)})", _putter(node, "ifs", at)(_negated(test))


def _of_expression(node: ast.expr, put: Callable[[ast.AST], Change], inside: bool) -> Iterator[tuple[str, Change]]:
    match node:
        case ast.Compare(ops=ops):
            for at, op in enumerate(ops):
                new = COMPARISONS[type(op)]()
                yield f"{_name(op)} -> {_name(new)}", _putter(node, "ops", at)(new)
        case ast.BoolOp(op=op, values=values):
            other = ast.Or() if isinstance(op, ast.And) else ast.And()
            yield f"{_name(op)} -> {_name(other)}", _putter(node, "op", None)(other)
            for at, value in enumerate(values):
                left = [*values[:at], *values[at + 1 :]]
                yield f"without {ast.unparse(value)}", put(left[0] if len(left) == 1 else ast.BoolOp(op, left))
        case ast.UnaryOp(operand=operand):
            yield f"without {_name(node.op)}", put(operand)
        case ast.BinOp(op=op) if inside or not isinstance(op, ast.BitOr):
            new_op = ARITHMETIC[type(op)]()
            yield f"{_name(op)} -> {_name(new_op)}", _putter(node, "op", None)(new_op)
        case ast.Constant(value=bool(value)):
            yield f"{value} -> {not value}", put(ast.Constant(not value))
        case ast.Constant(value=int(value)):
            yield f"{value} -> {value + 1}", put(ast.Constant(value + 1))
        case ast.IfExp(test=test):
            yield f"not ({ast.unparse(test)})", _putter(node, "test", None)(_negated(test))
        case ast.Call(func=ast.Name(id=name)) if name in CALLS:
            yield f"{name} -> {CALLS[name]}", _putter(node, "func", None)(ast.Name(CALLS[name], ast.Load()))


def _of_statement(node: ast.stmt, put: Callable[[ast.AST], Change]) -> Iterator[tuple[str, Change]]:
    match node:
        case ast.If() if _is_assertion(node):
            return
        case ast.If(test=test) | ast.While(test=test):
            yield f"not ({ast.unparse(test)})", _putter(node, "test", None)(_negated(test))
        case ast.Expr(value=ast.Call()) | ast.Delete() | ast.AugAssign() | ast.Raise():
            yield "left out", put(ast.Pass())
            if isinstance(node, ast.AugAssign) and type(node.op) in ARITHMETIC:
                new = ARITHMETIC[type(node.op)]()
                yield f"{_name(node.op)}= -> {_name(new)}=", _putter(node, "op", None)(new)
        case ast.Assign(targets=targets) if not any(isinstance(part, ast.Name) for target in targets for part in _parts(target)):
            yield "left out", put(ast.Pass())
        case ast.Return(value=value) if value is not None and not isinstance(value, ast.Constant):
            yield "return None", _putter(node, "value", None)(ast.Constant(None))
        case ast.Continue():
            yield "continue -> break", put(ast.Break())
        case ast.Break():
            yield "break -> continue", put(ast.Continue())


def _parts(target: ast.expr) -> list[ast.expr]:
    return target.elts if isinstance(target, ast.Tuple) else [target]


def _negated(test: ast.expr) -> ast.expr:
    return ast.UnaryOp(ast.Not(), test)


SYMBOLS = {
    "Lt": "<", "LtE": "<=", "Gt": ">", "GtE": ">=", "Eq": "==", "NotEq": "!=", "Is": "is", "IsNot": "is not", "In": "in",
    "NotIn": "not in", "Add": "+", "Sub": "-", "Mult": "*", "FloorDiv": "//", "Mod": "%", "Pow": "**", "LShift": "<<", "RShift": ">>",
    "BitAnd": "&", "BitOr": "|", "BitXor": "^", "And": "and", "Or": "or", "Not": "not", "USub": "-", "UAdd": "+", "Invert": "~",
}  # fmt: skip


def _name(op: ast.AST) -> str:
    return SYMBOLS[type(op).__name__]
