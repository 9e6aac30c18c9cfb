"""The env side: the `BaseEnv` protocol, and what makes other kinds of envs follow it.

Everything here may run inside workers, so nothing here imports more than gymnasium and numpy.
"""

from __future__ import annotations

from envmgr.env.base import BaseEnv
from envmgr.env.contract import EnvContractError
from envmgr.env.gymnasium_env import GymnasiumEnv

__all__ = ["BaseEnv", "EnvContractError", "GymnasiumEnv"]
