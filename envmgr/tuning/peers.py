"""Other libraries that the same envs are measured with, if installed: how to build their loops.

Libraries are imported by name, in a process of their own: see `benchmark_process`.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from envmgr.spaces.legal import MASK, has_mask
from envmgr.tuning.loops import DingLoop, GymnasiumLoop, Loop, Sb3Loop, TianshouLoop
from envmgr.types import EnvFactory

_BATCHES = 97
"""How many batches of actions are drawn before the clock runs; a prime."""


class Peer(NamedTuple):
    """A library's way to run envs.

    Attributes:
        name: the name that is shown.
        module: the module that has to be installed.
        cls: where its class is: `module:name`.
        loop: the kind of loop that runs it.
        arguments: arguments of the class, besides the factories.
        is_in_process: whether it steps the envs itself, one after another.
    """

    name: str
    module: str
    cls: str
    loop: str
    arguments: Mapping[str, Any]
    is_in_process: bool = False


_SB3, _TIANSHOU, _DING = "stable_baselines3", "tianshou", "ding"
_SB3_ENVS = "stable_baselines3.common.vec_env"

PEERS = (
    Peer("gymnasium AsyncVectorEnv", "gymnasium", "gymnasium.vector:AsyncVectorEnv", "gym", {}),
    Peer("gymnasium SyncVectorEnv", "gymnasium", "gymnasium.vector:SyncVectorEnv", "gym", {}, True),
    # Forked: the default of others imports PyTorch in each worker.
    Peer("SB3 SubprocVecEnv", _SB3, f"{_SB3_ENVS}:SubprocVecEnv", "sb3", {"start_method": "fork"}),
    Peer("SB3 DummyVecEnv", _SB3, f"{_SB3_ENVS}:DummyVecEnv", "sb3", {}, True),
    Peer("tianshou ShmemVectorEnv", _TIANSHOU, "tianshou.env:ShmemVectorEnv", "tianshou", {}),
    Peer("tianshou SubprocVectorEnv", _TIANSHOU, "tianshou.env:SubprocVectorEnv", "tianshou", {}),
    Peer("DI-engine SyncSubprocess", _DING, "ding.envs:SyncSubprocessEnvManager", "ding", {}),
    Peer("DI-engine AsyncSubprocess", _DING, "ding.envs:AsyncSubprocessEnvManager", "ding", {}),
)


def installed(
    peers: Sequence[Peer] = PEERS,
    find: Callable[[str], Any] = importlib.util.find_spec,
) -> tuple[list[Peer], list[str]]:
    """Return the installed peers, and the modules that are missing; nothing is imported."""
    missing = sorted({peer.module for peer in peers if find(peer.module) is None})
    return [peer for peer in peers if peer.module not in missing], missing


def loop_of(peer: Peer, factory: EnvFactory, env_num: int) -> Loop:
    """Return a peer's loop over envs; imports the library.

    Raises:
        TypeError: the env is not one of gymnasium, or says in each observation which actions are
            legal.
        Exception: whatever the library or the env raises.
    """
    actions = _batches_of(factory, env_num)
    module, _, name = peer.cls.partition(":")
    cls = getattr(importlib.import_module(module), name)
    if peer.loop == "ding":
        return DingLoop(lambda: _ding_manager(cls, factory, env_num), env_num, actions)
    build = functools.partial(cls, [factory] * env_num, **peer.arguments)
    loops = {"gym": GymnasiumLoop, "sb3": Sb3Loop, "tianshou": TianshouLoop}
    made: Loop = loops[peer.loop](build, env_num, actions)
    return made


def _batches_of(factory: EnvFactory, env_num: int) -> Iterator[Any]:
    """Return endless batches of random actions: arrays, or tuples if these are dicts or tuples."""
    import gymnasium

    env = factory()
    if not isinstance(env, gymnasium.Env):
        raise TypeError(f"it takes envs of gymnasium, and this is a {type(env).__name__}")
    if has_mask(env.observation_space):
        env.close()
        raise TypeError(
            "its actions are drawn before the clock runs, and this env says in each observation "
            f"({MASK}) which are legal"
        )
    try:
        space = env.action_space
        space.seed(7)
        batches = [[space.sample() for _ in range(env_num)] for _ in range(_BATCHES)]
    finally:
        env.close()
    plain = not isinstance(batches[0][0], (dict, tuple))
    return itertools.cycle([np.array(one) if plain else tuple(one) for one in batches])


def _ding_manager(cls: Any, factory: EnvFactory, env_num: int) -> Any:
    easydict = importlib.import_module("easydict")
    env_fn = [functools.partial(_ding_env, factory)] * env_num
    return cls(env_fn=env_fn, cfg=easydict.EasyDict(cls.default_config()))


def _ding_env(factory: EnvFactory) -> Any:
    """Return a gymnasium env as DI-engine wants it."""
    envs = importlib.import_module("ding.envs")
    env = factory()

    def reset(self: Any) -> Any:
        return env.reset()[0]

    def step(self: Any, action: Any) -> Any:
        obs, reward, terminated, truncated, info = env.step(action)
        return envs.BaseEnvTimestep(obs, reward, terminated or truncated, info)

    def seed(self: Any, seed: int, dynamic_seed: bool = False) -> None:
        env.reset(seed=seed)

    spaces = {"observation_space": env.observation_space, "action_space": env.action_space}
    methods = {
        "__init__": lambda self: None,
        "__repr__": lambda self: type(env).__name__,
        "reset": reset,
        "step": step,
        "seed": seed,
        "close": lambda self: env.close(),
        "reward_space": None,
    }
    return type("DingEnv", (envs.BaseEnv,), {**methods, **spaces})()
