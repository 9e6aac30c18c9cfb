"""The infos of n envs as the one dict of a Gymnasium vector env."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from envmgr.spaces import leafwise

AddInfo = Callable[[dict[str, Any], dict[str, Any], int], dict[str, Any]]


def batched(infos: Iterable[dict[str, Any]], add: AddInfo) -> dict[str, Any]:
    """Return infos by key, each with a mask `_key`, in the order of env_ids.

    Args:
        infos: of all envs.
        add: adds the info of one env, as `VectorEnv._add_info` does.
    """
    vector: dict[str, Any] = {}
    for env_id, info in enumerate(infos):
        if info:
            vector = add(vector, info, env_id)
    return vector


def adding_as_029(n: int) -> AddInfo:
    """Return what adds an info in the form that Gymnasium 0.29 had.

    Dicts and arrays in it are objects.
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


def final(
    n: int, ended: Sequence[int], infos: Sequence[dict[str, Any]], obs: Any, add: AddInfo
) -> dict[str, Any]:
    """Return what n envs say of the episodes that ended in a step after which they were reset.

    Args:
        n: number of envs.
        ended: whose episodes ended.
        infos: of their last steps.
        obs: a batch of their terminal observations.
        add: see `batched`.
    """
    mask = np.zeros(n, dtype=np.bool_)
    mask[ended] = True
    shown = np.full(n, None, dtype=object)
    vector: dict[str, Any] = {}
    for k, (env_id, info) in enumerate(zip(ended, infos, strict=True)):
        shown[env_id] = of_one_env(obs, k)
        if info:
            vector = add(vector, info, env_id)
    return {
        "final_info": vector,
        "_final_info": mask,
        "final_obs": shown,
        "_final_obs": mask.copy(),
    }


def final_as_029(
    n: int, ended: Sequence[int], infos: Sequence[dict[str, Any]], obs: Any
) -> dict[str, Any]:
    """As `final`, in the form that Gymnasium 0.29 had."""
    found = final(n, ended, [{}] * len(ended), obs, adding_as_029(n))
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

    Objects, which are values of spaces without fixed layout, are what the env gave.
    """
    return leafwise(lambda column: _of_column(column, row), obs)


def _of_column(column: npt.NDArray[Any], row: int) -> Any:
    value = column[row]
    return int(value) if isinstance(value, np.int64) and not column.dtype.hasobject else value
