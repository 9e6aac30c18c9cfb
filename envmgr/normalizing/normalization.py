"""The processing of timesteps as they are handed out: normalising, and statistics of episodes.

The results depend only on what is delivered, and in which order: they are the same for timesteps by
env_id and for arrays, on every kind. The state is replaced as a whole, once per call, and the new
state counts only when that call has returned: timesteps that an interrupted call gives back are
delivered, and counted, later.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from envmgr.config import ManagerConfig
from envmgr.config.kind_sections import NormalizationSection
from envmgr.config.schema import unknown_key
from envmgr.core import ArrayBatch
from envmgr.core.call_journal import Fate
from envmgr.core.collect import BatchInfos, GivenInfos
from envmgr.errors import ConfigError
from envmgr.normalizing.moments import (
    Floats,
    Moments,
    array_like,
    as_moments,
    loaded,
    no_moments,
    saved,
)
from envmgr.normalizing.state import OF_EPISODES, State, no_state
from envmgr.spaces import codec_of, indexed
from envmgr.spaces.normalized import box_paths, leaf_at, missing_keys, with_boxes, with_leaves
from envmgr.spaces.reading import error_text, short_text
from envmgr.spaces.values import path_text
from envmgr.types import EnvTimestep, is_abnormal, monotonic
from envmgr.wire.messages import EnvDescription

Bools = npt.NDArray[np.bool_]

VERSION = 1


class _Told(NamedTuple):
    """The results for timesteps: observations, rewards, and statistics of episodes by env_id."""

    obs: Any
    rewards: Floats | None
    episodes: dict[int, dict[str, Any]]


class Normalization:
    """Running statistics of what a manager hands out, shared by its envs.

    Args:
        config: the config of the manager.
        env_num: how many envs it has.

    Attributes:
        frozen: whether the statistics stay as they are, as for evaluation.
    """

    def __init__(self, config: ManagerConfig, env_num: int) -> None:
        self._with_obs, self._with_reward = config.normalize_obs, config.normalize_reward
        self._with_episodes = config.episode_statistics
        self._needs_rewards = self._with_reward or self._with_episodes
        self._section = section = config.normalization or NormalizationSection()
        self.frozen = section.frozen
        self._space: Any = None
        self._codec = codec_of(None)
        self._paths: list[Any] = []
        self._given: dict[str, Moments] | None = None  # loaded before the space is known
        self._pending: tuple[Fate | None, State] | None = None
        self._state = no_state(env_num, monotonic())

    # -- for the manager --------------------------------------------------------------------

    def adopt(self, descriptions: Sequence[EnvDescription]) -> list[EnvDescription]:
        """Adopt the descriptions of the envs, and return them as users are shown them.

        Raises:
            ConfigError: what the envs give cannot be normalised, or not together.
        """
        space = descriptions[0].observation_space
        if self._with_obs and any(d.observation_space != space for d in descriptions):
            raise ConfigError(
                "manager.normalize_obs is true, but the envs have different observation spaces, "
                "which have no statistics in common. Turn it off, or give equal envs."
            )
        for description in descriptions if self._needs_rewards else ():
            shape = getattr(description.reward_space, "shape", ())
            if shape not in ((), (1,)):
                raise _no_number(f"the envs' rewards have the shape {shape}")
        if self._with_obs and self._space != space:
            self._adopt_space(space)
        return [self._shown(description) for description in descriptions]

    def _adopt_space(self, space: Any) -> None:
        keys = self._section.keys
        for key in missing_keys(space, keys):
            raise unknown_key(key, space.spaces, "manager.normalization.keys")
        paths = box_paths(space, keys)
        if not paths:
            under = "" if keys is None else f" under {list(keys)}"
            raise ConfigError(
                "manager.normalize_obs is true, but there is no Box to normalise in the "
                f"observation space {short_text(space)}{under}. Turn it off."
            )
        given = self._given
        kept = None if given is None else self.state_dict(episodes=True)
        self._given = None
        self._space, self._codec, self._paths = space, codec_of(space), paths
        shapes = [leaf.shape for leaf in self._codec.structure.leaves if leaf.path in paths]
        self._state = self._state._replace(obs=tuple(map(no_moments, shapes)))
        if kept is not None:
            try:
                self.load_state_dict(kept)
            except ConfigError:
                self._space, self._given = None, given  # the next launch refuses them, too
                raise

    def _shown(self, description: EnvDescription) -> EnvDescription:
        section = self._section
        if self._with_obs:
            shown = with_boxes(description.observation_space, self._paths, section.clip_obs)
            description = description._replace(observation_space=shown)
        if self._with_reward and description.reward_space is not None:
            shown = with_boxes(description.reward_space, [()], section.clip_reward)
            description = description._replace(reward_space=shown)
        return description

    def begin(self, env_ids: Sequence[int]) -> None:
        """Note that these envs are reset without a timestep that says so."""
        self._state = self._settled().begun(list(env_ids), monotonic())

    def owed(self, env_ids: Iterable[int]) -> None:
        """Note that timesteps of these envs that were handed out will be handed out again."""
        state = self._settled()
        self._state = state._replace(counted=state.counted.union(env_ids))

    def ready(self, observations: dict[int, Any]) -> dict[int, Any]:
        """Return the observations that `ready_obs` shows."""
        if not self._with_obs or not observations:
            return observations
        ids = list(observations)
        batch = self.ready_batch(ids, self._codec.stack(list(observations.values())))
        return {env_id: indexed(batch, k) for k, env_id in enumerate(ids)}

    def ready_batch(self, env_ids: Sequence[int], obs: Any) -> Any:
        """Return the observations that `ready_arrays` shows; those of new episodes are counted."""
        if not self._with_obs or not len(env_ids):
            return obs
        state, ids = self._settled(), np.asarray(env_ids)
        new = state.is_new[ids]
        if new.any():
            is_new = state.is_new.copy()
            is_new[ids] = False
            self._state = state = state._replace(obs=self._seen(state, obs, new), is_new=is_new)
        return self._normalized(state, obs)

    def timesteps(
        self, timesteps: dict[int, EnvTimestep], fate: Fate | None
    ) -> dict[int, EnvTimestep]:
        """Return the timesteps by env_id that are handed out in place of these."""
        if not timesteps:
            return timesteps
        ids, steps = np.fromiter(timesteps, np.int64, len(timesteps)), list(timesteps.values())
        told = self._take(
            fate,
            ids,
            self._codec.stack([step.obs for step in steps]) if self._with_obs else None,
            np.array([_number(s.reward) for s in steps]) if self._needs_rewards else None,
            np.array([not is_abnormal(step.info) for step in steps]),
            np.array([bool(step.done) for step in steps]),
        )
        made = {}
        for k, (env_id, step) in enumerate(timesteps.items()):
            obs = indexed(told.obs, k) if self._with_obs else step.obs
            reward = step.reward if told.rewards is None else _alike(told.rewards[k], step.reward)
            made[env_id] = EnvTimestep(
                obs, reward, step.done, _with_episode(step.info, told.episodes.get(env_id))
            )
        return made

    def batch(self, batch: ArrayBatch, fate: Fate | None) -> ArrayBatch:
        """Return the timesteps as arrays that are handed out in place of these."""
        if not len(batch.env_ids):
            return batch
        if self._needs_rewards and (batch.reward.ndim != 1 or batch.reward.dtype == object):
            raise _no_number(f"rewards came as an array of shape {batch.reward.shape}")
        normal = np.ones(len(batch.env_ids), np.bool_)
        infos: Any = batch.infos
        normal[batch.abnormal] = False
        ended = batch.terminated | batch.truncated
        told = self._take(fate, batch.env_ids, batch.obs, batch.reward, normal, ended)
        if type(infos) is not BatchInfos or not infos.are_ordinary:  # it knows rewards, too
            infos = GivenInfos.of(
                _with_episode(info, told.episodes.get(env_id))
                for env_id, info in zip(batch.env_ids.tolist(), infos, strict=True)
            )
        reward = batch.reward if told.rewards is None else told.rewards
        return batch._replace(obs=told.obs, reward=reward, infos=infos)

    def _take(
        self,
        fate: Fate | None,
        ids: npt.NDArray[np.int64],
        obs: Any,
        rewards: Floats | None,
        normal: Bools,
        done: Bools,
    ) -> _Told:
        """Return the results for timesteps, and count these once their call has returned.

        Timesteps that are handed out once more were counted before, and get the same statistics of
        episodes again.
        """
        state = self._settled()
        episodes: dict[int, dict[str, Any]] = {}
        new: Any = slice(None)  # most often all of them are
        seen = normal
        if state.counted:
            new = ~np.isin(ids, list(state.counted))
            again = ids[~new & normal & done].tolist()
            episodes = {i: state.told[i] for i in again if i in state.told}
            state = state._replace(counted=state.counted.difference(ids.tolist()))
            seen = normal & new
        is_new = state.is_new.copy()
        is_new[ids[new]] = done[new]
        state = state._replace(is_new=is_new)
        if self._with_obs:
            state = state._replace(obs=self._seen(state, obs, seen))
            obs = self._normalized(state, obs)
        shown: Floats | None = None
        if rewards is not None:
            columns = ids[new], rewards[new]
            if self._with_episodes:
                now = monotonic()
                state, ended = state.with_episodes(*columns, normal[new], done[new], now)
                episodes |= ended
            if self._with_reward:
                counted = normal[new] & (not self.frozen)
                state = state.with_rewards(*columns, counted, done[new], self._section.gamma)
                shown = self._scaled(state, rewards)
        self._pending = (fate, state)
        return _Told(obs, shown, episodes)

    def _scaled(self, state: State, rewards: Floats) -> Floats:
        high = self._section.clip_reward
        scale = np.sqrt(state.reward.variance + self._section.epsilon)
        scaled: Floats = np.clip(rewards / scale, -high, high)
        return scaled

    def _seen(self, state: State, obs: Any, rows: Bools) -> tuple[Moments, ...]:
        if self.frozen:
            return state.obs
        return tuple(
            moments.seen(leaf_at(obs, path)[rows])
            for path, moments in zip(self._paths, state.obs, strict=True)
        )

    def _normalized(self, state: State, obs: Any) -> Any:
        section, leaves = self._section, {}
        for path, moments in zip(self._paths, state.obs, strict=True):
            spread = np.sqrt(moments.variance + section.epsilon)
            scaled = (leaf_at(obs, path) - moments.mean) / spread
            leaves[path] = np.clip(scaled, -section.clip_obs, section.clip_obs).astype(np.float32)
        return with_leaves(obs, leaves)

    def _settled(self) -> State:
        """Return the state, including what the latest call took, if that call has returned."""
        pending = self._pending
        if pending is not None:
            fate, state = pending
            if fate is None or not fate.given_back:
                self._state = state
            self._pending = None
        return self._state

    # -- for users --------------------------------------------------------------------------

    @property
    def obs_mean(self) -> dict[str, Floats]:
        """The means of observations, by the path of each array in them ("" for a single one)."""
        return {name: moments.mean.copy() for name, moments in self._named().items()}

    @property
    def obs_variance(self) -> dict[str, Floats]:
        """The variances of observations, by path as in `obs_mean`."""
        return {name: np.array(moments.variance) for name, moments in self._named().items()}

    @property
    def return_variance(self) -> float:
        """The variance of discounted returns; rewards are divided by its square root."""
        return float(self._settled().reward.variance)

    def _named(self) -> dict[str, Moments]:
        if self._given is not None:
            return self._given
        names = [path_text(path) if path else "" for path in self._paths]
        return dict(zip(names, self._settled().obs, strict=True))

    def state_dict(self, *, episodes: bool = False) -> dict[str, Any]:
        """Return the statistics as a dict of numbers and of arrays that are copies.

        Args:
            episodes: include the episodes under way, for a run that goes on with the same envs at
                the same step.
        """
        state = self._settled()
        kept: dict[str, Any] = {
            "version": VERSION,
            "obs": {name: saved(moments) for name, moments in self._named().items()},
            "reward": saved(state.reward),
        }
        if episodes:
            kept["episodes"] = {name: getattr(state, name).copy() for name in OF_EPISODES}
        return kept

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the statistics that `state_dict` returned, to go on from them.

        If the spaces of the envs are not known yet, the statistics are kept until they are.

        Raises:
            ConfigError: the statistics are of another version, or of other observations or envs;
                nothing was loaded.
        """
        try:
            if state_dict["version"] != VERSION:
                raise ValueError(f"it has version {state_dict['version']!r}, not {VERSION}")
            state, named, given = self._settled(), self._named(), None
            if self._with_obs and self._space is None:
                named = given = {name: as_moments(one) for name, one in state_dict["obs"].items()}
            if set(state_dict["obs"].keys()) != set(named):
                raise ValueError(f"it is of {sorted(state_dict['obs'])}, not of {sorted(named)}")
            state = state._replace(
                obs=tuple(loaded(state_dict["obs"][name], own) for name, own in named.items())
                if given is None
                else state.obs,
                reward=loaded(state_dict["reward"], state.reward),
            )
            columns = state_dict.get("episodes", {})
            state = state._replace(
                **{name: array_like(columns[name], getattr(state, name)) for name in columns}
            )
        except Exception as error:  # it may be anything, and raise when it is read
            reason = error_text(error).removeprefix("ValueError: ")
            raise ConfigError(
                f"these statistics do not fit: {reason}. Give what state_dict() of a manager of "
                "equal envs and options returned."
            ) from error
        self._state, self._given = state, given


def normalization_of(config: ManagerConfig, env_num: int) -> Normalization | None:
    """Return the normalisation that a config asks for, or None."""
    asked = config.normalize_obs or config.normalize_reward or config.episode_statistics
    return Normalization(config, env_num) if asked else None


def _no_number(found: str) -> ConfigError:
    return ConfigError(
        "manager.normalize_reward and manager.episode_statistics take rewards that are one number, "
        f"but {found}. Turn them off."
    )


def _number(reward: Any) -> float:
    try:
        return float(reward if isinstance(reward, (int, float)) else np.asarray(reward).item())
    except (TypeError, ValueError):
        raise _no_number(f"a reward is {short_text(reward)}") from None


def _alike(number: Any, reward: Any) -> Any:
    """Return a number in the form of a reward."""
    if isinstance(reward, np.ndarray):
        return np.full(reward.shape, number, np.result_type(reward.dtype, np.float32))
    return float(number)


def _with_episode(info: Any, episode: dict[str, Any] | None) -> Any:
    if episode is None or not isinstance(info, Mapping):
        return info
    return {**info, "episode": episode}
