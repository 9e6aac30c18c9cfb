"""Asserts count, also under `python -O`: pytest rewrites them in tests and in their helpers."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]


def test_an_assert_that_does_not_hold_fails() -> None:
    value = 1
    with pytest.raises(AssertionError, match="assert 1 == 2"):
        assert value == 2


def test_the_asserts_of_helpers_are_rewritten() -> None:
    as_they_are = []
    for path in TESTS.rglob("*.py"):
        if "    assert " in path.read_text():
            names = path.relative_to(TESTS.parent).with_suffix("").parts
            spec = importlib.util.find_spec(".".join(names))
            assert spec is not None
            if type(spec.loader).__name__ != "AssertionRewritingHook":
                as_they_are.append(spec.name)
    assert as_they_are == []
