"""Asserts count, also under `python -O`: pytest rewrites them in tests and in their helpers."""

from __future__ import annotations

from types import ModuleType

import pytest

from tests.contract import harness
from tests.faults import others
from tests.property import hosts
from tests.unit import collect_fakes


def test_an_assert_that_does_not_hold_fails() -> None:
    value = 1
    with pytest.raises(AssertionError, match="assert 1 == 2"):
        assert value == 2


@pytest.mark.parametrize(
    "helper", [harness, others, hosts, collect_fakes], ids=lambda m: m.__name__
)
def test_the_asserts_of_helpers_are_rewritten(helper: ModuleType) -> None:
    assert type(helper.__loader__).__name__ == "AssertionRewritingHook"
