"""What envs are doing, as their trainer knows it: for the board, and for warnings of long waits."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from envmgr.core.hosts import Hosts
from envmgr.core.phases import Phase
from envmgr.lifecycle import EnvState
from envmgr.texts import env_ids_text, seconds_text
from envmgr.wire.board import Activity, Board

_OF_PHASE = np.zeros(len(Phase), np.uint8)
for _phase, _activity in {
    Phase.IDLE: Activity.READY,
    Phase.STARTING: Activity.STARTING,
    Phase.RESETTING: Activity.RESETTING,
    Phase.POSTED: Activity.STEPPING,
    Phase.STEPPING: Activity.STEPPING,
    Phase.CANCELLING: Activity.CANCELLING,
    Phase.CALLING: Activity.CALLING,
    Phase.ENDING: Activity.ENDING,
    Phase.PAUSING: Activity.PAUSING,
}.items():
    _OF_PHASE[_phase] = _activity

_AT_WORK = np.isin(
    np.arange(len(Activity)),
    [Activity.STARTING, Activity.RESETTING, Activity.STEPPING, Activity.CALLING],
)
"""Activities for which it has to be found out first whether the host has begun with them."""

_IN_WORDS = {
    Activity.ENDING: "waiting for the end of what it ran in",
    Activity.PAUSING: f"in a {Activity.PAUSING.label}",
}


def activities_of(hosts: Hosts) -> npt.NDArray[np.uint8]:
    """Return the number of the `Activity` of each env and spare; from any thread."""
    table, block, n = hosts.table, hosts.block, hosts.env_num
    phases = np.frombuffer(bytes(table.phases.column), np.uint8)
    found: npt.NDArray[np.uint8] = _OF_PHASE[phases]
    for env_id in list(table.undelivered):
        if phases[env_id] == Phase.IDLE:
            found[env_id] = Activity.ANSWERED
    states = np.frombuffer(bytes(table.states.column), np.uint8)[:n]
    not_begun = (phases[:n] == Phase.IDLE) & (states == EnvState.INIT)
    found[:n][not_begun] = Activity.PAUSING  # until its first reset: it takes no action yet
    for env in hosts.envs:
        if env.host_id is None and phases[env.env_id] == Phase.IDLE:
            found[env.env_id] = Activity.NONE
    if block is not None:
        posted = (phases[:n] == Phase.POSTED) | (phases[:n] == Phase.STEPPING)
        answered = (block.replies == table.tokens[:n]) & posted
        found[:n][answered] = Activity.ANSWERED
    at_work = _AT_WORK[found]
    for group in hosts.groups:
        if not group.is_shared:
            continue
        running = group.running.env_id if group.running is not None else -1
        if block is not None and block.running[group.index]:
            running = int(block.running[group.index]) - 1
        if running in group.by_id:
            for env_id in group.by_id:
                if env_id != running and at_work[env_id]:
                    found[env_id] = Activity.QUEUED
    return found


def awaited_text(hosts: Hosts, board: Board | None, now: float) -> str:
    """Return which envs are awaited, which not: `env 0 has been in step for 34 s; env 1 ...`.

    Args:
        hosts: the hosts of the envs.
        board: says since when, as of the last look at the envs; None: that is not known.
        now: the present moment on the clock.
    """
    activities = activities_of(hosts)
    busy, rest = list[str](), list[str]()
    for number in sorted(set(activities.tolist())):
        activity = Activity(number)
        env_ids = np.flatnonzero(activities == number).tolist()
        who, one = env_ids_text(env_ids), len(env_ids) == 1
        has = f"{who} {'has' if one else 'have'}"
        if activity is Activity.ANSWERED:
            rest.append(f"{has} answered")
        elif activity is Activity.QUEUED:
            rest.append(f"{who} {'waits for its' if one else 'wait for their'} turn")
        elif activity not in (Activity.NONE, Activity.READY):
            doing = _IN_WORDS.get(activity, f"in {activity.label}")
            busy.append(f"{has} been {doing}{_since(board, env_ids, number, now)}")
    return "; ".join([*(busy or ["nothing is busy"]), *rest])


def _since(board: Board | None, env_ids: list[int], number: int, now: float) -> str:
    """Return how long envs have been at something, where that is known."""
    if board is None:
        return ""
    known = [i for i in env_ids if board.activities[i] == number]
    if not known:
        return ""  # it began after the last look
    lasts = sorted(max(now - float(board.since[i]), 0.0) for i in known)
    if len(known) == len(env_ids) and seconds_text(lasts[0]) == seconds_text(lasts[-1]):
        return f" for {seconds_text(lasts[0])}"
    return f" for up to {seconds_text(lasts[-1])}"
