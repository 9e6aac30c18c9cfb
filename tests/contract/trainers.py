"""Stand-ins for trainers that the environment of the tests does not have.

They are what adapters derive from, as far as adapters rely on it. Where the trainer itself is
installed, it is taken. `make test-trainers` tests the adapters with the trainers themselves.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from typing import Any

import numpy as np
import pytest


class VecEnv:
    """Stands in for Stable-Baselines3's class of this name."""

    def __init__(self, num_envs: int, observation_space: Any, action_space: Any) -> None:
        self.num_envs = num_envs
        self.observation_space = observation_space
        self.action_space = action_space
        self.reset_infos: list[dict[str, Any]] = [{}] * num_envs
        self._reset_seeds()
        self._reset_options()
        modes = self.get_attr("render_mode")  # type: ignore[attr-defined]
        assert modes == modes[:1] * num_envs
        self.render_mode = modes[0]

    def _reset_seeds(self) -> None:
        self._seeds: list[int | None] = [None] * self.num_envs

    def _reset_options(self) -> None:
        self._options: list[dict[str, Any]] = [{}] * self.num_envs

    def seed(self, seed: int) -> list[int]:
        self._seeds = [seed + i for i in range(self.num_envs)]
        return self._seeds  # type: ignore[return-value]

    def set_options(self, options: Any) -> None:
        self._options = [options] * self.num_envs if isinstance(options, dict) else options

    def step(self, actions: Any) -> Any:
        self.step_async(actions)  # type: ignore[attr-defined]
        return self.step_wait()  # type: ignore[attr-defined]


class VecMonitor:
    """Stands in for Stable-Baselines3's class of this name, as it is after its construction."""

    info_keywords: Any = ()
    episode_count = 0
    t_start = 0.0

    def __init__(self, venv: Any, results_writer: Any = None) -> None:
        self.venv, self.results_writer = venv, results_writer
        self.episode_returns = np.zeros(venv.num_envs, np.float32)
        self.episode_lengths = np.zeros(venv.num_envs, np.int32)


class BaseVectorEnv:
    """Stands in for tianshou's class of this name."""

    def __getattribute__(self, key: str) -> Any:
        if key in ("action_space", "observation_space", "spec", "metadata"):
            return self.get_env_attr(key)
        return super().__getattribute__(key)

    def __len__(self) -> int:
        return int(self.env_num)


class DingsRegistry(dict[str, Any]):
    """Stands in for DI-engine's registry of managers."""

    def register(self, key: str, cls: type, force_overwrite: bool = False) -> None:
        self[key] = cls


class DingsManager:
    """Stands in for DI-engine's class that all managers there derive from."""


class TensorDict(dict[str, Any]):
    """Stands in for tensordict's class of this name."""

    def __init__(self, source: Any, batch_size: Any = None, device: Any = None) -> None:
        super().__init__(source)

    def set(self, key: str, value: Any) -> None:
        self[key] = value


class Composite(dict[str, Any]):
    """Stands in for TorchRL's spec of this name."""

    def __init__(self, source: Any = (), shape: Any = None, **parts: Any) -> None:
        super().__init__(source, **parts)


class Spec:
    """Stands in for TorchRL's other specs."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass


class EnvBase:
    """Stands in for TorchRL's class of this name."""

    def __init__(self, device: Any, batch_size: Any) -> None:
        self.device, self.batch_size = device, batch_size

    def to(self, device: Any) -> None:
        pass

    def reset(self, tensordict: Any = None, **kwargs: Any) -> Any:
        return self._reset(tensordict, **kwargs)  # type: ignore[attr-defined]

    def step(self, tensordict: Any) -> Any:
        return self._step(tensordict)  # type: ignore[attr-defined]

    def maybe_reset(self, tensordict: Any) -> Any:
        return tensordict

    def close(self, *, raise_if_closed: bool = True) -> None:
        pass


_SPECS = ("Binary", "Bounded", "Categorical", "MultiCategorical", "MultiOneHot", "OneHot")

_STAND_INS: dict[str, dict[str, dict[str, Any]]] = {
    "sb3": {
        "stable_baselines3.common.vec_env.base_vec_env": {"VecEnv": VecEnv},
        "stable_baselines3.common.vec_env.vec_monitor": {"VecMonitor": VecMonitor},
    },
    "tianshou": {"tianshou.env": {"BaseVectorEnv": BaseVectorEnv}},
    "torchrl": {
        "tensordict": {"TensorDict": TensorDict},
        "torchrl.data": {"Composite": Composite, **dict.fromkeys((*_SPECS, "Unbounded"), Spec)},
        "torchrl.envs": {"EnvBase": EnvBase},
    },
    "ding": {
        "ding.envs": {"BaseEnvManager": DingsManager},
        "ding.utils": {"ENV_MANAGER_REGISTRY": DingsRegistry()},
        "gym": {"spaces": types.ModuleType("gym.spaces")},
    },
}
"""By adapter, and by module."""


def adapter(name: str, patch: pytest.MonkeyPatch) -> Any:
    """Return the module `envmgr.adapters.<name>`, on its trainer or on the stand-in for it."""
    full = f"envmgr.adapters.{name}"
    for module, names in _STAND_INS.get(name, {}).items():
        if _is_missing(module.partition(".")[0]):
            stand_in = types.ModuleType(module)
            vars(stand_in).update(names)
            patch.setitem(sys.modules, module, stand_in)
            # So that it is not there for those who come later:
            patch.delitem(sys.modules, full, raising=False)
            patch.delitem(sys.modules, f"{full}_monitor", raising=False)
    was_there = full in sys.modules
    found = importlib.import_module(full)
    if not was_there:
        del sys.modules[full]  # so that the patch takes it away again
    patch.setitem(sys.modules, full, found)
    return found


def _is_missing(package: str) -> bool:
    found = sys.modules.get(package)
    if found is not None:
        return found.__spec__ is None  # a stand-in
    return importlib.util.find_spec(package) is None


def rows(obs: Any, env_ids: Any) -> Any:
    """Return what the observations of scripted envs say: (env_id, build, episode, step)."""
    return np.asarray(obs)[list(env_ids), :4].astype(int).tolist()
