"""A manager as a vector env of tianshou."""

from __future__ import annotations

import numbers
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium.spaces import Tuple

from envmgr.adapters import env_functions
from envmgr.adapters.batches import FixedBatches, each_seed
from envmgr.adapters.requirements import missing
from envmgr.adapters.rows import Rows
from envmgr.errors import ActionError, ConfigError, EnvAttributeError
from envmgr.manager import EnvManager
from envmgr.registry import create_env_manager
from envmgr.spaces import indexed
from envmgr.spaces.reading import error_text, short_text

try:
    from tianshou.env import BaseVectorEnv
except ImportError as error:
    raise missing("as_tianshou", "tianshou>=2.0", error) from error

_Ids = int | Sequence[int] | npt.NDArray[np.int64] | None

_Step = tuple[
    npt.NDArray[Any],
    npt.NDArray[Any],
    npt.NDArray[np.bool_],
    npt.NDArray[np.bool_],
    npt.NDArray[np.object_],
]


class ManagerVectorEnv(BaseVectorEnv):  # type: ignore[misc]
    """All envs of a manager, as tianshou wants them; see `envmgr.as_tianshou`.

    Wrong calls raise AssertionError and ValueError, as tianshou's own vector envs do.

    Args:
        manager: launched, or to be launched by the first `reset`. `close` closes it.
        wait_num: as of `as_tianshou`.
        timeout: likewise.
        on_failure: likewise.
        adapter: the public name of this, for messages.

    Attributes:
        manager: the manager.
        env_num: number of envs.
        wait_num: how many timesteps a step waits for.
        timeout: seconds after which it does not wait any more.
        is_async: whether steps may return less than all.
        waiting_id: the envs whose timesteps are awaited.
        ready_id: the others.
        is_closed: whether `close` was called.
    """

    def __init__(
        self,
        manager: EnvManager,
        *,
        wait_num: int | None = None,
        timeout: float | None = None,
        on_failure: str | None = None,
        adapter: str = "as_tianshou",
    ) -> None:
        self.manager = manager
        self._batches = batches = FixedBatches(
            manager, adapter=adapter, on_failure=on_failure, auto_reset=False
        )
        self.env_num = n = batches.n
        for name, value in (("wait_num", wait_num), ("timeout", timeout)):
            is_number = value is None or isinstance(value, numbers.Real)
            _claim(is_number, f"{name} should be a number, found {short_text(value)}")
        self.wait_num = wait_num or n
        self.timeout = timeout
        _claim(1 <= self.wait_num <= n, f"wait_num should be 1 to {n}, found {wait_num}")
        _claim(timeout is None or timeout > 0, f"timeout should be above 0, found {timeout}")
        self.is_async = self.wait_num != n or timeout is not None
        self.waiting_id: list[int] = []
        self.ready_id = list(range(n))
        self.is_closed = False
        self._all = list(range(n))
        with batches.built():
            if isinstance(manager.observation_space, Tuple):
                raise ConfigError(
                    f"{adapter}: tianshou does not take a Tuple as observation space. Wrap each "
                    "env so that it gives a Dict, or one array: for example in "
                    "gymnasium.wrappers.FlattenObservation"
                )

    # -- resets and seeds -------------------------------------------------------------------

    def reset(
        self, env_id: _Ids = None, **kwargs: Any
    ) -> tuple[npt.NDArray[Any], npt.NDArray[np.object_]]:
        """Begin new episodes in some envs, or in all.

        Args:
            env_id: in which envs; None for all.
            **kwargs: `seed`, which is for each of these envs the same, and `options`.

        Returns:
            (observations, infos): (k, *shape), or an object array of what is no array; (k,) dicts.
        """
        self._refuse_closed()
        ids = self._ready_ids(env_id)
        seed, options = kwargs.pop("seed", None), kwargs.pop("options", None)
        if kwargs:
            raise TypeError(f"reset takes seed and options, found {', '.join(map(repr, kwargs))}")
        seeds = None if seed is None else [seed] * self.env_num
        return self._reset(ids, seeds, options)

    def seed(self, seed: int | Sequence[int | None] | None = None) -> list[list[int] | None]:
        """Seed all envs, and reset them with that, as tianshou's own do.

        Args:
            seed: an int gives env i exactly `seed + i`; a list has one for each.

        Returns:
            The seeds.
        """
        self._refuse_closed()
        seeds = each_seed(seed, self.env_num) or [None] * self.env_num
        self._reset(self._ready_ids(None), seeds, None)
        return [None if one is None else [one] for one in seeds]

    def _reset(
        self, ids: list[int], seeds: Sequence[int | None] | None, options: Any
    ) -> tuple[npt.NDArray[Any], npt.NDArray[np.object_]]:
        self._batches.reset(ids, seed=seeds, options=options)
        infos = self._batches.first_infos(ids)
        return _stacked(self._batches.first_obs(ids), len(ids)), _objects(infos)

    # -- steps ------------------------------------------------------------------------------

    def step(self, action: Any, id: _Ids = None) -> _Step:
        """Have envs take a step.

        Args:
            action: one for each of these envs; None only gathers, in an asynchronous one.
            id: which envs; None for all.

        Returns:
            (observations, rewards, terminated, truncated, infos), in the order of `id`; of an
            asynchronous one in ascending order, of those that have come. Each info has `env_id`.
        """
        self._refuse_closed()
        if action is None and not self.is_async:
            raise ValueError("without wait_num and timeout every step needs actions, found None")
        if action is not None:
            ids, rows = self._ready_ids(id), _plain(action)
            count = len(rows) if isinstance(rows, list) or rows.ndim else 0
            _claim(count == len(ids), f"{count} actions came for {len(ids)} envs")
            self._batches.send(rows, ids)
            if self.is_async:
                self.waiting_id += ids
                self.ready_id = [i for i in self.ready_id if i not in self.waiting_id]
        if self.is_async:
            return _step_of(*self._gather_some())
        came, rows = self._batches.receive_some(len(ids))
        if came != ids:
            rows = rows.at([came.index(i) for i in ids])
        return _step_of(ids, rows)

    def _gather_some(self) -> tuple[list[int], Rows]:
        _claim(bool(self.waiting_id), "no step is under way: give actions for envs that are ready")
        min_ready = min(self.wait_num, len(self.waiting_id))
        came, rows = self._batches.receive_some(min_ready, self.timeout)
        self.waiting_id = [i for i in self.waiting_id if i not in came]
        self.ready_id += came
        return came, rows

    # -- calls and attributes ---------------------------------------------------------------

    def get_env_attr(self, key: str, id: _Ids = None) -> list[Any]:
        """Return an attribute of envs; None where an env has none of this name."""
        self._refuse_closed()
        ids = self._ready_ids(id)
        try:
            values: list[Any] = self._batches.ask("get_attr", key, ids)
        except EnvAttributeError:
            has = self._batches.ask("apply", env_functions.has_attribute, key, env_ids=ids)
            pairs = zip(ids, has, strict=True)
            values = [self._batches.ask("get_attr", key, [i])[0] if it else None for i, it in pairs]
        return values

    def set_env_attr(self, key: str, value: Any, id: _Ids = None) -> None:
        """Set an attribute of envs where it is defined, else on the outermost wrapper.

        It is set again in envs that are renewed after a failure.
        """
        self._refuse_closed()
        ids = self._ready_ids(id)
        self._batches.ask(
            "set_attr", key, [value] * len(ids) if isinstance(value, list) else value, ids
        )

    def render(self, **kwargs: Any) -> list[Any]:
        """Return what each env renders."""
        self._refuse_closed()
        if self.waiting_id:
            raise RuntimeError(
                f"envs {self.waiting_id} have steps under way and cannot be rendered"
            )
        result: list[Any] = self._batches.ask("apply", env_functions.rendered, kwargs)
        return result

    # -- the rest ---------------------------------------------------------------------------

    def _ready_ids(self, env_ids: _Ids) -> list[int]:
        """Return env_ids as a list.

        Raises:
            AssertionError: a step of one of them is under way.
        """
        ids = list(self._all) if env_ids is None else _listed(env_ids)
        known = len(set(ids)) == len(ids) and set(ids) <= set(self._all)
        _claim(known, f"env ids are 0 to {self.env_num - 1}, each once, found {short_text(ids)}")
        if self.waiting_id:
            busy = [i for i in ids if i in self.waiting_id]
            _claim(not busy, f"envs {busy} have steps under way: gather them with step(None)")
        return ids

    def close(self) -> None:
        """Close all envs and the manager; what steps under way would give is lost."""
        self._batches.close()
        self.is_closed = True

    def _refuse_closed(self) -> None:
        _claim(not self.is_closed, "this vector env is closed: build a new one")


class EnvmgrVectorEnv(ManagerVectorEnv):
    """Takes the place of `SubprocVectorEnv` and `ShmemVectorEnv`.

    Args:
        env_fns: one factory for each env; their spaces may differ.
        wait_num: how many timesteps a step waits for, for `AsyncCollector`; None for all.
        timeout: seconds after which a step returns what has come, if that is anything.
        on_failure: "recover", or "raise" for an exception in the trainer.
        **cfg: keys of the manager's config, such as `num_workers=2` or `step_timeout=10`.

    Raises:
        ConfigError: a key that does not exist, or a space that tianshou cannot take.
        LaunchError: an env cannot be built.
    """

    def __init__(
        self,
        env_fns: Sequence[Callable[[], Any]],
        wait_num: int | None = None,
        timeout: float | None = None,
        *,
        on_failure: str | None = None,
        **cfg: Any,
    ) -> None:
        # tianshou's policies and collectors give Discrete actions as floats, too.
        given = {"auto_reset": False, "same_spaces": False, "check_actions": False}
        some = wait_num is not None or timeout is not None
        kind = "async_subprocess" if some else "subprocess"
        manager = create_env_manager({"type": kind, **given, **cfg}, env_fn=env_fns)
        super().__init__(
            manager,
            wait_num=wait_num,
            timeout=timeout,
            on_failure=on_failure,
            adapter="EnvmgrVectorEnv",
        )


def _claim(holds: bool, message: str) -> None:
    if not holds:
        raise AssertionError(message)


def _listed(env_ids: Any) -> list[Any]:
    try:
        listed: list[Any] = np.atleast_1d(np.asarray(env_ids)).tolist()
        return [operator.index(i) for i in listed]
    except Exception as error:  # whatever reading them raises
        raise AssertionError(f"these are no env ids: {error_text(error)}") from error


def _plain(action: Any) -> Any:
    try:
        return action if isinstance(action, (np.ndarray, list)) else np.asarray(action)
    except Exception as error:  # as above
        raise ActionError(f"the actions are no array: {error_text(error)}") from error


def _step_of(env_ids: list[int], rows: Rows) -> _Step:
    obs, rewards, terminated, truncated, infos, _ = rows
    if infos is None:
        infos = [{"env_id": i} for i in env_ids]
    else:
        for env_id, info in zip(env_ids, infos, strict=True):
            info["env_id"] = env_id
    return _stacked(obs, len(env_ids)), rewards, terminated, truncated, _objects(infos)


def _objects(values: Sequence[Any]) -> npt.NDArray[np.object_]:
    return np.fromiter(values, dtype=object, count=len(values))  # reads nothing inside of them


def _stacked(obs: Any, count: int) -> npt.NDArray[Any]:
    """Return observations as one array, of objects where they are dicts."""
    if isinstance(obs, np.ndarray):
        return obs
    return _objects([indexed(obs, k) for k in range(count)])
