"""What hosts say of their envs at first, and what they have to be told before the first reset."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from envmgr.errors import LaunchError, SpaceMismatchError
from envmgr.observations import COPIED, VIEWED, ObservationReader, Placement, plan_placements
from envmgr.protocol import EnvDescription, Op
from envmgr.supervisor.hosts import Hosts
from envmgr.supervisor.slots import EnvSlot


class Orientation:
    """Spaces, places of observations, and requests that are repeated on every new env.

    Args:
        hosts: to tell hosts.
        env_num: number of envs.

    Attributes:
        descriptions: what each env said of itself, by env_id.
    """

    def __init__(self, hosts: Hosts, env_num: int) -> None:
        self.descriptions: dict[int, EnvDescription] = {}
        self._hosts = hosts
        self._readers: list[ObservationReader] = []
        self._placements: list[Placement | None] = [None] * env_num
        self._repeated: dict[int, dict[tuple[Op, str], Any]] = {}

    def place_observations(self, *, same_spaces: bool, copy_on_get: bool) -> None:
        """Check the spaces of all envs and lay out the memory for their observations.

        Raises:
            SpaceMismatchError: they differ and `same_spaces` is on.
            LaunchError: there is not enough memory.
        """
        described = [self.descriptions[i] for i in range(len(self._placements))]
        if same_spaces:
            _check_same_spaces(described)
        in_caller = self._hosts.transport.runs_in_caller
        self._readers = [
            ObservationReader(d.observation_space, copy_free_form=in_caller) for d in described
        ]
        rings = COPIED if copy_on_get else VIEWED
        placements, nbytes = plan_placements([r.layout for r in self._readers], rings)
        try:
            memory = self._hosts.transport.place(nbytes)
        except OSError as error:
            raise LaunchError(
                f"{nbytes / 2**20:.1f} MiB of shared memory for the observations of "
                f"{len(described)} envs cannot be had: {error}. Free memory, use fewer envs, or "
                "set shared_memory: false."
            ) from error
        if memory is None:
            return
        for reader, placement in zip(self._readers, placements, strict=True):
            if placement is not None:
                reader.attach(memory, placement, copy_on_get=copy_on_get)
        self._placements = placements

    def fits(self, slot: EnvSlot, description: EnvDescription) -> bool:
        """Keep what an env says of itself; False if the one before it said something else."""
        known = self.descriptions.setdefault(slot.env_id, description)
        return _same_spaces(known, description)

    def read(self, slot: EnvSlot, reference: Any) -> Any:
        """Return the observation that a reply refers to.

        Raises:
            ValueMismatchError: it refers to none.
        """
        return self._readers[slot.env_id].read(reference)

    def attach(self, slot: EnvSlot) -> None:
        """Tell a host where its observations go."""
        placement = self._placements[slot.env_id]
        if placement is not None:
            reader = self._readers[slot.env_id]
            self._hosts.tell(slot, Op.ATTACH, reader.placed_anew(placement))

    def introduce(self, slot: EnvSlot) -> None:
        """Tell a renewed env all that the one before it was told."""
        self.attach(slot)
        for (op, _), payload in self._repeated.get(slot.env_id, {}).items():
            self._hosts.tell(slot, op, payload)

    def repeat(self, env_id: int, op: Op, payload: tuple[str, Any]) -> None:
        """Have a request repeated on every later env of this env_id; the latest of a name counts.

        Args:
            env_id: which.
            op: SET_ATTR or CALL.
            payload: its payload, which begins with a name.
        """
        repeated = self._repeated.setdefault(env_id, {})
        repeated.pop((op, payload[0]), None)  # it comes last in the order, too
        repeated[op, payload[0]] = payload

    def detach(self) -> None:
        """Let go of the memory of observations."""
        for reader in self._readers:
            reader.detach()


def _same_spaces(one: EnvDescription, other: EnvDescription) -> bool:
    return bool(
        one.observation_space == other.observation_space and one.action_space == other.action_space
    )


def _check_same_spaces(described: Sequence[EnvDescription]) -> None:
    first = described[0]
    for env_id, description in enumerate(described):
        for name in ("observation_space", "action_space"):
            expected, found = getattr(first, name), getattr(description, name)
            if expected != found:
                raise SpaceMismatchError(
                    f"env {env_id} has {name} {found}, env 0 has {expected}. All envs of a "
                    "manager need equal spaces; set same_spaces: false if this is intended."
                )
