"""From what workers report to typed failures, and what follows each of them."""

from __future__ import annotations

import copy
import logging
import signal
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

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
from envmgr.transport.base import HostDied
from envmgr.types import EnvTimestep
from envmgr.wire.messages import FailureKind, RemoteFailure

logger = logging.getLogger("envmgr")


class Lost(str, Enum):
    """What a failure of an env leaves unusable."""

    NOTHING = "nothing"
    ENV = "the env"
    """A new env is needed. It is built in the same host if others share that; else in a new one."""
    HOST = "the host"
    """It died, timed out or broke the protocol."""


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
        return EnvCrash(text, env_id=env_id, during=during, generation=generation)
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
    return f"\n\nTraceback in its host:\n{text}" if text else ""


def crash(env: ManagedEnv, died: HostDied) -> EnvCrash:
    """Return the failure of an env whose host is gone."""
    status = died.exit_status
    if status is None:
        how = died.detail or "it cannot be told how"
    elif status < 0:
        how = f"killed by {_signal_name(-status)}"
    else:
        how = f"exit code {status}"
    hint = " (out of memory?)" if status == -getattr(signal, "SIGKILL", 9) else ""
    text = (
        f"the host of {env.name} (generation {env.generation}) died during "
        f"{env.phase.label}: {how}{hint}{_neighbours(env)}"
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
    return f"; {names_of(others)} shared its host, and lose{'s' * (len(others) == 1)} it too"


def of_neighbour(env: ManagedEnv, failure: EnvFailure) -> EnvCrash:
    """Return the failure of an env whose host was lost by the failure of one that shared it."""
    first_line = str(failure).partition("\n")[0]
    text = (
        f"the host of {env.name} (generation {env.generation}) was lost during "
        f"{env.phase.label}, because it is shared with env {failure.env_id}: {first_line}"
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


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def timeout(env: ManagedEnv, limit_s: float, where: str = "") -> EnvTimeout:
    """Return the failure of an env that exceeded a time limit; `where` is `EnvTimeout.stacks`."""
    key = {"step": "step_timeout", "cancelled step": "step_timeout"}.get(env.phase.label)
    key = key or {"construction": "connect_timeout"}.get(env.phase.label, "reset_timeout")
    during = env.phase.label
    if env.host_id is None:  # a shared host that let go of it
        key, during = "close_timeout", "close"
    text = (
        f"{env.name} (generation {env.generation}) exceeded the {limit_s:g} s of {key} "
        f"in its {during}{_neighbours(env)}"
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
        f"the host of {env.name} (generation {env.generation}) broke the protocol "
        f"during {env.phase.label}: {reason}{_neighbours(env) if loses_host else ''}"
    )
    return EnvProtocolError(
        text, env_id=env.env_id, during=env.phase.label, generation=env.generation
    )


def abnormal_timestep(env: ManagedEnv, failure: EnvFailure, env_info: Any = None) -> EnvTimestep:
    """Return the one timestep that stands for an action whose env failed.

    Args:
        env: the env; its newest observation is the timestep's.
        failure: becomes `info["error"]`.
        env_info: what the env itself said, if it did: a dict, or a list or tuple of dicts, whose
            form is kept.
    """
    obs = copy.deepcopy(env.obs)
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


class Renewals:
    """Renews envs, and goes on after pauses and the ends of hosts.

    Args:
        hosts: to build envs and start hosts.
        statistics: where renewals are counted.
        episodes: begins resets.
        spares: what takes the place of envs whose hosts are gone; None if there is nothing.
    """

    def __init__(
        self,
        hosts: Hosts,
        statistics: Statistics,
        episodes: Episodes,
        spares: Spares | None = None,
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
        """Begin a new generation of envs whose host is gone, in a new one for all of them."""
        for env in envs:
            env.following = Next.NOTHING
            self._begin_generation(env)
        self._hosts.start(envs)

    def _begin_generation(self, env: ManagedEnv) -> None:
        env.generation += 1
        env.renewals_in_a_row += 1
        env.new_generation = True
        env.has_plan = False
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
            self._renew_hosts([s for s in env.group.envs if _awaits_host(s)])
            return
        following, env.following = env.following, Next.NOTHING
        if following is Next.RESET:
            self._begin_reset(env)
        else:
            self.renew_env(env)

    def host_ended(self, group: HostGroup) -> None:
        """The host of these envs is gone: go on with what follows, for all of them together."""
        leaving = [env for env in group.envs if env.phase is Phase.ENDING]
        for env in leaving:
            env.host_id = None
            if env.following is Next.NOTHING:
                self._hosts.settle(env)
        awaiting = [env for env in leaving if env.following is Next.RENEW_HOST]
        returning = [self.take_over(env) for env in awaiting]
        pause_s = max((env.pause_s for env in returning), default=0.0)
        if pause_s > 0.0:
            self._hosts.pause(returning, pause_s, Next.RENEW_HOST)
        elif returning:
            self._renew_hosts(returning)

    def take_over(self, env: ManagedEnv) -> ManagedEnv:
        """Have a spare take the place of an env, if it can; return whose host is to be replaced."""
        if self._spares is None or self._table.launching:
            return env
        return self._spares.take_over(env)


def _awaits_host(env: ManagedEnv) -> bool:
    return env.phase is Phase.PAUSING and env.following is Next.RENEW_HOST


class Repair:
    """Answers failures of envs by the failure policy.

    Args:
        hosts: to renew and end hosts.
        policy: what to do.
        statistics: where failures are counted.
        episodes: begins them, and replaces hosts that want it.
        selections: know how many steps each env has made.
        spares: what takes the place of envs that fail; None if there is nothing.
        auto_reset: whether a repaired env begins an episode by itself.

    Attributes:
        renewals: of envs and hosts.
        launch_failures: by env_id: while envs are launched failures are collected here, and nothing
            is renewed beyond the attempts at one reset.
        quiet: neither failures nor notices are logged: they will come again.
        urgent: what is fatal has to be raised at once.
        fatal_errors: what has to be raised, one by each public call.
    """

    def __init__(
        self,
        hosts: Hosts,
        policy: FailurePolicy,
        statistics: Statistics,
        episodes: Episodes,
        selections: Selections,
        spares: Spares | None = None,
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
        self._replace_worn_host = episodes.replace_host
        self._selections = selections
        self._spares = spares
        self._failed_in_launch: Counter[int] = Counter()  # resets, by index of the host
        self.quiet = False
        self.launch_failures: dict[int, EnvFailure] = {}
        self.fatal_errors: deque[Exception] = deque()
        self.urgent = False

    # -- a failure --------------------------------------------------------------------------

    def fail(
        self,
        env: ManagedEnv,
        failure: EnvFailure,
        lost: Lost,
        env_info: Any = None,
        *,
        charged: bool = True,
    ) -> None:
        """An env failed: settle what it owed, and set its repair going.

        Args:
            env: the env.
            failure: what happened.
            lost: what is not to be used again.
            env_info: the info of a step that the env itself called abnormal.
            charged: it counts against the budget; not what its user has interrupted.
        """
        if self._takes_host(env, lost):
            lost = Lost.HOST
        if env.phase is Phase.CALLING:
            env.result = failure
            if lost is Lost.NOTHING:  # the caller's own request raised: the env is well
                self.call_ended(env)
                return
        self._count(env, failure)
        self._restorations.failed(env, is_lost=lost is not Lost.NOTHING)
        if self._spares is not None:
            self._spares.failed(env)
        if not self.quiet:
            logger.warning("%s", failure)
        if env.host_id is not None:  # else the host let go of it before, and failed in doing so
            self._settle_and_answer(env, failure, lost, env_info, charged=charged)
        if lost is Lost.HOST:
            self._lose_host(env, failure)
        else:
            self._replace_worn_host(env.group)

    def _takes_host(self, env: ManagedEnv, lost: Lost) -> bool:
        """Whether an env that has failed cannot be repaired in the host that it has.

        The rows of a batched env have no new env but in a new host, with all of them.
        """
        if env.batch is None:
            return lost is Lost.ENV and not env.group.is_shared
        phase, policy = env.phase, self._policy
        if lost is Lost.ENV or phase is Phase.STARTING:
            return True
        if phase is Phase.RESETTING:
            return policy.renew_between_attempts or env.attempts + 1 >= policy.max_retry
        return policy.renew_between_attempts and phase is not Phase.CALLING

    def _count(self, env: ManagedEnv, failure: EnvFailure) -> None:
        if env.is_spare:
            self._statistics.count_spare_failure(failure)
            return
        self._statistics.count_failure(failure)
        self._statistics.note_failed(env.env_id, env.generation, self._hosts.clock())

    def _settle_and_answer(
        self, env: ManagedEnv, failure: EnvFailure, lost: Lost, env_info: Any, *, charged: bool
    ) -> None:
        phase = env.phase
        retry = phase is Phase.RESETTING and self._may_retry(env, lost)
        if not retry:
            self._settle_failed_work(env, phase, failure, env_info)
        if self._states[env.env_id] is EnvState.DONE:
            self._give_up(env, lost)  # renewed if its user resets it
        elif self._table.launching:
            self._answer_in_launch(env, failure, lost, retry=retry)
        elif retry:
            self._retry(env)
        elif not self._policy.recover and not env.is_spare:
            self.raise_at_once(failure)
            self._give_up(env, lost)
        else:
            self._answer(env, phase, failure, lost, charged=charged)

    def _lose_host(self, culprit: ManagedEnv, failure: EnvFailure) -> None:
        """End the host that an env has failed with, and settle what becomes of its neighbours."""
        group = culprit.group
        for env in group.present():
            if env is not culprit:
                self._involve(env, culprit, failure)
        if group.host_id is None:
            self.renewals.host_ended(group)
        else:
            self._hosts.end(group, ask=False)

    def _involve(self, env: ManagedEnv, culprit: ManagedEnv, failure: EnvFailure) -> None:
        """The host of an env is lost by the failure of a neighbour: nothing is charged to it."""
        own = of_neighbour(env, failure)
        self._statistics.note_failed(env.env_id, env.generation, self._hosts.clock())
        if env.phase is Phase.CALLING:
            env.result = own
        self._restorations.resume(env)
        self._settle_failed_work(env, env.phase, own, None)
        gives_up = self._states[env.env_id] is EnvState.DONE or self.urgent
        if self._table.launching and culprit.env_id in self.launch_failures:
            self.launch_failures.setdefault(env.env_id, own)
            gives_up = True
        pause_s = self._policy.renewal_delay_s(env.renewals_in_a_row)
        self._hosts.leave(env, Next.NOTHING if gives_up else Next.RENEW_HOST, pause_s)

    def raise_at_once(self, failure: EnvFailure) -> None:
        """Have the present or next public call raise `failure` before anything else.

        A launch fails with it: nothing is tried again.
        """
        if self._table.launching:
            self.launch_failures[failure.env_id] = failure
            return
        self.fatal_errors.append(failure)
        self.urgent = True

    def raise_later(self, error: Exception) -> None:
        """Have the next public call raise `error` after what has arrived was delivered."""
        self.fatal_errors.append(error)

    @property
    def fatal(self) -> Exception | None:
        """What the next public call has to raise; each error is raised by a call of its own."""
        return self.fatal_errors[0] if self.fatal_errors else None

    def take_fatal(self) -> Exception | None:
        """Return what is to be raised now, once."""
        self.urgent = False
        return self.fatal_errors.popleft() if self.fatal_errors else None

    def _may_retry(self, env: ManagedEnv, lost: Lost) -> bool:
        """Count a failed attempt at a reset, and say whether there is to be another one."""
        env.attempts += 1
        left = env.attempts < self._policy.max_retry
        if not self._table.launching:
            return left and lost is Lost.NOTHING
        # Whoever takes a shared host along has its neighbours reset once more, and these may do the
        # same to it, in turns: a launch has so many attempts in all as each env has by itself.
        group, failed = env.group, self._failed_in_launch
        failed[group.index] += 1
        left = left and env.env_id not in self.launch_failures
        return left and failed[group.index] < len(group.envs) * self._policy.max_retry

    def _settle_failed_work(
        self, env: ManagedEnv, phase: Phase, failure: EnvFailure, env_info: Any
    ) -> None:
        state = self._states[env.env_id]
        if phase in (Phase.STEPPING, Phase.CALLING, Phase.IDLE) and state is not EnvState.RESET:
            # The first reset of an env is the launch's, whoever begins the later ones.
            env.attended = self._auto_reset or self._table.launching
        if phase is Phase.STEPPING:
            env.timestep = abnormal_timestep(env, failure, env_info)
            self._statistics.abnormal += 1
            self._table.happened(env.env_id, Event.FAILED)
        elif phase is Phase.CANCELLING:
            return  # it stays in RESET, which its user has called for
        elif env.failed_while_ready is not None:
            env.fresh = None  # the user still sees the observation that was ready
        elif state is EnvState.RUN and not self._table.launching:
            env.failed_while_ready = failure
        elif state in (EnvState.INIT, EnvState.RESET, EnvState.RUN):
            self._table.happened(env.env_id, Event.FAILED)

    # -- the answer -------------------------------------------------------------------------

    def _answer_in_launch(
        self, env: ManagedEnv, failure: EnvFailure, lost: Lost, *, retry: bool
    ) -> None:
        pause_s = self._policy.retry_waiting_s
        if not retry:
            self.launch_failures[env.env_id] = failure
            self._give_up(env, lost)
        elif lost is Lost.NOTHING:
            self._retry(env)
        else:
            self._table.happened(env.env_id, Event.FAILED)
            if lost is Lost.HOST:
                self._hosts.leave(env, Next.RENEW_HOST, pause_s)
            else:
                self._hosts.pause([env], pause_s, Next.RENEW_ENV)

    def _retry(self, env: ManagedEnv) -> None:
        self._statistics.reset_retries += 1
        following = Next.RENEW_ENV if self._policy.renew_between_attempts else Next.RESET
        self._hosts.pause([env], self._policy.retry_waiting_s, following)

    def _answer(
        self, env: ManagedEnv, phase: Phase, failure: EnvFailure, lost: Lost, *, charged: bool
    ) -> None:
        env.attempts = 0
        exceeded = None
        if charged and not isinstance(failure, EnvReportedAbnormal):  # nothing had to be repaired
            exceeded = self._budget.charge(
                env.env_id,
                failure,
                self._hosts.clock(),
                steps=self._selections.steps_of(env.env_id),
                steps_of_all=self._statistics.actions,
            )
        pause_s = self._policy.renewal_delay_s(env.renewals_in_a_row)
        if exceeded is not None:
            self._exhaust(env, exceeded, lost)
        elif lost is Lost.HOST:
            self._hosts.leave(env, Next.RENEW_HOST, pause_s)
        elif lost is Lost.NOTHING and phase in (Phase.STEPPING, Phase.CANCELLING):
            self._repair_after_step(env)
        elif env.group.is_shared:
            self._hosts.pause([env], pause_s, Next.RENEW_ENV)
        else:  # the attempts at a reset are used up, or a new env could not be built
            group = env.group
            self._hosts.leave(env, Next.RENEW_HOST, pause_s)
            self.renewals.take_over(env)
            self._hosts.end(group, ask=True)

    def _repair_after_step(self, env: ManagedEnv) -> None:
        renews = self._policy.renew_between_attempts
        if self._spares is not None and env.attended and env.phase is Phase.STEPPING:
            self._spares.ended(env, self.renewals.renew_env if renews else self._begin_reset)
        elif renews:
            self.renewals.renew_env(env)
        elif env.attended:
            self._begin_reset(env)
        else:
            self._hosts.settle(env)
            self._table.happened(env.env_id, Event.REPAIRED_UNATTENDED)

    def _give_up(self, env: ManagedEnv, lost: Lost) -> None:
        """Leave an env as it is, without what is lost."""
        if lost is Lost.HOST:
            self._hosts.leave(env, Next.NOTHING)
        elif lost is Lost.ENV:
            self._release(env)
        else:
            self._hosts.settle(env)

    def _release(self, env: ManagedEnv) -> None:
        """Have a healthy host let go of an env; the last one takes the host with it."""
        if env.group.present() == [env]:
            self._hosts.leave(env, Next.NOTHING)
            self._hosts.end(env.group, ask=True)
        else:
            self._hosts.release(env)
            released(self._hosts, env.env_id)

    def bring_back(self, env: ManagedEnv) -> None:
        """Renew an env that takes part in no host, because its user repairs it by hand."""
        self.renewals.bring_back(env)

    def forgive(self, env: ManagedEnv) -> None:
        """Forget an env's failures: its user repairs it by hand."""
        self._budget.forgive(env.env_id)
        env.renewals_in_a_row = 0
        env.attempts = 0

    def call_ended(self, env: ManagedEnv) -> None:
        """A call is over; a reset that was asked for meanwhile begins."""
        self._hosts.settle(env)
        if self._states[env.env_id] is EnvState.RESET and not env.waits:
            self._begin_reset(env)
        else:
            self._replace_worn_host(env.group)

    # -- actions that nobody executes -------------------------------------------------------------

    def answer_unexecuted(self) -> None:
        """Give the actions of envs that had died while they were ready their abnormal timesteps.

        Not to be interrupted.
        """
        for env_id in sorted(self._table.unexecuted):
            self._answer_unexecuted(self._table.envs[env_id])
            self._table.unexecuted.discard(env_id)

    def _answer_unexecuted(self, env: ManagedEnv) -> None:
        """Give the action of an env its abnormal timestep, and catch up with its repair."""
        failure = env.failed_while_ready
        env.failed_while_ready = None
        if failure is None:
            raise RuntimeError("an env without failure: a defect of envmgr, please report it")
        env_id = env.env_id
        env.timestep = abnormal_timestep(env, failure)
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
        self._replace_worn_host(env.group)

    # -- the end of the budget --------------------------------------------------------------

    def _exhaust(self, env: ManagedEnv, exceeded: str, lost: Lost) -> None:
        cause = self._budget.first_cause(env.env_id)
        env.awaits_reset = False
        if env.failed_while_ready is None and self._states[env.env_id] is not EnvState.ERROR:
            self._table.happened(env.env_id, Event.FAILED)
        self._give_up(env, Lost.ENV if lost is Lost.NOTHING else lost)
        if env.is_spare:
            logger.error("%s: it is dropped, and the run goes on without it. %s", exceeded, cause)
            env.dropped = True
            return
        if self._policy.drop_exhausted:
            logger.error("%s: env %d is dropped (on_exhausted: drop)", exceeded, env.env_id)
            env.dropped = True
            if env.failed_while_ready is None:
                self._table.happened(env.env_id, Event.DROP)
            return
        error = FailuresExhaustedError(
            f"{exceeded}. It is not repaired any more; the other envs are as they were. Look at "
            f"the first failure below, and then: raise that limit or lower failure_window_s, set "
            f"on_exhausted: drop to go on without it, or call reset({{{env.env_id}: None}}) to "
            f"have it repaired once more. First failure: {cause}",
            cause,
        )
        logger.error("%s", error)
        self.raise_later(error)
