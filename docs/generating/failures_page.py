"""The page of what follows failures, from the tables that the code runs on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

from envmgr.core.failures import (
    ANSWERS,
    ANY_LOSS,
    ANY_STATE,
    ANYWHERE,
    COUNTS,
    EPISODES,
    LOSSES,
    REPORTING,
    USER_GETS,
    Answer,
    Condition,
    Gets,
    Lost,
    Rule,
    Situation,
    decide,
)
from envmgr.core.phases import Phase
from envmgr.lifecycle import EnvState
from generating.docstrings import table

T = TypeVar("T")

_HEADER = ("lost", "phase", "state", "when")

_USUAL_STATE = {
    Phase.STARTING: EnvState.INIT,
    Phase.RESETTING: EnvState.RESET,
    Phase.CANCELLING: EnvState.RESET,
    Phase.PAUSING: EnvState.ERROR,
}
"""The state that an env is usually in during these phases; in all others it is RUN."""

_USUAL = frozenset((Condition.AUTO_RESET, Condition.EPISODE_BEGINS))


def failures_page() -> str:
    """Return the page of what follows failures, from the tables that the code runs on."""
    return f"""# What follows a failure

The tables in `envmgr/core/failures.py` decide what an env's user gets when the env fails, what is
charged to the budget and what is done. This page is generated from them. The guide
[Failures and repair](../guide/failures.md) says what counts as a failure, and how to live with it;
states and phases are described in [lifecycle](lifecycle.md).

## With the defaults

This table applies with one env in each worker, `auto_reset` on, and a budget that is not spent. (An
env can be lost without its worker only where other envs share the worker.) There is no pause before
the first of several renewals in a row.

{table(("lost", "phase", "the user gets", "charged", "what follows"), _summary())}
A worker that is lost is killed if it is still alive. The other envs in it lose it too, but nothing
is charged to them.

## The rules

In each of the following tables, the first row that applies decides. A row applies if it names what
is lost, and the phase and the state that the env was in, and if everything under *when* holds. A
situation that no row fits is a defect of envmgr, and raises an error.

### What is lost

What is lost in the end depends on what the failure itself leaves unusable: nothing, if the env
raised or returned something that does not fit; the env, if it exited; the worker, if it died, timed
out or broke the protocol.

{table((*_HEADER, "lost in the end"), _rows(LOSSES, lambda lost: (lost.value,)))}
### What the user gets

{table((*_HEADER, "the user gets"), _rows(USER_GETS, lambda gets: (_gets(gets),)))}
### Whether an episode begins after the repair

If no episode begins, the env goes to `NEED_RESET`.

{table((*_HEADER, "an episode begins"), _rows(EPISODES, lambda begins: (_begins(begins),)))}
### What is charged

This table applies where the next one says that failures are charged.

{table((*_HEADER, "charged"), _rows(COUNTS, lambda counts: (_yes(counts),)))}
### What follows

{table((*_HEADER, "charged", "raised", "what follows"), _rows(ANSWERS, _answer))}"""


def _summary() -> Iterable[tuple[str, ...]]:
    """Return the rows of what is decided when nothing is out of the ordinary."""
    for lost in Lost:
        for phase in ANYWHERE:
            if lost is not Lost.HOST and phase not in REPORTING:
                continue  # an env of which nothing is awaited reports nothing
            state = _USUAL_STATE.get(phase, EnvState.RUN)
            alone = set() if lost is Lost.ENV else {Condition.ALONE}
            situation = Situation(lost, phase, state, _USUAL | alone)
            situation = replace(situation, lost=decide(LOSSES, situation))
            answer = decide(ANSWERS, situation)
            yield (
                lost.value,
                f"`{phase.name}`",
                _gets(decide(USER_GETS, situation)),
                _yes(answer.charged and decide(COUNTS, situation)),
                answer.follows.value,
            )


def _rows(
    rules: Sequence[Rule[T]], cells: Callable[[T], tuple[str, ...]]
) -> Iterable[tuple[str, ...]]:
    """Return the rows of one table."""
    for rule in rules:
        yield (
            "any" if rule.lost == ANY_LOSS else ", ".join(lost.value for lost in rule.lost),
            "any" if rule.at == ANYWHERE else _names(rule.at),
            "any" if rule.states == ANY_STATE else _names(rule.states),
            "; ".join(condition.value for condition in rule.when),
            *cells(rule.then),
        )


def _names(members: Iterable[Phase] | Iterable[EnvState]) -> str:
    return ", ".join(f"`{member.name}`" for member in members)


def _gets(gets: tuple[Gets, ...]) -> str:
    return "; ".join(each.value for each in gets) or "nothing"


def _begins(begins: bool | None) -> str:
    return "as decided before" if begins is None else _yes(begins)


def _yes(holds: bool) -> str:
    return "yes" if holds else "no"


def _answer(answer: Answer) -> tuple[str, str, str]:
    return _yes(answer.charged), answer.raises.value, answer.follows.value
