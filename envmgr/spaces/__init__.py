"""What a space means for moving data: the only place that switches on space classes.

A space whose every value has the same arrays of the same shapes (Box, Discrete, MultiDiscrete,
MultiBinary and nested Dict/Tuple of these) has a *fixed layout*: a list of leaves. Such values are
checked against it, and can be written into preallocated memory. Other spaces (Text, Sequence,
Graph, OneOf, custom ones) have none; their values are checked by the space itself and travel as
they are.
"""

from __future__ import annotations

from envmgr.spaces.actions import ActionCheck, action_check
from envmgr.spaces.batches import split_batch, stack_values
from envmgr.spaces.columns import ActionColumns, action_columns
from envmgr.spaces.layouts import Layout, Leaf, check_free_form, layout_of
from envmgr.spaces.values import (
    Array,
    NonFiniteError,
    OnCast,
    ValueMismatchError,
    check_finite,
    finite_test,
    path_text,
)

__all__ = [
    "ActionCheck",
    "ActionColumns",
    "Array",
    "Layout",
    "Leaf",
    "NonFiniteError",
    "OnCast",
    "ValueMismatchError",
    "action_check",
    "action_columns",
    "check_finite",
    "check_free_form",
    "finite_test",
    "layout_of",
    "path_text",
    "split_batch",
    "stack_values",
]
