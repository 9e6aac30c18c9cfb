"""The first descriptions of envs: are their spaces equal, do steps go by memory or by message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from envmgr.core.hosts import Hosts
from envmgr.core.observations import Arena, Arenas, ObservationReader, ViewGuard
from envmgr.core.phases import Phase
from envmgr.core.table import ManagedEnv
from envmgr.errors import LaunchError, SpaceMismatchError
from envmgr.spaces import Layout, codec_of, same_space, space_text
from envmgr.wire.arenas import CopyOnGet, Placement, arena_arrays, buffers_for, plan_placements
from envmgr.wire.block import Block, BlockPlan, HandedOver
from envmgr.wire.info_forms import MOST_FORMS, InfoField, InfoForm
from envmgr.wire.messages import EnvDescription, Op
from envmgr.wire.rewards import LENGTH, MAX_LENGTH


class EnvSetup:
    """Spaces, buffers of observations, and requests that are repeated on every new env.

    Attributes:
        descriptions: how each env described itself, by env_id.
        kinds: the distinct action spaces of envs whose steps are posted, and which of them each env
            has; None for the other envs.
        info_forms: the forms of infos that hosts may write, by number.
    """

    def __init__(self, hosts: Hosts, env_num: int) -> None:
        self.descriptions: dict[int, EnvDescription] = {}
        self._hosts = hosts
        self._observed = hosts.table.observed
        self._readers: list[ObservationReader] = []
        self._placements: list[Placement | None] = [None] * env_num
        self.kinds: tuple[list[Any], list[int | None]] = ([], [None] * env_num)
        self.info_forms: dict[int, InfoForm] = {}
        self._repeated: dict[int, dict[tuple[Op, str], Any]] = {}
        self._alike: dict[int, bool] = {}  # by env_id; spares are all alike

    @property
    def kinds_that_convert(self) -> set[int]:
        """The kinds of actions that all envs of the kind take in any form."""
        spaces, kind_of = self.kinds
        kinds = set(range(len(spaces)))
        for env_id, described in self.descriptions.items():
            if described.converts_actions:
                continue
            if env_id >= len(kind_of):  # a spare, which may come to serve any env_id
                return set()
            kinds -= {kind_of[env_id]}
        return kinds

    def place_observations(self, *, same_spaces: bool, handed_out: CopyOnGet) -> Block | None:
        """Check the spaces of all envs and lay out the memory for their observations.

        Returns:
            The block that steps can be posted in; None where steps go by message.

        Raises:
            SpaceMismatchError: the spaces differ and `same_spaces` is on.
            LaunchError: there is not enough memory.
        """
        described = [self.descriptions[i] for i in range(len(self._placements))]
        if same_spaces:
            _check_same_spaces([self.descriptions[s.env_id] for s in self._hosts.envs])
        self._readers = [ObservationReader(d.observation_space) for d in described]
        plan = self._block_plan(described)
        buffers = buffers_for(handed_out)
        layouts = [reader.layout for reader in self._readers]
        placements, nbytes = plan_placements(layouts, buffers, plan.nbytes if plan else 0)
        memory = self._memory_of(nbytes)
        if memory is None:
            self._observed.open(self._readers)
            return None
        guard = ViewGuard(len(described)) if handed_out == "checked" else None
        self._observed.open(self._readers, guard)
        self._attach(memory, placements, plan, guard, copies=handed_out is True)
        if plan is None:
            return None
        arena = self._arena_of(memory, placements, guard, copies=handed_out is True)
        self._observed.lay_out(arena, buffers)
        kinds = self.kinds[1]
        self._hosts.table.by_message.update(i for i, kind in enumerate(kinds) if kind is None)
        return Block(memory, plan)

    def _arena_of(
        self,
        memory: memoryview,
        placements: Sequence[Placement | None],
        guard: ViewGuard | None,
        *,
        copies: bool,
    ) -> Arena | Arenas:
        """Return the arena that reads the observations of envs whose steps are posted."""
        members: dict[Layout, list[int]] = {}
        for env_id, placement in enumerate(placements):
            if placement is not None:
                members.setdefault(placement.layout, []).append(env_id)
        found: list[tuple[Arena, int] | None] = [None] * len(placements)
        for layout, env_ids in members.items():
            placement = placements[env_ids[0]]
            if placement is not None:
                arrays = arena_arrays(memory, placement)
                arena = Arena(
                    arrays, layout, placement.buffers, env_ids, copies=copies, guard=guard
                )
                for row, env_id in enumerate(env_ids):
                    found[env_id] = arena, row
        return arena if len(env_ids) == len(placements) else Arenas(found)

    def _memory_of(self, nbytes: int) -> memoryview | None:
        try:
            return self._hosts.transport.place(nbytes)
        except OSError as error:
            raise LaunchError(
                f"{nbytes / 2**20:.1f} MiB of shared memory for the observations of "
                f"{len(self._readers)} envs cannot be had: {error}. Free memory, use fewer envs, "
                "or set shared_memory: false."
            ) from error

    def _attach(
        self,
        memory: memoryview,
        placements: Sequence[Placement | None],
        plan: BlockPlan | None,
        guard: ViewGuard | None,
        *,
        copies: bool,
    ) -> None:
        """Have each reader read from where the observations of its env are placed."""
        for env_id, (reader, placement) in enumerate(zip(self._readers, placements, strict=True)):
            if placement is not None:
                kind = self.kinds[1][env_id]
                if kind is not None:
                    placement = replace(placement, block=plan, action_kind=kind)
                wrap = None if guard is None else partial(guard.wrap, [env_id])
                reader.attach(memory, placement, copy_on_get=copies, guard=wrap)
                self._placements[env_id] = placement

    def _block_plan(self, described: Sequence[EnvDescription]) -> BlockPlan | None:
        """Return the plan of the block; None if no env's data has a fixed layout or any is async.

        The block has a column for each kind of actions.
        """
        spaces, kind_of = self.kinds
        if not self._hosts.transport.has_block or any(each.is_async for each in described):
            return None
        for env_id, (observations, actions, *_) in enumerate(described):
            if not codec_of(observations).structure.is_placed or codec_of(actions).layout is None:
                continue
            known = (kind for kind, space in enumerate(spaces) if same_space(space, actions))
            kind_of[env_id] = kind = next(known, len(spaces))
            if kind == len(spaces):
                spaces.append(actions)
        layouts = [layout for space in spaces if (layout := codec_of(space).layout) is not None]
        if not layouts:
            return None
        length = max(_reward_length(d.reward_space) for d in described)
        n_hosts, settings = len(self._hosts.groups), self._hosts.settings
        return BlockPlan(
            len(described),
            n_hosts,
            layouts[0],
            length,
            settings.measures,
            -(-settings.events // n_hosts),
            tuple(layouts[1:]),
            HandedOver(len(described)) if self._hosts.transport.shares_objects else None,
        )

    def fits(self, env: ManagedEnv, description: EnvDescription) -> bool:
        """Keep an env's description; return False if the env before it had a different one."""
        env.resets_alone = description.resets_alone
        known = self.descriptions.setdefault(env.env_id, description)
        return known is description or (
            known.is_async == description.is_async and _same_spaces(known, description)
        )

    def attach(self, env: ManagedEnv) -> None:
        """Tell the host of an env where the env's observations go."""
        placement = None if env.is_spare else self.placement_of(env)
        if placement is not None:
            self._hosts.tell(env, Op.ATTACH, placement)

    def placement_of(self, env: ManagedEnv) -> Placement | None:
        """Return where the observations of an env go from now on; None: by message."""
        placement = self._placements[env.env_id]
        if placement is None or env.env_id in self._hosts.table.retired:
            return None
        index, forms = self._hosts.table.index_of[env.env_id], _numbered(self.info_forms)
        placed = self._observed.placed_anew(env.env_id, placement)
        return replace(placed, host_index=index, info_forms=forms)

    def number(self, form: InfoForm) -> None:
        """Have all hosts write infos of this form as records, as soon as they know of it."""
        known = self.info_forms
        if form in known.values() or len(known) >= MOST_FORMS:
            return
        number = len(known) + 1
        known[number] = form  # first: whoever is told may write one
        payload = _numbered({number: form})
        for group in self._hosts.groups:
            if group.host_id is not None and not group.is_ending:  # others are told with `attach`
                env = next(env for env in group.envs if env.host_id is not None)
                self._hosts.tell(env, Op.INFO_FORMS, payload)

    def introduce(self, env: ManagedEnv) -> None:
        """Tell a renewed env all that the one before it was told."""
        self.attach(env)
        for (op, _), payload in self._repeated.get(env.env_id, {}).items():
            self._hosts.tell(env, op, payload)

    def repeat(self, env_id: int, op: Op, payload: tuple[str, Any]) -> None:
        """Have a request repeated on every later env of this env_id; the latest of a name counts.

        Args:
            env_id: which env_id.
            op: SET_ATTR or CALL.
            payload: its payload, which begins with a name.
        """
        repeated = self._repeated.setdefault(env_id, {})
        repeated.pop((op, payload[0]), None)  # it comes last in the order, too
        repeated[op, payload[0]] = payload

    def repeat_on_spares(self, op: Op, payload: tuple[str, Any]) -> None:
        """Have a request repeated on every spare, the present ones included."""
        for env in self._hosts.envs[self._hosts.env_num :]:
            self.repeat(env.env_id, op, payload)
            if env.host_id is not None and env.phase in (Phase.IDLE, Phase.RESETTING):
                self._hosts.tell(env, op, payload)

    def are_alike(self, env_id: int, spare_id: int) -> bool:
        """Return whether an env and a spare have equal spaces and got the same requests."""
        one, other = (self._repeated.get(i, {}) for i in (env_id, spare_id))
        if one.keys() != other.keys() or any(one[k] is not other[k] for k in one):
            return False
        alike = self._alike.get(env_id)
        if alike is None:
            alike = _same_spaces(self.descriptions[env_id], self.descriptions[spare_id])
            self._alike[env_id] = alike
        return alike


def _numbered(forms: Mapping[int, InfoForm]) -> tuple[tuple[int, tuple[InfoField, ...]], ...]:
    """Return numbered forms as they are sent to hosts."""
    return tuple((number, form.fields) for number, form in forms.items())


def _reward_length(reward_space: Any) -> int:
    """Return for how many numbers per reward the block has room."""
    shape: Any = getattr(reward_space, "shape", None) or ()
    return int(shape[0]) if len(shape) == 1 and LENGTH < shape[0] <= MAX_LENGTH else LENGTH


def _same_spaces(one: EnvDescription, other: EnvDescription) -> bool:
    return same_space(one.observation_space, other.observation_space) and same_space(
        one.action_space, other.action_space
    )


def _check_same_spaces(described: Sequence[EnvDescription]) -> None:
    first = described[0]
    for env_id, description in enumerate(described):
        for name in ("observation_space", "action_space"):
            expected, found = getattr(first, name), getattr(description, name)
            if not same_space(expected, found):
                raise SpaceMismatchError(
                    f"env {env_id} has {name} {space_text(found)}, env 0 has "
                    f"{space_text(expected)}. All envs of a manager need equal spaces; set "
                    "same_spaces: false if this is intended."
                )
