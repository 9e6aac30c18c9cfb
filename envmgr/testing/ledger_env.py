"""Envs that sign every timestep with the env, the step and the action that it answers.

The signature is a `Mark`, an int64 array in the info under `MARK_KEY`. On the trainer's side, the
`Ledger` checks it.
"""

from __future__ import annotations

import functools
import inspect
import os
import time
import zlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium.spaces import Box, Discrete, Space

from envmgr.env import adapt
from envmgr.env.contract import awaited
from envmgr.env.gym_spaces import convert_space
from envmgr.testing.checksums import UNKNOWN, Checksum, checksum_of, reward_checksum

MARK_KEY = "ledger"
"""The entry of an info that holds the mark."""

ANY_ENV = -1
"""The env_id in the marks of envs that may serve several env_ids in turn, as spares do."""

N_ACTIONS = 2**31
"""How many actions a `LedgerEnv` has: they are tokens, each of which differs from all others."""


class Mark(NamedTuple):
    """The signature of a timestep: which env gave it, and which parts of it belong together.

    Attributes:
        env_id: the env; `ANY_ENV` for one that may serve several env_ids, one after the other.
        instance: a random number of the env object, another one after each renewal.
        episode: how many resets the object has begun, minus one.
        step: the step of the episode; 0 in the info of a reset.
        sequence: how many steps the object has begun, this one included.
        action: checksum of the action; `UNKNOWN` in the info of a reset.
        obs: checksum of the observation.
        reward: checksum of the reward.
    """

    env_id: int
    instance: int
    episode: int
    step: int
    sequence: int
    action: int
    obs: int
    reward: int

    def as_array(self) -> npt.NDArray[np.int64]:
        """Return the mark in the form in which infos hold it."""
        return np.array(self, np.int64)


def mark_of(info: Any) -> Mark | None:
    """Return the mark in an info, or in the first of a list or tuple of infos; None without one."""
    if isinstance(info, (list, tuple)) and info:
        info = info[0]
    value = info.get(MARK_KEY) if isinstance(info, Mapping) else None
    if value is None:
        return None
    numbers = np.asarray(value).ravel().tolist()
    return Mark(*map(int, numbers)) if len(numbers) == len(Mark._fields) else None


def new_instance() -> int:
    """Return a random number of 48 bits, which a float64 holds exactly."""
    return int.from_bytes(os.urandom(6), "big")


class Signer:
    """A counter of the resets and steps of one env object, which makes the object's marks.

    Args:
        spaces: returns the observation and the action space; called once, when they are needed.
    """

    def __init__(self, env_id: int, spaces: Callable[[], tuple[Any, Any]]) -> None:
        self.env_id = env_id
        self.instance = new_instance()
        self.episode = -1
        self.step = 0
        self.sequence = 0
        self._spaces = spaces
        self._checksums: tuple[Checksum, Checksum] | None = None

    def begin_episode(self) -> None:
        """Note that a reset begins."""
        self.episode += 1
        self.step = 0

    def begin_step(self) -> None:
        """Note that a step begins."""
        self.step += 1
        self.sequence += 1

    def of_reset(self, obs: Any) -> npt.NDArray[np.int64]:
        """Return the mark of a reset."""
        return self._mark(UNKNOWN, self._known()[0](obs), UNKNOWN)

    def of_step(self, action: Any, obs: Any, reward: Any) -> npt.NDArray[np.int64]:
        """Return the mark of a step."""
        of_obs, of_action = self._known()
        return self._mark(of_action(action), of_obs(obs), reward_checksum(reward))

    def _mark(self, action: int, obs: int, reward: int) -> npt.NDArray[np.int64]:
        return Mark(
            self.env_id,
            self.instance,
            self.episode,
            self.step,
            self.sequence,
            action,
            obs,
            reward,
        ).as_array()

    def _known(self) -> tuple[Checksum, Checksum]:
        if self._checksums is None:
            of_obs, of_action = map(checksum_of, self._spaces())
            self._checksums = of_obs, of_action
        return self._checksums


class LedgerEnv(gymnasium.Env[npt.NDArray[Any], int]):
    """An env whose observation, reward and info each say which step of which env they belong to.

    Actions are tokens: `Ledger.fresh_actions` gives out each one once. The observation is an array
    of `(env_id, instance, episode, step, sequence, action, draws...)`: the first five are as in
    `Mark`, then comes the action itself, and the draws are from the env's own seeded generator. Two
    runs with the same seeds and actions differ only in the instance (see `without_instance`). The
    reward is the observation's checksum, as a float; the info holds the mark.

    Args:
        env_id: the id that the env has in its manager; `ANY_ENV` where there are spares, so that
            all envs are built alike.
        episode_length: steps after which an episode ends (terminated).
        n_draws: number of random numbers in each observation.
        step_s: seconds that each step sleeps.
        dtype: dtype of the observation: int64 or float64, which hold all of its numbers exactly.
    """

    def __init__(
        self,
        env_id: int,
        *,
        episode_length: int = 50,
        n_draws: int = 1,
        step_s: float = 0.0,
        dtype: Any = np.int64,
    ) -> None:
        self._dtype = np.dtype(dtype)
        bound: Any = np.inf if self._dtype.kind == "f" else np.iinfo(np.int64).max
        self.observation_space = Box(-bound, bound, (6 + n_draws,), self._dtype.type)
        self.action_space = cast("Space[int]", Discrete(N_ACTIONS))
        self.env_id = env_id
        self._episode_length = episode_length
        self._n_draws = n_draws
        self._step_s = step_s
        self.signer = Signer(env_id, lambda: (self.observation_space, self.action_space))

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[npt.NDArray[Any], dict[str, Any]]:
        """Begin an episode."""
        super().reset(seed=seed)
        self.signer.begin_episode()
        obs = self._observe(-1)
        return obs, {MARK_KEY: self.signer.of_reset(obs)}

    def step(self, action: int) -> tuple[npt.NDArray[Any], float, bool, bool, dict[str, Any]]:
        """Take a step."""
        signer = self.signer
        signer.begin_step()
        if self._step_s:
            time.sleep(self._step_s)
        obs = self._observe(int(action))
        reward = reward_of(obs)
        ended = signer.step >= self._episode_length
        return obs, reward, ended, False, {MARK_KEY: signer.of_step(action, obs, reward)}

    def _observe(self, action: int) -> npt.NDArray[Any]:
        signer = self.signer
        known = (signer.env_id, signer.instance, signer.episode, signer.step, signer.sequence)
        draws = self.np_random.integers(0, 2**31, self._n_draws).tolist()
        return np.array((*known, action, *draws), self._dtype)


def reward_of(obs: Any) -> float:
    """Return the reward that goes with an observation of a `LedgerEnv`."""
    return float(zlib.crc32(np.asarray(obs, np.int64).tobytes()))


def without_instance(obs: Any) -> npt.NDArray[Any]:
    """Return an observation of a `LedgerEnv` without the only part that differs between runs."""
    copied = np.array(obs)
    copied[..., 1] = 0
    return copied


class LedgerWrapper(gymnasium.Wrapper[Any, Any, Any, Any]):
    """A wrapper that signs the infos of a gymnasium env.

    Observations, rewards and spaces stay as they are.

    Args:
        env: the env to wrap.
        env_id: the id that the env has in its manager.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], env_id: int) -> None:
        super().__init__(env)
        self.signer = Signer(env_id, lambda: (self.observation_space, self.action_space))

    def reset(self, **arguments: Any) -> Any:
        """Reset the env and sign the info; a malformed result is returned unchanged."""
        self.signer.begin_episode()
        result: Any = self.env.reset(**arguments)
        match result:
            case (obs, Mapping() as info):
                return obs, {**info, MARK_KEY: self.signer.of_reset(obs)}
        return result

    def step(self, action: Any) -> Any:
        """Take a step and sign the info; a malformed result is returned unchanged."""
        self.signer.begin_step()
        return _signed(self.env.step(action), action, self.signer)


def ledgered(env: Any, env_id: int) -> Any:
    """Return an env that signs its infos, made from an env of any kind that managers take.

    Gymnasium's envs get a `LedgerWrapper`; in all others, and in async ones, `step` and `reset` of
    this one object are replaced.
    """
    is_async = adapt.is_async(env)
    if isinstance(env, gymnasium.Env) and not is_async:
        return LedgerWrapper(env, env_id)
    signer = Signer(env_id, lambda: _spaces_of(env))
    if is_async:
        env.step, env.reset = _signed_async(env.step, env.reset, signer)
        return env
    env.step = partial(_signed_step, env.step, signer)
    env.reset = partial(_signed_reset, env.reset, signer)
    return env


@dataclass(frozen=True)
class Ledgered:
    """A factory of envs that sign their infos; it can be pickled if the factory inside can.

    Attributes:
        factory: builds the env.
        env_id: the id that the env has in its manager; `ANY_ENV` where there are spares.
    """

    factory: Callable[[], Any]
    env_id: int

    def __call__(self) -> Any:
        """Return a new env; a coroutine that does, if the factory is async."""
        built = self.factory()
        return self._later(built) if inspect.isawaitable(built) else ledgered(built, self.env_id)

    async def _later(self, built: Awaitable[Any]) -> Any:
        return ledgered(await built, self.env_id)


def _spaces_of(env: Any) -> tuple[Any, Any]:
    spaces = (getattr(env, name, None) for name in ("observation_space", "action_space"))
    observation, action = (None if space is None else convert_space(space) for space in spaces)
    return observation, action


def _signed_reset(reset: Callable[..., Any], signer: Signer, **params: Any) -> Any:
    signer.begin_episode()
    return reset(**params)


def _signed_step(step: Callable[[Any], Any], signer: Signer, action: Any) -> Any:
    signer.begin_step()
    return _signed(step(action), action, signer)


def _signed_async(
    step: Callable[..., Any], reset: Callable[..., Any], signer: Signer
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the `step` and `reset` of an async env with marks; one need not be a coroutine."""

    @functools.wraps(step)
    async def signed_step(action: Any) -> Any:
        signer.begin_step()
        return _signed(await awaited(step(action)), action, signer)

    @functools.wraps(reset)
    async def signed_reset(**params: Any) -> Any:
        signer.begin_episode()
        return await awaited(reset(**params))

    return signed_step, signed_reset


def _signed(result: Any, action: Any, signer: Signer) -> Any:
    """Return the result of a step with its mark in the info; anything else is left as it is."""
    named = all(hasattr(result, name) for name in ("obs", "reward", "info"))
    if named:
        obs, reward, info = result.obs, result.reward, result.info
    elif isinstance(result, (tuple, list)) and len(result) in (4, 5):
        obs, reward, info = result[0], result[1], result[-1]
    else:
        return result
    if isinstance(info, Mapping):
        signed: Any = {**info, MARK_KEY: signer.of_step(action, obs, reward)}
    elif isinstance(info, (list, tuple)) and info and isinstance(info[0], Mapping):
        first = {**info[0], MARK_KEY: signer.of_step(action, obs, reward)}
        signed = type(info)([first, *info[1:]])
    else:
        return result
    if not named:
        return (*result[:-1], signed)
    if hasattr(result, "_replace"):
        return result._replace(info=signed)
    result.info = signed
    return result
