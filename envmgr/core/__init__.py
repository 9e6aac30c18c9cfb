"""The trainer's side: states, deadlines, retries, renewals, and the checks of arguments.

`engine` and `owner` wait, and `board_writer` and `journal` have threads of their own. All else
here neither waits nor does I/O: it is told what arrived and
what time it is, and sends through a `Transport`.
"""

from __future__ import annotations

from envmgr.core.collect import ArrayBatch, Collected, GivenInfos, HandedOut, ReadyBatch, ends_of
from envmgr.core.failures import Lost
from envmgr.core.hosts import Hosts
from envmgr.core.phases import Change, Next, Phase
from envmgr.core.supervisor import Supervisor
from envmgr.core.table import NOBODY, EnvTable, EpisodeRules, HostGroup, ManagedEnv, Selection
from envmgr.wire.info_columns import InfoColumn, InfoColumns

__all__ = [
    "NOBODY",
    "ArrayBatch",
    "Change",
    "Collected",
    "EnvTable",
    "EpisodeRules",
    "GivenInfos",
    "HandedOut",
    "HostGroup",
    "Hosts",
    "InfoColumn",
    "InfoColumns",
    "Lost",
    "ManagedEnv",
    "Next",
    "Phase",
    "ReadyBatch",
    "Selection",
    "Supervisor",
    "ends_of",
]
