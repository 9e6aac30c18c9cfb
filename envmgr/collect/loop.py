"""The loop over `ready_obs` and `step` with a policy, which all collectors with dicts run."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from copy import copy
from itertools import islice
from time import perf_counter
from typing import Any, NamedTuple

from envmgr.collect.goals import Goal, check_goal, check_manager, seeds_of
from envmgr.collect.policies import Policy, RandomPolicy
from envmgr.collect.policy_caller import Acted, PolicyCaller
from envmgr.collect.records import EpisodeRecord, OpenEpisode, as_return, flag_of
from envmgr.collect.statistics import CollectStatistics
from envmgr.errors import NothingReadyError, StateError
from envmgr.manager import EnvManager
from envmgr.manager.loop import ManagerLoop, failure_text
from envmgr.types import Clock, EnvTimestep, monotonic


class Books(NamedTuple):
    """What a collector has collected: replaced as a whole, so that it is always consistent.

    Attributes:
        open: the episodes under way, by env_id, in the order in which they began.
        n_ended: how many episodes of each env have ended.
        n_kept: how many of the episodes that were kept count.
        applied: the last delivery of the manager that is in the books.
        ended: the episodes that ended with that delivery.
        told: one item for each of these episodes for which `on_episode` has returned.
    """

    open: dict[int, OpenEpisode]
    statistics: CollectStatistics
    n_ended: dict[int, int]
    n_kept: int
    applied: Any
    ended: Sequence[EpisodeRecord]
    told: list[None]


class CollectLoop:
    """A loop that runs a policy on a manager's envs, and accounts for every timestep delivered.

    This is the base class of the collectors that work with dicts; `Collector` describes the
    arguments.

    Attributes:
        manager: the manager.
        policy: the policy.
        episodes: the records of the episodes that ended, if they are kept.
        policy_s: seconds spent in the policy.
    """

    _keeps = False
    """Whether the steps themselves are kept."""

    def __init__(
        self,
        manager: EnvManager,
        policy: Policy | None = None,
        *,
        on_episode: Callable[[EpisodeRecord], None] | None = None,
        keep_episodes: bool = True,
        clock: Clock = monotonic,
        loop: ManagerLoop | None = None,
        statistics: CollectStatistics | None = None,
    ) -> None:
        check_manager(manager, type(self).__name__)
        if policy is None:
            policy = RandomPolicy.of(manager)
        self.manager = manager
        self._policy = policy
        self.episodes: list[EpisodeRecord] = []
        self.policy_s = 0.0
        self._caller = PolicyCaller(policy, self._own if self._keeps else None)
        self._on_episode = on_episode
        self._keep_episodes = keep_episodes
        self._clock = clock
        self._loop = loop or ManagerLoop(manager)
        self._together = list(getattr(manager, "stepped_together", ()))
        self._seeds = seeds_of(manager)
        statistics = CollectStatistics() if statistics is None else statistics.copied()
        self._n_before = statistics.n_ended
        self._books = Books({}, statistics, {}, 0, None, (), [])
        self._acted: dict[int, Acted] = {}
        self._pending: set[int] = set()
        self._iteration: weakref.ref[Generator[Any, None, None]] | None = None
        self._began_s = 0.0

    @property
    def policy(self) -> Any:
        """The policy. To use another one, create another collector."""
        return self._policy

    @property
    def statistics(self) -> CollectStatistics:
        """The current statistics of everything collected so far."""
        return self._books.statistics

    @property
    def unfinished(self) -> dict[int, int]:
        """The number of timesteps so far in the unfinished episode of each env, by env_id."""
        under_way = self._books.open.items()
        return {env_id: episode.length for env_id, episode in under_way if episode.length}

    def iterate(
        self,
        *,
        steps: int | None = None,
        episodes: int | None = None,
        into: list[EpisodeRecord] | None = None,
    ) -> Iterator[dict[int, EnvTimestep]]:
        """Collect, and yield the timesteps of each gather, already accounted for.

        The iteration ends after `steps` more timesteps or `episodes` more normal episodes, or when
        the episode budgets of all envs are spent (`manager.done`). Without either argument, only
        the budgets end it.

        Both limits are exact: see the class. With `auto_reset` off, envs whose episodes have ended
        are reset together, when no other env can continue.

        Args:
            steps: number of timesteps.
            episodes: number of episodes that end normally.
            into: a list to which the records of the episodes that end are appended.

        Raises:
            ConfigError: both limits are given, or one is below 1.
            StateError: another iteration of this collector is under way.
            ActionError: the policy did not return exactly one action for each env, or returned an
                action that is refused. Nothing was sent.
            EnvManagerError: raised by the manager, such as FailuresExhaustedError.
        """
        check_goal(steps, episodes)
        before = None if self._iteration is None else self._iteration()
        if before is not None and inspect.getgeneratorstate(before) not in _OVER:
            raise StateError(
                "this collector is iterating already: exhaust or close() that iterator first"
            )
        iteration = self._iterate(steps, episodes, into)
        self._iteration = weakref.ref(iteration)  # Ctrl-C in the loop over it drops it
        return iteration

    def _iterate(
        self, steps: int | None, episodes: int | None, into: list[EpisodeRecord] | None
    ) -> Generator[dict[int, EnvTimestep], None, None]:
        goal = Goal(self.statistics, steps, episodes)
        self._began_s = self._clock() - self.statistics.elapsed_s
        try:
            self._resume(into)
            while not goal.is_reached(self.statistics):
                timesteps = self._advance(goal)
                if not timesteps and not self._pending:
                    return  # all budgets are spent
                self._account(timesteps, into)
                yield timesteps
        finally:
            self.statistics.elapsed_s = self._clock() - self._began_s

    def _resume(self, into: list[EpisodeRecord] | None) -> None:
        """Make up for what an interrupt has left undone in the last iteration."""
        self._tell()
        gathered = self._loop.gathered
        if gathered and gathered[0] is not self._books.applied:
            self._account(self._loop.latest(), into)
        if self._pending:  # of a call that was refused or interrupted: what is ready is not
            self._pending.difference_update(self.manager.ready_env)

    # -- one round --------------------------------------------------------------------------

    def _advance(self, goal: Goal) -> dict[int, EnvTimestep]:
        """Send the actions that may be sent and gather; empty if there is nothing left to do."""
        if not goal.may_send(self.statistics, len(self._pending)):
            return self._loop.gather()
        observations = self._observe(goal)
        if not observations:
            return self._loop.gather() if self._pending else {}
        under_way = self._books.open
        in_episode = [i for i in observations if i in under_way and under_way[i].length]
        states = {i: under_way[i].state for i in in_episode}
        began_s = perf_counter()
        actions, acted = self._caller.choose(observations, states)
        self.policy_s += perf_counter() - began_s
        self._begin_episodes(observations)
        self._acted.update(acted)
        self._pending.update(actions)
        return self._loop.step(actions)

    def _observe(self, goal: Goal) -> dict[int, Any]:
        """Return the observations of the envs that are to be stepped now."""
        try:
            ready = self._loop.ready()
        except NothingReadyError:
            if self._pending:
                return {}
            waiting = self._loop.waiting_for_reset()
            if not waiting:
                raise
            under_way = self._books.open
            for env_id in waiting:
                under_way.pop(env_id, None)
            n = goal.may_join(self.statistics, len(under_way), len(waiting))
            self._loop.reset(waiting[:n])
            ready = self._loop.ready()
        return self._chosen(ready, goal)

    def _chosen(self, ready: dict[int, Any], goal: Goal) -> dict[int, Any]:
        under_way, statistics = self._books.open, self.statistics
        going_on = [env_id for env_id in under_way if env_id in ready]  # as they began
        others = [env_id for env_id in ready if env_id not in under_way]
        may_begin = goal.may_join(statistics, len(under_way), len(others))
        may_go_on = goal.may_join(statistics, len(self._pending), len(going_on))
        chosen = {*going_on[:may_go_on], *others[:may_begin]}
        may_send = goal.may_send(statistics, len(self._pending))
        sent = set(sorted(chosen)[:may_send])
        for together in self._together:  # all of them or none
            if not sent.isdisjoint(together):
                sent.update(env_id for env_id in together if env_id in ready)
        return {env_id: ready[env_id] for env_id in sorted(sent)}

    def _begin_episodes(self, env_ids: dict[int, Any]) -> None:
        under_way = self._books.open
        beginning = [env_id for env_id in env_ids if env_id not in under_way]
        if beginning:
            generations, now = self.manager.generations, self._clock()  # stats() would cost more
            for env_id in beginning:
                under_way[env_id] = OpenEpisode(generations[env_id], now)

    # -- accounts ---------------------------------------------------------------------------

    def _account(self, timesteps: dict[int, EnvTimestep], into: list[EpisodeRecord] | None) -> None:
        """Count all timesteps of a gather at once, and report the episodes that ended with them.

        This can be interrupted anywhere, and called again: nothing counts before the books are
        replaced.
        """
        books, now = self._books, self._clock()
        statistics = copy(books.statistics)
        statistics.steps += len(timesteps)
        statistics.elapsed_s = now - self._began_s
        under_way, n_ended, n_kept = dict(books.open), books.n_ended, books.n_kept
        records: list[EpisodeRecord] = []
        known, keeps = self._acted, self._keeps
        for env_id, timestep in timesteps.items():
            episode = under_way.get(env_id) or OpenEpisode(None, now)
            acted = known.get(env_id)
            episode = episode.after(timestep.reward, env_id, None if acted is None else acted.state)
            if keeps:
                episode = self._keep(env_id, episode, acted, timestep)
            if not timestep.done:
                under_way[env_id] = episode
                continue
            under_way.pop(env_id, None)
            nth = n_ended.get(env_id, 0)
            record = self._record_of(env_id, episode, timestep, nth, statistics)
            if not records:
                statistics = statistics.copied()
            statistics.add(record)
            records.append(record)
            n_ended = {**n_ended, env_id: nth + 1}
            if keeps:
                n_kept = self._keep_ended(env_id, episode, n_kept, record)
        if self._keep_episodes:
            self.episodes[books.statistics.n_ended - self._n_before :] = records
        self._pending.difference_update(timesteps)  # first: what is in the books is over
        applied = self._loop.gathered[0]
        self._books = Books(under_way, statistics, n_ended, n_kept, applied, records, [])
        if into is not None:
            into += records
        self._tell()

    def _tell(self) -> None:
        """Call `on_episode` for the episodes for which it has not returned yet."""
        ended, told = self._books[5:]
        if self._on_episode is not None and len(told) < len(ended):
            # In one go, so that each return of `on_episode` is noted, wherever an interrupt comes.
            told.extend(map(self._on_episode, islice(ended, len(told), None)))

    def _record_of(
        self,
        env_id: int,
        episode: OpenEpisode,
        timestep: EnvTimestep,
        nth: int,
        statistics: CollectStatistics,
    ) -> EpisodeRecord:
        """Return the record of an episode that ended."""
        info, failure = timestep.info, failure_text(timestep.info, env_id, self.manager)
        return EpisodeRecord(
            number=statistics.n_ended,
            env_id=env_id,
            nth=nth,
            seed=self._seeds.get(env_id),
            generation=episode.generation,
            episode_return=as_return(episode.rewards),
            length=episode.length,
            terminated=flag_of(info, "terminated"),
            truncated=flag_of(info, "truncated"),
            abnormal=failure is not None,
            failure=failure,
            duration_s=self._began_s + statistics.elapsed_s - episode.began,
            ended_s=statistics.elapsed_s,
        )

    def _own(self, env_id: int, obs: Any) -> Any:
        """Return an observation that stays as it is; called only where steps are kept."""
        return obs

    def _keep(
        self, env_id: int, episode: OpenEpisode, acted: Acted | None, timestep: EnvTimestep
    ) -> OpenEpisode:
        """Keep a step; return the episode with that step."""
        return episode

    def _keep_ended(
        self, env_id: int, episode: OpenEpisode, n_kept: int, record: EpisodeRecord
    ) -> int:
        """Keep an episode that ended; return how many are kept then."""
        return n_kept


_OVER = (inspect.GEN_CREATED, inspect.GEN_CLOSED)
