"""PPO of Stable-Baselines3 on 84x84x4 images: wall time, and the share of it spent in envs.

    python benchmarks/sb3_ppo.py                      # resets cost nothing
    python benchmarks/sb3_ppo.py --reset-ms 200       # resets sleep 200 ms

The same training with SubprocVecEnv and with envmgr's vec env, in alternation in one process. With
equal seeds all of them learn from the same steps, but for those with spare envs.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import torch
from envs import EPISODE_STEPS, busy_loops, work
from stable_baselines3 import PPO
from stable_baselines3.common.vec_env import SubprocVecEnv, VecEnvWrapper

from envmgr.adapters.sb3 import EnvmgrVecEnv

SHAPE = (84, 84, 4)


class Game(gymnasium.Env[Any, Any]):
    """Shows noise, for episodes of 50 to 150 steps.

    Args:
        loops: work of a step; see `envs.work`.
        reset_s: how long a reset sleeps.
    """

    observation_space = gymnasium.spaces.Box(0, 255, SHAPE, np.uint8)
    action_space = gymnasium.spaces.Discrete(4)

    def __init__(self, loops: int, reset_s: float) -> None:
        self._loops, self._reset_s = loops, reset_s

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode."""
        super().reset(seed=seed)
        time.sleep(self._reset_s)
        self._left = int(self.np_random.integers(EPISODE_STEPS[0], EPISODE_STEPS[1] + 1))
        self._obs = self.np_random.integers(0, 256, SHAPE, np.uint8)
        return self._obs, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Work, and change a row of the picture."""
        work(self._loops)
        self._left -= 1
        self._obs[self._left % SHAPE[0]] = 63 * int(action)
        return self._obs, float(action == 1), self._left <= 0, False, {}


class Timed(VecEnvWrapper):
    """Adds up the time that the trainer spends in its envs."""

    def __init__(self, venv: Any) -> None:
        super().__init__(venv)
        self.spent_s = 0.0

    def _timed(self, call: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        result = call()
        self.spent_s += time.perf_counter() - began
        return result

    def reset(self) -> Any:
        """Reset."""
        return self._timed(self.venv.reset)

    def step_async(self, actions: Any) -> None:
        """Send."""
        self._timed(functools.partial(self.venv.step_async, actions))

    def step_wait(self) -> Any:
        """Receive."""
        return self._timed(self.venv.step_wait)


class Taken(NamedTuple):
    """What a training took, from its first reset on.

    Attributes:
        wall_s: altogether.
        envs_s: of it, in the vec env.
    """

    wall_s: float
    envs_s: float


def vec_envs(n: int, has_slow_resets: bool) -> dict[str, Callable[[list[Any]], Any]]:
    """Return what is compared: by name, what builds it of env factories."""
    forked = functools.partial(SubprocVecEnv, start_method="fork")
    found: dict[str, Callable[[list[Any]], Any]] = {
        "SubprocVecEnv": forked,
        "EnvmgrVecEnv": EnvmgrVecEnv,
    }
    if has_slow_resets:
        spares = max(1, n // 2)
        further: dict[str, Any] = {"reset_inplace": False, "spare_env_num": spares}
        found[f"EnvmgrVecEnv, {spares} spares"] = functools.partial(EnvmgrVecEnv, **further)
    else:
        found["EnvmgrVecEnv, 2 workers"] = functools.partial(EnvmgrVecEnv, num_workers=2)
    return found


def train(build: Callable[[list[Any]], Any], fns: list[Any], steps: int) -> Taken:
    """Train PPO for some steps of all envs together."""
    venv = Timed(build(fns))
    try:
        venv.seed(0)
        model = PPO("CnnPolicy", venv, n_steps=32, batch_size=256, n_epochs=1, seed=0)
        began = time.perf_counter()
        model.learn(steps)
        return Taken(time.perf_counter() - began, venv.spent_s)
    finally:
        venv.close()


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print a line for each vec env."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--n", type=int, default=16, help="how many envs (%(default)s)")
    parser.add_argument("--steps", type=int, default=4096, help="of all envs (%(default)s)")
    parser.add_argument("--step-us", type=float, default=200.0, help="work of a step (%(default)s)")
    parser.add_argument(
        "--reset-ms", type=float, default=0.0, help="sleep of a reset (%(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=3, help="passes (%(default)s)")
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)  # envs need the other cores
    loops = round(busy_loops() * asked.step_us / 100)
    fns = [functools.partial(Game, loops, asked.reset_ms / 1000)] * asked.n
    compared = vec_envs(asked.n, asked.reset_ms > 0)
    taken: dict[str, list[Taken]] = {name: [] for name in compared}
    for _ in range(asked.rounds):
        for name, build in compared.items():
            taken[name].append(train(build, fns, asked.steps))
    print(f"n={asked.n}, {asked.steps} steps, {asked.step_us:g} us of work, ", end="")
    print(f"resets of {asked.reset_ms:g} ms, load {os.getloadavg()[0]:.1f}")
    first = statistics.median(each.wall_s for each in taken["SubprocVecEnv"])
    for name, each in taken.items():
        wall_s, envs_s = (statistics.median(column) for column in zip(*each, strict=True))
        print(
            f"{name:26} {wall_s:6.1f} s, {envs_s:6.1f} s of it in envs "
            f"({100 * envs_s / wall_s:.0f} %), {wall_s / first:.2f} of SubprocVecEnv's"
        )


if __name__ == "__main__":
    main()
