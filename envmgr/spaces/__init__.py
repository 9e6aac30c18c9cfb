"""What a space means for moving data: the only place that switches on space classes.

A space whose every value has the same arrays of the same shapes (Box, Discrete, MultiDiscrete,
MultiBinary and nested Dict/Tuple of these) has a *fixed layout*: a list of leaves. Such values are
checked against it, and can be written into preallocated memory. Other spaces (Text, Sequence,
Graph, OneOf, custom ones) have none; their values are checked by the space itself and travel as
they are. So do those of a bare `gymnasium.Space()`, which stands for any object: it checks nothing,
and is assumed for an env without spaces. But texts have room in preallocated memory, too, if they
are not too long for it: observations that consist only of arrays and texts are *placed* there.
"""

from __future__ import annotations

from envmgr.spaces.agents import AgentSpace, is_sampled_alone
from envmgr.spaces.batches import (
    as_batch,
    concatenated,
    indexed,
    leafwise,
    merged_axes,
    put_rows,
    rows_of,
    stacked,
    zeros_for,
)
from envmgr.spaces.codec import ActionCheck, Codec
from envmgr.spaces.codecs import codec_of
from envmgr.spaces.columns import ActionColumns, split_batch
from envmgr.spaces.equality import has_samples, same_space, space_text
from envmgr.spaces.layouts import Layout, Leaf, TextLeaf, TextReader, objects
from envmgr.spaces.values import (
    Array,
    NonFiniteError,
    OnCast,
    ValueMismatchError,
    check_finite,
    finite_test,
    has_floats,
    path_text,
    rebuilt,
)

__all__ = [
    "ActionCheck",
    "ActionColumns",
    "AgentSpace",
    "Array",
    "Codec",
    "Layout",
    "Leaf",
    "NonFiniteError",
    "OnCast",
    "TextLeaf",
    "TextReader",
    "ValueMismatchError",
    "as_batch",
    "check_finite",
    "codec_of",
    "concatenated",
    "finite_test",
    "has_floats",
    "has_samples",
    "indexed",
    "is_sampled_alone",
    "leafwise",
    "merged_axes",
    "objects",
    "path_text",
    "put_rows",
    "rebuilt",
    "rows_of",
    "same_space",
    "space_text",
    "split_batch",
    "stacked",
    "zeros_for",
]
