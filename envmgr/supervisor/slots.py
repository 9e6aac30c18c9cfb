"""What the supervisor remembers of each env_id."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from envmgr.errors import EnvFailure
from envmgr.types import EnvTimestep

NEVER = math.inf


class Work(str, Enum):
    """What an env's host is busy with: at most one thing at a time. The value is for messages.

    A str, here and below, because the hash of a plain Enum is computed in Python: slow.
    """

    NONE = "idle"
    STARTING = "construction"
    RESETTING = "reset"
    STEPPING = "step"
    CANCELLING = "cancelled step"
    """A step whose timestep nobody wants any more, because `reset` was called."""
    CALLING = "call"
    ENDING = "close"
    """The host was killed or asked to end; what follows begins when it is gone."""
    PAUSING = "pause"
    """What follows begins at the deadline."""


class Next(str, Enum):
    """What follows a pause, or the end of a host."""

    NOTHING = "nothing"
    RESET = "a reset"
    RENEW_ENV = "a new env in the same host"
    RENEW_HOST = "a new host"


@dataclass(slots=True)
class EnvSlot:
    """One env_id: its host, what is under way, and what its user has and is owed.

    Attributes:
        env_id: the id.
        generation: how often the env behind the id was renewed.
        host_id: its host; None if it has none.
        work: what the host is busy with.
        request_id: the request whose reply is awaited.
        deadline: when `work` times out, or a pause ends.
        limit_s: the time limit that the deadline came from.
        following: what follows a pause or the end of a host.
        pause_s: how long to pause before that.
        obs: the newest observation: what `ready_obs` shows in RUN.
        reset_info: info of the newest reset.
        owed: an action was accepted and its timestep not yet delivered.
        timestep: that timestep, once it has arrived.
        held: the timestep waits for the reset that belongs to it (`reset_inplace`).
        reset_params: keyword arguments of its resets.
        base_seed: the seed it was given last, from which those of later generations are derived.
        new_seed: given by `seed` and not used yet; the next explicit reset takes it.
        seed: for the reset under way, exactly.
        new_generation: the next reset is the first of a later generation, seeded accordingly.
        attended: an episode is to begin when its repair is over; else it goes to NEED_RESET.
        again: when the running reset is over, reset once more (new parameters or seed).
        attempts: failed attempts at the present reset.
        renewals_in_a_row: renewals since the last reset that succeeded.
        episode: resets that have succeeded.
        episodes_done: episodes counted against `episode_num`.
        doomed: its host died while it was ready: the next action gets an abnormal timestep.
        fresh: the observation and reset info that appear after that timestep.
        dropped: its failure budget is spent and it takes no more part.
        result: what came of a call: `protocol.Message.payload`, or the failure.
    """

    env_id: int
    generation: int = 0
    host_id: int | None = None
    work: Work = Work.NONE
    request_id: int = 0
    deadline: float = NEVER
    limit_s: float = NEVER
    following: Next = Next.NOTHING
    pause_s: float = 0.0
    obs: Any = None
    reset_info: dict[str, Any] = field(default_factory=dict)
    owed: bool = False
    timestep: EnvTimestep | None = None
    held: bool = False
    reset_params: dict[str, Any] = field(default_factory=dict)
    base_seed: int | None = None
    new_seed: int | None = None
    seed: int | None = None
    new_generation: bool = False
    attended: bool = True
    again: bool = False
    attempts: int = 0
    renewals_in_a_row: int = 0
    episode: int = 0
    episodes_done: int = 0
    doomed: EnvFailure | None = None
    fresh: tuple[Any, dict[str, Any]] | None = None
    dropped: bool = False
    result: Any = None

    @property
    def deliverable(self) -> bool:
        """Whether its timestep can be handed out."""
        return self.timestep is not None and not self.held
