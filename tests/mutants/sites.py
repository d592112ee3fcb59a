"""Seeded mutants of the product: small faults, one at a time, which some test should notice."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PRODUCTION = ("model_repository", "build", "client", "tools")
COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
    ast.Mod: ast.Mult,
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    path: str
    """Of the file, from the root of the checkout."""
    line: int
    old: str
    new: str
    start: int
    """Offset of the old text in the file, in bytes."""
    function: str
    """Qualified name of the outermost function that holds it, or "" for what runs at import."""

    def __str__(self) -> str:
        return f"{self.path}:{self.line} {' '.join(self.old.split())[:60]!r} -> {self.new[:60]!r}"

    def source(self, root: Path) -> str:
        """Return the whole file with the fault in it."""
        data = (root / self.path).read_bytes()
        end = self.start + len(self.old.encode())
        if data[self.start : end].decode() != self.old:
            raise LookupError(f"{self}: the file has changed")
        return (data[: self.start] + self.new.encode() + data[end:]).decode()


def production_files(root: Path) -> list[str]:
    found = (path for folder in PRODUCTION for path in (root / folder).rglob("*.py"))
    return sorted(str(path.relative_to(root)) for path in found)


def mutants_of(root: Path, path: str) -> Iterator[Mutant]:
    data = (root / path).read_bytes()
    starts = [0]
    for line in data.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for node, function, is_test in _nodes(ast.parse(data), ""):
        for new in _faults(node, is_test):
            start = starts[node.lineno - 1] + node.col_offset
            end = starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
            yield Mutant(path, node.lineno, data[start:end].decode(), new, start, function)


def _nodes(node: ast.AST, function: str, scope: str = "") -> Iterator[tuple[ast.expr | ast.stmt, str, bool]]:
    """Yield what runs, the function it runs in, and whether a branch hangs on it.

    What an f-string holds has wrong offsets in Python 3.11.
    """
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "type_comment") or isinstance(node, ast.JoinedStr):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST):
                continue
            inner, own = scope, function
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                inner = f"{scope}.{child.name}" if scope else child.name
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and name == "body":
                own = function or scope
            if isinstance(child, ast.expr | ast.stmt):
                yield child, own, name == "test"
            yield from _nodes(child, own, inner)


def _faults(node: ast.AST, is_test: bool) -> Iterator[str]:
    """Yield what may stand in the node's place."""
    match node:
        case ast.Name() | ast.Attribute() | ast.Call() if is_test:
            yield f"(not {ast.unparse(node)})"
        case ast.Compare(left, [operator], rest) if type(operator) in COMPARISONS:
            yield f"({ast.unparse(ast.Compare(left, [COMPARISONS[type(operator)]()], rest))})"
        case ast.BoolOp(operator, values):
            other = ast.Or() if isinstance(operator, ast.And) else ast.And()
            yield f"({ast.unparse(ast.BoolOp(other, values))})"
        case ast.UnaryOp(ast.Not(), operand):
            yield f"bool({ast.unparse(operand)})"
        case ast.BinOp(left, operator, right) if type(operator) in ARITHMETIC and not _is_text(left, right):
            yield f"({ast.unparse(ast.BinOp(left, ARITHMETIC[type(operator)](), right))})"
        case ast.Constant(bool() as value):
            yield str(not value)
        case ast.Constant(int() as value):
            yield f"({value + 1})"
        case ast.IfExp(test, body, orelse):
            yield f"({ast.unparse(ast.IfExp(test, orelse, body))})"
        case ast.Return(value) if value and not (isinstance(value, ast.Constant) and value.value is None):
            yield "return None"
        case ast.Expr(ast.Call()) | ast.Raise() | ast.Continue() | ast.Break() | ast.AugAssign():
            yield "pass"
        case ast.Assign([ast.Attribute() | ast.Subscript()], _):
            yield "pass"


def _is_text(*operands: ast.expr) -> bool:
    return any(isinstance(one, ast.JoinedStr) or isinstance(getattr(one, "value", 0), str) for one in operands)
