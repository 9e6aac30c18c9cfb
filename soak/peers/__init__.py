"""The libraries of the scoreboard, all behind the same small protocol.

A library is imported only by its own module. Each is used as its documentation says, with the
options that it offers against faults: time limits of LIMIT_S, a forced end in `close`, checks.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

LIMIT_S = 2.0
"""How long a step or a reset may take, where a library has a limit for it."""

Factories = Sequence[Callable[[], Any]]


class Outcome(NamedTuple):
    """What a library delivered for one action.

    Attributes:
        obs: the observation.
        reward: the reward.
        done: whether the episode has ended.
        error: the failure that the library reports with it; None for an ordinary timestep.
        action: the action that it answers, as the library reports it, where that is not certain to
            be the action of this call; None where it is certain.
    """

    obs: Any
    reward: float
    done: bool
    error: BaseException | None = None
    action: int | None = None


class Peer(Protocol):
    """Vectorized envs of one library."""

    def start(self) -> dict[int, Any]:
        """Build the envs, reset them, and return the first observations by env."""

    def ready(self) -> list[int]:
        """Return the envs that take an action now; may wait for one, as the library does."""

    def step(self, actions: Mapping[int, int]) -> dict[int, Outcome]:
        """Step these envs (all, where the library steps only all) and reset what has ended."""

    def reset(self) -> dict[int, Any]:
        """Reset all envs, which is all that a user can still do after an error."""

    def close(self) -> None:
        """Close, in the way that is best protected against envs that hang."""


class DictManager:
    """The loop over managers that show dicts by env_id: act on what is ready, step, reset.

    Args:
        manager: a manager that is not launched yet.
    """

    def __init__(self, manager: Any) -> None:
        self._manager = manager

    def start(self) -> dict[int, Any]:
        """Launch."""
        self._manager.launch()
        return dict(self._manager.ready_obs)

    def ready(self) -> list[int]:
        """Return the keys of `ready_obs`."""
        return sorted(self._manager.ready_obs)

    def reset(self) -> dict[int, Any]:
        """Reset all envs."""
        self._manager.reset()
        return dict(self._manager.ready_obs)

    def close(self) -> None:
        """Close."""
        self._manager.close()


_MODULES = {
    "envmgr": "envmgr_manager",
    "gymnasium": "gymnasium_vector",
    "sb3": "sb3_subproc",
    "tianshou": "tianshou_subproc",
    "ding": "ding_manager",
    "torchrl": "torchrl_parallel",
    "rllib": "rllib_runners",
    "pufferlib": "pufferlib_processes",
}
LIBRARIES = tuple(_MODULES)

_MODULES_WITH_USERS = {
    "threads": {"envmgr": "envmgr_leases", "torchrl": "torchrl_pool"},
    "coroutines": {"envmgr": "envmgr_leases"},
}
"""The modules of libraries whose envs may have a user each, independent of the others."""

TITLES = {
    "envmgr": "envmgr",
    "gymnasium": "Gymnasium AsyncVectorEnv",
    "sb3": "Stable-Baselines3 SubprocVecEnv",
    "tianshou": "tianshou SubprocVectorEnv",
    "ding": "DI-engine SyncSubprocessEnvManager",
    "torchrl": "TorchRL ParallelEnv",
    "rllib": "RLlib EnvRunners",
    "pufferlib": "PufferLib Multiprocessing",
}


TITLES_WITH_USERS = {"envmgr": "envmgr", "torchrl": "TorchRL AsyncEnvPool"}


def offers(library: str, users: str) -> bool:
    """Return whether a library offers envs with such a user each; true if `users` is empty."""
    return not users or library in _MODULES_WITH_USERS[users]


def open_peer(library: str, factories: Factories, users: str = "") -> Peer:
    """Return the envs of a library, not started yet; this imports the library.

    Args:
        library: its name.
        factories: the functions that build the envs.
        users: `threads` or `coroutines` that have an env each; empty for one caller of all envs.
    """
    if users:
        with_users = importlib.import_module(f"peers.{_MODULES_WITH_USERS[users][library]}")
        opened: Peer = with_users.open_peer(factories, users)
        return opened
    module = importlib.import_module(f"peers.{_MODULES[library]}")
    peer: Peer = module.open_peer(factories)
    return peer
