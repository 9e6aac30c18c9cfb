"""Envs whose cost is known. Every library steps the same classes."""

from __future__ import annotations

import functools
import importlib.util
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.classic_control import CartPoleEnv

STEP_S = 0.001
RESET_S = 0.2
EPISODE_STEPS = (50, 150)
UNEVEN_MEDIAN_S = 0.002
UNEVEN_SIGMA = 1.0
BUSY_STEP_S = 100e-6
WAIT_S = 0.01

StepResult = tuple[Any, Any, bool, bool, dict[str, Any]]


class NullEnv(gymnasium.Env[Any, Any]):
    """Does nothing: float32[4] observations, two actions, episodes without end."""

    observation_space: Any = gymnasium.spaces.Box(-1.0, 1.0, (4,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self) -> None:
        self._obs: Any = np.zeros(4, np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode."""
        super().reset(seed=seed)
        return self._obs, {}

    def step(self, action: Any) -> StepResult:
        """Take a step."""
        return self._obs, 0.0, False, False, {}


class ArrayRewardEnv(NullEnv):
    """Does nothing; its rewards are float32[1], as those of DI-engine's envs."""

    def __init__(self) -> None:
        super().__init__()
        self._reward = np.zeros(1, np.float32)

    def step(self, action: Any) -> StepResult:
        """Take a step."""
        return self._obs, self._reward, False, False, {}


class FloatInfoEnv(NullEnv):
    """Does nothing; each step has an info of five float64, as those of MuJoCo's envs."""

    _KEYS = ("x_position", "x_velocity", "reward_forward", "reward_ctrl", "z_distance")

    def __init__(self) -> None:
        super().__init__()
        self._values = np.arange(5.0)

    def step(self, action: Any) -> StepResult:
        """Take a step."""
        self._values += 1.0
        return self._obs, 0.0, False, False, dict(zip(self._KEYS, self._values, strict=True))


class IntInfoEnv(NullEnv):
    """Does nothing; each step has an info of three ints, as those of Atari games."""

    _frames = 0

    def step(self, action: Any) -> StepResult:
        """Take a step."""
        self._frames += 4
        info = {"lives": 3, "episode_frame_number": self._frames, "frame_number": self._frames}
        return self._obs, 0.0, False, False, info


class ImageEnv(NullEnv):
    """Returns one preallocated uint8 array, of which one byte changes at each step.

    Args:
        shape: of the observation.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.observation_space = gymnasium.spaces.Box(0, 255, shape, np.uint8)
        self._obs: Any = np.full(shape, 127, np.uint8)
        self._bytes = self._obs.reshape(-1)
        self._steps = 0

    def step(self, action: Any) -> StepResult:
        """Take a step: write a byte."""
        self._steps += 1
        self._bytes[0] = self._steps & 255
        return self._obs, 0.0, False, False, {}


class BusyEnv(NullEnv):
    """Each step does a fixed amount of work, whatever time that takes.

    Args:
        loops: how much work; see `busy_loops`.
    """

    def __init__(self, loops: int) -> None:
        super().__init__()
        self._loops = loops

    def step(self, action: Any) -> StepResult:
        """Phase, then take a step."""
        work(self._loops)
        return super().step(action)


class UnevenEnv(NullEnv):
    """Each step sleeps log-normally: median 2 ms, sigma 1."""

    def step(self, action: Any) -> StepResult:
        """Sleep, then take a step."""
        time.sleep(self.np_random.lognormal(np.log(UNEVEN_MEDIAN_S), UNEVEN_SIGMA))
        return super().step(action)


class SlowResetEnv(NullEnv):
    """Steps sleep 1 ms, resets 200 ms; episodes of 50 to 150 steps, so envs are out of phase."""

    _left = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode, slowly."""
        result = super().reset(seed=seed)
        time.sleep(RESET_S)
        self._left = int(self.np_random.integers(EPISODE_STEPS[0], EPISODE_STEPS[1] + 1))
        return result

    def step(self, action: Any) -> StepResult:
        """Sleep, then take a step of an episode that ends."""
        time.sleep(STEP_S)
        self._left -= 1
        return self._obs, 0.0, self._left <= 0, False, {}


class WaitingEnv(NullEnv):
    """Each step sleeps 10 ms, as one that asks a server does."""

    def step(self, action: Any) -> StepResult:
        """Sleep, then take a step."""
        time.sleep(WAIT_S)
        return super().step(action)


def work(loops: int) -> int:
    """Compute something that takes as many turns of a loop as asked for."""
    value = 1
    for _ in range(loops):
        value = (value * 1103515245 + 12345) & 0x7FFFFFFF
    return value


def busy_loops() -> int:
    """Return how many `loops` take `BUSY_STEP_S` on this machine when it is idle.

    The shortest of many short runs counts: what disturbs a run only makes it longer.
    """
    loops = 10_000
    shortest_s = min(_duration_s(loops) for _ in range(200))
    return max(1, round(loops * BUSY_STEP_S / shortest_s))


def _duration_s(loops: int) -> float:
    began = time.perf_counter()
    work(loops)
    return time.perf_counter() - began


def _pong() -> Any:
    import ale_py

    gymnasium.register_envs(ale_py)
    game = gymnasium.make("ALE/Pong-v5", frameskip=1, repeat_action_probability=0.0)
    grey = gymnasium.wrappers.AtariPreprocessing(game)  # 84 x 84, each action for four frames
    return gymnasium.wrappers.FrameStackObservation(grey, 4)


def _half_cheetah() -> Any:
    return gymnasium.make("HalfCheetah-v5")


def _mini_grid() -> Any:
    import minigrid  # noqa: F401  # registers its envs

    return gymnasium.make("MiniGrid-Empty-8x8-v0")


def with_statistics(factory: Callable[[], Any]) -> Any:
    """Return an env whose infos have the statistics of episodes that ended, as trainers want it."""
    return gymnasium.wrappers.RecordEpisodeStatistics(factory())


NEEDS: Mapping[str, Sequence[tuple[str, str]]] = {
    "pong": (("ale_py", "ale"), ("cv2", "opencv-python-headless")),
    "halfcheetah": (("mujoco", "mujoco"),),
    "minigrid": (("minigrid", "minigrid"),),
}
"""By env of another package: modules that have to be there, and what `install.py` calls them."""


def missing_for(name: str) -> list[str]:
    """Return what an env needs and is not installed, as `install.py` calls it."""
    needed = NEEDS.get(name, ())
    return [package for module, package in needed if importlib.util.find_spec(module) is None]


HAVE_INFOS = frozenset({"null-floats", "null-ints", "pong", "halfcheetah", "minigrid"})
"""Envs whose infos are read, in whatever form a library hands them out."""

_SEED = 7
_N_ACTIONS = {"pong": 6, "minigrid": 7}


def action_batches(name: str, env_num: int, count: int) -> Any:
    """Return `count` batches of actions for an env of that name: (count, env_num, ...)."""
    generator = np.random.default_rng(_SEED)
    if name == "halfcheetah":
        return generator.uniform(-1.0, 1.0, (count, env_num, 6)).astype(np.float32)
    if name == "cartpole-short":
        return np.ones((count, env_num), np.int64)  # always to the same side: it falls after nine
    return generator.integers(0, _N_ACTIONS.get(name, 2), (count, env_num), np.int64)


def env_factory(name: str, loops: int) -> Callable[[], Any]:
    """Return a picklable function that builds the env of that name.

    Args:
        name: `null`, `null-floats`, `null-ints`, `array-reward`, `cartpole`, `cartpole-short` (its
            actions make the difference), `image`, `frame`, `busy`, `uneven`, `slow-reset`,
            `waiting`; and, of other packages, `pong`, `halfcheetah`, `minigrid`.
        loops: work of one step of `busy`.
    """
    factories: dict[str, Callable[[], Any]] = {
        "null": NullEnv,
        "null-floats": FloatInfoEnv,
        "null-ints": IntInfoEnv,
        "array-reward": ArrayRewardEnv,
        "cartpole": CartPoleEnv,
        "cartpole-short": CartPoleEnv,
        "image": functools.partial(ImageEnv, (84, 84, 4)),
        "frame": functools.partial(ImageEnv, (210, 160, 3)),
        "busy": functools.partial(BusyEnv, loops),
        "uneven": UnevenEnv,
        "slow-reset": SlowResetEnv,
        "waiting": WaitingEnv,
        "pong": _pong,
        "halfcheetah": _half_cheetah,
        "minigrid": _mini_grid,
    }
    return factories[name]
