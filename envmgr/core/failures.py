"""Failures: what each is called, what it is charged to, and what follows: retries, renewals, DONE.

What a failure leads to stands in the tables below: what is lost with it (`LOSSES`), what the env's
user gets (`USER_GETS`), whether an episode begins by itself after the repair (`EPISODES`), what is
charged (`COUNTS`), and what is done and raised (`ANSWERS`). In each, the first rule that applies
decides. `Repair` finds out how things are, and does what the rules say.
``docs/reference/failures.md`` is made of these tables.
"""

from __future__ import annotations

import copy
import logging
import signal
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Generic, TypeVar

from envmgr.core.episodes import Episodes
from envmgr.core.hosts import Hosts, released
from envmgr.core.phases import Next, Phase
from envmgr.core.spares import Spares
from envmgr.core.statistics import Statistics
from envmgr.core.table import HostGroup, ManagedEnv, Selections, names_of
from envmgr.errors import (
    EnvCrash,
    EnvFailure,
    EnvProtocolError,
    EnvRaised,
    EnvReportedAbnormal,
    EnvTimeout,
    FailuresExhaustedError,
)
from envmgr.lifecycle import EnvState, Event
from envmgr.policy import FailureBudget, FailurePolicy
from envmgr.texts import exit_text, logged
from envmgr.transport.base import HostDied
from envmgr.types import EnvTimestep
from envmgr.wire.messages import UNANSWERED, FailureKind, RemoteFailure

T = TypeVar("T")

# -- how things are when an env fails -----------------------------------------------------------


class Lost(str, Enum):
    """What a failure of an env leaves unusable."""

    NOTHING = "nothing"
    """The env can go on: it raised, or what it returned does not fit."""
    ENV = "the env"
    """A new env is needed: this one has exited, or differs from the one before it."""
    HOST = "the worker"
    """The host died, timed out or broke the protocol: all of its envs are lost with it."""


class Condition(str, Enum):
    """What rules ask about besides. The value is the text in the reference."""

    SHARES_ENV = "other env_ids are rows of the same env"
    ALONE = "no other env shares its worker"
    LAST_ATTEMPT = "`max_retry` allows no further attempt at this reset"
    ATTEMPTS_LEFT = "this reset has attempts left"
    RENEWS = "`retry_type: renew`"
    LAUNCHING = "during the launch"
    RAISES = "`on_failure: raise`, and the env is not a spare"
    AUTO_RESET = "`auto_reset: true`"
    RELEASED = "its worker had already released it"
    NEIGHBOUR = "another env in its worker has failed"
    LAUNCH_FAILED = "that failure makes the launch fail"
    RAISED = "a failure is raised at once"
    FAILED_BEFORE = "it had already failed while ready, and its user has not been told yet"
    MARKED = 'the env itself marked the step with `info["abnormal"]`'
    INTERRUPTED = (
        "the user interrupted its worker, or other workers died of the same cause and one of them "
        "is charged"
    )
    EPISODE_BEGINS = "an episode is to begin by itself"
    SPARES = "there are spares"
    EXHAUSTED = "this failure exceeds the budget"
    DROPS = "`on_exhausted: drop`"
    IS_SPARE = "the env is a spare"


@dataclass(frozen=True)
class Situation:
    """How things are when an env fails.

    Attributes:
        lost: what cannot be used any more.
        phase: what the env's host was busy with.
        state: what its user saw.
        conditions: all conditions that hold.
    """

    lost: Lost
    phase: Phase
    state: EnvState
    conditions: frozenset[Condition] = frozenset()


_L, _P, _S, _C = Lost, Phase, EnvState, Condition
ANY_LOSS = tuple(Lost)
ANY_STATE = tuple(EnvState)
STEPS = (_P.STEPPING, _P.CANCELLING)
REPAIRS = (_P.STARTING, _P.RESETTING, _P.PAUSING)
REPORTING = (_P.STARTING, _P.RESETTING, *STEPS, _P.CALLING)
"""Phases in which a reply is awaited, which may be a failure."""

ANYWHERE = (_P.IDLE, _P.CALLING, *STEPS, *REPAIRS)
"""Phases in which an env can fail. Posted steps are looked after first, and a host that is ending
has failed already."""


class NoMemoryYet(MemoryError):
    """A lack of memory for what a failure shows. Nothing of the failure was handled."""


@dataclass(frozen=True)
class Rule(Generic[T]):
    """What is decided in some situations.

    Attributes:
        lost: one of these is lost.
        at: the env was in one of these phases.
        states: the env was in one of these states.
        when: all of these conditions hold.
    """

    then: T
    lost: tuple[Lost, ...] = ANY_LOSS
    at: tuple[Phase, ...] = ANYWHERE
    states: tuple[EnvState, ...] = ANY_STATE
    when: tuple[Condition, ...] = ()

    def applies(self, situation: Situation) -> bool:
        """Return whether the rule decides in this situation, if no rule before it does."""
        return (
            situation.lost in self.lost
            and situation.phase in self.at
            and situation.state in self.states
            and situation.conditions.issuperset(self.when)
        )


def decide(rules: Sequence[Rule[T]], situation: Situation) -> T:
    """Return what the first rule that applies says.

    Raises:
        RuntimeError: no rule applies.
    """
    for rule in rules:
        if rule.applies(situation):
            return rule.then
    holding = ", ".join(sorted(condition.name for condition in situation.conditions)) or "nothing"
    raise RuntimeError(
        f"no rule says what follows when {situation.lost.value} is lost in "
        f"{situation.phase.name} and {situation.state.name} (with {holding}): a defect of envmgr, "
        "please report it"
    )


# -- the tables -----------------------------------------------------------------------------------

LOSSES: tuple[Rule[Lost], ...] = (
    # Env_ids that share an env get a new one only in a new host, all of them together.
    Rule(Lost.HOST, lost=(_L.ENV,), when=(_C.SHARES_ENV,)),
    Rule(Lost.HOST, lost=(_L.NOTHING,), at=(_P.STARTING,), when=(_C.SHARES_ENV,)),
    Rule(Lost.HOST, lost=(_L.NOTHING,), at=(_P.RESETTING,), when=(_C.SHARES_ENV, _C.LAST_ATTEMPT)),
    Rule(Lost.HOST, lost=(_L.NOTHING,), at=(*STEPS, *REPAIRS), when=(_C.SHARES_ENV, _C.RENEWS)),
    Rule(Lost.HOST, lost=(_L.ENV,), when=(_C.ALONE,)),
    Rule(Lost.NOTHING, lost=(_L.NOTHING,)),
    Rule(Lost.ENV, lost=(_L.ENV,)),
    Rule(Lost.HOST, lost=(_L.HOST,)),
)
"""What is lost in the end, by what the failure itself leaves unusable."""


class Gets(str, Enum):
    """What an env's user gets, or sees, of a failure. The value is the text in the reference."""

    RESULT = "the failure, as the result of the call"
    TIMESTEP = "an abnormal timestep"
    WITH_NEXT_ACTION = (
        "an abnormal timestep for the next action, which is not executed; the env stays ready "
        "until then"
    )
    NO_OBSERVATION = (
        "an abnormal timestep for the next action, with the earlier failure; whatever the env has "
        "returned since then is not shown"
    )
    ERROR = "the state `ERROR`"


_BY_STATE: tuple[Rule[tuple[Gets, ...]], ...] = (
    Rule((Gets.NO_OBSERVATION,), when=(_C.FAILED_BEFORE,)),
    Rule((Gets.ERROR,), states=(_S.RUN,), when=(_C.LAUNCHING,)),
    Rule((Gets.WITH_NEXT_ACTION,), states=(_S.RUN,)),
    Rule((Gets.ERROR,), states=(_S.INIT, _S.RESET)),
    Rule((), states=(_S.NEED_RESET, _S.DONE, _S.ERROR)),
)

USER_GETS: tuple[Rule[tuple[Gets, ...]], ...] = (
    Rule((), when=(_C.RELEASED,)),
    Rule((Gets.RESULT,), lost=(_L.NOTHING,), at=(_P.CALLING,)),
    Rule((), lost=(_L.NOTHING,), at=(_P.RESETTING,), when=(_C.ATTEMPTS_LEFT,)),
    Rule((Gets.TIMESTEP, Gets.ERROR), at=(_P.STEPPING,)),
    Rule((), at=(_P.CANCELLING,)),  # the state stays RESET, which the user has called for
    *(replace(rule, then=(Gets.RESULT, *rule.then), at=(_P.CALLING,)) for rule in _BY_STATE),
    *_BY_STATE,
)
"""What the user of an env gets; nothing where a rule names nothing."""

_BETWEEN_REPAIRS = (_P.IDLE, _P.CALLING, _P.STEPPING)

EPISODES: tuple[Rule[bool | None], ...] = (
    Rule(None, when=(_C.RELEASED,)),
    Rule(None, lost=(_L.NOTHING,), at=(_P.CALLING,)),
    Rule(None, states=(_S.RESET,)),
    # The launch begins the first reset of an env, whoever begins the later ones.
    Rule(True, at=_BETWEEN_REPAIRS, when=(_C.LAUNCHING,)),
    Rule(True, at=_BETWEEN_REPAIRS, when=(_C.AUTO_RESET,)),
    Rule(False, at=_BETWEEN_REPAIRS),
    Rule(None),
)
"""Whether an episode begins by itself when the repair is over; None: as it was decided before."""

COUNTS: tuple[Rule[bool], ...] = (
    Rule(False, when=(_C.MARKED,)),  # nothing has to be repaired
    Rule(False, when=(_C.INTERRUPTED,)),
    Rule(True),
)
"""Whether a failure is charged to the budget where `ANSWERS` says that failures are."""


class Raises(str, Enum):
    """What a public call raises in consequence, or says in the log."""

    NOTHING = "nothing"
    LAUNCH_ERROR = "`LaunchError`, by the launch"
    FAILURE = "the failure, at once, by the current call or the next one"
    EXHAUSTED = "`FailuresExhaustedError`, by the next call, once it has delivered what has arrived"
    DROPPED = (
        "nothing: the env is dropped, and `DONE` at once or, if it failed while it was ready, once "
        "its user has the abnormal timestep"
    )
    SPARE_DROPPED = "nothing: there is one spare fewer"


class Follows(str, Enum):
    """What is done about a failure."""

    CALL_ENDS = "nothing; a reset that was requested during the call begins"
    NOTHING = "nothing"
    STAYS = "nothing: the env stays as it is, without what is lost"
    CLOSES = "nothing: the env is closed"
    RESET_AGAIN = "a reset, after `retry_waiting_time`"
    ENV_AGAIN = "a new env in the same worker, after `retry_waiting_time`"
    HOST_AGAIN = "a new worker, after `retry_waiting_time`"
    RESET = "a reset"
    RENEW_ENV = "a new env in the same worker"
    SPARE_AND_RESET = (
        "if there is a spare, it takes the env's place, and the env becomes a spare; in either "
        "case, the env is reset"
    )
    SPARE_AND_RENEW = (
        "if there is a spare, it takes the env's place, and the env becomes a spare; in either "
        "case, a new env replaces this one in the same worker"
    )
    AWAIT_USER = "nothing: it waits for its user's reset (`NEED_RESET`)"
    NEW_ENV = "a new env in the same worker, after the pause between renewals"
    NEW_HOST = (
        "a spare takes its place, if there is one; a new worker is started after the pause between "
        "renewals"
    )
    CLOSE_AND_NEW_HOST = (
        "a spare takes its place, if there is one; the worker closes the env, and a new worker is "
        "started after the pause between renewals"
    )


@dataclass(frozen=True)
class Answer:
    """How a failure is answered.

    Attributes:
        charged: whether it counts against the budget, if `COUNTS` says so, too.
        raises: what a public call raises.
    """

    follows: Follows
    charged: bool = False
    raises: Raises = Raises.NOTHING


_F, _R = Follows, Raises
ANSWERS: tuple[Rule[Answer], ...] = (
    Rule(Answer(_F.CALL_ENDS), lost=(_L.NOTHING,), at=(_P.CALLING,)),
    Rule(Answer(_F.NOTHING), lost=(_L.HOST,), when=(_C.RELEASED,)),
    Rule(
        Answer(_F.STAYS, raises=_R.LAUNCH_ERROR),
        lost=(_L.HOST,),
        when=(_C.NEIGHBOUR, _C.LAUNCH_FAILED),
    ),
    Rule(Answer(_F.STAYS), lost=(_L.HOST,), when=(_C.NEIGHBOUR, _C.RAISED)),
    Rule(Answer(_F.STAYS), states=(_S.DONE,)),  # there is a new host if its user resets it
    Rule(Answer(_F.NEW_HOST), lost=(_L.HOST,), when=(_C.NEIGHBOUR,)),
    Rule(
        Answer(_F.ENV_AGAIN),
        lost=(_L.NOTHING,),
        at=(_P.RESETTING,),
        when=(_C.ATTEMPTS_LEFT, _C.RENEWS),
    ),
    Rule(Answer(_F.RESET_AGAIN), lost=(_L.NOTHING,), at=(_P.RESETTING,), when=(_C.ATTEMPTS_LEFT,)),
    Rule(
        Answer(_F.ENV_AGAIN),
        lost=(_L.ENV,),
        at=(_P.RESETTING,),
        when=(_C.LAUNCHING, _C.ATTEMPTS_LEFT),
    ),
    Rule(
        Answer(_F.HOST_AGAIN),
        lost=(_L.HOST,),
        at=(_P.RESETTING,),
        when=(_C.LAUNCHING, _C.ATTEMPTS_LEFT),
    ),
    Rule(Answer(_F.STAYS, raises=_R.LAUNCH_ERROR), when=(_C.LAUNCHING,)),
    Rule(Answer(_F.STAYS, raises=_R.FAILURE), when=(_C.RAISES,)),
    Rule(
        Answer(_F.CLOSES, charged=True, raises=_R.SPARE_DROPPED), when=(_C.EXHAUSTED, _C.IS_SPARE)
    ),
    Rule(Answer(_F.CLOSES, charged=True, raises=_R.DROPPED), when=(_C.EXHAUSTED, _C.DROPS)),
    Rule(Answer(_F.CLOSES, charged=True, raises=_R.EXHAUSTED), when=(_C.EXHAUSTED,)),
    Rule(Answer(_F.NEW_HOST, charged=True), lost=(_L.HOST,)),
    Rule(
        Answer(_F.SPARE_AND_RENEW, charged=True),
        lost=(_L.NOTHING,),
        at=(_P.STEPPING,),
        when=(_C.SPARES, _C.EPISODE_BEGINS, _C.RENEWS),
    ),
    Rule(
        Answer(_F.SPARE_AND_RESET, charged=True),
        lost=(_L.NOTHING,),
        at=(_P.STEPPING,),
        when=(_C.SPARES, _C.EPISODE_BEGINS),
    ),
    Rule(Answer(_F.RENEW_ENV, charged=True), lost=(_L.NOTHING,), at=STEPS, when=(_C.RENEWS,)),
    Rule(Answer(_F.RESET, charged=True), lost=(_L.NOTHING,), at=STEPS, when=(_C.EPISODE_BEGINS,)),
    Rule(Answer(_F.AWAIT_USER, charged=True), lost=(_L.NOTHING,), at=STEPS),
    Rule(
        Answer(_F.CLOSE_AND_NEW_HOST, charged=True),
        lost=(_L.NOTHING,),
        at=(_P.STARTING, _P.RESETTING),
        when=(_C.ALONE,),
    ),
    Rule(Answer(_F.NEW_ENV, charged=True), lost=(_L.NOTHING, _L.ENV), at=REPORTING),
)
"""What is charged, raised and done about a failure."""

# -- what failures are called ---------------------------------------------------------------------


def reported(env: ManagedEnv, remote: RemoteFailure) -> EnvFailure:
    """Return the failure that a host reported."""
    env_id, generation, during = env.env_id, env.generation, remote.during
    where = f"{env.name} (generation {generation})"
    if remote.kind is FailureKind.ABNORMAL:
        text = f"{where} reported its own step as abnormal (info['abnormal'])"
        return EnvReportedAbnormal(text, env_id=env_id, during=during, generation=generation)
    if remote.kind is FailureKind.EXITED:
        did = f"called sys.exit({remote.message})"
        if remote.type_name != SystemExit.__name__:
            did = f"raised {remote.type_name}"
        text = f"{where} {did} in its {during}{_traceback_of(remote)}"
        return EnvCrash(
            text,
            env_id=env_id,
            during=during,
            generation=generation,
            remote_traceback=remote.traceback_text,
        )
    if remote.kind in (FailureKind.PROTOCOL, FailureKind.NON_FINITE):
        text = f"{where} broke the protocol in its {during}: {remote.message}"
        return EnvProtocolError(text, env_id=env_id, during=during, generation=generation)
    text = f"{where} raised {remote.type_name} in its {during}: {remote.message}"
    text += _traceback_of(remote)
    return EnvRaised(
        text,
        env_id=env_id,
        during=during,
        generation=generation,
        type_name=remote.type_name,
        remote_message=remote.message,
        remote_traceback=remote.traceback_text,
    )


def _traceback_of(remote: RemoteFailure) -> str:
    text = remote.traceback_text.rstrip()
    return f"\n\nTraceback in its worker:\n{text}" if text else ""


def crash(env: ManagedEnv, died: HostDied) -> EnvCrash:
    """Return the failure of an env whose host is gone."""
    status = died.exit_status
    how = died.detail or "it cannot be told how"
    if status is not None:
        how = exit_text(status)
    hint = " (out of memory?)" if status == -signal.SIGKILL else ""
    text = (
        f"the worker of {env.name} (generation {env.generation}) died during "
        f"{env.during}: {how}{hint}{_neighbours(env)}"
    )
    if died.last_words:
        text += f"\n\nThe end of its stderr:\n{died.last_words}"
    return EnvCrash(
        text,
        env_id=env.env_id,
        during=env.phase.label,
        generation=env.generation,
        exit_status=status,
        stderr_tail=died.last_words,
    )


def _neighbours(env: ManagedEnv) -> str:
    """Name the envs that lose their host with this one; empty if there are none."""
    others = [other for other in env.group.present() if other is not env]
    if not others:
        return ""
    return f"; {names_of(others)} shared its worker, and lose{'s' * (len(others) == 1)} it too"


def of_neighbour(env: ManagedEnv, failure: EnvFailure) -> EnvCrash:
    """Return the failure of an env whose host was lost when another env in it failed."""
    first_line = str(failure).partition("\n")[0]
    text = (
        f"the worker of {env.name} (generation {env.generation}) was lost during "
        f"{env.during}, because it is shared with env {failure.env_id}: {first_line}"
    )
    crash = EnvCrash(
        text,
        env_id=env.env_id,
        during=env.phase.label,
        generation=env.generation,
        exit_status=getattr(failure, "exit_status", None),
        stderr_tail=getattr(failure, "stderr_tail", ""),
    )
    crash.__cause__ = failure
    return crash


def timeout(
    env: ManagedEnv, limit_s: float, where: str = "", name: str = "", *, loses_host: bool = True
) -> EnvTimeout:
    """Return the failure of an env that exceeded a time limit.

    Args:
        env: the env.
        limit_s: the limit.
        where: `EnvTimeout.stacks`.
        name: what has set the limit, if that is no key of the config.
        loses_host: whether its host is replaced for that.
    """
    key = {"step": "step_timeout", "cancelled step": "step_timeout"}.get(env.phase.label)
    key = key or {"construction": "connect_timeout"}.get(env.phase.label, "reset_timeout")
    key = name or key
    during = env.phase.label
    if env.host_id is None:  # a shared host that let go of it
        key, during = "close_timeout", "close"
    text = (
        f"{env.name} (generation {env.generation}) exceeded the {limit_s:g} s of {key} "
        f"in its {during}{_neighbours(env) if loses_host else ''}"
    )
    if where:
        text += f"\n\nWhere it was:\n{where}"
    return EnvTimeout(
        text,
        env_id=env.env_id,
        during=during,
        generation=env.generation,
        limit_s=limit_s,
        stacks=where,
    )


def protocol(env: ManagedEnv, reason: str, *, loses_host: bool = True) -> EnvProtocolError:
    """Return the failure of an env whose host sent something malformed."""
    text = (
        f"the worker of {env.name} (generation {env.generation}) broke the protocol "
        f"during {env.during}: {reason}{_neighbours(env) if loses_host else ''}"
    )
    return EnvProtocolError(
        text, env_id=env.env_id, during=env.phase.label, generation=env.generation
    )


def abnormal_timestep(
    env: ManagedEnv,
    failure: EnvFailure,
    env_info: Any = None,
    shown: Mapping[int, Any] | None = None,
) -> EnvTimestep:
    """Return the one timestep that stands for an action whose env failed.

    Args:
        env: the env; its newest observation is the timestep's.
        failure: becomes `info["error"]`.
        env_info: what the env itself said, if it did: a dict, or a list or tuple of dicts, whose
            form is kept.
        shown: by env_id: what `Observed.shown_again` has given before.
    """
    if shown is not None and env.env_id in shown:
        obs = shown[env.env_id]
    else:
        obs = env.table.observed.shown_again(env.env_id)
    reward, terminated, truncated = env.table.observed.lost_step(env.env_id, obs)
    marks = {"abnormal": True, "terminated": terminated, "truncated": truncated, "error": failure}
    info: Any
    if isinstance(env_info, (list, tuple)) and env_info:
        info = type(env_info)(
            {**part, **marks} if isinstance(part, Mapping) else part for part in env_info
        )
    else:
        info = {**(env_info if isinstance(env_info, Mapping) else {}), **marks}
    return EnvTimestep(obs, reward, True, info)


_CALL_LOOK_S = 0.05
"""How often to look whether hosts that only a call can start can be started now."""

_ATTEMPTS = {
    Follows.RESET_AGAIN: Next.RESET,
    Follows.ENV_AGAIN: Next.RENEW_ENV,
    Follows.HOST_AGAIN: Next.RENEW_HOST,
}


class Renewals:
    """Renews envs, and goes on after pauses and the ends of hosts.

    Args:
        hosts: to build envs and start hosts.
        statistics: where renewals are counted.
        spares: the spares that take the place of envs whose hosts are gone; None if there are none.
    """

    def __init__(
        self,
        hosts: Hosts,
        statistics: Statistics,
        episodes: Episodes,
        spares: Spares | None,
    ) -> None:
        self._hosts = hosts
        self._table = hosts.table
        self._states = hosts.table.states
        self._statistics = statistics
        self._begin_reset = episodes.begin
        self._spares = spares

    def renew_env(self, env: ManagedEnv) -> None:
        """Begin a new generation of an env in the host of its group."""
        self._begin_generation(env)
        self._hosts.build(env)

    def _renew_hosts(self, envs: Sequence[ManagedEnv]) -> None:
        """Begin a new generation of envs whose host is gone, in one new host for all of them."""
        if self._hosts.transport.must_wait_for_call:
            self._hosts.pause(envs, _CALL_LOOK_S, Next.RENEW_HOST)
            return
        for env in envs:
            env.follow_up = Next.NOTHING
            self._begin_generation(env)
        self._hosts.start(envs)

    def _begin_generation(self, env: ManagedEnv) -> None:
        env.generation += 1
        env.renewals_in_a_row += 1
        env.new_generation = True
        env.has_plan = env.leaves = False
        self._statistics.renewals += 1
        self._statistics.has_generations = True
        if self._states[env.env_id] is EnvState.ERROR:
            self._table.happened(env.env_id, Event.RENEW)

    def bring_back(self, env: ManagedEnv) -> None:
        """Renew an env that takes part in no host, because its user repairs it by hand."""
        group = env.group
        awaiting = [s for s in group.envs if s.phase is Phase.ENDING or _awaits_host(s)]
        if awaiting:
            self._hosts.join(env, awaiting[0])
        elif group.host_id is None:
            self._renew_hosts([env])
        else:
            self.renew_env(env)

    def proceed(self, env: ManagedEnv) -> None:
        """Begin what was to follow a pause."""
        if _awaits_host(env):
            awaiting = [s for s in env.group.envs if _awaits_host(s)]
            ending = [s for s in env.group.envs if s.phase is Phase.ENDING]
            if ending:  # of a host that another env of the group has begun meanwhile, in its turn
                for other in awaiting:
                    self._hosts.join(other, ending[0])
            else:
                self._renew_hosts(awaiting)
            return
        follow_up, env.follow_up = env.follow_up, Next.NOTHING
        if follow_up is Next.RESET:
            self._begin_reset(env)
        else:
            self.renew_env(env)

    def host_ended(self, group: HostGroup) -> None:
        """Go on with what follows the end of a host, for all of its envs together."""
        leaving = [env for env in group.envs if env.phase is Phase.ENDING]
        for env in leaving:
            env.host_id = None
            if env.follow_up is Next.NOTHING:
                self._hosts.settle(env)
        awaiting = [env for env in leaving if env.follow_up is Next.RENEW_HOST]
        returning = [self.take_over(env) for env in awaiting]
        pause_s = max((env.pause_s for env in returning), default=0.0)
        if pause_s > 0.0:
            self._hosts.pause(returning, pause_s, Next.RENEW_HOST)
        elif returning:
            self._renew_hosts(returning)

    def take_over(self, env: ManagedEnv) -> ManagedEnv:
        """Have a spare take an env's place, if one can; return the one whose host to replace."""
        if self._spares is None or self._table.launching:
            return env
        return self._spares.take_over(env)


def _awaits_host(env: ManagedEnv) -> bool:
    return env.phase is Phase.PAUSING and env.follow_up is Next.RENEW_HOST


class Repair:
    """Finds out how things are when envs fail, and does what the tables of this module say.

    Args:
        hosts: to renew and end hosts.
        statistics: where failures are counted.
        episodes: begins episodes, and replaces hosts that want it.
        selections: know how many steps each env has made.
        spares: the spares that take the place of envs that fail; None if there are none.
        auto_reset: whether a repaired env begins an episode by itself.

    Attributes:
        renewals: renews envs and hosts.
        launch_failures: by env_id: the failures of a launch, which are collected here while it goes
            on; nothing is renewed then beyond the attempts at one reset.
        quiet: whether to log neither failures nor notices, because they will come again.
        urgent: whether what is fatal has to be raised at once.
        fatal_errors: the errors that have to be raised, one by each public call.
        fatal_of_leases: by env_id: the error that has to be raised by whoever had leased the env
            when it failed.
    """

    def __init__(
        self,
        hosts: Hosts,
        policy: FailurePolicy,
        statistics: Statistics,
        episodes: Episodes,
        selections: Selections,
        spares: Spares | None,
        *,
        auto_reset: bool,
    ) -> None:
        self._hosts = hosts
        self._table = hosts.table
        self._states = hosts.table.states
        self._policy = policy
        self._budget = FailureBudget(policy, hosts.env_num, len(hosts.envs) - hosts.env_num)
        self._statistics = statistics
        self._auto_reset = auto_reset
        self.renewals = Renewals(hosts, statistics, episodes, spares)
        self._begin_reset = episodes.begin
        self._restorations = episodes.restorations
        self._replace_host_if_wanted = episodes.replace_host
        self._selections = selections
        self._spares = spares
        self._failed_in_launch: Counter[int] = Counter()  # resets, by index of the host
        self.shown: dict[int, Any] = {}
        self.quiet = False
        self.launch_failures: dict[int, EnvFailure] = {}
        self.fatal_errors: deque[Exception] = deque()
        self.fatal_of_leases: dict[int, Exception] = {}
        self.urgent = False

    # -- a failure --------------------------------------------------------------------------

    def prepare(self, envs: Iterable[ManagedEnv]) -> None:
        """Get the observations that `fail`, to be called next, shows again if these envs fail.

        Raises:
            NoMemoryYet: there is no memory for them. Nothing was changed.
        """
        stepping = [env.env_id for env in envs if env.phase is Phase.STEPPING]
        try:
            self.shown = {i: self._table.observed.shown_again(i) for i in stepping}
        except MemoryError as error:
            raise NoMemoryYet from error

    def fail(
        self,
        env: ManagedEnv,
        failure: EnvFailure,
        lost: Lost,
        env_info: Any = None,
        *,
        charged: bool = True,
    ) -> None:
        """Give the user of an env that failed what is due, and do what follows.

        Args:
            env: the env.
            failure: what happened.
            lost: what the failure itself leaves unusable.
            env_info: the info of a step that the env itself called abnormal.
            charged: whether it counts against the budget; what its user has interrupted does not.
        """
        if env.phase is Phase.RESETTING:
            self._count_attempt(env)
        found = {
            **self._conditions_of_own(env),
            Condition.MARKED: isinstance(failure, EnvReportedAbnormal),
            Condition.INTERRUPTED: not charged,
        }
        situation = self._situation(env, lost, found)
        situation = replace(situation, lost=decide(LOSSES, situation))
        situation = self._decide_on_episode(env, situation)
        answer = decide(ANSWERS, situation)
        gets = decide(USER_GETS, situation)
        if answer.follows is Follows.CALL_ENDS:  # what the user called has raised: no failure
            self._tell_user(env, failure, gets)
            self.call_ended(env)
            return
        # A copy of what users get: once they raise that, it keeps alive all that the frames on its
        # way have.
        kept = copy.copy(failure)
        self._count_failure(env, kept)
        self._restorations.failed(env, is_lost=situation.lost is not Lost.NOTHING)
        if self._spares is not None:
            self._spares.failed(env)
        if not self.quiet and answer.raises is not Raises.LAUNCH_ERROR:  # that says it
            logged(logging.WARNING, "%s", kept)
        self._tell_user(env, failure, gets, env_info)
        exceeded = None
        if answer.charged and decide(COUNTS, situation):
            exceeded = self._charge(env, kept)
        if exceeded is not None:
            conditions = situation.conditions | {Condition.EXHAUSTED}
            answer = decide(ANSWERS, replace(situation, conditions=conditions))
        if self._table.leased and answer.follows not in _ATTEMPTS:
            self._tell_tenant(env, failure)
        self._carry_out(env, answer, situation.lost)
        self._raise(env, answer.raises, failure, exceeded or "")
        if situation.lost is Lost.HOST:
            self._lose_host(env, failure)
        else:
            self._replace_host_if_wanted(env.group)

    # -- how things are ---------------------------------------------------------------------

    def _situation(self, env: ManagedEnv, lost: Lost, found: Mapping[Condition, bool]) -> Situation:
        """Return how things are for an env that has failed, or loses its host."""
        of_all = {
            Condition.LAUNCHING: self._table.launching,
            Condition.AUTO_RESET: self._auto_reset,
            Condition.FAILED_BEFORE: env.failed_while_ready is not None,
        }
        holding = (condition for condition, holds in {**of_all, **found}.items() if holds)
        return Situation(lost, env.phase, self._states[env.env_id], frozenset(holding))

    def _conditions_of_own(self, env: ManagedEnv) -> Mapping[Condition, bool]:
        """Return what holds for an env that has failed itself."""
        policy, is_reset = self._policy, env.phase is Phase.RESETTING
        return {
            Condition.SHARES_ENV: env.shares_env,
            Condition.ALONE: not env.group.is_shared,
            Condition.LAST_ATTEMPT: is_reset and env.attempts >= policy.max_retry,
            Condition.ATTEMPTS_LEFT: is_reset and self._has_attempts(env),
            Condition.RENEWS: policy.renew_between_attempts,
            Condition.RAISES: not policy.recover and not env.is_spare,
            Condition.RELEASED: env.host_id is None,
            Condition.SPARES: self._spares is not None,
            Condition.DROPS: policy.drop_exhausted,
            Condition.IS_SPARE: env.is_spare,
        }

    def _count_attempt(self, env: ManagedEnv) -> None:
        env.attempts += 1
        if self._table.launching:
            self._failed_in_launch[env.group.index] += 1

    def _has_attempts(self, env: ManagedEnv) -> bool:
        """Return whether there is to be another attempt at the reset of an env."""
        max_retry = self._policy.max_retry
        left = env.attempts < max_retry
        if not self._table.launching:
            return left
        # An env that takes a shared host along has its neighbours reset once more, and these may do
        # the same to it, in turns. So in a launch the envs of a host have no more attempts in all
        # than they would have with a host each.
        group = env.group
        left = left and env.env_id not in self.launch_failures
        return left and self._failed_in_launch[group.index] < len(group.envs) * max_retry

    def _decide_on_episode(self, env: ManagedEnv, situation: Situation) -> Situation:
        """Decide whether an episode begins after the repair, and add that to the situation."""
        begins = decide(EPISODES, situation)
        if begins is not None:
            env.attended = begins
        if not env.attended:
            return situation
        return replace(situation, conditions=situation.conditions | {Condition.EPISODE_BEGINS})

    # -- what is done -----------------------------------------------------------------------

    def _count_failure(self, env: ManagedEnv, failure: EnvFailure) -> None:
        env.left_with = UNANSWERED  # what follows is a repair
        if env.is_spare:
            self._statistics.count_spare_failure(failure)
            return
        self._statistics.count_failure(failure)
        self._statistics.note_failed(env.env_id, env.generation, self._hosts.clock())

    def _tell_user(
        self, env: ManagedEnv, failure: EnvFailure, gets: tuple[Gets, ...], env_info: Any = None
    ) -> None:
        """Give the user of an env what is due."""
        for each in gets:
            if each is Gets.RESULT:
                env.result = failure
            elif each is Gets.WITH_NEXT_ACTION:
                env.failed_while_ready = failure
            elif each is Gets.NO_OBSERVATION:
                env.fresh = None
            elif each is Gets.TIMESTEP:
                env.timestep = abnormal_timestep(env, failure, env_info, self.shown)
                self._statistics.abnormal += 1
            else:
                self._table.happened(env.env_id, Event.FAILED)

    def _tell_tenant(self, env: ManagedEnv, failure: EnvFailure) -> None:
        """Note, for whoever has leased an env, what it has failed with."""
        if env.env_id in self._table.leased:
            self._table.leased[env.env_id] = failure

    def _charge(self, env: ManagedEnv, failure: EnvFailure) -> str | None:
        """Charge a failure to the budget; return which limit it exceeds, if any."""
        return self._budget.charge(
            env.env_id,
            failure,
            self._hosts.clock(),
            steps=self._selections.steps_of(env.env_id),
            steps_of_all=self._statistics.actions + self._statistics.of_slots.actions,
        )

    def _carry_out(self, env: ManagedEnv, answer: Answer, lost: Lost) -> None:
        """Do what follows the failure of an env."""
        follows = answer.follows
        if follows is Follows.NOTHING:
            return
        if follows is Follows.STAYS:
            self._leave_as_it_is(env, lost)
        elif follows in _ATTEMPTS:
            self._try_again(env, _ATTEMPTS[follows], lost)
        else:
            env.attempts = 0
            self._repair(env, follows, lost)

    def _try_again(self, env: ManagedEnv, follow_up: Next, lost: Lost) -> None:
        """Have another attempt at a reset made after a pause."""
        pause_s = self._policy.retry_waiting_s
        if lost is Lost.NOTHING:
            self._statistics.reset_retries += 1
        if follow_up is Next.RENEW_HOST:
            self._hosts.leave(env, follow_up, pause_s)
        else:
            self._hosts.pause([env], pause_s, follow_up)

    def _repair(self, env: ManagedEnv, follows: Follows, lost: Lost) -> None:
        """Have an env repaired, or closed."""
        pause_s, group = self._policy.renewal_delay_s(env.renewals_in_a_row), env.group
        if follows is Follows.CLOSES:
            self._close(env, lost)
        elif follows is Follows.NEW_HOST:
            self._hosts.leave(env, Next.RENEW_HOST, pause_s)
        elif follows is Follows.CLOSE_AND_NEW_HOST:
            self._hosts.leave(env, Next.RENEW_HOST, pause_s)
            self.renewals.take_over(env)
            self._hosts.end(group, ask=True)
        elif follows is Follows.NEW_ENV:
            self._hosts.pause([env], pause_s, Next.RENEW_ENV)
        elif follows is Follows.RENEW_ENV:
            self.renewals.renew_env(env)
        elif follows is Follows.RESET:
            self._begin_reset(env)
        elif follows is Follows.AWAIT_USER:
            self._hosts.settle(env)
            self._table.happened(env.env_id, Event.REPAIRED_UNATTENDED)
        elif self._spares is not None:
            renews = follows is Follows.SPARE_AND_RENEW
            self._spares.ended(env, self.renewals.renew_env if renews else self._begin_reset)

    def _leave_as_it_is(self, env: ManagedEnv, lost: Lost) -> None:
        """Leave an env as it is, without what is lost."""
        if lost is Lost.HOST:
            self._hosts.leave(env, Next.NOTHING)
        elif lost is Lost.ENV:
            self._release(env)
        else:
            self._hosts.settle(env)

    def _close(self, env: ManagedEnv, lost: Lost) -> None:
        """Close an env that has failed too often."""
        env.awaits_reset = False
        if env.failed_while_ready is None and self._states[env.env_id] is not EnvState.ERROR:
            self._table.happened(env.env_id, Event.FAILED)
        self._leave_as_it_is(env, Lost.ENV if lost is Lost.NOTHING else lost)

    def _release(self, env: ManagedEnv) -> None:
        """Have a healthy host let go of an env; the host ends with its last env."""
        if env.group.present() == [env]:
            self._hosts.leave(env, Next.NOTHING)
            self._hosts.end(env.group, ask=True)
        else:
            self._hosts.release(env)
            released(self._hosts, env.env_id)

    # -- the end of a host ------------------------------------------------------------------

    def _lose_host(self, culprit: ManagedEnv, failure: EnvFailure) -> None:
        """End the host that an env has failed with; the other envs in it lose it, too."""
        group = culprit.group
        for env in group.present():
            if env is not culprit:
                self._lose_host_of_neighbour(env, culprit, failure)
        if group.host_id is None:
            self.renewals.host_ended(group)
        else:
            self._hosts.end(group, ask=False)

    def _lose_host_of_neighbour(
        self, env: ManagedEnv, culprit: ManagedEnv, failure: EnvFailure
    ) -> None:
        """Do what follows for an env that loses its host because another env in it failed."""
        found = {
            Condition.NEIGHBOUR: True,
            Condition.LAUNCH_FAILED: (
                self._table.launching and culprit.env_id in self.launch_failures
            ),
            # The failure for a number that is not finite may be raised, too; it ends nothing else.
            Condition.RAISED: (
                (self.urgent or culprit.env_id in self.fatal_of_leases) and not self._policy.recover
            ),
        }
        situation = self._situation(env, Lost.HOST, found)
        situation = self._decide_on_episode(env, situation)
        answer = decide(ANSWERS, situation)
        own = of_neighbour(env, failure)
        self._tell_tenant(env, own)
        self._statistics.note_failed(env.env_id, env.generation, self._hosts.clock())
        self._restorations.resume(env)
        self._tell_user(env, own, decide(USER_GETS, situation))
        if answer.raises is Raises.LAUNCH_ERROR:
            self.launch_failures.setdefault(env.env_id, own)
        pause_s = self._policy.renewal_delay_s(env.renewals_in_a_row)
        is_renewed = answer.follows is Follows.NEW_HOST
        self._hosts.leave(env, Next.RENEW_HOST if is_renewed else Next.NOTHING, pause_s)

    # -- what is raised ---------------------------------------------------------------------

    def _raise(self, env: ManagedEnv, raises: Raises, failure: EnvFailure, exceeded: str) -> None:
        """Have a public call raise what is to be raised for the failure of an env.

        Args:
            env: the env.
            raises: what to raise.
            failure: the failure of the env.
            exceeded: which limit of the budget the failure exceeds, if any.
        """
        if raises is Raises.LAUNCH_ERROR:
            self.launch_failures[env.env_id] = failure
        elif raises is Raises.FAILURE:
            self.raise_at_once(failure)
        elif raises is Raises.SPARE_DROPPED:
            cause = self._budget.first_cause(env.env_id)
            text = "%s: it is dropped, and the run goes on without it. %s"
            logged(logging.ERROR, text, exceeded, cause)
            env.dropped = True
        elif raises is Raises.DROPPED:
            text = "%s: env %d is dropped (on_exhausted: drop)"
            logged(logging.ERROR, text, exceeded, env.env_id)
            env.dropped = True
            if env.failed_while_ready is None:
                self._table.happened(env.env_id, Event.DROP)
        elif raises is Raises.EXHAUSTED:
            self._raise_exhausted(env, exceeded)

    def _raise_exhausted(self, env: ManagedEnv, exceeded: str) -> None:
        cause = self._budget.first_cause(env.env_id)
        error = FailuresExhaustedError(
            f"{exceeded}. {env.name.capitalize()} is not repaired any more; the other envs are as "
            f"they were. Look at the failure below, and then: raise that limit or lower "
            f"failure_window_s, set on_exhausted: drop to go on without it, or call "
            f"reset({{{env.env_id}: None}}) to have it repaired once more. The first failure of "
            f"env {cause.env_id} that counted: {cause}",
            cause,
            env.env_id,
            exceeded,
        )
        logged(logging.ERROR, "%s", error)
        if env.env_id in self._table.leased:
            self.fatal_of_leases[env.env_id] = error
        else:
            self.raise_later(error)

    def raise_at_once(self, failure: EnvFailure) -> None:
        """Have the present or next public call raise `failure` before anything else.

        A launch fails with it: nothing is tried again. The failure of a leased env is raised by
        the env's user.
        """
        if self._table.launching:
            self.launch_failures[failure.env_id] = failure
            return
        if failure.env_id in self._table.leased:
            self.fatal_of_leases[failure.env_id] = failure
            return
        self.fatal_errors.append(failure)
        self.urgent = True

    def raise_later(self, error: Exception) -> None:
        """Have the next public call raise `error` after it has delivered what has arrived."""
        self.fatal_errors.append(error)

    @property
    def fatal(self) -> Exception | None:
        """What the next public call has to raise; each error is raised by a call of its own."""
        return self.fatal_errors[0] if self.fatal_errors else None

    @property
    def recovers(self) -> bool:
        """Whether failures are repaired, and not raised."""
        return self._policy.recover

    def take_fatal(self) -> Exception | None:
        """Return, once, the error that is to be raised now."""
        self.urgent = False
        return self.fatal_errors.popleft() if self.fatal_errors else None

    # -- what users do ----------------------------------------------------------------------

    def bring_back(self, env: ManagedEnv) -> None:
        """Renew an env that takes part in no host, because its user repairs it by hand."""
        self.renewals.bring_back(env)

    def forgive(self, env: ManagedEnv) -> None:
        """Forget an env's failures: its user repairs it by hand."""
        self._budget.forgive(env.env_id)
        env.renewals_in_a_row = 0
        env.attempts = 0

    def call_ended(self, env: ManagedEnv) -> None:
        """Note that a call is over, and begin a reset that was asked for meanwhile."""
        self._hosts.settle(env)
        if self._states[env.env_id] is EnvState.RESET and not env.waits:
            self._begin_reset(env)
        else:
            self._replace_host_if_wanted(env.group)

    # -- actions that nobody executes -------------------------------------------------------------

    def answer_unexecuted(self) -> None:
        """Answer actions of envs that had died while they were ready with abnormal timesteps.

        Not to be interrupted.
        """
        for env_id in sorted(self._table.unexecuted):
            self._answer_unexecuted(self._table.envs[env_id])
            self._table.unexecuted.discard(env_id)

    def _answer_unexecuted(self, env: ManagedEnv) -> None:
        """Answer the action of an env with an abnormal timestep, and catch up with its repair."""
        failure = env.failed_while_ready
        if failure is None:
            raise RuntimeError("an env without failure: a defect of envmgr, please report it")
        env_id = env.env_id
        env.timestep = abnormal_timestep(env, failure)  # first: there may be no memory for it
        env.failed_while_ready = None
        self._statistics.abnormal += 1
        self._table.happened(env_id, Event.FAILED)
        if env.dropped:
            self._table.happened(env_id, Event.DROP)
        elif env.fresh is not None:
            (env.obs, env.reset_info), env.fresh = env.fresh, None
            self._table.happened(env_id, Event.BEGIN_RESET)
            self._table.happened(env_id, Event.RESET_SUCCEEDED)
        elif env.phase is Phase.RESETTING:
            self._table.happened(env_id, Event.BEGIN_RESET)
        elif env.phase is Phase.STARTING:
            self._table.happened(env_id, Event.RENEW)
        elif env.phase is Phase.IDLE and env.host_id is not None:  # renewed, auto_reset off
            self._table.happened(env_id, Event.REPAIRED_UNATTENDED)
        self._replace_host_if_wanted(env.group)
