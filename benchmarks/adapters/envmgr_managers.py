"""envmgr: dicts or arrays, synchronous or with half of the envs in flight; its adapters."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from envs import HAVE_INFOS
from spec import Runner, Spec, UnavailableError

import envmgr
from adapters.actions import array_batches, list_batches
from envmgr.collect import RolloutCollector
from envmgr.errors import ConfigError, MissingDependencyError
from envmgr.tuning.loops import GymnasiumLoop, Sb3Loop, TianshouLoop, look_at


class _Managed:
    """What the loops have in common: the manager's life."""

    def __init__(self, manager: Any, spec: Spec) -> None:
        self._manager = manager
        self._env_num = spec.env_num

    def start(self) -> None:
        """Launch and take the first observations."""
        self._manager.launch()
        while len(self._manager.ready_obs) < self._env_num:
            pass

    def close(self) -> None:
        """Close."""
        self._manager.close()


class DictLoop(_Managed):
    """`step` with a dict: act on the observations that are ready."""

    def __init__(self, manager: Any, spec: Spec) -> None:
        super().__init__(manager, spec)
        self._actions = list_batches(spec)

    def step(self) -> int:
        """Act on the observations that are ready."""
        obs = self._manager.ready_obs
        timesteps = self._manager.step(dict(zip(obs, next(self._actions), strict=False)))
        for timestep in timesteps.values():
            look_at(timestep.obs)
            break
        return len(timesteps)


class V2Loop(_Managed):
    """`step` with a list: act on the rows of the observations that are ready."""

    def __init__(self, manager: Any, spec: Spec) -> None:
        super().__init__(manager, spec)
        self._actions = list_batches(spec)

    def step(self) -> int:
        """Act on the observations that are ready."""
        obs = self._manager.ready_obs
        timesteps = self._manager.step(next(self._actions)[: len(obs)])
        timesteps[0].obs.item(0)
        return len(timesteps)


class PipelinedDictLoop(DictLoop):
    """`send` and `recv`: while one half of the envs steps, the other half is handled here."""

    def start(self) -> None:
        """Launch and send the first actions."""
        super().start()
        self._manager.send(dict(enumerate(next(self._actions))))

    def step(self) -> int:
        """Receive half of the envs and send them on."""
        timesteps = self._manager.recv(min_ready=max(1, self._env_num // 2))
        for timestep in timesteps.values():
            look_at(timestep.obs)
            break
        obs = self._manager.ready_obs
        self._manager.send(dict(zip(obs, next(self._actions), strict=False)))
        return len(timesteps)


class ArrayLoop(_Managed):
    """`send_arrays` and `recv_arrays`, all envs together, or half of them in flight.

    Episodes end with the reset done (`reset_inplace`), so that all envs of a batch take the next
    action; the first observations of new episodes come from `ready_arrays`.
    """

    def __init__(self, manager: Any, spec: Spec, min_ready: int) -> None:
        super().__init__(manager, spec)
        self._actions = array_batches(spec)
        self._min_ready = min_ready
        self._reads_infos = spec.env in HAVE_INFOS

    def start(self) -> None:
        """Launch and send the first actions."""
        super().start()
        self._manager.send_arrays(list(range(self._env_num)), next(self._actions))

    def step(self) -> int:
        """Receive a batch and send its envs on."""
        manager = self._manager
        batch = manager.recv_arrays(min_ready=self._min_ready)
        look_at(batch.obs)
        if self._reads_infos:
            _read_infos(batch)
        ended = batch.ended
        if len(ended):
            look_at(manager.ready_arrays(ended).obs)
        env_ids = batch.env_ids
        manager.send_arrays(env_ids, next(self._actions)[: len(env_ids)])
        return len(env_ids)


def _read_infos(batch: Any) -> None:
    """Have the infos of a batch made, as columns where there are such."""
    if hasattr(type(batch), "info_columns"):  # of the batch itself that would make them
        len(batch.info_columns)
    else:
        list(batch.infos)


class RolloutLoop(_Managed):
    """`RolloutCollector` with a policy that returns actions drawn beforehand."""

    def __init__(self, manager: Any, spec: Spec) -> None:
        super().__init__(manager, spec)
        self._actions = array_batches(spec)

    def start(self) -> None:
        """Launch, and make the collector."""
        super().start()
        self._collector = RolloutCollector(
            self._manager, lambda obs: next(self._actions)[: len(obs)], n_steps=_ROLLOUT_STEPS
        )

    def step(self) -> int:
        """Collect a rollout."""
        rollout = self._collector.collect()
        look_at(rollout.obs)
        return _ROLLOUT_STEPS * self._env_num


_ROLLOUT_STEPS = 32
_VECTOR_ENVS: dict[str, Callable[[Any], Any]] = {
    "NextStep": functools.partial(envmgr.as_gymnasium, autoreset_mode="NextStep"),
    "SameStep": functools.partial(envmgr.as_gymnasium, autoreset_mode="SameStep"),
    "sb3": envmgr.as_sb3,
    "tianshou": envmgr.as_tianshou,
}


def vector_env(spec: Spec, factory: Callable[[], Any]) -> Any:
    """Return the adapter `options["form"]` over a manager of its `cfg`.

    Raises:
        UnavailableError: this envmgr refuses the config, or a trainer is missing.
    """
    return _made(lambda: _VECTOR_ENVS[spec.options["form"]](_manager_of(spec, factory)))


def _manager_of(spec: Spec, factory: Callable[[], Any]) -> Any:
    return envmgr.make(factory, spec.env_num, seed=0, **spec.options["cfg"])


def _made(make: Callable[[], Any]) -> Any:
    try:
        return make()
    except ConfigError as error:
        raise UnavailableError(f"the config is refused: {error}") from error
    except MissingDependencyError as error:
        raise UnavailableError(str(error)) from error


def open_runner(spec: Spec, factory: Callable[[], Any]) -> Runner:
    """Return the loop of `options["form"]` over a manager of its `cfg`.

    Forms are `dict`, `arrays`, `v2` and `rollout`; `NextStep` and `SameStep` are modes of
    `as_gymnasium`; `sb3` and `tianshou` are the adapters for these.

    Raises:
        UnavailableError: this envmgr refuses the config, treetensor or a trainer is missing, or
            there is a GIL where none is asked for.
    """
    env_num, form = spec.env_num, spec.options["form"]
    if spec.options.get("no_gil") and getattr(sys, "_is_gil_enabled", lambda: True)():
        raise UnavailableError("not run: this Python has a GIL")
    if form in _VECTOR_ENVS:
        build = functools.partial(vector_env, spec, factory)
        actions = array_batches(spec)
        if form == "sb3":
            return Sb3Loop(build, env_num, actions)
        if form == "tianshou":
            return TianshouLoop(build, env_num, actions)
        return GymnasiumLoop(build, env_num, actions, resets_at_once=form == "SameStep")
    manager = _made(lambda: _manager_of(spec, factory))
    if form == "rollout":
        return RolloutLoop(manager, spec)
    if form == "v2":
        return V2Loop(manager, spec)
    pipelined = spec.options.get("pipelined", False)
    if form == "arrays":
        return ArrayLoop(manager, spec, max(1, env_num // 2) if pipelined else env_num)
    return (PipelinedDictLoop if pipelined else DictLoop)(manager, spec)
