"""Supervision of hosts: states, deadlines, retries, renewals. Without waiting and without I/O."""

from __future__ import annotations

from envmgr.supervisor.hosts import Hosts
from envmgr.supervisor.lanes import Lanes
from envmgr.supervisor.rules import EpisodeRules
from envmgr.supervisor.selection import Selection
from envmgr.supervisor.slots import EnvSlot, HostGroup, Lost, Next, Work
from envmgr.supervisor.supervisor import Supervisor
from envmgr.supervisor.taken import ArrayBatch, ReadyBatch, Taken, ends_of

__all__ = [
    "ArrayBatch",
    "EnvSlot",
    "EpisodeRules",
    "HostGroup",
    "Hosts",
    "Lanes",
    "Lost",
    "Next",
    "ReadyBatch",
    "Selection",
    "Supervisor",
    "Taken",
    "Work",
    "ends_of",
]
