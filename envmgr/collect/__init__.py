"""Collection: runs a policy on the envs of a manager and accounts for every timestep.

`Collector` runs the loop with dicts for steps or for episodes, with every kind of manager;
`EpisodeRecord` is what it says of an episode, `CollectStatistics` what it says of all of them.
`StepCollector` and `EpisodeCollector` are the same loop and keep the steps, as `Trajectory`.
`RolloutCollector` fills a `RolloutBuffer` with T steps of n envs as arrays, whose advantages `gae`
gives. `envmgr.collect.policies` has the protocols of policies.
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
