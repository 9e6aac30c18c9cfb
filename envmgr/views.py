"""The forms in which users see batches: dicts by env_id, stacked arrays, treetensors (V2)."""

from __future__ import annotations

import importlib
import keyword
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from envmgr.core import ArrayBatch, ends_of
from envmgr.core.arguments import actions_by_id
from envmgr.core.requests import rows_by_id
from envmgr.errors import ActionError, MissingDependencyError, NothingReadyError
from envmgr.spaces import Codec, codec_of
from envmgr.spaces.reading import error_text, short_text
from envmgr.types import EnvTimestep


def array_batch(timesteps: Mapping[int, EnvTimestep], codec: Codec) -> ArrayBatch:
    """Stack timesteps, whose observations are of a codec's space, into arrays."""
    steps = list(timesteps.values())
    ends = np.array([ends_of(step.done, step.info) for step in steps], dtype=np.bool_)
    terminated, truncated = ends.reshape(-1, 2).T.copy()
    return ArrayBatch(
        np.fromiter(timesteps.keys(), dtype=np.int64, count=len(steps)),
        codec.stack([step.obs for step in steps]),
        _stacked_rewards([step.reward for step in steps]),
        terminated,
        truncated,
        tuple(step.info for step in steps),
    )


def _stacked_rewards(rewards: Sequence[Any]) -> npt.NDArray[Any]:
    try:
        arrays = [np.asarray(reward, dtype=np.float64) for reward in rewards]
        shape = np.broadcast_shapes(*(array.shape for array in arrays))
    except (ValueError, TypeError):  # dicts, or arrays of different shapes
        return codec_of(None).stack(rewards)  # type: ignore[no-any-return]
    if all(array.size == 1 for array in arrays):  # abnormal timesteps have 0.0 beside (1,) rewards
        return np.array([array.item() for array in arrays], dtype=np.float64)
    return np.stack([np.broadcast_to(array, shape) for array in arrays])


class DictView:
    """Observations, actions and timesteps as dicts by env_id."""

    def ready(self, observations: dict[int, Any]) -> Any:
        """Return what `ready_obs` gives."""
        return observations

    def rows(self, ready_ids: list[int]) -> list[int]:
        """Return the env_ids that belong to the rows of what was read."""
        return ready_ids

    def actions(self, actions: Any, ready_ids: Callable[[], list[int]]) -> Any:
        """Return the user's actions by env_id.

        Raises:
            ActionError: they are no mapping, or it cannot be read.
        """
        return actions if type(actions) is dict else actions_by_id(actions)

    def timesteps(self, timesteps: dict[int, EnvTimestep]) -> Any:
        """Return what `step` gives."""
        return timesteps

    def forget(self) -> None:
        """The rows that were read are used up, or stale."""


class TreeView(DictView):
    """Observations stacked into one treetensor, actions by row, timesteps as treetensors.

    Row i of the last `ready_obs` that was read belongs to action i, whatever became ready since.
    """

    def __init__(self) -> None:
        self._tnp = import_treetensor()
        self._read: list[int] | None = None

    def ready(self, observations: dict[int, Any]) -> Any:
        """Return one treetensor (or array) with a row for each ready env.

        Raises:
            NothingReadyError: no env is ready any more.
        """
        if not observations:
            raise NothingReadyError(
                "ready_obs is empty: all envs are DONE (their episode_num is spent), and an empty "
                "treetensor cannot be stacked. Check manager.done before reading it."
            )
        self._read = list(observations)
        values = list(observations.values())
        if isinstance(values[0], Mapping):
            return self._tnp.stack([self._tnp.array(_tree(value)) for value in values])
        return self._tnp.stack([self._tnp.array(value) for value in values])

    def rows(self, ready_ids: list[int]) -> list[int]:
        """Return the env_ids of the last `ready_obs`, or those that are ready if none was read."""
        return ready_ids if self._read is None else list(self._read)

    def actions(self, actions: Any, ready_ids: Callable[[], list[int]]) -> dict[int, Any]:
        """Pair actions with the rows of the last `ready_obs`.

        Args:
            actions: a list, a stacked array or tree, or `{env_id: action}`.
            ready_ids: tells the envs that are ready now; asked if `ready_obs` was not read.

        Raises:
            ActionError: there is not one action for each row.
        """
        if isinstance(actions, Mapping):
            actions = actions_by_id(actions)
            if all(isinstance(key, (int, np.integer)) for key in actions):
                return {env_id: _untree(action) for env_id, action in actions.items()}
        env_ids = ready_ids() if self._read is None else self._read
        each = f"each row of the last ready_obs, which is that of envs {short_text(env_ids)},"
        by_id = rows_by_id(env_ids, _untree(actions), each)
        return {env_id: _untree(action) for env_id, action in by_id.items()}

    def timesteps(self, timesteps: dict[int, EnvTimestep]) -> list[Any]:
        """Return a treetensor with `obs reward done info env_id` for each timestep."""
        return [self._timestep(env_id, step) for env_id, step in timesteps.items()]

    def _timestep(self, env_id: int, step: EnvTimestep) -> Any:
        obs = _tree(step.obs) if isinstance(step.obs, Mapping) else step.obs
        return self._tnp.array(
            {
                "obs": obs,
                "reward": step.reward,
                "done": step.done,
                "info": _convertible(_with_identifiers(step.info)),
                "env_id": env_id,
            }
        )

    def forget(self) -> None:
        """Pair the next actions with a newer `ready_obs`."""
        self._read = None


def import_treetensor() -> Any:
    """Return `treetensor.numpy`.

    Raises:
        MissingDependencyError: it is not installed.
    """
    try:
        with warnings.catch_warnings():  # its own use of names that numpy and PyTorch have moved
            warnings.simplefilter("ignore")
            return importlib.import_module("treetensor.numpy")
    except ImportError as error:
        raise MissingDependencyError(
            "kinds whose key ends in _v2 need treetensor, which is not installed (or not "
            f"complete: {error}). Install the extra treetensor, in a clone of this project with: "
            "pip install '.[treetensor]'. On PyPI it is DI-treetensor (Python 3.10 to 3.12, needs "
            "PyTorch); the package called treetensor there is something else."
        ) from error


def _tree(value: Any) -> Any:
    """Return nested mappings as plain dicts with string keys, as trees need them."""
    if isinstance(value, Mapping):
        return {str(key): _tree(part) for key, part in value.items()}
    return value


def _untree(actions: Any) -> Any:
    """Return a tree of arrays as nested dicts; leave all else alone."""
    try:
        as_dict = getattr(actions, "json", None)
        return as_dict() if callable(as_dict) else actions
    except Exception as error:  # what odd objects raise when they are looked at
        raise ActionError(
            f"the actions {short_text(actions)} cannot be read: {error_text(error)}. Nothing "
            "was sent to any env."
        ) from error


def _with_identifiers(info: Any) -> Any:
    """Return an info whose keys can be read as attributes: `TimeLimit.truncated` too.

    Follows what DI-engine's V2 managers do: what an identifier cannot hold becomes `_`.
    """
    if isinstance(info, Mapping):
        return {_identifier(str(key)): _with_identifiers(part) for key, part in info.items()}
    return info


def _identifier(key: str) -> str:
    name = re.sub(r"\W", "_", key)
    if not name or name[0].isdigit() or keyword.iskeyword(name):
        name = f"_{name}"
    return name


def _convertible(info: Any) -> Any:
    """Return an info without what cannot become an array, as DI-engine's V2 managers do."""
    if not isinstance(info, Mapping):
        return {}
    kept = {}
    for key, value in info.items():
        if isinstance(value, Mapping):
            kept[key] = _convertible(value)
        elif _is_arraylike(value):
            kept[key] = value
    return kept


def _is_arraylike(value: Any) -> bool:
    if isinstance(value, (bool, int, float, complex, np.number, np.bool_)):
        return True
    if hasattr(value, "__array__"):
        value = np.asarray(value)
        return bool(value.dtype.kind in "biufc")
    if isinstance(value, (list, tuple)):
        try:
            return np.asarray(value).dtype.kind in "biufc"
        except ValueError:  # ragged
            return False
    return False
