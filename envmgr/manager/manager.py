"""The manager: the one launch, reset, step, send, recv and close of every kind."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from envmgr.core import (
    NOBODY,
    ArrayBatch,
    Collected,
    Phase,
    ReadyBatch,
    Selection,
    Supervisor,
    validate,
)
from envmgr.core.engine import await_all_ready, await_one_ready, refuse_unready, unready
from envmgr.lifecycle import EnvState
from envmgr.manager.restoring import EnvRestoring
from envmgr.policy import GatherPolicy
from envmgr.types import EnvIds, monotonic
from envmgr.views import array_batch
from envmgr.wire.block import RING_EACH, RING_LAST, RING_ONCE


class EnvManager(EnvRestoring):
    """Runs `env_num` envs; what the kinds in `envmgr.managers` have in common, which is all of it.

    A manager is built closed: nothing starts before `launch()`, or before a space is asked for.
    It serves one thread at a time; `close`, `stats` and `env_states` may be called from others.

    Args:
        env_fn: one factory for each env; each builds a `BaseEnv` or a `gymnasium.Env`.
        cfg: the manager section of a config: keys of `ManagerConfig`, unknown ones are refused.
        observation_space: in place of the envs' own.
        action_space: likewise.
        reward_space: likewise.

    Raises:
        ConfigError: the config is wrong, or does not fit the number of factories.
        MissingDependencyError: this kind needs a package that is not installed.
    """

    # -- readiness --------------------------------------------------------------------------

    @property
    def ready_obs(self) -> Any:
        """The observations of the envs that take an action now.

        Waits for resets and repairs, until at least one env is ready; never for steps.

        Returns:
            `{env_id: obs}`, ascending; `{}` if all envs are DONE. V2: one stacked treetensor.

        Raises:
            NothingReadyError: nothing can become ready without `recv`, or without `reset`; the
                message says which.
            AllEnvsFailedError: nothing can become ready at all, as all envs have failed for good.
            FailuresExhaustedError: an env failed more often than allowed.
        """
        with self._calling() as supervisor:
            if supervisor.table.are_all_ready:  # so nothing is awaited of any env
                self._surface(supervisor)
                ready: Sequence[int] = supervisor.table.all_ids
            else:
                self._running.collect()
                self._surface(supervisor)
                ready = self._ready_ids(supervisor)
            shown = dict(zip(ready, supervisor.table.observed.of(ready), strict=True))
            if self._normalization is not None:
                shown = self._normalization.ready(shown)
            return self._view.ready(shown)

    def _ready_ids(self, supervisor: Supervisor) -> list[int]:
        """Return the envs that are ready, at least one; none if all are DONE."""
        ready = supervisor.ready_ids()
        if not ready and await_one_ready(self._running, supervisor):
            self._surface(supervisor)
            ready = supervisor.ready_ids()
        return ready

    @property
    def ready_obs_id(self) -> list[int]:
        """The envs that take an action now, ascending; does not wait.

        V2: the envs of the rows of the last `ready_obs` that was read.
        """
        return self._view.rows(self.ready_env)

    @property
    def ready_env(self) -> list[int]:
        """The envs that take an action now, ascending; does not wait."""
        with self._calling() as supervisor:
            self._running.collect()
            return supervisor.ready_ids()

    @property
    def active_env(self) -> list[int]:
        """The envs in an episode (RUN), pending ones included, ascending; does not wait."""
        return [i for i, state in self.env_states.items() if state is EnvState.RUN]

    @property
    def pending_env(self) -> list[int]:
        """The envs that owe a timestep, ascending; does not wait.

        After Ctrl-C in `step` or `send` it says whether the actions were accepted: all, or none.
        """
        engine = self._engine
        if engine is None or not self._launched:
            return []
        with engine.calling as supervisor:
            return supervisor.table.owed_ids()

    @property
    def ready_info(self) -> dict[int, dict[str, Any]]:
        """What the latest reset of each ready env said besides the observation."""
        with self._calling() as supervisor:
            self._running.collect()
            return {i: supervisor.envs[i].reset_info for i in supervisor.ready_ids()}

    def reset_infos(self, env_ids: EnvIds) -> list[dict[str, Any]]:
        """Return what the latest reset of each of these envs said besides the observation.

        As `ready_info`, for a few envs, of which `ready_arrays` has given the observations.
        """
        ids = validate.listed_env_ids(env_ids, self.env_num)
        with self._calling() as supervisor:
            return [supervisor.envs[i].reset_info for i in ids]

    # -- steps ------------------------------------------------------------------------------

    def step(self, actions: Any) -> Any:
        """Send actions and gather timesteps.

        Sync kinds return exactly the ids they were given, in that order. Async kinds return some
        of what is outstanding, earlier sends included, in ascending order: `wait_num` of it or
        more, see `GatherPolicy`.

        Args:
            actions: `{env_id: action}`; `{}` gathers what is outstanding. V2: a list, or a stacked
                array or tree, with one action for each row of the last `ready_obs`.

        Returns:
            `{env_id: EnvTimestep}`; V2: a list of treetensors with `obs reward done info env_id`.

        Raises:
            ActionError, EnvNotReadyError, UnknownEnvError: refused; nothing was sent to any env.
            NothingReadyError: `{}` while nothing is outstanding.
        """
        with self._calling() as supervisor:
            wants_all = self._policy.gathers_all
            sent = self._send(supervisor, actions, RING_LAST if wants_all else RING_EACH)
            gather = self._gather or self._gathering
            collected = gather.exactly(sent) if sent and wants_all else gather.some(self._policy)
            journal, timesteps = supervisor.journal, self._deliver(supervisor, collected)
            if not self._shows_dicts:
                timesteps = self._view.timesteps(timesteps, journal)
        journal.returning = None  # the last that is done: from now on they are delivered
        return timesteps

    def send(self, actions: Any) -> None:
        """Send actions and return at once; `recv` gathers the timesteps."""
        with self._calling() as supervisor:
            self._send(supervisor, actions, self._ring_when_sent())

    def recv(self, min_ready: int | None = None, timeout_s: float | None = None) -> Any:
        """Gather timesteps of what is outstanding, in ascending order of env_id.

        Args:
            min_ready: how many to wait for; None: as `step` of this kind does.
            timeout_s: return what has arrived after so many seconds, possibly nothing.

        Raises:
            NothingReadyError: nothing is outstanding.
        """
        with self._calling() as supervisor:
            collected = self._receive(supervisor, min_ready, timeout_s)
            journal, timesteps = supervisor.journal, self._deliver(supervisor, collected)
            if not self._shows_dicts:
                timesteps = self._view.timesteps(timesteps, journal)
        journal.returning = None  # as in `step`
        return timesteps

    def _receive(
        self, supervisor: Supervisor, min_ready: int | None, timeout_s: float | None
    ) -> Collected | None:
        outstanding = supervisor.statistics.outstanding
        if not outstanding:
            self._surface(supervisor)
        if min_ready is None and timeout_s is None:
            self._gathers_some = False
            return self._gathering.some(self._policy)
        policy = self._policy
        if min_ready is not None:
            min_ready = validate.checked_min_ready(min_ready)
            policy = _exactly(min_ready)
        limit_s = math.inf if timeout_s is None else validate.checked_seconds(timeout_s)
        # Most likely the next time, too:
        self._gathers_some = min_ready is not None and min_ready < outstanding
        deadline = monotonic() + limit_s
        return self._gathering.some(policy, deadline=deadline, exactly=min_ready is not None)

    def _ring_when_sent(self) -> int:
        if not self._policy.gathers_all:
            return RING_EACH
        return RING_ONCE if self._gathers_some else RING_LAST

    def _send(self, supervisor: Supervisor, actions: Any, ring: int) -> Selection | None:
        """Send actions; return whose they are, if there are any."""
        view = self._view
        by_id: Any = actions
        if type(actions) is not dict or not self._shows_dicts:
            by_id = view.actions(actions, supervisor.ready_ids)
        repair = supervisor.repair
        if (repair.fatal_errors or repair.urgent) and (
            by_id or not supervisor.statistics.outstanding
        ):
            self._surface(supervisor)
        if not by_id:
            return None
        sent = supervisor.submitter.by_id(by_id, ring)
        if sent is None:
            sent = self._send_checked(supervisor, by_id, ring)
        if not self._shows_dicts:
            view.forget()
        return sent

    def _send_checked(self, supervisor: Supervisor, actions: Any, ring: int) -> Selection | None:
        """Send actions of which some need a second look, or have to go by message."""
        submitter, table = supervisor.submitter, supervisor.table
        called = validate.envs_in_calls(table, actions)
        if called:  # which an interrupt has left under way
            self._running.wait_until(
                lambda: not validate.envs_in_calls(table, called), doing="step"
            )
        sent = submitter.checked(actions, ring, self._action_checks)
        if table.unexecuted:
            self._running.uninterrupted(supervisor.repair.answer_unexecuted)
        return sent

    def _deliver(self, supervisor: Supervisor, collected: Collected | None) -> Any:
        """Hand out what was gathered; if that is nothing, there may have been a failure."""
        if collected is None:
            self._surface(supervisor)
            return {}
        timesteps = supervisor.collector.timesteps(collected)
        if self._normalization is not None:
            return self._normalization.timesteps(timesteps, supervisor.journal.fate)
        return timesteps

    def send_arrays(self, env_ids: EnvIds, actions: Any) -> None:
        """Send one action to each of `env_ids`.

        Args:
            env_ids: k env_ids: an array (k,), or a list.
            actions: (k, *shape), or a dict or tuple of such, or a list of k actions.
        """
        with self._calling() as supervisor:
            self._surface(supervisor)
            ring = self._ring_when_sent()
            if supervisor.submitter.rows(env_ids, actions, ring) is not None:
                self._view.forget()
                return
            ids = validate.listed_env_ids(env_ids, self.env_num)
            rows = validate.rows_by_id(ids, actions)
            if supervisor.submitter.by_id(rows, ring) is None:
                self._send_checked(supervisor, rows, ring)
            self._view.forget()

    def recv_arrays(
        self, min_ready: int | None = None, timeout_s: float | None = None
    ) -> ArrayBatch:
        """As `recv`, with the timesteps of k envs as arrays: see `ArrayBatch`."""
        with self._calling() as supervisor:
            collected = self._receive(supervisor, min_ready, timeout_s)
            batch = None if collected is None else supervisor.collector.arrays(collected)
            if batch is None:
                timesteps = self._deliver(supervisor, collected)
                batch = array_batch(timesteps, self._forms.codec_of(timesteps))
            elif self._normalization is not None:
                batch = self._normalization.batch(batch, supervisor.journal.fate)
            journal = supervisor.journal
        journal.returning = None  # as in `step`
        return batch

    def ready_arrays(self, env_ids: EnvIds | None = None) -> ReadyBatch:
        """As `ready_obs`, with the observations of k envs as arrays: see `ReadyBatch`.

        The first observations of the envs in `batch.ended` of `recv_arrays` come through this.

        Args:
            env_ids: wait until all of these are ready; None: those that are, and at least one.

        Raises:
            NothingReadyError: as `ready_obs`; or one of `env_ids` does not become ready.
            UnknownEnvError: there is no such env.
        """
        wanted = None if env_ids is None else validate.checked_env_ids(env_ids, self.env_num)
        with self._calling() as supervisor:
            table = supervisor.table
            if not table.awaits_nothing and (wanted is None or unready(supervisor, wanted)):
                self._running.collect()
            self._surface(supervisor)
            ids = self._ready_ids(supervisor) if wanted is None else wanted
            if wanted is not None and unready(supervisor, wanted):
                await_all_ready(self._running, supervisor, wanted)
                self._surface(supervisor)
                refuse_unready(supervisor, wanted)
            selection, observed = supervisor.selections.of(ids), table.observed
            obs = None if selection is None else observed.newest_batch(selection)
            if obs is None:
                obs = self._forms.codec_of(ids).stack(observed.of(ids))
            if self._normalization is not None:
                obs = self._normalization.ready_batch(ids, obs)
            return ReadyBatch(NOBODY if selection is None else selection.array, obs)

    # -- resets and seeds -------------------------------------------------------------------

    def reset(self, reset_param: Mapping[int, Mapping[str, Any] | None] | None = None) -> None:
        """Reset envs and wait for it. The observations come through `ready_obs`.

        A step under way is awaited and its timestep discarded (counted as cancelled). A reset
        that is running already is joined when there are no new parameters. A DONE env starts a
        new budget; an ERROR env is repaired.

        Args:
            reset_param: `{env_id: params}`: keyword arguments of this and of later automatic
                resets (of this one only, if they are `types.Once`); None keeps those given
                before, `{}` clears them. Nothing at all resets every env.

        Raises:
            UnknownEnvError, ConfigError: refused; nothing was reset.
            FailuresExhaustedError: an env failed more often than allowed.
        """
        params = validate.checked_params(reset_param, self.env_num)
        with self._calling() as supervisor:
            validate.refuse_unsendable_params(supervisor.hosts.transport, params)
            validate.refuse_partial_resets(supervisor.table, params)
            self._view.forget()
            if self._normalization is not None:
                self._normalization.begin(list(params))
            self._running.uninterrupted(functools.partial(self._begin_resets, supervisor, params))
            envs = [supervisor.envs[i] for i in params]
            repair = supervisor.repair
            self._running.wait_until(
                lambda: (
                    repair.fatal is not None
                    or all(s.phase is Phase.IDLE or s.dropped for s in envs)
                ),
                doing="reset",
            )
            self._surface(supervisor)

    def _begin_resets(
        self, supervisor: Supervisor, params: Mapping[int, dict[str, Any] | None]
    ) -> None:
        supervisor.rules.dynamic_seed = self._dynamic_seed
        supervisor.resets.begin(params)


@functools.lru_cache(maxsize=64)
def _exactly(min_ready: int) -> GatherPolicy:
    return GatherPolicy(min_ready, 0.0)
