"""What the answers of hosts mean for their envs. That they were asked for is known already."""

from __future__ import annotations

import logging
from typing import Any

from envmgr.core import failures
from envmgr.core.episodes import Episodes
from envmgr.core.hosts import Hosts
from envmgr.core.orientation import Orientation
from envmgr.core.payloads import (
    MAX_NOTICES,
    MalformedReplyError,
    description_of,
    notice_of,
    reset_fields,
    saved_of,
    step_fields,
)
from envmgr.core.phases import Change, Phase
from envmgr.core.repair import Repair
from envmgr.core.slots import NEVER, EnvSlot
from envmgr.core.spares import Spares
from envmgr.core.stats import Statistics
from envmgr.lifecycle import EnvState, Event
from envmgr.spaces import ValueMismatchError
from envmgr.types import EnvTimestep
from envmgr.wire.block import token_of
from envmgr.wire.messages import Message

logger = logging.getLogger("envmgr")

_IN_A_STEP = (Phase.POSTED, Phase.STEPPING)


class Answers:
    """Applies answers to the record.

    Each of them raises ValueMismatchError or MalformedReplyError if it is not what the protocol
    says; nothing was changed then.

    Args:
        hosts: what is awaited of which host.
        statistics: where things are counted.
        orientation: what envs are told first.
        episodes: how they begin and end.
        repair: what follows failures.
        spares: told when they have been reset; None if there are none.
    """

    def __init__(
        self,
        hosts: Hosts,
        statistics: Statistics,
        orientation: Orientation,
        episodes: Episodes,
        repair: Repair,
        spares: Spares | None = None,
    ) -> None:
        self._hosts = hosts
        self._record = hosts.record
        self._states = hosts.record.states
        self._statistics = statistics
        self._orientation = orientation
        self._episodes = episodes
        self._repair = repair
        self._spares = spares
        self._noticed: set[str] = set()

    def notice(self, slot: EnvSlot, payload: Any) -> None:
        """Log the payload of NOTICE, once."""
        text = notice_of(payload)
        if self._repair.quiet:
            return
        if text not in self._noticed and len(self._noticed) < MAX_NOTICES:
            self._noticed.add(text)
            logger.warning("observations of %s: %s (reported once)", slot.name, text)

    def saved(self, slot: EnvSlot, payload: Any) -> None:
        """Keep the payload of SAVED."""
        self._episodes.restorations.saved[slot.env_id] = saved_of(payload)

    def hello(self, slot: EnvSlot, payload: Any) -> bool:
        """Apply the payload of HELLO; False if a renewed env has other spaces than before."""
        description = description_of(payload)
        fits = self._orientation.fits(slot, description)
        if self._record.launching and slot.generation == 0:
            self._hosts.settle(slot)
            return True  # the engine goes on when all of them are there
        if not fits:
            return False
        self._hosts.settle(slot)
        self._orientation.introduce(slot)
        if slot.attended:
            self._episodes.begin(slot)
            return True
        if self._states[slot.env_id] is EnvState.INIT:
            self._states.apply(slot.env_id, Event.REPAIRED_UNATTENDED)
        self._episodes.replace_worn_host(slot.group)
        return True

    def reset_done(self, slot: EnvSlot, payload: Any) -> None:
        """Apply the payload of RESET_DONE."""
        slot.group.superseded.clear()
        if slot.is_spare:
            self._kept(slot, payload)
            return
        reference, info = reset_fields(payload)
        obs = self._record.observed.read(slot.env_id, reference)
        self._episodes.count_reset(slot)
        if slot.again:
            self._episodes.begin(slot)
            return
        self._episodes.use_up_seed(slot)
        self._hosts.settle(slot)
        restoration = self._episodes.restorations.due.pop(slot.env_id, None)
        if restoration is not None and restoration.record is None:
            self._statistics.resumed += 1
        if self._statistics.failing:
            self._statistics.note_ready(slot.env_id, slot.generation, self._hosts.clock())
        if slot.doomed is not None:
            slot.fresh = (obs, info)
            return
        slot.obs = obs
        self._episodes.begun(slot, info)
        if restoration is not None and restoration.record is not None:
            self._episodes.restored(slot, restoration.record)
            return
        together = self._record.together
        failure = None if together is None else together.doomed_with(slot.env_id)
        if failure is not None:  # nobody has seen this episode: it begins again with the others'
            slot.doomed, slot.fresh = failures.of_neighbour(slot, failure), (obs, info)

    def _kept(self, spare: EnvSlot, payload: Any) -> None:
        if payload is not None or self._spares is None:
            raise MalformedReplyError("it hands out what it was told to keep")
        self._spares.kept(spare)

    def stepped(self, slot: EnvSlot, payload: Any) -> None:
        """Apply the payload of STEPPED."""
        reference, reward, done, info, after = step_fields(payload)
        if slot.phase is Phase.CANCELLING:
            self._episodes.abandon(slot, after)
            return
        slot.obs = obs = self._record.observed.read(slot.env_id, reference)
        slot.timestep = EnvTimestep(obs, reward, done, info)
        if not done:
            self._hosts.settle(slot)
            self._states.apply(slot.env_id, Event.STEPPED)
        else:
            self._episodes.end(slot, after)

    def stepped_on(self, slot: EnvSlot, message: Message) -> bool:
        """Apply a step after which an episode goes on; False if that is not all there is to it.

        Can be interrupted anywhere: until the last of this it counts as not applied.
        """
        _, env_id, generation, request_id, payload = message
        record = self._record
        is_awaited = record.token_items[env_id] == token_of(generation, request_id)
        if not is_awaited or record.phases.column[env_id] not in _IN_A_STEP:
            return False
        try:
            reference, reward, done, info, _ = step_fields(payload)
            if done:
                return False
            obs = record.observed.read(env_id, reference)
        except (ValueMismatchError, MalformedReplyError):
            return False
        record.observed.keep(env_id, obs)
        record.undelivered[env_id] = EnvTimestep(obs, reward, done, info)
        slot.deadline = NEVER
        record.phases.apply(env_id, Change.SETTLE)
        return True

    def result(self, slot: EnvSlot, payload: Any) -> None:
        """Keep the payload of RESULT, or what stands for it."""
        slot.result = payload
        self._repair.call_ended(slot)
