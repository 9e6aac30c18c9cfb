"""docs/faults.md and the tests of the faults agree."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
PAGE = FOLDER.parents[1] / "docs" / "faults.md"
NUMBERS = range(1, 50)

_TEST = re.compile(r"test_f(\d\d)_\w+")
_ROW = re.compile(r"\| F(\d+) \| (.+) \| (.+) \| (.+) \|")


@functools.cache
def files_by_number() -> dict[int, set[str]]:
    """Return the names of the files in which each fault has a test."""
    files: dict[int, set[str]] = {}
    for path in FOLDER.glob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and (found := _TEST.fullmatch(node.name)):
                files.setdefault(int(found[1]), set()).add(path.name)
    return files


def rows() -> list[tuple[int, list[str]]]:
    """Return the number of each row of the table, and the files that it names."""
    found = map(_ROW.fullmatch, PAGE.read_text(encoding="utf-8").splitlines())
    return [(int(row[1]), row[4].split(", ")) for row in found if row]


@pytest.mark.parametrize("number", NUMBERS, ids="f{:02}".format)
def test_every_fault_has_tests_in_the_files_that_the_table_names(number: int) -> None:
    named = [files for row, files in rows() if row == number]
    assert len(named) == 1, f"F{number} should have one row in {PAGE.name}"
    files = files_by_number().get(number, set())
    assert files, f"no test is called test_f{number:02}_..."
    assert files <= set(named[0]), "the table does not name all files with tests of it"
    missing = [file for file in named[0] if not (FOLDER / file).exists()]
    assert missing == [], "the table names files that are not there"


def test_the_table_has_no_other_rows() -> None:
    assert [number for number, _ in rows()] == [*NUMBERS]
    assert set(files_by_number()) <= set(NUMBERS)
