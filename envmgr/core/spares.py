"""Spares: envs that are kept reset, and take the place of those whose episodes end or hosts die.

A spare is an env like any other, in a host of its own, behind an id that nobody sees: env_num and
those that follow. Its host keeps what comes of its reset. When it takes the place of an env, the
two exchange their hosts: the spare's host is told to ADOPT the env_id, which it answers with the
reset that it has kept, or as soon as that is done; the other one is told to ADOPT the spare's id,
and is reset there. So for everybody else the env is being reset, only not for long.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from envmgr import pickles
from envmgr.core.hosts import Hosts
from envmgr.core.phases import Change, Next, Phase
from envmgr.core.setup import Orientation
from envmgr.core.statistics import Statistics
from envmgr.core.table import NEVER, EnvSlot
from envmgr.lifecycle import EnvState, Event
from envmgr.types import EnvFactory
from envmgr.wire.messages import UNANSWERED, Op

logger = logging.getLogger("envmgr")

NO_SPARES = {"spare_env_num": 0, "spares_ready": 0}
"""The figures of a manager that has none."""


class Spares:
    """The spares of a manager, and whose turn is next.

    Their order is that of their latest resets, whether these are over or not: which of them takes
    the place of which env does not depend on how long a reset takes.

    Args:
        hosts: to exchange hosts.
        statistics: where they are counted.
        orientation: what envs were told, and where their observations go.
        takers: whether an env was built by the function that spares are built by, by env_id.
        in_order: envs whose steps are under way together are given their successors together, by
            ascending env_id, when all these steps are over; else each as soon as its episode ends.

    Attributes:
        slots: of the spares.
    """

    def __init__(
        self,
        hosts: Hosts,
        statistics: Statistics,
        orientation: Orientation,
        takers: tuple[bool, ...],
        *,
        in_order: bool,
    ) -> None:
        self.slots = hosts.slots[hosts.env_num :]
        self._hosts = hosts
        self._states = hosts.record.states
        self._statistics = statistics
        self._orientation = orientation
        self._takers = takers
        self._in_order = in_order
        self._queue: list[EnvSlot] = []
        # By env_id: what becomes of the env, in its own place or in that of its successor.
        self._waiting: dict[int, Callable[[EnvSlot], None]] = {}

    # -- spares -----------------------------------------------------------------------------

    def is_ready(self, spare: EnvSlot) -> bool:
        """Whether a spare has been reset."""
        return (
            spare.phase is Phase.IDLE
            and spare.host_id is not None
            and self._states[spare.env_id] is EnvState.RESET
        )

    def figures(self) -> dict[str, int]:
        """Return how many spares there are, and how many of them are ready; from any thread."""
        kept = [spare for spare in self.slots if not spare.dropped]
        return {"spare_env_num": len(kept), "spares_ready": sum(map(self.is_ready, kept))}

    def is_reset(self, slot: EnvSlot) -> None:
        """The reset of an env, or of a spare, begins."""
        self._waiting.pop(slot.env_id, None)
        if slot.is_spare:
            if slot in self._queue:
                self._queue.remove(slot)
            self._queue.append(slot)

    def kept(self, spare: EnvSlot) -> None:
        """The reset of a spare has succeeded."""
        spare.renewals_in_a_row = 0
        self._use_up(spare)

    def _use_up(self, spare: EnvSlot) -> None:
        """The reset of a spare is over, or another env's: what was for it is not for the next."""
        spare.attempts = 0
        spare.episode += 1
        spare.seed = None
        spare.new_generation = False
        self._hosts.settle(spare)

    def reseed(self, begin: Callable[[EnvSlot], None]) -> None:
        """Reset the spares that were given a seed which has not been used yet."""
        for spare in self.slots:
            if spare.new_seed is None or spare.dropped:
                continue
            spare.seed, spare.new_seed = spare.new_seed, None
            spare.base_seed = spare.seed
            if self.is_ready(spare):
                begin(spare)
            elif spare.phase is Phase.RESETTING:
                self._reset_again(spare, begin)

    def _reset_again(self, spare: EnvSlot, begin: Callable[[EnvSlot], None]) -> None:
        """Have a spare reset once more after the reset that is under way."""
        spare.group.superseded.add(spare.request_id)
        before, limit_s = spare.deadline, spare.limit_s
        begin(spare)
        if limit_s != NEVER:  # its limit counts from the end of that reset's
            self._hosts.limits.set_until(spare, before + limit_s, limit_s)

    # -- who takes whose place --------------------------------------------------------------

    def ended(self, slot: EnvSlot, then: Callable[[EnvSlot], None]) -> None:
        """The episode of an env is over: a spare takes its place, if one can.

        Args:
            slot: the env, whose host is well.
            then: what becomes of it: given its slot, or that of the spare.
        """
        self._hosts.settle(slot)
        self._waiting[slot.env_id] = then
        if not self._in_order:
            self.relieve()

    def failed(self, slot: EnvSlot) -> None:
        """An env has failed: if it waits for a successor, it is repaired instead."""
        self._waiting.pop(slot.env_id, None)

    @property
    def are_wanted(self) -> bool:
        """Whether an env waits for its successor."""
        return bool(self._waiting)

    def look(self) -> None:
        """Give ended envs their successors, if no step is under way any more."""
        if self._waiting and not self._hosts.record.is_executing:
            self.relieve()

    def relieve(self) -> None:
        """Give ended envs their successors, by ascending env_id."""
        for env_id in sorted(self._waiting):
            then = self._waiting.get(env_id)
            slot = self._hosts.slots[env_id]
            if then is None or slot.phase is not Phase.IDLE:
                self._waiting.pop(env_id, None)
                continue
            spare = self._successor_of(slot)
            if spare is None:
                then(slot)
            else:
                self._take_place(spare, slot)
                self._hosts.tell(spare, Op.ADOPT, None)
                then(spare)
            self._waiting.pop(env_id, None)

    def take_over(self, slot: EnvSlot) -> EnvSlot:
        """Have a spare take the place of an env whose host is gone, or ends well.

        Returns:
            Whose host that one is now, and is to be replaced: the spare, or the env itself if there
            is no spare for it.
        """
        spare = None if slot.is_spare or not slot.attended else self._successor_of(slot)
        if spare is None:
            return slot
        pause_s = slot.pause_s
        slot.generation += 1
        slot.renewals_in_a_row += 1
        slot.following = Next.NOTHING
        self._take_place(spare, slot)
        self._hosts.leave(spare, Next.RENEW_HOST, pause_s)
        return spare

    def _successor_of(self, slot: EnvSlot) -> EnvSlot | None:
        """Return the spare whose turn it is, if it may take the place of an env."""
        if slot.reset_params or slot.seed is not None or not self._takers[slot.env_id]:
            return None
        spare = next((spare for spare in self._queue if self._can_come(spare)), None)
        if spare is None or not self._orientation.are_alike(slot.env_id, spare.env_id):
            return None
        return spare

    def _can_come(self, spare: EnvSlot) -> bool:
        if spare.host_id is None or spare.group.is_ending:
            return False
        return spare.phase is Phase.RESETTING or self.is_ready(spare)

    def _take_place(self, spare: EnvSlot, slot: EnvSlot) -> None:
        """Exchange the hosts of a spare and an env, and await the reset of the spare there."""
        under_way = spare.phase is Phase.RESETTING
        deadline, limit_s = spare.deadline, spare.limit_s
        self._exchange(slot, spare)
        if under_way:
            self._use_up(spare)
        self._queue.remove(spare)
        self._waiting.pop(slot.env_id, None)
        self._statistics.swaps += 1
        self._statistics.has_generations = True
        slot.again = slot.waits = False
        if slot.doomed is None:
            self._hosts.record.happened(slot.env_id, Event.BEGIN_RESET)
        placement = self._orientation.placement_of(slot)
        self._hosts.request(slot, Op.ADOPT, placement, Change.RESET)
        if under_way:
            self._hosts.limits.set_until(slot, deadline, limit_s)

    def _exchange(self, slot: EnvSlot, spare: EnvSlot) -> None:
        """Have an env and a spare, which have their hosts to themselves, change places.

        Their hosts are to be told with ADOPT. What is under way in them is the caller's to settle.
        """
        ours, theirs = slot.group, spare.group
        for group, before in ((ours, slot), (theirs, spare)):
            group.superseded.update((before.request_id, UNANSWERED))
        ours.serve((spare,))
        theirs.serve((slot,))
        slot.host_id, spare.host_id = spare.host_id, slot.host_id
        slot.has_plan = spare.has_plan = False
        self._hosts.record.index_of[slot.env_id] = theirs.index
        self._hosts.record.moves += 1


def all_factories(factories: Sequence[EnvFactory], spare_num: int) -> list[EnvFactory]:
    """Return the factories of all envs, and then of the spares."""
    return [*factories, *([spare_factory(factories)] * spare_num if spare_num else [])]


def spare_factory(factories: Sequence[EnvFactory]) -> EnvFactory:
    """Return the factory that most envs have, the first of several: it builds the spares."""
    kinds = _kinds_of(factories)
    return factories[kinds.index(max(kinds, key=kinds.count))]


def takers_of(factories: Sequence[EnvFactory], spare: EnvFactory) -> tuple[bool, ...]:
    """Return for each env whether spares are built as it is."""
    kind, *kinds = _kinds_of([spare, *factories])
    alone = [env_id for env_id, other in enumerate(kinds) if other != kind]
    if alone:
        logger.warning(
            "envs %s take no spare: their env_fn is another than that of the spares. Give all envs "
            "one function, as in env_fn=[make_env] * n",
            alone,
        )
    return tuple(other == kind for other in kinds)


def _kinds_of(factories: Sequence[EnvFactory]) -> list[Any]:
    """Return what is equal for factories that build the same env: one object, or equal pickles."""
    known: dict[int, Any] = {}
    for factory in factories:
        if id(factory) not in known:
            try:
                known[id(factory)] = pickles.dumps(factory)
            except Exception:  # whatever a __reduce__ may raise: with `fork` it need not be sent
                known[id(factory)] = id(factory)
    return [known[id(factory)] for factory in factories]
