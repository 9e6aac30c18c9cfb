"""The table of phases: exactly these changes, and nothing changes by any other."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from envmgr.core.phases import AWAITED, CHANGES, Change, Phase
from envmgr.errors import IllegalTransitionError
from envmgr.lifecycle import TransitionTable, edges, leads_from_everywhere, mermaid_diagram
from tests.cases import for_each

I, B, R, P, S, X, C, E, W = (  # noqa: E741 - letters keep the table below readable as a table
    Phase.IDLE,
    Phase.STARTING,
    Phase.RESETTING,
    Phase.POSTED,
    Phase.STEPPING,
    Phase.CANCELLING,
    Phase.CALLING,
    Phase.ENDING,
    Phase.PAUSING,
)


PHASES = (I, B, R, P, S, X, C, E, W)


# What each change does in IDLE, STARTING, RESETTING, POSTED, STEPPING, CANCELLING, CALLING, ENDING,
# PAUSING; None: it is illegal. Written out a second time on purpose: whoever changes the table has
# to change this one too.
EXPECTED = {
    Change.BUILD: (B, None, None, None, B, B, None, B, B),
    Change.RESET: (R, None, R, None, R, R, None, R, R),
    Change.POST: (P, None, None, P, None, None, None, None, None),
    Change.STEP: (S, None, None, None, S, None, None, None, None),
    Change.TAKE_OVER: (None, None, None, S, None, None, None, None, None),
    Change.CANCEL: (None, None, None, None, X, None, None, None, None),
    Change.CALL: (C, None, None, None, None, None, None, None, None),
    Change.END: (E, E, E, E, E, E, E, E, E),
    Change.PAUSE: (W, W, W, W, W, W, W, W, W),
    Change.SETTLE: (I, I, I, I, I, I, I, I, I),
}
FROM_EVERYWHERE = {Change.END, Change.PAUSE, Change.SETTLE}
PAIRS = list(itertools.product(Phase, Change))


def expected(phase: Phase, change: Change) -> Phase | None:
    return EXPECTED[change][PHASES.index(phase)]


def table_in(*phases: Phase) -> TransitionTable[Phase, Change]:
    """Return a table of envs in these phases."""
    table = TransitionTable(CHANGES, Phase, len(phases))
    table.column[:] = bytes(phases)
    return table


def test_every_change_and_phase_is_in_the_expected_table() -> None:
    assert set(EXPECTED) == set(Change) == set(CHANGES)
    assert set(PHASES) == set(Phase)


@for_each("phase, change", PAIRS)
def test_a_change_leads_where_the_table_says_or_raises_and_changes_nothing(
    phase: Phase, change: Change
) -> None:
    table, target = table_in(phase, I), expected(phase, change)
    if target is None:
        with pytest.raises(IllegalTransitionError, match=rf"^env 0 is in {phase.name}, "):
            table.apply(0, change)
    else:
        table.apply(0, change)
    assert table[0] is (phase if target is None else target)
    assert table[1] is I


@pytest.mark.parametrize("change", Change, ids=lambda x: x.name)
def test_a_batch_is_changed_whole_or_not_at_all(change: Change) -> None:
    legal = next(phase for phase in PHASES if expected(phase, change) is not None)
    for odd in PHASES:
        before = (legal, legal, odd)
        targets = [expected(phase, change) for phase in before]
        by_ids, by_rows, at_rows = (table_in(*before) for _ in range(3))
        if None in targets:
            with pytest.raises(IllegalTransitionError, match=r"^env 2 is in"):
                by_ids.apply_all([0, 1, 2], change)
            with pytest.raises(IllegalTransitionError, match=r"^env 2 is in"):
                by_rows.apply_rows(slice(0, 3), change)
            with pytest.raises(IllegalTransitionError, match=r"^env 2 is in"):
                at_rows.apply_at(np.arange(3), change)
            targets = list(before)
        else:
            by_ids.apply_all([0, 1, 2], change)
            by_rows.apply_rows(slice(0, 3), change)
            at_rows.apply_at(np.arange(3), change)
        assert [at_rows[i] for i in range(3)] == targets
        assert [by_ids[i] for i in range(3)] == targets
        assert [by_rows[i] for i in range(3)] == targets


def test_all_envs_and_spares_begin_idle() -> None:
    assert set(TransitionTable(CHANGES, Phase, 3).column) == {Phase.IDLE}


def test_the_table_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        CHANGES[Change.POST] = {}  # type: ignore[index]


def test_nothing_that_is_awaited_is_posted_over() -> None:
    free = {phase for phase in PHASES if expected(phase, Change.POST) is not None}
    assert free & AWAITED == set()
    assert {B, R, S, X, C} == AWAITED


def test_every_phase_has_a_label_and_users_are_not_told_how_steps_travel() -> None:
    assert all(phase.label for phase in Phase)
    assert P.label == S.label == "step"


def test_edges_are_all_of_the_table() -> None:
    found = edges(CHANGES)
    assert set(found) == {
        (phase, change, target)
        for phase, change in PAIRS
        if (target := expected(phase, change)) is not None
    }
    assert len(found) == len(set(found))


def test_what_leads_from_everywhere_is_told_from_what_is_legal_everywhere() -> None:
    found = {change for change in Change if leads_from_everywhere(CHANGES[change], Phase)}
    assert found == FROM_EVERYWHERE
    assert not leads_from_everywhere({phase: phase for phase in Phase}, Phase)


def test_the_diagram_shows_every_edge_but_those_that_exist_from_everywhere() -> None:
    lines = mermaid_diagram(CHANGES, Phase).splitlines()
    assert lines[:2] == ["stateDiagram-v2", "    [*] --> IDLE"]
    shown = {
        f"    {phase.name} --> {target.name}: {change.value}"
        for phase, change in PAIRS
        if change not in FROM_EVERYWHERE and (target := expected(phase, change)) is not None
    }
    assert set(lines[2:]) == shown
    assert len(lines[2:]) == len(shown)


def test_every_phase_can_be_reached_and_left() -> None:
    found = edges(CHANGES)
    assert {target for _, _, target in found} == set(Phase)
    assert {source for source, _, target in found if source is not target} == set(Phase)
