"""Collection: runs a policy on the envs of a manager and accounts for every timestep.

`Collector` runs the dict-style loop for steps or for episodes, with every kind of manager;
`EpisodeRecord` is what it says of an episode, `CollectStatistics` what it says of all of them.
`RolloutCollector` fills a `RolloutBuffer` with T steps of n envs as arrays, whose advantages `gae`
gives. `envmgr.collect.policies` has the protocols of policies.
"""

from __future__ import annotations

from envmgr.collect.collector import Collector
from envmgr.collect.gae import Advantages, gae
from envmgr.collect.policies import (
    BatchPolicy,
    Policy,
    PolicyFactory,
    PolicyStep,
    RandomPolicy,
    make_policy,
    policy_seed,
)
from envmgr.collect.records import EpisodeRecord
from envmgr.collect.rollout import RolloutBuffer
from envmgr.collect.rollouts import RolloutCollector
from envmgr.collect.statistics import CollectStatistics
from envmgr.manager.loop import ManagerLoop

__all__ = [
    "Advantages",
    "BatchPolicy",
    "CollectStatistics",
    "Collector",
    "EpisodeRecord",
    "ManagerLoop",
    "Policy",
    "PolicyFactory",
    "PolicyStep",
    "RandomPolicy",
    "RolloutBuffer",
    "RolloutCollector",
    "gae",
    "make_policy",
    "policy_seed",
]
