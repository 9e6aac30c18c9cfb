"""What a codec does, and the codec of spaces about which nothing is known.

`CODECS` in `codecs` says which class of spaces has which codec.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from gymnasium import spaces

from envmgr.spaces.columns import ActionColumns, Bounds, without_tensors
from envmgr.spaces.equality import space_text
from envmgr.spaces.layouts import Layout, Leaf, objects
from envmgr.spaces.reading import error_text, short_text
from envmgr.spaces.values import Path, ValueMismatchError, path_text

ActionCheck = Callable[[Any], str | None]
"""Returns why an action is refused, or None."""


class Codec:
    """What a space means for the values that are moved; this class knows nothing about its space.

    So it does not ask the space about observations either: what `contains` does there, and what it
    costs, is not known, and other libraries that run envs do not ask.

    Args:
        space: the space; None stands for a space that has any value.
        strict: whether actions are also checked against the bounds of Box, and by spaces of unknown
            classes.

    Attributes:
        space: the space.
        is_asked: whether the space is asked about actions.
        text_bytes: as in `Leaf`, for values that have no fixed layout.
    """

    text_bytes: int | None = None

    def __init__(self, space: spaces.Space[Any] | None, strict: bool) -> None:
        self.space = space
        self.is_asked = strict

    @cached_property
    def layout(self) -> Layout | None:
        """The fixed layout of the values, which takes them apart; None if they have none."""
        return self.structure if self.structure.is_fixed else None

    @cached_property
    def structure(self) -> Layout:
        """The layout that takes values apart, into arrays and parts without a fixed layout."""
        leaves: list[Leaf] = []
        skeleton = self.skeleton((), leaves)
        return Layout(tuple(leaves), skeleton)

    def skeleton(self, path: Path, leaves: list[Leaf]) -> Any:
        """Add the leaves of the structure to `leaves` and return its skeleton."""
        kind = np.dtype(object)
        leaves.append(Leaf(path, (), kind, check=self.check_value, text_bytes=self.text_bytes))
        return len(leaves) - 1

    def bounds(self) -> list[Bounds]:
        """Return the bounds of actions, for each leaf of the layout."""
        return []

    def check_value(self, value: Any, path: Path = ()) -> None:
        """Check a value that has no layout.

        Args:
            value: what the env returned, or a part of it.
            path: where the value sits in what the env returned.

        Raises:
            ValueMismatchError: the value is not in the space.
        """
        if value is None:
            raise ValueMismatchError(f"value{path_text(path)} is None")

    def refusal(self, action: Any) -> str | None:
        """Return what is wrong with the kind, shape or bounds of an action; None if nothing is."""
        return self.doubt(action) if self.is_asked else None

    def for_env(self, action: Any) -> Any:
        """Return an action in the form that gymnasium envs expect.

        The codec of Discrete makes an int of one integer in any form (int, numpy integer, array of
        one element); those of Box, MultiDiscrete and MultiBinary make an array of their dtype if
        that loses no information in kind; those of Dict and Tuple convert the parts. This one, and
        the others for everything else, pass actions on unchanged: it is up to the caller, and in
        the end to the env, to check whether an action is legal.
        """
        return action

    def action_columns(self, *, checked: bool, in_any_form: bool = False) -> ActionColumns | None:
        """Return columns that pack the actions of many envs; None if these have no fixed layout.

        Args:
            checked: whether the columns refuse actions that are out of bounds.
            in_any_form: whether the envs convert actions as `for_env` does, so that this may be
                done before.
        """
        if self.layout is None:
            return None
        bounds = self.bounds() if checked else None
        return ActionColumns(self.layout, bounds, self._converted(checked) if in_any_form else None)

    def _converted(self, checked: bool) -> Callable[[Any], Any]:
        """Return a function that converts actions as `for_env` does, and refused ones to None."""

        def converted(action: Any) -> Any:
            action = without_tensors(action)
            if checked and self.refusal(action) is not None:
                return None
            return self.for_env(action)

        return converted

    def stack(self, values: Sequence[Any]) -> Any:
        """Return k values as one batch: arrays `(k, *shape)` per leaf.

        A leaf without a fixed layout becomes an array of objects (k,). If no leaf has a fixed
        layout, the whole values become such an array.
        """
        return self.structure.stack(values) if self.structure.fixed else objects(values)

    def zeros(self, *lengths: int) -> Any:
        """Return room for values, nested as `stack` does: zeros, and None for objects."""
        return self.structure.zeros(*lengths) if self.structure.fixed else np.empty(lengths, object)

    def as_bytes(self, value: Any) -> bytes:
        """Return a value as bytes, cast as when it is sent: the same on both sides of a manager.

        Raises:
            TypeError: values of this space have no such form.
            Exception: the value does not fit the space.
        """
        raise TypeError(f"values of {space_text(self.space)} have no fixed form")

    def doubt(self, value: Any) -> str | None:
        """Ask the space whether a value is in it; return why it is not, or None."""
        if self.space is None:
            return None
        try:
            contained = self.space.contains(value)
        except NotImplementedError:  # a bare `gymnasium.Space()`: any object
            return None
        except Exception as error:  # a custom space's own code
            reason = error_text(error)
            return f"{short_text(value)} cannot be checked by {space_text(self.space)}: {reason}"
        return None if contained else f"{short_text(value)} is not in {space_text(self.space)}"
