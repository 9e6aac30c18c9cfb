"""`for_each` runs every case, with the fixtures of its test, and says which one fails."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cases import for_each


def test_every_case_is_run_with_fixtures_and_other_parameters() -> None:
    seen: list[Any] = []

    @for_each("a, b", [(1, 2), (3, 4)])
    def test(tmp_path: str, a: int, b: int) -> None:
        seen.append((tmp_path, a, b))

    test(tmp_path="here")
    assert seen == [("here", 1, 2), ("here", 3, 4)]


class TestInClasses:
    seen: tuple[int, ...] = ()

    @pytest.mark.parametrize("factor", [1, 10])
    @for_each("case", (1, 2))
    def test_every_case_is_run(self, case: int, factor: int) -> None:
        self.seen += (case * factor,)
        assert self.seen == (1 * factor, 2 * factor)[: len(self.seen)]


def test_a_case_that_fails_fails_the_test_and_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    @for_each("case", ["good", "bad", "never"])
    def test(case: str) -> None:
        assert case == "good"

    with pytest.raises(AssertionError):
        test()
    assert capsys.readouterr().out == "in the case 'bad'\n"


def test_no_cases_are_a_mistake() -> None:
    @for_each("case", [])
    def test(case: str) -> None: ...

    with pytest.raises(AssertionError, match="no cases"):
        test()
