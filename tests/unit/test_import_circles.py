"""No modules of envmgr import each other in a circle: each can be read with those below it alone.

Every import counts, also those under `TYPE_CHECKING` and those inside functions: who reads a module
has to read what it imports, whenever Python does so. That Python runs a package's `__init__` before
any module of the package does not count; an import that is written down does.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import envmgr

ROOT = Path(envmgr.__file__).parent

Graph = Mapping[str, frozenset[str]]


def modules_below(root: Path) -> dict[str, Path]:
    """Return the files of a package and of its subpackages, by the names of their modules."""
    found = {}
    for path in root.rglob("*.py"):
        parts = path.relative_to(root.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def graph_of(files: Mapping[str, Path]) -> Graph:
    """Return which of these modules each of them imports."""
    return {name: frozenset(_imports(name, path, files)) for name, path in files.items()}


def _imports(name: str, path: Path, known: Iterable[str]) -> Iterator[str]:
    for node in _statements(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names if one.name in known)
        elif isinstance(node, ast.ImportFrom):
            module = _absolute(name, path, node)
            for one in node.names:
                submodule = f"{module}.{one.name}"
                yield from [submodule] if submodule in known else {module}.intersection(known)


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """Return every statement, however deep; expressions, of which there are most, are left out."""
    for field in ("body", "orelse", "handlers", "finalbody", "cases"):
        below = getattr(node, field, ())
        for one in below if isinstance(below, list) else ():
            yield one
            yield from _statements(one)


def _absolute(name: str, path: Path, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    steps = node.level - (path.stem == "__init__")
    package = name.rsplit(".", steps)[0]
    return f"{package}.{node.module}" if node.module else package


def circles_in(graph: Graph) -> list[str]:
    """Return a line for each group of modules that lead to each other, with one circle of it."""
    below = _all_below(graph)
    groups = {
        frozenset(other for other in below[name] if name in below[other])
        for name in graph
        if name in below[name]
    }
    return sorted(_described(group, graph) for group in groups)


def _all_below(graph: Graph) -> dict[str, frozenset[str]]:
    """Return all modules that each leads to, over however many others."""
    found = {}
    for name in graph:
        reached: set[str] = set()
        ahead = list(graph[name])
        while ahead:
            one = ahead.pop()
            if one not in reached:
                reached.add(one)
                ahead.extend(graph[one])
        found[name] = frozenset(reached)
    return found


def _described(group: frozenset[str], graph: Graph) -> str:
    start = min(group)
    came_from: dict[str, str] = {}
    ahead = [start]
    for one in ahead:  # breadth first: the circle that is found is a shortest one
        for following in sorted(graph[one] & group):
            if following not in came_from:
                came_from[following] = one
                ahead.append(following)
    circle = [start]
    while len(circle) == 1 or circle[-1] != start:
        circle.append(came_from[circle[-1]])
    return f"{len(group)} modules, {', '.join(sorted(group))}: {' -> '.join(reversed(circle))}"


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert circles_in(graph_of(modules_below(ROOT))) == []


def test_every_kind_of_import_is_found(tmp_path: Path) -> None:
    texts = {
        "__init__": "from .top import x\n",
        "top": "import pkg.lazy\n",
        "lazy": "def f():\n    from pkg import typed\n",
        "typed": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from . import sub\n",
        "sub/__init__": "from .deep import x\n",
        "sub/deep": "from .. import x\nimport numpy\n",
        "alone": "from pkg.sub.deep import x\nfrom pkg import x\n",
    }
    (tmp_path / "pkg" / "sub").mkdir(parents=True)
    for name, text in texts.items():
        (tmp_path / "pkg" / f"{name}.py").write_text(text, encoding="utf-8")
    graph = graph_of(modules_below(tmp_path / "pkg"))
    assert graph == {
        "pkg": {"pkg.top"},
        "pkg.top": {"pkg.lazy"},
        "pkg.lazy": {"pkg.typed"},
        "pkg.typed": {"pkg.sub"},
        "pkg.sub": {"pkg.sub.deep"},
        "pkg.sub.deep": {"pkg"},
        "pkg.alone": {"pkg.sub.deep", "pkg"},
    }
    (line,) = circles_in(graph)
    circle = ("pkg", "pkg.top", "pkg.lazy", "pkg.typed", "pkg.sub", "pkg.sub.deep", "pkg")
    assert line == f"6 modules, {', '.join(sorted(circle[1:]))}: {' -> '.join(circle)}"


def test_each_circle_is_named() -> None:
    graph = {
        "a": frozenset("bd"),
        "b": frozenset("c"),
        "c": frozenset("bd"),
        "d": frozenset("e"),
        "e": frozenset("d"),
        "f": frozenset("f"),
        "g": frozenset("a"),
    }
    assert circles_in(graph) == [
        "1 modules, f: f -> f",
        "2 modules, b, c: b -> c -> b",
        "2 modules, d, e: d -> e -> d",
    ]
