"""Collectors that keep what they collect: steps and episodes as trajectories."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from envmgr.collect.goals import check_count, keys_of_infos, spaces_of
from envmgr.collect.loop import CollectLoop
from envmgr.collect.policy_caller import Acted
from envmgr.collect.records import EpisodeRecord, OpenEpisode
from envmgr.core import ends_of
from envmgr.errors import StateError
from envmgr.spaces import codec_of, indexed, stacked
from envmgr.types import EnvTimestep


@dataclass(frozen=True)
class Trajectory:
    """Consecutive steps of one env in one episode: the whole episode, or a piece of it.

    A step in which the env failed is left out, and the trajectory is truncated at
    the last good observation.

    Attributes:
        env_id: the env that took the steps.
        obs: (L, *shape), or a dict or tuple of such: what the actions were chosen for.
        actions: (L, ...).
        rewards: (L,), or (L, *shape).
        next_obs: (L, *shape): what the actions led to; at the end of an episode, the terminal
            observation.
        terminated: whether the episode ended by itself.
        truncated: whether it was cut off, by a time limit or a failure.
        abnormal: whether a failure cut it off.
        is_start: whether the first step is the first of the episode.
        extras: (L, ...) by name: what else the policy returned.
        states: (L, ...): the states that a recurrent policy was given; None for other policies.
        infos: L infos, with only the collector's `info_keys` if these are given.
        record: the record of the episode, if it ended; it counts a failed step.
    """

    env_id: int
    obs: Any
    actions: Any
    rewards: Any
    next_obs: Any
    terminated: bool
    truncated: bool
    abnormal: bool
    is_start: bool
    extras: dict[str, Any]
    states: Any
    infos: list[Any]
    record: EpisodeRecord | None

    def __len__(self) -> int:
        """Return how many steps it has."""
        return len(self.infos)


class _Step(NamedTuple):
    acted: Acted
    obs: Any
    reward: Any
    ends: tuple[bool, bool]
    info: Any


class _Piece(NamedTuple):
    """Steps that were kept, of an episode that ended or goes on."""

    env_id: int
    steps: Sequence[_Step]
    is_start: bool
    record: EpisodeRecord | None


class _Keeping(CollectLoop):
    """A loop that keeps the steps."""

    _keeps = True

    def __init__(self, *args: Any, info_keys: Sequence[str] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._info_keys = None if info_keys is None else keys_of_infos(info_keys)
        manager = self.manager
        self._codecs = [codec_of(observed) for observed, _ in spaces_of(manager)]
        self._are_views = manager.cfg.copy_on_get is not True
        self._pieces: list[_Piece] = []

    def _keep(
        self, env_id: int, episode: OpenEpisode, acted: Acted | None, timestep: EnvTimestep
    ) -> OpenEpisode:
        if acted is None:
            raise StateError(
                f"env {env_id} had a step under way that this collector has not sent: gather what "
                "is outstanding with recv() before you collect"
            )
        ends = ends_of(timestep.done, timestep.info)
        steps = [] if episode.steps is None else episode.steps
        at = episode.length - 1 - episode.first
        info = timestep.info if self._info_keys is None else self._kept_of(timestep.info)
        steps[at:] = [_Step(acted, self._own(env_id, timestep.obs), timestep.reward, ends, info)]
        return episode._replace(steps=steps)

    def _keep_ended(
        self, env_id: int, episode: OpenEpisode, n_kept: int, record: EpisodeRecord
    ) -> int:
        piece = _Piece(env_id, episode.steps or (), not episode.first, record)
        self._pieces[n_kept:] = [piece]
        return n_kept + 1

    def _kept_of(self, info: Any) -> Any:
        """Return what is kept of an info."""
        if isinstance(info, (list, tuple)):
            return [self._kept_of(part) for part in info]
        return {key: info[key] for key in self._info_keys or () if key in info}

    def _own(self, env_id: int, obs: Any) -> Any:
        as_dict = getattr(obs, "json", None)
        if callable(as_dict):  # a treetensor
            obs = as_dict()
        return indexed(self._codecs[env_id].stack([obs]), 0) if self._are_views else obs

    @property
    def _kept(self) -> list[_Piece]:
        return self._pieces[: self._books.n_kept]

    def _trajectories(self, pieces: Sequence[_Piece]) -> list[Trajectory]:
        return [made for piece in pieces if (made := self._trajectory(piece)) is not None]

    def _trajectory(self, piece: _Piece) -> Trajectory | None:
        """Return a piece as arrays; None if it has no step but a failed one."""
        env_id, steps, is_start, record = piece
        last, failed = steps[-1], record is not None and record.abnormal
        steps = steps[:-1] if failed else steps
        if not steps:
            return None
        acted = [step.acted for step in steps]
        final_obs = last.acted.obs if failed else last.obs
        obs = self._codecs[env_id].stack([*(one.obs for one in acted), final_obs])
        return Trajectory(
            env_id=env_id,
            obs=indexed(obs, slice(0, -1)),
            actions=_column([one.action for one in acted]),
            rewards=_column([step.reward for step in steps]),
            next_obs=indexed(obs, slice(1, None)),
            terminated=last.ends[0],
            truncated=last.ends[1],
            abnormal=failed,
            is_start=is_start,
            extras={name: _column([a.extras[name] for a in acted]) for name in acted[0].extras},
            states=None if acted[0].given is None else _column([one.given for one in acted]),
            infos=[step.info for step in steps],
            record=record,
        )


class StepCollector(_Keeping):
    """A collector of steps with a policy of dicts, which returns them as pieces of episodes.

    Like `Collector`, which describes the arguments, it works with every kind of manager and every
    way of gathering, but it returns the steps themselves: for replay buffers, and for learning from
    a given number of steps. It also takes `info_keys`: the keys of infos to keep; None for all.
    """

    def collect(self, n_steps: int) -> list[Trajectory]:
        """Return `n_steps` steps of episodes that ended, and of those still under way.

        Episodes under way continue with the next `collect`. A step in which an env failed counts,
        but is in no trajectory. After an interrupt, the next call returns what had already been
        collected, as part of its steps.

        Raises:
            ConfigError: `n_steps` is not an integer >= 1.
            StateError, ActionError, EnvManagerError: as in `iterate`.
        """
        check_count("n_steps", n_steps)
        n_kept = sum(len(piece.steps) for piece in self._kept)
        n_kept += sum(one.length - one.first for one in self._books.open.values())
        if n_kept < n_steps:
            for _ in self.iterate(steps=n_steps - n_kept):
                pass
        books = self._books
        pieces = [
            _Piece(env_id, episode.steps[: episode.length - episode.first], not episode.first, None)
            for env_id, episode in sorted(books.open.items())
            if episode.steps is not None and episode.length > episode.first
        ]
        found = self._trajectories([*self._kept, *pieces])
        under_way = {
            env_id: episode._replace(steps=None, first=episode.length)
            for env_id, episode in books.open.items()
        }
        self._books = books._replace(open=under_way, n_kept=0)  # the last: they are delivered
        return found


class EpisodeCollector(_Keeping):
    """A collector of whole episodes with a policy of dicts.

    Like `Collector`, which describes the arguments, it works with every kind of manager and every
    way of gathering, but it returns the steps themselves: for evaluation, and for learning from
    whole episodes. It also takes `info_keys`: the keys of infos to keep; None for all.
    """

    def collect(self, n_episodes: int) -> list[Trajectory]:
        """Return `n_episodes` episodes from their first steps on, in the order in which they ended.

        They are the first ones to begin, not the first ones to end. The list may also hold episodes
        that a failure ended meanwhile: they are `abnormal`, and others have replaced them. It holds
        fewer episodes if the envs have no more. After an interrupt, the next call returns what had
        already been collected, as part of its episodes.

        Raises:
            ConfigError: `n_episodes` is not an integer >= 1.
            StateError, ActionError, EnvManagerError: as in `iterate`.
        """
        check_count("n_episodes", n_episodes)
        n_kept = sum(not piece.record.abnormal for piece in self._kept if piece.record is not None)
        if n_kept < n_episodes:
            for _ in self.iterate(episodes=n_episodes - n_kept):
                pass
        found = self._trajectories(self._kept)
        self._books = self._books._replace(n_kept=0)  # the last: they are delivered
        return found


def _column(values: Sequence[Any]) -> Any:
    """Return values as one batch, of objects if they are not alike."""
    try:
        return stacked(values)
    except (ValueError, TypeError, KeyError):
        return codec_of(None).stack(values)
