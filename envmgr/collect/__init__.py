"""Collection: runs a policy on the envs of a manager and accounts for every timestep.

`Collector` runs the dict-style loop for steps or for episodes, with every kind of manager;
`EpisodeRecord` is what it says of an episode, `CollectStatistics` what it says of all of them.
`envmgr.collect.policies` has the protocol of policies.
"""

from __future__ import annotations

from envmgr.collect.collector import Collector
from envmgr.collect.policies import Policy, PolicyFactory, RandomPolicy, make_policy, policy_seed
from envmgr.collect.records import EpisodeRecord
from envmgr.collect.statistics import CollectStatistics
from envmgr.manager.loop import ManagerLoop

__all__ = [
    "CollectStatistics",
    "Collector",
    "EpisodeRecord",
    "ManagerLoop",
    "Policy",
    "PolicyFactory",
    "RandomPolicy",
    "make_policy",
    "policy_seed",
]
