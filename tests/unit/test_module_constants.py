"""No constant of a module is given twice: the later one would count for both, and nobody see it."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import envmgr

ROOT = Path(envmgr.__file__).parent


def given_in(body: list[ast.stmt]) -> Iterator[str]:
    """Give the names that statements assign to, without those that are assigned nothing."""
    for node in body:
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            targets = [node.target]
        for target in targets:
            for name in target.elts if isinstance(target, ast.Tuple) else (target,):
                if isinstance(name, ast.Name):
                    yield name.id


def test_no_constant_is_given_twice() -> None:
    twice = {}
    for path in sorted(ROOT.rglob("*.py")):
        counts = Counter(given_in(ast.parse(path.read_text(encoding="utf-8")).body))
        if names := [name for name, count in counts.items() if count > 1]:
            twice[str(path.relative_to(ROOT))] = names
    assert not twice


def test_one_that_is_given_twice_is_found() -> None:
    source = "A = 1\nB, C = 2, 3\nD: int\nA = 4\nC: int = 5\nD = 6"
    counts = Counter(given_in(ast.parse(source).body))
    assert counts == {"A": 2, "B": 1, "C": 2, "D": 1}
