"""A manager as a `VecEnv` of Stable-Baselines3."""

from __future__ import annotations

import multiprocessing
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Space, Tuple

from envmgr.adapters import env_functions
from envmgr.adapters.batches import FixedBatches
from envmgr.adapters.rows import Rows
from envmgr.errors import (
    ConfigError,
    EnvNotReadyError,
    ManagerClosedError,
    UnknownEnvError,
)
from envmgr.manager import EnvManager
from envmgr.optional_packages import missing
from envmgr.shortcuts import create_env_manager
from envmgr.spaces import indexed, put_rows, rows_of
from envmgr.spaces.reading import error_text, read_list, short_text

try:
    from stable_baselines3.common.vec_env.base_vec_env import VecEnv

    from envmgr.adapters.sb3_monitor import VecMonitor
except ImportError as error:
    raise missing(
        "envmgr.adapters.sb3 needs stable-baselines3>=2.3", error, package="stable-baselines3>=2.3"
    ) from error

__all__ = ["EnvmgrVecEnv", "ManagerVecEnv", "VecMonitor"]

_PLAIN = (Box, Discrete, MultiDiscrete, MultiBinary)

_CUT = "TimeLimit.truncated"

_UNDER_WAY = "a step is under way: take what it gives with step_wait(), or reset()"

_RESET_FIRST = (
    "the envs have to be reset before their first step, and after a reset that Ctrl-C has ended: "
    "call reset()"
)

_Indices = int | Iterable[int] | None


class ManagerVecEnv(VecEnv):  # type: ignore[misc]
    """All envs of a manager, in the form that Stable-Baselines3 needs; see `envmgr.as_sb3`.

    Args:
        manager: the manager; if it is not launched, the first `reset` does that. `close` closes it.
        on_failure: see `as_sb3`.
        adapter: the public name of this adapter, for messages.

    Attributes:
        manager: the manager.
        closed: whether `close` was called.
    """

    def __init__(
        self, manager: EnvManager, *, on_failure: str | None = None, adapter: str = "as_sb3"
    ) -> None:
        self._batches = batches = FixedBatches(manager, adapter=adapter, on_failure=on_failure)
        self.manager = manager
        self.closed = False
        self._has_new_infos = False
        self._are_views = manager.cfg.copy_on_get is not True
        with batches.built():
            _refuse_spaces(adapter, manager.observation_space, manager.action_space)
            super().__init__(batches.n, manager.observation_space, manager.action_space)

    @property
    def waiting(self) -> bool:
        """Whether a step is under way, so that `step_wait` comes next."""
        return self._batches.is_stepping

    # -- resets -----------------------------------------------------------------------------

    @property
    def reset_infos(self) -> list[dict[str, Any]]:
        """What each env's latest reset reported besides the observation; read between steps."""
        if self._has_new_infos and not self.waiting and not self.closed:
            self._reset_infos = self._batches.first_infos()
            self._has_new_infos = False
        return self._reset_infos

    @reset_infos.setter
    def reset_infos(self, infos: list[dict[str, Any]]) -> None:
        self._reset_infos = infos

    def reset(self) -> Any:
        """Reset all envs, with the seeds and options that were given, and return observations.

        A step that is under way is cancelled.

        Returns:
            (n, *shape), or a dict or tuple of such.

        Raises:
            EnvManagerError: as in `EnvManager.launch` and `reset`.
        """
        self._refuse_closed()
        seeds = self._seeds if any(seed is not None for seed in self._seeds) else None
        self._batches.reset(seed=seeds, options=self._options)
        obs = self._batches.first_obs()
        self._has_new_infos = True
        self._reset_seeds()
        self._reset_options()
        self._batches.unseen = frozenset()  # the last: they are seen now
        return obs

    # -- steps ------------------------------------------------------------------------------

    def step_async(self, actions: Any) -> None:
        """Send one action to each env.

        Args:
            actions: (n, *shape), or a list of n actions.

        Raises:
            ActionError: the number or shape is wrong; nothing was sent.
            EnvNotReadyError: a step is under way, or the envs were never reset.
        """
        batches = self._batches
        if batches.unseen or batches.is_stepping:
            self._refuse_closed()
            raise EnvNotReadyError(_RESET_FIRST if batches.unseen else _UNDER_WAY)
        batches.send(actions)

    def step_wait(self) -> tuple[Any, npt.NDArray[Any], npt.NDArray[np.bool_], list[Any]]:
        """Return the timesteps of all envs, even of a step that Ctrl-C interrupted.

        Returns:
            (observations, rewards, dones, infos). Where an episode ended, the observation is the
            first of the next episode, and `infos[i]["terminal_observation"]` the terminal one.

        Raises:
            EnvNotReadyError: there is no step under way.
            EnvManagerError: as in `EnvManager.recv`; with on_failure "raise" what an env raised.
        """
        batches = self._batches
        if batches.unseen or not batches.is_stepping:
            self._refuse_closed()
            raise EnvNotReadyError(
                _RESET_FIRST
                if batches.unseen
                else "there is no step under way: call step_async(actions) first"
            )
        rows = cast("Rows", batches.receive())
        obs, rewards, terminated, truncated, _, ended = rows
        infos: Any = rows.infos
        if infos is None:
            infos = [{_CUT: False} for _ in range(self.num_envs)]
        else:
            infos = list(infos)
            for info in infos:
                info[_CUT] = False
        dones = terminated | truncated
        if ended:
            first = batches.first_obs(ended)
            last = batches.last_obs(rows)
            for k, env_id in enumerate(ended):
                infos[env_id][_CUT] = bool(truncated[env_id] and not terminated[env_id])
                infos[env_id]["terminal_observation"] = indexed(last, k)
            if self._are_views:
                obs = rows_of(obs, np.arange(self.num_envs))
            put_rows(obs, ended, first)
            self._has_new_infos = True
        batches.step = None  # the last: they are given out
        return obs, rewards, dones, infos

    # -- calls and attributes ---------------------------------------------------------------

    def get_attr(self, attr_name: str, indices: _Indices = None) -> list[Any]:
        """Return an attribute of envs; of wrapped ones, from the outermost wrapper that has it."""
        ids = self._env_ids(indices)
        if short_text(attr_name) == "'render_mode'" and self.manager.closed and not self.closed:
            return [self.manager.render_mode] * len(ids)
        result: list[Any] = self._ask("get_attr", attr_name, ids)
        return result

    def set_attr(self, attr_name: str, value: Any, indices: _Indices = None) -> None:
        """Set an attribute of envs where it is defined, else on the env inside its wrappers.

        It is set again in envs that are renewed after a failure.
        """
        ids = self._env_ids(indices)
        # A bare list would be taken for a list with one value for each env.
        self._ask(
            "set_attr", attr_name, [value] * len(ids) if isinstance(value, list) else value, ids
        )

    def has_attr(self, attr_name: str) -> bool:
        """Return whether all envs have an attribute, or a method."""
        return all(self._ask("apply", env_functions.has_attribute, attr_name))

    def env_method(
        self, method_name: str, *method_args: Any, indices: _Indices = None, **method_kwargs: Any
    ) -> list[Any]:
        """Call a method of envs and return the results.

        Raises:
            MethodAccessError: the method is private, or one that this class has itself: `reset`,
                `step`, `seed` or `close`.
            Exception: what an env raised, with its own class if that is a builtin one.
        """
        ids = self._env_ids(indices)
        result: list[Any] = self._ask("call_with", method_name, method_args, method_kwargs, ids)
        return result

    def env_is_wrapped(self, wrapper_class: type, indices: _Indices = None) -> list[bool]:
        """Return for each env whether it has a wrapper of a class."""
        name = wrapper_class.__module__, wrapper_class.__qualname__
        ids = self._env_ids(indices)
        result: list[bool] = self._ask("apply", env_functions.is_wrapped, *name, env_ids=ids)
        return result

    def get_images(self) -> Sequence[Any]:
        """Return a frame of each env; None for each if their render mode is not "rgb_array"."""
        if self.render_mode != "rgb_array":
            warnings.warn(
                f"the envs were built with render_mode={self.render_mode!r}, and frames come from "
                "those with 'rgb_array' only",
                stacklevel=2,
            )
            return [None] * self.num_envs
        frames: list[Any] = self._ask("call", "render", "rgb_array")
        return frames

    def _ask(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the manager that reaches its envs; raise an env's exception as such."""
        self._refuse_closed()
        if self._batches.is_stepping:
            raise EnvNotReadyError(_UNDER_WAY)
        return self._batches.ask(method, *args, **kwargs)

    def _env_ids(self, indices: _Indices) -> list[int]:
        if indices is None:
            return list(range(self.num_envs))
        try:
            each = [indices] if isinstance(indices, (int, np.integer)) else read_list(indices)
            return [i + self.num_envs if i < 0 else i for i in each]
        except Exception as error:  # whatever reading them raises
            raise UnknownEnvError(f"these are no indices of envs: {error_text(error)}") from error

    # -- the end ----------------------------------------------------------------------------

    def close(self) -> None:
        """Close all envs and the manager; the results of a step under way are lost."""
        self._batches.close()
        self.closed = True

    def _refuse_closed(self) -> None:
        if self.closed:
            raise ManagerClosedError("this vec env is closed: build a new one")


class EnvmgrVecEnv(ManagerVecEnv):
    """A replacement for `SubprocVecEnv`: `make_vec_env(..., vec_env_cls=EnvmgrVecEnv)`.

    Args:
        env_fns: one factory for each env. A script needs no `if __name__ == "__main__"` for them.
        start_method: "fork", "spawn", "forkserver", or None for envmgr's own.
        on_failure: "recover", or "raise" for what SubprocVecEnv does: an exception in the trainer.
        **cfg: keys of the manager's config, such as `num_workers=2` or `step_timeout=10`.

    Raises:
        ConfigError: a key does not exist, or Stable-Baselines3 cannot take a space.
        ValueError: there is no such start method.
        LaunchError: an env cannot be built.
    """

    def __init__(
        self,
        env_fns: Sequence[Callable[[], Any]],
        start_method: str | None = None,
        *,
        on_failure: str | None = None,
        **cfg: Any,
    ) -> None:
        given: dict[str, Any] = {"type": "subprocess", "reset_inplace": True}
        if start_method is not None:
            if start_method != "server":
                multiprocessing.get_context(start_method)
            given["context"] = start_method
        manager = create_env_manager({**given, **cfg}, env_fn=env_fns)
        super().__init__(manager, on_failure=on_failure, adapter="EnvmgrVecEnv")


def _refuse_spaces(adapter: str, observation_space: Space[Any], action_space: Space[Any]) -> None:
    """Refuse spaces that Stable-Baselines3 cannot take.

    Raises:
        ConfigError: a space is not a Box, Discrete, MultiDiscrete or MultiBinary, or one level of
            Dict or Tuple of these.
    """
    for what, space in (("observation", observation_space), ("action", action_space)):
        for key, part in _parts_of(space).items():
            if isinstance(part, _PLAIN):
                continue
            where = f"the {what} space" if key is None else f"the part {key!r} of the {what} space"
            raise ConfigError(
                f"{adapter}: Stable-Baselines3 takes Box, Discrete, MultiDiscrete and MultiBinary, "
                f"and one level of Dict or Tuple of these, but {where} is a "
                f"{type(part).__name__}. Wrap each env so that it has such a space, for example in "
                "gymnasium.wrappers.FlattenObservation"
            )


def _parts_of(space: Space[Any]) -> Mapping[Any, Space[Any]]:
    if isinstance(space, Dict):
        return space.spaces
    return dict(enumerate(space.spaces)) if isinstance(space, Tuple) else {None: space}
