"""How observations get from a host to the parent.

With a fixed layout they are written into an arena: per leaf one array `(slots, env_num, *shape)`.
An env's observations take its slots in turn, those of steps and those of resets each a ring of
their own, and the reply names the slot. So envs that are stepped together are in the same slot, and
their batch is one slice, whatever episodes have ended. The rings are as long as a view that was
handed out has to stay valid: see `Rings`. Without an arena, or without a fixed layout, the reply
carries the observation itself.

Checks come before anything is written: a value that does not fit is refused whole.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
from gymnasium import spaces

from envmgr.block import BlockPlan, aligned
from envmgr.spaces import (
    Array,
    Layout,
    Leaf,
    OnCast,
    ValueMismatchError,
    check_finite,
    check_free_form,
    finite_test,
    layout_of,
    path_text,
)


@dataclass(frozen=True)
class Rings:
    """How many observations of an env are kept.

    Attributes:
        steps: of its steps; their slots are 0 to `steps - 1`.
        resets: of its resets; their slots follow.
    """

    steps: int
    resets: int

    @property
    def slots(self) -> int:
        """All of them together."""
        return self.steps + self.resets

    def after(self, slot: int) -> int:
        """Return the slot that comes after this one in its ring."""
        if slot < self.steps:
            return (slot + 1) % self.steps
        return self.steps + (slot + 1 - self.steps) % self.resets


CopyOnGet = Literal[True, False, "until_send", "checked"]
"""Whether observations are copied out of shared memory, or how long views of it stay valid."""

Guard = Callable[[Array], Array]
"""Wraps a view that is handed out."""

COPIED = Rings(2, 2)
"""The newest observation stays while the next one is written, which may fail half-way."""

VIEWED = Rings(3, 3)
"""A view stays valid through two more steps of its env, both of which may end an episode."""


def rings_of(copy_on_get: CopyOnGet) -> Rings:
    """Return how many observations are kept."""
    return COPIED if copy_on_get in (True, "until_send") else VIEWED


@dataclass(frozen=True)
class Placement:
    """Where the observations of one env are written: payload of ATTACH.

    Attributes:
        layout: the leaves.
        rings: the slots.
        offset: first byte of the arena in the shared memory.
        nbytes: size of the whole memory.
        rows: envs in the arena.
        row: this env's row.
        step_slot: the slot that its next step takes: not one whose view is in use.
        reset_slot: likewise for its next reset.
        block: the columns that its steps may be posted in; None if they go by message.
        host_index: which of the manager's hosts serves it.
    """

    layout: Layout
    rings: Rings
    offset: int
    nbytes: int
    rows: int
    row: int
    step_slot: int
    reset_slot: int
    block: BlockPlan | None = None
    host_index: int = 0


@dataclass(frozen=True)
class ObservationRules:
    """How observations are checked, on the side of the env.

    Attributes:
        strict_dtype: refuse casts.
        refuse_non_finite: refuse NaN and infinities in float leaves.
    """

    strict_dtype: bool = False
    refuse_non_finite: bool = False


def plan_placements(
    layouts: Sequence[Layout | None], rings: Rings, offset: int = 0
) -> tuple[list[Placement | None], int]:
    """Lay out one memory for all envs: one arena for each distinct layout.

    Args:
        layouts: the layout of each env_id; None takes no room.
        rings: how many observations are kept.
        offset: bytes of the memory that something else takes before the first arena.

    Returns:
        The placement of each env_id, and the size of the memory in bytes.
    """
    members: dict[Layout, list[int]] = {}
    for env_id, layout in enumerate(layouts):
        if layout is not None:
            members.setdefault(layout, []).append(env_id)
    starts: dict[Layout, int] = {}
    nbytes = aligned(offset)
    for layout, env_ids in members.items():
        starts[layout] = nbytes
        nbytes += sum(aligned(rings.slots * len(env_ids) * leaf.nbytes) for leaf in layout.leaves)
    placements: list[Placement | None] = [None] * len(layouts)
    for layout, env_ids in members.items():
        start, rows = starts[layout], len(env_ids)
        for row, env_id in enumerate(env_ids):
            placements[env_id] = Placement(
                layout, rings, start, nbytes, rows, row, step_slot=0, reset_slot=rings.steps
            )
    return placements, nbytes


def arena_arrays(memory: Any, placement: Placement) -> list[Array]:
    """Return the arena that an env has a row in, per leaf: `(slots, rows, *shape)`."""
    arrays: list[Array] = []
    offset = placement.offset
    for leaf in placement.layout.leaves:
        shape = (placement.rings.slots, placement.rows, *leaf.shape)
        arrays.append(np.ndarray(shape, dtype=leaf.dtype, buffer=memory, offset=offset))
        offset += aligned(placement.rings.slots * placement.rows * leaf.nbytes)
    return arrays


def slot_arrays(memory: Any, placement: Placement) -> list[Array]:
    """Return the slots of one env in shared memory, per leaf: `(slots, *shape)`."""
    return [array[:, placement.row] for array in arena_arrays(memory, placement)]


class LoneLeaf(NamedTuple):
    """What writing takes for envs whose observation is one array.

    Attributes:
        dtype: of an observation that needs no second look.
        shape: likewise.
        targets: where it is written, by slot.
        after: the slot of the step after the one in each slot.
        finite: equals 0 for one whose numbers are finite; None if they need not be.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    targets: list[Array]
    after: list[int]
    finite: Callable[[Array], Any] | None


class ObservationWriter:
    """The env's side: checks each observation and commits it.

    Args:
        space: the observation space; None checks nothing.
        rules: how to check.
        on_cast: told of each leaf whose dtype is cast.

    Attributes:
        lone: for those who write the observations of steps themselves; None if that cannot be.
        step_slot: the slot that the next step takes.
    """

    def __init__(
        self, space: spaces.Space[Any] | None, rules: ObservationRules, on_cast: OnCast
    ) -> None:
        self._space = space
        self._rules = rules
        self._on_cast = on_cast
        self._layout = None if space is None else layout_of(space)
        self._slots: list[tuple[Array, ...]] | None = None
        self._rings = COPIED
        self.step_slot = self._reset_slot = 0
        self.lone: LoneLeaf | None = None

    def attach(self, memory: Any, placement: Placement) -> None:
        """Write into shared memory from now on."""
        self._layout = placement.layout
        self._rings = placement.rings
        arrays = slot_arrays(memory, placement)
        self._slots = [
            tuple(array[slot, ...] for array in arrays) for slot in range(placement.rings.slots)
        ]
        self.step_slot, self._reset_slot = placement.step_slot, placement.reset_slot
        self.lone = None
        leaf = placement.layout.leaves[0]
        is_tested = self._rules.refuse_non_finite and leaf.dtype.kind in "fc"
        finite = finite_test(leaf.dtype, leaf.shape) if is_tested else None
        if type(placement.layout.skeleton) is int and is_tested == (finite is not None):
            targets = [target for (target,) in self._slots]
            after = [placement.rings.after(slot) for slot in range(placement.rings.steps)]
            self.lone = LoneLeaf(leaf.dtype, leaf.shape, targets, after, finite)

    def detach(self) -> None:
        """Write nowhere any more: references carry the observations themselves."""
        self._slots = None
        self.lone = None

    def write(self, observation: Any, *, of_reset: bool = False) -> Any:
        """Check an observation, commit it and return the reference that the reply carries.

        Args:
            observation: what the env returned.
            of_reset: it begins an episode.

        Raises:
            ValueMismatchError: it does not fit; nothing was written.
        """
        lone = self.lone
        if (
            lone is not None
            and type(observation) is np.ndarray
            and observation.dtype == lone.dtype
            and observation.shape == lone.shape
            and (lone.finite is None or lone.finite(observation) == 0.0)
        ):
            return self._commit((observation,), of_reset)  # the ordinary case: nothing to check
        if self._layout is None:
            if self._rules.refuse_non_finite:
                check_finite(observation)
            check_free_form(self._space, observation)
            return observation
        leaves = self._layout.flatten(
            observation, strict_dtype=self._rules.strict_dtype, on_cast=self._on_cast
        )
        if self._rules.refuse_non_finite:
            self._check_finite(leaves)
        if self._slots is None:
            return [
                np.array(value, dtype=leaf.dtype)
                for leaf, value in zip(self._layout.leaves, leaves, strict=True)
            ]
        return self._commit(leaves, of_reset)

    def _commit(self, leaves: Sequence[Array], of_reset: bool) -> int:
        """Write checked leaves into the next slot of a ring and return its number."""
        slot = self._reset_slot if of_reset else self.step_slot
        for target, value in zip(self._slots[slot] if self._slots else (), leaves, strict=True):
            target[...] = value
        if of_reset:
            self._reset_slot = self._rings.after(slot)
        else:
            self.step_slot = self._rings.after(slot)
        return slot

    def _check_finite(self, leaves: Sequence[Array]) -> None:
        layout = self._layout
        for leaf, value in zip(layout.leaves if layout else (), leaves, strict=True):
            if leaf.dtype.kind in "fc":
                check_finite(value, leaf.path)


class ObservationReader:
    """The parent's side: turns the reference in a reply into a private, writable observation.

    Args:
        space: the observation space; None if unknown.
        copy_free_form: copy observations without fixed layout too, because no process boundary
            has copied them.
    """

    def __init__(self, space: spaces.Space[Any] | None, *, copy_free_form: bool = False) -> None:
        self._layout = None if space is None else layout_of(space)
        self._copy_free_form = copy_free_form
        self._rings = COPIED
        self._latest_step = self._latest_reset = -1
        self._slots: list[tuple[Array, bool]] | None = None
        self._copy = True
        self._guard: Guard | None = None

    @property
    def layout(self) -> Layout | None:
        """The fixed layout, if there is one."""
        return self._layout

    def attach(
        self,
        memory: Any,
        placement: Placement,
        *,
        copy_on_get: bool,
        guard: Guard | None = None,
    ) -> None:
        """Read from shared memory from now on.

        Args:
            memory: the buffer.
            placement: where this env's slots are.
            copy_on_get: copy; else hand out views, valid through the env's next two steps.
            guard: what views are wrapped by; None leaves them as they are.
        """
        self._guard = guard
        leaves = placement.layout.leaves if self._layout is None else self._layout.leaves
        self._rings = placement.rings
        slots = slot_arrays(memory, placement)
        # Indexing by a slot alone makes a number, not an array, of what has shape ().
        plain = [leaf.is_number or leaf.shape != () for leaf in leaves]
        self._slots = list(zip(slots, plain, strict=True))
        self._copy = copy_on_get

    def read(self, reference: Any) -> Any:
        """Return the observation that `reference` names.

        Raises:
            ValueMismatchError: the reference is not one that a writer makes.
        """
        layout = self._layout
        if layout is None:
            return copy.deepcopy(reference) if self._copy_free_form else reference
        if self._slots is None:
            if not isinstance(reference, list) or len(reference) != len(layout.leaves):
                raise ValueMismatchError(f"{type(reference).__name__} is not a list of leaves")
            return layout.unflatten(list(map(_own, layout.leaves, reference)))
        if type(reference) is not int or not 0 <= reference < self._rings.slots:
            shown = reference if type(reference) is int else f"a {type(reference).__name__}"
            raise ValueMismatchError(f"{shown} is not a slot of 0..{self._rings.slots - 1}")
        self.note(reference)
        found = [
            slots[reference] if plain else slots[reference, ...] for slots, plain in self._slots
        ]
        if self._copy:
            found = [view.copy() for view in found]
        elif self._guard is not None:
            found = list(map(self._guard, found))
        return layout.unflatten(found)

    def note(self, slot: int) -> None:
        """Remember that the newest observation of its kind is in `slot`."""
        if slot < self._rings.steps:
            self._latest_step = slot
        else:
            self._latest_reset = slot

    def placed_anew(self, placement: Placement) -> Placement:
        """Return the placement for a new env: it goes on after the slots that are in use."""
        rings = placement.rings
        step, reset = self._latest_step, self._latest_reset
        return replace(
            placement,
            step_slot=placement.step_slot if step < 0 else rings.after(step),
            reset_slot=placement.reset_slot if reset < 0 else rings.after(reset),
        )

    def detach(self) -> None:
        """Let go of the shared memory."""
        self._slots = None


def _own(leaf: Leaf, array: Any) -> Any:
    if not isinstance(array, np.ndarray) or array.shape != leaf.shape or array.dtype != leaf.dtype:
        raise ValueMismatchError(
            f"value{path_text(leaf.path)} of the reply is not an array of shape {leaf.shape} and "
            f"dtype {leaf.dtype}, which the space says"
        )
    if leaf.is_number:
        return array[()]
    return array if array.flags.writeable else array.copy()
