"""The collector: the loop over `ready_obs` and `step` with a policy, episode by episode."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

from envmgr.collect.policies import Policy, RandomPolicy, checked_actions, policy_seed
from envmgr.collect.records import EpisodeRecord, OpenEpisode, as_return, flag_of
from envmgr.collect.statistics import CollectStatistics
from envmgr.errors import ConfigError, NothingReadyError, StateError
from envmgr.manager import EnvManager
from envmgr.manager.loop import ManagerLoop, failure_text
from envmgr.seeding import seeds_by_env
from envmgr.types import Clock, EnvTimestep, monotonic


class Collector:
    """Runs a policy on the envs of a manager, and accounts for every timestep that it delivers.

    The timesteps of a collection are those of the episodes that ended (`EpisodeRecord.length`) and
    of the unfinished ones (`unfinished`), none is counted twice or left out. Whatever ends a
    collection, an exception too, `statistics` and `episodes` hold what was collected before, and
    the next `iterate` or `collect` goes on from there.

    `steps` of a collection is exact: no more actions are sent than that. So is `episodes`: they are
    the first ones to begin, not the first ones to end, since those would be the short ones, and
    their mean return would be biased. The price is that envs idle while the last episodes end, also
    in the middle of an episode that an earlier collection has begun. An abnormal episode is
    replaced by another one. Only steps that an interrupted collection has left under way may end
    more episodes than that.

    A collector expects every episode to begin and go on through it: after a `reset` of the manager
    by hand, make a new one.

    Args:
        manager: launched; of any kind. It is not closed here.
        policy: `{env_id: obs} -> {env_id: action}`; None for random actions that follow from the
            manager's seed.
        on_episode: called with the record of each episode that ended, in order.
        keep_episodes: whether `episodes` keeps all records; off for runs without end.
        clock: monotonic seconds.
        loop: reads observations and steps; None for a `ManagerLoop` of the manager.
    """

    def __init__(
        self,
        manager: EnvManager,
        policy: Policy | None = None,
        *,
        on_episode: Callable[[EpisodeRecord], None] | None = None,
        keep_episodes: bool = True,
        clock: Clock = monotonic,
        loop: ManagerLoop | None = None,
    ) -> None:
        seed = getattr(getattr(manager, "cfg", None), "seed", None)
        if policy is None:
            policy = RandomPolicy(None, manager.action_space, policy_seed(seed))
        self.manager = manager
        self.policy = policy
        self.statistics = CollectStatistics()
        self.episodes: list[EpisodeRecord] = []
        self._on_episode = on_episode
        self._keep_episodes = keep_episodes
        self._clock = clock
        self._loop = loop or ManagerLoop(manager)
        self._seeds = seeds_by_env(seed, manager.env_num)
        self._n_ended = dict.fromkeys(range(manager.env_num), 0)
        self._open: dict[int, OpenEpisode] = {}
        self._pending: set[int] = set()
        self._running = False

    @property
    def unfinished(self) -> dict[int, int]:
        """How many timesteps the unfinished episode of each env has so far, by env_id."""
        return {env_id: episode.length for env_id, episode in self._open.items() if episode.length}

    def collect(
        self, *, steps: int | None = None, episodes: int | None = None
    ) -> list[EpisodeRecord]:
        """Collect, and return the records of the episodes that ended meanwhile.

        The arguments, the order and the errors are those of `iterate`.
        """
        ended: list[EpisodeRecord] = []
        for _ in self.iterate(steps=steps, episodes=episodes, into=ended):
            pass
        return ended

    def iterate(
        self,
        *,
        steps: int | None = None,
        episodes: int | None = None,
        into: list[EpisodeRecord] | None = None,
    ) -> Iterator[dict[int, EnvTimestep]]:
        """Collect, and yield the timesteps of each gather, already accounted for.

        Ends when there are `steps` timesteps or `episodes` normal episodes more than before, or
        when the episode budgets of all envs are spent (`manager.done`); without either it ends
        with the budgets only.

        Both are exact: see the class. With `auto_reset` off, the ended envs are reset together when
        no other env can go on.

        Args:
            steps: how many timesteps.
            episodes: how many episodes that end normally.
            into: a list that gets the records of the episodes that end.

        Raises:
            ConfigError: both are given, or a number is below 1.
            StateError: another iteration of this collector is under way.
            ActionError: the policy returned something else than one action for each env, or an
                action that is refused. Nothing was sent.
            EnvManagerError: what the manager raises, such as FailuresExhaustedError.
        """
        _check_goal(steps, episodes)
        if self._running:
            raise StateError(
                "this collector is iterating already: exhaust or close() that iterator first"
            )
        goal = _Goal(self.statistics, steps, episodes)
        if self._pending:  # left by a call that was refused or interrupted: what is ready is not
            self._pending.difference_update(self.manager.ready_env)
        self._running = True
        began, before_s = self._clock(), self.statistics.elapsed_s
        try:
            while not goal.reached:
                timesteps = self._advance(goal)
                if not timesteps and not self._pending:
                    return  # all budgets are spent
                self.statistics.elapsed_s = before_s + self._clock() - began
                self._account(timesteps, into)
                yield timesteps
        finally:
            self.statistics.elapsed_s = before_s + self._clock() - began
            self._running = False

    # -- one round --------------------------------------------------------------------------

    def _advance(self, goal: _Goal) -> dict[int, EnvTimestep]:
        """Send the actions that may be sent and gather; empty if there is nothing left to do."""
        if not goal.may_send(len(self._pending)):
            return self._loop.gather()
        observations = self._observe(goal)
        if not observations:
            return self._loop.gather() if self._pending else {}
        actions = checked_actions(self.policy(observations), list(observations))
        self._begin_episodes(observations)
        self._pending.update(actions)
        return self._loop.step(actions)

    def _observe(self, goal: _Goal) -> dict[int, Any]:
        """Return the observations of the envs that are to be stepped now."""
        try:
            ready = self._loop.ready()
        except NothingReadyError:
            if self._pending:
                return {}
            waiting = self._loop.waiting_for_reset()
            if not waiting:
                raise
            for env_id in waiting:
                self._open.pop(env_id, None)
            self._loop.reset(waiting[: goal.may_join(len(self._open), len(waiting))])
            ready = self._loop.ready()
        return self._chosen(ready, goal)

    def _chosen(self, ready: dict[int, Any], goal: _Goal) -> dict[int, Any]:
        going_on = [env_id for env_id in self._open if env_id in ready]  # as they began
        others = [env_id for env_id in ready if env_id not in self._open]
        may_begin = goal.may_join(len(self._open), len(others))
        may_go_on = goal.may_join(len(self._pending), len(going_on))
        chosen = {*going_on[:may_go_on], *others[:may_begin]}
        may_send = goal.may_send(len(self._pending))
        return {env_id: ready[env_id] for env_id in sorted(chosen)[:may_send]}

    def _begin_episodes(self, env_ids: dict[int, Any]) -> None:
        beginning = [env_id for env_id in env_ids if env_id not in self._open]
        if beginning:
            generations = self.manager.stats().get("generations")
            now = self._clock()
            for env_id in beginning:
                generation = None if generations is None else generations[env_id]
                self._open[env_id] = OpenEpisode(generation, now)

    # -- accounts ---------------------------------------------------------------------------

    def _account(self, timesteps: dict[int, EnvTimestep], into: list[EpisodeRecord] | None) -> None:
        """Count all timesteps of a gather first, and tell of the episodes that ended then."""
        records = []
        self._pending.difference_update(timesteps)
        self.statistics.steps += len(timesteps)
        for env_id, timestep in timesteps.items():
            episode = self._open.get(env_id)
            if episode is None:
                episode = self._open[env_id] = OpenEpisode(None, self._clock())
            episode.add(timestep.reward, env_id)
            if timestep.done:
                records.append(self._close_episode(env_id, timestep))
        if self._keep_episodes:
            self.episodes += records
        if into is not None:
            into += records
        if self._on_episode is not None:
            for record in records:
                self._on_episode(record)

    def _close_episode(self, env_id: int, timestep: EnvTimestep) -> EpisodeRecord:
        episode = self._open.pop(env_id)
        statistics, info = self.statistics, timestep.info
        failure = failure_text(info, env_id, self.manager)
        record = EpisodeRecord(
            number=statistics.episodes + statistics.abnormal_episodes,
            env_id=env_id,
            nth=self._n_ended[env_id],
            seed=self._seeds.get(env_id),
            generation=episode.generation,
            episode_return=as_return(episode.rewards),
            length=episode.length,
            terminated=flag_of(info, "terminated"),
            truncated=flag_of(info, "truncated"),
            abnormal=failure is not None,
            failure=failure,
            duration_s=self._clock() - episode.began,
            ended_s=statistics.elapsed_s,
        )
        self._n_ended[env_id] += 1
        statistics.add(record)
        return record


class _Goal:
    """When a collection is complete, and what it may still begin."""

    def __init__(
        self, statistics: CollectStatistics, steps: int | None, episodes: int | None
    ) -> None:
        self._statistics = statistics
        self._steps = math.inf if steps is None else statistics.steps + steps
        self._episodes = math.inf if episodes is None else statistics.episodes + episodes

    @property
    def reached(self) -> bool:
        statistics = self._statistics
        return statistics.steps >= self._steps or statistics.episodes >= self._episodes

    def may_send(self, n_pending: int) -> int:
        """Return how many actions may be sent besides those under way."""
        if math.isinf(self._steps):
            return sys.maxsize
        return int(self._steps) - self._statistics.steps - n_pending

    def may_join(self, n_under_way: int, n_waiting: int) -> int:
        """Return how many of the waiting envs may take part besides those under way."""
        if math.isinf(self._episodes):
            return n_waiting
        return max(int(self._episodes) - self._statistics.episodes - n_under_way, 0)


def _check_goal(steps: int | None, episodes: int | None) -> None:
    if steps is not None and episodes is not None:
        raise ConfigError(
            f"steps is {steps} and episodes is {episodes}, but a collection ends with one of the "
            "two. Leave the other out."
        )
    for name, value in (("steps", steps), ("episodes", episodes)):
        if value is not None and (type(value) is not int or value < 1):
            raise ConfigError(f"{name} is {value!r}, but must be an integer >= 1")
