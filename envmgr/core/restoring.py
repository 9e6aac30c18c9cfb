"""Envs that are to be what they were before: from a snapshot, or resumed after their host was lost.

At its next reset such an env is given its state in place of being reset. So for everybody else it
is an env that is being reset: limits, retries, renewals and interrupts are those of any reset.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from envmgr.core.hosts import Hosts
from envmgr.core.phases import Phase
from envmgr.core.slots import EnvSlot, Record
from envmgr.errors import EnvFailure
from envmgr.lifecycle import EnvState
from envmgr.types import EnvTimestep
from envmgr.wire.messages import SavedEnv


@dataclass(frozen=True)
class EnvRecord:
    """What the manager knows of an env at rest, besides what its host knows.

    Attributes:
        state: as its user sees it.
        obs: what `ready_obs` shows, or would show.
        timestep: one that is not delivered yet; None if there is none.
        doomed: as in `EnvSlot`; so are all the others.
    """

    state: EnvState
    obs: Any
    timestep: EnvTimestep | None
    doomed: EnvFailure | None
    fresh: tuple[Any, dict[str, Any]] | None
    generation: int
    reset_info: dict[str, Any]
    reset_params: dict[str, Any]
    base_seed: int | None
    new_seed: int | None
    new_generation: bool
    attended: bool
    waits: bool
    episode: int
    episodes_done: int


def record_of(slot: EnvSlot) -> EnvRecord:
    """Return what is known of an env at rest."""
    return EnvRecord(
        state=slot.record.states[slot.env_id],
        obs=slot.obs,
        timestep=slot.timestep,
        doomed=slot.doomed,
        fresh=slot.fresh,
        generation=slot.generation,
        reset_info=slot.reset_info,
        reset_params=slot.reset_params,
        base_seed=slot.base_seed,
        new_seed=slot.new_seed,
        new_generation=slot.new_generation,
        attended=slot.attended,
        waits=slot.waits,
        episode=slot.episode,
        episodes_done=slot.episodes_done,
    )


class Restoration(NamedTuple):
    """What an env is to be at its next reset.

    Attributes:
        saved: for its host.
        record: for its manager; None for an env that is resumed, which begins an episode.
    """

    saved: SavedEnv
    record: EnvRecord | None = None


class Restorations:
    """Who is to be restored, and what envs may be resumed from.

    Attributes:
        due: by env_id; until the reset has succeeded, in whatever host.
        saved: the last state that each env had saved, by env_id.
    """

    def __init__(self) -> None:
        self.due: dict[int, Restoration] = {}
        self.saved: dict[int, SavedEnv] = {}

    def saved_for(self, slot: EnvSlot) -> SavedEnv | None:
        """Return what an env is to be when its reset, which now begins, is over."""
        restoration = self.due.get(slot.env_id)
        return None if restoration is None else restoration.saved

    def resume(self, slot: EnvSlot) -> None:
        """The host of an env is lost: the next one goes on where its episode was saved last.

        From one state an env is resumed once: it may be the state that its host dies of.
        """
        saved = self.saved.pop(slot.env_id, None)
        in_episode = slot.record.states[slot.env_id] is EnvState.RUN
        if saved is not None and in_episode and saved.episode == slot.episode:
            self.due[slot.env_id] = Restoration(saved)

    def failed(self, slot: EnvSlot, *, is_lost: bool) -> None:
        """An env has failed, and it or its host is lost, or not."""
        due = self.due.get(slot.env_id)
        if due is not None and due.record is None and slot.phase is Phase.RESETTING:
            del self.due[slot.env_id]  # it cannot be resumed from that: it is reset
        elif is_lost:
            self.resume(slot)

    def forget(self, env_id: int) -> bool:
        """An env is to be reset after all; return whether it was to be restored."""
        self.saved.pop(env_id, None)
        return self.due.pop(env_id, None) is not None


def hurry_to_rest(hosts: Hosts) -> None:
    """Have what is under way end without anybody who gathers it: `is_at_rest` tells when it has."""
    for env_id in hosts.phases.ids_in(Phase.POSTED):
        hosts.take_over(hosts.slots[env_id])


def is_at_rest(record: Record) -> bool:
    """Whether nothing is under way in any host, and no action waits for its abnormal timestep."""
    idle = record.phases.column.count(Phase.IDLE)
    return idle == len(record.slots) and not record.unexecuted
