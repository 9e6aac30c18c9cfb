"""The env's side of observations: checks each and commits it, or refuses it whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from envmgr.spaces import Array, OnCast, check_finite, codec_of, finite_test
from envmgr.wire.arenas import COPIED, ObservationRules, Placement, slot_arrays


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

    def __init__(self, space: Any, rules: ObservationRules, on_cast: OnCast) -> None:
        self._codec = codec_of(space)
        self._rules = rules
        self._on_cast = on_cast
        self._layout = self._codec.layout
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
            self._codec.check_value(observation)
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
