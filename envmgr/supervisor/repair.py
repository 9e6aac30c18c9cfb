"""What follows a failure: an abnormal timestep, a retry, a renewal, or the end of the budget."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Any

from envmgr.errors import EnvFailure, FailuresExhaustedError
from envmgr.lifecycle import EnvState, Event, StateTable
from envmgr.policy import FailureBudget, FailurePolicy
from envmgr.protocol import Op
from envmgr.supervisor import failures
from envmgr.supervisor.hosts import Hosts
from envmgr.supervisor.slots import EnvSlot, Next, Work
from envmgr.supervisor.stats import Statistics

logger = logging.getLogger("envmgr")


class Repair:
    """Answers failures of envs by the failure policy.

    Args:
        hosts: to renew and end hosts.
        states: the states of all envs.
        policy: what to do.
        statistics: where failures are counted.
        auto_reset: whether a repaired env begins an episode by itself.
        begin_reset: sends the reset of an env.

    Attributes:
        launching: while true, failures are collected in `launch_failures` and nothing is renewed
            beyond the attempts at one reset.
        launch_failures: by env_id.
        urgent: what is fatal has to be raised at once.
    """

    def __init__(
        self,
        hosts: Hosts,
        states: StateTable,
        policy: FailurePolicy,
        statistics: Statistics,
        *,
        auto_reset: bool,
        begin_reset: Callable[[EnvSlot], None],
    ) -> None:
        self._hosts = hosts
        self._states = states
        self._policy = policy
        self._budget = FailureBudget(policy, len(states))
        self._statistics = statistics
        self._auto_reset = auto_reset
        self._begin_reset = begin_reset
        self.launching = True
        self.launch_failures: dict[int, EnvFailure] = {}
        self._fatal: deque[Exception] = deque()
        self.urgent = False

    # -- a failure --------------------------------------------------------------------------

    def fail(
        self, slot: EnvSlot, failure: EnvFailure, *, host_lost: bool, env_info: Any = None
    ) -> None:
        """An env failed: settle what it owed, and set its repair going.

        Args:
            slot: the env.
            failure: what happened.
            host_lost: its host died, timed out or broke the protocol, and is not used again.
            env_info: the info of a step that the env itself called abnormal.
        """
        work = slot.work
        if work is Work.CALLING:
            slot.result = failure
            if not host_lost:  # the caller's own request raised: nothing is wrong with the env
                self.call_ended(slot)
                return
        self._statistics.count_failure(failure)
        logger.warning("%s", failure)
        retry = work is Work.RESETTING and self._may_retry(slot, host_lost)
        if not retry:
            self._settle_failed_work(slot, work, failure, env_info)
        if self._states[slot.env_id] is EnvState.DONE:
            self._give_up_host(slot, host_lost=host_lost)  # renewed if its user resets it
        elif self.launching:
            self._answer_in_launch(slot, failure, host_lost=host_lost, retry=retry)
        elif retry:
            self._retry(slot)
        elif not self._policy.recover:
            self.raise_at_once(failure)
            self._give_up_host(slot, host_lost=host_lost)
        else:
            self._answer(slot, work, failure, host_lost=host_lost)

    def raise_at_once(self, failure: Exception) -> None:
        """Have the present or next public call raise `failure` before anything else."""
        self._fatal.append(failure)
        self.urgent = True

    def raise_later(self, error: Exception) -> None:
        """Have the next public call raise `error` after what has arrived was delivered."""
        self._fatal.append(error)

    @property
    def fatal(self) -> Exception | None:
        """What the next public call has to raise; each error is raised by a call of its own."""
        return self._fatal[0] if self._fatal else None

    def take_fatal(self) -> Exception | None:
        """Return what is to be raised now, once."""
        self.urgent = False
        return self._fatal.popleft() if self._fatal else None

    def _may_retry(self, slot: EnvSlot, host_lost: bool) -> bool:
        """Count a failed attempt at a reset, and say whether there is to be another one."""
        slot.attempts += 1
        left = slot.attempts < self._policy.max_retry
        return left and (self.launching or not host_lost)

    def _settle_failed_work(
        self, slot: EnvSlot, work: Work, failure: EnvFailure, env_info: Any
    ) -> None:
        state = self._states[slot.env_id]
        if work in (Work.STEPPING, Work.CALLING, Work.NONE) and state is not EnvState.RESET:
            slot.attended = self._auto_reset
        if work is Work.STEPPING:
            slot.timestep = failures.abnormal_timestep(slot, failure, env_info)
            self._statistics.abnormal += 1
            self._states.apply(slot.env_id, Event.FAILED)
        elif work is Work.CANCELLING:
            return  # it stays in RESET, which its user has called for
        elif slot.doomed is not None:
            slot.fresh = None  # the user still sees the observation that was ready
        elif state is EnvState.RUN:
            slot.doomed = failure
        elif state in (EnvState.INIT, EnvState.RESET):
            self._states.apply(slot.env_id, Event.FAILED)

    # -- the answer -------------------------------------------------------------------------

    def _answer_in_launch(
        self, slot: EnvSlot, failure: EnvFailure, *, host_lost: bool, retry: bool
    ) -> None:
        if retry and not host_lost:
            self._retry(slot)
        elif retry:
            self._states.apply(slot.env_id, Event.FAILED)
            self._renew_lost_host(slot, self._policy.retry_waiting_s)
        else:
            self.launch_failures[slot.env_id] = failure
            self._give_up_host(slot, host_lost=host_lost)

    def _retry(self, slot: EnvSlot) -> None:
        self._statistics.reset_retries += 1
        following = Next.RENEW_ENV if self._policy.renew_between_attempts else Next.RESET
        self._hosts.pause(slot, self._policy.retry_waiting_s, following)

    def _answer(self, slot: EnvSlot, work: Work, failure: EnvFailure, *, host_lost: bool) -> None:
        slot.attempts = 0
        exceeded = self._budget.charge(slot.env_id, failure, self._hosts.clock())
        if exceeded is not None:
            self._exhaust(slot, exceeded, host_lost=host_lost)
        elif host_lost or slot.host_id is None:
            self._renew_lost_host(slot, self._policy.renewal_delay_s(slot.renewals_in_a_row))
        elif work in (Work.STEPPING, Work.CANCELLING):
            self._repair_after_step(slot)
        else:  # the attempts at a reset are used up, or a new env could not be built
            pause_s = self._policy.renewal_delay_s(slot.renewals_in_a_row)
            self._hosts.end(slot, Next.RENEW_HOST, pause_s, ask=True)

    def _repair_after_step(self, slot: EnvSlot) -> None:
        if self._policy.renew_between_attempts:
            self.renew(slot, new_host=False)
        elif slot.attended:
            self._begin_reset(slot)
        else:
            self._hosts.settle(slot)
            self._states.apply(slot.env_id, Event.REPAIRED_UNATTENDED)

    def _renew_lost_host(self, slot: EnvSlot, pause_s: float) -> None:
        if slot.host_id is None:
            self._hosts.pause(slot, pause_s, Next.RENEW_HOST)
        else:
            self._hosts.end(slot, Next.RENEW_HOST, pause_s, ask=False)

    def _give_up_host(self, slot: EnvSlot, *, host_lost: bool) -> None:
        if slot.host_id is None or not host_lost:
            self._hosts.settle(slot)
        else:
            self._hosts.end(slot, Next.NOTHING, ask=False)

    # -- renewals ---------------------------------------------------------------------------

    def renew(self, slot: EnvSlot, *, new_host: bool) -> None:
        """Begin a new generation: in a new host (the old one is gone), or in the same one."""
        slot.generation += 1
        slot.renewals_in_a_row += 1
        slot.new_generation = True
        self._statistics.renewals += 1
        if self._states[slot.env_id] is EnvState.ERROR:
            self._states.apply(slot.env_id, Event.RENEW)
        if new_host:
            self._hosts.start([slot])
        else:
            self._hosts.request(slot, Op.RENEW, None, Work.STARTING)

    def proceed(self, slot: EnvSlot) -> None:
        """Begin what was to follow a pause."""
        following, slot.following = slot.following, Next.NOTHING
        if following is Next.RESET:
            self._begin_reset(slot)
        elif following is Next.NOTHING:
            self._hosts.settle(slot)
        else:
            self.renew(slot, new_host=following is Next.RENEW_HOST)

    def host_ended(self, slot: EnvSlot) -> None:
        """The host of an env that was being ended is gone: go on with what follows."""
        if slot.following is Next.NOTHING:
            self._hosts.settle(slot)
        elif slot.pause_s > 0.0:
            self._hosts.pause(slot, slot.pause_s, slot.following)
        else:
            self.proceed(slot)

    def forgive(self, slot: EnvSlot) -> None:
        """Forget an env's failures: its user repairs it by hand."""
        self._budget.forgive(slot.env_id)
        slot.renewals_in_a_row = 0
        slot.attempts = 0

    def call_ended(self, slot: EnvSlot) -> None:
        """A call is over; a reset that was asked for meanwhile begins."""
        self._hosts.settle(slot)
        if self._states[slot.env_id] is EnvState.RESET:
            self._begin_reset(slot)

    # -- the end of the budget --------------------------------------------------------------

    def _exhaust(self, slot: EnvSlot, exceeded: str, *, host_lost: bool) -> None:
        cause = self._budget.first_cause(slot.env_id)
        slot.held = False
        if slot.doomed is None and self._states[slot.env_id] is not EnvState.ERROR:
            self._states.apply(slot.env_id, Event.FAILED)
        if slot.host_id is None:
            self._hosts.settle(slot)
        else:
            self._hosts.end(slot, Next.NOTHING, ask=not host_lost)
        if self._policy.drop_exhausted:
            logger.error("%s: env %d is dropped (on_exhausted: drop)", exceeded, slot.env_id)
            slot.dropped = True
            if slot.doomed is None:
                self._states.apply(slot.env_id, Event.DROP)
            return
        error = FailuresExhaustedError(
            f"{exceeded}. It is not repaired any more; the other envs are as they were. Look at "
            f"the first failure below, and then: raise max_failures or failure_window_s, set "
            f"on_exhausted: drop to go on without it, or call reset({{{slot.env_id}: None}}) to "
            f"have it repaired once more. First failure: {cause}",
            cause,
        )
        logger.error("%s", error)
        self.raise_later(error)
