"""The table of states and events: exactly these edges, and nothing changes by any other event."""

from __future__ import annotations

import itertools

import pytest

from envmgr.errors import IllegalTransitionError
from envmgr.lifecycle import (
    TRANSITIONS,
    EnvState,
    Event,
    TransitionTable,
    edges,
    mermaid_diagram,
)
from tests.cases import for_each

V, I, R, S, N, D, E = (  # noqa: E741 - letters keep the table below readable as a table
    EnvState.VOID,
    EnvState.INIT,
    EnvState.RUN,
    EnvState.RESET,
    EnvState.NEED_RESET,
    EnvState.DONE,
    EnvState.ERROR,
)
STATES = (V, I, R, S, N, D, E)

# What each event does in VOID, INIT, RUN, RESET, NEED_RESET, DONE, ERROR; None: it is illegal.
# Written out a second time on purpose: whoever changes the table has to change this one too.
EXPECTED = {
    Event.LAUNCH: (I, None, None, None, None, None, None),
    Event.BEGIN_RESET: (None, S, S, S, S, S, S),
    Event.RESET_SUCCEEDED: (None, None, None, R, None, None, None),
    Event.STEPPED: (None, None, R, None, None, None, None),
    Event.EPISODE_ENDED: (None, None, S, None, None, None, None),
    Event.EPISODE_ENDED_UNATTENDED: (None, None, N, None, None, None, None),
    Event.BUDGET_SPENT: (None, None, D, None, None, None, None),
    Event.FAILED: (None, E, E, E, E, None, None),
    Event.RENEW: (None, None, None, None, None, None, I),
    Event.REPAIRED_UNATTENDED: (None, N, None, None, None, None, N),
    Event.DROP: (None, None, None, None, None, None, D),
    Event.CLOSE: (V, V, V, V, V, V, V),
}
PAIRS = list(itertools.product(EnvState, Event))


def expected(state: EnvState, event: Event) -> EnvState | None:
    return EXPECTED[event][STATES.index(state)]


def table_of(count: int) -> TransitionTable[EnvState, Event]:
    return TransitionTable(TRANSITIONS, EnvState, count)


def table_in(state: EnvState, env_num: int = 1) -> TransitionTable[EnvState, Event]:
    """Return a table whose envs are in `state`, brought there by legal events."""
    ways = {
        V: (),
        I: (Event.LAUNCH,),
        R: (Event.LAUNCH, Event.BEGIN_RESET, Event.RESET_SUCCEEDED),
        S: (Event.LAUNCH, Event.BEGIN_RESET),
        N: (
            Event.LAUNCH,
            Event.BEGIN_RESET,
            Event.RESET_SUCCEEDED,
            Event.EPISODE_ENDED_UNATTENDED,
        ),
        D: (Event.LAUNCH, Event.BEGIN_RESET, Event.RESET_SUCCEEDED, Event.BUDGET_SPENT),
        E: (Event.LAUNCH, Event.FAILED),
    }
    table = table_of(env_num)
    for event in ways[state]:
        table.apply_all(range(env_num), event)
    return table


def test_every_event_and_state_is_in_the_expected_table() -> None:
    assert set(EXPECTED) == set(Event) == set(TRANSITIONS)
    assert set(STATES) == set(EnvState)


@for_each("state, event", PAIRS)
def test_an_event_leads_where_the_table_says_or_raises_and_changes_nothing(
    state: EnvState, event: Event
) -> None:
    table = table_in(state)
    target = expected(state, event)
    if target is None:
        with pytest.raises(IllegalTransitionError):
            table.apply(0, event)
        assert table[0] is state
    else:
        table.apply(0, event)
        assert table[0] is target


@pytest.mark.parametrize("event", Event, ids=lambda x: x.name)
def test_a_batch_is_applied_whole_or_not_at_all(event: Event) -> None:
    legal = [s for s in STATES if expected(s, event) is not None]
    illegal = [s for s in STATES if expected(s, event) is None]
    if not illegal:
        return
    for bad_at in (0, 1, 2):
        states = [legal[0]] * 3
        states[bad_at] = illegal[0]
        table = table_of(3)
        table.column[:] = bytes(states)
        with pytest.raises(IllegalTransitionError):
            table.apply_all([0, 1, 2], event)
        assert [table[i] for i in range(3)] == states


def test_a_batch_changes_the_envs_it_names_and_no_other() -> None:
    table = table_in(I, env_num=4)
    table.apply_all(iter((3, 1)), Event.BEGIN_RESET)
    assert tuple(map(table.__getitem__, range(len(table.column)))) == (I, S, I, S)


def test_events_of_one_env_leave_the_others_alone() -> None:
    table = table_in(S, env_num=3)
    table.apply(1, Event.RESET_SUCCEEDED)
    assert tuple(map(table.__getitem__, range(len(table.column)))) == (S, R, S)


def test_all_envs_begin_in_void() -> None:
    table = table_of(3)
    assert tuple(map(table.__getitem__, range(len(table.column)))) == (V, V, V)


def test_ids_in_a_state_are_ascending() -> None:
    table = table_of(5)
    table.column[:] = bytes([R, S, R, D, N])
    assert table.ids_in(R) == [0, 2]
    assert table.ids_in(N) == [4]
    assert table.ids_in(V) == []


def test_the_error_names_the_env_its_state_the_event_and_where_it_is_legal() -> None:
    with pytest.raises(IllegalTransitionError) as caught:
        table_in(V, env_num=4).apply(3, Event.RENEW)
    text = str(caught.value)
    assert "env 3 is in VOID, where RENEW (worker or env renewed) is not legal" in text
    assert "it is legal in ERROR." in text


@for_each("state, event", PAIRS)
def test_neighbours_are_moved_together_or_not_at_all(state: EnvState, event: Event) -> None:
    table = table_in(state, env_num=4)
    table.column[2] = V if event is Event.LAUNCH else I
    target, odd = expected(state, event), expected(EnvState(table.column[2]), event)
    before = bytes(table.column)
    if target is None or odd is None:
        first = 1 if target is None else 2
        with pytest.raises(IllegalTransitionError, match=rf"^env {first} is in"):
            table.apply_rows(slice(1, 3), event)
        assert table.column == before
    else:
        table.apply_rows(slice(1, 3), event)
        assert table.column == bytes([state, target, odd, state])


def test_the_table_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        TRANSITIONS[Event.LAUNCH] = {}  # type: ignore[index]


def test_edges_are_all_of_the_table() -> None:
    found = edges(TRANSITIONS)
    assert set(found) == {
        (state, event, target)
        for state, event in PAIRS
        if (target := expected(state, event)) is not None
    }
    assert len(found) == len(set(found))


def test_the_diagram_shows_every_edge_but_those_of_close() -> None:
    lines = mermaid_diagram(TRANSITIONS, EnvState).splitlines()
    assert lines[:2] == ["stateDiagram-v2", "    [*] --> VOID"]
    shown = {
        f"    {state.name} --> {target.name}: {event.value}"
        for state, event in PAIRS
        if event is not Event.CLOSE and (target := expected(state, event)) is not None
    }
    assert set(lines[2:]) == shown
    assert len(lines[2:]) == len(shown)


def test_every_state_can_be_reached_and_left() -> None:
    found = edges(TRANSITIONS)
    assert {target for _, _, target in found} == set(EnvState)
    assert {source for source, _, target in found if source is not target} == set(EnvState)
