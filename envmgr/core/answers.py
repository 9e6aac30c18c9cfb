"""What the answers of hosts mean for their envs. That they were asked for is known already."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable
from functools import partial
from itertools import repeat
from typing import Any

from envmgr.core import failures
from envmgr.core.episodes import Episodes
from envmgr.core.hosts import Hosts
from envmgr.core.orientation import Orientation
from envmgr.core.payloads import (
    LATE_ALONE,
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
from envmgr.transport.base import Arrival
from envmgr.types import EnvTimestep
from envmgr.wire.block import MAX_REQUEST_ID
from envmgr.wire.messages import AfterStep, Message, Op

logger = logging.getLogger("envmgr")

_IN_A_STEP = (Phase.POSTED, Phase.STEPPING)
_make_timestep = partial(tuple.__new__, EnvTimestep)


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
        # The arrivals that `step_on` was applying last, and the first env of these.
        self._applying: tuple[list[tuple[int, Arrival]], int] = ([], 0)

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
        together = self._record.together
        if after == AfterStep.RESETS_LATE and (together is None or slot.env_id not in together):
            raise MalformedReplyError(LATE_ALONE)
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

    def step_on(self, arrivals: deque[tuple[int, Arrival]]) -> None:
        """Apply the steps after which episodes go on, as far as they come before anything else.

        Can be interrupted anywhere, and called again: they count when their phases have changed,
        all at once, and leave the queue after that, all at once.

        Args:
            arrivals: what has come.
        """
        record, (applying, first) = self._record, self._applying
        was_left = bool(applying and arrivals and arrivals[0] is applying[0])
        if not was_left or record.phases.column[first] != Phase.IDLE:
            applying = list(arrivals)
            timesteps = self._ordinary(applying)
            if not timesteps:
                return
            del applying[len(timesteps) :]
            self._applying = applying, next(iter(timesteps))
            record.observed.keep_each(timesteps)
            record.undelivered.update(timesteps)
            record.phases.apply_all(timesteps, Change.SETTLE)
        try:  # in one go: no signal handler comes in between
            deque(map(deque.popleft, repeat(arrivals, len(applying))), maxlen=0)
        except IndexError:
            return  # one has closed the manager before that
        self._applying = [], 0

    def _ordinary(self, arrivals: Iterable[tuple[int, Arrival]]) -> dict[int, EnvTimestep]:
        """Return the timesteps of the first arrivals, as far as there is nothing else to them."""
        record, groups = self._record, self._hosts.group_of_host
        tokens, phases, read = record.token_items, record.phases.column, record.observed.read
        found: dict[int, EnvTimestep] = {}
        for host_id, message in arrivals:
            group = groups.get(host_id)
            if type(message) is not Message or group is None:
                break
            op, env_id, generation, request_id, payload = message
            slot = group.by_id.get(env_id)
            if op != Op.STEPPED or slot is None or group.running is not None or group.is_ending:
                break
            is_awaited = generation == slot.generation and phases[env_id] in _IN_A_STEP
            if not is_awaited or tokens[env_id] & MAX_REQUEST_ID != request_id or env_id in found:
                break
            try:
                reference, reward, done, info, _ = step_fields(payload)
                if done:
                    break
                obs = read(env_id, reference)
            except (ValueMismatchError, MalformedReplyError):
                break
            slot.deadline = NEVER
            found[env_id] = _make_timestep((obs, reward, done, info))
        return found

    def result(self, slot: EnvSlot, payload: Any) -> None:
        """Keep the payload of RESULT, or what stands for it."""
        slot.result = payload
        self._repair.call_ended(slot)
