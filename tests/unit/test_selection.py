"""Envs that are stepped together: neighbours or not, the same is said of them."""

from __future__ import annotations

import pytest

from envmgr.core import Phase, Selection


@pytest.mark.parametrize("ids", [[1, 2], [2, 0]])
def test_posted_are_those_whose_steps_are_all_posted(ids: list[int]) -> None:
    selection = Selection(ids, [0, 0, 0])
    phases = bytearray([Phase.IDLE] * 3)
    for i in ids:
        assert not selection.is_posted(phases)
        phases[i] = Phase.POSTED
    assert selection.is_posted(phases)


@pytest.mark.parametrize(
    ("ids", "is_slice"), [([1, 2], True), ([2], True), ([0, 2], False), ([2, 1], False)]
)
def test_neighbours_are_a_slice(ids: list[int], is_slice: bool) -> None:
    selection = Selection(ids, [0, 0, 0])
    assert selection.is_slice is is_slice
    assert [0, 1, 2][selection.rows] == ids if is_slice else selection.rows.tolist() == ids
