"""The infos of n envs as the one dict of a Gymnasium vector env."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

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

    Dicts and arrays are objects: `final_info` is an object array of dicts and None, and so is
    `final_observation`, which has taken the place of `final_obs` by then.
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
    info: dict[str, Any], obs: Any, reset_info: Mapping[str, Any], *, as_029: bool
) -> dict[str, Any]:
    """Return the info of a step after which the env was reset at once."""
    name = "final_observation" if as_029 else "final_obs"
    return {"final_info": info, name: obs, **reset_info}


def of_one_env(obs: Any) -> Any:
    """Return one row of a batch as an env gives it: with an int for a Discrete space."""
    if isinstance(obs, Mapping):
        return {key: of_one_env(part) for key, part in obs.items()}
    if isinstance(obs, tuple):
        return tuple(map(of_one_env, obs))
    return int(obs) if isinstance(obs, np.int64) else obs
