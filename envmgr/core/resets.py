"""Resets that users ask for, whatever the env is doing."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from envmgr.core.episodes import EnvRecord, Episodes, Restoration
from envmgr.core.failures import Repair
from envmgr.core.hosts import Hosts, expect_late
from envmgr.core.phases import Next, Phase
from envmgr.core.spares import Spares
from envmgr.core.statistics import Statistics
from envmgr.core.submit import Submitter
from envmgr.core.table import EnvSlot
from envmgr.lifecycle import EnvState, Event
from envmgr.types import is_abnormal
from envmgr.wire.messages import SavedEnv


class ExplicitResets:
    """Begins the resets that users ask for.

    Args:
        hosts: to send requests.
        statistics: where cancelled steps are counted.
        episodes: begins them.
        repair: brings envs back that have failed for good.
        submitter: orders resets in the block.
        spares: which may have been given seeds; None if there are none.
    """

    def __init__(
        self,
        hosts: Hosts,
        statistics: Statistics,
        episodes: Episodes,
        repair: Repair,
        submitter: Submitter,
        spares: Spares | None,
    ) -> None:
        self._hosts = hosts
        self._record = hosts.record
        self._states = hosts.record.states
        self._statistics = statistics
        self._episodes = episodes
        self._repair = repair
        self._spares = spares
        self._submitter = submitter

    @property
    def _can_be_ordered(self) -> bool:
        """Whether resets that hosts know of are ordered in the block, which is enough."""
        # In line a message costs no more, and can be interrupted safely.
        alone = self._hosts.transport.works_alone and self._spares is None
        return alone and self._submitter.packer is not None

    def seed(self, seeds: Mapping[int, int | None], of_spares: Sequence[int | None]) -> None:
        """Have the next explicit resets, and those of spares, use these seeds."""
        for env_id, seed in seeds.items():
            self._record.slots[env_id].new_seed = seed
        for spare, seed in zip(self._record.slots[self._record.env_num :], of_spares, strict=True):
            spare.new_seed = seed

    def begin(self, params: Mapping[int, dict[str, Any] | None]) -> None:
        """Reset envs, and the spares that were given a seed since their last reset.

        Args:
            params: keyword arguments of this and of later automatic resets, by env_id; None keeps
                those that were given before.
        """
        # Where all rows of a batched env are reset together, those are, too, that wait for a step.
        expect_late(self._hosts, [i for i in params if not self._record.slots[i].resets_alone])
        ordered = [i for i, given in params.items() if self._begin(self._record.slots[i], given)]
        if ordered:
            self._submitter.order_resets(ordered)
        if self._spares is not None:
            self._spares.reseed(self._episodes.begin)

    def restore(self, restorations: Mapping[int, tuple[SavedEnv, EnvRecord]]) -> None:
        """Have envs that are at rest be what they were."""
        self._statistics.has_generations = True
        for env_id, (saved, record) in restorations.items():
            slot = self._record.slots[env_id]
            self._cancel(slot)
            self._revive(slot)
            slot.generation, slot.episodes_done = record.generation, record.episodes_done
            slot.episode = record.episode - 1  # this counts as the reset that it has been in
            slot.reset_params, slot.base_seed = record.reset_params, record.base_seed
            slot.attended = True
            slot.seed, slot.new_generation, slot.waits = None, False, False
            due = self._episodes.restorations
            due.forget(env_id)
            due.due[env_id] = Restoration(saved, record)
            self._episodes.begin(slot)

    def _begin(self, slot: EnvSlot, params: dict[str, Any] | None) -> bool:
        """Begin the reset of one env; whether it is only to be ordered."""
        self._hosts.take_over(slot)
        restoring = self._episodes.restorations.forget(slot.env_id)
        joins = params is None and slot.new_seed is None and not restoring
        if params is not None:
            slot.reset_params = copy.copy(params)  # as what it is
        if slot.new_seed is not None:
            slot.seed = slot.base_seed = slot.new_seed
            slot.new_seed = None
        self._cancel(slot)
        self._revive(slot)
        slot.attended = True
        slot.waits = False
        self._record.happened(slot.env_id, Event.BEGIN_RESET)
        if slot.phase is Phase.IDLE:
            if slot.host_id is None:
                self._repair.forgive(slot)
                self._repair.renewals.bring_back(slot)
            elif joins and self._can_be_ordered and self._is_planned(slot):
                slot.again = False
                return True
            else:
                self._episodes.begin(slot)
        elif slot.phase is Phase.ENDING and slot.following is Next.NOTHING:
            self._repair.forgive(slot)
            slot.following = Next.RENEW_HOST
        elif slot.phase in (Phase.RESETTING, Phase.CANCELLING):
            slot.again = slot.again or not joins
        return False

    def _cancel(self, slot: EnvSlot) -> None:
        """Give up the timestep that is owed, if there is one."""
        if not slot.owed:
            return
        slot.held = False
        self._statistics.cancelled += 1
        timestep = self._record.undelivered.pop(slot.env_id, None)
        if timestep is None:
            self._hosts.cancel(slot)
        elif timestep.done and not is_abnormal(timestep.info):  # nobody saw that episode's end
            slot.episodes_done -= 1
            slot.has_plan = False
            self._statistics.episodes -= 1

    def _revive(self, slot: EnvSlot) -> None:
        """Take back what was decided about an env that its user now resets."""
        slot.doomed = None
        slot.fresh = None
        slot.dropped = False
        if self._states[slot.env_id] is EnvState.DONE:
            slot.episodes_done = 0
            slot.has_plan = False

    def _is_planned(self, slot: EnvSlot) -> bool:
        """Whether the host of an env knows all that there is to know of its next reset."""
        if slot.env_id in self._record.unposted:
            return False
        return slot.has_plan and slot.seed is None and not slot.new_generation
