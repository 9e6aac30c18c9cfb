"""The table of envs: what is asked of it, and that nobody else writes it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import envmgr.core
from envmgr.core import EnvTable, Phase
from envmgr.core.phases import BEFORE_THE_CALLER, BEHIND_THE_CALLER, REPAIRED, Change
from envmgr.lifecycle import EnvState, Event


def table_of(*phases: Phase) -> EnvTable:
    """Return a table of envs whose hosts are in these phases."""
    table = EnvTable(len(phases))
    table.phases.column[:] = bytes(phases)
    return table


@pytest.mark.parametrize("phase", Phase, ids=lambda x: x.name)
def test_what_goes_on_behind_the_caller_is_found_in_the_column(phase: Phase) -> None:
    table = table_of(Phase.IDLE, phase)
    assert bool(table.phases.column.translate(None, BEFORE_THE_CALLER)) is (
        phase in BEHIND_THE_CALLER
    )
    assert table.any_repaired is (phase in REPAIRED)


def test_the_states_of_spares_are_asked_for_one_by_one_and_not_listed() -> None:
    table = EnvTable(2, 1)
    table.launched(range(3))
    table.happened(2, Event.BEGIN_RESET)
    assert table.states[2] is EnvState.RESET
    assert table.env_states() == (EnvState.INIT, EnvState.INIT)


def test_a_list_of_states_does_not_change_afterwards() -> None:
    table = EnvTable(1)
    table.launched([0])
    states = table.env_states()
    table.happened(0, Event.FAILED)
    assert (states, table.states[0]) == ((EnvState.INIT,), EnvState.ERROR)


def test_what_is_out_of_the_ordinary_about_a_reset_is_forgotten_when_that_has_succeeded() -> None:
    table = EnvTable(2)
    table.launched(range(2))
    for env_id in range(2):
        table.happened(env_id, Event.BEGIN_RESET)
        table.changed(env_id, Change.RESET)
    env = table.envs[0]
    env.seed, env.attempts, env.renewals_in_a_row, env.new_generation = 7, 1, 2, True
    table.observed.began = lambda places: None  # type: ignore[method-assign]
    table.episodes_begun({0: 0, 1: 0}, {1: {"level": 3}})
    assert not table.next_resets
    assert (env.seed, env.attempts, env.new_generation) == (None, 0, False)
    assert [s.reset_info for s in table.envs] == [{}, {"level": 3}]
    assert table.env_states() == (EnvState.RUN,) * 2


def test_nobody_else_applies_a_transition() -> None:
    transitions = {"apply", "apply_all", "apply_at", "apply_rows"}
    callers = {
        module.name
        for module in Path(envmgr.core.__path__[0]).glob("*.py")
        for node in ast.walk(ast.parse(module.read_text("utf-8")))
        if isinstance(node, ast.Attribute) and node.attr in transitions
    }
    assert callers == {"table.py"}
