"""The env's side of observations: checks each and commits it, or refuses it whole."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from envmgr.spaces import (
    Array,
    Layout,
    Leaf,
    OnCast,
    ValueMismatchError,
    check_finite,
    codec_of,
    finite_test,
    has_floats,
)
from envmgr.spaces.interrupts import pass_interrupt_on
from envmgr.wire.arenas import ObservationRules, Placement, arena_arrays
from envmgr.wire.messages import text_of


class LoneLeaf(NamedTuple):
    """What writing takes for envs whose observation is one array.

    Attributes:
        dtype: of an observation that needs no second look.
        shape: likewise.
        targets: where it is written, by place.
        arena: where the observations of all envs of this layout are: (places, rows, *shape).
        row: its row there.
        after: the place of the step after the one at each place.
        finite: equals 0 for one whose numbers are finite; None if they need not be.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    targets: list[Array]
    arena: Array
    row: int
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
        step_place: the place that the next step takes.
        reset_place: likewise, the next reset.
        after: the place after each.
    """

    def __init__(self, space: Any, rules: ObservationRules, on_cast: OnCast) -> None:
        self._codec = codec_of(space)
        self._rules = rules
        self._on_cast = on_cast
        self._layout = self._codec.layout
        structure = self._codec.structure
        # What goes to the arena and what does not, if there are both.
        self._mixed = structure if structure.fixed and not structure.is_fixed else None
        self._targets: list[tuple[Array, ...]] | None = None
        self.after: list[int] = []
        self.step_place = self.reset_place = 0
        self.lone: LoneLeaf | None = None
        sent = None if self._layout is None else self._layout.lone
        is_plain = sent is not None and sent.dtype.kind in "biuf" and not rules.refuse_non_finite
        self._sent = sent if is_plain else None

    def attach(self, memory: Any, placement: Placement) -> None:
        """Write into shared memory from now on."""
        if self._mixed is None:
            self._layout = placement.layout
        places = placement.places
        self.after = [places.after(place) for place in range(places.count)]
        arenas = arena_arrays(memory, placement)
        arrays = [arena[:, placement.row] for arena in arenas]
        self._targets = [
            tuple(array[place, ...] for array in arrays) for place in range(places.count)
        ]
        self._placed = placement.layout.leaves
        self.step_place, self.reset_place = placement.step_place, placement.reset_place
        self.lone = None
        leaf = placement.layout.leaves[0]
        is_tested = self._rules.refuse_non_finite and has_floats(leaf.dtype)
        finite = finite_test(leaf.dtype, leaf.shape) if is_tested else None
        if type(placement.layout.skeleton) is int and is_tested == (finite is not None):
            targets = [target for (target,) in self._targets]
            after = self.after[: places.steps]
            lone = (leaf.dtype, leaf.shape, targets, arenas[0], placement.row, after, finite)
            self.lone = LoneLeaf(*lone)

    def detach(self) -> None:
        """Write nowhere any more: references carry the observations themselves."""
        self._targets = None
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
        sent = self._sent
        if (
            sent is not None
            and self._targets is None
            and type(observation) is np.ndarray
            and observation.dtype == sent.dtype
            and observation.shape == sent.shape
        ):
            return [bytearray(observation.data)]  # likewise, where it goes into the reply
        layout = self._layout or self._mixed
        if layout is None:
            if self._rules.refuse_non_finite:
                check_finite(observation)
            self._codec.check_value(observation)
            return _copied(observation) if self._rules.copy_free_form else observation
        leaves = layout.flatten(
            observation, strict_dtype=self._rules.strict_dtype, on_cast=self._on_cast
        )
        if self._rules.refuse_non_finite:
            for leaf, value in zip(layout.leaves, leaves, strict=True):
                check_finite(value, leaf.path)
        if self._mixed is None or self._mixed.fixed is None:
            return self._commit_or_copy(layout, leaves, of_reset)
        fixed, free = self._mixed.split(leaves)
        if self._rules.copy_free_form:
            free = list(map(_copied, free))
        return self._commit_or_copy(self._mixed.fixed, fixed, of_reset), free

    def carried(self, reference: Any) -> Any:
        """Return what `write` has returned, with the bytes of leaves for their place."""
        if self._targets is None:
            return reference
        if type(reference) is tuple:
            return self.carried(reference[0]), reference[1]
        return list(map(Leaf.to_bytes, self._placed, self._targets[reference]))

    def _commit_or_copy(self, layout: Layout, leaves: Sequence[Array], of_reset: bool) -> Any:
        """Return what refers to checked leaves: their place, or their bytes."""
        if self._targets is not None:
            return self._commit(leaves, of_reset)
        return [leaf.to_bytes(value) for leaf, value in zip(layout.leaves, leaves, strict=True)]

    def _commit(self, leaves: Sequence[Array], of_reset: bool) -> int:
        """Write checked leaves at the next place and return its number."""
        place = self.reset_place if of_reset else self.step_place
        for target, value in zip(
            self._targets[place] if self._targets else (), leaves, strict=True
        ):
            target[...] = value
        if of_reset:
            self.reset_place = self.after[place]
        else:
            self.step_place = self.after[place]
        return place


def _copied(observation: Any) -> Any:
    try:
        return copy.deepcopy(observation)
    except Exception as error:  # whatever a __deepcopy__ may raise
        pass_interrupt_on(error)
        raise ValueMismatchError(
            f"the observation, a {type(observation).__name__}, cannot be copied: "
            f"{type(error).__name__}: {text_of(error)}"
        ) from error
