"""The infos of n envs as the one dict of a Gymnasium vector env."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from envmgr.adapters.rows import RowIds
from envmgr.manager import InfoColumn, InfoColumns
from envmgr.spaces import leafwise

AddInfo = Callable[[dict[str, Any], dict[str, Any], int], dict[str, Any]]


def batched(infos: Iterable[dict[str, Any]], add: AddInfo) -> dict[str, Any]:
    """Return infos by key, each with a mask `_key`, in the order of env_ids.

    Args:
        infos: the infos of all envs.
        add: adds the info of one env, as `VectorEnv._add_info` does.
    """
    return with_more({}, enumerate(infos), add)


def with_more(
    vector: dict[str, Any], infos: Iterable[tuple[int, dict[str, Any]]], add: AddInfo
) -> dict[str, Any]:
    """Return a dict like that of `batched`, with the infos of some more envs added to it."""
    for env_id, info in infos:
        if info:
            vector = add(vector, info, env_id)
    return vector


def are_like(columns: Mapping[str, Any], infos: Iterable[dict[Any, Any]]) -> bool:
    """Return whether infos have only keys and types that fit columns."""
    for info in infos:
        for key, value in info.items():
            if not isinstance(key, str):  # as Gymnasium does it, which writes `_{key}` for any
                return False
            if f"_{key}" in columns or (key[:1] == "_" and key[1:] in columns):
                return False
            column = columns.get(key)
            if column is None:
                continue
            if not isinstance(column, InfoColumn):
                if type(value) is not dict or not are_like(column, (value,)):
                    return False
            elif type(value) is not column.kind or type(value) is np.ndarray:
                return False
    return True


def of_columns(
    columns: Mapping[str, Any], n: int, positions: RowIds | None = None
) -> dict[str, Any] | None:
    """Return what `batched` returns for infos, from their columns, without a loop over envs.

    Args:
        columns: the infos in the form of `ArrayBatch.info_columns`.
        n: number of envs.
        positions: the envs whose infos they are; None for all of them.

    Returns:
        None if `VectorEnv._add_info` gives another result, as for values of several types.
    """
    vector: dict[str, Any] = {}
    for key, column in columns.items():
        if key in _SPECIAL or f"_{key}" in columns:
            return None
        values: Any
        if type(column) is InfoColumn:
            values = column[0]
            if column.kind is np.bool_ or values.dtype == object:
                values = _values_as_added(column)
            if values is not None and positions is not None:
                whole: Any = np.zeros((n, *values.shape[1:]), values.dtype)
                if values.dtype == object:
                    whole.fill(None)
                whole[positions] = values
                values = whole
        else:
            values = of_columns(column, n, positions)
        if values is None:
            return None
        present = column.present
        if positions is not None:
            present = np.zeros(n, np.bool_)
            present[positions] = column.present
        vector[key], vector[f"_{key}"] = values, present
    return vector


def at_rows(columns: Mapping[str, Any], rows: RowIds) -> dict[str, Any]:
    """Return the columns of some of the infos, for the keys that any of these infos has."""
    found: dict[str, Any] = {}
    for key, column in columns.items():
        present = column.present[rows]
        if not present.any():
            continue
        if type(column) is InfoColumn:
            found[key] = InfoColumn.of(column.values[rows], present, column.kind)
        else:
            found[key] = InfoColumns(at_rows(column, rows), present)
    return found


_SPECIAL = frozenset(("final_obs", "error"))
"""Keys of values that Gymnasium keeps unbatched, or that are exceptions before they are text."""


def _values_as_added(column: InfoColumn) -> npt.NDArray[Any] | None:
    """Return a column's values as objects; None if Gymnasium does not add them as objects."""
    values, present = column
    kind = column.kind
    if kind is np.bool_:
        objects = np.full(len(values), None, dtype=object)
        objects[present] = list(values[present])
        return objects
    is_object = kind is not None and not issubclass(kind, _NO_OBJECTS)
    return values if is_object else None


_NO_OBJECTS = (int, float, dict, np.ndarray, np.number)


def adding_as_029(n: int) -> AddInfo:
    """Return a function that adds an info in the form that Gymnasium 0.29 had.

    Dicts and arrays in the info are objects in that form.
    """

    def add(vector: dict[str, Any], info: dict[str, Any], env_id: int) -> dict[str, Any]:
        for key, value in info.items():
            if key not in vector:
                vector[key], vector[f"_{key}"] = _column(n, value), np.zeros(n, dtype=np.bool_)
            vector[key][env_id] = value
            vector[f"_{key}"][env_id] = True
        return vector

    return add


def _column(n: int, value: Any) -> npt.NDArray[Any]:
    if isinstance(value, (bool, int, float, np.number)):
        return np.zeros(n, dtype=type(value))
    return np.full(n, None, dtype=object)


def final(n: int, ended: Sequence[int], infos: dict[str, Any], obs: Any) -> dict[str, Any]:
    """Return the final infos and observations of the envs that were reset after a step.

    Args:
        n: number of envs.
        ended: the envs whose episodes ended.
        infos: the infos of their last steps, as `batched` returns them.
        obs: a batch of their terminal observations.
    """
    mask = np.zeros(n, dtype=np.bool_)
    mask[ended] = True
    shown = np.full(n, None, dtype=object)
    for k, env_id in enumerate(ended):
        shown[env_id] = of_one_env(obs, k)
    return {
        "final_info": infos,
        "_final_info": mask,
        "final_obs": shown,
        "_final_obs": mask.copy(),
    }


def final_as_029(
    n: int, ended: Sequence[int], infos: Sequence[dict[str, Any]], obs: Any
) -> dict[str, Any]:
    """Return what `final` returns, in the form that Gymnasium 0.29 had."""
    found = final(n, ended, {}, obs)
    column = np.full(n, None, dtype=object)
    for env_id, info in zip(ended, infos, strict=True):
        column[env_id] = info
    return {
        "final_info": column,
        "_final_info": found["_final_info"],
        "final_observation": found["final_obs"],
        "_final_observation": found["_final_obs"],
    }


def of_one_env(obs: Any, row: int) -> Any:
    """Return one row of a batch as an env gives it: with an int for a Discrete space.

    Objects, which are values of spaces without fixed layout, are returned as the env gave them.
    """
    return leafwise(lambda column: _of_column(column, row), obs)


def _of_column(column: npt.NDArray[Any], row: int) -> Any:
    value = column[row]
    return int(value) if isinstance(value, np.int64) and not column.dtype.hasobject else value
