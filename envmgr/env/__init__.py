"""The env side: the `BaseEnv` protocol, and what makes other kinds of envs follow it.

Everything here may run inside workers, which stay small: of other packages it imports gymnasium and
numpy only, and of this one what stands below `env`. An env imports its package when it is built.
"""

from __future__ import annotations

from envmgr.env.base import BaseEnv
from envmgr.env.batched import BatchedEnv, BatchedEnvSpec
from envmgr.env.contract import EnvContractError
from envmgr.env.gymnasium_env import GymnasiumEnv

__all__ = ["BaseEnv", "BatchedEnv", "BatchedEnvSpec", "EnvContractError", "GymnasiumEnv"]
