"""Envs that are stepped together: neighbours or not, the same is said of them."""

from __future__ import annotations

import pytest

from envmgr.core import Selection
from envmgr.core.phases import Change, PhaseTable
from tests.rig import Rig


@pytest.mark.parametrize("ids", [[1, 2], [2, 0]])
def test_posted_are_those_whose_steps_are_all_posted(ids: list[int]) -> None:
    selection = Selection(ids)
    phases = PhaseTable(3)
    for i in ids:
        assert not selection.is_posted(phases)
        phases.apply(i, Change.POST)
    assert selection.is_posted(phases)


@pytest.mark.parametrize(
    ("ids", "is_slice"), [([1, 2], True), ([2], True), ([0, 2], False), ([2, 1], False)]
)
def test_neighbours_are_a_slice(ids: list[int], is_slice: bool) -> None:
    selection = Selection(ids)
    assert selection.is_slice is is_slice
    assert [0, 1, 2][selection.rows] == ids if is_slice else selection.rows.tolist() == ids


def test_the_rows_of_neighbours_are_cut_out_where_steps_are_posted() -> None:
    rig = Rig(3, has_block=True).launch()
    assert rig.selection([1, 2]).window is not None
    assert rig.selection([2, 1]).window is None
    assert Rig(2, has_block=False).launch().selection([0, 1]).window is None


def test_an_interrupt_leaves_none_with_the_hosts_of_before(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(2, spare_num=1).launch()
    before = rig.selection([0])

    def interrupt() -> None:
        raise KeyboardInterrupt

    rig.hosts.table.moves += 1  # a spare has taken somebody's place
    with monkeypatch.context() as patch:
        patch.setattr(rig.supervisor.selections, "_forget", interrupt)
        with pytest.raises(KeyboardInterrupt):
            rig.selection([0])
    assert rig.selection([0]) is not before
