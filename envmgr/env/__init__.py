"""The env side: the `BaseEnv` protocol, and the adapters that make other kinds of envs follow it.

Everything here may run inside workers, which stay small: of other packages it imports gymnasium,
numpy and cloudpickle only, and of envmgr only what is in the layers below `env`. The package of an
env is imported when that env is built.
"""

from __future__ import annotations

from envmgr.env.agent_rows import AgentRows
from envmgr.env.base import BaseEnv
from envmgr.env.batch_specs import BatchedEnvSpec
from envmgr.env.batched import BatchedEnv
from envmgr.env.contract import EnvContractError
from envmgr.env.figures import tile_images, write_png
from envmgr.env.gymnasium_env import GymnasiumEnv
from envmgr.env.pictures import EpisodePictures
from envmgr.env.vector_batch import VectorBatch

__all__ = [
    "AgentRows",
    "BaseEnv",
    "BatchedEnv",
    "BatchedEnvSpec",
    "EnvContractError",
    "EpisodePictures",
    "GymnasiumEnv",
    "VectorBatch",
    "tile_images",
    "write_png",
]
