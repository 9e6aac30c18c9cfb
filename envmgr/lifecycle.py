"""The states of an env and the one table of legal transitions.

Everything that may change the state of an env is an `Event`, and `TRANSITIONS` says what each event
does in each state. An event that the table does not know raises and changes nothing. The diagram in
``docs/reference/lifecycle.md`` is generated from this table.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum, IntEnum
from types import MappingProxyType

from envmgr.errors import IllegalTransitionError


class EnvState(IntEnum):
    """What an env_id is doing, as its user sees it. The numbers are those of DI-engine."""

    VOID = 0
    """Not launched, or closed."""
    INIT = 1
    """Its host is starting and builds the env."""
    RUN = 2
    """In an episode: waiting for an action, or executing one."""
    RESET = 3
    """Being reset."""
    NEED_RESET = 6
    """Its episode ended and `auto_reset` is off: waits for `reset({env_id: params})`."""
    DONE = 4
    """Its episode budget (`episode_num`) is spent, or it was dropped after too many failures."""
    ERROR = 5
    """It failed and has not been repaired yet."""


class Event(str, Enum):
    """What can happen to an env. The value is the label in the diagram."""

    LAUNCH = "launch"
    BEGIN_RESET = "reset begins"
    RESET_SUCCEEDED = "reset succeeded"
    STEPPED = "ordinary timestep"
    EPISODE_ENDED = "episode ended, reset begins"
    EPISODE_ENDED_UNATTENDED = "episode ended, auto_reset off"
    BUDGET_SPENT = "episode budget spent"
    FAILED = "failed"
    RENEW = "host or env renewed"
    REPAIRED_UNATTENDED = "repaired, auto_reset off"
    DROP = "failure budget spent, dropped"
    CLOSE = "close"


_S = EnvState
_LAUNCHED = (_S.INIT, _S.RUN, _S.RESET, _S.NEED_RESET, _S.DONE, _S.ERROR)

TRANSITIONS: Mapping[Event, Mapping[EnvState, EnvState]] = MappingProxyType(
    {
        Event.LAUNCH: {_S.VOID: _S.INIT},
        Event.BEGIN_RESET: dict.fromkeys(_LAUNCHED, _S.RESET),
        Event.RESET_SUCCEEDED: {_S.RESET: _S.RUN},
        Event.STEPPED: {_S.RUN: _S.RUN},
        Event.EPISODE_ENDED: {_S.RUN: _S.RESET},
        Event.EPISODE_ENDED_UNATTENDED: {_S.RUN: _S.NEED_RESET},
        Event.BUDGET_SPENT: {_S.RUN: _S.DONE},
        Event.FAILED: dict.fromkeys((_S.INIT, _S.RUN, _S.RESET, _S.NEED_RESET), _S.ERROR),
        Event.RENEW: {_S.ERROR: _S.INIT},
        Event.REPAIRED_UNATTENDED: dict.fromkeys((_S.INIT, _S.ERROR), _S.NEED_RESET),
        Event.DROP: {_S.ERROR: _S.DONE},
        Event.CLOSE: dict.fromkeys(EnvState, _S.VOID),
    }
)


def next_state(state: EnvState, event: Event, env_id: int | None = None) -> EnvState:
    """Return the state that `event` leads to from `state`.

    Raises:
        IllegalTransitionError: the table has no such edge.
    """
    try:
        return TRANSITIONS[event][state]
    except KeyError:
        who = "env" if env_id is None else f"env {env_id}"
        allowed = ", ".join(sorted(s.name for s in TRANSITIONS[event]))
        raise IllegalTransitionError(
            f"{who} is in {state.name}, where {event.name} ({event.value}) is not legal; "
            f"it is legal in {allowed}. This is a defect of envmgr: please report it."
        ) from None


class StateTable:
    """The states of all envs of one manager; changed only through events.

    Args:
        env_num: number of envs; all begin in VOID.
        spare_num: number of spares, whose ids follow; only asked for one by one. They never are in
            RUN.
    """

    def __init__(self, env_num: int, spare_num: int = 0) -> None:
        self._env_num = env_num
        self._states: list[EnvState] = [EnvState.VOID] * (env_num + spare_num)

    def __getitem__(self, env_id: int) -> EnvState:
        return self._states[env_id]

    def __len__(self) -> int:
        return self._env_num

    def apply(self, env_id: int, event: Event) -> EnvState:
        """Apply `event` to one env and return its new state.

        Raises:
            IllegalTransitionError: the event is not legal in this state; nothing changed.
        """
        state = next_state(self._states[env_id], event, env_id)
        self._states[env_id] = state
        return state

    def apply_all(self, env_ids: Iterable[int], event: Event) -> None:
        """Apply `event` to several envs, or to none of them if it is illegal for one."""
        ids = list(env_ids)
        states = [next_state(self._states[i], event, i) for i in ids]
        for env_id, state in zip(ids, states, strict=True):
            self._states[env_id] = state

    def ids_in(self, state: EnvState) -> list[int]:
        """Return the env_ids that are in `state`, ascending."""
        return [i for i, s in enumerate(self._states) if s is state]

    def snapshot(self) -> tuple[EnvState, ...]:
        """Return the states of all envs, by env_id."""
        return tuple(self._states[: self._env_num])


def is_ready(state: EnvState, *, pending: bool) -> bool:
    """Whether an env takes an action now: in RUN, and no timestep of it is owed to the caller."""
    return state is EnvState.RUN and not pending


def edges() -> Sequence[tuple[EnvState, Event, EnvState]]:
    """Return every legal edge of the table, in its order."""
    return [
        (source, event, target)
        for event, table in TRANSITIONS.items()
        for source, target in table.items()
    ]


def mermaid_diagram() -> str:
    """Return the table as a Mermaid state diagram (edges to VOID by `close` are left out)."""
    lines = ["stateDiagram-v2", "    [*] --> VOID"]
    lines += [
        f"    {source.name} --> {target.name}: {event.value}"
        for source, event, target in edges()
        if event is not Event.CLOSE
    ]
    return "\n".join(lines)
