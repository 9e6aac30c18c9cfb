"""Solve CartPole-v1 with the cross-entropy method, on any kind of manager.

    python examples/cartpole_cem.py
    python examples/cartpole_cem.py --type async_subprocess --env-num 16 --seed 3

The agent is a linear policy: push right if `weights @ obs > 0`. Each generation draws a population
of weights, runs every one of them for an episode, and goes on from the best of them.

Every env runs a candidate of its own, so the envs of one batch need different actions, and their
rewards belong to different candidates. Were an observation, an action or a reward to reach the
wrong env, the agent would not learn.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from envmgr import BaseEnvManager, make

Weights = npt.NDArray[np.float64]

SOLVED = 475.0
"""Mean return over 100 episodes from which CartPole-v1 counts as solved."""

EVALUATION_SEED = 1_000_000
"""Added to the seed for evaluation, whose episodes are none of those trained on."""


class Generation(NamedTuple):
    """What came of one generation.

    Attributes:
        number: 0 for the first.
        mean_return: of the whole population.
        elite_return: mean of the best candidates.
        weights: their mean, which the next generation is drawn around.
    """

    number: int
    mean_return: float
    elite_return: float
    weights: Weights


def run_episodes(manager: BaseEnvManager, candidates: Sequence[Weights]) -> list[float]:
    """Run one episode with each candidate, many at the same time, and return their returns.

    All envs are reset first, so that no episode was begun by somebody else. An env that has
    finished an episode takes the next candidate; one whose env failed is run again.
    """
    manager.reset()
    returns = [0.0] * len(candidates)
    waiting = list(range(len(candidates)))
    running: dict[int, int] = {}  # env_id: candidate
    while waiting or running:
        obs = ready_obs(manager)
        for env_id in obs:
            if env_id not in running and waiting:
                running[env_id] = waiting.pop(0)
        actions = {i: act(candidates[running[i]], o) for i, o in obs.items() if i in running}
        for env_id, timestep in step(manager, actions).items():
            candidate = running[env_id]
            returns[candidate] += float(timestep.reward)
            if timestep.done:
                del running[env_id]
            if "abnormal" in timestep.info:
                returns[candidate] = 0.0
                waiting.append(candidate)
    return returns


def act(weights: Weights, obs: Any) -> int:
    """Return the action of a linear policy."""
    return int(weights @ np.asarray(obs) > 0.0)


def ready_obs(manager: BaseEnvManager) -> Mapping[int, Any]:
    """Return `manager.ready_obs` by env_id; the V2 kinds give a batch of rows instead."""
    obs = manager.ready_obs
    return obs if isinstance(obs, dict) else dict(zip(manager.ready_obs_id, obs, strict=True))


def step(manager: BaseEnvManager, actions: Mapping[int, int]) -> Mapping[int, Any]:
    """Return `manager.step(actions)` by env_id.

    The V2 kinds take a list with an action for each row of `ready_obs` (or a dict, for some of
    them), and give a list.
    """
    rows = manager.ready_obs_id
    in_rows = "v2" in manager.cfg.type and list(actions) == rows
    timesteps = manager.step([actions[i] for i in rows] if in_rows else actions)
    if isinstance(timesteps, dict):
        return timesteps
    return {int(timestep.env_id): timestep for timestep in timesteps}


def train(
    manager: BaseEnvManager,
    *,
    seed: int,
    population: int = 40,
    generations: int = 30,
    good_enough: float = 460.0,
    report: Callable[[Generation], None] = lambda generation: None,
) -> Weights:
    """Return the weights that the cross-entropy method finds.

    Args:
        manager: of CartPole-v1; launched.
        seed: of the populations.
        population: candidates of a generation; a quarter of them are its elite.
        generations: at most so many.
        good_enough: end when the whole population has this mean return.
        report: called after each generation.
    """
    rng = np.random.default_rng(seed)
    mean, std = np.zeros(4), np.ones(4)
    n_elite = max(population // 4, 2)
    for number in range(generations):
        candidates = [mean + std * rng.standard_normal(4) for _ in range(population)]
        returns = np.array(run_episodes(manager, candidates))
        best = np.argsort(returns)[-n_elite:]
        elite = np.array([candidates[i] for i in best])
        # The noise, which fades, keeps an elite that was merely lucky from having the last word.
        mean, std = elite.mean(axis=0), elite.std(axis=0) + 0.3 * 0.8**number
        report(Generation(number, float(returns.mean()), float(returns[best].mean()), mean))
        if returns.mean() >= good_enough:
            break
    return mean


def evaluate(manager: BaseEnvManager, weights: Weights, *, episodes: int, seed: int) -> float:
    """Return the mean return of a policy over fresh episodes."""
    manager.seed(EVALUATION_SEED + seed)  # takes effect at the reset that run_episodes begins with
    return float(np.mean(run_episodes(manager, [weights] * episodes)))


def main(argv: Sequence[str] | None = None) -> int:
    """Train, evaluate, and return 0 if CartPole-v1 is solved."""
    parser = argparse.ArgumentParser(description="Solve CartPole-v1 with the cross-entropy method.")
    parser.add_argument("--type", default="subprocess", help="registry key of the manager")
    parser.add_argument("--env-num", type=int, default=8, help="how many envs")
    parser.add_argument("--seed", type=int, default=0, help="of envs and populations")
    options = parser.parse_args(argv)
    began = time.monotonic()

    def report(generation: Generation) -> None:
        print(
            f"generation {generation.number:2}  mean return {generation.mean_return:6.1f}  "
            f"elite {generation.elite_return:6.1f}  {time.monotonic() - began:5.1f} s",
            flush=True,
        )

    with make(
        "CartPole-v1", env_num=options.env_num, type=options.type, seed=options.seed
    ) as manager:
        weights = train(manager, seed=options.seed, report=report)
        mean_return = evaluate(manager, weights, episodes=100, seed=options.seed)
        steps = manager.stats()["timesteps"]
    seconds = time.monotonic() - began
    solved = mean_return >= SOLVED
    print(
        f"{'solved' if solved else 'not solved'}: mean return {mean_return:.1f} over 100 episodes; "
        f"{steps:,} timesteps in {seconds:.1f} s"
    )
    return 0 if solved else 1


if __name__ == "__main__":
    sys.exit(main())
