"""Mutants: the code with one thing wrong in it, as fixed operators make them; see `mutants.py`."""

from __future__ import annotations

import ast
import contextlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

COMPARISONS = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.Gt: ast.LtE,
    ast.LtE: ast.Gt, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
ARITHMETIC = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd}


@dataclass(frozen=True)
class Mutant:
    """One change.

    Attributes:
        path: of the file, from the root of the repository.
        operator: what was changed.
        line: where the changed piece begins.
        begin: its first byte in the file.
        end: one after its last.
        new: what stands there instead.
        span: first and last line of the statement; of the function for its defaults; None for what
            is run by the import, and concerns the whole file.
    """

    path: str
    operator: str
    line: int
    begin: int
    end: int
    new: str
    span: tuple[int, int] | None = None

    def applied(self, source: bytes) -> bytes:
        """Return the changed file."""
        return source[: self.begin] + self.new.encode() + source[self.end :]


class _Finder:
    """Finds every mutant of one file."""

    def __init__(self, path: str, source: bytes) -> None:
        self._path = path
        self._starts = [0]
        for line in source.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self._found: list[Mutant] = []
        self._span: tuple[int, int] | None = None
        self._in_function = False
        self._visit(ast.parse(source))

    def found(self) -> list[Mutant]:
        """Return them, in the order of the file."""
        return self._found

    def _add(self, operator: str, node: ast.expr | ast.stmt, new: ast.AST | str) -> None:
        begin = self._starts[node.lineno - 1] + node.col_offset
        end = self._starts[(node.end_lineno or 1) - 1] + (node.end_col_offset or 0)
        text = new if isinstance(new, str) else ast.unparse(new)
        if isinstance(node, ast.expr) and not isinstance(node, ast.Constant):
            text = f"({text})"
        span = self._span
        self._found.append(Mutant(self._path, operator, node.lineno, begin, end, text, span))

    def _visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.JoinedStr):  # texts are for people, and have no places before 3.12
            return
        if isinstance(node, ast.expr):
            self._expression(node)
        elif isinstance(node, ast.stmt):
            self._enter(node)
            self._statement(node)
        was_in_function = self._in_function
        self._in_function |= isinstance(node, (ast.FunctionDef, ast.Lambda))
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list", "bases", "exc"):
                continue
            for part in value if isinstance(value, list) else [value]:
                if isinstance(part, ast.AST):
                    self._visit(part)
        self._in_function = was_in_function

    def _enter(self, node: ast.stmt) -> None:
        """Note which lines are run when what belongs to the statement itself is."""
        body = getattr(node, "body", None)
        if isinstance(node, ast.FunctionDef):
            self._span = (node.body[0].lineno, node.end_lineno or 0)
        elif not self._in_function:
            self._span = None
        elif body:
            self._span = (node.lineno, max(node.lineno, body[0].lineno - 1))
        else:
            self._span = (node.lineno, node.end_lineno or 0)

    def _expression(self, node: ast.expr) -> None:
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            operator = COMPARISONS[type(node.ops[0])]()
            self._add("comparison", node, ast.Compare(node.left, [operator], node.comparators))
        elif isinstance(node, ast.BoolOp):
            other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
            self._add("and/or", node, ast.BoolOp(other, node.values))
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            self._add("not", node, node.operand)
        elif isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
            operator_type = ARITHMETIC[type(node.op)]
            self._add("arithmetic", node, ast.BinOp(node.left, operator_type(), node.right))
        elif isinstance(node, ast.IfExp):
            self._add("branches", node, ast.IfExp(node.test, node.orelse, node.body))
        elif isinstance(node, ast.Constant):
            self._constant(node)

    def _constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._add("bool", node, repr(not node.value))
        elif isinstance(node.value, (int, float)):
            self._add("+1", node, f"{node.value + 1!r}")
            self._add("-1", node, f"({node.value - 1!r})")

    def _statement(self, node: ast.stmt) -> None:
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node, (ast.Expr, ast.Assign, ast.AugAssign, ast.Delete)) and not is_text:
            self._add("no statement", node, "pass")
        elif isinstance(node, ast.Return) and ast.unparse(node) not in ("return", "return None"):
            self._add("return None", node, "return None")


def mutants_of(root: Path, paths: Sequence[str]) -> Iterator[Mutant]:
    """Return every mutant of the files, and of those in the folders."""
    for path in (root / one for one in paths):
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            yield from _Finder(str(file.relative_to(root)), file.read_bytes()).found()


def drawn_of(every: Sequence[Mutant], count: int, root: Path, draw: random.Random) -> list[Mutant]:
    """Return some mutants that still compile."""
    found: list[Mutant] = []
    for mutant in draw.sample(every, len(every)):
        if len(found) == count:
            break
        with contextlib.suppress(SyntaxError):
            compile(mutant.applied((root / mutant.path).read_bytes()), mutant.path, "exec")
            found.append(mutant)
    return found
