"""Checks each observation of an env and writes it for the trainer, or refuses it whole."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from envmgr.spaces import (
    Array,
    Leaf,
    OnCast,
    TextLeaf,
    TextReader,
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
    """The data needed to write an env's observations, each of which is a single array.

    Attributes:
        dtype: the dtype of an observation that can be written as it is.
        shape: the shape of such an observation.
        targets: the arrays that an observation is written into, by buffer.
        arena: the observations of all envs of this layout: (buffers, rows, *shape).
        row: the env's row there.
        after: for each buffer of a step, the buffer that the next step takes.
        finite: returns 0 for an array whose numbers are finite; None if they need not be.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    targets: list[Array]
    arena: Array
    row: int
    after: list[int]
    finite: Callable[[Array], Any] | None


class PlacedLeaf(NamedTuple):
    """How C checks one array, number or text of observations that lie wholly in shared memory.

    Attributes:
        tests_finite: whether its numbers have to be finite.
        number: the NumPy scalar type that its value may have, besides being an array; None if it is
            not a number.
        pack: returns the bytes to write for a text, or None if the text does not fit or has no
            room; raises whatever the space's code raises. None if it is not a text.
    """

    tests_finite: bool
    number: type | None
    pack: Callable[[Any], bytes | None] | None


class PlacedObservation(NamedTuple):
    """The data needed to write observations that lie wholly in shared memory.

    Attributes:
        skeleton: how their leaves are nested: see `Layout`.
        leaves: the leaves.
        dtypes: the dtypes of the leaves that are arrays or numbers.
        targets: where each leaf is written, by buffer.
        after: for each buffer of a step, the buffer that the next step takes.
    """

    skeleton: Any
    leaves: list[PlacedLeaf]
    dtypes: list[np.dtype[Any]]
    targets: list[tuple[Any, ...]]
    after: list[int]


class ObservationWriter:
    """Checks each observation of an env and writes it.

    Args:
        space: the observation space; None checks nothing.
        on_cast: called with a text for each leaf whose dtype is cast.

    Attributes:
        single_array: for callers that write the observations of steps themselves; None if these are
            not a single array each, or have no array in the shared memory.
        placed: likewise, for observations of any form; None if a part of them has no room there.
        step_buffer_cell: the byte that holds `step_buffer`, which C reads and writes.
        reset_buffer: the buffer that the next observation of a reset takes.
        after: for each buffer, the one that the next observation of the same kind takes.
    """

    def __init__(self, space: Any, rules: ObservationRules, on_cast: OnCast) -> None:
        self._codec = codec_of(space)
        self._rules = rules
        self._on_cast = on_cast
        self._layout = self._codec.layout
        structure = self._codec.structure
        # Splits leaves into arrays and others, where not all are arrays and some have a buffer.
        self._mixed = structure if structure.placed and not structure.is_fixed else None
        self._targets: list[tuple[Any, ...]] | None = None
        self._texts: list[tuple[int, TextLeaf]] = []  # where they are among the leaves
        self.after: list[int] = []
        self.step_buffer_cell = bytearray(1)
        self.reset_buffer = 0
        self.single_array: SingleArray | None = None
        self.placed: PlacedObservation | None = None
        sent = None if self._layout is None else self._layout.lone
        is_plain = sent is not None and sent.dtype.kind in "biuf" and not rules.refuse_non_finite
        self._sent = sent if is_plain else None

    @property
    def step_buffer(self) -> int:
        """The buffer that the next observation of a step takes."""
        return self.step_buffer_cell[0]

    @step_buffer.setter
    def step_buffer(self, buffer: int) -> None:
        self.step_buffer_cell[0] = buffer

    def attach(self, memory: Any, placement: Placement) -> None:
        """Write into shared memory from now on."""
        if self._mixed is None:
            self._layout = placement.layout
        buffers = placement.buffers
        self.after = [buffers.after(buffer) for buffer in range(buffers.count)]
        arenas = arena_arrays(memory, placement)
        self._placed = leaves = placement.layout.leaves
        self._texts = [(j, leaf) for j, leaf in enumerate(leaves) if isinstance(leaf, TextLeaf)]
        arrays = list(zip(leaves, (arena[:, placement.row] for arena in arenas), strict=True))
        self._targets = [
            tuple(_target(leaf, array[buffer, ...]) for leaf, array in arrays)
            for buffer in range(buffers.count)
        ]
        self.step_buffer, self.reset_buffer = placement.step_buffer, placement.reset_buffer
        self.single_array = self.placed = None
        if self._mixed is None or self._mixed.is_placed:
            self.placed = PlacedObservation(
                placement.layout.skeleton,
                list(map(self._placed_leaf, (self._mixed or placement.layout).leaves, leaves)),
                [leaf.dtype for leaf in leaves if not isinstance(leaf, TextLeaf)],
                self._targets[: buffers.steps],
                self.after[: buffers.steps],
            )
        leaf, is_lone = leaves[0], self._mixed is None and type(placement.layout.skeleton) is int
        is_tested = self._rules.refuse_non_finite and has_floats(leaf.dtype)
        finite = finite_test(leaf.dtype, leaf.shape) if is_tested else None
        if is_lone and is_tested == (finite is not None):
            targets = [target for (target,) in self._targets]
            after = self.after[: buffers.steps]
            self.single_array = SingleArray(
                leaf.dtype, leaf.shape, targets, arenas[0], placement.row, after, finite
            )

    def detach(self) -> None:
        """Stop writing into shared memory: replies now carry the observations themselves."""
        self._targets = None
        self._texts = []
        self.single_array = self.placed = None

    def _placed_leaf(self, leaf: Leaf, placed: Leaf) -> PlacedLeaf:
        if not isinstance(placed, TextLeaf):
            is_tested = self._rules.refuse_non_finite and has_floats(leaf.dtype)
            return PlacedLeaf(is_tested, leaf.dtype.type if leaf.is_number else None, None)

        def pack(text: Any) -> bytes | None:
            if leaf.check is not None:
                try:
                    leaf.check(text, leaf.path)
                except ValueMismatchError:  # raised anew by `write`
                    return None
            return placed.packed(text)

        return PlacedLeaf(False, None, pack)

    def write(self, observation: Any, *, of_reset: bool = False) -> Any:
        """Check an observation, write it, and return the reference to it that the reply carries.

        Args:
            observation: what the env returned.
            of_reset: whether it begins an episode.

        Raises:
            ValueMismatchError: the observation does not fit; nothing was written.
        """
        single = self.single_array
        if (
            single is not None
            and type(observation) is np.ndarray
            and observation.dtype == single.dtype
            and observation.shape == single.shape
            and (single.finite is None or single.finite(observation) == 0.0)
        ):
            buffer = self.reset_buffer if of_reset else self.step_buffer_cell[0]
            single.targets[buffer][...] = observation
            if of_reset:
                self.reset_buffer = self.after[buffer]
            else:
                self.step_buffer_cell[0] = self.after[buffer]
            return buffer
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
        mixed = self._mixed
        if mixed is None:
            return self._commit_or_copy(layout.leaves, leaves, of_reset)
        if self._texts:
            packed = self._packed(leaves)
            if packed is not None:
                return self._commit(packed, of_reset)
        arrays, free = mixed.split(leaves)
        if self._rules.copy_free_form:
            free = list(map(_copied, free))
        if mixed.is_placed:  # but not this one: it has a text that is too long, or nowhere to go
            return _to_bytes(mixed.arrays, arrays), free
        return self._commit_or_copy(mixed.arrays, arrays, of_reset), free

    def with_bytes(self, reference: Any) -> Any:
        """Return a reference that `write` returned, with the bytes in place of the buffer.

        The bytes are for a trainer that does not share the memory that they were written into.
        """
        if self._targets is None or type(reference) is list:
            return reference
        if type(reference) is tuple:
            return self.with_bytes(reference[0]), reference[1]
        targets = self._targets[reference]
        if self._mixed is None or not self._texts:
            return _to_bytes(self._placed, targets)
        found = list(map(_unpacked, self._placed, targets))
        arrays, texts = self._mixed.split(found)
        return _to_bytes(self._mixed.arrays, arrays), texts

    def _packed(self, leaves: Sequence[Any]) -> list[Any] | None:
        """Return leaves in the form that is written; None if one is a text that has no room."""
        packed = list(leaves)
        for position, leaf in self._texts:
            packed[position] = data = leaf.packed(leaves[position])
            if data is None:
                return None
        return packed

    def _commit_or_copy(
        self, leaves: Sequence[Leaf], values: Sequence[Array], of_reset: bool
    ) -> Any:
        """Return a reference to checked arrays: their buffer, or their bytes."""
        if self._targets is not None:
            return self._commit(values, of_reset)
        return _to_bytes(leaves, values)

    def _commit(self, leaves: Sequence[Any], of_reset: bool) -> int:
        """Write checked leaves into the next buffer and return its number."""
        buffer = self.reset_buffer if of_reset else self.step_buffer_cell[0]
        for target, value in zip(
            self._targets[buffer] if self._targets else (), leaves, strict=True
        ):
            if type(value) is bytes:  # a text
                target[: len(value)] = value
            else:
                target[...] = value
        if of_reset:
            self.reset_buffer = self.after[buffer]
        else:
            self.step_buffer_cell[0] = self.after[buffer]
        return buffer


def _target(leaf: Leaf, array: Array) -> Any:
    """Return the object that the value of a leaf is written into."""
    return array.data if isinstance(leaf, TextLeaf) else array


def _unpacked(leaf: Leaf, target: Any) -> Any:
    """Return the value that was written: a text, or the array that holds it."""
    return TextReader(leaf).read(target) if isinstance(leaf, TextLeaf) else target


def _to_bytes(leaves: Sequence[Leaf], values: Sequence[Array]) -> list[bytearray]:
    return list(map(Leaf.to_bytes, leaves, values))


def _copied(observation: Any) -> Any:
    try:
        return copy.deepcopy(observation)
    except Exception as error:  # whatever a __deepcopy__ may raise
        pass_interrupt_on(error)
        raise ValueMismatchError(
            f"the observation, a {type(observation).__name__}, cannot be copied: "
            f"{type(error).__name__}: {text_of(error)}"
        ) from error
