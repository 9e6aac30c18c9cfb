"""The states of an env and the one table of legal transitions.

Everything that may change the state of an env is an `Event`, and `TRANSITIONS` says what each event
does in each state. An event that the table does not know raises and changes nothing. The diagram in
``docs/reference/lifecycle.md`` is generated from this table, and the diagram of the phases from a
table of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum, IntEnum
from types import MappingProxyType
from typing import Any, Generic, NoReturn, TypeVar

import numpy as np
import numpy.typing as npt

from envmgr.errors import IllegalTransitionError

S = TypeVar("S", bound=IntEnum)
E = TypeVar("E", bound=Enum)


class EnvState(IntEnum):
    """What an env_id is doing, as its user sees it. The numbers are those of DI-engine."""

    VOID = 0
    """Not launched, or closed."""
    INIT = 1
    """Its worker is starting and builds the env."""
    RUN = 2
    """In an episode: waiting for an action, or executing one."""
    RESET = 3
    """Being reset."""
    NEED_RESET = 6
    """Its episode ended and `auto_reset` is off: it waits for `reset({env_id: params})`."""
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
    RENEW = "worker or env renewed"
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


_ILLEGAL = 0xFF


class Column(Generic[S]):
    """The states of several envs, as one byte each; to be read.

    Args:
        states: all states; their values are small numbers.
        count: number of envs; all begin in the first of the states.

    Attributes:
        column: one byte for each env; to be read only.
        view: the same, as an array.
        members: the states by their numbers.
    """

    def __init__(self, states: type[S], count: int) -> None:
        members = list(states)
        self.members = {int(state): state for state in members}
        self.column = bytearray([int(members[0])]) * count
        self.view: npt.NDArray[np.uint8] = np.frombuffer(self.column, np.uint8)

    def __getitem__(self, env_id: int) -> S:
        return self.members[self.column[env_id]]

    def ids_in(self, state: S) -> list[int]:
        """Return the envs that are in `state`, ascending."""
        column, number = self.column, int(state)
        if number not in column:
            return []
        return [env_id for env_id, found in enumerate(column) if found == number]


class TransitionTable(Column[S], Generic[S, E]):
    """A column that only events change.

    Code that holds it as a `Column` can only read it.

    Args:
        transitions: what each event does in each state.
        states: as in `Column`.
        count: as in `Column`.
    """

    def __init__(self, transitions: Mapping[E, Mapping[S, S]], states: type[S], count: int) -> None:
        super().__init__(states, count)
        self._transitions = transitions
        self._targets = {event: _targets(edges) for event, edges in transitions.items()}

    def apply(self, env_id: int, event: E) -> None:
        """Apply `event` to one env.

        Raises:
            IllegalTransitionError: the event is not legal in this state; nothing changed.
        """
        column = self.column
        target = self._targets[event][column[env_id]]
        if target == _ILLEGAL:
            self._refuse(env_id, event)
        column[env_id] = target

    def apply_rows(self, rows: slice, event: E) -> None:
        """Apply `event` to neighbouring envs, or to none of them if it is illegal for one."""
        moved = self.column[rows].translate(self._targets[event])
        if _ILLEGAL in moved:
            first = range(len(self.column))[rows].start
            self._refuse(first + moved.index(_ILLEGAL), event)
        self.column[rows] = moved

    def apply_at(self, rows: npt.NDArray[np.int64], event: E) -> None:
        """Apply `event` like `apply_all`, to an array of env_ids that all differ."""
        moved = self.view[rows].tobytes().translate(self._targets[event])
        if _ILLEGAL in moved:
            self._refuse(int(rows[moved.index(_ILLEGAL)]), event)
        self.view[rows] = np.frombuffer(moved, np.uint8)

    def apply_all(self, env_ids: Iterable[int], event: E) -> None:
        """Apply `event` to several envs, or to none of them if it is illegal for one."""
        column, targets = bytearray(self.column), self._targets[event]
        for env_id in env_ids:
            column[env_id] = target = targets[column[env_id]]
            if target == _ILLEGAL:
                self._refuse(env_id, event)
        self.column[:] = column

    def _refuse(self, env_id: int, event: E) -> NoReturn:
        allowed = ", ".join(sorted(state.name for state in self._transitions[event]))
        raise IllegalTransitionError(
            f"env {env_id} is in {self[env_id].name}, where {event.name} ({event.value}) is not "
            f"legal; it is legal in {allowed}. This is a defect of envmgr: please report it."
        )


def _targets(edges: Mapping[Any, Any]) -> bytes:
    """Return each state's target by the state's number, for `bytearray.translate`."""
    targets = bytearray([_ILLEGAL]) * 256
    for source, target in edges.items():
        targets[int(source)] = int(target)
    return bytes(targets)


def edges(transitions: Mapping[E, Mapping[S, S]]) -> Sequence[tuple[S, E, S]]:
    """Return every legal edge of a table, in its order."""
    return [
        (source, event, target)
        for event, targets in transitions.items()
        for source, target in targets.items()
    ]


def leads_from_everywhere(targets: Mapping[S, S], states: type[S]) -> bool:
    """Return whether an event is legal in every state and leads to the same state from each."""
    return len(targets) == len(states) and len(set(targets.values())) == 1


def mermaid_diagram(transitions: Mapping[E, Mapping[S, S]], states: type[S]) -> str:
    """Return a table as a Mermaid state diagram, without events that lead from everywhere."""
    lines = ["stateDiagram-v2", f"    [*] --> {next(iter(states)).name}"]
    lines += [
        f"    {source.name} --> {target.name}: {event.value}"
        for source, event, target in edges(transitions)
        if not leads_from_everywhere(transitions[event], states)
    ]
    return "\n".join(lines)
