"""Collectors, which run a policy on the envs of a manager and account for every timestep.

`Collector` runs a loop with dicts for steps or for episodes, with every kind of manager; it
describes each episode in an `EpisodeRecord`, and all of them in `CollectStatistics`.
`StepCollector` and `EpisodeCollector` run the same loop and keep the steps, as `Trajectory`.
`RolloutCollector` fills a `RolloutBuffer` with T steps of n envs as arrays; `gae` computes their
advantages. `envmgr.collect.policies` describes the protocols of policies.
"""

from __future__ import annotations

from envmgr.collect.collector import Collector
from envmgr.collect.gae import Advantages, gae
from envmgr.collect.loop import CollectLoop
from envmgr.collect.policies import (
    BatchPolicy,
    Policy,
    PolicyFactory,
    PolicyStep,
    RandomPolicy,
    make_policy,
    policy_seed,
)
from envmgr.collect.policy_caller import by_env
from envmgr.collect.records import EpisodeRecord
from envmgr.collect.rollout_buffer import RolloutBuffer
from envmgr.collect.rollout_collector import RolloutCollector
from envmgr.collect.statistics import CollectStatistics
from envmgr.collect.trajectories import EpisodeCollector, StepCollector, Trajectory
from envmgr.manager.loop import ManagerLoop

__all__ = [
    "Advantages",
    "BatchPolicy",
    "CollectLoop",
    "CollectStatistics",
    "Collector",
    "EpisodeCollector",
    "EpisodeRecord",
    "ManagerLoop",
    "Policy",
    "PolicyFactory",
    "PolicyStep",
    "RandomPolicy",
    "RolloutBuffer",
    "RolloutCollector",
    "StepCollector",
    "Trajectory",
    "by_env",
    "gae",
    "make_policy",
    "policy_seed",
]
