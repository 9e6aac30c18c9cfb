"""The parent's side of observations: what a reply refers to, as its user gets it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from envmgr.spaces import Array, Layout, Leaf, ValueMismatchError, codec_of
from envmgr.spaces.agents import lost_step
from envmgr.wire.arenas import COPIED, Placement, place_arrays

Guard = Callable[[Array], Array]
"""Wraps a view that is handed out."""


class ObservationReader:
    """The parent's side: turns the reference in a reply into a private, writable observation.

    Args:
        space: the observation space; None if unknown.

    Attributes:
        lost_step: see `spaces.agents.lost_step`.
        latest_step: the place of the newest observation of a step that is in use; -1 for none.
        latest_reset: likewise, of a reset.
    """

    def __init__(self, space: Any) -> None:
        self.lost_step = partial(lost_step, space)
        self._structure = codec_of(space).structure
        # Of what goes to shared memory: all of it, or a part.
        self._layout = self._structure if self._structure.is_fixed else self._structure.fixed
        self._places = COPIED
        self.latest_step = self.latest_reset = -1
        self._found_at: list[tuple[Array, bool]] | None = None
        self._copy = True
        self._guard: Guard | None = None

    @property
    def layout(self) -> Layout | None:
        """The layout of what goes to shared memory: all of it, or a part; None if nothing does."""
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
            placement: where this env's places are.
            copy_on_get: copy; else hand out views, valid through the env's next two steps.
            guard: what views are wrapped by; None leaves them as they are.
        """
        self._guard = guard
        leaves = placement.layout.leaves if self._layout is None else self._layout.leaves
        self._places = placement.places
        places = place_arrays(memory, placement)
        # Indexing by a place alone makes a number, not an array, of what has shape ().
        plain = [leaf.is_number or leaf.shape != () for leaf in leaves]
        self._found_at = list(zip(places, plain, strict=True))
        self._copy = copy_on_get

    def read(self, reference: Any) -> Any:
        """Return the observation that `reference` names.

        Raises:
            ValueMismatchError: the reference is not one that a writer makes.
        """
        structure, layout = self._structure, self._layout
        lone = structure.lone if self._found_at is None else None
        if lone is not None and type(reference) is list and len(reference) == 1:
            return lone.from_bytes(reference[0])  # the ordinary case of a reply by message
        if layout is None:
            return reference
        if structure.is_fixed:
            return structure.unflatten(self._leaves(layout, reference))
        free = reference[1] if type(reference) is tuple and len(reference) == 2 else None
        if type(free) is not list or len(free) + len(layout.leaves) != len(structure.leaves):
            raise ValueMismatchError(f"{type(reference).__name__} is not a place with objects")
        return structure.join(self._leaves(layout, reference[0]), free)

    def _leaves(self, layout: Layout, reference: Any) -> list[Any]:
        """Return the leaves that are arrays."""
        if self._found_at is None or type(reference) is list:  # of what was not put in its place
            if not isinstance(reference, list) or len(reference) != len(layout.leaves):
                raise ValueMismatchError(f"{type(reference).__name__} is not a list of leaves")
            return list(map(Leaf.from_bytes, layout.leaves, reference))
        if type(reference) is not int or not 0 <= reference < self._places.count:
            shown = reference if type(reference) is int else f"a {type(reference).__name__}"
            raise ValueMismatchError(f"{shown} is not a place of 0..{self._places.count - 1}")
        self.note(reference)
        found = [
            places[reference] if plain else places[reference, ...]
            for places, plain in self._found_at
        ]
        if self._copy:
            found = [view.copy() for view in found]
        elif self._guard is not None:
            found = list(map(self._guard, found))
        return found

    def note(self, place: int) -> None:
        """Remember that the newest observation of its kind is in `place`."""
        if place < self._places.steps:
            self.latest_step = place
        else:
            self.latest_reset = place

    def placed_anew(self, placement: Placement) -> Placement:
        """Return the placement for a new env: it goes on after the places that are in use."""
        places = placement.places
        step, reset = self.latest_step, self.latest_reset
        return replace(
            placement,
            step_place=placement.step_place if step < 0 else places.after(step),
            reset_place=placement.reset_place if reset < 0 else places.after(reset),
        )

    def detach(self) -> None:
        """Let go of the shared memory."""
        self._found_at = None
