"""A manager as a vector env of tianshou."""

from __future__ import annotations

import numbers
import operator
from collections.abc import Callable, Sequence
from multiprocessing.context import BaseContext
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
from gymnasium.spaces import Tuple

from envmgr.adapters import env_functions
from envmgr.adapters.batches import FixedBatches, Step, each_seed
from envmgr.adapters.rows import Rows
from envmgr.errors import ActionError, ConfigError, EnvAttributeError
from envmgr.manager import ArrayBatch, EnvManager
from envmgr.optional_packages import missing
from envmgr.shortcuts import create_env_manager
from envmgr.spaces import indexed
from envmgr.spaces.reading import error_text, short_text

try:
    from tianshou.env import BaseVectorEnv
except ImportError as error:
    raise missing(
        "envmgr.adapters.tianshou needs tianshou>=2.0", error, package="tianshou>=2.0"
    ) from error

_Ids = int | Sequence[int] | npt.NDArray[np.int64] | None

_Step = tuple[
    npt.NDArray[Any],
    npt.NDArray[Any],
    npt.NDArray[np.bool_],
    npt.NDArray[np.bool_],
    npt.NDArray[np.object_],
]


class _UnderWay(NamedTuple):
    """Steps of an asynchronous vector env that are under way; replaced as a whole.

    Attributes:
        env_ids: the envs that take them.
        arrived: what the manager has delivered of them, but the trainer has not been given.
    """

    env_ids: list[int]
    arrived: list[ArrayBatch]


class ManagerVectorEnv(BaseVectorEnv):  # type: ignore[misc]
    """All envs of a manager, in the form that tianshou needs; see `envmgr.as_tianshou`.

    Invalid calls raise AssertionError and ValueError, as in tianshou's own vector envs.

    Args:
        manager: the manager; if it is not launched, the first `reset` does that. `close` closes it.
        wait_num: see `as_tianshou`.
        timeout: see `as_tianshou`.
        on_failure: see `as_tianshou`.
        adapter: the public name of this adapter, for messages.

    Attributes:
        manager: the manager.
        env_num: number of envs.
        wait_num: how many timesteps a step waits for.
        timeout: seconds after which it stops waiting.
        is_async: whether a step may return fewer than all timesteps.
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
        for name, value, kind, what in (
            ("wait_num", wait_num, numbers.Integral, "a whole number"),
            ("timeout", timeout, numbers.Real, "a number"),
        ):
            is_one = value is None or isinstance(value, kind)
            _claim(is_one, f"{name} should be {what}, found {short_text(value)}")
        self.wait_num = wait_num or n
        self.timeout = timeout
        _claim(1 <= self.wait_num <= n, f"wait_num should be 1 to {n}, found {wait_num}")
        _claim(timeout is None or timeout > 0, f"timeout should be above 0, found {timeout}")
        self.is_async = self.wait_num != n or timeout is not None
        self._under_way = _UnderWay([], [])
        self.is_closed = False
        self._all = list(range(n))
        with batches.built():
            if isinstance(manager.observation_space, Tuple):
                raise ConfigError(
                    f"{adapter}: tianshou does not take a Tuple as observation space. Wrap each "
                    "env so that it gives a Dict, or one array: for example in "
                    "gymnasium.wrappers.FlattenObservation"
                )

    @property
    def waiting_id(self) -> list[int]:
        """The envs whose timesteps are awaited, even after Ctrl-C in a step."""
        batches = self._batches
        if self.is_async:
            if self.manager.closed:  # a failure has closed it, with what was under way
                self._under_way = _UnderWay([], [])
            if batches.step is not None:  # Ctrl-C has ended `step` after it had sent
                if batches.is_stepping:
                    self._add_sent()
                batches.step = None
            return self._under_way.env_ids
        return list(cast("Step", batches.step).env_ids) if batches.is_stepping else []

    @property
    def ready_id(self) -> list[int]:
        """The envs that take an action."""
        waiting = self.waiting_id
        return [i for i in self._all if i not in waiting]

    # -- resets and seeds -------------------------------------------------------------------

    def reset(
        self, env_id: _Ids = None, **kwargs: Any
    ) -> tuple[npt.NDArray[Any], npt.NDArray[np.object_]]:
        """Begin new episodes in some envs, or in all.

        Unless the vector env is asynchronous, a step that Ctrl-C interrupted is discarded.

        Args:
            env_id: the envs to reset; None for all.
            **kwargs: `seed`, which is the same for each of these envs, and `options`.

        Returns:
            (observations, infos): (k, *shape), or an object array if observations are not arrays;
            (k,) dicts.
        """
        self._refuse_closed()
        ids = self._ids_to_reset(env_id)
        seed, options = kwargs.pop("seed", None), kwargs.pop("options", None)
        if kwargs:
            raise TypeError(f"reset takes seed and options, found {', '.join(map(repr, kwargs))}")
        seeds = None if seed is None else [seed] * self.env_num
        return self._reset(ids, seeds, options)

    def seed(self, seed: int | Sequence[int | None] | None = None) -> list[list[int] | None]:
        """Seed all envs and reset them with these seeds, as tianshou's own vector envs do.

        Args:
            seed: an int gives env i exactly `seed + i`; a list has one for each.

        Returns:
            The seeds.
        """
        self._refuse_closed()
        seeds = each_seed(seed, self.env_num) or [None] * self.env_num
        self._reset(self._ids_to_reset(None), seeds, None)
        return [None if one is None else [one] for one in seeds]

    def _reset(
        self, ids: list[int], seeds: Sequence[int | None] | None, options: Any
    ) -> tuple[npt.NDArray[Any], npt.NDArray[np.object_]]:
        batches = self._batches
        batches.reset(ids, seed=seeds, options=options)
        infos = _objects(batches.first_infos(ids))
        result = _stacked(batches.first_obs(ids), len(ids)), infos
        batches.unseen = batches.unseen.difference(ids)  # the last: they are seen now
        return result

    # -- steps ------------------------------------------------------------------------------

    def step(self, action: Any, id: _Ids = None) -> _Step:
        """Step some envs, or all.

        Args:
            action: one for each of these envs; None only gathers: what is under way if the vector
                env is asynchronous, else what a step that Ctrl-C interrupted would have returned.
            id: the envs to step; None for all.

        Returns:
            (observations, rewards, terminated, truncated, infos), in the order of `id`; if the
            vector env is asynchronous, of the timesteps that have arrived, in ascending order. Each
            info has `env_id`.

        Raises:
            AssertionError: a step of one of these envs is under way, or they have to be reset.
        """
        self._refuse_closed()
        batches = self._batches
        if action is not None:
            ids, rows = self._ready_ids(id), _plain(action)
            count = len(rows) if isinstance(rows, list) or rows.ndim else 0
            _claim(count == len(ids), f"{count} actions came for {len(ids)} envs")
            unseen = batches.unseen
            if unseen and not unseen.isdisjoint(ids):
                _claim(False, f"envs {sorted(unseen)} have to be reset first: call reset()")
            batches.send(rows, ids)
            if self.is_async:
                self._add_sent()
                batches.step = None
        if self.is_async:
            return self._gather_some()
        if action is None and not batches.is_stepping:
            raise ValueError("without wait_num and timeout every step needs actions, found None")
        ids = list(cast("Step", batches.step).env_ids)
        rows, came = cast("Rows", batches.receive()), sorted(ids)
        result = _step_of(ids, rows if came == ids else rows.at([came.index(i) for i in ids]))
        batches.step = None  # the last: they are given out
        return result

    def _add_sent(self) -> None:
        """Note that a step was sent; doing so again changes nothing."""
        waiting, arrived = self._under_way
        sent = cast("Step", self._batches.step).env_ids
        new = [i for i in sent if i not in waiting]
        self._under_way = _UnderWay([*waiting, *new], arrived)

    def _gather_some(self) -> _Step:
        waiting, arrived = self.waiting_id, self._under_way.arrived
        _claim(bool(waiting), "no step is under way: give actions for envs that are ready")
        min_ready = min(self.wait_num, len(waiting))
        batch = self._batches.receive_some(arrived, min_ready, self.timeout)
        came = batch.env_ids.tolist()
        result = _step_of(came, self._batches.rows_of(batch))
        rest = [i for i in waiting if i not in came]
        failure = self._batches.failure_in(batch)
        self._under_way = _UnderWay(rest, [])  # the last: they are given out
        if failure is not None:
            self._batches.fail(failure)
        return result

    # -- calls and attributes ---------------------------------------------------------------

    def get_env_attr(self, key: str, id: _Ids = None) -> list[Any]:
        """Return an attribute of envs; None where an env has no such attribute."""
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
        """Set an attribute of envs where it is defined, else on the env inside its wrappers.

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
        waiting = self.waiting_id
        if waiting:
            raise RuntimeError(
                f"envs {waiting} have steps under way and cannot be rendered: gather them with "
                "step(None)"
            )
        result: list[Any] = self._batches.ask("apply", env_functions.rendered, kwargs)
        return result

    # -- the rest ---------------------------------------------------------------------------

    def _known_ids(self, env_ids: _Ids) -> list[int]:
        """Return env_ids as a list."""
        ids = list(self._all) if env_ids is None else _listed(env_ids)
        known = len(set(ids)) == len(ids) and set(ids) <= set(self._all)
        _claim(known, f"env ids are 0 to {self.env_num - 1}, each once, found {short_text(ids)}")
        return ids

    def _ready_ids(self, env_ids: _Ids) -> list[int]:
        """Return env_ids as a list.

        Raises:
            AssertionError: a step of one of them is under way.
        """
        ids, waiting = self._known_ids(env_ids), self.waiting_id
        if waiting:
            busy = [i for i in ids if i in waiting]
            _claim(
                not busy,
                f"envs {busy} have steps under way: gather them with step(None)"
                + ("" if self.is_async else ", or reset()"),
            )
        return ids

    def _ids_to_reset(self, env_ids: _Ids) -> list[int]:
        """Return env_ids as a list, which may include those of a step that the reset discards.

        Raises:
            AssertionError: one of these envs has a step under way, and steps are gathered one by
                one, or the reset is not for all envs of that step.
        """
        ids = self._known_ids(env_ids)
        if self.is_async or not set(self.waiting_id) <= set(ids):
            return self._ready_ids(ids)
        return ids

    def close(self) -> None:
        """Close all envs and the manager; the results of steps under way are lost."""
        self._batches.close()
        self.is_closed = True

    def _refuse_closed(self) -> None:
        _claim(not self.is_closed, "this vector env is closed: build a new one")


class EnvmgrVectorEnv(ManagerVectorEnv):
    """A replacement for `SubprocVectorEnv` and `ShmemVectorEnv`.

    Args:
        env_fns: one factory for each env; the spaces of the envs may differ.
        wait_num: how many timesteps a step waits for, for `AsyncCollector`; None for all.
        timeout: seconds after which a step returns what has arrived, if anything has.
        share_memory: whether observations go through shared memory; None for the config's
            `shared_memory`, which is true unless it is set.
        context: how workers are started: "fork", "spawn", "forkserver", a context of
            `multiprocessing`, or None for envmgr's own way.
        on_failure: "recover", or "raise" for an exception in the trainer.
        **cfg: keys of the manager's config, such as `num_workers=2` or `step_timeout=10`.

    Raises:
        ConfigError: a key does not exist, or tianshou cannot take a space.
        LaunchError: an env cannot be built.
    """

    def __init__(
        self,
        env_fns: Sequence[Callable[[], Any]],
        wait_num: int | None = None,
        timeout: float | None = None,
        share_memory: bool | None = None,
        context: BaseContext | str | None = None,
        *,
        on_failure: str | None = None,
        **cfg: Any,
    ) -> None:
        # tianshou's policies and collectors also give Discrete actions as floats.
        given: dict[str, Any] = {
            "auto_reset": False,
            "same_spaces": False,
            "check_actions": False,
        }
        if share_memory is not None:
            given["shared_memory"] = share_memory
        if context is not None:
            given["context"] = (
                context.get_start_method() if isinstance(context, BaseContext) else context
            )
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
    """Return observations as one array, which is an array of objects if they are dicts."""
    if isinstance(obs, np.ndarray):
        return obs
    return _objects([indexed(obs, k) for k in range(count)])
