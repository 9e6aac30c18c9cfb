"""Checks each observation of an env and writes it for the trainer, or refuses it whole."""

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


class SingleArray(NamedTuple):
    """What it takes to write the observations of an env that are one array each.

    Attributes:
        dtype: of an observation that fits as it is.
        shape: likewise.
        targets: where an observation is written, by place.
        arena: where the observations of all envs of this layout are: (places, rows, *shape).
        row: the env's row there.
        after: for each place of a step, the place that the next step takes.
        finite: returns 0 for an array whose numbers are finite; None if they need not be.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    targets: list[Array]
    arena: Array
    row: int
    after: list[int]
    finite: Callable[[Array], Any] | None


class ObservationWriter:
    """Checks each observation of an env and writes it.

    Args:
        space: the observation space; None checks nothing.
        rules: how to check.
        on_cast: called with a text for each leaf whose dtype is cast.

    Attributes:
        single_array: for those who write observations of steps themselves; None where these are
            not one array each, or have no place in the shared memory.
        step_place: the place that the next observation of a step takes.
        reset_place: likewise, of a reset.
        after: for each place, the one that the next observation of the same kind takes.
    """

    def __init__(self, space: Any, rules: ObservationRules, on_cast: OnCast) -> None:
        self._codec = codec_of(space)
        self._rules = rules
        self._on_cast = on_cast
        self._layout = self._codec.layout
        structure = self._codec.structure
        # Splits leaves into those that go into the arena and the others, where there are both.
        self._mixed = structure if structure.fixed and not structure.is_fixed else None
        self._targets: list[tuple[Array, ...]] | None = None
        self.after: list[int] = []
        self.step_place = self.reset_place = 0
        self.single_array: SingleArray | None = None
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
        self.single_array = None
        leaf = placement.layout.leaves[0]
        is_tested = self._rules.refuse_non_finite and has_floats(leaf.dtype)
        finite = finite_test(leaf.dtype, leaf.shape) if is_tested else None
        if type(placement.layout.skeleton) is int and is_tested == (finite is not None):
            targets = [target for (target,) in self._targets]
            after = self.after[: places.steps]
            self.single_array = SingleArray(
                leaf.dtype, leaf.shape, targets, arenas[0], placement.row, after, finite
            )

    def detach(self) -> None:
        """Write into shared memory no more: replies carry the observations themselves."""
        self._targets = None
        self.single_array = None

    def write(self, observation: Any, *, of_reset: bool = False) -> Any:
        """Check an observation, write it, and return the reference to it that the reply carries.

        Args:
            observation: what the env returned.
            of_reset: whether it begins an episode.

        Raises:
            ValueMismatchError: it does not fit; nothing was written.
        """
        single = self.single_array
        if (
            single is not None
            and type(observation) is np.ndarray
            and observation.dtype == single.dtype
            and observation.shape == single.shape
            and (single.finite is None or single.finite(observation) == 0.0)
        ):
            place = self.reset_place if of_reset else self.step_place
            single.targets[place][...] = observation
            if of_reset:
                self.reset_place = self.after[place]
            else:
                self.step_place = self.after[place]
            return place
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

    def with_bytes(self, reference: Any) -> Any:
        """Return a reference that `write` has returned with the bytes in place of the place.

        They are for a trainer that does not share the memory which they were written into.
        """
        if self._targets is None:
            return reference
        if type(reference) is tuple:
            return self.with_bytes(reference[0]), reference[1]
        return list(map(Leaf.to_bytes, self._placed, self._targets[reference]))

    def _commit_or_copy(self, layout: Layout, leaves: Sequence[Array], of_reset: bool) -> Any:
        """Return a reference to checked leaves: their place, or their bytes."""
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
