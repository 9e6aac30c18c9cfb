"""The forms in which each kind shows batches to users: dicts by env_id, or treetensors (V2)."""

from __future__ import annotations

import functools
import importlib
import keyword
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from envmgr.core import ArrayBatch, GivenInfos, ends_of
from envmgr.core.call_journal import CallJournal
from envmgr.core.validate import actions_by_id, rows_by_id
from envmgr.errors import ActionError, NothingReadyError, SpaceMismatchError
from envmgr.optional_packages import imported
from envmgr.spaces import Codec, ValueMismatchError, codec_of
from envmgr.spaces.interrupts import pass_interrupt_on
from envmgr.spaces.reading import error_text, short_text
from envmgr.types import EnvTimestep


class Forms:
    """The codecs that stack observations of envs, whose spaces may differ.

    Args:
        spaces: the observation space of each env.
    """

    def __init__(self, spaces: Sequence[Any]) -> None:
        self._codecs = [codec_of(space) for space in spaces]
        structures = [codec.structure for codec in self._codecs]
        self._form_of = [structures.index(structure) for structure in structures]

    def codec_of(self, env_ids: Iterable[int]) -> Codec:
        """Return the codec of some envs; one for any objects if their structures differ."""
        form, *others = {self._form_of[i] for i in env_ids} or set(self._form_of)
        return codec_of(None) if others else self._codecs[form]


def array_batch(timesteps: Mapping[int, EnvTimestep], codec: Codec) -> ArrayBatch:
    """Stack timesteps into arrays; the observations are of the codec's space."""
    steps = list(timesteps.values())
    ends = np.array([ends_of(step.done, step.info) for step in steps], dtype=np.bool_)
    terminated, truncated = ends.reshape(-1, 2).T.copy()
    observations = [step.obs for step in steps]
    try:
        obs = codec.stack(observations)
    except ValueMismatchError:  # its user has changed one, which an abnormal timestep shows again
        obs = codec_of(None).stack(observations)
    return ArrayBatch(
        np.fromiter(timesteps.keys(), dtype=np.int64, count=len(steps)),
        obs,
        _stacked_rewards([step.reward for step in steps]),
        terminated,
        truncated,
        GivenInfos.of(step.info for step in steps),
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
    """Observations, actions and timesteps as dicts by env_id, just as they are."""

    def ready(self, observations: dict[int, Any]) -> Any:
        """Return what `ready_obs` gives."""
        return observations

    def rows(self, ready_ids: list[int]) -> list[int]:
        """Return the env_ids that belong to the rows of what was read."""
        return ready_ids

    def actions(self, actions: Any, ready_ids: Callable[[], list[int]]) -> Any:
        """Return the user's actions by env_id.

        Raises:
            ActionError: they are no mapping, or one that cannot be read.
        """
        return actions if type(actions) is dict else actions_by_id(actions)

    def timesteps(
        self, timesteps: dict[int, EnvTimestep], journal: CallJournal | None = None
    ) -> Any:
        """Return what `step` gives.

        Args:
            timesteps: the timesteps by env_id.
            journal: the journal of the call that returns them; its `fate` says later on if the call
                did not return them.
        """
        return timesteps

    def forget(self) -> None:
        """Take note that the rows that were read are used up, or stale."""


class TreeView(DictView):
    """Observations stacked into one treetensor, actions by row, timesteps as treetensors.

    Row i of the last `ready_obs` that was read belongs to action i, whatever became ready since.
    """

    def __init__(self) -> None:
        self._trees = Trees()
        self._read: list[int] | None = None

    def ready(self, observations: dict[int, Any]) -> Any:
        """Return one treetensor (or array) with a row for each ready env.

        Raises:
            NothingReadyError: no env is ready any more.
            SpaceMismatchError: observations without fixed layout differ in keys or shapes.
        """
        if not observations:
            raise NothingReadyError(
                "ready_obs is empty: all envs are DONE (their episode_num is spent), and an empty "
                "treetensor cannot be stacked. Check manager.done before reading it."
            )
        self._read = list(observations)
        try:
            stacked = self._trees.stacked(list(observations.values()))
        except ValueError as error:
            raise _no_arrays("observations", self._read, error) from error
        return self._trees.tree(stacked) if isinstance(stacked, dict) else stacked

    def rows(self, ready_ids: list[int]) -> list[int]:
        """Return the env_ids of the last `ready_obs`, or those that are ready if none was read."""
        return ready_ids if self._read is None else list(self._read)

    def actions(self, actions: Any, ready_ids: Callable[[], list[int]]) -> dict[int, Any]:
        """Pair actions with the rows of the last `ready_obs`.

        Args:
            actions: a list, a stacked array or tree, or `{env_id: action}`.
            ready_ids: returns the envs that are ready now; called if `ready_obs` was not read.

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

    def timesteps(
        self, timesteps: dict[int, EnvTimestep], journal: CallJournal | None = None
    ) -> list[Any]:
        """Return a treetensor with `obs reward done info env_id` for each timestep.

        Their arrays belong to nobody else: to change them changes neither `ready_obs` nor the
        block.

        Raises:
            SpaceMismatchError: an observation or reward without fixed layout is no array.
        """
        tree, arrays, info_arrays = self._trees.tree, self._trees.arrays, self._trees.info_arrays
        try:
            return [
                tree(
                    {
                        "obs": arrays(obs),
                        "reward": arrays(reward),
                        "done": np.array(done),
                        "info": info_arrays(info),
                        "env_id": np.array(env_id),
                    }
                )
                for env_id, (obs, reward, done, info) in timesteps.items()
            ]
        except ValueError as error:
            raise _no_arrays("timesteps", list(timesteps), error) from error

    def forget(self) -> None:
        """Pair the next actions with a newer `ready_obs`."""
        self._read = None


def _no_arrays(what: str, env_ids: list[int], error: ValueError) -> SpaceMismatchError:
    return SpaceMismatchError(
        f"the {what} of envs {short_text(env_ids)} are no batch: envs of V2 kinds have to give "
        f"arrays of one structure and shape; the other kinds give {what} one by one. ({error})"
    )


def import_treetensor() -> Any:
    """Return `treetensor.numpy`.

    Raises:
        MissingDependencyError: it is not installed.
    """
    with warnings.catch_warnings():  # its own use of names that numpy and PyTorch have moved
        warnings.simplefilter("ignore")
        return imported(
            "treetensor.numpy",
            "kinds whose key ends in _v2 need treetensor",
            extra="treetensor",
            note=". On PyPI it is DI-treetensor (Python 3.10 to 3.12, needs PyTorch); the package "
            "called treetensor there is something else",
        )


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


_NUMBERS = frozenset((float, int, bool, np.float64, np.float32, np.int64, np.bool_))
_PLAIN = _NUMBERS | {np.ndarray}
"""Types whose values become arrays without being looked at."""


class Trees:
    """A maker of treetensors of numpy arrays, straight from the storage of treevalue.

    `treetensor.numpy.array` makes the same from a dict, but formats every array in it as text on
    the way, which takes twenty times as long.
    """

    def __init__(self) -> None:
        self._tree = import_treetensor().ndarray
        self._create_storage = importlib.import_module("treevalue.tree.common").create_storage
        self._any_tree = importlib.import_module("treevalue").TreeValue

    def tree(self, arrays: dict[str, Any]) -> Any:
        """Return nested dicts of arrays as a tree, which keeps the arrays themselves."""
        return self._tree(self._create_storage(arrays))

    def arrays(self, value: Any) -> Any:
        """Return a value as a new array; mappings and trees as dicts of such arrays."""
        if type(value) in _PLAIN:
            return np.array(value)
        value = self._opened(value)
        if isinstance(value, Mapping):
            return {str(key): self.arrays(part) for key, part in value.items()}
        return np.array(value)

    def stacked(self, values: Sequence[Any]) -> Any:
        """Return k values as one array (k, *shape); mappings and trees as dicts of such arrays.

        Raises:
            ValueMismatchError: mappings have different keys.
        """
        if _PLAIN.issuperset(map(type, values)):
            return np.array(values)
        values = list(map(self._opened, values))
        keys = _keys_of(values[0])
        for value in values:
            if _keys_of(value) != keys:
                raise ValueMismatchError(
                    f"{short_text(value)} has not the keys of {short_text(values[0])}"
                )
        if keys is None:
            return np.stack(values)
        return {str(key): self.stacked([value[key] for value in values]) for key in keys}

    def info_arrays(self, info: Any) -> dict[str, Any]:
        """Return an info as nested dicts of arrays, whose keys can be read as attributes.

        This follows what DI-engine's V2 managers do: characters that an identifier cannot hold
        become `_` in keys (`TimeLimit.truncated`), and values that cannot become an array are left
        out.
        """
        arrays: dict[str, Any] = {}
        if type(info) is not dict:
            info = self._opened(info)
            if not isinstance(info, Mapping):
                return arrays
        for key, value in info.items():
            name = _identifier(str(key))
            if type(value) in _NUMBERS:
                arrays[name] = np.array(value)
                continue
            value = self._opened(value)
            if isinstance(value, Mapping):
                arrays[name] = self.info_arrays(value)
            elif (array := _array_of(value)) is not None:
                arrays[name] = array
        return arrays

    def _opened(self, value: Any) -> Any:
        """Return a tree as nested dicts; leave all else alone."""
        return value.json() if isinstance(value, self._any_tree) else value


def _keys_of(value: Any) -> Any:
    return value.keys() if isinstance(value, Mapping) else None


@functools.lru_cache(maxsize=4096)
def _identifier(key: str) -> str:
    name = re.sub(r"\W", "_", key)
    if not name or name[0].isdigit() or keyword.iskeyword(name):
        name = f"_{name}"
    return name


def _array_of(value: Any) -> npt.NDArray[Any] | None:
    """Return a new array of a number, or of a sequence or array of numbers; None for all else."""
    if isinstance(value, (bool, int, float, complex, np.number, np.bool_)):
        return np.array(value)
    if hasattr(value, "__array__") or isinstance(value, (list, tuple)):
        try:
            array = np.array(value)
        except Exception as error:  # ragged; or whatever its own `__array__` may raise
            pass_interrupt_on(error)
        else:
            return array if array.dtype.kind in "biufc" else None
    return None
