"""New envs and new hosts in place of those that cannot be used any more."""

from __future__ import annotations

from collections.abc import Sequence

from envmgr.core.episodes import Episodes
from envmgr.core.groups import HostGroup
from envmgr.core.hosts import Hosts
from envmgr.core.phases import Next, Phase
from envmgr.core.slots import EnvSlot
from envmgr.core.spares import Spares
from envmgr.core.stats import Statistics
from envmgr.lifecycle import EnvState, Event


class Renewals:
    """Renews envs, and goes on after pauses and the ends of hosts.

    Args:
        hosts: to build envs and start hosts.
        statistics: where renewals are counted.
        episodes: begins resets.
        spares: what takes the place of envs whose hosts are gone; None if there is nothing.
    """

    def __init__(
        self,
        hosts: Hosts,
        statistics: Statistics,
        episodes: Episodes,
        spares: Spares | None = None,
    ) -> None:
        self._hosts = hosts
        self._record = hosts.record
        self._states = hosts.record.states
        self._statistics = statistics
        self._begin_reset = episodes.begin
        self._spares = spares

    def renew_env(self, slot: EnvSlot) -> None:
        """Begin a new generation of an env in the host of its group."""
        self._begin_generation(slot)
        self._hosts.build(slot)

    def _renew_hosts(self, slots: Sequence[EnvSlot]) -> None:
        """Begin a new generation of envs whose host is gone, in a new one for all of them."""
        for slot in slots:
            slot.following = Next.NOTHING
            self._begin_generation(slot)
        self._hosts.start(slots)

    def _begin_generation(self, slot: EnvSlot) -> None:
        slot.generation += 1
        slot.renewals_in_a_row += 1
        slot.new_generation = True
        slot.has_plan = False
        self._statistics.renewals += 1
        self._statistics.has_generations = True
        if self._states[slot.env_id] is EnvState.ERROR:
            self._states.apply(slot.env_id, Event.RENEW)

    def bring_back(self, slot: EnvSlot) -> None:
        """Renew an env that takes part in no host, because its user repairs it by hand."""
        group = slot.group
        awaiting = [s for s in group.slots if s.phase is Phase.ENDING or _awaits_host(s)]
        if awaiting:
            self._hosts.join(slot, awaiting[0])
        elif group.host_id is None:
            self._renew_hosts([slot])
        else:
            self.renew_env(slot)

    def proceed(self, slot: EnvSlot) -> None:
        """Begin what was to follow a pause."""
        if _awaits_host(slot):
            self._renew_hosts([s for s in slot.group.slots if _awaits_host(s)])
            return
        following, slot.following = slot.following, Next.NOTHING
        if following is Next.RESET:
            self._begin_reset(slot)
        else:
            self.renew_env(slot)

    def host_ended(self, group: HostGroup) -> None:
        """The host of these envs is gone: go on with what follows, for all of them together."""
        leaving = [slot for slot in group.slots if slot.phase is Phase.ENDING]
        for slot in leaving:
            slot.host_id = None
            if slot.following is Next.NOTHING:
                self._hosts.settle(slot)
        awaiting = [slot for slot in leaving if slot.following is Next.RENEW_HOST]
        returning = [self.take_over(slot) for slot in awaiting]
        pause_s = max((slot.pause_s for slot in returning), default=0.0)
        if pause_s > 0.0:
            self._hosts.pause(returning, pause_s, Next.RENEW_HOST)
        elif returning:
            self._renew_hosts(returning)

    def take_over(self, slot: EnvSlot) -> EnvSlot:
        """Have a spare take the place of an env, if it can; return whose host is to be replaced."""
        if self._spares is None or self._record.launching:
            return slot
        return self._spares.take_over(slot)


def _awaits_host(slot: EnvSlot) -> bool:
    return slot.phase is Phase.PAUSING and slot.following is Next.RENEW_HOST
