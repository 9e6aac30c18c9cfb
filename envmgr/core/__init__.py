"""Supervision of hosts: states, deadlines, retries, renewals. Without waiting and without I/O."""

from __future__ import annotations

from envmgr.core.hosts import Hosts
from envmgr.core.lanes import Lanes
from envmgr.core.rules import EpisodeRules
from envmgr.core.selection import Selection
from envmgr.core.slots import EnvSlot, HostGroup, Lost, Next, Work
from envmgr.core.supervisor import Supervisor
from envmgr.core.taken import ArrayBatch, ReadyBatch, Taken, ends_of

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
