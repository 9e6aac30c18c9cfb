"""What the supervisor remembers of each env_id, and of the envs that share a host."""

from __future__ import annotations

import math
from collections.abc import Sequence
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


class Lost(str, Enum):
    """What a failure of an env leaves unusable."""

    NOTHING = "nothing"
    ENV = "the env"
    """A new env is needed. It is built in the same host if others share that; else in a new one."""
    HOST = "the host"
    """It died, timed out or broke the protocol."""


@dataclass(slots=True)
class EnvSlot:
    """One env_id: its host, what is under way, and what its user has and is owed.

    Attributes:
        env_id: the id.
        group: the envs that share its host.
        generation: how often the env behind the id was renewed.
        host_id: its host; None if it has none, or takes no part in the one of its group.
        work: what the host is busy with.
        request_id: the request whose reply is awaited.
        order: place of what the host does by itself in the order of requests.
        deadline: when `work` times out, or a pause ends. Requests to a shared host have none of
            their own: see `HostGroup.deadline`.
        limit_s: the time limit that was set last.
        since: when the request was sent, if it has a limit and the host is shared.
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
        waits: its episode has ended, and the next one begins when its host has been replaced.
        again: when the running reset is over, reset once more (new parameters or seed).
        attempts: failed attempts at the present reset.
        renewals_in_a_row: renewals since the last reset that succeeded.
        episode: resets that have succeeded.
        episodes_done: episodes counted against `episode_num`.
        doomed: its host died while it was ready: the next action gets an abnormal timestep.
        fresh: the observation and reset info that appear after that timestep.
        dropped: its failure budget is spent and it takes no more part.
        is_spare: the id is that of a spare, which nobody sees: see `spares.Spares`.
        result: what came of a call: `protocol.Message.payload`, or the failure.
    """

    env_id: int
    group: HostGroup = field(init=False, repr=False, compare=False)
    generation: int = 0
    host_id: int | None = None
    work: Work = Work.NONE
    request_id: int = 0
    order: int = 0
    deadline: float = NEVER
    limit_s: float = NEVER
    since: float = 0.0
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
    waits: bool = False
    again: bool = False
    attempts: int = 0
    renewals_in_a_row: int = 0
    episode: int = 0
    episodes_done: int = 0
    doomed: EnvFailure | None = None
    fresh: tuple[Any, dict[str, Any]] | None = None
    dropped: bool = False
    result: Any = None
    is_spare: bool = False

    @property
    def name(self) -> str:
        """What it is called in messages."""
        return f"{'spare ' if self.is_spare else ''}env {self.env_id}"

    @property
    def deliverable(self) -> bool:
        """Whether its timestep can be handed out."""
        return self.timestep is not None and not self.held


_AWAITED = frozenset((Work.STARTING, Work.RESETTING, Work.STEPPING, Work.CANCELLING, Work.CALLING))


@dataclass(slots=True, eq=False)
class HostGroup:
    """The envs that share a host, which may be replaced.

    Who belongs to it never changes, except where a spare takes the place of another env.

    Attributes:
        index: its place among the groups.
        slots: its envs, by ascending env_id.
        is_shared: there are several.
        by_id: the same envs, by env_id.
        host_id: the host; None while there is none.
        is_ending: the host was killed or asked to end.
        is_worn: the host wants to be replaced as soon as none of its envs is in an episode.
        running: of a shared host: the env that it has said it works for.
        deadline: of a shared host: when what it does now times out, or its silence does; a moment
            that is too early is allowed while nothing is running.
        quiet_since: of a shared host: when it was last known to be done with something.
        overdue: of a shared host: the order of the request that it should have begun with, as far
            as could be told, and what had been posted for it when that was first looked at.
        is_spare: it serves a spare.
        superseded: requests to its host under the id that it served before; what is still on its
            way in reply to them is nobody's.
    """

    index: int
    slots: tuple[EnvSlot, ...]
    is_shared: bool = field(init=False)
    by_id: dict[int, EnvSlot] = field(init=False)
    host_id: int | None = None
    is_ending: bool = False
    is_worn: bool = False
    running: EnvSlot | None = None
    deadline: float = NEVER
    quiet_since: float = 0.0
    overdue: tuple[int, float] = (0, 0.0)
    is_spare: bool = field(init=False)
    superseded: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.is_shared = len(self.slots) > 1
        self.serve(self.slots)

    def serve(self, slots: tuple[EnvSlot, ...]) -> None:
        """Have these envs belong to it."""
        self.slots = slots
        self.is_spare = slots[0].is_spare
        self.by_id = {slot.env_id: slot for slot in slots}
        for slot in slots:
            slot.group = self

    def present(self) -> list[EnvSlot]:
        """Return the envs that take part in the host."""
        return [slot for slot in self.slots if slot.host_id is not None]

    def awaited(self) -> list[EnvSlot]:
        """Return the envs whose replies are awaited, in the order in which they run, if known.

        Requests run in the order in which they were sent; a reset that the host begins by itself
        runs after those that were sent before it was known of.
        """
        return sorted(
            (slot for slot in self.slots if slot.work in _AWAITED),
            key=lambda slot: max(slot.request_id, slot.order),
        )


def host_groups(slots: Sequence[EnvSlot], n_hosts: int) -> list[HostGroup]:
    """Divide envs into contiguous groups whose sizes differ by one at most, larger ones first."""
    size, n_larger = divmod(len(slots), n_hosts)
    groups: list[HostGroup] = []
    first = 0
    for index in range(n_hosts):
        end = first + size + (index < n_larger)
        groups.append(HostGroup(index, tuple(slots[first:end])))
        first = end
    return groups
