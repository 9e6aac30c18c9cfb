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
from envmgr.core.table import EnvSlot, HostGroup, Selections, names_of
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


def reported(slot: EnvSlot, remote: RemoteFailure) -> EnvFailure:
    """Return the failure that a host reported."""
    env_id, generation, during = slot.env_id, slot.generation, remote.during
    where = f"{slot.name} (generation {generation})"
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


def crash(slot: EnvSlot, died: HostDied) -> EnvCrash:
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
        f"the host of {slot.name} (generation {slot.generation}) died during "
        f"{slot.phase.label}: {how}{hint}{_neighbours(slot)}"
    )
    if died.last_words:
        text += f"\n\nThe end of its stderr:\n{died.last_words}"
    return EnvCrash(
        text,
        env_id=slot.env_id,
        during=slot.phase.label,
        generation=slot.generation,
        exit_status=status,
        stderr_tail=died.last_words,
    )


def _neighbours(slot: EnvSlot) -> str:
    """Name the envs that lose their host with this one; empty if there are none."""
    others = [other for other in slot.group.present() if other is not slot]
    if not others:
        return ""
    return f"; {names_of(others)} shared its host, and lose{'s' * (len(others) == 1)} it too"


def of_neighbour(slot: EnvSlot, failure: EnvFailure) -> EnvCrash:
    """Return the failure of an env whose host was lost by the failure of one that shared it."""
    first_line = str(failure).partition("\n")[0]
    text = (
        f"the host of {slot.name} (generation {slot.generation}) was lost during "
        f"{slot.phase.label}, because it is shared with env {failure.env_id}: {first_line}"
    )
    crash = EnvCrash(
        text,
        env_id=slot.env_id,
        during=slot.phase.label,
        generation=slot.generation,
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


def timeout(slot: EnvSlot, limit_s: float, where: str = "") -> EnvTimeout:
    """Return the failure of an env that exceeded a time limit; `where` is `EnvTimeout.stacks`."""
    key = {"step": "step_timeout", "cancelled step": "step_timeout"}.get(slot.phase.label)
    key = key or {"construction": "connect_timeout"}.get(slot.phase.label, "reset_timeout")
    during = slot.phase.label
    if slot.host_id is None:  # a shared host that let go of it
        key, during = "close_timeout", "close"
    text = (
        f"{slot.name} (generation {slot.generation}) exceeded the {limit_s:g} s of {key} "
        f"in its {during}{_neighbours(slot)}"
    )
    if where:
        text += f"\n\nWhere it was:\n{where}"
    return EnvTimeout(
        text,
        env_id=slot.env_id,
        during=during,
        generation=slot.generation,
        limit_s=limit_s,
        stacks=where,
    )


def protocol(slot: EnvSlot, reason: str, *, loses_host: bool = True) -> EnvProtocolError:
    """Return the failure of an env whose host sent something malformed."""
    text = (
        f"the host of {slot.name} (generation {slot.generation}) broke the protocol "
        f"during {slot.phase.label}: {reason}{_neighbours(slot) if loses_host else ''}"
    )
    return EnvProtocolError(
        text, env_id=slot.env_id, during=slot.phase.label, generation=slot.generation
    )


def abnormal_timestep(slot: EnvSlot, failure: EnvFailure, env_info: Any = None) -> EnvTimestep:
    """Return the one timestep that stands for an action whose env failed.

    Args:
        slot: the env; its newest observation is the timestep's.
        failure: becomes `info["error"]`.
        env_info: what the env itself said, if it did: a dict, or a list or tuple of dicts, whose
            form is kept.
    """
    obs = copy.deepcopy(slot.obs)
    reward, terminated, truncated = slot.record.observed.lost_step(slot.env_id, obs)
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
        self._record = hosts.record
        self._states = hosts.record.states
        self._statistics = statistics
        self._begin_reset = episodes.begin
        self._spares = spares

    def renew_env(self, slot: EnvSlot) -> None:
        """Begin a new generation of an env in the host of its group."""
        self._begin_generation(slot)
        self._hosts.build(slot)

    def _renew_hosts(self, slots: Sequence[EnvSlot]) -> None:
        """Begin a new generation of envs whose host is gone, in a new one for all of them."""
        for slot in slots:
            slot.following = Next.NOTHING
            self._begin_generation(slot)
        self._hosts.start(slots)

    def _begin_generation(self, slot: EnvSlot) -> None:
        slot.generation += 1
        slot.renewals_in_a_row += 1
        slot.new_generation = True
        slot.has_plan = False
        self._statistics.renewals += 1
        self._statistics.has_generations = True
        if self._states[slot.env_id] is EnvState.ERROR:
            self._record.happened(slot.env_id, Event.RENEW)

    def bring_back(self, slot: EnvSlot) -> None:
        """Renew an env that takes part in no host, because its user repairs it by hand."""
        group = slot.group
        awaiting = [s for s in group.slots if s.phase is Phase.ENDING or _awaits_host(s)]
        if awaiting:
            self._hosts.join(slot, awaiting[0])
        elif group.host_id is None:
            self._renew_hosts([slot])
        else:
            self.renew_env(slot)

    def proceed(self, slot: EnvSlot) -> None:
        """Begin what was to follow a pause."""
        if _awaits_host(slot):
            self._renew_hosts([s for s in slot.group.slots if _awaits_host(s)])
            return
        following, slot.following = slot.following, Next.NOTHING
        if following is Next.RESET:
            self._begin_reset(slot)
        else:
            self.renew_env(slot)

    def host_ended(self, group: HostGroup) -> None:
        """The host of these envs is gone: go on with what follows, for all of them together."""
        leaving = [slot for slot in group.slots if slot.phase is Phase.ENDING]
        for slot in leaving:
            slot.host_id = None
            if slot.following is Next.NOTHING:
                self._hosts.settle(slot)
        awaiting = [slot for slot in leaving if slot.following is Next.RENEW_HOST]
        returning = [self.take_over(slot) for slot in awaiting]
        pause_s = max((slot.pause_s for slot in returning), default=0.0)
        if pause_s > 0.0:
            self._hosts.pause(returning, pause_s, Next.RENEW_HOST)
        elif returning:
            self._renew_hosts(returning)

    def take_over(self, slot: EnvSlot) -> EnvSlot:
        """Have a spare take the place of an env, if it can; return whose host is to be replaced."""
        if self._spares is None or self._record.launching:
            return slot
        return self._spares.take_over(slot)


def _awaits_host(slot: EnvSlot) -> bool:
    return slot.phase is Phase.PAUSING and slot.following is Next.RENEW_HOST


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
        self._record = hosts.record
        self._states = hosts.record.states
        self._policy = policy
        self._budget = FailureBudget(policy, hosts.env_num, len(hosts.slots) - hosts.env_num)
        self._statistics = statistics
        self._auto_reset = auto_reset
        self.renewals = Renewals(hosts, statistics, episodes, spares)
        self._begin_reset = episodes.begin
        self._restorations = episodes.restorations
        self._replace_worn_host = episodes.replace_worn_host
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
        slot: EnvSlot,
        failure: EnvFailure,
        lost: Lost,
        env_info: Any = None,
        *,
        charged: bool = True,
    ) -> None:
        """An env failed: settle what it owed, and set its repair going.

        Args:
            slot: the env.
            failure: what happened.
            lost: what is not to be used again.
            env_info: the info of a step that the env itself called abnormal.
            charged: it counts against the budget; not what its user has interrupted.
        """
        if self._takes_host(slot, lost):
            lost = Lost.HOST
        if slot.phase is Phase.CALLING:
            slot.result = failure
            if lost is Lost.NOTHING:  # the caller's own request raised: the env is well
                self.call_ended(slot)
                return
        self._count(slot, failure)
        self._restorations.failed(slot, is_lost=lost is not Lost.NOTHING)
        if self._spares is not None:
            self._spares.failed(slot)
        if not self.quiet:
            logger.warning("%s", failure)
        if slot.host_id is not None:  # else the host let go of it before, and failed in doing so
            self._settle_and_answer(slot, failure, lost, env_info, charged=charged)
        if lost is Lost.HOST:
            self._lose_host(slot, failure)
        else:
            self._replace_worn_host(slot.group)

    def _takes_host(self, slot: EnvSlot, lost: Lost) -> bool:
        """Whether an env that has failed cannot be repaired in the host that it has.

        The rows of a batched env have no new env but in a new host, with all of them.
        """
        if slot.batch is None:
            return lost is Lost.ENV and not slot.group.is_shared
        phase, policy = slot.phase, self._policy
        if lost is Lost.ENV or phase is Phase.STARTING:
            return True
        if phase is Phase.RESETTING:
            return policy.renew_between_attempts or slot.attempts + 1 >= policy.max_retry
        return policy.renew_between_attempts and phase is not Phase.CALLING

    def _count(self, slot: EnvSlot, failure: EnvFailure) -> None:
        if slot.is_spare:
            self._statistics.count_spare_failure(failure)
            return
        self._statistics.count_failure(failure)
        self._statistics.note_failed(slot.env_id, slot.generation, self._hosts.clock())

    def _settle_and_answer(
        self, slot: EnvSlot, failure: EnvFailure, lost: Lost, env_info: Any, *, charged: bool
    ) -> None:
        phase = slot.phase
        retry = phase is Phase.RESETTING and self._may_retry(slot, lost)
        if not retry:
            self._settle_failed_work(slot, phase, failure, env_info)
        if self._states[slot.env_id] is EnvState.DONE:
            self._give_up(slot, lost)  # renewed if its user resets it
        elif self._record.launching:
            self._answer_in_launch(slot, failure, lost, retry=retry)
        elif retry:
            self._retry(slot)
        elif not self._policy.recover and not slot.is_spare:
            self.raise_at_once(failure)
            self._give_up(slot, lost)
        else:
            self._answer(slot, phase, failure, lost, charged=charged)

    def _lose_host(self, culprit: EnvSlot, failure: EnvFailure) -> None:
        """End the host that an env has failed with, and settle what becomes of its neighbours."""
        group = culprit.group
        for slot in group.present():
            if slot is not culprit:
                self._involve(slot, culprit, failure)
        if group.host_id is None:
            self.renewals.host_ended(group)
        else:
            self._hosts.end(group, ask=False)

    def _involve(self, slot: EnvSlot, culprit: EnvSlot, failure: EnvFailure) -> None:
        """The host of an env is lost by the failure of a neighbour: nothing is charged to it."""
        own = of_neighbour(slot, failure)
        self._statistics.note_failed(slot.env_id, slot.generation, self._hosts.clock())
        if slot.phase is Phase.CALLING:
            slot.result = own
        self._restorations.resume(slot)
        self._settle_failed_work(slot, slot.phase, own, None)
        gives_up = self._states[slot.env_id] is EnvState.DONE or self.urgent
        if self._record.launching and culprit.env_id in self.launch_failures:
            self.launch_failures.setdefault(slot.env_id, own)
            gives_up = True
        pause_s = self._policy.renewal_delay_s(slot.renewals_in_a_row)
        self._hosts.leave(slot, Next.NOTHING if gives_up else Next.RENEW_HOST, pause_s)

    def raise_at_once(self, failure: EnvFailure) -> None:
        """Have the present or next public call raise `failure` before anything else.

        A launch fails with it: nothing is tried again.
        """
        if self._record.launching:
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

    def _may_retry(self, slot: EnvSlot, lost: Lost) -> bool:
        """Count a failed attempt at a reset, and say whether there is to be another one."""
        slot.attempts += 1
        left = slot.attempts < self._policy.max_retry
        if not self._record.launching:
            return left and lost is Lost.NOTHING
        # Whoever takes a shared host along has its neighbours reset once more, and these may do the
        # same to it, in turns: a launch has so many attempts in all as each env has by itself.
        group, failed = slot.group, self._failed_in_launch
        failed[group.index] += 1
        left = left and slot.env_id not in self.launch_failures
        return left and failed[group.index] < len(group.slots) * self._policy.max_retry

    def _settle_failed_work(
        self, slot: EnvSlot, phase: Phase, failure: EnvFailure, env_info: Any
    ) -> None:
        state = self._states[slot.env_id]
        if phase in (Phase.STEPPING, Phase.CALLING, Phase.IDLE) and state is not EnvState.RESET:
            # The first reset of an env is the launch's, whoever begins the later ones.
            slot.attended = self._auto_reset or self._record.launching
        if phase is Phase.STEPPING:
            slot.timestep = abnormal_timestep(slot, failure, env_info)
            self._statistics.abnormal += 1
            self._record.happened(slot.env_id, Event.FAILED)
        elif phase is Phase.CANCELLING:
            return  # it stays in RESET, which its user has called for
        elif slot.doomed is not None:
            slot.fresh = None  # the user still sees the observation that was ready
        elif state is EnvState.RUN and not self._record.launching:
            slot.doomed = failure
        elif state in (EnvState.INIT, EnvState.RESET, EnvState.RUN):
            self._record.happened(slot.env_id, Event.FAILED)

    # -- the answer -------------------------------------------------------------------------

    def _answer_in_launch(
        self, slot: EnvSlot, failure: EnvFailure, lost: Lost, *, retry: bool
    ) -> None:
        pause_s = self._policy.retry_waiting_s
        if not retry:
            self.launch_failures[slot.env_id] = failure
            self._give_up(slot, lost)
        elif lost is Lost.NOTHING:
            self._retry(slot)
        else:
            self._record.happened(slot.env_id, Event.FAILED)
            if lost is Lost.HOST:
                self._hosts.leave(slot, Next.RENEW_HOST, pause_s)
            else:
                self._hosts.pause([slot], pause_s, Next.RENEW_ENV)

    def _retry(self, slot: EnvSlot) -> None:
        self._statistics.reset_retries += 1
        following = Next.RENEW_ENV if self._policy.renew_between_attempts else Next.RESET
        self._hosts.pause([slot], self._policy.retry_waiting_s, following)

    def _answer(
        self, slot: EnvSlot, phase: Phase, failure: EnvFailure, lost: Lost, *, charged: bool
    ) -> None:
        slot.attempts = 0
        exceeded = None
        if charged and not isinstance(failure, EnvReportedAbnormal):  # nothing had to be repaired
            exceeded = self._budget.charge(
                slot.env_id,
                failure,
                self._hosts.clock(),
                steps=self._selections.steps_of(slot.env_id),
                steps_of_all=self._statistics.actions,
            )
        pause_s = self._policy.renewal_delay_s(slot.renewals_in_a_row)
        if exceeded is not None:
            self._exhaust(slot, exceeded, lost)
        elif lost is Lost.HOST:
            self._hosts.leave(slot, Next.RENEW_HOST, pause_s)
        elif lost is Lost.NOTHING and phase in (Phase.STEPPING, Phase.CANCELLING):
            self._repair_after_step(slot)
        elif slot.group.is_shared:
            self._hosts.pause([slot], pause_s, Next.RENEW_ENV)
        else:  # the attempts at a reset are used up, or a new env could not be built
            group = slot.group
            self._hosts.leave(slot, Next.RENEW_HOST, pause_s)
            self.renewals.take_over(slot)
            self._hosts.end(group, ask=True)

    def _repair_after_step(self, slot: EnvSlot) -> None:
        renews = self._policy.renew_between_attempts
        if self._spares is not None and slot.attended and slot.phase is Phase.STEPPING:
            self._spares.ended(slot, self.renewals.renew_env if renews else self._begin_reset)
        elif renews:
            self.renewals.renew_env(slot)
        elif slot.attended:
            self._begin_reset(slot)
        else:
            self._hosts.settle(slot)
            self._record.happened(slot.env_id, Event.REPAIRED_UNATTENDED)

    def _give_up(self, slot: EnvSlot, lost: Lost) -> None:
        """Leave an env as it is, without what is lost."""
        if lost is Lost.HOST:
            self._hosts.leave(slot, Next.NOTHING)
        elif lost is Lost.ENV:
            self._release(slot)
        else:
            self._hosts.settle(slot)

    def _release(self, slot: EnvSlot) -> None:
        """Have a healthy host let go of an env; the last one takes the host with it."""
        if slot.group.present() == [slot]:
            self._hosts.leave(slot, Next.NOTHING)
            self._hosts.end(slot.group, ask=True)
        else:
            self._hosts.release(slot)
            released(self._hosts, slot.env_id)

    def bring_back(self, slot: EnvSlot) -> None:
        """Renew an env that takes part in no host, because its user repairs it by hand."""
        self.renewals.bring_back(slot)

    def forgive(self, slot: EnvSlot) -> None:
        """Forget an env's failures: its user repairs it by hand."""
        self._budget.forgive(slot.env_id)
        slot.renewals_in_a_row = 0
        slot.attempts = 0

    def call_ended(self, slot: EnvSlot) -> None:
        """A call is over; a reset that was asked for meanwhile begins."""
        self._hosts.settle(slot)
        if self._states[slot.env_id] is EnvState.RESET and not slot.waits:
            self._begin_reset(slot)
        else:
            self._replace_worn_host(slot.group)

    # -- actions that nobody executes -------------------------------------------------------------

    def answer_unexecuted(self) -> None:
        """Give the actions of envs that had died while they were ready their abnormal timesteps.

        Not to be interrupted.
        """
        for env_id in sorted(self._record.unexecuted):
            self._answer_unexecuted(self._record.slots[env_id])
            self._record.unexecuted.discard(env_id)

    def _answer_unexecuted(self, slot: EnvSlot) -> None:
        """Give the action of an env its abnormal timestep, and catch up with its repair."""
        failure = slot.doomed
        slot.doomed = None
        if failure is None:
            raise RuntimeError("an env without failure: a defect of envmgr, please report it")
        env_id = slot.env_id
        slot.timestep = abnormal_timestep(slot, failure)
        self._statistics.abnormal += 1
        self._record.happened(env_id, Event.FAILED)
        if slot.dropped:
            self._record.happened(env_id, Event.DROP)
        elif slot.fresh is not None:
            (slot.obs, slot.reset_info), slot.fresh = slot.fresh, None
            self._record.happened(env_id, Event.BEGIN_RESET)
            self._record.happened(env_id, Event.RESET_SUCCEEDED)
        elif slot.phase is Phase.RESETTING:
            self._record.happened(env_id, Event.BEGIN_RESET)
        elif slot.phase is Phase.STARTING:
            self._record.happened(env_id, Event.RENEW)
        elif slot.phase is Phase.IDLE and slot.host_id is not None:  # renewed, auto_reset off
            self._record.happened(env_id, Event.REPAIRED_UNATTENDED)
        self._replace_worn_host(slot.group)

    # -- the end of the budget --------------------------------------------------------------

    def _exhaust(self, slot: EnvSlot, exceeded: str, lost: Lost) -> None:
        cause = self._budget.first_cause(slot.env_id)
        slot.held = False
        if slot.doomed is None and self._states[slot.env_id] is not EnvState.ERROR:
            self._record.happened(slot.env_id, Event.FAILED)
        self._give_up(slot, Lost.ENV if lost is Lost.NOTHING else lost)
        if slot.is_spare:
            logger.error("%s: it is dropped, and the run goes on without it. %s", exceeded, cause)
            slot.dropped = True
            return
        if self._policy.drop_exhausted:
            logger.error("%s: env %d is dropped (on_exhausted: drop)", exceeded, slot.env_id)
            slot.dropped = True
            if slot.doomed is None:
                self._record.happened(slot.env_id, Event.DROP)
            return
        error = FailuresExhaustedError(
            f"{exceeded}. It is not repaired any more; the other envs are as they were. Look at "
            f"the first failure below, and then: raise that limit or lower failure_window_s, set "
            f"on_exhausted: drop to go on without it, or call reset({{{slot.env_id}: None}}) to "
            f"have it repaired once more. First failure: {cause}",
            cause,
        )
        logger.error("%s", error)
        self.raise_later(error)
