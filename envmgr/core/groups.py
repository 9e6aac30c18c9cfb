"""Which envs share a host, and what is known of that host."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from envmgr.core.phases import AWAITED
from envmgr.core.slots import NEVER, EnvSlot


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
        is_retired: what the block says of its host may be written by one that was given up.
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
    is_retired: bool = False
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

    def blamed(self) -> EnvSlot:
        """Return the env that was running when something happened to the host.

        Without a word of the host: the first in the order in which requests were sent; if it was
        idle, the first of its envs.
        """
        if self.running is not None:
            return self.running
        return next(iter((*self.awaited(), *self.present(), *self.slots)))

    def awaited(self) -> list[EnvSlot]:
        """Return the envs whose replies are awaited, in the order in which they run, if known.

        Requests run in the order in which they were sent; a reset that the host begins by itself
        runs after those that were sent before it was known of. Steps that are posted are not among
        them: the block says which of those is run. Nor are resets that wait for a step of others.
        """
        return sorted(
            (s for s in self.slots if s.phase in AWAITED and not s.record.late[s.env_id]),
            key=lambda slot: max(slot.request_id, slot.order),
        )


def host_groups(slots: Sequence[EnvSlot], n_hosts: int | None) -> list[HostGroup]:
    """Divide envs into contiguous groups whose sizes differ by one at most, larger ones first.

    The rows of a batched env stay together: they count as one.

    Args:
        slots: of the envs.
        n_hosts: how many groups; None: one for each.
    """
    units: list[list[EnvSlot]] = []
    for slot in slots:
        if slot.batch is None or slot.env_id == slot.batch.first:
            units.append([])
        units[-1].append(slot)
    n_hosts = n_hosts or len(units)
    size, n_larger = divmod(len(units), n_hosts)
    groups: list[HostGroup] = []
    first = 0
    for index in range(n_hosts):
        end = first + size + (index < n_larger)
        groups.append(HostGroup(index, tuple(itertools.chain(*units[first:end]))))
        first = end
    return groups
