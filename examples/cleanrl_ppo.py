"""PPO in one file, in the style of CleanRL, on a Gymnasium vector env.

    python examples/cleanrl_ppo.py
    python examples/cleanrl_ppo.py --vector async       # Gymnasium's own, for comparison
    python examples/cleanrl_ppo.py --mode SameStep --num-envs 16
    python examples/cleanrl_ppo.py --crash-every 1000   # workers die, and training goes on

What it takes to have envmgr run the envs is the one line in `make_envs`. Everything is seeded: with
the same seed the curve is the same, number by number, whichever vector env runs the envs.

It needs PyTorch.
"""

from __future__ import annotations

import argparse
import functools
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, VectorEnv
from plot_curves import write_curve
from torch import nn

from envmgr.adapters.gymnasium import EnvmgrVectorEnv

GAMMA, LAMBDA, CLIP = 0.99, 0.95, 0.2
EPOCHS, MINIBATCHES, VALUE_WEIGHT, ENTROPY_WEIGHT = 4, 4, 0.5, 0.01


class Curve(NamedTuple):
    """What came of a training.

    Attributes:
        steps: env steps at the end of each iteration.
        returns: mean return of the episodes that ended in it; NaN if none did.
        rate: env steps per second, learning included.
    """

    steps: list[int]
    returns: list[float]
    rate: float


class Crashing(gymnasium.Wrapper[Any, Any, Any, Any]):
    """An env in whose process something crashes now and then.

    Args:
        env: the env.
        every: after so many steps, on average.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], every: int) -> None:
        super().__init__(env)
        self._left = random.expovariate(1 / every)

    def step(self, action: Any) -> Any:
        """Step, or die."""
        self._left -= 1
        if self._left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)


def make_env(crash_every: int = 0) -> gymnasium.Env[Any, Any]:
    """Return one env; its infos have the statistics of episodes that ended."""
    env: gymnasium.Env[Any, Any] = gymnasium.make("CartPole-v1")
    if crash_every:
        env = Crashing(env, crash_every)
    return gymnasium.wrappers.RecordEpisodeStatistics(env)


def make_envs(
    num_envs: int, vector: str, mode: str, crash_every: int = 0
) -> VectorEnv[Any, Any, Any]:
    """Return the vector env."""
    fns: list[Callable[[], Any]] = [functools.partial(make_env, crash_every)] * num_envs
    if vector == "async":
        return AsyncVectorEnv(fns, autoreset_mode=AutoresetMode(mode))
    if crash_every:  # a worker for each env, of which any number may die
        allowed = {"max_failures": 10**6, "max_failures_total": 10**6}
        return EnvmgrVectorEnv(fns, autoreset_mode=mode, **allowed)
    return EnvmgrVectorEnv(fns, autoreset_mode=mode, num_workers=2)


class Agent(Protocol):
    """What is trained: a module of PyTorch."""

    def look(self, obs: torch.Tensor) -> tuple[torch.distributions.Distribution, torch.Tensor]:
        """Return the distribution of actions, and values (k,), for k observations."""

    def parameters(self) -> Any:
        """Return what is learnt."""


class SmallAgent(nn.Module):
    """An actor and a critic, with two layers each.

    Args:
        n_inputs: numbers in an observation.
        n_actions: how many there are.
    """

    def __init__(self, n_inputs: int, n_actions: int) -> None:
        super().__init__()
        self.critic = network(n_inputs, 1, 1.0)
        self.actor = network(n_inputs, n_actions, 0.01)

    def look(self, obs: torch.Tensor) -> tuple[torch.distributions.Distribution, torch.Tensor]:
        """Return the distribution of actions, and values (k,), for k observations."""
        choice = torch.distributions.Categorical(logits=self.actor(obs))
        return choice, self.critic(obs).squeeze(-1)


def network(n_inputs: int, n_outputs: int, last_std: float) -> nn.Sequential:
    """Return two hidden layers and one whose weights are as small as is said."""
    sizes, stds = [n_inputs, 64, 64, n_outputs], [2**0.5, 2**0.5, last_std]
    layers: list[nn.Module] = []
    for k, std in enumerate(stds):
        layer = nn.Linear(sizes[k], sizes[k + 1])
        nn.init.orthogonal_(layer.weight, std)
        nn.init.constant_(layer.bias, 0.0)
        layers += [layer, nn.Tanh()]
    return nn.Sequential(*layers[:-1])


class Rollout:
    """The transitions of T steps of n envs.

    In NEXT_STEP mode the step after an episode's end only resets: `valid` is False there, and it is
    not learnt from. In SAME_STEP mode every step counts, and what follows an end is known from
    `infos["final_obs"]`.

    Args:
        steps: T.
        envs: whose observations and actions it takes.
    """

    def __init__(self, steps: int, envs: VectorEnv[Any, Any, Any]) -> None:
        n = envs.num_envs
        self.obs, self.actions = (
            torch.from_numpy(np.zeros((steps, n, *(space.shape or ())), space.dtype))
            for space in (envs.single_observation_space, envs.single_action_space)
        )
        self.log_probs, self.values, self.rewards, self.next_values = torch.zeros(4, steps, n)
        self.ended, self.valid = torch.zeros(2, steps, n, dtype=torch.bool)

    def advantages(self) -> torch.Tensor:
        """Return (T, n) generalized advantages."""
        found = torch.zeros_like(self.rewards)
        following = torch.zeros(self.rewards.shape[1])
        for t in reversed(range(len(found))):
            delta = self.rewards[t] + GAMMA * self.next_values[t] - self.values[t]
            following = delta + GAMMA * LAMBDA * following * ~self.ended[t]
            found[t] = following
        return found


class Collector:
    """Steps the envs and fills rollouts."""

    def __init__(self, envs: VectorEnv[Any, Any, Any], agent: Agent, seed: int) -> None:
        self._envs, self._agent = envs, agent
        self._resets_at_once = envs.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
        obs, _ = envs.reset(seed=seed)
        self._obs = torch.as_tensor(obs)
        self._resetting = torch.zeros(envs.num_envs, dtype=torch.bool)
        self.returns: list[float] = []

    @torch.no_grad()
    def fill(self, rollout: Rollout) -> None:
        """Step through a rollout."""
        choice, value = self._agent.look(self._obs)
        for t in range(len(rollout.obs)):
            action = choice.sample()
            rollout.obs[t], rollout.actions[t] = self._obs, action
            rollout.log_probs[t], rollout.values[t] = choice.log_prob(action), value
            obs, reward, terminated, truncated, infos = self._envs.step(action.numpy())
            ended = terminated | truncated
            rollout.rewards[t] = torch.as_tensor(reward)
            rollout.ended[t] = torch.as_tensor(ended) | self._resetting
            rollout.valid[t] = ~self._resetting
            self._obs = torch.as_tensor(obs)
            choice, value = self._agent.look(self._obs)
            following = value.clone()
            if self._resets_at_once and ended.any():
                last = torch.as_tensor(np.stack(infos["final_obs"][ended]))
                following[torch.as_tensor(ended)] = self._agent.look(last)[1]
            rollout.next_values[t] = following * ~torch.as_tensor(terminated)
            if not self._resets_at_once:
                self._resetting = torch.as_tensor(ended)
            self._note(infos.get("final_info", infos))

    def _note(self, infos: dict[str, Any]) -> None:
        if "episode" in infos:  # an env that failed has none
            self.returns += infos["episode"]["r"][infos["_episode"]].tolist()


def learn(
    agent: Agent,
    optimizer: torch.optim.Optimizer,
    rollout: Rollout,
    epochs: int = EPOCHS,
    minibatches: int = MINIBATCHES,
) -> None:
    """Improve the agent by one rollout."""
    advantages = rollout.advantages()
    valid = rollout.valid.flatten()
    columns = (rollout.obs, rollout.actions, rollout.log_probs, advantages)
    obs, actions, log_probs, advantages = (c.flatten(0, 1)[valid] for c in columns)
    targets = advantages + rollout.values.flatten()[valid]
    for _ in range(epochs):
        for rows in torch.randperm(len(obs)).chunk(minibatches):
            choice, value = agent.look(obs[rows])
            log_prob, entropy = choice.log_prob(actions[rows]), choice.entropy()
            gain = advantages[rows]
            gain = (gain - gain.mean()) / (gain.std() + 1e-8)
            ratio = (log_prob - log_probs[rows]).exp()
            gained = torch.min(gain * ratio, gain * ratio.clamp(1 - CLIP, 1 + CLIP))
            off = (value - targets[rows]) ** 2
            loss = -gained.mean() - ENTROPY_WEIGHT * entropy.mean() + VALUE_WEIGHT * off.mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            optimizer.step()


def train(
    envs: VectorEnv[Any, Any, Any],
    *,
    total_steps: int,
    rollout_steps: int = 128,
    seed: int = 1,
    report: Callable[[int, float], None] = lambda steps, mean: None,
    agent: Callable[[], Agent] | None = None,
    epochs: int = EPOCHS,
    minibatches: int = MINIBATCHES,
) -> Curve:
    """Train on a vector env, and return the curve.

    Args:
        envs: in NEXT_STEP or SAME_STEP mode.
        total_steps: env steps of the training.
        rollout_steps: steps of each env in an iteration.
        seed: of the agent, and of the envs' first resets.
        report: is told of each iteration.
        agent: builds what is trained; None: a small network for a few discrete actions.
        epochs: how often a rollout is learnt from.
        minibatches: parts that it is learnt from in.
    """
    torch.manual_seed(seed)
    n = envs.num_envs
    trained = agent() if agent is not None else _small_agent_for(envs)
    optimizer = torch.optim.Adam(trained.parameters(), lr=2.5e-4, eps=1e-5)
    collector, rollout = Collector(envs, trained, seed), Rollout(rollout_steps, envs)
    steps, returns, began = [], [], time.perf_counter()
    iterations = max(1, total_steps // (n * rollout_steps))
    for iteration in range(iterations):
        optimizer.param_groups[0]["lr"] = 2.5e-4 * (1 - iteration / iterations)
        collector.returns.clear()
        collector.fill(rollout)
        learn(trained, optimizer, rollout, epochs, minibatches)
        steps.append((iteration + 1) * n * rollout_steps)
        returns.append(float(np.mean(collector.returns)) if collector.returns else float("nan"))
        report(steps[-1], returns[-1])
    return Curve(steps, returns, steps[-1] / (time.perf_counter() - began))


def _small_agent_for(envs: VectorEnv[Any, Any, Any]) -> Agent:
    n_inputs = int(np.prod(envs.single_observation_space.shape or ()))
    return SmallAgent(n_inputs, envs.single_action_space.n)  # type: ignore[attr-defined]


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, and print the curve."""
    parser = argparse.ArgumentParser(description="PPO on CartPole-v1, in one file.")
    parser.add_argument("--vector", choices=("envmgr", "async"), default="envmgr")
    parser.add_argument("--mode", choices=("NextStep", "SameStep"), default="NextStep")
    parser.add_argument("--num-envs", type=int, default=8)
    parser.add_argument("--total-steps", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--crash-every", type=int, default=0, help="steps of an env; 0: never")
    parser.add_argument("--curve", type=Path, help="write the learning curve into this file")
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    envs = make_envs(asked.num_envs, asked.vector, asked.mode, asked.crash_every)
    curve = train(
        envs,
        total_steps=asked.total_steps,
        seed=asked.seed,
        report=lambda steps, mean: print(f"{steps:8} steps: mean return {mean:6.1f}", flush=True),
    )
    write_curve(asked.curve, curve.steps, curve.returns)
    if asked.vector == "envmgr":
        print(f"{envs.manager.stats()['failures']} failures")  # type: ignore[attr-defined]
    envs.close()
    print(f"{curve.rate:.0f} env steps per second, learning included")
    return 0


if __name__ == "__main__":
    sys.exit(main())
