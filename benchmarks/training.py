"""Trainings: PPO of Stable-Baselines3, and PPO in one file in the style of CleanRL.

The settings are those that the trainers' own documentation has for such envs, for eight envs. Envs
of `envs.py` have the wrapper that counts episodes, which both trainers read from infos.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from adapters import vector_env
from envs import with_statistics
from spec import Spec, Trainer
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import cleanrl_ppo as ppo

_SEED = 1


class Stopwatch:
    """Adds up the time that calls take."""

    def __init__(self) -> None:
        self.spent_s = 0.0

    def timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, timed."""

        @functools.wraps(call)
        def run(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self.spent_s += time.perf_counter() - began

        return run


class _Training:
    """What trainings have in common: envs are built, timed, and closed.

    Args:
        spec: which vector env, of which envs, and how many steps.
        factory: builds an env.
    """

    _calls: tuple[str, ...] = ("step",)

    def __init__(self, spec: Spec, factory: Callable[[], Any]) -> None:
        self._spec = spec
        self._factory = functools.partial(with_statistics, factory)
        self._watch = Stopwatch()

    def start(self) -> None:
        """Build the envs and reset them."""
        torch.set_num_threads(1)  # envs need the other cores
        self._envs: Any = vector_env(self._spec, self._factory)
        self._begin()
        for name in self._calls:
            setattr(self._envs, name, self._watch.timed(getattr(self._envs, name)))

    def _begin(self) -> None:
        self._envs.reset(seed=_SEED)

    def envs_s(self) -> float:
        """Return the seconds spent in the vector env."""
        return self._watch.spent_s

    def close(self) -> None:
        """Close the envs."""
        self._envs.close()


class Sb3Training(_Training):
    """PPO of Stable-Baselines3."""

    _calls = ("step_async", "step_wait")

    def _begin(self) -> None:
        import stable_baselines3

        self._envs.seed(_SEED)
        self._model = stable_baselines3.PPO(
            env=self._envs, seed=_SEED, device="cpu", **_SB3_SETTINGS[self._spec.env]
        )
        self._envs.reset()

    def train(self) -> int:
        """Train."""
        self._model.learn(self._spec.train_steps)
        return int(self._model.num_timesteps)


_SB3_SETTINGS: dict[str, dict[str, Any]] = {
    "pong": {
        "policy": "CnnPolicy",
        "n_steps": 128,
        "batch_size": 256,
        "n_epochs": 4,
        "learning_rate": 2.5e-4,
        "clip_range": 0.1,
        "ent_coef": 0.01,
    },
    "halfcheetah": {"policy": "MlpPolicy", "n_steps": 256, "batch_size": 64, "n_epochs": 10},
}


class CleanRlTraining(_Training):
    """PPO in one file, of `examples/cleanrl_ppo.py`."""

    def train(self) -> int:
        """Train."""
        settings = dict(_CLEANRL_SETTINGS[self._spec.env])
        agent_of = settings.pop("agent_of")
        space, actions = self._envs.single_observation_space, self._envs.single_action_space
        curve = ppo.train(
            self._envs,
            total_steps=self._spec.train_steps,
            seed=_SEED,
            agent=lambda: agent_of(space, actions),
            **settings,
        )
        return curve.steps[-1]


class PictureAgent(nn.Module):
    """An actor and a critic on one convolutional network, as for Atari games.

    Args:
        space: of observations: (channels, 84, 84) of uint8.
        actions: Discrete.
    """

    def __init__(self, space: Any, actions: Any) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = space.shape[0]
        for n_filters, size, stride in ((32, 8, 4), (64, 4, 2), (64, 3, 1)):
            layers += [nn.Conv2d(channels, n_filters, size, stride), nn.ReLU()]
            channels = n_filters
        self._seen = nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 7 * 7, 512), nn.ReLU())
        self._actor = nn.Linear(512, actions.n)
        self._critic = nn.Linear(512, 1)

    def look(self, obs: torch.Tensor) -> tuple[torch.distributions.Distribution, torch.Tensor]:
        """Return the distribution of actions, and values, for observations."""
        seen = self._seen(obs / 255.0)
        choice = torch.distributions.Categorical(logits=self._actor(seen))
        return choice, self._critic(seen).squeeze(-1)


class ContinuousAgent(nn.Module):
    """An actor and a critic with two layers each; actions are drawn around the actor's.

    Args:
        space: of observations: a vector.
        actions: a Box.
    """

    def __init__(self, space: Any, actions: Any) -> None:
        super().__init__()
        (n_inputs,), (n_outputs,) = space.shape, actions.shape
        self._critic = ppo.network(n_inputs, 1, 1.0)
        self._actor = ppo.network(n_inputs, n_outputs, 0.01)
        self._log_std = nn.Parameter(torch.zeros(n_outputs))

    def look(self, obs: torch.Tensor) -> tuple[torch.distributions.Distribution, torch.Tensor]:
        """Return the distribution of actions, and values, for observations."""
        obs = obs.float()
        each = torch.distributions.Normal(self._actor(obs), self._log_std.exp())
        choice = torch.distributions.Independent(each, 1)
        return choice, self._critic(obs).squeeze(-1)


_CLEANRL_SETTINGS: dict[str, dict[str, Any]] = {
    "pong": {"agent_of": PictureAgent, "rollout_steps": 128},
    "halfcheetah": {
        "agent_of": ContinuousAgent,
        "rollout_steps": 256,
        "epochs": 10,
        "minibatches": 32,
    },
}
_TRAINERS: dict[str, Callable[[Spec, Callable[[], Any]], Trainer]] = {
    "sb3": Sb3Training,
    "cleanrl": CleanRlTraining,
}


def open_trainer(spec: Spec, factory: Callable[[], Any]) -> Trainer:
    """Return the trainer of `spec.trainer`."""
    return _TRAINERS[spec.trainer](spec, factory)
