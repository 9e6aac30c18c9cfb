"""The page of states and phases, from the tables that the code runs on."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from enum import Enum, IntEnum
from typing import Any, TypeVar

from envmgr import lifecycle
from envmgr.core import phases
from envmgr.core.phases import Change
from envmgr.lifecycle import TRANSITIONS, EnvState, Event, mermaid_diagram
from generating.docstrings import member_texts, table

S = TypeVar("S", bound=IntEnum)
E = TypeVar("E", bound=Enum)

# Each table is split into several diagrams, because nobody could read a single one.
_REPAIR = {Event.FAILED, Event.RENEW, Event.REPAIRED_UNATTENDED, Event.DROP}


def lifecycle_page() -> str:
    """Return the page of states and phases, from the tables that the code runs on."""
    texts = meanings(lifecycle, EnvState)
    states = [(f"`{state.name}`", str(int(state)), texts[state.name]) for state in EnvState]
    texts = meanings(phases, phases.Phase)
    busy = [(f"`{phase.name}`", phase.label, texts[phase.name]) for phase in phases.Phase]
    return f"""# Lifecycle of an env

`manager.env_states` gives the state of each env_id. Every change of state goes through one table,
in `envmgr/lifecycle.py`; a change that is not in it is refused. The env's phase, which says what
its worker is busy with meanwhile, has a table of the same form, in `envmgr/core/phases.py`. This
page is generated from these two tables.
[Decision 0020](../decisions/0020-one-record-of-each-env.md) says what else is known about an env.

## States

{table(("state", "value", "meaning"), states)}
An env is *ready* (in `ready_obs`) when it is in `RUN` and no timestep of it is owed to the caller.
It is *pending* from the moment that its action is accepted until its timestep has been delivered.

## Diagrams

The edges to `VOID` by `close`, which lead from every state, are left out. Without failures:

```mermaid
{_diagram(TRANSITIONS, EnvState, without=_REPAIR)}
```

What failures lead to:

```mermaid
{_diagram(TRANSITIONS, EnvState, without=set(TRANSITIONS) - _REPAIR)}
```

## Transitions

{table(("from", "what happens", "to"), _transitions(TRANSITIONS, EnvState))}
## Phases

A phase says what an env's worker is busy with: at most one thing at a time. Users see it as
`during` of a failure and in messages, under the names in the second column. State and phase are
related, but neither follows from the other: the state is what the env's user sees. An env that is
ready when its worker dies stays in `RUN` until its user has been told, while a new worker goes
through `STARTING` and `RESETTING`.

{table(("phase", "`during`", "meaning"), busy)}
A step is in `POSTED` or in `STEPPING`, and may go from the first to the second, never back. Its
timestep is owed from when the step is posted or sent until the timestep is handed out, even after
the worker has finished the step.

## Diagrams of phases

Changes that lead from every phase to the same one are left out: to `IDLE` when nothing is awaited
any more, to `ENDING` when the worker is ended, and to `PAUSING` when something is to follow later.

Steps and calls:

```mermaid
{_diagram(phases.CHANGES, phases.Phase, without={Change.BUILD, Change.RESET})}
```

Construction:

```mermaid
{_diagram(phases.CHANGES, phases.Phase, without=set(phases.CHANGES) - {Change.BUILD})}
```

Resets:

```mermaid
{_diagram(phases.CHANGES, phases.Phase, without=set(phases.CHANGES) - {Change.RESET})}
```

## Changes of phases

{table(("from", "what happens", "to"), _transitions(phases.CHANGES, phases.Phase))}"""


def _diagram(
    transitions: Mapping[E, Mapping[S, S]], states: type[S], *, without: Container[E]
) -> str:
    """Return part of a table as a diagram, with the initial state if something leads from it."""
    part = {event: targets for event, targets in transitions.items() if event not in without}
    lines = mermaid_diagram(part, states).splitlines()
    first = f"    {next(iter(states)).name} -->"
    if not any(line.startswith(first) for line in lines):
        del lines[1]
    return "\n".join(lines)


def meanings(module: Any, members: type[IntEnum]) -> dict[str, str]:
    """Return the docstrings of the members of an enum, each of which has to have one."""
    texts = member_texts(module, members.__name__)
    missing = {member.name for member in members} - set(texts)
    if missing:
        raise LookupError(f"these members of {members.__name__} have no docstring: {missing}")
    return texts


def _transitions(
    transitions: Mapping[E, Mapping[S, S]], states: type[S]
) -> Iterable[tuple[str, str, str]]:
    """Return the rows of a transition table; an event that leads from everywhere takes one."""
    for event, targets in transitions.items():
        if lifecycle.leads_from_everywhere(targets, states):
            yield "any", event.value, f"`{next(iter(targets.values())).name}`"
            continue
        for source, target in targets.items():
            yield f"`{source.name}`", event.value, f"`{target.name}`"
