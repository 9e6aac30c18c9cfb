"""Observation buffers: how observations get from a host to the parent.

Observations of a fixed layout are written into an arena in shared memory, which has one array
`(buffers, env_num, *shape)` for each leaf. Each env uses its buffers in turn, with one cycle for
the observations of steps and another one for those of resets. The reply names the buffer. So envs
that are stepped together use the same buffer, and their batch is one slice of the array, no matter
which episodes have ended. There are enough buffers for a view that was handed out to stay valid
as long as promised: see `Buffers`. Without an arena, or without a fixed layout, the reply carries
the observation itself. A text is stored in the arena as an array of bytes, if it is not too long.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from envmgr.spaces import Array, Layout
from envmgr.wire.block import BlockPlan, aligned
from envmgr.wire.info_forms import InfoField


@dataclass(frozen=True)
class Buffers:
    """How many observations of an env are kept, each in a buffer of its own.

    Attributes:
        steps: how many observations of steps are kept; their buffers are 0 to `steps - 1`.
        resets: how many observations of resets are kept; their buffers come after those of steps.
    """

    steps: int
    resets: int

    @property
    def count(self) -> int:
        """The total number of buffers."""
        return self.steps + self.resets

    def after(self, buffer: int) -> int:
        """Return the buffer for the env's next observation of the same kind: step or reset."""
        if buffer < self.steps:
            return (buffer + 1) % self.steps
        return self.steps + (buffer + 1 - self.steps) % self.resets


CopyOnGet = Literal[True, False, "until_send", "checked"]
"""Whether observations are copied out of shared memory, or how long views of it stay valid."""

COPIED = Buffers(2, 2)
"""The newest observation stays intact while the next one is written: that may fail half-way."""

VIEWED = Buffers(3, 3)
"""A view stays valid through two more steps of its env, both of which may end an episode."""


def buffers_for(copy_on_get: CopyOnGet) -> Buffers:
    """Return how many observations of each env are kept."""
    return COPIED if copy_on_get in (True, "until_send") else VIEWED


@dataclass(frozen=True)
class Placement:
    """Where the observations of one env are written: payload of ATTACH.

    Attributes:
        layout: the leaves of an observation.
        buffers: how many buffers the env has.
        offset: the first byte of the arena in the shared memory.
        nbytes: the size of the whole memory.
        rows: how many envs share the arena.
        row: this env's row in it.
        step_buffer: the buffer for the env's next step; never one with a view that is in use.
        reset_buffer: likewise for its next reset.
        block: the columns that its steps may be posted in; None if they go by message.
        host_index: which of the manager's hosts serves it.
        action_kind: which of the block's kinds of actions the env takes.
        info_forms: `(number, fields)` of the forms that infos may be written in.
    """

    layout: Layout
    buffers: Buffers
    offset: int
    nbytes: int
    rows: int
    row: int
    step_buffer: int
    reset_buffer: int
    block: BlockPlan | None = None
    host_index: int = 0
    action_kind: int = 0
    info_forms: tuple[tuple[int, tuple[InfoField, ...]], ...] = ()


@dataclass(frozen=True)
class ObservationRules:
    """How observations are checked on the env's side.

    Attributes:
        strict_dtype: refuse casts.
        refuse_non_finite: refuse NaN and infinities in float leaves.
        copy_free_form: copy observations without a fixed layout, where no process boundary copies
            them.
    """

    strict_dtype: bool = False
    refuse_non_finite: bool = False
    copy_free_form: bool = False


def plan_placements(
    layouts: Sequence[Layout | None], buffers: Buffers, offset: int = 0
) -> tuple[list[Placement | None], int]:
    """Lay out one memory for all envs: one arena for each distinct layout.

    Args:
        layouts: the layout of each env_id; None for an env that gets no room.
        buffers: how many observations of each env are kept.
        offset: how many bytes of the memory before the first arena are used for something else.

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
        nbytes += sum(aligned(buffers.count * len(env_ids) * leaf.nbytes) for leaf in layout.leaves)
    placements: list[Placement | None] = [None] * len(layouts)
    for layout, env_ids in members.items():
        start, rows = starts[layout], len(env_ids)
        for row, env_id in enumerate(env_ids):
            placements[env_id] = Placement(
                layout, buffers, start, nbytes, rows, row, step_buffer=0, reset_buffer=buffers.steps
            )
    return placements, nbytes


def arena_arrays(memory: Any, placement: Placement) -> list[Array]:
    """Return the arena that an env has a row in, per leaf: `(buffers, rows, *shape)`."""
    arrays: list[Array] = []
    offset = placement.offset
    for leaf in placement.layout.leaves:
        shape = (placement.buffers.count, placement.rows, *leaf.shape)
        arrays.append(np.ndarray(shape, dtype=leaf.dtype, buffer=memory, offset=offset))
        offset += aligned(placement.buffers.count * placement.rows * leaf.nbytes)
    return arrays


def buffer_arrays(memory: Any, placement: Placement) -> list[Array]:
    """Return the buffers of one env in shared memory, per leaf: `(buffers, *shape)`."""
    return [array[:, placement.row] for array in arena_arrays(memory, placement)]
