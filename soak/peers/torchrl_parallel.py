"""TorchRL's ParallelEnv over GymWrapper, with its limit for the time of a step or a reset."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torchrl._utils
from torchrl.envs import GymWrapper, ParallelEnv

from peers import LIMIT_S, Factories, Outcome


class TorchrlParallel:
    """Steps as TorchRL's collectors do, which reset what has ended within the same step."""

    def __init__(self, factories: Factories) -> None:
        self._factories = factories
        self._envs: Any = None
        self._root: Any = None

    def start(self) -> dict[int, Any]:
        """Build and reset.

        The limit is that of this process alone: workers have one of the same name, for how long
        they wait for a command.
        """
        torchrl._utils.BATCHED_PIPE_TIMEOUT = LIMIT_S
        self._envs = ParallelEnv(
            len(self._factories),
            [partial(wrapped, factory) for factory in self._factories],
            shutdown_timeout=LIMIT_S,
        )
        return self.reset()

    def ready(self) -> list[int]:
        """Return all envs: it steps all or none."""
        return list(range(len(self._factories)))

    def step(self, actions: Mapping[int, int]) -> dict[int, Outcome]:
        """Step all envs, within the limit."""
        self._root["action"] = torch.tensor([actions[i] for i in self.ready()])
        stepped, self._root = self._envs.step_and_maybe_reset(self._root)
        after = stepped["next"]
        return {
            i: Outcome(
                after["observation"][i].numpy(), float(after["reward"][i]), bool(after["done"][i])
            )
            for i in self.ready()
        }

    def reset(self) -> dict[int, Any]:
        """Reset all envs, within the limit."""
        self._root = self._envs.reset()
        return {i: self._root["observation"][i].numpy() for i in self.ready()}

    def close(self) -> None:
        """Close, as often as one likes."""
        if self._envs is not None:  # else its constructor has failed
            self._envs.close(raise_if_closed=False)


def wrapped(factory: Callable[[], Any]) -> Any:
    """Return an env as TorchRL wants it; its actions are numbers, not one-hot vectors."""
    return GymWrapper(factory(), categorical_action_encoding=True)


def open_peer(factories: Factories) -> TorchrlParallel:
    """Return envs that are not started."""
    return TorchrlParallel(factories)
