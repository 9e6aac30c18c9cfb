"""How observations get from a host to the parent.

With a fixed layout they are written into an arena: per leaf one array `(SLOTS, env_num, *shape)`.
Each observation of an env takes the next of its five slots, and the reply names the slot. Five,
because a view handed out (`copy_on_get: false`) has to stay valid through two more steps, each of
which may end an episode and so bring two observations. Without an arena, or without a fixed layout,
the reply carries the observation itself.

Checks come before anything is written: a value that does not fit is refused whole.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import spaces

from envmgr.spaces import (
    Array,
    Layout,
    Leaf,
    NonFiniteError,
    OnCast,
    ValueMismatchError,
    check_free_form,
    layout_of,
    path_text,
)

SLOTS = 5
_ALIGNMENT_BYTES = 64


@dataclass(frozen=True)
class Placement:
    """Where the observations of one env are written: payload of ATTACH.

    Attributes:
        layout: the leaves.
        offset: first byte of the block in the shared memory.
        nbytes: size of the whole memory.
        rows: envs in the block.
        row: this env's row.
        first_slot: the slot that the next observation takes: not one whose view is in use.
    """

    layout: Layout
    offset: int
    nbytes: int
    rows: int
    row: int
    first_slot: int = 0


@dataclass(frozen=True)
class ObservationRules:
    """How observations are checked, on the side of the env.

    Attributes:
        strict_dtype: refuse casts.
        refuse_non_finite: refuse NaN and infinities in float leaves.
    """

    strict_dtype: bool = False
    refuse_non_finite: bool = False


def plan_placements(layouts: Sequence[Layout | None]) -> tuple[list[Placement | None], int]:
    """Lay out one memory for all envs: one block for each distinct layout.

    Args:
        layouts: the layout of each env_id; None takes no room.

    Returns:
        The placement of each env_id, and the size of the memory in bytes.
    """
    members: dict[Layout, list[int]] = {}
    for env_id, layout in enumerate(layouts):
        if layout is not None:
            members.setdefault(layout, []).append(env_id)
    starts: dict[Layout, int] = {}
    nbytes = 0
    for layout, env_ids in members.items():
        starts[layout] = nbytes
        nbytes += _block_nbytes(layout, len(env_ids))
    placements: list[Placement | None] = [None] * len(layouts)
    for layout, env_ids in members.items():
        for row, env_id in enumerate(env_ids):
            placements[env_id] = Placement(layout, starts[layout], nbytes, len(env_ids), row)
    return placements, nbytes


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _block_nbytes(layout: Layout, rows: int) -> int:
    return sum(_aligned(SLOTS * rows * leaf.nbytes) for leaf in layout.leaves)


def slot_arrays(memory: Any, placement: Placement) -> list[Array]:
    """Return the slots of one env in shared memory, per leaf: `(SLOTS, *shape)`."""
    arrays: list[Array] = []
    offset = placement.offset
    for leaf in placement.layout.leaves:
        shape = (SLOTS, placement.rows, *leaf.shape)
        block: Array = np.ndarray(shape, dtype=leaf.dtype, buffer=memory, offset=offset)
        arrays.append(block[:, placement.row])
        offset += _aligned(SLOTS * placement.rows * leaf.nbytes)
    return arrays


class ObservationWriter:
    """The env's side: checks each observation and commits it.

    Args:
        space: the observation space; None checks nothing.
        rules: how to check.
        on_cast: told of each leaf whose dtype is cast.
    """

    def __init__(
        self, space: spaces.Space[Any] | None, rules: ObservationRules, on_cast: OnCast
    ) -> None:
        self._space = space
        self._rules = rules
        self._on_cast = on_cast
        self._layout = None if space is None else layout_of(space)
        self._slots: list[Array] | None = None
        self._next_slot = 0
        self._lone_leaf: Leaf | None = None

    def attach(self, memory: Any, placement: Placement) -> None:
        """Write into shared memory from now on."""
        self._layout = placement.layout
        self._slots = slot_arrays(memory, placement)
        self._next_slot = placement.first_slot
        if len(placement.layout.leaves) == 1 and not self._rules.refuse_non_finite:
            leaf = placement.layout.leaves[0]
            self._lone_leaf = leaf if not leaf.path else None

    def write(self, observation: Any) -> Any:
        """Check an observation, commit it and return the reference that the reply carries.

        Raises:
            ValueMismatchError: it does not fit; nothing was written.
        """
        lone = self._lone_leaf
        if (
            lone is not None
            and type(observation) is np.ndarray
            and observation.dtype == lone.dtype
            and observation.shape == lone.shape
        ):
            return self._commit((observation,))  # the ordinary case: nothing to check
        if self._layout is None:
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
        return self._commit(leaves)

    def _commit(self, leaves: Sequence[Array]) -> int:
        """Write checked leaves into the next slot and return its number."""
        slot = self._next_slot
        for target, value in zip(self._slots or (), leaves, strict=True):
            target[slot] = value
        self._next_slot = (slot + 1) % SLOTS
        return slot

    def _check_finite(self, leaves: Sequence[Array]) -> None:
        layout = self._layout
        for leaf, value in zip(layout.leaves if layout else (), leaves, strict=True):
            if leaf.dtype.kind in "fc" and not np.isfinite(value).all():
                raise NonFiniteError(
                    f"value{path_text(leaf.path)} has NaN or infinite numbers "
                    "(nan_policy is not allow)"
                )


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
        self._last_slot = SLOTS - 1
        self._slots: list[tuple[Array, bool]] | None = None
        self._copy = True

    @property
    def layout(self) -> Layout | None:
        """The fixed layout, if there is one."""
        return self._layout

    def attach(self, memory: Any, placement: Placement, *, copy_on_get: bool) -> None:
        """Read from shared memory from now on.

        Args:
            memory: the buffer.
            placement: where this env's slots are.
            copy_on_get: copy; else hand out views, valid through the env's next two steps.
        """
        leaves = placement.layout.leaves if self._layout is None else self._layout.leaves
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
        if type(reference) is not int or not 0 <= reference < SLOTS:
            raise ValueMismatchError(f"{reference!r} is not a slot of 0..{SLOTS - 1}")
        self._last_slot = reference
        found = [
            slots[reference] if plain else slots[reference, ...] for slots, plain in self._slots
        ]
        return layout.unflatten([view.copy() for view in found] if self._copy else found)

    @property
    def next_slot(self) -> int:
        """The slot after the one that was read last: where a new env has to go on."""
        return (self._last_slot + 1) % SLOTS

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
