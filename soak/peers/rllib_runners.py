"""RLlib's EnvRunners, actors of Ray with an env each, which are restarted when they fail."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import ray
import torch
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.core.rl_module.torch import TorchRLModule
from ray.rllib.env.env_runner_group import EnvRunnerGroup
from ray.tune.registry import register_env

from peers import LIMIT_S, Factories, Outcome

ENV = "faulty"
NEXT_ACTION = 0
"""The action where a runner asks once more: after a reset, and after it has built its env anew."""


class GivenAction(TorchRLModule):  # type: ignore[misc]
    """A policy that is told its next action."""

    given: int | None = None

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        action, self.given = self.given, None
        return {Columns.ACTIONS: torch.tensor([NEXT_ACTION if action is None else action])}


class Config(AlgorithmConfig):  # type: ignore[misc]
    """The settings of an algorithm with that policy."""

    def get_default_rl_module_spec(self) -> RLModuleSpec:
        """Return the policy."""
        return RLModuleSpec(module_class=GivenAction)


class RllibRunners:
    """Samples a timestep of each runner, and looks after lost ones, as RLlib's algorithms do."""

    def __init__(self, factories: Factories) -> None:
        self._factories = factories
        self._runners: Any = None

    def start(self) -> dict[int, Any]:
        """Start Ray and the runners; each resets its env."""
        n = len(self._factories)
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        ray.init(num_cpus=n, include_dashboard=False, _temp_dir=os.getcwd())
        factories = self._factories
        register_env(ENV, lambda context: factories[context.worker_index % n]())
        config = Config().environment(ENV)
        config.env_runners(num_env_runners=n, sample_timeout_s=LIMIT_S)
        config.fault_tolerance(
            restart_failed_env_runners=True,
            restart_failed_sub_environments=True,
            delay_between_env_runner_restarts_s=0.0,
            env_runner_health_probe_timeout_s=LIMIT_S,
        )
        self._runners = EnvRunnerGroup(config=config, local_env_runner=False)
        return self.reset()

    def ready(self) -> list[int]:
        """Return the envs of the runners that are called healthy."""
        n = len(self._factories)
        return sorted(runner % n for runner in self._runners.healthy_env_runner_ids())

    def step(self, actions: Mapping[int, int]) -> dict[int, Outcome]:
        """Sample from these runners, within the limit, then look whether lost ones are back."""
        n = len(self._factories)
        sampled = []
        if actions:  # no ids would mean all
            sampled = self._runners.foreach_env_runner(
                [_sample] * len(actions),
                kwargs=[{"action": action} for action in actions.values()],
                remote_worker_ids=[env_id or n for env_id in actions],
                local_env_runner=False,
                timeout_seconds=LIMIT_S,
            )
        self._runners.probe_unhealthy_env_runners()
        return {runner % n: outcome for runner, outcome in sampled}

    def reset(self) -> dict[int, Any]:
        """Begin new episodes in all envs."""
        n = len(self._factories)
        first = self._runners.foreach_env_runner(_begin, local_env_runner=False)
        return {runner % n: obs for runner, obs in first}

    def close(self) -> None:
        """Stop the runners, then Ray."""
        try:
            if self._runners is not None:  # else its constructor has failed
                self._runners.stop()
        finally:
            ray.shutdown()


def _begin(runner: Any) -> tuple[int, Any]:
    """Begin an episode in the env of a runner."""
    runner.sample(num_timesteps=0, force_reset=True)
    return runner.worker_index, runner._ongoing_episodes[0].get_observations(-1)


def _sample(runner: Any, action: int) -> tuple[int, Outcome]:
    """Take a timestep; the action is the one that the runner says it was."""
    runner.module.given = action
    episode = runner.sample(num_timesteps=1)[-1]
    return runner.worker_index, Outcome(
        episode.get_observations(-1),
        float(episode.get_rewards(-1)),
        bool(episode.is_done),
        action=int(episode.get_actions(-1)),
    )


def open_peer(factories: Factories) -> RllibRunners:
    """Return runners that are not started."""
    return RllibRunners(factories)
