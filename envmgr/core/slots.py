"""Slots: envs that are leased, each to one coroutine or thread, and what is done for them.

Of the time limits of a lease, of a call in it and of the config, the shortest is chosen here.

Nothing here waits or has threads: `Owner` calls `serve` while it holds the engine, and then
notifies users of what has come. Users queue commands, from any thread.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import Any

from envmgr.core import failures
from envmgr.core.deadlines import OwnLimit
from envmgr.core.phases import Phase
from envmgr.core.supervisor import Supervisor
from envmgr.core.table import NEVER, ManagedEnv
from envmgr.core.validate import refuse_unsendable_params
from envmgr.errors import (
    AllEnvsFailedError,
    EnvCallAbandoned,
    EnvFailure,
    EnvNotReadyError,
    EnvTimeout,
    LeaseEndedError,
    NothingReadyError,
)
from envmgr.lifecycle import EnvState
from envmgr.outcomes import Outcome, failure_in, status_of, summed
from envmgr.spaces import ActionCheck
from envmgr.types import EnvTimestep, Once, is_abnormal, monotonic

Notify = Callable[[], bool]
"""Tells a user that what they asked for has come; called in any thread, without the engine.

Returns whether there may still be such a user: in an event loop that was closed there is none.
"""

_STEP_PHASES = frozenset((Phase.POSTED, Phase.STEPPING))
_RESET_PHASES = frozenset((Phase.RESETTING,))
_SEEN = -1
"""Not a number of steps: the episode that began was seen, or seeded, by the lease's user."""

_CANCELLING = frozenset((Phase.CANCELLING,))


@dataclass(frozen=True)
class SlotRules:
    """The rules for all leases of a manager.

    Attributes:
        step_s: the time limit of steps; None for none.
        reset_s: the limit of resets, likewise.
        episode_s: the limit of episodes, likewise.
        release_s: how long a step that nobody awaits may go on after the end of its lease.
        checks: gives the check of each env's actions; None if they are not to be checked.
        log: told of each episode's outcome and length; None if nobody wants to know.
        most: how many envs may be leased at one time; None: all.
    """

    step_s: float | None = None
    reset_s: float | None = None
    episode_s: float | None = None
    release_s: float = 5.0
    checks: Callable[[], Sequence[ActionCheck] | None] = lambda: None
    log: Callable[[Outcome, int], None] | None = None
    most: int | None = None


class SlotCall:
    """One step or reset of a leased env, from when its user asks for it until it is answered.

    Args:
        notify: called once there is a result or an error, unless it was abandoned before.
        during: "step" or "reset".
        limit_s: the time limit that the user gave.
        action: the action of a step.
        seed: the seed of a reset.
        params: the keyword arguments of a reset.

    Attributes:
        result: an `EnvTimestep`, or `(obs, info)`.
        error: what is raised in place of a result.
        is_over: whether there is a result or an error.
        is_abandoned: whether nobody awaits it any more.
        closes: whether its failure is one that closes the manager (`on_failure: raise`).
        began_s: when it was asked for.
        limit: its limit in seconds, and what sets it.
        was_sent: whether the env was asked.
        generation: the generation of the env when it was asked.
        is_held: whether the worker is being replaced before a reset.
        held_until_s: the moment until which it was being replaced: limits count from then.
    """

    __slots__ = (
        "action",
        "began_s",
        "closes",
        "during",
        "error",
        "generation",
        "held_until_s",
        "is_abandoned",
        "is_held",
        "is_over",
        "limit",
        "limit_s",
        "notify",
        "params",
        "result",
        "seed",
        "was_sent",
    )

    def __init__(
        self,
        notify: Notify,
        during: str,
        limit_s: float | None,
        *,
        action: Any = None,
        seed: int | None = None,
        params: Mapping[str, Any] | None = None,
    ) -> None:
        self.notify = notify
        self.during = during
        self.limit_s = limit_s
        self.action = action
        self.seed = seed
        self.params = params
        self.result: Any = None
        self.error: Exception | None = None
        self.is_over = self.is_abandoned = self.closes = self.is_held = False
        self.began_s = self.held_until_s = 0.0
        self.limit: tuple[float, str] | None = None
        self.was_sent = True
        self.generation = 0


class Tenancy:
    """One lease, from when an env is asked for until it is given back.

    Its attributes are changed by `Slots` alone, and read by its user between calls.

    Args:
        notify: called once there is an env, or an error.
        episode_s: the time limit of its episodes; None for that of all leases.

    Attributes:
        env_id: the env; None before there is one.
        error: why there will be no env.
        is_over: whether the env was given back, or there will be none.
        is_fresh: whether the env is at the beginning of an episode that its user has not seen.
        in_episode: whether the user has the observation of the reset, and not yet that of the
            episode's end.
        has_stepped: whether the env has taken steps in its present episode, or that was somebody
            else's before.
        call: the call that is under way.
        fatal: the error that the next call raises.
        attempt: how many resets its user has asked for.
        episode_outcome: the outcome of the episode; None before its end.
        length: how many timesteps the episode has.
        is_logged: whether the end of the episode was reported to `SlotRules.log`.
    """

    __slots__ = (
        "_noted",
        "attempt",
        "call",
        "env_id",
        "episode_began_s",
        "episode_outcome",
        "episode_reward",
        "episode_s",
        "error",
        "fatal",
        "has_stepped",
        "in_episode",
        "is_fresh",
        "is_logged",
        "is_over",
        "length",
        "notify",
    )

    def __init__(self, notify: Notify, episode_s: float | None = None) -> None:
        self.notify = notify
        self.episode_s = episode_s
        self.env_id: int | None = None
        self.error: Exception | None = None
        self.is_over = self.is_fresh = self.in_episode = self.has_stepped = False
        self.call: SlotCall | None = None
        self.fatal: Exception | None = None
        self.attempt = 0
        self._noted: Outcome | tuple[Any, ...] | None = None
        self.episode_outcome: Outcome | None = None
        self.episode_began_s = 0.0
        self.episode_reward: Any = None
        self.length = 0
        self.is_logged = False

    def left_in(self, call: SlotCall) -> EnvCallAbandoned:
        """Note that nobody awaits a call any more, and return that as a cause."""
        text = f"env {self.env_id}: nobody awaited the answer to its {call.during}"
        cause = self.abandoned(call, text)
        self.note(call, cause, monotonic())
        return cause

    def abandoned(self, call: SlotCall, text: str) -> EnvCallAbandoned:
        """Return a cause for the end of a call that is not a failure of the env."""
        env_id = -1 if self.env_id is None else self.env_id
        return EnvCallAbandoned(text, env_id=env_id, during=call.during, generation=call.generation)

    def note(
        self, call: SlotCall, cause: EnvFailure | None, now: float, reward: Any = None
    ) -> None:
        """Note what has become of a call, and of the episode if it ends with the call."""
        self._noted = call, self.attempt, now, reward, cause
        if cause is not None and call.during == "step":
            self.end_episode()

    @property
    def outcome(self) -> Outcome | None:
        """The outcome of the latest call, which is made only when it is asked for."""
        noted = self._noted
        if isinstance(noted, tuple):
            call, attempt, now, reward, cause = noted
            self._noted = noted = Outcome(
                status_of(cause, was_sent=call.was_sent),
                call.during,
                -1 if self.env_id is None else self.env_id,
                call.generation,
                attempt,
                call.began_s or now,
                now,
                None if cause is not None else reward,
                cause,
            )
        return noted

    def end_episode(self) -> None:
        """End the episode with the latest call."""
        outcome = self.outcome
        if outcome is not None:
            self.episode_outcome = outcome.of_episode(
                began_s=self.episode_began_s, reward=self.episode_reward
            )


class Slots:
    """The leases of one launched manager."""

    def __init__(self, supervisor: Supervisor, rules: SlotRules) -> None:
        self._supervisor = supervisor
        self._rules = rules
        self._table = supervisor.table
        self._limits = supervisor.hosts.limits
        self._clock = supervisor.hosts.clock
        self._starts = supervisor.hosts.starts
        self._counts = supervisor.statistics.of_slots
        self._commands: deque[Callable[[], None]] = deque()
        self._waiting: deque[Tenancy] = deque()
        self._tenants: dict[int, Tenancy] = {}
        self._resetting: dict[int, Tenancy] = {}
        # Envs given back in an episode, as they may be leased again like that; and whether the
        # episode has had steps.
        self._left: list[tuple[ManagedEnv, bool]] = []
        self._leaving: set[int] = set()  # envs whose step nobody awaits, after their lease
        self._not_to_join: set[int] = set()  # envs in a reset with wishes that nobody awaits
        # By env_id, where it is not 0: how many steps an env had been asked for before the episode
        # that it is at the beginning of, if nobody has seen that.
        self._steps_at_reset: dict[int, int] = {}
        self._to_notify: list[tuple[Tenancy, Tenancy | SlotCall]] = []  # of whom, and of what
        self._seen: Any = None
        self._closed_with: Exception | None = None

    # -- commands, from any thread --------------------------------------------------------------

    def ask(self, tenancy: Tenancy) -> None:
        """Ask for an env; envs are given out in order of asking."""
        self._put(partial(self._queue, tenancy))

    def call(self, tenancy: Tenancy, call: SlotCall) -> None:
        """Have the env of a lease take a step, or be reset."""
        self._put(partial(self._begin, tenancy, call))

    def abandon(self, tenancy: Tenancy, call: SlotCall) -> None:
        """Stop awaiting a call. If it was sent, it goes on, and its answer is dropped."""
        self._put(partial(self._abandon, tenancy, call))

    def give_back(self, tenancy: Tenancy) -> None:
        """End a lease, or the wait for one; may be called several times."""
        self._put(partial(self._give_back, tenancy))

    def _put(self, command: Callable[[], None]) -> None:
        self._commands.append(command)
        if self._closed_with is not None:  # asked after that: nobody else comes to see to it
            self.obey()
            self.notify_all()

    def obey(self) -> None:
        """Carry out the queued commands; the engine is held, unless everything is shut."""
        commands = self._commands
        while commands:
            try:
                command = commands.popleft()
            except IndexError:  # another thread has just taken the last one
                return
            command()

    @property
    def has_commands(self) -> bool:
        """Whether commands are queued."""
        return bool(self._commands)

    # -- the owner ------------------------------------------------------------------------------

    def serve(self, *, may_lease: bool = True, held: Set[int] = frozenset()) -> None:
        """Do all that can be done now; the engine is held, and what has arrived was applied.

        `notify_all` tells the users whom it concerns, once the engine is free.

        Args:
            may_lease: whether envs that are free may be leased, which they may not be while a call
                for batches waits for some that it names.
            held: envs that may not be leased, because a call for batches has not let go of their
                timesteps yet.
        """
        self._find_fatal()
        undelivered = self._table.undelivered
        if undelivered:
            for env_id in [i for i in undelivered if i in self._tenants]:
                if env_id not in self._table.awaits_reset:
                    self._take(self._tenants[env_id])
        if self._resetting:
            for tenancy in list(self._resetting.values()):
                self._look_at_reset(tenancy)
        if self._leaving:
            self._look_after_leaving()
        if self._waiting and may_lease:
            self._lease(held)
        else:
            self._seen = None  # whatever happens until the next look
        if self._left:
            left, self._left = self._left, []
            for env, has_stepped in left:  # of those who wait nobody may have been given it
                is_idle = env.phase is Phase.IDLE and env.state is EnvState.RUN
                if is_idle and env.env_id not in self._table.leased:
                    self._begin_anew(env, has_stepped=has_stepped)

    @property
    def until(self) -> float:
        """The latest moment at which `serve` has to be called, if nothing comes before."""
        if not self._resetting:
            return NEVER
        moments = (
            self._began_s(call, tenancy.env_id or 0) + call.limit[0]
            for tenancy in self._resetting.values()
            if (call := tenancy.call) is not None
            and call.limit is not None
            and self._table.phases[tenancy.env_id or 0] is not Phase.RESETTING  # has a deadline
            and not self._waits_for_turn(tenancy.env_id or 0)
        )
        return min(moments, default=NEVER)

    def _waits_for_turn(self, env_id: int) -> bool:
        """Whether the reset of an env has not begun yet through no fault of its own.

        Other envs have their turn, or its worker is replaced first.
        """
        env = self._table.envs[env_id]
        return env.is_replaced or (self._starts is not None and self._starts.waits(env))

    def _began_s(self, call: SlotCall, env_id: int) -> float:
        """Return when a call began, or when its env got its turn after that."""
        turn_s = -NEVER if self._starts is None else self._starts.turn_of(env_id)
        return max(call.began_s, call.held_until_s, turn_s)

    @property
    def most(self) -> int | None:
        """How many envs may be leased at one time; None: all."""
        return self._rules.most

    @property
    def counts(self) -> tuple[int, int]:
        """How many envs are leased, and how many leases wait; from any thread."""
        return len(self._tenants), sum(not one.is_over for one in self._waiting.copy())

    def shut(self, error: Exception) -> None:
        """Answer everything that is under way, and all that is asked from now on, with an error."""
        self._closed_with = error
        for tenancy in [*self._waiting, *self._tenants.values()]:
            self._shut(tenancy, error)
        self._waiting.clear()
        self._tenants.clear()
        self._resetting.clear()
        self.obey()

    def _shut(self, tenancy: Tenancy, error: Exception) -> None:
        call = tenancy.call
        if tenancy.env_id is None:
            tenancy.error, tenancy.is_over = error, True
            self._to_notify.append((tenancy, tenancy))
        elif call is not None:
            text = f"env {tenancy.env_id} was closed in its {call.during}: {error}"
            self._end_call(tenancy, call, tenancy.abandoned(call, text), raised=error)

    def notify_all(self) -> None:
        """Notify all users for whom there is something; end leases whose users are gone."""
        to_notify, self._to_notify = self._to_notify, []
        for tenancy, told in to_notify:
            # The callback keeps the coroutine alive, which has to be freed if its loop does not
            # resume it.
            notify, told.notify = told.notify, _nobody
            if not notify():
                self.give_back(tenancy)

    # -- leases ---------------------------------------------------------------------------------

    def _queue(self, tenancy: Tenancy) -> None:
        if self._closed_with is not None:
            self._shut(tenancy, self._closed_with)
        else:
            self._waiting.append(tenancy)

    def _lease(self, held: Set[int]) -> None:
        """Give free envs to the users who wait, in order of asking."""
        table = self._table
        now = (
            bytes(table.phases.column),
            bytes(table.states.column),
            len(table.leased),
            (*table.undelivered, *table.unexecuted),
            held,
        )
        n_waiting = len(self._waiting)
        if self._seen == (now, n_waiting):
            return  # nothing was free, and nothing has changed
        fresh, used = self._free(held)
        while self._waiting:
            tenancy = self._waiting[0]
            if tenancy.is_over:
                self._waiting.popleft()
                continue
            if not fresh and not used:
                break
            if self._rules.most is not None and len(self._tenants) >= self._rules.most:
                break
            self._waiting.popleft()
            is_fresh = bool(fresh)
            self._begin_lease(tenancy, (fresh or used).popleft(), is_fresh=is_fresh)
        self._seen = now, len(self._waiting)
        if self._waiting and not self._tenants and not self._leaving and not held:
            self._refuse_if_hopeless()

    def _free(self, held: Set[int]) -> tuple[deque[int], deque[int]]:
        """Return the free envs that are at the beginning of an episode, and the others."""
        table, fresh, used = self._table, deque[int](), deque[int]()
        self._supervisor.selections.steps_of(0)  # adds up what each env was asked for
        column, states = table.phases.column, table.states.column
        failed: list[int] = []
        for env_id in table.all_ids:
            if env_id in table.leased or column[env_id] != Phase.IDLE or table.owes(env_id):
                continue
            if env_id in held:
                continue
            env, state = table.envs[env_id], states[env_id]
            if (
                env.shares_env or env.host_id is None
            ):  # or it was given up: only its user revives it
                continue
            if env_id in table.failed_while_ready:
                failed.append(env_id)
            elif state == EnvState.NEED_RESET:
                used.append(env_id)
            elif state == EnvState.RUN:
                (fresh if self._is_fresh(env_id) else used).append(env_id)
        if failed and not fresh and not used:
            self._supervisor.resets.begin(dict.fromkeys(failed))
        return fresh, used

    def _is_fresh(self, env_id: int) -> bool:
        steps: int = self._table.step_items[env_id]
        is_unused = steps == self._steps_at_reset.get(env_id, 0)
        return is_unused and not self._supervisor.is_restored(env_id)

    def _begin_lease(self, tenancy: Tenancy, env_id: int, *, is_fresh: bool) -> None:
        tenancy.env_id, tenancy.is_fresh = env_id, is_fresh
        in_episode = self._table.states.column[env_id] == EnvState.RUN
        tenancy.has_stepped = in_episode and not is_fresh
        self._limits.own.pop(env_id, None)
        self._table.lease(env_id)
        self._tenants[env_id] = tenancy
        self._counts.leases += 1
        self._to_notify.append((tenancy, tenancy))

    def _refuse_if_hopeless(self) -> None:
        """Answer the users who wait with an error, if no env will ever be free."""
        table, repair = self._table, self._supervisor.repair
        envs = [env for env in self._supervisor.envs if not env.shares_env]
        if any(env.is_under_way or table.owes(env.env_id) for env in envs):
            return
        if any(env.phase is not Phase.IDLE for env in envs):
            return
        error: Exception | None = repair.take_fatal() if repair.fatal_errors else None
        if error is None and all(env.state is EnvState.DONE for env in envs):
            error = NothingReadyError(
                "no env can be leased: the episode budgets (episode_num) of all of them are spent. "
                "reset({env_id: None}) begins new ones"
            )
        if error is None:
            states = {env.env_id: env.state.name for env in envs}
            error = AllEnvsFailedError(
                f"no env can be leased: they have failed for good ({states}). Repair them with "
                "reset({env_id: None}), or close the manager"
            )
        for tenancy in self._waiting:
            tenancy.error, tenancy.is_over = error, True
            self._to_notify.append((tenancy, tenancy))
        self._waiting.clear()

    def _give_back(self, tenancy: Tenancy) -> None:
        if tenancy.is_over:
            return
        tenancy.is_over = True
        if self._closed_with is not None:
            return
        env_id, call = tenancy.env_id, tenancy.call
        if env_id is None:
            return  # it leaves the queue when its turn comes
        if call is not None:  # of somebody else than who gives it back
            self._end_call(
                tenancy,
                call,
                tenancy.abandoned(call, f"the lease of env {env_id} ended in its step"),
                raised=_ended(env_id),
            )
        env, supervisor = self._table.envs[env_id], self._supervisor
        self._find_fatal()
        if call is not None:
            self._forget_wishes(env, call)
        self._table.use_up_params((env_id,))
        self._not_to_join.discard(env_id)  # it is leased again once it is over
        del self._tenants[env_id]
        fatal, repair = tenancy.fatal, supervisor.repair
        if fatal is not None and not (isinstance(fatal, EnvFailure) and repair.recovers):
            repair.raise_later(fatal)  # else it was a value of its step that is not finite
        own = self._limits.own.pop(env_id, None)
        if self._table.owes(env_id):
            self._cancel(env, own)
        elif env.phase is Phase.CANCELLING:  # its user has begun a reset, and left
            self._bound(env, own)
        elif tenancy.is_fresh:
            self._steps_at_reset[env_id] = supervisor.selections.steps_of(env_id)
        elif env.phase is Phase.IDLE and env.state is EnvState.RUN:
            is_kept = supervisor.spares is None and not env.group.is_to_be_replaced
            if self.has_waiting and env.failed_while_ready is None and is_kept:
                # Its next user begins with a reset, perhaps with a seed: it is not reset twice.
                self._left.append((env, tenancy.has_stepped))
            else:
                self._begin_anew(env, has_stepped=tenancy.has_stepped)
        self._table.unlease(env_id)
        self._seen = None

    def _begin_anew(self, env: ManagedEnv, *, has_stepped: bool) -> None:
        """Make an env that was left in an episode fresh for whoever uses it next.

        If its worker is to be replaced, this is done even if somebody waits: other envs, which have
        ended their episodes, may be waiting for the replacement.
        """
        supervisor = self._supervisor
        if env.failed_while_ready is not None:
            supervisor.resets.begin({env.env_id: None})
        else:
            supervisor.refresh(env.env_id, has_stepped=has_stepped)
        self._steps_at_reset[env.env_id] = supervisor.selections.steps_of(env.env_id)

    @property
    def has_waiting(self) -> bool:
        """Whether somebody waits for an env."""
        return any(not tenancy.is_over for tenancy in self._waiting)

    def _cancel(self, env: ManagedEnv, own: OwnLimit | None) -> None:
        """Have a step that nobody awaits end soon, and then the env be reset."""
        self._supervisor.resets.begin({env.env_id: None})
        self._steps_at_reset[env.env_id] = self._supervisor.selections.steps_of(env.env_id)
        if env.phase is Phase.CANCELLING:
            self._bound(env, own)

    def _bound(self, env: ManagedEnv, own: OwnLimit | None) -> None:
        """Have a cancelled step end by its own limit, and within `release_s` in any case."""
        limits, release_s = self._limits, self._rules.release_s
        self._leaving.add(env.env_id)
        if env.group.takes_turns:  # where limits count from when the step began
            began = env.since if math.isfinite(env.since) else self._clock()
            most_s = self._clock() - began + release_s
            limit_s = limits.step_s if own is None else own.limit_s
            if limit_s is None or limit_s > most_s:
                own = OwnLimit(_CANCELLING, most_s, "release_timeout", charged=False)
                limits.set_own(env, own)
                env.since = began
            elif own is not None:
                limits.own[env.env_id] = own._replace(phases=_CANCELLING)
        elif env.deadline > self._clock() + release_s:
            limits.set_own(env, OwnLimit(_CANCELLING, release_s, "release_timeout", charged=False))
        elif own is not None:
            limits.own[env.env_id] = own._replace(phases=_CANCELLING)

    def _look_after_leaving(self) -> None:
        """Forget the limits of cancelled steps that are over."""
        for env_id in list(self._leaving):
            if self._table.phases[env_id] is not Phase.CANCELLING:
                self._leaving.discard(env_id)
                own = self._limits.own.get(env_id)
                if own is not None and own.phases is _CANCELLING:
                    del self._limits.own[env_id]

    # -- calls ----------------------------------------------------------------------------------

    def _begin(self, tenancy: Tenancy, call: SlotCall) -> None:
        """Begin what the user of a lease asks for."""
        env_id = tenancy.env_id
        if self._closed_with is not None:
            self._refuse(tenancy, call, self._closed_with)
            return
        if env_id is None or tenancy.is_over:
            self._refuse(tenancy, call, _ended(env_id))
            return
        if call.is_abandoned:
            return
        if tenancy.call is not None:  # an interrupt has kept its user from abandoning it
            self._abandon(tenancy, tenancy.call)
        env = self._table.envs[env_id]
        call.began_s, call.generation = self._clock(), env.generation
        if tenancy.fatal is not None:
            error, tenancy.fatal = tenancy.fatal, None
            self._refuse(tenancy, call, error)
            return
        try:
            if call.during == "step":
                self._begin_step(tenancy, env, call)
            else:
                self._begin_reset(tenancy, env, call)
        except Exception as error:  # whoever called is told: nobody else knows what it is about
            self._refuse(tenancy, call, error)

    def _refuse(self, tenancy: Tenancy, call: SlotCall, error: Exception) -> None:
        """Raise an error in the caller: nothing was asked of the env."""
        tenancy.call = None
        call.error, call.is_over = error, True
        self._to_notify.append((tenancy, call))

    def _begin_step(self, tenancy: Tenancy, env: ManagedEnv, call: SlotCall) -> None:
        env_id, table = env.env_id, self._table
        if not tenancy.in_episode or table.states.column[env_id] != EnvState.RUN:
            raise EnvNotReadyError(
                f"env {env_id} is in no episode: the lease has just begun, the episode has ended, "
                "or a call was abandoned. Call reset() first. Nothing was sent to it."
            )
        rules, supervisor = self._rules, self._supervisor
        limits = [(rules.step_s, "step_timeout"), (call.limit_s, "timeout_s")]
        if tenancy.episode_s is not None or rules.episode_s is not None:
            episode_s, name = self._episode_limit(tenancy)
            left_s = tenancy.episode_began_s + episode_s - self._clock()
            if left_s <= 0.0:
                self._refuse_timed_out(tenancy, env, call, (episode_s, name))
                return
            limits.append((left_s, name))
        call.limit = _shortest(limits)
        call.was_sent = env_id not in table.failed_while_ready
        supervisor.submitter.alone(env, call.action, rules.checks)
        call.action = None
        tenancy.call, tenancy.is_fresh, tenancy.has_stepped = call, False, True
        if table.unexecuted:
            supervisor.repair.answer_unexecuted()
            if env.timestep is not None:
                self._take(tenancy)
        elif call.limit is not None and env.phase in _STEP_PHASES:
            self._limits.set_own(env, OwnLimit(_STEP_PHASES, *call.limit))

    def _episode_limit(self, tenancy: Tenancy) -> tuple[float, str]:
        of_all, of_this = self._rules.episode_s, tenancy.episode_s
        limits = [(of_all, "episode_timeout"), (of_this, "episode_timeout_s")]
        return _shortest(limits) or (math.inf, "")

    def _refuse_timed_out(
        self, tenancy: Tenancy, env: ManagedEnv, call: SlotCall, limit: tuple[float, str]
    ) -> None:
        """Answer a step of an episode that has taken too long while no step was under way."""
        failure = EnvTimeout(
            f"the episode of {env.name} (generation {env.generation}) exceeded the {limit[0]:g} s "
            f"of {limit[1]} between its steps: the action was not sent",
            env_id=env.env_id,
            during="episode",
            generation=env.generation,
            limit_s=limit[0],
        )
        call.was_sent = False
        self._answer_step(tenancy, call, failures.abnormal_timestep(env, failure))

    def _begin_reset(self, tenancy: Tenancy, env: ManagedEnv, call: SlotCall) -> None:
        env_id, resets = env.env_id, self._supervisor.resets
        params = None if not call.params else Once(call.params)
        if params is not None:
            refuse_unsendable_params(self._supervisor.hosts.transport, {env_id: params})
        tenancy.in_episode, tenancy.episode_outcome = False, None
        tenancy.episode_began_s, tenancy.episode_reward = call.began_s, None
        tenancy.length, tenancy.is_logged = 0, False
        tenancy.call = call
        tenancy.attempt += 1
        self._table.leased[env_id] = None
        is_wanted = params is not None or call.seed is not None
        is_fresh = tenancy.is_fresh and not self._supervisor.is_restored(env_id)
        if is_fresh and not is_wanted and self._is_begun(env):
            self._begun(tenancy, env, call)
            return
        tenancy.is_fresh = False
        self._steps_at_reset[env_id] = _SEEN
        if env_id in self._not_to_join:
            self._not_to_join.discard(env_id)
            params = params or Once({})
        limits = [(self._rules.reset_s, "reset_timeout"), (call.limit_s, "timeout_s")]
        call.limit = _shortest(limits)
        self._limits.own.pop(env_id, None)
        if call.limit is not None:
            self._limits.own[env_id] = OwnLimit(_RESET_PHASES, *call.limit)
        leaves = tenancy.has_stepped and env.failed_while_ready is None
        resets.begin({env_id: params}, call.seed, leaves=leaves)
        tenancy.has_stepped = False
        if call.limit is not None and env.phase is Phase.RESETTING:  # also one that was joined
            self._limits.set_own(env, OwnLimit(_RESET_PHASES, *call.limit))
        self._resetting[env_id] = tenancy

    def _abandon(self, tenancy: Tenancy, call: SlotCall) -> None:
        if call.is_abandoned or tenancy.is_over or self._closed_with is not None:
            return
        call.is_abandoned = True
        if call.is_over and tenancy.call is not call:  # its answer came, and nobody took it
            if call.error is None:
                tenancy.in_episode = False
            self._log(tenancy)
            return
        if tenancy.call is not call or tenancy.env_id is None:
            return
        self._forget_wishes(self._table.envs[tenancy.env_id], call)
        self._end_call(tenancy, call, tenancy.left_in(call))

    def _forget_wishes(self, env: ManagedEnv, call: SlotCall) -> None:
        """Keep the seed and the options of a reset from any other reset, a repair's included.

        The reset itself may go on with them.
        """
        if call.during == "step" or not (call.params or call.seed is not None):
            return
        self._table.use_up_params((env.env_id,))
        env.seed = None
        if env.phase is Phase.RESETTING:
            self._not_to_join.add(env.env_id)

    def _end_call(
        self,
        tenancy: Tenancy,
        call: SlotCall,
        cause: EnvFailure,
        *,
        raised: Exception | None = None,
    ) -> None:
        """End a call without a result: the env is in no episode any more."""
        tenancy.call, tenancy.in_episode, tenancy.is_fresh = None, False, False
        tenancy.note(call, cause, self._clock())
        self._log(tenancy)
        if tenancy.env_id is not None:
            self._resetting.pop(tenancy.env_id, None)
        call.error, call.is_over = raised or cause, True
        if not call.is_abandoned:
            self._to_notify.append((tenancy, call))

    # -- answers --------------------------------------------------------------------------------

    def _take(self, tenancy: Tenancy) -> None:
        """Take the timestep that has come for a leased env."""
        env_id, call = tenancy.env_id, tenancy.call
        if env_id is None:
            return
        timestep = self._table.undelivered.pop(env_id)
        self._limits.own.pop(env_id, None)
        if timestep.done:
            tenancy.has_stepped = False
        if call is None or call.during != "step":  # it was abandoned
            self._counts.cancelled += 1
            return
        self._counts.timesteps += 1
        self._answer_step(tenancy, call, timestep)

    def _answer_step(self, tenancy: Tenancy, call: SlotCall, timestep: EnvTimestep) -> None:
        env_id, cause = tenancy.env_id, None
        tenancy.call = None
        if env_id is not None and self._table.leased[env_id] is not None:
            self._table.leased[env_id] = None
        if is_abnormal(timestep.info):
            timestep = timestep._replace(reward=None)
            cause = failure_in(timestep.info)
        if cause is None:
            tenancy.episode_reward = summed(tenancy.episode_reward, timestep.reward)
        tenancy.note(call, cause, self._clock(), timestep.reward)
        tenancy.length += 1
        if timestep.done:
            tenancy.in_episode, tenancy.is_fresh = False, call.was_sent
            tenancy.end_episode()
        self._log(tenancy)
        if cause is not None and not self._supervisor.repair.recovers:
            self._find_fatal()
            tenancy.fatal, call.error, call.closes = None, cause, True
        call.result, call.is_over = timestep, True
        self._to_notify.append((tenancy, call))

    def _log(self, tenancy: Tenancy) -> None:
        """Report an episode to the log once it has ended, and only once."""
        log, outcome = self._rules.log, tenancy.episode_outcome
        if log is not None and outcome is not None and not tenancy.is_logged:
            tenancy.is_logged = True
            log(outcome, tenancy.length)

    def _is_begun(self, env: ManagedEnv) -> bool:
        """Whether an env is at the beginning of an episode."""
        is_idle = env.phase is Phase.IDLE and env.host_id is not None
        return is_idle and env.state is EnvState.RUN and env.failed_while_ready is None

    def _look_at_reset(self, tenancy: Tenancy) -> None:
        """Answer the reset of a leased env, if it is over."""
        env_id, call = tenancy.env_id, tenancy.call
        if env_id is None or call is None:
            return
        env = self._table.envs[env_id]
        failure = self._table.leased[env_id]
        if env.is_replaced or call.is_held:
            call.is_held, call.held_until_s = env.is_replaced, self._clock()
        if self._is_begun(env):
            self._begun(tenancy, env, call)
            return
        is_begun = env.phase is Phase.RESETTING or self._waits_for_turn(env_id)
        if failure is None and call.limit is not None and not is_begun:
            has_timed_out = self._clock() >= self._began_s(call, env_id) + call.limit[0]
            failure = self._timeout_of(env, call.limit) if has_timed_out else None
        if failure is None and tenancy.fatal is None:
            return
        if failure is None:
            error, tenancy.fatal = tenancy.fatal, None
            del self._resetting[env_id]
            self._refuse(tenancy, call, error or _ended(env_id))
            return
        self._table.leased[env_id] = None
        call.closes = not self._supervisor.repair.recovers
        if call.closes:
            self._find_fatal()
            tenancy.fatal = None
        self._limits.own.pop(env_id, None)
        self._forget_wishes(env, call)
        self._end_call(tenancy, call, failure)

    def _timeout_of(self, env: ManagedEnv, limit: tuple[float, str]) -> EnvFailure:
        """Return the failure of a reset not begun in time: what precedes it takes too long."""
        if env.phase is Phase.CANCELLING:
            env.limit_s = limit[0]
            self._limits.own[env.env_id] = OwnLimit(_CANCELLING, *limit)
            self._supervisor.time_out(env)
            failure = self._table.leased[env.env_id]
            if failure is not None:
                return failure
        return failures.timeout(env, limit[0], "", limit[1])

    def _begun(self, tenancy: Tenancy, env: ManagedEnv, call: SlotCall) -> None:
        tenancy.call, tenancy.in_episode, tenancy.is_fresh = None, True, False
        self._steps_at_reset[env.env_id] = _SEEN
        self._resetting.pop(env.env_id, None)
        self._limits.own.pop(env.env_id, None)
        self._table.leased[env.env_id] = None
        tenancy.episode_began_s = self._began_s(call, env.env_id)
        tenancy.note(call, None, self._clock())
        call.result = self._table.observed.of((env.env_id,))[0], env.reset_info
        call.is_over = True
        self._to_notify.append((tenancy, call))

    # -- what is to be raised -------------------------------------------------------------------

    def _find_fatal(self) -> None:
        """Have the next call of a lease's user raise what has to be raised for its env."""
        repair = self._supervisor.repair
        while repair.fatal_of_leases:
            env_id, error = repair.fatal_of_leases.popitem()
            tenancy = self._tenants.get(env_id)
            if tenancy is None:  # it has failed while it was given back
                repair.raise_later(error)
            else:
                tenancy.fatal = error


def _nobody() -> bool:
    """Notify nobody: that has been done already."""
    return True


def _ended(env_id: int | None) -> LeaseEndedError:
    return LeaseEndedError(
        f"the lease of env {env_id} has ended: it may be somebody else's by now. Take a new one "
        "with manager.lease(). Nothing was sent to it."
    )


def _shortest(limits: Iterable[tuple[float | None, str]]) -> tuple[float, str] | None:
    """Return the shortest of limits, and what sets it; None if there is none."""
    found = None
    for seconds, name in limits:
        if seconds is not None and (found is None or seconds < found[0]):
            found = seconds, name
    return found
