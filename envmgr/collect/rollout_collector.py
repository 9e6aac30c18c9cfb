"""The rollout collector: T steps of n envs with a policy of batches, into preallocated arrays."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from envmgr.collect.batch_policy_caller import BatchPolicyCaller, hint_of_form
from envmgr.collect.goals import check_count, check_layouts, check_manager, keys_of_infos, seeds_of
from envmgr.collect.policies import BatchPolicy, RandomPolicy
from envmgr.collect.rollout_buffer import (
    Bools,
    Ends,
    Ints,
    Recorded,
    RolloutBuffer,
    Tally,
    make_recorded,
)
from envmgr.collect.statistics import CollectStatistics
from envmgr.core import ArrayBatch
from envmgr.env.agent_rows import refuse_agents
from envmgr.errors import ActionError, ConfigError, NothingReadyError, StateError
from envmgr.lifecycle import EnvState
from envmgr.manager import EnvManager
from envmgr.manager.loop import failure_text
from envmgr.spaces import put_rows, rows_of
from envmgr.types import Clock, monotonic
from envmgr.wire.info_columns import OF_STEPS


class RolloutCollector:
    """A collector of rollouts: T steps of each of n envs, as arrays, for on-policy algorithms.

    The policy is called with the observations of the envs that act now, (k, *shape) or a dict or
    tuple of such. It returns actions (k, ...), or a `PolicyStep` of actions and whatever else is to
    be recorded. It must not change the observations. If it has a method `value`,
    `RolloutBuffer.gae` calls that for the values of observations.

    A policy with a method `initial_state` is recurrent: `initial_state(n)` returns the states of n
    envs at the start of an episode, as an array (n, ...) or a dict or tuple of such. The policy is
    called as `policy(obs, state, episode_starts)`, with one row for each env that acts, and the
    state in its `PolicyStep` is passed in at the next step of these envs, unless their episode
    ends.

    With kinds that gather all timesteps, the collector steps all envs together and waits for
    resets. With kinds that gather some, it steps whichever envs are ready, until each has T steps.

    Whatever ends a `collect`, even Ctrl-C, `rollout` holds the steps recorded until then, each of
    them complete, and the next `collect` continues it: no step is lost or recorded twice.

    Args:
        manager: a launched manager of any kind, except for vector envs that begin an episode in the
            next step of the other rows. The collector does not close it, and nothing else may step
            it. After you have called its `reset` yourself, call `reset` of the collector.
        policy: see above; None for random actions derived from the manager's seed.
        n_steps: T.
        on_batch: called with every `ArrayBatch` that was recorded.
        info_keys: the keys of infos to record in `RolloutBuffer.infos`.
        clock: returns monotonic seconds.

    Attributes:
        manager: the manager.
        policy: the policy.
        rollout: the buffer that every `collect` fills and returns.

    Raises:
        ConfigError: `manager` is not a manager; `n_steps` is not an integer >= 1; `info_keys` are
            not valid keys; observations are by agent; or the envs' spaces have different layouts.
    """

    def __init__(
        self,
        manager: EnvManager,
        policy: BatchPolicy | None = None,
        *,
        n_steps: int,
        on_batch: Callable[[ArrayBatch], None] | None = None,
        info_keys: Sequence[str] = (),
        clock: Clock = monotonic,
    ) -> None:
        check_manager(manager, "RolloutCollector")
        check_count("n_steps", n_steps)
        refuse_agents(manager.observation_space, "RolloutCollector")
        check_layouts(manager, "RolloutCollector")
        config = manager.cfg
        if policy is None:
            policy = RandomPolicy.of(manager)
        self.manager = manager
        self._policy: Any = policy
        self._n = n = manager.env_num
        value_fn = getattr(policy, "value", None)
        self.rollout = RolloutBuffer(manager.observation_space, n_steps, n, value_fn)
        self._together = math.isinf(config.wait_num)
        self._resets_itself = bool(config.auto_reset)
        self._may_lose = config.on_exhausted == "drop" or not math.isinf(config.episode_num)
        # `on_batch` may keep the batches that it is shown, so they stay as they were.
        self._puts_in_place = config.copy_on_get is True and on_batch is None
        self._seeds = seeds_of(manager)
        self._on_batch = on_batch
        self._info_keys = keys_of_infos(info_keys)
        if own := OF_STEPS.intersection(self._info_keys):
            raise ConfigError(
                f"info_keys names {sorted(own)}, which rollouts have as `rollout.terminated` and "
                "`rollout.truncated`: leave them out"
            )
        self._clock = clock
        self._elapsed_s = self._began_s = 0.0
        self._caller = BatchPolicyCaller(policy, manager.action_space, n)
        self._has_sent = False
        self._arrived: list[ArrayBatch] = []
        self._shown: list[None] = []
        self._n_pending = 0
        self._start(CollectStatistics())

    def _start(self, statistics: CollectStatistics, n_ended: Ints | None = None) -> None:
        tally = Tally.of(self._n, statistics)
        tally = tally if n_ended is None else tally._replace(n_ended=n_ended)
        starts = np.ones(self._n, np.bool_)
        self.rollout.begin(starts, self._caller.initial, tally)

    @property
    def policy(self) -> Any:
        """The policy. To use another one, create another collector."""
        return self._policy

    @property
    def statistics(self) -> CollectStatistics:
        """The current statistics of everything collected so far."""
        tally = self.rollout.recorded.tally
        steps = tally.statistics.steps
        if not self.rollout.is_complete:
            steps += int(self.rollout.lengths.sum())
        return replace(tally.statistics, steps=steps, elapsed_s=self._elapsed_s)

    # -- collecting -------------------------------------------------------------------------

    def collect(self) -> RolloutBuffer:
        """Return a rollout of T steps of each env, or fewer of envs that have no more episodes.

        It is the buffer `rollout`, which the next `collect` overwrites. After a `collect` that was
        interrupted, this one continues with the steps recorded so far.

        Raises:
            StateError: steps are under way that this collector has not sent.
            ActionError: the policy returned something that does not fit. Nothing was sent.
            EnvManagerError: raised by the manager, such as FailuresExhaustedError.
        """
        rollout = self.rollout
        self._began_s = self._clock() - self._elapsed_s
        try:
            self._resume()
            ready = self._ready()
            while ready is not None or self._n_pending:
                if ready is not None:
                    self._act(*ready)
                ready = self._receive()
        finally:
            self._elapsed_s = self._clock() - self._began_s
        rollout.recorded = self._completed()  # the last that is done: from now on it is delivered
        return rollout

    def reset(self) -> None:
        """Reset all envs and begin a new rollout; the contents of the current one are dropped."""
        self.manager.reset()
        self._has_sent, self._arrived = False, []
        self._start(self.statistics, self.rollout.recorded.tally.n_ended)

    def _resume(self) -> None:
        """Begin a rollout, or make up for what an interrupt has left undone in the last call."""
        rollout, manager = self.rollout, self.manager
        if rollout.is_complete:
            self._has_sent = False
            rollout.begin(*rollout.recorded[5:8])
        if self._arrived:
            self._record(self._arrived[0])
            self._show()
            self._arrived.clear()
        ready = manager.ready_env  # first: the figures are after what this call makes up for
        self._n_pending = manager.stats()["outstanding"]
        if self._n_pending and not self._has_sent:
            pending = sorted(set(manager.active_env) - set(ready))
            raise StateError(
                f"envs {pending} have steps under way that this collector has not sent: "
                "gather their timesteps with recv() first"
            )

    def _completed(self) -> Recorded:
        """Return the `Recorded` of the complete rollout, with what the next one begins with."""
        rollout = self.rollout
        tally = rollout.recorded.tally.after(rollout, int(rollout.lengths.sum()))
        return rollout.recorded._replace(is_complete=True, tally=tally, applied=None)

    # -- acting -----------------------------------------------------------------------------

    def _ready(self) -> tuple[Ints, Any] | None:
        """Return the envs that act now, with their observations.

        This waits for resets; where envs are stepped together, for the resets of all envs.

        Returns:
            None if no env is ready while others have steps under way, or nothing is left to do.
        """
        manager, lengths, n_steps = self.manager, self.rollout.lengths, self.rollout.n_steps
        states, ready = manager.env_states, set(manager.ready_env)
        lacking = [i for i, length in enumerate(lengths.tolist()) if length < n_steps]
        lacking = [i for i in lacking if states[i] is not EnvState.DONE]
        ended = [i for i in lacking if states[i] is EnvState.NEED_RESET]
        if ended:
            manager.reset(dict.fromkeys(ended))
            ready.update(ended)
        now = [i for i in lacking if i in ready]
        if self._n_pending:
            if self._together or not now:
                return None  # they come first
        elif self._together or not now:
            now = lacking
        try:
            return manager.ready_arrays(now) if now else None
        except NothingReadyError:
            if all(manager.env_states[i] is not EnvState.DONE for i in now):
                raise
        return self._ready()  # without those that were dropped meanwhile

    def _act(self, env_ids: Ints, obs: Any) -> None:
        """Have the policy choose actions, and send them."""
        rollout, count = self.rollout, len(env_ids)
        recorded = rollout.recorded
        where = recorded.where(env_ids, self._n)
        put_rows(rollout.obs, where, obs)
        starts = recorded.starts
        if starts is not None:
            rollout.episode_starts[where] = starts[env_ids]
        chosen = self._caller.choose(env_ids, obs, recorded.states, starts)
        actions, extras, states = chosen
        had_form = rollout.has_form
        try:
            rollout.put_step(where, count, actions, extras, states)
            if starts is not None and len(begun := env_ids[starts[env_ids]]):
                tally = recorded.tally.begun(begun, self._clock())
                rollout.recorded = recorded._replace(tally=tally)
            self._has_sent = True
            self.manager.send_arrays(env_ids, actions)
        except ActionError as error:
            rollout.has_form = had_form  # refused actions say nothing of the shape of right ones
            hint = hint_of_form(actions)
            if not hint:
                raise
            raise ActionError(f"{error} {hint}") from error
        self._n_pending += count

    # -- receiving --------------------------------------------------------------------------

    def _receive(self) -> tuple[Ints, Any] | None:
        """Gather timesteps and record them; return which envs act next, as `_ready` does."""
        self._shown.clear()
        # In one go, so that what the manager has delivered is kept, wherever an interrupt comes.
        self._arrived.extend(map(self.manager.recv_arrays, _ONCE))
        batch = self._arrived[0]
        ended = self._record(batch)
        if self._on_batch is not None:
            self._show()
        self._arrived.clear()
        self._n_pending -= len(batch.env_ids)
        return self._next(batch, ended)

    def _show(self) -> None:
        """Call `on_batch`, unless it has returned for this batch; can be interrupted anywhere."""
        if self._on_batch is not None and not self._shown:
            # In one go, as in `_receive`, so that the return of `on_batch` is noted.
            self._shown.extend(map(self._on_batch, self._arrived))

    def _next(self, batch: ArrayBatch, ended: Ints) -> tuple[Ints, Any] | None:
        recorded = self.rollout.recorded
        env_ids, n_steps = batch.env_ids, self.rollout.n_steps
        if recorded.lengths is None:
            if recorded.even == n_steps:
                return None
            if not len(ended):
                return env_ids, batch.obs
            if self._together and self._resets_itself and not self._may_lose:
                if not self._puts_in_place:
                    return self.manager.ready_arrays(env_ids.tolist())
                put_rows(batch.obs, ended, self.manager.ready_arrays(ended.tolist()).obs)
                return env_ids, batch.obs
        elif not len(ended) and self._n_pending + len(env_ids) == self._n:
            are_full = recorded.lengths[env_ids] == n_steps
            if not are_full.any():  # nor can anybody else be ready
                return env_ids, batch.obs
        return self._ready()

    def _record(self, batch: ArrayBatch) -> Ints:
        """Record timesteps; can be interrupted anywhere, and called again.

        Returns:
            The envs whose episodes ended.
        """
        rollout, env_ids = self.rollout, batch.env_ids
        recorded = rollout.recorded
        even, lengths, n_ends, n_episodes, _, before, states, tally, applied = recorded
        ended = batch.ended
        if applied is batch:
            return ended
        where = recorded.where(env_ids, self._n)
        rollout.put_rewards(where, batch.reward)
        if self._info_keys:
            rollout.put_infos(where, batch, self._info_keys)
        starts: Bools | None = None
        is_last = True
        if type(where) is int:
            even += 1
            is_last = even == rollout.n_steps
        else:
            lengths = rollout.lengths
            lengths[env_ids] += 1
            if before is not None:
                starts = before.copy()
                starts[env_ids] = False
        if states is not None:
            states = self._caller.states_after_step(states, env_ids, ended)
        if is_last:
            rollout.put_last(env_ids, batch.obs, self._next_states_of(env_ids))
        if len(ended):
            starts = np.zeros(self._n, np.bool_) if starts is None else starts
            starts[ended] = True
            tally, n = self._end(where, batch, ended, tally)
            n_ends, n_episodes = n_ends + 1, n_episodes + n
        rollout.recorded = make_recorded(
            (even, lengths, n_ends, n_episodes, False, starts, states, tally, batch)
        )
        return ended

    def _next_states_of(self, env_ids: Ints) -> Any:
        states = self._caller.next_states
        return None if states is None else rows_of(states, env_ids)

    def _end(self, where: Any, batch: ArrayBatch, ended: Ints, tally: Tally) -> tuple[Tally, int]:
        """Record ends of episodes; return the tally after them, and how many there are."""
        rollout, env_ids = self.rollout, batch.env_ids
        rows = np.flatnonzero(batch.terminated | batch.truncated)
        abnormal: Bools = np.zeros(len(env_ids), np.bool_)
        failures: dict[int, str] = {}
        for k in batch.abnormal:
            env_id = int(env_ids[k])
            abnormal[k] = True
            failures[env_id] = str(failure_text(batch.infos[k], env_id, self.manager))
        steps = np.full(len(rows), where) if type(where) is int else where[0][rows]
        ends = Ends(steps, ended, rows_of(batch.obs, rows), self._next_states_of(ended))
        rollout.put_ends(where, batch, abnormal, ends)
        rollout.put_last(ended, ends.obs, ends.states)  # some have no more episodes
        now = self._clock()
        elapsed_s = now - self._began_s
        tally, records = tally.ended(rollout, ends, failures, self._seeds, now, elapsed_s)
        rollout.put_episodes(records)
        return tally, len(records)


_ONCE = (None,)
"""The arguments of one call of `recv_arrays`."""
