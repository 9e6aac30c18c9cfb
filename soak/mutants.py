"""How much of what is wrong the tests find: mutants of the code, and which tests kill them.

    python soak/mutants.py envmgr/core envmgr/wire envmgr/worker --count 300 --seed 1

Draws mutants with fixed operators and a seed, so that the same draw can be made again, also over
another state of the code. Each is run in a copy of the repository: first against the unit tests,
then the property tests (two minutes at most for each); what survives both is run against those
contract tests that run the changed line, as a run of them under a tracer has found (`--lines` keeps
what it found). A run that does not end in time counts as killed: the machine should be idle. Prints
each mutant as a diff of one line, and what killed it; then the shares.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
SUITES = ("unit", "property")
LIMIT_S = 120.0
CONTRACT_LIMIT_S = 300.0
MOST_CONTRACT_TESTS = 60
"""A line that more tests run is met by so many of them, drawn with the seed."""

COMPARISONS = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.Gt: ast.LtE,
    ast.LtE: ast.Gt, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
ARITHMETIC = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd}

Lines = dict[tuple[str, int], list[str]]
"""The tests that run a line, by the file's path below `envmgr/` and the line's number."""


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
    """

    path: str
    operator: str
    line: int
    begin: int
    end: int
    new: str

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
        self._found.append(Mutant(self._path, operator, node.lineno, begin, end, text))

    def _visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.JoinedStr):  # texts are for people, and have no places before 3.12
            return
        if isinstance(node, ast.expr):
            self._expression(node)
        elif isinstance(node, ast.stmt):
            self._statement(node)
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list", "bases", "exc"):
                continue
            for part in value if isinstance(value, list) else [value]:
                if isinstance(part, ast.AST):
                    self._visit(part)

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


def mutants_of(paths: Sequence[Path]) -> Iterator[Mutant]:
    """Return every mutant of the files, and of those in the folders, that still compiles."""
    for path in paths:
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            source = file.read_bytes()
            for mutant in _Finder(str(file.relative_to(ROOT)), source).found():
                try:
                    compile(mutant.applied(source), mutant.path, "exec")
                except SyntaxError:
                    continue
                yield mutant


# -- running tests --------------------------------------------------------------------------------


def _pytest(
    folder: Path, arguments: Sequence[str], limit_s: float, **environ: str
) -> tuple[int | None, str]:
    """Run tests; return the exit code (None: not in time) and the first that failed."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--tb=no"]
    process = subprocess.Popen(
        [*command, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1", **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        process.communicate()
        return None, "not in time"
    failed = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return process.returncode, failed[0][:120] if failed else ""


def killed_by(folder: Path, mutant: Mutant, lines: Lines, draw: random.Random) -> tuple[str, str]:
    """Return which tests kill a mutant that was written into `folder`, and how; "" for none."""
    for suite in SUITES:
        code, how = _pytest(folder, [f"tests/{suite}"], LIMIT_S)
        if code != 0:
            return suite, how
    tests = lines.get((mutant.path.removeprefix("envmgr/"), mutant.line), [])
    if not tests:
        return "", "no contract test runs it"
    if len(tests) > MOST_CONTRACT_TESTS:
        tests = draw.sample(tests, MOST_CONTRACT_TESTS)
    code, how = _pytest(folder, tests, CONTRACT_LIMIT_S)
    return ("contract", how) if code != 0 else ("", f"{len(tests)} contract tests run it")


def lines_run(out: Path, selection: str) -> Lines:
    """Return the contract tests that run each line; from `out`, or after a run under a tracer."""
    if not out.is_dir():
        out.mkdir(parents=True)
        tests = ["tests/contract", "-p", "lines", "-o", "faulthandler_timeout=0", "--timeout=600"]
        paths = os.pathsep.join((str(ROOT), str(HERE)))
        chosen = ["-k", selection] if selection else []
        subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "--tb=no", *tests, *chosen],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": paths, "LINES_OUT": str(out.resolve())},
            check=False,
        )
    found: defaultdict[tuple[str, int], dict[str, None]] = defaultdict(dict)
    for file in out.iterdir():
        for entry in file.read_text(encoding="utf-8").splitlines():
            path, line, test = entry.split("\t")
            found[path, int(line)][test] = None
    return {key: sorted(tests) for key, tests in found.items()}


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("paths", nargs="+", type=Path, help="files, or folders with them")
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lines", type=Path, help="folder with which tests run which lines")
    parser.add_argument("--contract", default="", help="only contract tests with this -k")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw mutants, run tests against them, and print what they find."""
    options = parse(arguments)
    every = list(mutants_of([path.resolve() for path in options.paths]))
    draw = random.Random(options.seed)
    drawn = draw.sample(every, min(options.count, len(every)))
    print(f"{len(drawn)} of {len(every)} mutants, seed {options.seed}", flush=True)
    killed: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as temporary:
        lines = lines_run(options.lines or Path(temporary) / "lines", options.contract)
        folder = Path(temporary) / "copy"
        skipped = shutil.ignore_patterns(".git", ".venv*", "__pycache__", ".*_cache", ".hypothesis")
        shutil.copytree(ROOT, folder, ignore=skipped)
        for suite in SUITES:
            code, how = _pytest(folder, [f"tests/{suite}"], LIMIT_S)
            if code != 0:
                print(f"tests/{suite} fails without a mutant: {how}")
                return 1
        for number, mutant in enumerate(drawn):
            target, source = folder / mutant.path, (ROOT / mutant.path).read_bytes()
            target.write_bytes(mutant.applied(source))
            suite, how = killed_by(folder, mutant, lines, draw)
            target.write_bytes(source)
            killed[suite] += 1
            old = source[mutant.begin : mutant.end].decode().splitlines()[0]
            print(
                f"{number:3} {mutant.path}:{mutant.line} {mutant.operator}: {old} -> {mutant.new}"
            )
            print(f"    {suite or 'SURVIVED'}: {how}", flush=True)
    for suite in (*SUITES, "contract", ""):
        share = killed[suite] / max(len(drawn), 1)
        print(f"{suite or 'survived':10} {killed[suite]:4} {share:6.1%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
