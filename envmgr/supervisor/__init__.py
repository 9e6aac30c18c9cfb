"""Supervision of hosts: states, deadlines, retries, renewals. Without waiting and without I/O."""

from __future__ import annotations

from envmgr.supervisor.hosts import Hosts
from envmgr.supervisor.rules import EpisodeRules
from envmgr.supervisor.slots import EnvSlot, HostGroup, Lost, Next, Work
from envmgr.supervisor.supervisor import Supervisor

__all__ = [
    "EnvSlot",
    "EpisodeRules",
    "HostGroup",
    "Hosts",
    "Lost",
    "Next",
    "Supervisor",
    "Work",
]
