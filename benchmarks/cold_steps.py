"""What does it cost an env that its process sleeps between steps? CPU time, without any library.

    python benchmarks/cold_steps.py --env HalfCheetah-v5 --envs 4 --rounds 20

A worker takes a few steps, and sleeps until the next actions come; so does a trainer that waits for
workers. This steps envs in a plain loop, without pauses and with `time.sleep` after each round of
steps, in turn. What a step takes more after a pause (caches that others used, and the sleep itself)
is there before any library adds to it, and bounds what envs in workers can take above a plain loop.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence

import gymnasium

STEPS = 200
PAUSES_S = (0.0, 5e-5, 2e-4, 1e-3)


class Loop:
    """A plain loop over envs.

    Args:
        env_id: of each env, as registered with Gymnasium.
        n: number of envs.
    """

    def __init__(self, env_id: str, n: int) -> None:
        self._envs = [gymnasium.make(env_id) for _ in range(n)]
        for seed, env in enumerate(self._envs):
            env.reset(seed=seed)
            env.action_space.seed(seed)
        self._actions = [self._envs[0].action_space.sample() for _ in range(64)]

    def run(self, steps: int, pause_s: float) -> float:
        """Take steps of all envs; return the microseconds of CPU for each, pauses included."""
        began = time.process_time()
        for k in range(steps):
            action = self._actions[k % len(self._actions)]
            for env in self._envs:
                _, _, terminated, truncated, _ = env.step(action)
                if terminated or truncated:
                    env.reset()
            if pause_s:
                time.sleep(pause_s)
        return (time.process_time() - began) / steps / len(self._envs) * 1e6


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--env", default="HalfCheetah-v5")
    parser.add_argument("--envs", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args(arguments)
    loop = Loop(options.env, options.envs)
    loop.run(STEPS, 0.0)
    costs: dict[float, list[float]] = {pause_s: [] for pause_s in PAUSES_S}
    for _ in range(options.rounds):
        for pause_s, found in costs.items():
            found.append(loop.run(STEPS, pause_s))
    print(f"{options.env}, {options.envs} in a plain loop, us of CPU per env step")
    for pause_s, found in costs.items():
        median, least = statistics.median(found), min(found)
        more = statistics.median(a - b for a, b in zip(found, costs[0.0], strict=True))
        name = f"pauses of {pause_s * 1e6:.0f} us" if pause_s else "without pauses"
        print(f"{name:20} median {median:6.1f}  least {least:6.1f}  more than without {more:6.1f}")


if __name__ == "__main__":
    main()
