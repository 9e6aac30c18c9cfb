"""Rows of batched envs whose next episodes begin with the next step of the others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from envmgr.core.phases import Change, Phase
from envmgr.core.slots import NEVER, EnvSlot

if TYPE_CHECKING:  # they tell of what they do
    from envmgr.core.hosts import Hosts


def await_reset(hosts: Hosts, slot: EnvSlot, *, late: bool) -> None:
    """Await the reset that the host of an env begins by itself: now, or with a step of others."""
    slot.order = next(hosts.request_ids)
    hosts.await_reply(slot, Change.RESET, slot.request_id)  # another reply to the same request
    if late:
        hosts.record.late[slot.env_id] = 1
        slot.deadline = NEVER


def expect_late(hosts: Hosts, env_ids: Iterable[int]) -> None:
    """The episodes of others begin now that these envs take a step; can be done again."""
    record = hosts.record
    if 1 not in record.late or record.together is None:
        return
    begun, limit_s = record.together.begun_with(env_ids), hosts.limits.of_phase(Phase.RESETTING)
    if limit_s is not None:
        for slot in map(record.slots.__getitem__, begun):
            if slot.phase is Phase.RESETTING:
                hosts.limits.set(slot, limit_s)
    for env_id in begun:
        record.late[env_id] = 0


def released(hosts: Hosts, env_id: int) -> None:
    """An env is let go of: who waited for its step may have no other to wait for."""
    together = hosts.record.together
    if together is not None and together.begins(env_id):
        expect_late(hosts, (env_id,))
