"""The table of envs: what is asked of it, and that nobody else writes it."""

from __future__ import annotations

import pytest

from envmgr.core import Phase, Record
from envmgr.core.phases import BEHIND_THE_CALLER, REPAIRED, Change
from envmgr.lifecycle import EnvState, Event


def record_of(*phases: Phase) -> Record:
    """Return a table of envs whose hosts are in these phases."""
    record = Record(len(phases))
    record.phases.column[:] = bytes(phases)
    return record


@pytest.mark.parametrize("phase", Phase, ids=lambda x: x.name)
def test_what_goes_on_behind_the_caller_is_found_in_the_column(phase: Phase) -> None:
    record = record_of(Phase.IDLE, phase)
    assert record.any_behind_the_caller is (phase in BEHIND_THE_CALLER)
    assert record.any_repaired is (phase in REPAIRED)


def test_the_states_of_spares_are_asked_for_one_by_one_and_not_listed() -> None:
    record = Record(2, 1)
    record.launched(range(3))
    record.happened(2, Event.BEGIN_RESET)
    assert record.states[2] is EnvState.RESET
    assert record.env_states() == (EnvState.INIT, EnvState.INIT)


def test_a_list_of_states_does_not_change_afterwards() -> None:
    record = Record(1)
    record.launched([0])
    states = record.env_states()
    record.happened(0, Event.FAILED)
    assert (states, record.states[0]) == ((EnvState.INIT,), EnvState.ERROR)


def test_what_is_out_of_the_ordinary_about_a_reset_is_forgotten_when_that_has_succeeded() -> None:
    record = Record(2)
    record.launched(range(2))
    for env_id in range(2):
        record.happened(env_id, Event.BEGIN_RESET)
        record.changed(env_id, Change.RESET)
    slot = record.slots[0]
    slot.seed, slot.attempts, slot.renewals_in_a_row, slot.new_generation = 7, 1, 2, True
    record.observed.began = lambda places: None  # type: ignore[method-assign]
    record.episodes_begun({0: 0, 1: 0}, {1: {"level": 3}})
    assert not record.next_resets
    assert (slot.seed, slot.attempts, slot.new_generation) == (None, 0, False)
    assert [s.reset_info for s in record.slots] == [{}, {"level": 3}]
    assert record.env_states() == (EnvState.RUN,) * 2
